"""Secure sums of nodes over a transport: five questions to each node in a round.

In:       what members begin from, a cohort whose text is elsewhere, the federation's members.
Out:      the sum of the updates of all nodes that stayed, with the bytes that crossed the wire.
Promise:  all members of the list are asked in every round, so that who is asked tells nothing of
          the draw; the server holds one vector however many nodes there are; a node that is away,
          late, refuses or sends nonsense is left out; with fewer nodes than the threshold another
          attempt is made, or the round is lost and said, and the next one goes on; a server that
          was killed asks the same questions again, so that a sum is opened once and equal.
Not here: the protocol (`secure`), what a vector holds (`secure_vector.py`), a node's half
          (`deploy/secure_worker.py`).

On disk the server keeps who was in which list of the attempt under way, and nothing else: neither
vectors nor shares.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.documents import read_json
from fedlm.core.errors import EngineError, RecordError, require
from fedlm.core.keys import key_for
from fedlm.core.types import Arrived, Cohort, Gathered, Members, Start, Starts
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Dispatch, Quorum, RoundStats, Transport
from fedlm.engine.secure import Nodes, check_members
from fedlm.engine.secure_messages import SECURE, SecureRequest
from fedlm.engine.secure_vector import Integers, Shares, SumVector
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like
from fedlm.secure import server
from fedlm.secure.local import STEPS
from fedlm.secure.messages import answer_bytes
from fedlm.secure.server import ServerState
from fedlm.secure.store import write_private
from fedlm.secure.terms import MOST_ATTEMPTS, Member, Session, Terms, TooFew

ATTEMPTS = 3  # at one round
MOST_LOST = 3  # rounds in a row
Lists = dict[str, tuple[int, ...]]
"""By step of the protocol, the places of those whose answers counted."""


class Progress:
    """The lists of the attempt that is under way, in a file that only its owner can read."""

    def __init__(self, file: Path | None = None) -> None:
        """Read a file, which is written at every change; None keeps no file."""
        self.file = file
        self.at, self.lists = _read(file)

    def attempt(self, round: int) -> int:
        """Return the attempt at a round that was under way; 0 if none was."""
        return self.at[1] if self.at[0] == round else 0

    def begin(self, session: Session) -> Lists:
        """Return the lists of a session that a server asked before it was killed, else none."""
        at = (session.round, session.attempt)
        if self.at != at:
            self.at, self.lists = at, {}
            self._write()
        return dict(self.lists)

    def keep(self, step: str, places: Iterable[int]) -> None:
        """Note whose answers to a step count, before anybody is told."""
        self.lists[step] = tuple(sorted(places))
        self._write()

    @property
    def signing(self) -> bool:
        """Whether nodes may have signed the survivors of this attempt: then it is the last."""
        return "mask" in self.lists

    def _write(self) -> None:
        if self.file is not None:
            facts = {"round": self.at[0], "attempt": self.at[1], "lists": self.lists}
            write_private(self.file, json.dumps(facts).encode())


def _read(file: Path | None) -> tuple[tuple[int, int], Lists]:
    if file is None or not file.is_file():
        return (-1, 0), {}
    try:
        facts = read_json(file, "the file", RecordError)
        lists = {str(k): tuple(int(i) for i in v) for k, v in facts["lists"].items()}
        if not lists.keys() <= set(STEPS):
            raise ValueError("an unknown step")
        return (int(facts["round"]), int(facts["attempt"])), lists
    except (ValueError, TypeError, KeyError, AttributeError, RecordError) as error:
        raise RecordError(
            f"{file} is damaged: {str(error)[:100]}. Remove it: the round that was under way is "
            "then lost, and the next goes on."
        ) from None


@dataclass
class _Round:
    """What the steps of one round share."""

    session: Session
    asked: Mapping[str, tuple[int, ...]]  # members by node
    clip_norm: float
    frame: bytes  # the model's parameters
    stats: RoundStats
    known: Lists  # of a session that was asked before

    def places(self, step: str, otherwise: Iterable[int]) -> list[int]:
        return sorted(self.known.get(step, tuple(otherwise)))


class RemoteSecureEngine:
    """An engine whose totals are secure sums of the nodes of a network."""

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        assignments: Sequence[Assignment],
        members: tuple[Member, ...],
        *,
        nodes: Nodes,
        integers: Integers,
        shares: Callable[[Any], Shares] | None,
        run: str,
        recipe: str,
        seed: int,
        quorum: Quorum,
        on_stats: Callable[[RoundStats], None] = lambda tally: None,
        counters: Counters | None = None,
        say: Callable[[str], None] = lambda text: None,
        file: Path | None = None,
    ) -> None:
        """Take the members of the federation's list, which every node has too.

        `shares` is noise at nodes, from the shapes of an update; `file` keeps the attempt under
        way for a server that is killed.
        """
        self.algorithm, self.transport, self.assignments = algorithm, transport, tuple(assignments)
        self.members, self.nodes, self.integers, self.shares = members, nodes, integers, shares
        self.run, self.recipe, self.seed, self.quorum = run, recipe, seed, quorum
        self.on_stats, self.counters, self.say = on_stats, counters or Counters(), say
        self.progress, self.lost = Progress(file), 0
        self.place_of = {member.name: place for place, member in enumerate(members)}
        self._check()

    def _check(self) -> None:
        here = [assignment.name for assignment in self.assignments]
        foreign = [name for name in here if name not in self.place_of]
        require(
            not foreign,
            "the list of members",
            sorted(self.place_of)[:8],
            f"also {', '.join(foreign[:8])}, who would take part in secure sums",
            "Propose a list with fedlm federation members HOME --propose, and let members approve.",
        )
        relays = [assignment.name for assignment in self.assignments if assignment.leaves]
        require(
            not relays,
            "wire.secure_nodes",
            self.nodes.count,
            f"0 where nodes are behind relays, here {', '.join(relays[:8])}: a relay cannot take "
            "part in a secure sum yet",
            "Let its nodes join this server directly.",
        )
        require(
            self.nodes.count == len(self.members),
            "wire.secure_nodes",
            self.nodes.count,
            f"{len(self.members)}, the members of the federation's list",
        )

    @property
    def adds_noise(self) -> bool:
        """Whether a total carries the noise of its nodes."""
        return self.shares is not None

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort by its members alone; its text is elsewhere."""
        return Cohort(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Refuse: a secure sum shows no single update."""
        raise EngineError("single updates were asked for: under secure sums nobody sees them.")

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return the sum of the updates of all nodes that stayed; zero if the round is lost."""
        assert isinstance(starts, Start)  # one per member is a tree, which has no secure sums
        check_members(self.integers, cohort)
        began, stats = time.monotonic(), RoundStats(cohort.round)
        vector = self._vector(starts, cohort.round)
        asked = self._members_by_node(cohort)
        words, survivors = self._opened(vector, starts, cohort.round, asked, stats)
        stats.answered = [self.members[place].name for place in survivors]
        stats.seconds = time.monotonic() - began
        for kind in (stats.refused, stats.garbage):
            for name in set(kind) & set(stats.answered):
                del kind[name]
        stats.away = sorted(set(stats.away) - set(stats.answered))
        stats.late = sorted(set(stats.late) - set(stats.answered))
        self.on_stats(stats)
        self._count_lost(stats)
        members = sum(len(asked[name]) for name in stats.answered)
        total = vector.total(words, cohort.round, members)
        return Gathered(total, stats.up_bytes, stats.down_bytes, vector.excess(len(survivors)))

    def _vector(self, start: Start, round: int) -> SumVector:
        like = update_like(self.algorithm, model_like(start), round).delta
        shares = None if self.shares is None else self.shares(like)
        return SumVector(integers=self.integers, nodes=self.nodes.count, like=like, shares=shares)

    def _members_by_node(self, cohort: Cohort) -> dict[str, tuple[int, ...]]:
        """Return the members of a cohort by node, for all nodes, also those that have none."""
        numbers = np.asarray(cohort.members)
        ends = {a.name: (a.first, a.first + a.clients) for a in self.assignments}
        return {
            name: tuple(int(n) for n in numbers[(numbers >= first) & (numbers < end)])
            for name, (first, end) in ends.items()
        }

    def _count_lost(self, stats: RoundStats) -> None:
        """Say that a round is lost; raise `EngineError` if several are, one after the other."""
        if not stats.lost:
            self.lost = 0
            return
        self.lost += 1
        self.say(f"round {stats.round} is lost, and its model stays as it was: {stats.lost}")
        if self.lost >= MOST_LOST:
            why = {**stats.refused, **stats.garbage}
            said = " ".join(f"{name}: {reason}" for name, reason in sorted(why.items())[:4])
            raise EngineError(
                f"{self.lost} rounds in a row were lost, the last one because: {stats.lost} {said} "
                "Bring the nodes back, and go on with --resume."
            )

    # ---- attempts ----------------------------------------------------------------------

    def _opened(
        self,
        vector: SumVector,
        start: Start,
        round: int,
        asked: Mapping[str, tuple[int, ...]],
        stats: RoundStats,
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the words of a round's sum and who survived; zeros and nobody if it is lost."""
        terms = Terms(
            members=self.members,
            threshold=self.nodes.threshold,
            bits=self.integers.bits,
            size=vector.size,
            colluders=self.nodes.colluders,
        )
        key = key_for(self.seed, "download", round=round)
        frame = self.algorithm.download.encode(start.model, key)
        first = self.progress.attempt(round)
        for attempt in range(first, min(first + ATTEMPTS, MOST_ATTEMPTS)):
            session = Session(terms, self.run, round, attempt)
            known = self.progress.begin(session)
            part = _Round(session, asked, start.clip_norm, frame, stats, known)
            stats.lost = ""
            try:
                return self._attempt(part)
            except TooFew as error:
                stats.lost = str(error)
                if self.progress.signing:
                    break
                self.say(f"round {round}, attempt {attempt}: {error}")
        return np.zeros(vector.size, np.uint64), ()

    def _attempt(self, part: _Round) -> tuple[np.ndarray, tuple[int, ...]]:
        """Ask the five questions of one attempt."""
        session, keep = part.session, self.progress.keep
        everybody = (self.place_of[name] for name in part.asked)
        questions = dict.fromkeys(part.places("keys", everybody), ())
        state, question = server.take_keys(session, self._ask(part, "keys", questions))
        keep("keys", state.keys)
        same = dict.fromkeys(part.places("share", state.keys), (question,))
        state, each = server.take_shares(state, self._ask(part, "share", same))
        keep("share", state.shared)
        own = {place: (each[place], part.frame) for place in part.places("mask", each)}
        state, question = server.take_masked(state, self._ask(part, "mask", own))
        keep("mask", state.survivors)
        same = dict.fromkeys(part.places("sign", state.survivors), (question,))
        signed: list[int] = []
        answers = self._ask(part, "sign", same, signed)
        state, question = server.take_signatures(state, answers)
        keep("sign", signed)
        same = dict.fromkeys(signed, (question,))
        state, words = server.take_revealed(state, self._ask(part, "reveal", same))
        self._note_faults(part, state)
        return words, state.survivors

    def _note_faults(self, part: _Round, state: ServerState) -> None:
        for place, why in state.faults:
            name = self.members[place].name
            part.stats.garbage[name] = why
            self.say(f"round {part.session.round}: {name}: {why}")

    def _ask(
        self,
        part: _Round,
        step: str,
        questions: Mapping[int, tuple[bytes, ...]],
        answered: list[int] | None = None,
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the answers of the nodes that are asked in a step, as they come."""
        session, stats = part.session, RoundStats(part.session.round)
        frames = {self.members[place].name: q for place, q in questions.items()}
        longest = answer_bytes(session.terms)[step]
        requests = {
            assignment.name: self._request(part, step, assignment, longest)
            for assignment in self.assignments
            if assignment.name in frames
        }
        if not requests:
            return
        # Of a session that was asked before a restart all are wanted: other lists are refused.
        share = 1.0 if step in part.known else session.terms.threshold / len(requests)
        # A round that has not begun waits until enough nodes are there, as any round does.
        begun = step != "keys" or session.attempt > 0 or bool(part.known)
        quorum = Quorum(quorum=min(1.0, share), deadline=self.quorum.deadline, gives_up=begun)
        dispatch = Dispatch(
            self.transport,
            quorum,
            requests,
            stats,
            in_order=False,
            frames=lambda names: ((name, frames[name]) for name in names),
            say=lambda names, seconds: self.say(
                f"waiting for {', '.join(names)} ({step}), {seconds:.0f} s"
            ),
            exchange=SECURE,
        )
        for name, reply in dispatch.replies():
            self.counters.hear(name, reply.counter)
            stats.answered.append(name)
            if answered is not None:
                answered.append(self.place_of[name])
            yield self.place_of[name], reply.frames[0]
            del reply
        _merge(part.stats, stats)
        if not begun and len(stats.answered) < session.terms.threshold:
            dispatch.check_quorum()  # raises: nothing was begun, and the next round would not help

    def _request(
        self, part: _Round, step: str, assignment: Assignment, longest: int
    ) -> SecureRequest:
        return SecureRequest(
            run=self.run,
            recipe=self.recipe,
            round=part.session.round,
            attempt=part.session.attempt,
            step=step,
            session=part.session.digest.hex(),
            first=assignment.first,
            population=sum(a.clients for a in self.assignments),
            text=assignment.text,
            members=part.asked[assignment.name],
            clip_norm=float(part.clip_norm),
            longest=longest,
            counter=self.counters.of(assignment.name),
        )


def _merge(whole: RoundStats, step: RoundStats) -> None:
    """Add what happened in one step to what happened in a round."""
    for field in fields(RoundStats):
        one, other = getattr(whole, field.name), getattr(step, field.name)
        if isinstance(one, dict):
            one.update(other)
        elif isinstance(one, list):
            one.extend(item for item in other if item not in one)
        elif field.name in ("up_bytes", "down_bytes"):
            setattr(whole, field.name, one + other)
