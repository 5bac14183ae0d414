"""Does fedlm's training end where its peers' own code ends? Same text, start, members and rounds.

In:       chat of 4,669 training users (`recipes/irc.toml`); the peers' environments (`.bench`).
Out:      a small file per contender, method and seed in `benchmarks/results/quality`; a table of
          those files.
Promise:  all contenders begin with the same parameters and see, round by round, the same rows of
          the same members in the same batches, at the same rates, weighted by rows; one evaluator,
          fedlm's, scores all models on the same text of held-out clients. A method's rates are the
          same for all. Killed, the same command makes what is missing; a peer without an
          environment is named and left out.
Not here: speed (`run.py`), the peers' code (`fedjax_rounds.py`, `pfl_rounds.py`), the files
          (`cells.py`).

    make .bench/fedjax/.installed .bench/pfl/.installed
    python -m benchmarks.peers.quality                   # make the cells that are missing
    python -m benchmarks.peers.quality --contender fedjax --method FedAdam --seed 0
    python -m benchmarks.peers.quality --table           # from the kept files alone

| method | fedlm | FedJAX 0.0.17 | pfl 0.6.0 |
|---|---|---|---|
| FedAvg | server SGD at 1 | `fed_avg`, SGD | `FederatedAveraging`, SGD |
| FedAdam | server Adam | `fed_avg`, Adam | `FederatedAveraging`, Adam |
| FedProx | `client.proximal` | `fed_prox` | `FedProx` |
| MimeLite | `mimelite`, momentum | `mime_lite`, SGD with momentum | has none |

The definitions agree: Adam corrects its moments for their start and adds epsilon outside the root;
FedProx's term is mu / 2 times the squared distance; momentum is a plain sum of gradients, of which
a client of MimeLite adds 0.9 times the server's to each of its gradients. Where a peer leaves a
choice to its user it is fedlm's: the loss of a batch is the mean over its targets, and a last batch
is as small as it is. Two lines leave that agreement, and so no longer see the same batches:
`fedjax, own batches` is FedJAX with its own shuffle of the same rows, whose last batch is filled up
with more of them; `fedlm, other batches` is fedlm with another shuffle of its members' rows, and
tells how far that alone moves a seed.

Rates are of a few that were tried with fedlm and seed 0, none of them with a peer. The table asks
whether contenders agree, not which method is best.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.cells import RESULTS, Cells, Facts, claimed, deadline, plain_name, recipe_digest
from benchmarks.peers import given
from benchmarks.peers.contenders import HERE, OURS, PeerError, interpreter, surroundings
from fedlm.cohort.packing import batches_of
from fedlm.core import tree
from fedlm.core.errors import require
from fedlm.core.types import Params
from fedlm.engine.devices import use_devices
from fedlm.engine.loop import LoopEngine
from fedlm.federation.round import CohortSampler, FlatRound
from fedlm.recipe import parts
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.run import Run
from fedlm.search.sweep import markdown, over_seeds

STORES = Path(".fedlm/stores")
RECIPE = Path(__file__).parents[2] / "recipes" / "irc.toml"
SEEDS = (0, 1, 2)
ROUNDS, MARKS = 100, (10, 50)  # the last round is always one
BASE = (
    *("data.vocabulary=2000", "model.name=cifg", "model.embedding_size=64"),
    *("model.hidden_size=128", "client.optimizer=sgd", "client.batch_size=16", "client.epochs=1"),
    *("client.max_examples=64", "client.weight=examples", "client.gradient_clip_norm=0.0"),
    *("server.cohort=10", "server.sampling=fixed", "server.momentum=0.9", "server.beta2=0.99"),
    *("server.adam_epsilon=1e-5", "run.devices=1", "run.trackers=[]", "run.baselines=false"),
)
AVERAGING = ("server.optimizer=fedavg", "server.learning_rate=1.0")
METHODS: dict[str, tuple[str, ...]] = {
    "FedAvg": (*AVERAGING, "client.learning_rate=1.0"),
    "FedAdam": (
        *("server.optimizer=fedadam", "server.learning_rate=0.02", "client.learning_rate=1.0"),
    ),
    "MimeLite": (
        *("client.method=mimelite", "client.learning_rate=0.3"),
        *("server.optimizer=fedavgm", "server.learning_rate=1.0"),
    ),
    "FedProx": (*AVERAGING, "client.learning_rate=1.0", "client.proximal=0.1"),
}


class Peer(NamedTuple):
    """How a peer's rounds are started, and which methods it has."""

    environment: str
    script: str
    methods: tuple[str, ...]
    options: tuple[str, ...] = ()


