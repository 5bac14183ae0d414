"""The sum of a cohort's updates, over a Flower grid.

In:       parameters and a cohort whose members live at nodes.
Out:      the sum of the updates that came back in time, or each of them.
Promise:  answers are taken in the order of the seats, one at a time, so that the sum does not
          depend on who was faster and memory holds one answer at a time; only answers to this
          round's questions are ever looked at; a node that is away, late, refuses or sends
          garbage is counted and told, and ends nothing unless too few are left.
Not here: the server's step, what a node does, how records are laid out (`messages.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message, RecordDict

from fedlm.core.errors import EngineError, WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Codec, Members, Params, Prepared, Total, Update
from fedlm.engine.messages import SUMS, Answer, Question, ask, read_answer
from fedlm.federation.round import Algorithm

Sent = tuple[Params | None, Mapping[str, float]]
"""An update with what it sums up; None where it could not be used."""

KIND = "train.fedlm"
LOOK_SECONDS = 1.0  # how often it is looked who is there
LONGEST_NAP = 0.5
# What float32 rounding can add to a norm, on top of what a codec states.
SLACK = 1 + 1e-5


class Presence(NamedTuple):
    """Whether a node is there. A lease: it runs out unless the node renews it."""

    node_id: int
    online: bool
    since: str  # when it last came; another value means that it was away in between
    until: float | str = 0.0


class Seat(NamedTuple):
    """A node's place in a run: which members it answers for."""

    name: str
    first: int
    clients: int
    text: str = ""  # a fingerprint


class Post(Protocol):
    """A way to send questions and fetch answers."""

    def send(self, node_id: int, records: RecordDict, round: int) -> str: ...

    def send_message(self, message: Message) -> str: ...

    def fetch(self, message_id: str) -> Message | None: ...

    def presence(self) -> dict[str, Presence]: ...


class GridPost:
    """A Flower grid, one message at a time."""

    def __init__(self, grid: Any, presence: Callable[[Any], Presence]) -> None:
        self.grid, self._presence = grid, presence

    def send(self, node_id: int, records: RecordDict, round: int) -> str:
        return self.send_message(Message(records, node_id, KIND, group_id=str(round)))

    def send_message(self, message: Message) -> str:
        return next(iter(self.grid.push_messages([message]))) or ""

    def fetch(self, message_id: str) -> Message | None:
        found = list(self.grid.pull_messages([message_id]))
        return found[0] if found else None

    def presence(self) -> dict[str, Presence]:
        return {node.name: self._presence(node) for node in self.grid.get_nodes()}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How many of the nodes asked must answer, and how long the rest is waited for."""

    quorum: float = 1.0  # share of the nodes asked, at least one of them
    deadline: float = math.inf  # seconds


@dataclass
class Tally:
    """What became of a round's questions, by node."""

    round: int
    answered: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    garbage: dict[str, str] = field(default_factory=dict)
    asked_again: list[str] = field(default_factory=list)
    seconds: float = 0.0


