"""Replies of nodes on disk: those below a relay, and those that wait for a buffered round.

In:       replies as they arrive.
Out:      the same replies, after a restart too.
Promise:  a reply is either whole or not there; only its owner can read it, because it may hold the
          exact update of a single client.
Not here: who is asked (`relay.py`, `engine/buffered.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError, damaged
from fedlm.engine.evaluate_messages import EvaluateReply
from fedlm.engine.messages import TrainReply

Reply = TypeVar("Reply", TrainReply, EvaluateReply)


class Replies:
    """The replies of nodes to the requests of one round, with a file per frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)

    def __contains__(self, name: str) -> bool:
        return (self.path / f"{name}.json").is_file()

    def write(self, name: str, reply: TrainReply | EvaluateReply) -> None:
        """Write a reply, its facts last: a reply counts as present once its facts are."""
        for i, frame in enumerate(reply.frames):
            write_atomically(self.path / f"{name}.{i}", frame, private=True)
        facts = {f.name: getattr(reply, f.name) for f in fields(reply) if f.name != "frames"}
        facts |= {"sums": [dict(part) for part in reply.sums], "frames": len(reply.frames)}
        write_atomically(self.path / f"{name}.json", json.dumps(facts).encode(), private=True)

    def read(self, name: str, kind: type[Reply]) -> Reply:
        """Return the reply of a node, as it came."""
        file = self.path / f"{name}.json"
        facts = read_json(file, str(file), RecordError)
        with damaged(str(file)):
            told: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()
            }
            told["frames"] = tuple(self._frame(name, i) for i in range(facts["frames"]))
            return kind(**told)

    def _frame(self, name: str, number: int) -> bytes:
        file = self.path / f"{name}.{number}"
        try:
            return file.read_bytes()
        except OSError as error:
            raise RecordError(f"{file} is not readable: {error.strerror}.") from None


class Answers:
    """The answers that wait for a buffered round, and which of them each round took."""

    def __init__(self, folder: Path, *, rounds_kept: int) -> None:
        """Keep answers for so many rounds after the one in which they were asked for."""
        self.folder, self.rounds_kept = folder, rounds_kept

    def replies(self, began: int, model: str) -> Replies:
        """Return the replies to the requests of a round, which sent a model with this hash."""
        return Replies(self.folder / f"{began:08d}-{model[:32]}")

    def taken(self, round: int) -> Mapping[str, Any] | None:
        """Return what a round took when it was played before; None if it was not."""
        file = self._file(round)
        if not file.is_file():
            return None
        found = read_json(file, str(file), RecordError)
        if not isinstance(found, dict):
            raise RecordError(f"{file} is damaged: expected a JSON object.")
        return found

    def take(self, round: int, taken: Mapping[str, Any]) -> None:
        """Write down what a round takes."""
        write_atomically(self._file(round), json.dumps(dict(taken)).encode(), private=True)

    def forget(self, round: int) -> None:
        """Remove the answers that no round from this one on can ask for."""
        for path in self.folder.glob(f"{'[0-9]' * 8}-*"):
            if int(path.name[:8]) < round - self.rounds_kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"taken-{'[0-9]' * 8}.json"):
            if int(path.stem.removeprefix("taken-")) < round - self.rounds_kept:
                path.unlink(missing_ok=True)

    def _file(self, round: int) -> Path:
        return self.folder / f"taken-{round:08d}.json"