PEERS: dict[str, Peer] = {
    "fedjax": Peer("fedjax", "fedjax_rounds.py", tuple(METHODS)),
    "pfl": Peer("pfl", "pfl_rounds.py", ("FedAvg", "FedAdam", "FedProx")),
    "fedjax, own batches": Peer(
        "fedjax", "fedjax_rounds.py", tuple(METHODS), options=("--own-batches",)
    ),
}
OTHER = "fedlm, other batches"
ANOTHER_SHUFFLE = 1000  # is added to the seed of batches alone
CONTENDERS = (OURS, *PEERS, OTHER)


@dataclass(frozen=True)
class Cell:
    """One contender's training by one method with one seed, of start, members and batches."""

    contender: str
    method: str
    seed: int

    def __post_init__(self) -> None:
        require(self.contender in CONTENDERS, "contender", self.contender, ", ".join(CONTENDERS))
        has = PEERS[self.contender].methods if self.contender in PEERS else METHODS
        require(self.method in has, "method", self.method, f"{', '.join(has)} by {self.contender}")

    @property
    def name(self) -> str:
        return f"{self.contender} {self.method} seed {self.seed}"


def ordered() -> list[Cell]:
    """Return all cells; a peer's come method by method, each after those of fedlm."""
    cells = []
    for peer, how in PEERS.items():
        for method in how.methods:
            for seed in SEEDS:
                cells += [Cell(OURS, method, seed), Cell(peer, method, seed)]
    cells += [Cell(OTHER, method, seed) for method in METHODS for seed in SEEDS]
    return list(dict.fromkeys(cells))


@dataclass(frozen=True)
class Size:
    """How long cells are, and which changes all recipes have beside."""

    rounds: int = ROUNDS
    more: tuple[str, ...] = ()
    recipe: Path = RECIPE

    @property
    def marks(self) -> tuple[int, ...]:
        """The rounds after which models are scored."""
        return (*(mark for mark in MARKS if mark < self.rounds), self.rounds)


def recipe_of(cell: Cell, size: Size) -> Recipe:
    """Return the recipe that all contenders of a method and seed follow."""
    own = (f"server.rounds={size.rounds}", f"run.seed={cell.seed}")
    return load(size.recipe, (*BASE, *METHODS[cell.method], *own, *size.more))


def digest_of(cell: Cell, size: Size) -> str:
    """Return the digest of all that decides a cell."""
    return recipe_digest(recipe_of(cell, size), contender=cell.contender, marks=size.marks)


# ---- what contenders are given -------------------------------------------------------------------


def settings_of(run: Run, marks: tuple[int, ...]) -> Facts:
    """Return what a peer is told of a recipe."""
    recipe, size = run.recipe, parts.model_spec(run.recipe, run.store.vocabulary)
    client, server = recipe.client, recipe.server
    names = ("vocab", "embedding_size", "hidden_size", "layers", "heads")
    return {
        "architecture": size.architecture,
        **{name: getattr(size.size, name) for name in names},
        "length": recipe.data.sequence_length,
        "method": client.method,
        "rate": client.learning_rate,
        "batch": client.batch_size,
        "max_examples": client.max_examples,
        "proximal": client.proximal,
        "server_optimizer": server.optimizer,
        "server_rate": server.learning_rate,
        "momentum": server.momentum,
        "beta2": server.beta2,
        "adam_epsilon": server.adam_epsilon,
        "seed": recipe.run.seed,
        "marks": list(marks),
    }


