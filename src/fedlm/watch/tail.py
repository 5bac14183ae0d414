"""Lines of a growing file, each read once.

In:       the path of a file of JSON lines that another process appends to.
Out:      the entries that are new, and whether the file was begun again.
Promise:  a poll costs what was appended since the last one; a last line that is still being
          written waits for its end; a file that was replaced or cut is read from its start.
Not here: what entries mean (`journal.py`, `board.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from fedlm.core.documents import json_value
from fedlm.core.errors import RecordError

LARGEST_LINE = 16 << 20
FIRST_WINDOW, LARGEST_WINDOW = 32 << 10, 8 << 20  # bytes of the end that `glance` looks at
SEARCHED_WINDOW = 2 << 20  # and in which it looks for a word that need not be there


class News(NamedTuple):
    """What a poll found."""

    entries: list[tuple[int, Any]]  # with the number of their lines
    again: bool  # the file was replaced or cut: what was read before no longer counts


class Tail:
    """A reader that remembers how far it has come."""

    def __init__(self, path: Path, *, passes_over: bool = False) -> None:
        """Take a file, and whether to pass over lines that are not JSON, or refuse the file."""
        self.path, self.passes_over = path, passes_over
        self._offset, self._lines, self._inode = 0, 0, -1
        self._last = b""  # the end of what was read, by which a rewritten file shows

    def poll(self) -> News:
        """Return the complete lines that were added since the last poll."""
        try:
            with open(self.path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            again, self._offset = self._offset > 0, 0
            return News([], again)
        except OSError as error:
            raise RecordError(f"{self.path} is not readable: {error.strerror}.") from None

    def _read(self, file: Any) -> News:
        found = os.fstat(file.fileno())
        file.seek(max(0, self._offset - len(self._last)))
        changed = file.read(len(self._last)) != self._last if self._offset else False
        again = self._offset > 0 and (
            found.st_ino != self._inode or found.st_size < self._offset or changed
        )
        if again or not self._offset:
            self._offset, self._lines, self._last = 0, 0, b""
        self._inode = found.st_ino
        file.seek(self._offset)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(data) - len(whole) > LARGEST_LINE:
            raise RecordError(f"{self.path}, line {self._lines + 1}: longer than any entry.")
        lines = whole.split(b"\n")[:-1]
        entries = [
            (number, entry)
            for number, line in enumerate(lines, start=self._lines + 1)
            if line.strip() and (entry := self._parse(line, number)) is not None
        ]
        self._lines += len(lines)
        self._offset += len(whole)
        self._last = whole[-64:] or self._last
        return News(entries, again)

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json_value(line, "", RecordError)
        except RecordError:
            if self.passes_over:
                return None
            raise RecordError(
                f"{self.path}, line {number}: not JSON; the file is damaged."
            ) from None


def ends_of(path: Path, least: int = 2, word: bytes = b"") -> tuple[bytes, list[bytes]]:
    """Return the first line of a file and its last complete lines, at least `least` if there are.

    So many lines that one of them has a `word`, if one of the last two megabytes has it. What lies
    between is not read.
    """
    try:
        with open(path, "rb") as file:
            first = file.readline(LARGEST_LINE)
            size, window = os.fstat(file.fileno()).st_size, FIRST_WINDOW
            while True:
                start = max(len(first), size - window)
                file.seek(start)
                data = file.read(size - start)
                lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
                if start > len(first):
                    lines = lines[1:]  # the beginning of this one is not there
                there = word in data or window >= SEARCHED_WINDOW
                enough = len(lines) >= least and there
                if enough or start == len(first) or window >= LARGEST_WINDOW:
                    return (first if first.endswith(b"\n") else b""), [x for x in lines if x]
                window *= 4
    except OSError as error:
        raise RecordError(f"{path} is not readable: {error.strerror}.") from None
