"""A run: its parts, and the loop over rounds.

In:       population, algorithm, engine, round, evaluation and record, put together once.
Out:      the state after the last round.
Promise:  deterministic given recipe and seed; interrupted anywhere and resumed, it ends in the
          same state, to the byte. Under a privacy plan the state of a round is on disk and its
          release in the ledger before anything else sees the round. Simulation, server, tree and
          pretraining are the same record with other parts.
Not here: how a round works (`federation`), how parts are made (`recipe`), start and end of a run
          in its directory (`training`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fedlm.core.errors import DivergenceError
from fedlm.core.releasable import Releasable
from fedlm.core.types import Engine, FederationState, Params
from fedlm.corpus.population import Population
from fedlm.corpus.store import Store
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import Metrics, Played
from fedlm.federation.topology import Topology
from fedlm.models.catalog import ModelSpec, ModuleSpec
from fedlm.privacy.evaluation import ScheduledEvaluation
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import extend
from fedlm.record.directory import RunDirectory

# A model that is three nats per token worse than guessing for five rounds does not recover.
RUNAWAY_NATS = 3.0
RUNAWAY_ROUNDS = 5
CAUSES = (
    "Usual causes: client.learning_rate or server.learning_rate too high, no "
    "client.gradient_clip_norm. Lower one of them; the last good checkpoint is kept."
)


class Round(Protocol):
    """The rounds of a flat federation or of a tree, and the states they lead to."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models that a state holds; the federation's own is ''."""

    @property
    def topology(self) -> Topology | None:
        """The nodes of a tree; None if the federation is flat."""

    def init(self, params: Params) -> FederationState:
        """Return the state before the first round."""

    def play(self, state: FederationState, rounds: range) -> Generator[Played, None, None]:
        """Play rounds one after the other, and yield each."""

    def models(self, state: FederationState) -> dict[str, Params]:
        """Return the models of a state by name."""

    def own_models(self, state: FederationState) -> dict[str, Params]:
        """Return models by name that a node keeps to itself, where `models` gives others."""

    def params(self, state: FederationState) -> Params:
        """Return all parameters of a state, for fingerprints."""

    def renewed(self, state: FederationState, lines: int) -> FederationState:
        """Return a state whose further draws are others, after a ledger of so many lines."""

    def digest(self, state: FederationState) -> bytes:
        """Return the ledger's digest of the sums that led to a state, 32 bytes."""

    def header(self) -> Metrics:
        """Return the facts on the federation's shape for the journal's header."""


