"""Answers of nodes that come when they come: what buffered rounds wait for over a network.

In:       who is in flight from which model, how many answers make a step, a place on disk.
Out:      the sums of the answers that are in, by the round in which their members were asked.
Promise:  an answer is on disk before it counts as in, and is asked for no more; answers are added
          in the order of rounds and assignments, whoever came first; which answers a round took is
          on disk before they are added, so that a killed server that goes on takes the same ones;
          a node that went away and came back is asked again.
Not here: the round (`federation/buffered_round.py`), one request (`dispatch.py`), files (`deploy`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedlm.core.errors import EngineError, damaged
from fedlm.core.types import Cohort, Gathered
from fedlm.engine.dispatch import (
    FIRST_TOLD,
    LONGEST_NAP,
    PRESENCE_SECONDS,
    SHORTEST_NAP,
    TRAINING,
    Dispatch,
    Presence,
    RoundStats,
    Transport,
)
from fedlm.engine.messages import Payload, TrainReply, TrainRequest
from fedlm.engine.remote import RemoteEngine, Sum
from fedlm.federation.buffered_round import Flying, Landed, Landing


class KeptReplies(Protocol):
    """The replies of nodes to the requests of one round, on disk."""

    def __contains__(self, name: str) -> bool: ...

    def write(self, name: str, reply: TrainReply) -> None: ...

    def read(self, name: str, kind: type[TrainReply], /) -> TrainReply: ...


class Spool(Protocol):
    """The answers that wait for their round, and what each round took."""

    def replies(self, began: int, model: str) -> KeptReplies:
        """Return the replies to the requests of a round, which sent a model with this hash."""

    def taken(self, round: int) -> Mapping[str, Any] | None:
        """Return what a round took when it was played before; None if it was not."""

    def take(self, round: int, taken: Mapping[str, Any]) -> None:
        """Write down what a round takes."""

    def forget(self, round: int) -> None:
        """Remove the answers that no round from this one on can ask for."""


class Pending(NamedTuple):
    """The requests of one round that are not finished."""

    flying: Flying
    requests: dict[str, TrainRequest]  # by node, in the order of assignments
    dispatch: Dispatch
    replies: KeptReplies
    frame_bytes: int


class Outcome(NamedTuple):
    """The requests that are over, as (round, node)."""

    landed: tuple[tuple[int, str], ...]
    lost: tuple[tuple[int, str], ...]
    clock: float


@dataclass
class RemoteWaiting:
    """Waits for the answers of nodes, of whichever round they are."""

    engine: RemoteEngine
    spool: Spool
    grace: float = 0.0  # seconds

    def __post_init__(self) -> None:
        self._asked: dict[int, Pending] = {}
        self._transport = _Glances(self.engine.transport)

    def __call__(self, round: int, flying: Sequence[Flying], enough: int, clock: float) -> Landing:
        """Return the sums of the answers with which a round makes its step."""
        began, stats = time.monotonic(), RoundStats(round)
        asked = self._ask(flying, stats)
        kept = self.spool.taken(round)
        if kept is None:
            outcome = self._wait(round, asked, enough, clock, stats)
            self.spool.take(round, outcome._asdict())
        else:
            outcome = outcome_of(kept, {(r, n) for r, a in asked.items() for n in a.requests})
            self._fetch(asked, outcome)
        groups = [g for a in asked.values() if (g := self._group(a, outcome, stats)) is not None]
        lost = tuple(self._lost(asked, outcome, groups))
        stats.seconds = time.monotonic() - began
        stats.put_aside = dict(
            self.engine.offenders.judge(round, stats.garbage, list(stats.answered))
        )
        self.engine.on_stats(stats)
        self.spool.forget(round)
        return Landing(groups, lost, outcome.clock)

    # ---- asking --------------------------------------------------------------------------

    def _ask(self, flying: Sequence[Flying], stats: RoundStats) -> dict[int, Pending]:
        """Return the unfinished requests by round, made anew where this process has none."""
        rounds = {one.began: one for one in flying}
        self._asked = {r: a for r, a in self._asked.items() if r in rounds}
        for began, one in rounds.items():
            if began not in self._asked:
                self._asked[began] = self._request(one)
            here = self._asked[began]
            here.dispatch.stats = stats
            left = set(one.members.tolist())
            requests = {n: r for n, r in here.requests.items() if left & set(r.members)}
            self._asked[began] = here._replace(flying=one, requests=requests)
        return dict(sorted(self._asked.items()))

    def _request(self, one: Flying) -> Pending:
        """Return the requests to the nodes of members that were asked in one round."""
        engine, cohort = self.engine, Cohort(one.began, one.members)
        like = engine.like_of(one.start, one.began).delta
        made, frames = engine.to_clients(one.start, cohort, engine.by_member, like)
        frame = engine.encoded(one.start, one.began)
        replies = self.spool.replies(one.began, hashlib.sha256(frame).hexdigest())
        missing = {name: request for name, request in made.items() if name not in replies}
        missing = engine.offenders.to_ask(missing, one.began)
        dispatch = Dispatch(
            self._transport,
            engine.quorum,
            missing,
            RoundStats(one.began),
            frames=frames,
            exchange=TRAINING,
        )
        return Pending(one, made, dispatch, replies, len(frame))

    def _look(self, asked: Mapping[int, Pending]) -> None:
        """Save the replies that have arrived to disk, and send the requests not sent yet."""
        for here in asked.values():
            for name, reply in here.dispatch.arrived():
                self.engine.counters.hear(name, reply.counter)
                here.replies.write(name, reply)
                del reply  # or it would be held until the next one is there

    # ---- waiting -------------------------------------------------------------------------

    def _wait(
        self,
        round: int,
        asked: Mapping[int, Pending],
        enough: int,
        clock: float,
        stats: RoundStats,
    ) -> Outcome:
        """Wait until enough members have answered and the grace is over, or nobody is left."""
        began, full, nap, said = time.monotonic(), math.inf, SHORTEST_NAP, FIRST_TOLD
        while True:
            self._look(asked)
            now = time.monotonic()
            outcome = _sorted_out(asked, clock + now - began)
            waiting = _waited_for(asked, outcome)
            have = sum(len(asked[r].requests[n].members) for r, n in outcome.landed)
            if have >= enough:
                full = min(full, now)
            if now >= full + self.grace or not waiting:
                break
            if have < enough and self._enough_by_quorum(waiting, have, enough, now - began):
                break
            if now - began > said:
                said = 2 * (now - began)
                self.engine.tell_waiting(sorted({name for _, name in waiting}), now - began)
            time.sleep(nap)
            nap = min(LONGEST_NAP, 1.5 * nap)
        if not outcome.landed and (waiting or stats.refused):
            self._nobody(round, stats)
        return outcome

    def _enough_by_quorum(
        self, waiting: Sequence[tuple[int, str]], have: int, enough: int, waited: float
    ) -> bool:
        """Return whether a round ends with fewer answers: the others are away, or late."""
        quorum, there = self.engine.quorum, self._transport.presence()
        here = [n for _, n in waiting if n in there and there[n].online]
        late = waited > quorum.deadline
        least = max(1, math.ceil(quorum.quorum * enough - 1e-9))
        if have >= least:
            return late or not here
        return late and len(here) == len(waiting)  # who is away may come back

    def _nobody(self, round: int, stats: RoundStats) -> None:
        reasons = [f"{name} refused: {reason}" for name, reason in stats.refused.items()]
        reasons += [f"{name} sent garbage: {reason}" for name, reason in stats.garbage.items()]
        raise EngineError(
            f"round {round}: no node in flight answered. {' '.join(reasons)}".rstrip()
        )

    def _fetch(self, asked: Mapping[int, Pending], outcome: Outcome) -> None:
        """Wait for the answers that a round took when it was played before."""
        nap = SHORTEST_NAP
        while missing := [(r, n) for r, n in outcome.landed if n not in asked[r].replies]:
            gone = [n for r, n in missing if n not in asked[r].dispatch.pending]
            if gone:
                raise EngineError(
                    f"{', '.join(gone)} answered before and does not answer again what this run "
                    "goes on with: bring the node back as it was, or begin another run."
                )
            self._look(asked)
            time.sleep(nap)
            nap = min(LONGEST_NAP, 1.5 * nap)

    # ---- adding --------------------------------------------------------------------------

    def _group(self, asked: Pending, outcome: Outcome, stats: RoundStats) -> Landed | None:
        """Return the sum of the answers to one round's requests; None without any."""
        began, engine = asked.flying.began, self.engine
        names = [n for n in asked.requests if (began, n) in outcome.landed]
        if not names:
            return None
        like = engine.like_of(asked.flying.start, began)
        total, upload = Sum(like), 0
        came: list[int] = []
        for name in names:
            request = asked.requests[name]
            reply = asked.replies.read(name, TrainReply)
            upload += sum(map(len, reply.frames))
            for members, update, _ in engine.answers_in(name, request, reply, like.delta, stats):
                total.add(members, update, weighted=engine.by_member)
                came += members
                del update
            del reply
        gathered = Gathered(total.result(), upload, len(names) * asked.frame_bytes)
        return Landed(began, np.array(sorted(came), np.int64), gathered)

    def _lost(
        self, asked: Mapping[int, Pending], outcome: Outcome, groups: Sequence[Landed]
    ) -> Iterator[tuple[int, int]]:
        """Yield members of whom no answer will come: a relay may answer for some of them alone."""
        came = {(group.began, int(m)) for group in groups for m in group.members}
        for began, name in (*outcome.landed, *outcome.lost):
            for member in asked[began].requests[name].members:
                if (began, member) not in came:
                    yield began, member


