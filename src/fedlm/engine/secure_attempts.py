"""One secure sum of the members of a list, over a transport: five questions to each node.

In:       the terms of a sum, a model's parameters, who of each node's members takes part.
Out:      the sum modulo 2^bits of the vectors of all nodes that stayed; or nothing, and why.
Promise:  all members of the list are asked in every round, so that who is asked tells nothing of
          the draw; one vector is held however many nodes there are; a node that is away, late,
          refuses or sends nonsense is left out; with fewer nodes than the threshold another attempt
          is made, until nodes may have signed: then the round is lost; whoever asks and is killed
          asks the same questions again, so that a sum is opened once and equal.
Not here: the protocol (`secure`), what a vector holds (`secure_vector.py`), whose sum it is: that
          of a whole run (`secure_remote.py`) or of the nodes below a relay (`deploy/relay.py`), a
          node's half (`deploy/secure_worker.py`).

On disk is who was in which list of the attempt under way, and nothing else: neither vectors nor
shares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError, require
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Dispatch, Quorum, RoundStats, Transport
from fedlm.engine.secure_messages import SECURE, SecureReply, SecureRequest
from fedlm.secure import server
from fedlm.secure.local import STEPS
from fedlm.secure.messages import answer_bytes
from fedlm.secure.server import ServerState
from fedlm.secure.store import write_private
from fedlm.secure.terms import MOST_ATTEMPTS, Member, Session, Terms, TooFew

ATTEMPTS = 3  # at one round
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
        """Whether nodes may have signed this attempt's survivors, so that no retry is allowed."""
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


class Opened(NamedTuple):
    """A sum that was opened."""

    words: np.ndarray  # modulo 2^bits
    survivors: tuple[int, ...]  # places in the list of members
    nodes: int  # that hold text and are in the sum: those below a relay count one by one
    members: int  # whose updates are in the sum


@dataclass(frozen=True, kw_only=True)
class SumQuestion:
    """What all nodes are asked in one round."""

    terms: Terms
    round: int
    members: Mapping[str, tuple[int, ...]]  # of the cohort, by node; also those that have none
    clip_norm: float
    frame: bytes  # the model's parameters


@dataclass
class _Round:
    """What the steps of one attempt share."""

    session: Session
    asked: SumQuestion
    stats: RoundStats
    known: Lists  # of a session that was asked before
    told: dict[int, SecureReply] = field(default_factory=dict)  # how much is in each vector

    def places(self, step: str, otherwise: Iterable[int]) -> list[int]:
        return sorted(self.known.get(step, tuple(otherwise)))


