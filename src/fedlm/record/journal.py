"""The facts of a run, one JSON object per line.

In:       facts as they happen.
Out:      `journal.jsonl`: a header, one line per round, a closing line.
Promise:  a line that was appended survives a kill, and after `sync` a power cut; a half-written
          last line is ignored; after `rewind(r)` the journal holds exactly the rounds before r.
Not here: derived numbers (`report.py` computes them from the journal).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fedlm.core.documents import JsonObject, json_value
from fedlm.core.durable import ends_whole, write_atomically
from fedlm.core.errors import RecordError, shown
from fedlm.core.releasable import Releasable


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_figure(value: object) -> bool:
    return value is None or _is_number(value)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_recipe(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(table, dict) for table in value.values())


def _is_start(value: object) -> bool:
    return isinstance(value, dict) and _is_figure(value.get("perplexity"))


# The types of the fields that others count on; a field may be missing.
FIELDS: dict[str, Callable[[Any], bool]] = {
    "round": _is_count,
    "rounds": _is_count,
    "members": _is_number,
    "seconds": _is_number,
    "upload_bytes": _is_number,
    "download_bytes": _is_number,
    "loss": _is_figure,
    "tokens": _is_number,
    "perplexity": _is_figure,
    "epsilon": _is_figure,
    "recipe": _is_recipe,
    "store": _is_table,
    "start": _is_start,
    "start_sha256": lambda value: isinstance(value, str),
    "parameters": _is_count,
}


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dumps(value: object) -> str:
    """Return a value as one line of strict JSON."""
    return json.dumps(_plain(value), allow_nan=False, separators=(", ", ": "))


def read(path: Path) -> Iterator[JsonObject]:
    """Yield the entries of a journal, without a last line that a kill left incomplete."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} is not readable: {error.strerror}.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json_value(line, "", RecordError)
        except RecordError:
            if number == len(lines):
                return
            raise RecordError(f"{path}, line {number}: not JSON; the journal is damaged.") from None
        yield checked(entry, f"{path}, line {number}")


def checked(entry: Any, where: str) -> JsonObject:
    """Return an entry of a journal, or raise `RecordError` if a field makes no sense."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise RecordError(f"{where}: not a journal entry.")
    for name in entry.keys() & FIELDS.keys():
        if not FIELDS[name](entry[name]):
            raise RecordError(
                f"{where}: {name} = {shown(entry[name], 80)} makes no sense; the journal is "
                "damaged."
            )
    needed = {"round": "round", "stopped": "round", "extended": "rounds"}.get(entry["kind"])
    if needed is not None and needed not in entry:
        raise RecordError(f"{where}: no {needed}; the journal is damaged.")
    return entry


def _mend(file: BinaryIO) -> None:
    """Remove a last line that a power cut tore, or end one that lacks its end alone."""
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    try:
        json_value(data[whole:], "", RecordError)
    except RecordError:
        file.truncate(whole)
    else:
        file.write(b"\n")


class Journal:
    """An append-only file of facts."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, facts: Releasable) -> None:
        """Append one line in one write, and flush it to the operating system."""
        line = dumps({"kind": facts.kind, **facts}) + "\n"
        try:
            with open(self.path, "ab+") as file:
                if not ends_whole(file.fileno()):
                    _mend(file)
                file.write(line.encode())
        except OSError as error:
            raise RecordError(
                f"journal {self.path} could not be written: {error.strerror}. The last "
                "checkpoint is whole; free the disk and repeat with --resume."
            ) from None

    def sync(self) -> None:
        """Wait until all appended lines are on the disk."""
        try:
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(
                f"journal {self.path} could not be written: {error.strerror}."
            ) from None

    def rewind(self, round: int) -> None:
        """Remove the rounds from `round` on, and any closing line, as if they had not run."""
        kept = [
            entry
            for entry in read(self.path)
            if entry["kind"] != "final"
            and not (entry["kind"] in ("round", "stopped") and entry["round"] >= round)
        ]
        text = "".join(dumps(entry) + "\n" for entry in kept)
        write_atomically(self.path, text.encode())