def rounds_of(run: Run) -> Iterator[given.Members]:
    """Yield the rows of each round's members, in the order of the batches that fedlm makes."""
    recipe, clients = run.recipe, parts.people_of(run.recipe, run.store, None).rows
    shape, seed = parts.batch_spec(recipe), recipe.run.seed
    oracle = LoopEngine(run.algorithm, clients.train, shape, seed)
    choose = CohortSampler(run.algorithm, seed, run.round.init(run.start()))
    for number in range(recipe.server.rounds):
        members = choose(number)
        orders = oracle.prepare(number, members).batches
        assert orders is not None
        found = {}
        for member, (_, order) in zip(members, orders, strict=True):
            rows = batches_of(clients.train(int(member)), order).astype(np.int32)
            rows = rows.reshape(-1, rows.shape[-1])
            # Zero, which no text has, where fedlm has -1: contenders look up every number.
            found[f"{member:08d}"] = np.maximum(rows[np.any(rows >= 0, axis=1)], 0)
        yield found


# ---- contenders ----------------------------------------------------------------------------------


class Trained(NamedTuple):
    """The models of a contender by the number of rounds, and facts on how they were made."""

    models: dict[int, Params]
    facts: Facts


def by_fedlm(run: Run, marks: tuple[int, ...]) -> Trained:
    """Train as `fedlm train` does: the run's own rounds, members, batches and engine."""
    assert isinstance(run.round, FlatRound)
    state, models, began = run.round.init(run.start()), {}, time.perf_counter()
    for played in run.round.play(state, range(marks[-1])):
        number = played.metrics["round"] + 1
        if number in marks:
            models[number] = run.round.params(played.state)
    return Trained(models, {"seconds": round(time.perf_counter() - began, 1)})


def with_other_batches(run: Run) -> Run:
    """Return a run with another shuffle of its members' rows, the same start and members."""
    assert isinstance(run.round, FlatRound)
    seed = run.recipe.run.seed + ANOTHER_SHUFFLE
    table = run.recipe.run.model_copy(update={"seed": seed})
    rows = parts.people_of(run.recipe, run.store, None).rows
    recipe = run.recipe.model_copy(update={"run": table})
    engine = parts.engine_of(recipe, run.algorithm, rows.train)
    return replace(run, engine=engine, round=replace(run.round, engine=engine))


def by_peer(peer: Peer, run: Run, marks: tuple[int, ...], folder: Path) -> Trained:
    """Have a peer train in a process of its own, and read the models that it leaves."""
    start = run.start()
    leaves = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(start).items()}
    given.write(folder, settings_of(run, marks), leaves, list(rounds_of(run)))
    command = [interpreter(peer.environment), HERE / peer.script, folder, *peer.options]
    with open(folder / "log", "wb") as log:
        said = [str(part) for part in command]
        ended = subprocess.run(said, stdout=log, stderr=log, env=surroundings("passive"))
    if ended.returncode:
        raise PeerError(f"{peer.script} ended with {ended.returncode}: see {folder / 'log'}")
    models = {
        mark: tree.with_leaves(start, given.arrays(given.file_after(folder, mark)))
        for mark in marks
    }
    return Trained(models, json.loads((folder / given.FACTS).read_text(encoding="utf-8")))


def make(cell: Cell, size: Size, cells: Cells, out: Path) -> Facts:
    """Train one cell, score its models and keep the figures."""
    folder = (out / plain_name(cell.name)).resolve()
    run = build(recipe_of(cell, size), STORES, out=folder / "run")
    if cell.contender in PEERS:
        trained = by_peer(PEERS[cell.contender], run, size.marks, folder)
    else:
        own = run if cell.contender == OURS else with_other_batches(run)
        trained = by_fedlm(own, size.marks)
    facts: Facts = {"contender": cell.contender, "method": cell.method, "seed": cell.seed}
    facts["changes"] = [*METHODS[cell.method]]
    facts["curve"] = [[mark, held_out(run, params)] for mark, params in trained.models.items()]
    return cells.write(cell.name, digest_of(cell, size), {**facts, **trained.facts})


def held_out(run: Run, params: Params) -> float:
    """Return fedlm's perplexity of a model on all text of held-out clients."""
    return float(run.evaluation.of_models({"": params}, "test")["perplexity"])


# ---- the table -----------------------------------------------------------------------------------


def head(size: Size) -> list[str]:
    """Return the names of the table's columns."""
    scored = [f"after {mark}" for mark in size.marks]
    return ["method", "contender", "seeds", *scored, "difference from fedlm by seed", "within"]


