"""A federation that looks like a node from above.

In:       a kit of the federation above, the folder of the federation below.
Out:      one answer for the whole subtree: the sum of its sums, or all of its frames.
Promise:  a relay changes nothing but the address: members keep the numbers of the whole
          federation, questions go down as they came, frames go up as they came or summed; what a
          node below answered is on disk before the next one is asked, so a relay that is killed
          asks nobody twice who had answered.
Not here: models and text, of which a relay knows nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedlm.core.errors import EngineError, FedlmError, WireError
from fedlm.core.keys import key_for
from fedlm.deploy import registration
from fedlm.deploy.node_worker import HELLO
from fedlm.deploy.registration import Hello
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats, Transport, Waiting
from fedlm.engine.messages import SUMS, TrainReply, TrainRequest, read_request, tell
from fedlm.record.checkpoint import write_atomically
from fedlm.wire.dense import dense
from fedlm.wire.frame import overhead

SEATS = "seats.json"
ROUNDS_KEPT = 2


class Relay:
    """Answers the federation above with what the federation below answers."""

    def __init__(
        self,
        folder: Path,
        post: Transport,
        names: list[str],
        patience: Quorum,
        *,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.post, self.names = folder, post, names
        self.patience, self.name, self.say = patience, name, say
        self._tokenizer = ""

    def __call__(self, message: Message) -> Message:
        """The answer to a message from above; whatever goes wrong is an answer too."""
        if message.metadata.message_type == HELLO:
            facts = ConfigRecord(self.hello())
            return Message(RecordDict({"hello": facts}), reply_to=message)
        try:
            question = read_request(message.content)
        except WireError as error:
            refusal = TrainReply(round=0, members=(), refusal=str(error))
            return Message(tell(refusal), reply_to=message)
        try:
            answer = self.answer(question)
        except FedlmError as error:
            self.say(f"round {question.round}: {error}")
            answer = TrainReply(round=question.round, members=(), refusal=str(error))
        return Message(tell(answer), reply_to=message)

    # ---- who is below ------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        """The subtree as one node: seats are given out anew when a run begins above."""
        heard: dict[str, Hello] = {}
        try:
            seats = registration.seat_all(self.post, self.names, heard.__setitem__, self.say)
            tokenizers = {hello.tokenizer for hello in heard.values()}
            if len(tokenizers) != 1:
                raise EngineError(f"the nodes below {self.name} have different tokenizers.")
        except FedlmError as error:
            return {"refusal": str(error)}
        registration.keep(self.folder / SEATS, seats)
        return {
            "name": self.name,
            "clients": sum(seat.clients for seat in seats),
            "text": _fingerprint(seats),
            "tokenizer": tokenizers.pop(),
            "version": next(iter(heard.values())).version,
            **registration.told_leaves(seats),
        }

    def _seats(self, question: TrainRequest) -> tuple[Assignment, ...]:
        seats = registration.kept(self.folder / SEATS)
        if seats is None or _fingerprint(seats) != question.text:
            raise EngineError("the nodes below are not those that the run began with.")
        return seats

    # ---- a round -----------------------------------------------------------------------

    def answer(self, question: TrainRequest) -> TrainReply:
        """The subtree's answer."""
        asked = self._questions(question)
        if not asked:
            raise WireError("none of the members asked for lives here.")
        there = Handover(self.folder / "handover", question)
        missing = {name: below for name, below in asked.items() if name not in there}
        if missing:
            self._ask(missing, there, len(asked) - len(missing), len(asked))
        answered = [name for name in asked if name in there]
        self.say(f"round {question.round}: {len(answered)} of {len(asked)} nodes answered")
        return join(question, (there.read(name, asked[name]) for name in answered))

    def _questions(self, question: TrainRequest) -> dict[str, TrainRequest]:
        """What each node below is asked: the same, with its own members."""
        made = {}
        for seat in self._seats(question):
            first = question.first + seat.first
            here = [i for i, m in enumerate(question.members) if first <= m < first + seat.clients]
            if here:
                own: dict[str, Any] = {"members": tuple(question.members[i] for i in here)}
                if question.numbers:  # then every member has a frame of its own
                    own["numbers"] = tuple(question.numbers[i] for i in here)
                    own["frames"] = tuple(question.frames[i] for i in here)
                made[seat.name] = replace(question, first=first, text=seat.text, **own)
        return made

    def _ask(self, missing: dict[str, TrainRequest], there: Handover, had: int, of: int) -> None:
        least = max(1.0, self.patience.quorum * of - had)
        patience = replace(self.patience, quorum=min(1.0, least / len(missing)))
        tally = RoundStats(next(iter(missing.values())).round)
        wait = Waiting(self.post, patience, missing, tally, in_order=False)  # they go to disk
        for name, answer in wait.answers():
            tally.answered.append(name)
            there.write(name, answer)
            del answer  # or it would be held until the next one is there
        for name, reason in {**tally.refused, **tally.garbage}.items():
            self.say(f"round {tally.round}: {name}: {reason}")
        wait.check_quorum()


