"""Should a member federate? Sides by how much text each member has, all with the same care.

In:       ten genres (`mixgenre-en`) and fifteen languages (`eltec-15lang`); a share of each leaf's
          training text.
Out:      a small file per cell in `benchmarks/results/pays`; a table and a drawing of those files.
Promise:  every side gets the same model, rates, weight decay, patience and most steps, and two
          runs: one at the first rate, in which an optimiser is kept from round to round, then own
          steps at a third of it, from a federation's model or from one's own. Every leaf keeps the
          best model on its way, by its own text to choose by, and makes a model its own by the same
          ways; the figure is of rows that neither training, stopping nor any personal choice saw,
          the same for all sides and shares. No line of a table has tried more rates than the
          others of its share. What needs two models at every prediction (a leaf's fine-tuned one
          and its own) has a line of its own, beside two models of the leaf's own text. Killed at
          any moment, the same command goes on; what other settings or rules have made is not
          found again.
Not here: the files (`cells.py`), personal models (`personal/ways.py`), `fedlm advise`, which asks
          the same of a user's own text.

    python -m benchmarks.pays --plan                  # cells in the order of their worth, in TFLOP
    python -m benchmarks.pays --hours 2               # make those that are missing, in that order
    python -m benchmarks.pays --corpus mixgenre --share 0.1 --side local
    python -m benchmarks.pays --without-again ...     # a third of the time per leaf, fewer lines
    python -m benchmarks.pays --table                 # from the kept files alone

| rows of a leaf | local | federation | personal |
|---|---|---|---|
| training text, or a share of it | learns, twice | learns, with that of all leaves | learns |
| every second held-out row | stops | stops | stops, and chooses |
| the others | the figure | the figure | the figure |
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cells import (
    RESULTS,
    Cells,
    Facts,
    claimed,
    deadline,
    facts_digest,
    plain_name,
    recipe_digest,
    work_folder,
)
from benchmarks.comparison import best_weights, figures_of
from benchmarks.engines import flops
from fedlm.core import tree
from fedlm.core.durable import write_atomically
from fedlm.core.types import PAD, Params
from fedlm.corpus.store import Store
from fedlm.engine.devices import use_devices
from fedlm.inference import load_params
from fedlm.methods.optimizers import client_optimizer
from fedlm.models import catalog
from fedlm.personal.members import OwnText, members_of
from fedlm.personal.model import Personal, Scorer, mixture_perplexity
from fedlm.personal.ways import (
    CACHE_SHARES,
    Attempt,
    TrainedModel,
    Workshop,
    attempt_all,
    finetune_and_cache,
    finetune_local_and_cache,
)
from fedlm.personal.ways import SHARES as SHARES_OF_OWN
from fedlm.recipe import parts
from fedlm.recipe.assemble import loss_of
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.svg import Series, lines, with_names
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.advise import cut_store
from fedlm.search.sweep import FAILED, markdown, over_seeds, train_point
from fedlm.training import Watcher

STORES = Path(".fedlm/stores")
RECIPES = Path(__file__).parents[1] / "recipes"
CORPORA = {"mixgenre": RECIPES / "mixgenre-tree.toml", "eltec": RECIPES / "eltec-tree.toml"}
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
RATES = (0.003, 0.001)
SEEDS = (0, 1, 2)
STEPS, EVERY, PATIENCE = 32, 4, 4
# The most rounds by share of the text. With less than a third of it local training stops by itself
# before; at a tenth the flat federation would go on.
ROUNDS = {0.01: 96, 0.03: 96, 0.1: 96, 0.3: 256, 1.0: 256}
WEIGHT_DECAY, CLIP, OWN_RATE = 0.1, 1.0, 1 / 3  # of the first rate, for own steps
LOOKS = 4  # at least, in a pass over a leaf's text: a short text is learned within a few steps
BLOCKS = 40  # of a leaf's rows to report, whose sums tell how sure a difference is
# Of rules that no setting names: another one trains all cells again, or makes models personal anew.
TRAINING_VERSION, CHOICE_VERSION = 1, 1
# 1,042,432 numbers, 786,432 of them in the blocks.
MODEL = ("model.embedding_size=128", "model.hidden_size=512", "model.layers=4", "model.heads=4")
CARE = (
    *("client.optimizer=adamw", f"client.weight_decay={WEIGHT_DECAY}", "client.batch_size=16"),
    *(f"client.gradient_clip_norm={CLIP}", f"client.max_steps={STEPS}"),
    *("federation.keep_optimizer=true", "data.validation=0.04", "server.evaluate_rows=0"),
    *(f"server.evaluate_every={EVERY}", f"server.patience={PATIENCE}", "run.devices=1"),
    *(f"run.checkpoint_every={EVERY}", "run.keep_checkpoints=1", "run.baselines=false"),
    "run.trackers=[]",
)
FLAT = ("federation.node=[]", "federation.personal_layers=none")
LEAF_LEVEL = {"mixgenre": 0, "eltec": 1}  # of the groups that are leaves
AVERAGED = ('federation.optimizer=["fedavg"]', "federation.learning_rate=[1.0]")
# The leaves' rate over the whole run: up for four rounds, then down to a tenth.
COSINE = ("client.schedule=cosine", "client.warmup_rounds=4", "client.final_fraction=0.1")
LOCAL, TWICE, CENTRAL = "local", "two local models", "central"
ANNEALED = "local, cosine"  # the control of federations whose rate follows a cosine
ANNEALED_PASSES = (4, 8, 16)  # a leaf tries all of these lengths, and takes the best
ALONE = (LOCAL, ANNEALED, TWICE)
# Federations by name; those that come first are worth most.
FEDERATIONS: dict[str, tuple[str, ...]] = {
    "flat averaging": (*FLAT, *AVERAGED),
    "flat Nesterov": FLAT,
    "WorldLM": (
        "federation.personal_layers=last 0.3 + embedding",
        "federation.compare=root",
    ),
    "flat Nesterov, cosine": (*FLAT, *COSINE),
    "flat averaging, cosine": (*FLAT, *AVERAGED, *COSINE),
    "flat averaging, Muon": (*FLAT, *AVERAGED, "client.optimizer=muon"),
}
SIDES = (LOCAL, ANNEALED, TWICE, *FEDERATIONS, CENTRAL)
HEADLINE = (LOCAL, "flat averaging", "flat Nesterov", "WorldLM", CENTRAL)
# What a leaf makes of the model of a first run, the federation's or its own; the rows to choose by
# decide among them.
WAYS = ("federated", "finetune", "weights", "logits", "cache", "finetune+cache")
CHOSEN = "chosen"
ONE = "chosen, one model"  # of the ways that need one model at a prediction
TWO_MODELS = "logits"
# The whole of local training, at both rates, from a federation's model; with a cache.
TRAINED_ON = "trained on"
# Two models at every prediction: a line of its own, beside two models of a leaf's own text.
MIXED = "finetune+local+cache"
BASELINE = "local, personal"  # the best that a leaf can do alone: what others are compared with
HEAD = ["text", "tokens per leaf", "side", "seeds", "rates", "perplexity, mean of leaves"]
HEAD += ["below local, geometric", "with one model", "better", "hurt", "rounds"]
HEIGHT = 360
CLEAR = 2.0  # standard errors, beyond which a leaf counts as better or hurt
TARGETS = "targets"


@dataclass(frozen=True)
class Cell:
    """One side at one share of the text, with one rate and seed."""

    corpus: str
    share: float
    side: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.corpus} {self.share:g} {self.side} rate {self.rate:g} seed {self.seed}"


def stages() -> Iterator[Cell]:
    """Yield all cells, those first that are worth most."""
    first, second = RATES[0], RATES[1]
    for corpus, shares, sides, rates, seeds in (
        ("mixgenre", (0.1, 1.0), HEADLINE, (first,), SEEDS[:1]),
        ("mixgenre", (0.1,), HEADLINE, (first,), SEEDS[1:]),
        ("mixgenre", (0.01, 0.03), HEADLINE, (first,), SEEDS[:1]),
        ("mixgenre", (0.1,), HEADLINE, (second,), SEEDS[:1]),
        ("eltec", (0.1, 1.0), HEADLINE, (first,), SEEDS[:1]),
        ("mixgenre", (0.3,), HEADLINE, (first,), SEEDS[:1]),
        ("mixgenre", (1.0,), HEADLINE, (first,), SEEDS[1:]),
        ("mixgenre", (0.1,), SIDES, (first,), SEEDS[:1]),
        ("mixgenre", SHARES, HEADLINE, RATES, SEEDS),
        ("eltec", SHARES, HEADLINE, RATES, SEEDS),
        ("mixgenre", SHARES, SIDES, RATES, SEEDS),
        ("eltec", SHARES, SIDES, RATES, SEEDS),
    ):
        for seed in seeds:
            for share in shares:
                for rate in rates:
                    for side in sides:
                        yield Cell(corpus, share, side, rate, seed)


def ordered(wanted: Callable[[Cell], bool]) -> list[Cell]:
    """Return the cells that are wanted, each once, in the order of their worth."""
    return [cell for cell in dict.fromkeys(stages()) if wanted(cell)]


# ---- what a cell is made of ----------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long cells are, and how large; `--smoke` makes both small."""

    rounds: int | None = None  # the most; None: those of the share
    more: tuple[str, ...] = ()  # changes of every recipe


