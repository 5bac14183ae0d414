"""Many parts in one body: a table of their lengths and hashes, then the parts.

In:       parts, with their SHA-256 where it is known; or the table of a body from anywhere.
Out:      a table; the lengths and hashes that a table tells.
Promise:  a table is small, and tells the length of all that follows before any of it is read; a
          signature of the table covers every part, whose hash is its Flower object id at the same
          time: each byte is hashed once by who sends it, and once by who takes it.
Not here: reading from a connection (`bodies.py`, `line.py`), what the parts are (`exchange.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedlm.core.errors import WireError

MOST_PARTS = 4096
LARGEST_PART = 16 << 20  # bytes; a chunk of Flower's has 5 MB
OF_NODES, OF_RUNS = "/v1/fleet/fedlm/", "/v1/runtime/fedlm/"  # paths, before a verb
INLINE = 1 << 20  # bytes of small objects that travel with their message
GONE = b"gone"  # heads an answer without the object that was wanted, which will not come
HOLD = b"hold"  # in a run's poll: it has time
COUNT, ENTRY = struct.Struct(">I"), struct.Struct(">Q32s")


class Entry(NamedTuple):
    """A part: its length in bytes, and its SHA-256."""

    length: int
    sha256: bytes


Part = bytes | tuple[bytes | memoryview, ...]
"""A part of a body, or pieces that follow each other there."""


def pieces_of(part: Part) -> tuple[bytes | memoryview, ...]:
    """Return the pieces of a part."""
    return part if isinstance(part, tuple) else (part,)


def entry_of(part: Part, object_id: str = "") -> Entry:
    """Return the entry of a part; `object_id` is its hash, if somebody has computed it."""
    pieces = pieces_of(part)
    if object_id:
        return Entry(sum(map(len, pieces)), bytes.fromhex(object_id))
    return Entry(sum(map(len, pieces)), hashlib.sha256(b"".join(pieces)).digest())


def write_table(entries: Sequence[Entry]) -> bytes:
    """Return the table of some parts.

    >>> read_table(write_table([entry_of(b"one"), entry_of(b"three")]))[1].length
    5
    """
    return COUNT.pack(len(entries)) + b"".join(ENTRY.pack(*entry) for entry in entries)


def table_size(count: bytes) -> int:
    """Return the length of the rest of a table, from its first four bytes."""
    (parts,) = COUNT.unpack(count)
    if not 0 < parts <= MOST_PARTS:
        raise WireError(f"a body of {parts} parts: {MOST_PARTS} are the most.")
    return ENTRY.size * int(parts)


def read_table(raw: bytes, length: int | None = None) -> list[Entry]:
    """Read a table, or raise `WireError`; `length` is that of the whole body, if it is known."""
    if len(raw) < COUNT.size or len(raw) != COUNT.size + table_size(raw[: COUNT.size]):
        raise WireError("a table of parts has another length than it tells.")
    found = [Entry(*each) for each in ENTRY.iter_unpack(raw[COUNT.size :])]
    if any(entry.length > LARGEST_PART for entry in found):
        raise WireError(f"a part has more than {LARGEST_PART} bytes.")
    if length is not None and total(raw, found) != length:
        raise WireError("the parts are not as long as the body.")
    return found


def total(table: bytes, entries: Iterable[Entry]) -> int:
    """Return the length of a whole body."""
    return len(table) + sum(entry.length for entry in entries)


def in_order(trees: Iterable[Any]) -> list[str]:
    """Return the names of all objects of some messages: heads first, then what they name."""
    found, level = dict[str, None](), list(trees)
    while level and len(found) < MOST_PARTS:
        found.update((part.object_id, None) for part in level)
        level = [child for part in level for child in part.children]
    return list(found)
