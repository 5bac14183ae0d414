"""Who did what to a federation, in a file that only grows.

In:       an action and its facts.
Out:      `HOME/history.jsonl`; whether it is whole.
Promise:  a line holds the hash of the line before it, so that a changed, missing or inserted line
          shows; only the owner can read the file, and it holds no secret.
Not here: what actions do (`membership.py`).

Whoever can write the file can also write all of it anew: send its last hash elsewhere now and then.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import getpass
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedlm.core.errors import RecordError

NAME = "history.jsonl"
START = "0" * 64
ALWAYS = ("time", "user", "action", "after")  # what every line tells


def note(path: Path, action: str, **facts: Any) -> None:
    """Append an action to a history and sync it."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = _lines(os.pread(file, os.fstat(file).st_size, 0))
        entry = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "user": _user(),
            "action": action,
            **facts,
            "after": _digest(lines[-1]) if lines else START,
        }
        os.write(file, json.dumps(entry).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all actions, or raise `RecordError` at the first line that does not follow."""
    if not path.is_file():
        return []
    entries, after = [], START
    for number, line in enumerate(_lines(path.read_bytes()), 1):
        try:
            entry = json.loads(line)
            follows = entry["after"] == after and all(type(entry[k]) is str for k in ALWAYS)
        except (ValueError, TypeError, KeyError, RecursionError):
            follows = False
        if not follows:
            raise RecordError(f"{path}, line {number} does not follow the line before it.")
        entries.append(dict(entry))
        after = _digest(line)
    return entries


def _lines(data: bytes) -> list[bytes]:
    return data.removesuffix(b"\n").split(b"\n") if data else []


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without names
        return str(os.getuid())