def recipe_of(cell: Cell, size: Size) -> Recipe:
    """Return the recipe of a cell's federation; of other sides, of the one they compare with."""
    side = FEDERATIONS.get(cell.side, FEDERATIONS["flat averaging"])
    if side[: len(FLAT)] == FLAT:
        side = (*side, f"federation.levels=[{LEAF_LEVEL[cell.corpus]}]")
    changes = (
        *(*MODEL, *CARE, f"client.learning_rate={cell.rate}", f"run.seed={cell.seed}"),
        *(f"server.rounds={size.rounds or ROUNDS[cell.share]}", *side, *size.more),
    )
    return load(CORPORA[cell.corpus], changes)


def training_digest(cell: Cell, size: Size) -> str:
    """Return the digest of all that decides the runs and models of a cell."""
    made = recipe_digest(recipe_of(cell, size))
    care = [TRAINING_VERSION, OWN_RATE, LOOKS, PATIENCE, EVERY]
    care += ANNEALED_PASSES if cell.side == ANNEALED else ()
    return facts_digest({"recipe": made, "side": cell.side, "share": cell.share, "care": care})


def digest_of(cell: Cell, size: Size) -> str:
    """Return the digest of all that decides a cell, what leaves make of its models included."""
    choice = [CHOICE_VERSION, *WAYS, *SHARES_OF_OWN, *CACHE_SHARES, BLOCKS]
    return facts_digest({"training": training_digest(cell, size), "choice": choice})