def kept(cells: Cells, size: Size) -> dict[Cell, Facts]:
    """Return all cells that are there."""
    found = {cell: cells.read(cell.name, digest_of(cell, size)) for cell in ordered()}
    return {cell: facts for cell, facts in found.items() if facts is not None}


def lines_of(found: dict[Cell, Facts], size: Size) -> list[list[str]]:
    """Return a line per method and contender.

    A contender is within the spread of seeds if no seed's difference from fedlm is larger than the
    standard deviation of fedlm's last perplexity over all seeds; of one seed nothing is said.
    """
    made = []
    for method in METHODS:
        ours = lasts(found, OURS, method)
        known = len(ours) > 1 and all(map(math.isfinite, ours.values()))
        spread = statistics.stdev(ours.values()) if known else math.nan
        for contender in CONTENDERS:
            theirs = lasts(found, contender, method)
            if not theirs:
                continue
            curves = [f["curve"] for c, f in found.items() if same(c, contender, method)]
            scored = [
                over_seeds([value for curve in curves for at, value in curve if at == mark], 2)
                for mark in size.marks
            ]
            apart = [value - ours[seed] for seed, value in theirs.items() if seed in ours]
            less, within = "-", "-"
            if contender != OURS and apart:
                less = ", ".join(f"{value:+.2g}" for value in apart)
                if len(apart) > 1:
                    inside = all(abs(value) <= spread for value in apart)
                    within = f"{'yes' if inside else 'no'} ({spread:.2g})"
            made.append([method, contender, str(len(theirs)), *scored, less, within])
    return made


def same(cell: Cell, contender: str, method: str) -> bool:
    """Return whether a cell is of a contender and method."""
    return (cell.contender, cell.method) == (contender, method)


def lasts(found: dict[Cell, Facts], contender: str, method: str) -> dict[int, float]:
    """Return the last perplexities of a contender by seed; infinity if it diverged."""
    return {
        cell.seed: math.inf if facts["curve"][-1][1] is None else facts["curve"][-1][1]
        for cell, facts in sorted(found.items(), key=lambda item: item[0].seed)
        if same(cell, contender, method)
    }


def tell(cells: Cells, size: Size) -> str:
    """Return the table of what is kept."""
    lines = lines_of(kept(cells, size), size)
    return markdown(head(size), lines) if lines else f"No cell is kept yet in {cells.folder}.\n"


def work(
    wanted: list[Cell],
    size: Size,
    cells: Cells,
    out: Path,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Make the cells that are missing until the time is over; name peers that cannot run."""
    named: set[str] = set()
    for cell in wanted:
        if over():
            return
        peer = PEERS.get(cell.contender)
        if peer is not None and not interpreter(peer.environment).exists():
            if cell.contender not in named:
                print(f"{cell.contender}: no environment {interpreter(peer.environment)}, left out")
            named.add(cell.contender)
            continue
        folder = out / plain_name(cell.name)
        with claimed(folder) as mine:
            if not mine or cells.read(cell.name, digest_of(cell, size)) is not None:
                continue
            try:
                facts = make(cell, size, cells, out)
            except PeerError as error:
                print(f"{cell.name}: left out: {error}", file=sys.stderr, flush=True)
                continue
            last = facts["curve"][-1][1] or math.inf
            print(f"{cell.name}: {last:.2f} in {facts['seconds']:.0f} s", flush=True)
        shutil.rmtree(folder)


def main() -> None:
    """Make the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="default: all")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="default: all")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="another number needs another --results"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "quality")
    parser.add_argument("--hours", type=float, help="begin no cell after so many hours")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    asked = parser.parse_args()
    size, cells = Size(asked.rounds), Cells(asked.results)
    if not asked.table:
        use_devices(1)
        wanted = [
            cell
            for cell in ordered()
            if cell.contender in (asked.contender or CONTENDERS)
            and cell.method in (asked.method or METHODS)
            and cell.seed in (asked.seed or SEEDS)
        ]
        work(wanted, size, cells, asked.out, deadline(asked.hours))
    print(tell(cells, size), end="")


if __name__ == "__main__":
    main()