class Evaluation(Protocol):
    """The scores of models on held-out text."""

    def splits(self) -> list[str]:
        """Return the splits whose figures may be reported, the headline split first."""

    def watch(self, state: FederationState) -> Metrics:
        """Return the figures of a state during training."""

    def final(self, state: FederationState, split: str) -> Metrics:
        """Return all figures of a state on one split."""

    def of_models(self, models: Mapping[str, Params], split: str) -> Metrics:
        """Return all figures of saved models, given by name, on one split."""

    def rows(self, split: str | None = None) -> Int[np.ndarray, "rows width"] | None:
        """Return the rows of a split, or without one those that are watched during training.

        None where the text is not here or may not be scored, and in a tree, whose nodes have their
        own.
        """

    def baselines(self, splits: list[str]) -> Metrics:
        """Return the figures of n-gram models of the training text on the same targets."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How many rounds a run has, what may end it earlier, and what is due after how many."""

    rounds: int
    asked_rounds: int  # by the recipe; a privacy budget may hold fewer
    evaluate_every: int
    checkpoint_every: int
    patience: int = 0  # evaluations without a lower perplexity before the run stops; 0: no end
    budget: float | None = None  # the most epsilon that may be spent; None: no bound
    calibrated: bool = False  # whether noise was chosen for these rounds, to spend the budget
    # Learning rates over the rounds, by the name of their setting.
    schedules: Mapping[str, str] = field(default_factory=dict)

    def evaluates(self, round: int) -> bool:
        """Return whether the model is scored after a round, counted from zero."""
        return round + 1 == self.rounds or (round + 1) % self.evaluate_every == 0


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a run leaves besides its journal and the trained model."""

    trackers: tuple[str, ...]  # names of programs that get a copy of each round's figures
    keep_checkpoints: int  # how many of the newest
    keep_best: bool  # the model with the lowest perplexity on the way
    adapters: bool  # adapters alone, beside the model; not if the model under them is trained too
    baselines: bool  # figures of n-gram models
    prompts: tuple[str, ...]  # texts whose next words are told at the end


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a training run is made of.

    A run is composed, never inherited: a simulation, a server whose members live at nodes, a tree
    and pretraining differ only in the parts that are passed. `recipe.build` composes one from a
    recipe, `fedlm.Federation` from Python; both hand it to the same loop.

    >>> import fedlm
    >>> store = fedlm.prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> model = fedlm.models.cifg(store, embedding_size=4, hidden_size=4)
    >>> run = fedlm.Federation(store, model, cohort=2, rounds=3).run
    >>> run.cadence.rounds, run.algorithm.sampling.cohort, run.plan
    (3, 2, None)
    >>> run.population.size == len(store.training_clients)
    True
    """

    population: Population  # who may take part
    algorithm: Algorithm  # the work of a member and of the server
    engine: Engine  # how the sum over members is made
    round: Round  # flat, or a tree
    evaluation: Evaluation  # on held-out text
    record: RunDirectory  # where facts and states go
    model: ModelSpec | ModuleSpec
    start: Callable[[], Params]  # the model before the first round
    store: Store  # the tokenizer, and whatever text is here
    cadence: Cadence
    outputs: Outputs
    recipe: Any  # the resolved settings, for the header; the loop does not act on them
    private_evaluation: ScheduledEvaluation | None = None  # noisy figures of training clients
    unrounded: Callable[[], Params] | None = None  # that model before its base was rounded
    custom: Mapping[str, str] = field(default_factory=dict)  # parts that no recipe can name
    command: str = "train"  # the fedlm command that resumes this run
    # Of every federation of clients by node, the dearest first; a flat federation's name is ''.
    plans: Mapping[str, PrivacyPlan] = field(default_factory=dict)
    # Of each node of a tree: the recipe under which its model is judged by itself.
    node_recipes: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = True  # whether the store counts it; not a candidate of a private selection

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The nodes that hold the text, over a network; none if the store holds it."""
        if self.population.tokens is not None or self.command == "pretrain":
            return ()
        return tuple(sorted({f"node {'/'.join(path)}" for path in self.population.group_paths()}))

    @property
    def plan(self) -> PrivacyPlan | None:
        """The plan that costs a client most, or None where nothing is promised."""
        return next(iter(self.plans.values()), None)

    def until(self, rounds: int) -> Run:
        """Return the same run with another number of rounds."""
        return replace(self, cadence=replace(self.cadence, rounds=rounds))


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The functions that the loop calls after a round."""

    # Under a plan: makes the state of a round and its facts safe, before anybody sees either.
    commit: Callable[[FederationState, Releasable], None]
    record: Callable[[Releasable], Releasable]  # returns the written line, with sums over rounds
    keep: Callable[[FederationState], None]
    evaluate: Callable[[FederationState], Metrics]
    stop: Callable[[], bool] = lambda: False


def loop(run: Run, state: FederationState, hooks: Hooks) -> FederationState:
    """Play rounds from `state` to the end or until asked to stop; return the last state."""
    for played in rounds(run, state, hooks):
        state = played.state
    return state


def rounds(run: Run, state: FederationState, hooks: Hooks) -> Iterator[Played]:
    """Play, check, evaluate and record rounds; yield each after it is on record."""
    play: Generator[Played, None, None] = run.round.play(
        state, range(int(state.round), run.cadence.rounds)
    )
    with contextlib.closing(play):
        yield from _watched(run, play, hooks)


def _watched(run: Run, play: Iterator[Played], hooks: Hooks) -> Iterator[Played]:
    cadence, high, elsewhere = run.cadence, 0, bool(run.elsewhere)
    guessing = math.log(run.store.vocabulary)
    for played in play:
        state, metrics, told = played
        number = metrics["round"]
        if elsewhere:  # what nodes report ends no run and keeps no checkpoint from being written
            _check_params(number, state.params)
        else:
            high = high + 1 if metrics["loss"] > guessing + RUNAWAY_NATS else 0
            _check(metrics, told, high)
        if run.plan is not None:
            _check_params(number, state.params)
            hooks.commit(state, told)
        last = number + 1 == cadence.rounds
        if cadence.evaluates(number):
            told = extend(run.plan, told, hooks.evaluate(state))
        told = hooks.record(told)
        stopping = hooks.stop()
        # While the loss diverges no checkpoint is written, so that the last good one stays. Under
        # a plan there is one already: a released round is never played again.
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
        # Under a privacy plan the exact loss is not reported, not even in an error.
        loss = f" to {told['loss']:.1f} nats per token" if "loss" in told else ""
        raise DivergenceError(
            f"round {number}: the loss ran away{loss}, far above guessing; training stopped. "
            f"{CAUSES}"
        )


@jax.jit  # one program, not two for each shape of a leaf
def _all_finite(params: Params) -> Bool[Array, ""]:
    """Return whether all parameters are finite."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()


def _check_params(round: int, params: Params) -> None:
    """Raise `DivergenceError` if parameters are not finite; finite updates can sum to infinity."""
    if not bool(_all_finite(params)):
        raise DivergenceError(
            f"round {round}: the parameters are not finite; training stopped. {CAUSES}"
        )