def folder_of(cell: Cell, size: Size, out: Path) -> Path:
    """Return where a cell's runs and models are: those of other settings are elsewhere."""
    return work_folder(out, cell.name, training_digest(cell, size))


class Place(NamedTuple):
    """A corpus at a share of its text, ready to train on."""

    run: Run  # of the cell's recipe
    members: list[OwnText]  # in the order of the leaves' names

    @property
    def tokens(self) -> float:
        """Target tokens to learn from, the mean over leaves."""
        return statistics.fmean(targets(member.own) for member in self.members)


def targets(rows: np.ndarray) -> int:
    """Return how many tokens rows predict."""
    return int(np.count_nonzero(rows[:, 1:] != PAD))


def prepare(cell: Cell, size: Size, out: Path) -> Place:
    """Return a cell's run, on a store of its share of the text, and its leaves."""
    recipe = recipe_of(cell, size)
    text = facts_digest(json.loads(recipe.data.model_dump_json()))
    path = out / "stores" / f"{cell.corpus}-{cell.share:g}-{text}"
    with claimed(out / "stores", wait=True):  # another command may need it at the same time
        if not path.exists():
            whole = build(recipe, STORES, out=out / "none").store
            assert isinstance(whole, Store)
            cut_store(whole, cell.share, path)
    given = recipe.data.model_dump(include={"layout", "sequence_length"})
    data = type(recipe.data)(store=str(path.resolve()), **given)  # all else is the store's
    recipe = recipe.model_copy(update={"data": data})
    run = build(recipe, STORES, out=folder_of(cell, size, out) / "run")
    # Numbers decide orders of rows: those of a flat tree for all sides, whose own trees differ.
    level, store = LEAF_LEVEL[cell.corpus], run.store
    groups = dict.fromkeys(store.groups(int(n))[level] for n in store.training_clients)
    number = {name: n for n, name in enumerate(groups)}
    members = [replace(member, number=number[member.name]) for member in members_of(run)]
    return Place(run, sorted(members, key=lambda member: member.name))