class SecureSums:
    """The secure sums of one list of members in one run."""

    def __init__(
        self,
        transport: Transport,
        assignments: Sequence[Assignment],
        members: tuple[Member, ...],
        *,
        run: str,
        recipe: str,
        population: int,
        quorum: Quorum,
        counters: Counters,
        say: Callable[[str], None],
        file: Path | None = None,
        waits: bool = True,
    ) -> None:
        """Take the members of a list that every node of it has too.

        `assignments` number members over the whole federation, whose size is `population`; `file`
        keeps the attempt under way, so that a server goes on with it after a kill. Unless it
        `waits`, a round for which too few nodes are there is given up at the deadline.
        """
        self.transport, self.assignments, self.members = transport, tuple(assignments), members
        self.run, self.recipe, self.population = run, recipe, population
        self.quorum, self.counters, self.say, self.waits = quorum, counters, say, waits
        self.progress = Progress(file)
        self.place_of = {member.name: place for place, member in enumerate(members)}
        foreign = [a.name for a in self.assignments if a.name not in self.place_of]
        require(
            not foreign,
            "the list of members",
            sorted(self.place_of)[:8],
            f"also {', '.join(foreign[:8])}, who would take part in secure sums",
            "Propose a list with fedlm federation members HOME --propose, and let members approve.",
        )

    def members_by_node(self, numbers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Return numbers of members by node, for all nodes, also those that have none."""
        cohort = np.asarray(tuple(numbers), np.int64)
        ends = {a.name: (a.first, a.first + a.clients) for a in self.assignments}
        return {
            name: tuple(int(n) for n in cohort[(cohort >= first) & (cohort < end)])
            for name, (first, end) in ends.items()
        }

    def opened(self, asked: SumQuestion, stats: RoundStats) -> Opened | None:
        """Return a round's sum; None, and the reason in `stats`, if the round is lost."""
        first = self.progress.attempt(asked.round)
        for attempt in range(first, min(first + ATTEMPTS, MOST_ATTEMPTS)):
            session = Session(asked.terms, self.run, asked.round, attempt)
            stats.lost = ""
            try:
                return self._attempt(_Round(session, asked, stats, self.progress.begin(session)))
            except TooFew as error:
                stats.lost = str(error)
                if self.progress.signing:
                    break
                self.say(f"round {asked.round}, attempt {attempt}: {error}")
        return None

    def _attempt(self, part: _Round) -> Opened:
        """Ask the five questions of one attempt."""
        session = part.session

        def keep(step: str, places: Iterable[int]) -> None:
            """Note a list before nodes are told; after a restart it must be the one from before."""
            found = tuple(sorted(places))
            if part.known.get(step, found) != found:
                raise TooFew(
                    f"not all nodes that were in round {session.round}, attempt {session.attempt}, "
                    f"before the restart answered again ({step}): nodes refuse other lists. No sum "
                    "was opened."
                )
            self.progress.keep(step, found)

        everybody = (self.place_of[name] for name in part.asked.members)
        questions = dict.fromkeys(part.places("keys", everybody), ())
        state, question = server.take_keys(session, self._frames(part, "keys", questions))
        keep("keys", state.keys)
        same = dict.fromkeys(part.places("share", state.keys), (question,))
        state, each = server.take_shares(state, self._frames(part, "share", same))
        keep("share", state.shared)
        own = {place: (each[place], part.asked.frame) for place in part.places("mask", each)}
        state, question = server.take_masked(state, self._frames(part, "mask", own))
        keep("mask", state.survivors)
        same = dict.fromkeys(part.places("sign", state.survivors), (question,))
        signed: list[int] = []
        state, question = server.take_signatures(state, self._frames(part, "sign", same, signed))
        keep("sign", signed)
        same = dict.fromkeys(signed, (question,))
        state, words = server.take_revealed(state, self._frames(part, "reveal", same))
        self._note_faults(part, state)
        told = [part.told[place] for place in state.survivors]
        nodes, members = sum(reply.nodes for reply in told), sum(reply.members for reply in told)
        return Opened(words, state.survivors, nodes, members)

    def _note_faults(self, part: _Round, state: ServerState) -> None:
        for place, why in state.faults:
            name = self.members[place].name
            part.stats.garbage[name] = why
            self.say(f"round {part.session.round}: {name}: {why}")

    def _frames(
        self,
        part: _Round,
        step: str,
        questions: Mapping[int, tuple[bytes, ...]],
        answered: list[int] | None = None,
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the answers of the nodes that are asked in a step, as they come."""
        for place, reply in self._ask(part, step, questions):
            if step == "mask":
                part.told[place] = self._believed(place, reply)
            if answered is not None:
                answered.append(place)
            yield place, reply.frames[0]
            del reply

    def _believed(self, place: int, reply: SecureReply) -> SecureReply:
        """Return a reply without frames, its count of nodes capped at those known behind it."""
        name = self.members[place].name
        most = max(len(a.leaves) for a in self.assignments if a.name == name)
        return replace(reply, frames=(), nodes=min(reply.nodes, max(1, most)))

    def _ask(
        self, part: _Round, step: str, questions: Mapping[int, tuple[bytes, ...]]
    ) -> Iterator[tuple[int, SecureReply]]:
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
        gives_up = begun or not self.waits
        quorum = Quorum(quorum=min(1.0, share), deadline=self.quorum.deadline, gives_up=gives_up)
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
            yield self.place_of[name], reply
            del reply
        _merge(part.stats, stats)
        if not gives_up and len(stats.answered) < session.terms.threshold:
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
            size=part.session.terms.size,
            first=assignment.first,
            population=self.population,
            text=assignment.text,
            members=part.asked.members[assignment.name],
            clip_norm=float(part.asked.clip_norm),
            longest=longest,
            counter=self.counters.of(assignment.name),
        )


def _merge(whole: RoundStats, step: RoundStats) -> None:
    """Add what happened in one step to what happened in a round."""
    for of in fields(RoundStats):
        one, other = getattr(whole, of.name), getattr(step, of.name)
        if of.name == "edges":
            whole.add_edges(step)
        elif isinstance(one, dict):
            one.update(other)
        elif isinstance(one, list):
            one.extend(item for item in other if item not in one)
        elif of.name in ("up_bytes", "down_bytes"):
            setattr(whole, of.name, one + other)