def _sorted_out(asked: Mapping[int, Pending], clock: float) -> Outcome:
    """Return which requests are answered by now, and which never will be."""
    landed, lost = [], []
    for began, here in asked.items():
        for name in here.requests:
            if name in here.replies:
                landed.append((began, name))
            elif name not in here.dispatch.pending:  # it refused, sent garbage, or is put aside
                lost.append((began, name))
    return Outcome(tuple(landed), tuple(lost), clock)


def _waited_for(asked: Mapping[int, Pending], outcome: Outcome) -> list[tuple[int, str]]:
    over = {*outcome.landed, *outcome.lost}
    every = ((began, name) for began, here in asked.items() for name in here.requests)
    return [one for one in every if one not in over]


def outcome_of(kept: Mapping[str, Any], in_flight: Set[tuple[int, str]]) -> Outcome:
    """Return what a round took, as it was kept; raise `RecordError` if that is damaged.

    A round takes the answers of requests that are in flight, given as (round, node), each once.
    """
    with damaged("the record of the answers that a round took"):
        landed, lost = (
            tuple((int(r), str(n)) for r, n in kept[part]) for part in ("landed", "lost")
        )
        over = (*landed, *lost)
        if len(set(over)) < len(over) or not set(over) <= in_flight:
            raise ValueError("it names answers to requests that are not in flight")
        return Outcome(landed, lost, float(kept["clock"]))


class _Glances:
    """A transport whose `presence` is polled at most once per second."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self._looked = transport, -math.inf
        self._nodes: dict[str, Presence] = {}

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        return self.transport.send(node_id, payload, round)

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        return self.transport.fetch(message_id, max_bytes)

    def presence(self) -> dict[str, Presence]:
        if time.monotonic() - self._looked > PRESENCE_SECONDS:
            self._nodes, self._looked = self.transport.presence(), time.monotonic()
        return self._nodes
