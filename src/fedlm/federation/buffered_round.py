"""Rounds that do not wait for everybody: the server steps when enough answers are in.

In:       the parts of a flat round, the size of the buffer, how late an answer may be.
Out:      states, metrics; in the state, who is still at work and from which model it began.
Promise:  a round without anybody left behind is the synchronous round, to the bit; a late answer
          counts less, or not at all, by the rounds since it began; no client is asked twice at a
          time; a resumed run goes on with the same members in flight.
Not here: whose answer comes when (`Waiting`: simulated here, over a network in
          `engine/buffered.py`), the server's step (`round.py`).

A round begins by asking as many members as there are places free, all from the present model. It
ends when `buffer.size` answers are in and the grace is over. Nguyen et al. 2022, "Federated
Learning with Buffered Asynchronous Aggregation": an answer that is s rounds late is multiplied by
(1 + s)^-a, and the sum is divided by the weight before this discount, so that a step made of late
answers is a short one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedlm.cohort.sampling import draw
from fedlm.core import tree
from fedlm.core.keys import generator_for
from fedlm.core.types import (
    Cohort,
    Engine,
    Gathered,
    History,
    Members,
    Message,
    Params,
    PyTree,
    Start,
    Total,
)
from fedlm.federation.round import (
    FlatRound,
    Metrics,
    NodeState,
    Played,
    metrics_of,
    outgoing,
    server_half,
    told,
)

EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """When the server steps, and what late answers are worth.

    >>> Buffer(exponent=0.5).discount(3)
    0.5
    """

    size: int | None = None  # answers that make a step; None: all that are in flight
    largest_staleness: int = 10  # rounds
    exponent: float = 0.5
    grace: float = 0.0  # seconds

    def discount(self, staleness: int) -> float:
        """Return the factor of an answer that is so many rounds late."""
        return math.pow(1 + staleness, -self.exponent)


class Flight(eqx.Module):
    """The members in flight, asked and not yet answered: one slot per member of a cohort."""

    members: Int[np.ndarray, " places"]  # EMPTY where nobody is
    began: Int[np.ndarray, " places"]  # the round in which each was asked
    due: Float[np.ndarray, " places"]  # simulated: the time at which each will answer
    clock: Float[Array, ""]  # seconds since the run began, simulated or waited
    models: PyTree  # what the last `largest_staleness` rounds sent, by round modulo their number


class Flying(NamedTuple):
    """All members in flight that were asked in one round."""

    began: int
    members: Members  # ascending
    due: np.ndarray
    start: Start  # what they begin from


class Landed(NamedTuple):
    """The answers of members that were asked in one round."""

    began: int
    members: Members  # who answered
    gathered: Gathered


class Landing(NamedTuple):
    """All answers of a round, in the order in which they are added."""

    groups: Sequence[Landed]
    lost: Sequence[tuple[int, int]]  # (round, member) of whom no answer will come
    clock: float


class Waiting(Protocol):
    """A way to wait for answers."""

    def __call__(self, round: int, flying: Sequence[Flying], enough: int, clock: float) -> Landing:
        """Return when `enough` members have answered and the grace is over."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Simulated answers, each of which comes when its delay is over, on a virtual clock."""

    engine: Engine
    grace: float = 0.0

    def __call__(self, round: int, flying: Sequence[Flying], enough: int, clock: float) -> Landing:
        """Train the members whose simulated answers come in time; move the clock to the last."""
        due = np.sort(np.concatenate([one.due for one in flying]))
        until = due[enough - 1] + np.float32(self.grace)
        groups = []
        for one in flying:
            here = one.members[one.due <= until]
            if len(here):
                cohort = self.engine.prepare(one.began, here)
                groups.append(Landed(one.began, here, self.engine.total(one.start, cohort)))
        return Landing(groups, (), float(min(until, due[-1])))


