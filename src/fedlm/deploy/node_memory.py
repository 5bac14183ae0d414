"""What the members of a node remember between their turns: controls, drifts, residuals, optimisers.

In:       a folder of the node's kit; a member's memory after a round.
Out:      the same memory, when the server says in which round the member's answer last counted.
Promise:  it never leaves the node, and only its owner can read it; a memory is on disk before the
          answer that it belongs to leaves. The server names the round to go on from, so that an
          answer which never arrived changes nothing, and the same question asked again, also by a
          server that went back to a checkpoint, finds the memory that it found the first time.
Not here: what is remembered (`methods`, `federation/member.py`).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from fedlm.core.durable import write_atomically
from fedlm.deploy.policy import Refusal
from fedlm.engine.messages import RUN_NAME
from fedlm.record import checkpoint

NEVER = -1  # in place of a round: the member's answers have not counted yet
_NAME = re.compile(r"round-(\d+)\.safetensors")


class NodeMemory:
    """The memories of a node's members, by run, member and round; without a folder, in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[tuple[str, int, int], bytes] = {}
        self._first: dict[tuple[str, str], str] = {}

    def read(self, run: str, member: int, round: int, first: Any) -> Any:
        """Return what a member remembers after a round, which is `first` before its first turn.

        Raises:
          Refusal: the node has no such memory.
        """
        if round == NEVER:
            return first
        where = f"what member {member} remembers of run {run[:8]} after round {round}"
        try:
            data = self._bytes(run, member, round)
        except (KeyError, OSError):
            raise Refusal(f"{where} is not here: begin another run.") from None
        return checkpoint.from_bytes(data, first, where)

    def write(self, run: str, member: int, round: int, memory: Any) -> None:
        """Keep what a member remembers after a round."""
        data = checkpoint.to_bytes(memory, round=round)
        if self.folder is None:
            self._held[run, member, round] = data
        else:
            write_atomically(self._file(run, member, round), data, private=True)

    def check_answer(self, run: str, member: int, round: int, answer: bytes) -> None:
        """Keep the hash of a noisy answer before it leaves.

        Raises:
          Refusal: another answer left before: what has the same noise twice tells more.
        """
        digest = hashlib.sha256(answer).hexdigest()
        if self.first(run, _answer_of(member, round), digest) != digest:
            raise Refusal(
                f"round {round} was answered before with other numbers: this node computes "
                "otherwise since (other lanes, or other versions of its libraries), and a second "
                "noisy answer would tell more than was paid for. Join as before, or begin another "
                "run."
            )

    def first(self, run: str, what: str, value: str) -> str:
        """Return the first value that a run had for something, which is this one if it had none."""
        if self.folder is None:
            return self._first.setdefault((run, what), value)
        file = self.folder / run / what
        if not file.exists():
            write_atomically(file, value.encode(), private=True)
        return file.read_text(encoding="ascii")

    def forget(self, run: str, member: int, last: int, round: int, window: int) -> None:
        """Remove what no question can ask for, when `last` counted and `round` is asked.

        Args:
          run: the name of the run.
          member: whose memories.
          last: the round in which the member's answer last counted.
          round: the round that is asked for.
          window: how many rounds a server can go back to one of its checkpoints.
        """
        rounds = sorted(self.rounds(run, member))
        before = [r for r in rounds if r < round - window and r <= last][-1:]
        for r in rounds:
            uncounted = last < r < round
            if uncounted or (r < round - window and r not in (*before, last)):
                self._remove(run, member, r)

    # ---- runs that are over --------------------------------------------------------------

    def runs(self) -> dict[str, float]:
        """Return the names of the runs of which something is kept, and when it was last written."""
        folders = [] if self.folder is None or not self.folder.is_dir() else self.folder.iterdir()
        found = {}
        for folder in folders:
            if RUN_NAME.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                times = [file.stat().st_mtime for file in folder.rglob("*.safetensors")]
                found[folder.name] = max(times, default=folder.stat().st_mtime)
        return found

    def forget_run(self, run: str) -> None:
        """Remove all that members remember of a run; if it asks again, the node refuses."""
        assert self.folder is not None and RUN_NAME.fullmatch(run)
        shutil.rmtree(self.folder / run)

    # ---- files ---------------------------------------------------------------------------

    def _file(self, run: str, member: int, round: int) -> Path:
        assert self.folder is not None
        return self.folder / run / str(member) / f"round-{round:06d}.safetensors"

    def _bytes(self, run: str, member: int, round: int) -> bytes:
        if self.folder is None:
            return self._held[run, member, round]
        return self._file(run, member, round).read_bytes()

    def rounds(self, run: str, member: int) -> list[int]:
        """Return the rounds after which something is kept of a member."""
        if self.folder is None:
            return [r for one, who, r in self._held if (one, who) == (run, member)]
        found = (_NAME.fullmatch(p.name) for p in (self.folder / run / str(member)).glob("round-*"))
        return [int(match[1]) for match in found if match]

    def _remove(self, run: str, member: int, round: int) -> None:
        if self.folder is None:
            del self._held[run, member, round]
            self._first.pop((run, _answer_of(member, round)), None)
        else:
            self._file(run, member, round).unlink(missing_ok=True)
            (self.folder / run / _answer_of(member, round)).unlink(missing_ok=True)


def _answer_of(member: int, round: int) -> str:
    """Return the name of the hash of an answer, beside the memory after its round."""
    return f"{member}/round-{round:06d}.sha256"