class FlowerEngine:
    """Asks the nodes where a cohort's members live, and sums what they answer."""

    def __init__(
        self,
        algorithm: Algorithm,
        post: Post,
        seats: Sequence[Seat],
        *,
        recipe: str,
        seed: int,
        exact: Codec,
        patience: Patience,
        tell: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.algorithm, self.post, self.seats = algorithm, post, tuple(seats)
        self.recipe, self.seed, self.exact = recipe, seed, exact
        self.patience, self.tell = patience, tell
        self.upload_bytes = self.download_bytes = 0

    @property
    def by_member(self) -> bool:
        """Whether members' updates travel one by one: where a codec would spoil a sum."""
        return self.algorithm.upload.name != self.exact.name

    def prepare(self, round: int, members: Members) -> Prepared:
        """The cohort, seated; its text is elsewhere."""
        numbers = np.asarray(members)
        seated = []
        for seat in self.seats:
            inside = (numbers >= seat.first) & (numbers < seat.first + seat.clients)
            if inside.any():
                seated.append((seat, tuple(int(n) for n in numbers[inside])))
        return Prepared(round, members, seated)

    def gather(self, params: Params, cohort: Prepared, limit: float = math.inf) -> Total:
        """The sum of the updates of all who answered."""
        total = Sum(params)
        for members, update in self._round(params, cohort, limit, self.by_member):
            total.add(update, members, weighted=self.by_member)
        return total.result()

    def collect(
        self, params: Params, cohort: Prepared, limit: float = math.inf
    ) -> Iterator[tuple[int, Update]]:
        """Each update of those who answered, by member."""
        for members, (delta, sums) in self._round(params, cohort, limit, True):
            if delta is not None:
                scalars = {name: jnp.float32(sums[name]) for name in SUMS}
                yield members[0], Update(delta=delta, **scalars)

    # ---- one round ---------------------------------------------------------------------

    def _round(
        self, params: Params, cohort: Prepared, limit: float, each: bool
    ) -> Iterator[tuple[tuple[int, ...], Sent]]:
        tally = Tally(cohort.round)
        began = time.monotonic()
        key = key_for(self.seed, "download", round=cohort.round)
        frame = self.algorithm.download.encode(params, key)
        population = sum(seat.clients for seat in self.seats)
        asked = {}
        for seat, members in cohort.batches:
            asked[seat.name] = Question(
                recipe=self.recipe,
                round=cohort.round,
                first=seat.first,
                population=population,
                text=seat.text,
                members=members,
                limit=float(limit),
                each=each,
                frame=frame,
            )
        wait = Waiting(self.post, self.patience, asked, tally)
        for name, answer in wait.answers():
            yield from self._updates(name, asked[name], answer, params, tally)
        self.download_bytes += wait.times_sent * len(frame)
        tally.seconds = time.monotonic() - began
        self.tell(tally)
        wait.check_quorum()

    def _updates(
        self, name: str, question: Question, answer: Answer, params: Params, tally: Tally
    ) -> Iterator[tuple[tuple[int, ...], Sent]]:
        """What a node sent, frame by frame; a bad frame spoils its own members only."""
        self.upload_bytes += sum(map(len, answer.frames))
        groups = [(m,) for m in answer.members] if question.each else [answer.members]
        good = 0
        for members, frame, sums in zip(groups, answer.frames, answer.sums, strict=True):
            delta = None
            try:
                delta = self._delta(frame, sums, question, len(members), params)
                good += 1
            except WireError as error:
                tally.garbage[name] = str(error)
            yield members, (delta, sums)
        if good:
            tally.answered.append(name)

    def _delta(
        self, frame: bytes, sums: Any, question: Question, members: int, params: Params
    ) -> Params:
        """Law 7: no update changes the model beyond its bound, whoever sent it."""
        codec = self.algorithm.upload if question.each else self.exact
        delta = codec.decode(frame, params)
        norm = _norm(delta)
        if not math.isfinite(norm):
            raise WireError("update is not finite.")
        if max(sums["refused"], sums["inside"]) > members:
            raise WireError("update counts more members than were asked.")
        if self.algorithm.plan is not None:
            gain = codec.norm_gain if math.isfinite(codec.norm_gain) else 1.0
            longest = question.limit * members * gain * SLACK
            if norm > longest or sums["weight"] > members:
                raise WireError(f"update has length {norm:.4g}: the plan allows {longest:.4g}.")
        return delta


class Waiting:
    """The answers to a round's questions, in the order of the seats.

    Who is at the head of the line is waited for while its lease lasts; who is away goes to the
    end. When everybody left is away, or the deadline has passed, a round ends with those who
    answered, if they are enough; otherwise it goes on waiting.
    """

    def __init__(
        self, post: Post, patience: Patience, asked: dict[str, Question], tally: Tally
    ) -> None:
        self.post, self.asked, self.tally = post, asked, tally
        self.line = list(asked)
        self.sent: dict[str, tuple[str, str]] = {}  # message, and since when its node was there
        self.times_sent = 0
        self.ends = time.monotonic() + patience.deadline
        self.least = max(1, math.ceil(patience.quorum * len(asked) - 1e-9))
        self._there: dict[str, Presence] = {}
        self._looked = -math.inf

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Well-formed answers by node; everything else is counted."""
        for name, message in self._messages():
            try:
                if message.has_error():
                    raise WireError(f"the node failed: {str(message.error.reason)[:200]}")
                answer = read_answer(message.content, self.asked[name])
            except WireError as error:
                self.tally.garbage[name] = str(error)
                continue
            if answer.refusal:
                self.tally.refused[name] = answer.refusal
            else:
                yield name, answer

    def _messages(self) -> Iterator[tuple[str, Message]]:
        nap = 0.02
        for name in self.line:
            self._send(name)
        while self.line:
            found = self._turn()
            if found is not None:
                nap = 0.02
                yield found
            elif self._over():
                break
            else:
                time.sleep(nap)
                nap = min(LONGEST_NAP, 1.5 * nap)
        where = self.tally.late if time.monotonic() >= self.ends else self.tally.away
        where.extend(self.line)

    def _turn(self) -> tuple[str, Message] | None:
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

    def _fetch(self, name: str) -> Message | None:
        if name not in self.sent or self._returned(name):
            self._send(name)
        return self.post.fetch(self.sent[name][0]) if name in self.sent else None

    def _send(self, name: str) -> None:
        there = self._presence().get(name)
        if there is None or not there.online:
            return
        if name in self.sent:
            self.tally.asked_again.append(name)
        question = self.asked[name]
        made = self.post.send(there.node_id, ask(question), question.round)
        self.times_sent += 1
        if made:
            self.sent[name] = made, there.since

    def _returned(self, name: str) -> bool:
        """A node that came again may have lost the question; the same one gives the same answer."""
        there = self._presence().get(name)
        return there is not None and there.online and there.since != self.sent[name][1]

    def _online(self, name: str) -> bool:
        there = self._presence().get(name)
        return there is not None and there.online

    def _presence(self) -> dict[str, Presence]:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._there, self._looked = self.post.presence(), time.monotonic()
        return self._there

    def _over(self) -> bool:
        """Enough have answered, and nobody else is worth waiting for."""
        if len(self.tally.answered) < self.least:
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


class Sum:
    """A total that grows in place: one payload of memory, whatever the number of answers."""

    def __init__(self, like: Params) -> None:
        leaves, self.structure = jax.tree.flatten(like)
        self.leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        self.sums = dict.fromkeys((*SUMS, "members"), np.float32(0.0))

    def add(self, sent: Sent, members: tuple[int, ...], *, weighted: bool) -> None:
        """Rounds as the loop engine does: the product, then the sum."""
        delta, sums = sent
        self.sums["members"] += np.float32(len(members))
        if delta is None:
            self.sums["refused"] += np.float32(len(members))
            return
        factor = np.float32(sums["weight"] if weighted else 1.0)
        for mine, other in zip(self.leaves, jax.tree.leaves(delta), strict=True):
            theirs = np.asarray(other)
            mine += theirs if factor == 1 else factor * theirs
        for name in SUMS:
            self.sums[name] += np.float32(sums[name])

    def result(self) -> Total:
        delta = jax.tree.unflatten(self.structure, [jnp.asarray(leaf) for leaf in self.leaves])
        return Total(delta=delta, **{k: jnp.asarray(v) for k, v in self.sums.items()})


def _norm(delta: Params) -> float:
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(delta)]
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.dot(x, x)) for x in leaves))
