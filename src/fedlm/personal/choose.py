"""Which way each member takes, the table over members, and the model that is kept.

In:       a finished run, members, ways.
Out:      every way's perplexity on the rows of the report, and the way that the rows to choose by
          decided for (`Personalized`); `RUN/clients/NAME`.
Promise:  the choice is made before the rows of the report are scored; the mean over members comes
          with the share of members that a way hurts.
Not here: the ways themselves (`ways.py`), printing (`cli/personalize.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedlm import lineage
from fedlm.core import tree
from fedlm.core.documents import JsonObject
from fedlm.core.errors import require
from fedlm.core.types import PAD, Params
from fedlm.inference import load_params
from fedlm.methods.optimizers import client_optimizer
from fedlm.personal.members import OwnText
from fedlm.personal.model import FACTS, Personal, mixture_perplexity, write_mixture
from fedlm.personal.ways import WAYS, Attempt, Workshop, attempt_all
from fedlm.privacy import release
from fedlm.recipe import parts
from fedlm.recipe.assemble import loss_of
from fedlm.record import checkpoint
from fedlm.run import Run
from fedlm.training.node_runs import write_run

CHOSEN = "chosen"
NOTHING = 1e-9  # a relative difference of perplexities below this hurts nobody


@dataclass(frozen=True, eq=False)
class Personalized:
    """One member's models, the way it chose, and the perplexity of all on the report's rows."""

    name: str
    way: str
    chosen: Personal
    perplexity: dict[str, float]  # by way
    nats: dict[str, float]
    tokens: int

    @property
    def own(self) -> float:
        """The perplexity of the chosen model."""
        return self.perplexity[self.way]


def shop_of(
    run: Run,
    *,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    passes: int = 10,
    patience: int = 2,
) -> Workshop:
    """Return what the members of a run share; their steps are the recipe's where none are named."""
    client = run.recipe.client
    spec = parts.model_spec(run.recipe, run.store.vocabulary)
    return Workshop(
        federated=model_at(run, ""),
        # What a member has without the others: the model that the federation began with.
        fresh=lambda: parts.plain_start(run.recipe, spec),
        optimizer=client_optimizer(
            optimizer or client.optimizer,
            learning_rate or client.learning_rate,
            momentum=client.momentum,
            weight_decay=client.weight_decay,
            clip=client.gradient_clip_norm,
        ),
        vocabulary=run.store.vocabulary,
        batch_size=client.batch_size,
        passes=passes,
        patience=patience,
        seed=run.recipe.run.seed,
        loss=loss_of(run.recipe),
    )


def model_at(run: Run, node: str) -> Params:
    """Return the federation's model, or that of a node of a tree."""
    weights = run.record.finished().weights_of(node)
    return load_params(run.recipe.model, run.store.vocabulary, weights)


def shop_for(run: Run, shop: Workshop, member: OwnText) -> Workshop:
    """Return the workshop with the model that a member starts from; programs are shared."""
    if not member.node:
        return shop
    own = shop.at_scale(shop.scale)
    own.federated = model_at(run, member.node)
    return own


def check_ways(names: Sequence[str]) -> tuple[str, ...]:
    """Return the ways to try; the federation's model is always among them."""
    for name in names:
        require(name in WAYS, "--ways", name, f"some of {', '.join(WAYS)}")
    return tuple(dict.fromkeys(["federated", *names]))


def personalize(shop: Workshop, member: OwnText, names: Sequence[str]) -> Personalized:
    """Make a member's model by each way, choose one, then score all on the rows of the report."""
    at = Attempt(shop, member.own, member.choose, member.number)
    made = attempt_all(at, names)
    way = min(made, key=lambda name: at.score(made[name]))
    nats = {name: model.nats(member.report, shop.scorer) for name, model in made.items()}
    return Personalized(
        name=member.name,
        way=way,
        chosen=made[way],
        perplexity={name: mixture_perplexity(found, member.report) for name, found in nats.items()},
        nats={name: float(found.sum()) for name, found in nats.items()},
        tokens=int(np.count_nonzero(member.report[:, 1:] != PAD)),
    )


# ---- the table -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutcomeRow:
    """One way over all members."""

    way: str
    perplexity: float  # the mean over members
    together: float  # over all tokens
    hurt: float  # the share of members for whom the federation's model is better
    hurt_alone: float | None  # the share for whom a model of their own text alone is better
    taken: float  # the share of members who chose it


def outcome_table(outcomes: Sequence[Personalized]) -> list[OutcomeRow]:
    """Return a line per way, and one for what each member chose."""
    ways = list(outcomes[0].perplexity)
    lines = [_line(way, outcomes, [way] * len(outcomes)) for way in ways]
    return [*lines, _line(CHOSEN, outcomes, [outcome.way for outcome in outcomes])]


def _line(way: str, outcomes: Sequence[Personalized], taken: Sequence[str]) -> OutcomeRow:
    own = [outcome.perplexity[by] for outcome, by in zip(outcomes, taken, strict=True)]
    nats = sum(outcome.nats[by] for outcome, by in zip(outcomes, taken, strict=True))
    tokens = sum(outcome.tokens for outcome in outcomes)
    alone = [o.perplexity["local"] for o in outcomes if "local" in o.perplexity]
    return OutcomeRow(
        way=way,
        perplexity=statistics.fmean(own),
        together=float(np.exp(min(700.0, nats / max(1, tokens)))),
        hurt=_share_above(own, [outcome.perplexity["federated"] for outcome in outcomes]),
        hurt_alone=_share_above(own, alone) if alone else None,
        taken=1.0 if way == CHOSEN else statistics.fmean(o.way == way for o in outcomes),
    )


def _share_above(own: Iterable[float], other: Sequence[float]) -> float:
    return statistics.fmean(a > b * (1 + NOTHING) for a, b in zip(own, other, strict=True))


# ---- the model that is kept --------------------------------------------------------------------


def save_outcome(run: Run, outcome: Personalized) -> Path:
    """Write a member's model as `RUN/clients/NAME`, for its owner's eyes alone."""
    directory = run.record.client(outcome.name)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.path.chmod(0o700)
    # Written last: a member's weights are never served with what belongs to earlier ones.
    (directory.path / FACTS).unlink(missing_ok=True)
    # Before they are written: a run that starts from one of them learned from this member's text.
    made = (outcome.chosen.params, outcome.chosen.second)
    own = [tree.sha256(params) for params in made if params is not None]
    lineage.add_models(run.record.path, run.store, [], own)
    recipe = parts.recipe_to_look_at(run.recipe, run.population.size)
    hidden = release.hides(run.plan)
    write_run(
        directory,
        outcome.chosen.params,
        recipe,
        run.store,
        rounds=run.recipe.server.rounds,
        final={"test" if hidden else "validation": {"perplexity": outcome.own, "accuracy": None}},
        part_of={
            "run": run.record.path.resolve().name,
            "client": outcome.name,
            "way": outcome.way,
            "private": run.plan is not None,
        },
        plan=run.plan,
    )
    second = outcome.chosen.second
    data = None if second is None else checkpoint.to_bytes(second)
    write_mixture(directory, outcome.chosen, data)
    return directory.path


def outcome_facts(outcome: Personalized, directory: Path | None = None) -> JsonObject:
    """Return an outcome as a JSON object."""
    return {
        "client": outcome.name,
        "way": outcome.way,
        "note": outcome.chosen.note,
        "perplexity": outcome.own,
        "federated": outcome.perplexity["federated"],
        "by_way": outcome.perplexity,
        "tokens": outcome.tokens,
        **({} if directory is None else {"model": str(directory)}),
    }
