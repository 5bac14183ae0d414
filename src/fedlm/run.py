"""A run: its parts, and the loop over rounds.

In:       population, algorithm, engine, round, evaluation and record, put together once.
Out:      the state after the last round.
Promise:  deterministic given recipe and seed; interrupted anywhere and resumed, it ends in the
          same state, to the byte. Simulation, server, tree and pretraining are the same record
          with other parts.
Not here: how a round works (`federation`), how parts are made (`recipe`), start and end of a run
          in its directory (`training.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from fedlm.core.errors import DivergenceError
from fedlm.core.releasable import Releasable
from fedlm.core.types import Engine, Params
from fedlm.corpus.population import Population
from fedlm.corpus.store import Store
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import Metrics, Played
from fedlm.models.catalog import ModelSpec, ModuleSpec
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import extend
from fedlm.record.directory import RunDirectory

# A model worse than guessing by three nats per token, five rounds in a row, does not recover.
RUNAWAY_NATS = 3.0
RUNAWAY_ROUNDS = 5
CAUSES = (
    "Usual causes: client.learning_rate or server.learning_rate too high, no "
    "client.gradient_clip_norm. Lower one of them; the last good checkpoint is kept."
)


class Round(Protocol):
    """Flat rounds or rounds of a tree: states, what happened, what may be told."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models that a state holds; the federation's own is ''."""

    def init(self, params: Params) -> Any:
        """The state before the first round."""

    def play(self, state: Any, rounds: range) -> Generator[Played, None, None]:
        """Plays rounds one after the other."""

    def models(self, state: Any) -> dict[str, Params]:
        """The models of a state by name."""

    def params(self, state: Any) -> Params:
        """All parameters of a state, for fingerprints."""

    def header(self) -> Metrics:
        """What a journal's header says of the federation's shape."""

    def closing(self, rounds: int) -> Metrics:
        """What a journal's last line says besides figures."""


class Evaluation(Protocol):
    """How well models predict held-out text."""

    def splits(self) -> list[str]:
        """The splits whose figures may be told, the headline first."""

    def watch(self, state: Any) -> Metrics:
        """The figures of a state while the run goes on."""

    def final(self, state: Any, split: str) -> Metrics:
        """All figures of a state on one split."""

    def of_models(self, models: Mapping[str, Params], split: str) -> Metrics:
        """All figures of models that were saved by name."""

    def baselines(self, splits: list[str]) -> Metrics:
        """What n-gram models, counted on the training text, reach on the same targets."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How many rounds are run, and how often something else happens."""

    rounds: int
    evaluate_every: int = 10
    checkpoint_every: int = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a training run is made of.

    A run is composed, never inherited: what differs between a simulation, a server whose members
    live at nodes, a tree and pretraining is which parts are passed.
    """

    population: Population  # who may take part
    algorithm: Algorithm  # what a member and the server do
    engine: Engine  # how the sum over members is made
    round: Round  # flat, or a tree
    evaluation: Evaluation  # on which text, by whom
    record: RunDirectory  # where facts and states go
    model: ModelSpec | ModuleSpec
    start: Callable[[], Params]  # the model before the first round
    store: Store  # the tokenizer, and whatever text is here
    cadence: Cadence
    recipe: Any  # the resolved settings: a value for the header, which nobody acts on
    custom: Mapping[str, str] = field(default_factory=dict)  # parts that no recipe can name
    command: str = "train"  # that goes on with this run
    plans: tuple[PrivacyPlan, ...] = ()  # of every federation of clients; empty without privacy

    @property
    def plan(self) -> PrivacyPlan | None:
        """The plan that the run claims, or None where nothing is promised."""
        return self.plans[0] if self.plans else None


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls after a round."""

    record: Callable[[Releasable], Releasable]  # what was written, with sums over rounds
    keep: Callable[[Any], None]
    evaluate: Callable[[Any], Metrics]
    stop: Callable[[], bool] = lambda: False


def loop(run: Run, state: Any, hooks: Hooks) -> Any:
    """Plays rounds from where `state` is to the end, or to a polite stop."""
    for played in rounds(run, state, hooks):
        state = played.state
    return state


def rounds(run: Run, state: Any, hooks: Hooks) -> Iterator[Played]:
    """Plays, checks, evaluates and records rounds; each is on record before it is yielded."""
    play: Generator[Played, None, None] = run.round.play(
        state, range(int(state.round), run.cadence.rounds)
    )
    with contextlib.closing(play):
        yield from _watched(run, play, hooks)


def _watched(run: Run, play: Iterator[Played], hooks: Hooks) -> Iterator[Played]:
    cadence, high = run.cadence, 0
    guessing = math.log(run.store.vocabulary)
    for played in play:
        state, metrics, told = played
        number = metrics["round"]
        high = high + 1 if metrics["loss"] > guessing + RUNAWAY_NATS else 0
        _check(metrics, told, high)
        last = number + 1 == cadence.rounds
        if last or (number + 1) % cadence.evaluate_every == 0:
            told = extend(run.plan, told, hooks.evaluate(state))
        told = hooks.record(told)
        stopping = hooks.stop()
        # While the loss runs away nothing is kept, so that the last good checkpoint stays.
        if last or stopping or ((number + 1) % cadence.checkpoint_every == 0 and not high):
            _check_params(number, state.params)
            hooks.keep(state)
        yield played._replace(told=told)
        if stopping:
            return


def _check(metrics: Metrics, told: Releasable, high: int) -> None:
    number = metrics["round"]
    if metrics["members"] and metrics["refused"] == metrics["members"]:
        raise DivergenceError(
            f"round {number}: no member sent a finite update; training stopped. {CAUSES}"
        )
    if not math.isfinite(metrics["loss"]):
        raise DivergenceError(f"round {number}: the loss is not finite; training stopped. {CAUSES}")
    if high >= RUNAWAY_ROUNDS:
        # Under a privacy plan the exact loss is not told, also not by an error.
        loss = f" to {told['loss']:.1f} nats per token" if "loss" in told else ""
        raise DivergenceError(
            f"round {number}: the loss ran away{loss}, far above guessing; training stopped. "
            f"{CAUSES}"
        )


def _check_params(round: int, params: Params) -> None:
    """Refuses parameters that are not finite: finite updates can still add up to such a model."""
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params)):
        raise DivergenceError(
            f"round {round}: the parameters are not finite; training stopped. {CAUSES}"
        )
