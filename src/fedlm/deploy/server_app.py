"""A recipe, carried out over a federation's nodes.

In:       a federation's folder, a recipe, a run directory.
Out:      what `fedlm train` leaves: journal, checkpoints, report, model, summary.
Promise:  the same loop, round and record as in simulation, with the nodes in place of the mesh;
          nodes keep their seats for the whole run, so that members keep their numbers; a run that
          was killed goes on from its checkpoint.
Not here: the loop (`run.py`), sending (`engine/remote.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlm.core.types import Engine, Sampling
from fedlm.deploy import registration
from fedlm.deploy.local import check_deployable, redacted
from fedlm.deploy.superlink_client import running
from fedlm.deploy.tree_app import DeployedTree
from fedlm.deploy.workspace import Home
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats
from fedlm.engine.remote import FlowerEngine
from fedlm.recipe import privacy_plan
from fedlm.recipe.build import Experiment, open_store, resolve
from fedlm.recipe.settings import Recipe, dump
from fedlm.record.directory import RunDirectory
from fedlm.train import Summary, Watcher
from fedlm.train import train as carry_out
from fedlm.wire.dense import dense

SEATS, TALLIES = "seats.json", "nodes.jsonl"


@dataclass(frozen=True)
class Deployed(Experiment):
    """An experiment whose members live at nodes; the store here holds held-out text alone."""

    post: Any = None
    seats: tuple[Assignment, ...] = ()
    patience: Quorum = field(default_factory=Quorum)
    tell: Callable[[RoundStats], None] = lambda tally: None

    @cached_property
    def sampling(self) -> Sampling:
        return privacy_plan.sampling_of(self.recipe, sum(seat.clients for seat in self.seats))

    @cached_property
    def engine(self) -> Engine:
        noise = None if self.plan is None else self.plan.noise_multiplier
        return FlowerEngine(
            self.algorithm,
            self.post,
            self.seats,
            recipe=redacted(self.recipe, noise),
            seed=self.recipe.run.seed,
            exact=dense(),
            patience=self.patience,
            tell=self.tell,
        )

    def baselines(self, splits: Any) -> dict[str, dict[str, float]]:
        """None: n-grams would have to be counted on text that is elsewhere."""
        return {}


def train(
    home: Home, recipe: Recipe, path: Path, *, resume: bool, watcher: Watcher, stores: Path
) -> Summary | None:
    """Trains over the nodes to the end; None if the watcher stopped it before."""
    settings = home.settings
    patience = Quorum(quorum=settings.quorum, deadline=settings.deadline or float("inf"))
    directory = RunDirectory(path)
    with running(home) as post:
        check_deployable(recipe)
        base = build_base(recipe, stores)
        goes_on = directory.claim(dump(base.recipe), resume=resume)
        seats = registration.kept(directory.path / SEATS) if goes_on else None
        if seats is None:
            tokens = base.store.tokens_sha256
            check = registration.same_tokenizer(tokens, f"the server's store {base.store.path}")
            seats = registration.seat_all(post, sorted(home.nodes()), check, watcher.say)
            registration.keep(directory.path / SEATS, seats)
        kind = Deployed if base.recipe.federation is None else DeployedTree
        experiment = kind(
            base.recipe,
            base.store,
            post=post,
            seats=seats,
            patience=patience,
            tell=lambda tally: _record(directory, tally, watcher.say),
        )
        _ = experiment.algorithm, experiment.rounds, experiment.engine
        return carry_out(experiment, directory, resume=True, watcher=watcher)  # claimed above


def again(recipe: Recipe, directory: RunDirectory, stores: Path) -> Experiment:
    """The experiment of a run that was made here, to look at it: nobody is asked."""
    base, seats = build_base(recipe, stores), registration.kept(directory.path / SEATS)
    kind = Deployed if recipe.federation is None else DeployedTree
    return kind(base.recipe, base.store, seats=seats or ())


def build_base(recipe: Recipe, stores: Path) -> Experiment:
    """The recipe with the server's own store: tokenizer, and held-out text to watch."""
    store = open_store(recipe.data, stores, lambda stage, done: None)
    return Experiment(resolve(recipe, store), store)


def _record(directory: RunDirectory, tally: RoundStats, say: Callable[[str], None]) -> None:
    """A line a round on who answered; beside the journal, which tells of the model alone."""
    with open(directory.path / TALLIES, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(tally)) + "\n")
    for name, reason in {**tally.refused, **tally.garbage}.items():
        say(f"round {tally.round}: {name}: {reason}")
    missing = [*tally.away, *tally.late]
    if missing:
        say(f"round {tally.round}: without {', '.join(missing)}")
