"""Asking nodes, and waiting for their answers.

In:       questions by node, a way to send them, how much patience there is.
Out:      well-formed answers, and a tally of everything else.
Promise:  only answers to these questions are ever looked at; a node that is away, late, refuses or
          sends garbage is counted, and ends nothing unless too few are left; a node that came back
          is asked again.
Not here: what an answer means (`flower.py`), how it is laid out (`messages.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from flwr.app import Message, RecordDict

from fedlm.core.errors import EngineError, WireError
from fedlm.engine.messages import TrainReply, TrainRequest, ask, read_reply

LOOK_SECONDS = 1.0  # how often it is looked who is there
LONGEST_NAP = 0.5


class Presence(NamedTuple):
    """Whether a node is there. A lease: it runs out unless the node renews it."""

    node_id: int
    online: bool
    since: str  # when it last came; another value means that it was away in between
    until: float | str = 0.0


class Assignment(NamedTuple):
    """A node's place in a run: which members it answers for."""

    name: str
    first: int
    clients: int
    text: str = ""  # a fingerprint
    leaves: tuple[tuple[str, int], ...] = ()  # of a relay: the nodes below, and their clients


Frames = Callable[[Sequence[str]], Iterable[tuple[str, tuple[bytes, ...]]]]
"""Nodes to the frames of their questions, made as they are sent: nobody keeps them."""

Arrived = Message | WireError
"""What came for a question, or why it was not read."""


class Undelivered(Exception):
    """A message that will not be answered: its node went away, or it was forgotten."""


class Transport(Protocol):
    """A way to send questions and fetch answers.

    `fetch` may say that there will be none (`Undelivered`), or that what came is larger than
    `most` bytes or from somebody else (`WireError`): then it is not read.
    """

    def send(self, node_id: int, records: RecordDict, round: int) -> str: ...

    def send_message(self, message: Message) -> str: ...

    def fetch(self, message_id: str, most: int) -> Message | None: ...

    def presence(self) -> dict[str, Presence]: ...


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """How many of the nodes asked must answer, and how long the rest is waited for."""

    quorum: float = 1.0  # share of the nodes asked, at least one of them
    deadline: float = math.inf  # seconds


@dataclass
class RoundStats:
    """What became of a round's questions, by node."""

    round: int
    answered: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    garbage: dict[str, str] = field(default_factory=dict)
    asked_again: list[str] = field(default_factory=list)
    seconds: float = 0.0
    up_bytes: int = 0  # frames alone, as often as they were fetched or sent
    down_bytes: int = 0