def join(question: TrainRequest, answers: Iterable[TrainReply]) -> TrainReply:
    """Several answers as one: frames side by side, or their sum, of which one is held at a time."""
    if question.each:
        kept = list(answers)
        members = sorted(m for answer in kept for m in answer.members)
        frames = tuple(frame for answer in kept for frame in answer.frames)
        sums = tuple(part for answer in kept for part in answer.sums)
        return TrainReply(round=question.round, members=tuple(members), frames=frames, sums=sums)
    members, counts, total = [], dict.fromkeys(SUMS, np.float32(0.0)), None
    for answer in answers:
        members += answer.members
        counts = {name: counts[name] + np.float32(answer.sums[0][name]) for name in SUMS}
        total = added(total, answer.frames[0])
    return TrainReply(
        round=question.round,
        members=tuple(sorted(members)),
        frames=(dense().encode(total, key_for(0, "upload")),),
        sums=({name: float(count) for name, count in counts.items()},),
    )


def added(total: np.ndarray | None, frame: bytes) -> np.ndarray:
    """The sum of frames of plain numbers, with one more, whatever model they are of."""
    if total is None:
        size, rest = divmod(len(frame) - overhead(dense().name), 4)
        if size < 0 or rest:
            raise WireError("frame is not one of plain numbers.")
        total = np.zeros(size, np.float32)
    total += dense().decode(frame, total)
    return total


class Handover:
    """What the nodes below answered to one question: a file each, whole or not there."""

    def __init__(self, folder: Path, question: TrainRequest) -> None:
        self.path = folder / f"{question.round:08d}-{question.digest[:32]}"
        self._forget(folder)
        self.path.mkdir(parents=True, exist_ok=True)

    def _forget(self, folder: Path) -> None:
        """Old rounds are not asked for again."""
        old = sorted(p for p in folder.glob("*") if p != self.path)[: -ROUNDS_KEPT or None]
        for path in old:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()

    def __contains__(self, name: str) -> bool:
        return (self.path / f"{name}.json").is_file()

    def write(self, name: str, answer: TrainReply) -> None:
        """The facts come last: with them the answer is there."""
        for i, frame in enumerate(answer.frames):
            write_atomically(self.path / f"{name}.{i}", frame)
        facts = {"members": answer.members, "sums": [dict(part) for part in answer.sums]}
        write_atomically(self.path / f"{name}.json", json.dumps(facts).encode())

    def read(self, name: str, question: TrainRequest) -> TrainReply:
        facts = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        frames = tuple((self.path / f"{name}.{i}").read_bytes() for i in range(len(facts["sums"])))
        return TrainReply(
            round=question.round,
            members=tuple(facts["members"]),
            frames=frames,
            sums=tuple(facts["sums"]),
        )


def _fingerprint(seats: tuple[Assignment, ...]) -> str:
    return hashlib.sha256(json.dumps([list(seat) for seat in seats]).encode()).hexdigest()
