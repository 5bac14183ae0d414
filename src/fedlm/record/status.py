"""What a run is doing now, in one small file.

In:       stages, rounds and sentences, as the run's watcher is told them.
Out:      `status.json`, replaced as a whole; the same, read back with every field checked.
Promise:  it costs training nothing: two writes per second, at most twenty where states change, no
          waiting for the disk, and a disk that is full ends nothing. It holds only what the
          terminal is told as well, so nothing that a privacy plan hides.
Not here: figures (`journal.py`), who reads it (`watch`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlm.core.documents import read_text
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError

RunState = Literal[
    "preparing", "compiling", "training", "evaluating", "finished", "stopped", "failed"
]
LIVE: tuple[RunState, ...] = ("preparing", "compiling", "training", "evaluating")
Command = Literal["train", "pretrain", "federation train"]
WRITE_SECONDS = 0.5  # between two writes in one state
CHANGE_SECONDS = 0.05  # between two writes in all, but for the last one
LONGEST = 500  # characters of a sentence

Sentence = Annotated[str, Field(max_length=LONGEST)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class Status(BaseModel):
    """The state of a run, the process that trains it, and what follows."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[1] = 1
    state: RunState = "preparing"
    doing: Sentence = ""  # in words: "waiting for sweden, 40 s"
    follows: Sentence = ""  # what comes next
    pid: Annotated[int, Field(ge=1, lt=1 << 32)]
    process: Annotated[str, Field(max_length=100)]  # when that process began
    command: Command = "train"  # which resumes the run
    home: Annotated[str, Field(max_length=4096)] | None = None  # of a federation
    folder: Annotated[str, Field(max_length=4096)]  # in which the command was given
    round: Count = 0  # rounds on record
    rounds: Count = 0  # in all
    started: float  # seconds since 1970
    updated: float


def read_status(path: Path) -> Status:
    """Read a status file, or raise `RecordError` with a sentence."""
    text = read_text(path, str(path), RecordError)
    try:
        return Status.model_validate_json(text)
    except (ValidationError, ValueError, RecursionError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(map(str, problem["loc"])) if problem else ""
        what = f"{where}: {problem['msg']}" if problem else "not JSON"
        raise RecordError(f"{path} is damaged: {what[:200]}.") from None


class StatusFile:
    """The writer of a run's status, silent until the run has claimed its directory."""

    def __init__(self, path: Path, *, command: str, home: Path | None = None) -> None:
        """Take the path of the file, and what resumes the run: a command, and its federation."""
        now = time.time()
        self.path, self._open, self._wrote = path, False, -WRITE_SECONDS
        before = _before(path)  # a run that may not go on has still come as far as it had
        self._status = Status(
            pid=os.getpid(),
            process=process_start(os.getpid()),
            command="pretrain" if command == "pretrain" else _of(home),
            home=None if home is None else str(home.resolve()),
            folder=os.getcwd(),
            started=now,
            updated=now,
            round=before.round if before else 0,
            rounds=before.rounds if before else 0,
        )

    def begin(self) -> None:
        """Write from now on: the directory is this run's."""
        self._open = True
        self._write()

    def tell(self, **changes: Any) -> None:
        """Take changes of fields; write them now if the state changes, else now and then."""
        for name in ("doing", "follows"):
            if name in changes:
                changes[name] = " ".join(str(changes[name]).split())[:LONGEST]
        before = self._status.state
        self._status = self._status.model_copy(update=changes)
        state, since = self._status.state, time.monotonic() - self._wrote
        # Training and evaluation take turns, as often as rounds are short; other states come once.
        quick = state in ("training", "evaluating")
        least = WRITE_SECONDS if state == before else CHANGE_SECONDS if quick else 0.0
        if self._open and since >= least:
            self._write()

    def _write(self) -> None:
        self._wrote = time.monotonic()
        self._status = self._status.model_copy(update={"updated": time.time()})
        data = self._status.model_dump_json().encode() + b"\n"
        with contextlib.suppress(RecordError):  # the journal is the record, and says so itself
            write_atomically(self.path, data, sync=False)


def _before(path: Path) -> Status | None:
    """Return what the file said before, if it is there and sound."""
    with contextlib.suppress(RecordError, OSError):
        return read_status(path)
    return None


def _of(home: Path | None) -> Command:
    return "train" if home is None else "federation train"


def process_start(pid: int) -> str:
    """Return a text that tells a process from a later one with its number; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the second field, a name in brackets that may hold blanks and brackets: the
            # third is the state, the 22nd the time at which the process began.
            fields = file.read().rpartition(b")")[2].split()
            return "" if fields[0] == b"Z" else fields[19].decode("ascii")
    except (OSError, IndexError):
        return "unknown" if _exists(pid) else ""


def _exists(pid: int) -> bool:
    """Return whether a process has this number, where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_alive(status: Status) -> bool:
    """Return whether the process that wrote a status still runs."""
    return process_start(status.pid) == status.process
