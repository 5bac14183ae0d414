"""HDF5 files in the layout of TFF's Stack Overflow, read by a process that may die of them.

In:       the path of a file.
Out:      its clients, each with its sentences.
Promise:  a file of any content ends in clients or in a `CorpusError`: the HDF5 library, which is
          written in C, runs in another process, under limits of memory and time.
Not here: what the file holds (`hdf5_worker.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

from fedlm.core.documents import JsonObject
from fedlm.core.errors import CorpusError

WORKER = Path(__file__).with_name("hdf5_worker.py")
CLIENT_SECONDS = 120.0  # until the next client of a file is there
START_SECONDS = 120.0  # until the process has imported its library


class Died(Exception):
    """The process that reads a file ended, or does not answer."""


class Hdf5Reader:
    """A process that reads HDF5 files, started when it is needed and again when it died."""

    def __init__(self, seconds: float = CLIENT_SECONDS) -> None:
        """Wait for so many seconds until the next client of a file is there."""
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()

    def clients(self, path: Path) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and the sentences of each client in a file."""
        if importlib.util.find_spec("h5py") is None:
            raise CorpusError(f"{path}: reading HDF5 needs h5py. Run pip install 'fedlm[hdf5]'.")
        ended = False
        try:
            self._ask(path)
            while True:
                answer = self._answer(self.seconds)
                ended = "client" not in answer
                if "error" in answer:
                    raise CorpusError(f"{path}: {answer['error']}.")
                if ended:
                    return
                yield answer["client"], answer["lines"]
        except (Died, BrokenPipeError):
            raise CorpusError(
                f"{path}: not a whole HDF5 file: its reader died of it. Take another copy."
            ) from None
        finally:
            if not ended:  # somebody stopped in the middle, or the process is of no use any more
                self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._unread.clear()
        if process is not None:
            _end(process)

    def _ask(self, path: Path) -> None:
        if self._process is None:
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            # A script, without its folder in the path: importing fedlm itself would take seconds.
            command = [sys.executable, "-P", str(WORKER)]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            weakref.finalize(self, _end, self._process)
            self._answer(START_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(str(path)).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, seconds: float) -> JsonObject:
        """Return the next line of the process, or raise `Died` if none comes in time."""
        assert self._process is not None and self._process.stdout is not None
        pipe, seen = self._process.stdout.fileno(), 0
        while (end := self._unread.find(b"\n", seen)) < 0:
            seen = len(self._unread)
            more = b""
            if select.select([pipe], [], [], seconds)[0]:
                more = os.read(pipe, 1 << 16)
            if not more:
                raise Died
            self._unread += more
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        found: JsonObject = json.loads(line)
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and close its pipes; once it is over, do nothing."""
    if process.returncode is None:
        process.kill()
        process.communicate()
