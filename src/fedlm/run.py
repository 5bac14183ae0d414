"""The loop.

In:       an algorithm, an engine, a state, and what to do on the way.
Out:      the state after the last round.
Promise:  deterministic given recipe and seed; interrupted anywhere and resumed, it ends in the
          same state, to the byte.
Not here: how a round works (`federation/round.py`), what is evaluated (handed in).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.cohort.prefetch import prefetch
from fedlm.core.errors import DivergenceError
from fedlm.core.types import Cohort, Engine, Gathered, Members, Params
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import (
    CohortSampler,
    NodeState,
    released,
    server_half,
    start_of_round,
    with_text,
)

Facts = dict[str, Any]

# A model worse than guessing by three nats a token, five rounds in a row, does not come back.
RUNAWAY_NATS = 3.0
RUNAWAY_ROUNDS = 5
CAUSES = (
    "Usual causes: client.learning_rate or server.learning_rate too high, no "
    "client.gradient_clip_norm. Lower one of them; the last good checkpoint is kept."
)


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a run tells others, and when it asks them."""

    evaluate: Callable[[Any], Facts]  # of a state
    record: Callable[[Facts], None]
    keep: Callable[[Any], None]
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How long, and how often."""

    rounds: int
    evaluate_every: int
    checkpoint_every: int


Turn = Callable[[int, Any], tuple[Any, Facts, Facts]]
"""A round: its number and a state to the state after it, what happened, and what may be told."""


def run(
    algorithm: Algorithm,
    engine: Engine,
    state: NodeState,
    *,
    seed: int,
    cadence: Cadence,
    hooks: Hooks,
    vocabulary: int,
) -> NodeState:
    """Rounds from where `state` is to the end, or to a polite stop."""
    rounds = range(int(state.round), cadence.rounds)
    choose = CohortSampler(algorithm, seed, state)

    def ready(r: int) -> tuple[Members, Cohort]:
        members = choose(r)
        return members, engine.prepare(r, with_text(algorithm, members))

    cohorts = prefetch(ready, rounds)

    def turn(r: int, state: NodeState) -> tuple[NodeState, Facts, Facts]:
        members, cohort = next(cohorts)
        began = time.perf_counter()
        gathered = engine.total(start_of_round(algorithm, state, cohort.members), cohort)
        after = server_half(algorithm, state, gathered.total, members)
        facts = _facts(r, gathered, time.perf_counter() - began)
        return after, facts, released(algorithm, facts, state, after)

    with contextlib.closing(cohorts):
        done: NodeState = loop(turn, state, cadence=cadence, hooks=hooks, vocabulary=vocabulary)
    return done


def loop(turn: Turn, state: Any, *, cadence: Cadence, hooks: Hooks, vocabulary: int) -> Any:
    """Rounds of any kind: checked, evaluated, recorded and kept when it is time."""
    high = 0
    for r in range(int(state.round), cadence.rounds):
        state, facts, told = turn(r, state)
        high = high + 1 if facts["loss"] > math.log(vocabulary) + RUNAWAY_NATS else 0
        _check(facts, high)
        last = r + 1 == cadence.rounds
        if last or (r + 1) % cadence.evaluate_every == 0:
            told.update(hooks.evaluate(state))
        hooks.record(told)
        stopping = hooks.stop()
        # While the loss runs away nothing is client_state, so that the last good checkpoint stays.
        if last or stopping or ((r + 1) % cadence.checkpoint_every == 0 and not high):
            _check_params(r, state.params)
            hooks.keep(state)
        if stopping:
            break
    return state


def _facts(round: int, gathered: Gathered, seconds: float) -> Facts:
    """Return what happened in a round; reading the sums waits for the device."""
    began = time.perf_counter()
    read = {
        name: float(np.asarray(getattr(gathered.total, name)))
        for name in ("members", "refused", "steps", "tokens", "unclipped", "nats")
    }
    nats = read.pop("nats")
    return {
        "round": round,
        **{name: int(value) for name, value in read.items()},
        "loss": nats / read["tokens"] if read["tokens"] else math.inf if read["refused"] else 0.0,
        "upload_bytes": gathered.upload_bytes,
        "download_bytes": gathered.download_bytes,
        "seconds": seconds + time.perf_counter() - began,
    }


def _check(facts: Facts, high: int) -> None:
    number = facts["round"]
    if facts["members"] and facts["refused"] == facts["members"]:
        raise DivergenceError(
            f"round {number}: no member sent a finite update; training stopped. {CAUSES}"
        )
    if not math.isfinite(facts["loss"]):
        raise DivergenceError(f"round {number}: the loss is not finite; training stopped. {CAUSES}")
    if high >= RUNAWAY_ROUNDS:
        raise DivergenceError(
            f"round {number}: the loss ran away to {facts['loss']:.1f} nats a token, far above "
            f"guessing; training stopped. {CAUSES}"
        )


def _check_params(round: int, params: Params) -> None:
    """Finite updates can still add up to a model that is not; such a model is never kept."""
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params)):
        raise DivergenceError(
            f"round {round}: the parameters are not finite; training stopped. {CAUSES}"
        )