@dataclass
class Bench:
    """The programs that cells have in common."""

    size: Size
    out: Path
    again: bool = True  # whether leaves repeat local training from a federation's model
    scorer: Scorer = field(default_factory=Scorer)
    _shop: Workshop | None = None

    def shop(
        self, place: Place, rate: float, batches: int, members: int = 1, seed: int | None = None
    ) -> Workshop:
        """Return a workshop whose members stop and end as a federation's rounds do.

        `batches` are those of a pass over a member's text, or over that of so many members. They
        look at least as often as rounds do, and are as patient, counted in steps. `seed` decides
        starts and orders, by default that of the place.
        """
        recipe = place.run.recipe
        if seed is not None:
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})
        spec = parts.model_spec(recipe, place.run.store.vocabulary)
        if self._shop is None:
            self._shop = Workshop(
                federated=None,
                fresh=lambda: None,
                optimizer=client_optimizer("adamw", 1.0, weight_decay=WEIGHT_DECAY, clip=CLIP),
                vocabulary=place.run.store.vocabulary,
                batch_size=recipe.client.batch_size,
                patience=PATIENCE,
                scorer=self.scorer,
                loss=loss_of(recipe),
            )
        steps = min(recipe.client.max_steps or STEPS, -(-batches // members)) * members
        made = self._shop.at_scale(rate)  # a copy, with the same programs
        made.fresh = lambda: catalog.make(spec.architecture, spec.size, parts.start_key(recipe))
        made.seed = recipe.run.seed
        made.look_every, made.patience = looks(steps, batches)
        made.most_steps = recipe.server.rounds * steps
        made.passes = math.ceil(made.most_steps / max(1, batches))
        return made

    def report(self, model: Personal, member: OwnText) -> float:
        """Return a personal model's perplexity on the rows that chose nothing."""
        return mixture_perplexity(model.nats(member.report, self.scorer), member.report)

    def blocks(self, models: dict[str, Personal], member: OwnText) -> dict[str, list[float]]:
        """Return the targets of blocks of the rows that chose nothing, and the nats of models.

        Rows stand client by client, so that a block has text of few clients: what rows of one
        text have in common is between blocks, not within them.
        """
        count = np.count_nonzero(member.report[:, 1:] != PAD, axis=1)
        found = {w: m.nats(member.report, self.scorer).sum(axis=1) for w, m in models.items()}
        return {
            name: [round(float(part.sum()), 3) for part in np.array_split(x, BLOCKS)]
            for name, x in {TARGETS: count, **found}.items()
        }


def looks(steps: int, batches: int) -> tuple[int, int]:
    """Return the steps between two looks of own training, and how many looks its patience has.

    `steps` are those of a round, `batches` those of a pass over the text.
    """
    every = min(EVERY * steps, max(1, batches // LOOKS))
    return every, math.ceil(PATIENCE * EVERY * steps / every)


def batches_of(rows: np.ndarray, place: Place) -> int:
    """Return how many batches a pass over rows has."""
    return -(-len(rows) // place.run.recipe.client.batch_size)


# ---- the sides -----------------------------------------------------------------------------------


class Made(NamedTuple):
    """What a leaf made of the model of a first run, by each way and by the one that it chose."""

    figures: dict[str, float]  # of rows that chose nothing
    scores: dict[str, float]  # by which one was chosen
    blocks: dict[str, list[float]]  # of the models that the table shows


def told_of(made: dict[str, Made]) -> Facts:
    """Return what leaves made, as it is kept."""
    return {
        "leaves": {name: each.figures for name, each in made.items()},
        "choose": {name: each.scores for name, each in made.items()},
        "blocks": {name: each.blocks for name, each in made.items()},
    }


def local(bench: Bench, cell: Cell, place: Place) -> Facts:
    """Train every leaf on its own text alone, until its own rows to choose by get no better.

    What its first run made takes the place of the federation's model in all that follows.
    """
    made, passes = {}, []
    for member in place.members:
        first = trained_alone(bench, cell, place, member)
        second = settled_alone(bench, cell, place, member)
        made[member.name] = personal(bench, cell, place, member, first.params)
        passes.append((first.passes, second.passes))
    return {**told_of(made), "passes": passes}


def trained_alone(bench: Bench, cell: Cell, place: Place, member: OwnText) -> TrainedModel:
    """Return a leaf's model of its own text alone, at the first rate."""
    if cell.side == ANNEALED:
        return annealed_alone(bench, cell, place, member)
    shop = bench.shop(place, cell.rate, batches_of(member.own, place), seed=cell.seed)

    def make() -> TrainedModel:
        return shop.train(shop.fresh(), member.own, member.choose, member.number)

    return kept_model(local_file(bench, cell, member, "first"), shop.fresh(), make)


def annealed_alone(bench: Bench, cell: Cell, place: Place, member: OwnText) -> TrainedModel:
    """Return a leaf's model of its own text alone whose rate followed a cosine.

    The length of such a run must be known at its start: every length of `ANNEALED_PASSES` is
    played, and the rows to choose by decide. The federation's has one length.
    """
    batches = batches_of(member.own, place)
    made = []
    for passes in ANNEALED_PASSES:
        shop = bench.shop(place, cell.rate, batches, seed=cell.seed)
        shop.passes, shop.most_steps, shop.shape = passes, passes * batches, cosine
        shop.patience = passes * batches  # to the end
        start = shop.fresh()
        train = partial(shop.train, start, member.own, member.choose, member.number)
        file = local_file(bench, cell, member, f"cosine-{passes}")
        made.append(kept_model(file, start, train))
    return min(made, key=lambda one: shop.perplexity(one.params, member.choose))


def cosine(done: float) -> float:
    """Return the part of the rate after a part of a run: up for a 24th of it, down to a tenth.

    >>> [round(cosine(x), 2) for x in (0.0, 1 / 24, 0.5, 1.0)]
    [0.0, 1.0, 0.59, 0.1]
    """
    warm = 1 / 24  # as four rounds of 96
    if done < warm:
        return done / warm
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2


def settled_alone(bench: Bench, cell: Cell, place: Place, member: OwnText) -> TrainedModel:
    """Return a leaf's model of its own text alone, trained on at the rate of own steps."""
    shop = bench.shop(place, OWN_RATE * cell.rate, batches_of(member.own, place), seed=cell.seed)
    start = trained_alone(bench, cell, place, member)

    def make() -> TrainedModel:
        return shop.train(
            start.params, member.own, member.choose, member.number, after=start.passes
        )

    return kept_model(local_file(bench, cell, member, "second"), start.params, make)


def both_runs(bench: Bench, cell: Cell, place: Place, member: OwnText) -> TrainedModel:
    """Return a leaf's model of its own text alone, with the passes of both runs."""
    first, second = (f(bench, cell, place, member) for f in (trained_alone, settled_alone))
    return second._replace(passes=first.passes + second.passes)


def local_file(bench: Bench, cell: Cell, member: OwnText, run: str) -> Path:
    """Return where a leaf's own model after a run is: that of the local side, for all sides."""
    side = ANNEALED if cell.side == ANNEALED else LOCAL
    alone = Cell(cell.corpus, cell.share, side, cell.rate, cell.seed)
    return folder_of(alone, bench.size, bench.out) / f"{plain_name(member.name)}-{run}.npz"


def kept_model(file: Path, like: Params, make: Callable[[], TrainedModel]) -> TrainedModel:
    """Return a model from its file, after making it if it is not there."""
    if not file.is_file():
        made = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        leaves = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(made.params).items()}
        part = file.with_suffix(f".{os.getpid()}.part.npz")  # another process may make it too
        np.savez(part, passes=made.passes, **{f"leaf.{k}": v for k, v in leaves.items()})
        part.replace(file)
    with np.load(file) as kept:
        leaves = {name: kept[f"leaf.{name}"] for name in tree.named_leaves(like)}
        return TrainedModel(tree.with_leaves(like, leaves), float(kept["passes"]))


def central(bench: Bench, cell: Cell, place: Place) -> Facts:
    """Train one model on the text of all leaves, which no member may do: the bound."""
    own = np.concatenate([member.own for member in place.members])
    choose = np.concatenate([member.choose for member in place.members])
    batches, folder = batches_of(own, place), folder_of(cell, bench.size, bench.out)
    passes: list[float] = []
    params = None
    for run, rate in (("first", cell.rate), ("second", OWN_RATE * cell.rate)):
        shop = bench.shop(place, rate, batches, len(place.members))
        start = shop.fresh() if params is None else params
        train = partial(shop.train, start, own, choose, 0, after=sum(passes))
        made = kept_model(folder / f"{run}.npz", start, train)
        params = made.params
        passes.append(made.passes)

    def scored(rows: Callable[[OwnText], np.ndarray]) -> Facts:
        return {
            m.name: {CENTRAL: mixture_perplexity(bench.scorer.nats(params, rows(m)), rows(m))}
            for m in place.members
        }

    model = Personal(CENTRAL, params)
    return {
        "leaves": scored(lambda m: m.report),
        "choose": scored(lambda m: m.choose),
        "blocks": {m.name: bench.blocks({CENTRAL: model}, m) for m in place.members},
        "passes": [passes],
    }


def federation(bench: Bench, cell: Cell, place: Place) -> Facts:
    """Train a federation, then let every leaf make its best received model its own."""
    run, directory = splits.for_choosing(place.run), place.run.record
    ended = directory.summary.is_file() or (directory.path / FAILED).is_file()
    if not ended and not train_point(run, _watcher()):
        raise KeyboardInterrupt
    figures = figures_of(directory.path)
    if figures["diverged"]:
        return {**figures, **told_of({})}
    made = {}
    for member in place.members:
        weights = best_weights(directory, member.node)
        model = load_params(run.recipe.model, run.store.vocabulary, weights)
        made[member.name] = personal(bench, cell, place, member, model)
    return {**figures, **told_of(made)}


def personal(bench: Bench, cell: Cell, place: Place, member: OwnText, model: Params) -> Made:
    """Return what a leaf makes of the model of a first run, which is the federation's or its own.

    Own steps on its own model are its second run; mixtures may take that one too, or, of two
    local models, the one from another start. From a federation's model a leaf also trains on as
    local training does, at both rates, and goes on with the better of the two.
    """
    shop = bench.shop(place, OWN_RATE * cell.rate, batches_of(member.own, place))
    shop.federated = model
    at = Attempt(shop, member.own, member.choose, member.number)
    at.__dict__["alone"] = both_runs(bench, cell, place, member)
    if cell.side in ALONE:
        at.__dict__["tuned"] = settled_alone(bench, cell, place, member)
        if cell.side == TWICE:
            other = replace(cell, seed=cell.seed + len(SEEDS))
            at.__dict__["alone"] = both_runs(bench, other, place, member)
    else:
        file = place.run.record.path.parent / f"{plain_name(member.name)}-own.npz"
        steps = partial(shop.train, model, member.own, member.choose, member.number)
        at.__dict__["tuned"] = kept_model(file, model, steps)
    made = attempt_all(at, WAYS)
    if cell.side in FEDERATIONS and bench.again:
        again = trained_on(bench, cell, place, member, model)
        at.__dict__["tuned"] = min(
            (at.tuned, again), key=lambda one: shop.perplexity(one.params, member.choose)
        )
        made[TRAINED_ON] = finetune_and_cache(at)
    if TRAINED_ON in made or cell.side == TWICE:
        made[MIXED] = finetune_local_and_cache(at)
    scores = {way: at.score(each) for way, each in made.items()}
    figures = {way: bench.report(each, member) for way, each in made.items()}
    best = min(WAYS, key=scores.__getitem__)
    said = ", ".join(f"{way} {found:.1f}" for way, found in figures.items())
    print(f"  {member.name}: {said}", flush=True)
    return Made(
        {**figures, CHOSEN: figures[best]},
        {**scores, CHOSEN: scores[best]},
        bench.blocks(
            {
                CHOSEN: made[best],
                **{way: made[way] for way in (*WAYS[:2], TRAINED_ON, MIXED) if way in made},
            },
            member,
        ),
    )


def trained_on(
    bench: Bench, cell: Cell, place: Place, member: OwnText, model: Params, runs: int = 2
) -> TrainedModel:
    """Return a model after all of local training on a leaf's own text, or after its first run."""
    folder, passes = place.run.record.path.parent, 0.0
    for run, rate in (("first", cell.rate), ("second", OWN_RATE * cell.rate))[:runs]:
        shop = bench.shop(place, rate, batches_of(member.own, place))
        file = folder / f"{plain_name(member.name)}-again-{run}.npz"
        steps = partial(shop.train, model, member.own, member.choose, member.number, after=passes)
        made = kept_model(file, model, steps)
        model, passes = made.params, passes + made.passes
    return made._replace(passes=passes)


def make(bench: Bench, cell: Cell, cells: Cells) -> None:
    """Make one cell and keep it."""
    print(cell.name, flush=True)
    began, place = time.process_time(), prepare(cell, bench.size, bench.out)
    sides = {**dict.fromkeys(ALONE, local), CENTRAL: central}
    found = sides.get(cell.side, federation)(bench, cell, place)
    spec = parts.model_spec(place.run.recipe, place.run.store.vocabulary)
    facts = {
        "corpus": cell.corpus,
        "share": cell.share,
        "side": cell.side,
        "settings": [f"client.learning_rate={cell.rate}", *FEDERATIONS.get(cell.side, ())],
        "rate": cell.rate,
        "seed": cell.seed,
        "tokens_per_leaf": place.tokens,
        "parameters": spec.parameters,
        **found,
        "core_seconds": time.process_time() - began,
    }
    cells.write(cell.name, digest_of(cell, bench.size), facts)


# ---- the table -----------------------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the table: a side, or what leaves make of it, at one share of one corpus."""

    label: str
    side: str
    way: str


def rows_of(side: str) -> list[Row]:
    """Return the lines of a side."""
    if side == CENTRAL:
        return [Row(side, side, side)]
    if side == LOCAL:
        once = Row(f"{side}, first rate alone", side, "federated")
        return [once, Row(side, side, "finetune"), Row(BASELINE, side, CHOSEN)]
    if side == TWICE:
        return [Row(f"{side}, personal", side, MIXED)]
    return [
        Row(side, side, "federated"),
        Row(f"{side}, fine-tuned", side, "finetune"),
        Row(f"{side}, personal", side, CHOSEN),
        Row(f"{side}, {TRAINED_ON}", side, TRAINED_ON),
        Row(f"{side}, {TRAINED_ON}, and a local model", side, MIXED),
    ]


def kept(cells: Cells, size: Size) -> dict[Cell, Facts]:
    """Return all cells that are there."""
    found = {cell: cells.read(cell.name, digest_of(cell, size)) for cell in ordered(lambda c: True)}
    return {cell: one_model(facts) for cell, facts in found.items() if facts is not None}


def one_model(facts: Facts) -> Facts:
    """Return a cell with what leaves would have chosen had they not mixed two models' logits.

    A leaf alone can only mix two moments of one training; a federation's leaf has two models.
    """
    told = {which: {n: dict(w) for n, w in facts[which].items()} for which in ("leaves", "choose")}
    for leaf, scores in told["choose"].items():
        ways = [way for way in WAYS if way in scores and way != TWO_MODELS]
        if ways:
            best = min(ways, key=scores.__getitem__)
            for which in told.values():
                which[leaf][ONE] = which[leaf][best]
    return {**facts, **told}


def mean(facts: Facts, which: str, way: str) -> float:
    """Return the mean of a way's perplexity over leaves; infinity if the side diverged."""
    found = [ways[way] for ways in facts[which].values() if way in ways]
    return statistics.fmean(found) if found else math.inf


def at_best_rate(found: dict[Cell, Facts], row: Row) -> dict[int, Facts]:
    """Return a line's cells by seed, each at the rate that the rows to choose by decide for."""
    best: dict[int, Facts] = {}
    for seed in sorted({cell.seed for cell in found}):
        rates = common_rates(found, seed)
        tried = [
            f
            for c, f in found.items()
            if (c.side, c.seed) == (row.side, seed) and c.rate in rates and has(f, row.way)
        ]
        if tried:
            best[seed] = min(tried, key=lambda facts: mean(facts, "choose", row.way))
    return best


def has(facts: Facts, way: str) -> bool:
    """Return whether a cell knows a way; one that diverged stands for all of them."""
    return not facts["leaves"] or any(way in ways for ways in facts["leaves"].values())


def common_rates(found: dict[Cell, Facts], seed: int) -> list[float]:
    """Return the rates that every side was given with a seed, or the first: none gets more care."""
    here = [cell for cell in found if cell.seed == seed]
    sides = {cell.side for cell in here}
    every = [rate for rate in RATES if {c.side for c in here if c.rate == rate} == sides]
    return every or [next(rate for rate in RATES if any(c.rate == rate for c in here))]


class Line(NamedTuple):
    """The figures of one line of the table."""

    row: Row
    share: float
    tokens: float
    seeds: int
    rates: int
    perplexity: list[float]  # by seed, the mean over leaves
    below: list[float]  # by seed and leaf, the logarithm of its perplexity over that alone
    one: list[float]  # the same where both choose among ways of one model; of `CHOSEN` alone
    errors: list[float]  # the standard errors of these
    rounds: list[float]


def table_of(found: dict[Cell, Facts], share: float) -> list[Line]:
    """Return the lines of one share of one corpus."""
    here = {cell: facts for cell, facts in found.items() if cell.share == share}
    if not here:
        return []
    rates = min(len(common_rates(here, seed)) for seed in {cell.seed for cell in here})
    alone = at_best_rate(here, Row(BASELINE, LOCAL, CHOSEN))
    made = []
    for row in (row for side in SIDES for row in rows_of(side)):
        best = at_best_rate(here, row)
        if not best:
            continue
        pairs = [
            (ways[row.way], alone[seed]["leaves"][leaf][CHOSEN], facts, alone[seed], leaf)
            for seed, facts in best.items()
            if seed in alone
            for leaf, ways in facts["leaves"].items()
        ]
        cells = list(best.values())
        made.append(
            Line(
                row,
                share,
                cells[0]["tokens_per_leaf"],
                len(best),
                rates,
                [mean(facts, "leaves", row.way) for facts in cells],
                [math.log(own / local) for own, local, *_ in pairs],
                [
                    math.log(facts["leaves"][leaf][ONE] / other["leaves"][leaf][ONE])
                    for _, _, facts, other, leaf in pairs
                    if row.way == CHOSEN
                ],
                [error_of(a, row.way, b, leaf) for _, _, a, b, leaf in pairs],
                [facts["rounds"] for facts in cells if "rounds" in facts],
            )
        )
    return made


def error_of(side: Facts, way: str, alone: Facts, leaf: str) -> float:
    """Return the standard error of the nats per target between a leaf's model and its own alone.

    Both are of the same rows, so blocks are compared one by one. It is the error of the text to
    report on: another seed may move a figure by more.
    """
    mine, other = side["blocks"][leaf], alone["blocks"][leaf]
    assert mine[TARGETS] == other[TARGETS], f"{leaf}: blocks of other rows"
    count = np.asarray(mine[TARGETS])
    apart = np.asarray(mine[way]) - np.asarray(other[CHOSEN])
    left = apart - count * apart.sum() / count.sum()
    return float(math.sqrt(len(left) / (len(left) - 1) * np.sum(left**2)) / count.sum())


def shown(line: Line) -> list[str]:
    """Return a line as text."""
    alone = line.row.label == BASELINE or not line.below
    gain = 0.0 if alone else 1 - math.exp(statistics.fmean(line.below))
    apart = list(zip(line.below, line.errors, strict=True))
    better, hurt = (sum(s * value > CLEAR * error for value, error in apart) for s in (-1, 1))
    return [
        f"{line.share:.0%}",
        f"{line.tokens:,.0f}",
        line.row.label,
        str(line.seeds),
        str(line.rates),
        over_seeds(line.perplexity),
        "-" if alone else f"{gain:.0%}",
        "-" if alone or not line.one else f"{1 - math.exp(statistics.fmean(line.one)):.0%}",
        "-" if alone else f"{better} of {len(line.below)}",
        "-" if alone else f"{hurt} of {len(line.below)}",
        over_seeds(line.rounds, 0) if line.rounds else "-",
    ]


def drawn(found: list[Line]) -> str:
    """Draw perplexity over the tokens of a leaf, a curve per line of the table."""
    labels = list(dict.fromkeys(line.row.label for line in found))
    series = []
    for number, label in enumerate(labels):
        points = sorted(
            (line.tokens, statistics.fmean(line.perplexity))
            for line in found
            if line.row.label == label and all(map(math.isfinite, line.perplexity))
        )
        if points:
            series.append(Series(label, [a for a, _ in points], [b for _, b in points], number))
    chart = lines(
        series, x="tokens per leaf", y="perplexity", log_x=True, log_y=True, height=HEIGHT
    )
    return with_names(chart, [(one.name, one.colour) for one in series], HEIGHT)


def tell(cells: Cells, size: Size) -> str:
    """Return the tables of what is kept, and draw each beside the files."""
    found, said = kept(cells, size), ""
    for corpus in CORPORA:
        here = {cell: facts for cell, facts in found.items() if cell.corpus == corpus}
        table = [line for share in SHARES for line in table_of(here, share)]
        if table:
            write_atomically(cells.folder / f"{corpus}.svg", drawn(table).encode())
            said += f"{corpus}\n\n{markdown(HEAD, [shown(line) for line in table])}\n"
    return said or f"No cell is kept yet in {cells.folder}.\n"


# ---- what cells cost -----------------------------------------------------------------------------


def estimate(cell: Cell, size: Size, out: Path) -> float:
    """Return the most TFLOP that a cell takes: all rounds, every look, all personal steps."""
    place = prepare(cell, size, out)
    recipe = place.run.recipe
    spec = parts.model_spec(recipe, place.run.store.vocabulary)
    per_token = flops(spec.shapes(), spec.size, recipe.data.sequence_length)
    batch = recipe.client.batch_size * recipe.data.sequence_length
    most = recipe.client.max_steps or STEPS
    steps = sum(min(most, batches_of(m.own, place)) for m in place.members)
    looked = sum(targets(m.choose) for m in place.members) / 3  # forward alone
    models = 2 if cell.side in FEDERATIONS else 1  # as received, and after own steps
    rounds = recipe.server.rounds
    learned = rounds * steps * batch + rounds / EVERY * models * looked
    own = rounds / 4 * steps * batch + 20 * looked  # stops early: a quarter is much
    return (learned + own) * per_token / 1e12


def _watcher() -> Watcher:
    def on_round(told: Any) -> None:
        found = told.get("perplexity")
        if found is not None and math.isfinite(found):
            own = told.get("personal_perplexity")
            after = "" if own is None else f", after own steps {own:.1f}"
            print(f"  round {told['round'] + 1}, perplexity {found:.1f}{after}", flush=True)

    return Watcher(round=on_round)


SMOKE = Size(
    2,
    ("model.embedding_size=16", "model.hidden_size=32", "model.layers=2", "client.max_steps=2"),
)


def main() -> None:
    """Make the cells that are missing, in the order of their worth, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", choices=list(CORPORA))
    parser.add_argument("--share", type=float, choices=SHARES)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--rate", type=float, choices=RATES)
    parser.add_argument("--seed", type=int, choices=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/pays"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "pays")
    parser.add_argument("--hours", type=float, help="begin no cell after so many hours")
    parser.add_argument("--plan", action="store_true", help="cells and their cost, none is made")
    parser.add_argument("--table", action="store_true", help="only the tables, from kept results")
    parser.add_argument("--smoke", action="store_true", help="one share, two rounds, kept not")
    parser.add_argument(
        "--without-again", action="store_true", help="leave out the lines 'trained on': two thirds"
    )
    asked = parser.parse_args()

    def wanted(cell: Cell) -> bool:
        given = {k: getattr(asked, k) for k in ("corpus", "share", "side", "rate", "seed")}
        return all(v is None or getattr(cell, k) == v for k, v in given.items())

    if asked.table:
        print(tell(Cells(asked.results), Size()), end="")
        return
    use_devices(1)
    if asked.smoke:
        folder = Path(tempfile.mkdtemp(prefix="fedlm-smoke-"))
        try:
            cells = [Cell(corpus, 0.01, side, 0.003, 0) for corpus in CORPORA for side in SIDES]
            work(Bench(SMOKE, folder / "runs"), [c for c in cells if wanted(c)], Cells(folder))
            print(tell(Cells(folder), SMOKE), end="")
        finally:
            shutil.rmtree(folder)
        return
    cells, size = Cells(asked.results), Size()
    missing = [c for c in ordered(wanted) if cells.read(c.name, digest_of(c, size)) is None]
    if asked.plan:
        total = 0.0
        for cell in missing:
            cost = estimate(cell, size, asked.out)
            total += cost
            print(f"{cost:7.0f} TFLOP, {total:7.0f} so far: {cell.name}", flush=True)
        return
    bench = Bench(size, asked.out, again=not asked.without_again)
    work(bench, missing, cells, deadline(asked.hours))
    print(tell(cells, size), end="")


def work(
    bench: Bench, missing: list[Cell], cells: Cells, over: Callable[[], bool] = lambda: False
) -> None:
    """Make cells one after the other until the time is over; leave those that others are at."""
    for cell in missing:
        if over():
            return
        with claimed(folder_of(cell, bench.size, bench.out)) as mine:
            if mine and cells.read(cell.name, digest_of(cell, bench.size)) is None:
                make(bench, cell, cells)


if __name__ == "__main__":
    main()