class Waiting:
    """The answers to a round's questions, in the order of the seats.

    Who is at the head of the line is waited for while its lease lasts; who is away goes to the
    end, and answers of those after it are held until it has answered or the round is over.
    When everybody left is away, or the deadline has passed, a round ends with those who answered,
    if they are enough; otherwise it goes on waiting.
    """

    def __init__(
        self,
        post: Transport,
        patience: Quorum,
        asked: dict[str, TrainRequest],
        tally: RoundStats,
        *,
        in_order: bool = True,
        frames: Frames | None = None,
    ) -> None:
        """Without `frames` the questions hold theirs."""
        self.post, self.asked, self.tally, self.in_order = post, asked, tally, in_order
        self.frames = frames or (lambda names: ((name, asked[name].frames) for name in names))
        self.held: dict[str, TrainReply] = {}
        self.line = list(asked)
        self.sent: dict[str, list[str]] = {}  # messages by node: the first answer counts
        self.since: dict[str, str] = {}  # when it came that was asked last
        self.ends = time.monotonic() + patience.deadline
        self.least = max(1, math.ceil(patience.quorum * len(asked) - 1e-9))
        self._there: dict[str, Presence] = {}
        self._looked = -math.inf

    def answers(self) -> Iterator[tuple[str, TrainReply]]:
        """Well-formed answers by node; everything else is counted."""
        for name, message in self._messages():
            self._take(name, message)
            del message  # or it would be held until the next one is there
            yield from self._release(over=False)
        yield from self._release(over=True)

    def _take(self, name: str, message: Arrived) -> None:
        try:
            if isinstance(message, WireError):
                raise message
            if message.has_error():
                raise WireError(f"the node failed: {str(message.error.reason)[:200]}")
            answer = read_reply(message.content, self.asked[name])
        except WireError as error:
            self.tally.garbage[name] = str(error)
            return
        if answer.refusal:
            self.tally.refused[name] = answer.refusal
        else:
            self.tally.up_bytes += sum(map(len, answer.frames))
            self.held[name] = answer

    def _release(self, *, over: bool) -> Iterator[tuple[str, TrainReply]]:
        """What was held of those before whom nobody is waited for: sums keep their order."""
        for name in self.asked:
            if name in self.held:
                yield name, self.held.pop(name)
            elif name in self.line and self.in_order and not over:
                return

    def _messages(self) -> Iterator[tuple[str, Arrived]]:
        nap = 0.02
        self._send(self.line)
        while self.line:
            found = self._turn()
            if found is not None:
                nap = 0.02
                yield found
                del found
            elif self._over():
                break
            else:
                time.sleep(nap)
                nap = min(LONGEST_NAP, 1.5 * nap)
        for name in self.line:
            (self.tally.late if self._online(name) else self.tally.away).append(name)

    def _turn(self) -> tuple[str, Arrived] | None:
        """Whoever is next and has answered: the head of the line, or anybody after the deadline."""
        late = time.monotonic() >= self.ends
        for name in list(self.line) if late else self.line[:1]:
            message = self._fetch(name)
            if message is not None:
                self.line.remove(name)
                return name, message
            if not self._online(name) and len(self.line) > 1 and not late:
                self.line.append(self.line.pop(0))
        return None

    def _fetch(self, name: str) -> Arrived | None:
        if not self.sent.get(name) or self._returned(name):
            self._send([name])
        for message in list(self.sent.get(name, ())):
            try:
                found = self.post.fetch(message, self.asked[name].most_bytes)
            except Undelivered:
                self.sent[name].remove(message)
                continue
            except WireError as error:
                return error
            if found is not None:
                return found
        return None

    def _send(self, names: Sequence[str]) -> None:
        """Asks those of them who are there."""
        for name, frames in self.frames([name for name in names if self._online(name)]):
            there = self._presence().get(name)
            if there is None or not there.online:  # it went while others were asked
                continue
            if name in self.sent:
                self.tally.asked_again.append(name)
            question = replace(self.asked[name], frames=frames)
            made = self.post.send(there.node_id, ask(question), question.round)
            self.tally.down_bytes += sum(map(len, frames))
            if made:
                self.sent.setdefault(name, []).append(made)
                self.since[name] = there.since

    def _returned(self, name: str) -> bool:
        """A node that came again may have lost the question; the same one gives the same answer."""
        there = self._presence().get(name)
        return there is not None and there.online and there.since != self.since[name]

    def _online(self, name: str) -> bool:
        there = self._presence().get(name)
        return there is not None and there.online

    def _presence(self) -> dict[str, Presence]:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._there, self._looked = self.post.presence(), time.monotonic()
        return self._there

    def _over(self) -> bool:
        """Enough have answered, and nobody else is worth waiting for."""
        if len(self.tally.answered) + len(self.held) < self.least:
            return self._hopeless()
        late = time.monotonic() >= self.ends
        return late or not any(self._online(name) for name in self.line)

    def _hopeless(self) -> bool:
        """Who refused will refuse again: if the others are too few, waiting does not help."""
        lost = len(self.tally.refused) + len(self.tally.garbage)
        return len(self.asked) - lost < self.least

    def check_quorum(self) -> None:
        """Ends the run where a round has too few answers."""
        tally = self.tally
        if len(tally.answered) >= self.least or not self.asked:
            return
        reasons = [f"{n} refused: {r}" for n, r in tally.refused.items()]
        reasons += [f"{n} sent garbage: {r}" for n, r in tally.garbage.items()]
        raise EngineError(
            f"round {tally.round}: {len(tally.answered)} of {len(self.asked)} nodes answered, "
            f"{self.least} must. {' '.join(reasons)}"
        )