@dataclass(frozen=True, kw_only=True)
class BufferedRound:
    """Rounds of a flat federation in which the server steps with the first answers."""

    flat: FlatRound
    buffer: Buffer
    waiting: Waiting
    delays: Callable[[int, Members], np.ndarray]  # of members asked in a round

    names = ("",)
    topology = None

    def init(self, params: Params) -> NodeState:
        """Return the state before the first round: nobody is in flight."""
        state, places = self.flat.init(params), self.flat.algorithm.sampling.cohort
        sent = jax.device_get(outgoing(self.flat.algorithm, state))
        kept = self.buffer.largest_staleness
        flight = Flight(
            members=np.full(places, EMPTY, np.int32),
            began=np.full(places, EMPTY, np.int32),
            due=np.zeros(places, np.float32),
            clock=jnp.float32(0.0),
            models=jax.tree.map(lambda x: np.zeros((kept, *x.shape), x.dtype), sent),
        )
        return replace(state, flight=flight)

    def play(self, state: NodeState, rounds: range) -> Generator[Played, None, None]:
        """Play rounds one after the other."""
        for round in rounds:
            played = self._play(state, round)
            yield played
            state = played.state

    def _play(self, state: NodeState, round: int) -> Played:
        algorithm, started = self.flat.algorithm, time.perf_counter()
        flight = _on_host(state.flight)
        flight, dropped = self._give_up(flight, round)
        asked = self._choose(flight, round)
        flight = self._ask(flight, asked, round)
        flying, sent = self._flying(flight, state, round), outgoing(algorithm, state)
        aloft = sum(len(one.members) for one in flying)
        landing = Landing((), (), float(flight.clock))
        if aloft:
            enough = min(self.buffer.size or aloft, aloft)
            landing = self.waiting(round, flying, enough, float(flight.clock))
        gathered = self._joined(landing.groups, round, sent)
        after = server_half(algorithm, replace(state, flight=None), gathered.total, asked)
        flight = self._landed(flight, landing, round, sent)
        after = replace(after, flight=flight)
        bytes_of = algorithm.download.encoded_bytes
        gathered = gathered._replace(
            download_bytes=gathered.download_bytes + dropped * bytes_of(sent)
        )
        metrics = metrics_of(round, gathered, started) | self._metrics(landing, flight, round)
        metrics |= {"asked": len(asked), "given_up": dropped, "lost": len(landing.lost)}
        return Played(after, metrics, told(algorithm, metrics, state, after))

    # ---- who is in flight ----------------------------------------------------------------

    def _give_up(self, flight: Flight, round: int) -> tuple[Flight, int]:
        """Free the slots of members whose answers would be too old; return how many."""
        old = (flight.members != EMPTY) & (round - flight.began > self.buffer.largest_staleness)
        return _freed(flight, old), int(old.sum())

    def _choose(self, flight: Flight, round: int) -> Members:
        """Draw members for the free slots by the sampling law, none of whom is in flight."""
        sampling = self.flat.algorithm.sampling
        rng = generator_for(self.flat.seed, "cohort", round=round)
        drawn = draw(sampling, rng, round, History(np.zeros(0), np.zeros(0)))
        free = int((flight.members == EMPTY).sum())
        if free == len(flight.members):
            return drawn
        drawn = rng.permutation(drawn[~np.isin(drawn, flight.members)])
        return np.sort(drawn[:free])

    def _ask(self, flight: Flight, asked: Members, round: int) -> Flight:
        """Put members into free slots."""
        members, began, due = (x.copy() for x in (flight.members, flight.began, flight.due))
        places = np.flatnonzero(members == EMPTY)[: len(asked)]
        members[places], began[places] = asked, round
        due[places] = np.float32(flight.clock) + self.delays(round, asked)
        return replace(flight, members=members, began=began, due=due)

    def _flying(self, flight: Flight, state: NodeState, round: int) -> list[Flying]:
        """Return who is in flight by the round in which they were asked, the oldest first."""
        found = []
        for began in sorted({int(b) for b in flight.began[flight.members != EMPTY]}):
            here = np.flatnonzero((flight.members != EMPTY) & (flight.began == began))
            here = here[np.argsort(flight.members[here])]
            model: Any = outgoing(self.flat.algorithm, state)
            if began != round:
                slot = began % self.buffer.largest_staleness
                model = tree.from_host(tree.take(flight.models, slot))
            members = flight.members[here].astype(np.int64)
            found.append(Flying(began, members, flight.due[here], Start(model)))
        return found

    def _landed(self, flight: Flight, landing: Landing, round: int, sent: Message) -> Flight:
        """Free the slots of members that answered or were lost, and store the round's model."""
        gone = {(group.began, int(m)) for group in landing.groups for m in group.members}
        gone |= {(int(began), int(member)) for began, member in landing.lost}
        pairs = zip(flight.began.tolist(), flight.members.tolist(), strict=True)
        flight = _freed(flight, np.array([pair in gone for pair in pairs], bool))
        models, kept = flight.models, self.buffer.largest_staleness
        if kept and np.any(flight.began == round):
            models = jax.tree.map(lambda held, new: _put(held, round % kept, new), models, sent)
        return replace(flight, clock=jnp.float32(landing.clock), models=models)

    # ---- what their answers make ---------------------------------------------------------

    def _joined(self, groups: Sequence[Landed], round: int, sent: Message) -> Gathered:
        """Return the sum of all answers, each with the discount of its age."""
        if not groups:
            nobody = Cohort(round, np.zeros(0, np.int64))
            return self.flat.engine.total(Start(sent), nobody)
        total: Total | None = None
        for group in groups:
            worth = self.buffer.discount(round - group.began)
            total = _add(total, group.gathered.total, worth)
        assert total is not None
        upload, download = (
            sum(getattr(group.gathered, way) for group in groups)
            for way in ("upload_bytes", "download_bytes")
        )
        return Gathered(total, upload, download)

    def _metrics(self, landing: Landing, flight: Flight, round: int) -> Metrics:
        """Return from which round each answer began, and how late that is on average."""
        ages = [round - group.began for group in landing.groups for _ in group.members]
        return {
            "answers": {str(group.began): group.members.tolist() for group in landing.groups},
            "staleness": float(np.mean(ages)) if ages else 0.0,
            "in_flight": int((flight.members != EMPTY).sum()),
            "clock": float(landing.clock),
        }

    # ---- as in a flat federation ---------------------------------------------------------

    def models(self, state: NodeState) -> dict[str, Params]:
        """Return the whole model of a state, under the empty name."""
        return self.flat.models(state)

    def own_models(self, state: NodeState) -> dict[str, Params]:
        """Return nothing: a flat federation has one model."""
        return {}

    def params(self, state: NodeState) -> Params:
        """Return all parameters of a state, with the frozen ones."""
        return self.flat.params(state)

    def renewed(self, state: NodeState, lines: int) -> NodeState:
        """Return the state with a new secret, made from its old one and the ledger's length."""
        return self.flat.renewed(state, lines)

    def digest(self, state: NodeState) -> bytes:
        """Return the ledger's digest of the sum that led to a state."""
        return self.flat.digest(state)

    def header(self) -> Metrics:
        """Return nothing: a flat federation has no shape to describe."""
        return {}


def _on_host(flight: Flight) -> Flight:
    """Return a flight whose arrays are NumPy's; those of a checkpoint are JAX's."""
    return jax.tree.map(np.asarray, flight)


def _freed(flight: Flight, places: np.ndarray) -> Flight:
    members = np.where(places, np.int32(EMPTY), flight.members)
    began = np.where(places, np.int32(EMPTY), flight.began)
    due = np.where(places, np.float32(0), flight.due)
    return replace(flight, members=members, began=began, due=due)


def _put(held: np.ndarray, slot: int, new: PyTree) -> np.ndarray:
    held = held.copy()
    held[slot] = np.asarray(new)
    return held


def _add(total: Total | None, more: Total, worth: float) -> Total:
    """Add a group's sum to a total; `worth` scales its change, and not its weight and counts."""
    if worth != 1.0:
        more = replace(more, delta=tree.scale(more.delta, worth))
    return more if total is None else tree.add(total, more)
