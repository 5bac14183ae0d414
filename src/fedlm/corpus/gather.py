"""The documents of a source, joined into one text per client, outside of memory.

In:       documents, in any order.
Out:      the clients in the order of their first documents; their texts, read when they are wanted.
Promise:  memory knows the names of clients and where their documents lie, not their text, which
          waits in a file that has no name and that nobody else can open; it is gone with the
          process.
Not here: sources (`sources.py`), pieces and tokens (`pieces.py`, `tokenizer.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, overload

import numpy as np

from fedlm.core.errors import CorpusError
from fedlm.core.types import Say
from fedlm.corpus.pieces import PieceTask, read_lines
from fedlm.corpus.sources import Document

WRITE_BYTES = 1 << 20  # collected before they are written
DIGEST = 16  # bytes


class GatheredClients(Sequence[Document]):
    """The clients of a source that have text, each with all of its documents."""

    def __init__(
        self,
        text: IO[bytes],
        names: list[str],
        groups: list[tuple[str, ...]],
        spans: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Take a file, and per client the number of its documents, their starts and sizes."""
        self.names, self.groups = names, groups
        self._text = text
        weakref.finalize(self, text.close)  # with the last who reads it
        self._documents, self._starts, self._sizes = spans
        self._first = np.concatenate([[0], np.cumsum(self._documents)])

    @property
    def file(self) -> int:
        """The open file that holds the text."""
        return self._text.fileno()

    @property
    def bytes(self) -> int:
        """The size of all text in UTF-8."""
        return int(self._sizes.sum())

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> Document: ...

    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...

    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        own = slice(self._first[number], self._first[number + 1])
        text = read_lines(self.file, self._starts[own], self._sizes[own])[:-1].decode()
        return Document(self.names[number], self.groups[number], text)

    def distinct(self, digests: np.ndarray) -> int:
        """Return how many different texts there are, given a digest of each document."""
        own = digests[self._first[:-1]].astype(f"S{DIGEST}")
        for number in np.flatnonzero(self._documents > 1).tolist():
            own[number] = _digest(self[number].text.encode())
        return len(np.unique(own))

    def tasks(
        self, test: np.ndarray, validation: float, byte_pairs: bool, size: int
    ) -> Iterator[PieceTask]:
        """Yield blocks of clients, each of about `size` bytes of text."""
        ends = np.cumsum(self._sizes)[self._first[1:] - 1]
        first = 0
        while first < len(self):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + size, "right")))
            own = slice(self._first[first], self._first[last])
            yield PieceTask(
                first=first,
                starts=self._starts[own],
                sizes=self._sizes[own],
                documents=self._documents[first:last],
                test=test[first:last],
                validation=validation,
                byte_pairs=byte_pairs,
            )
            first = last


def gather_clients(
    documents: Iterable[Document], say: Say = lambda text: None, folder: Path | None = None
) -> GatheredClients:
    """Join the documents of each client into one, in order of first appearance.

    `say` is told how many clients had several documents, and how many have the text of another.
    Text waits in a file in `folder`, or where the system keeps temporary files.
    """
    number: dict[str, int] = {}
    groups: list[tuple[str, ...]] = []
    owners, sizes, visible, digests = array("q"), array("q"), bytearray(), bytearray()
    waiting, size = list[bytes](), 0
    with contextlib.ExitStack() as opened:
        with _kept_in(folder):
            text = opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=WRITE_BYTES))
        for client, group, said in documents:
            raw = _utf8(client, said)
            waiting += (raw, b"\n")
            size += len(raw)
            if size >= WRITE_BYTES:
                with _kept_in(folder):
                    text.writelines(waiting)
                waiting, size = [], 0
            owner = number.setdefault(client, len(number))
            if owner == len(groups):
                groups.append(group)
                visible.append(0)
            visible[owner] |= said != "" and not said.isspace()
            owners.append(owner)
            sizes.append(len(raw))
            digests += _digest(raw)
        with _kept_in(folder):
            text.writelines(waiting)
            text.flush()
        if not number:
            raise CorpusError("the source holds no client: there is nothing to prepare.")
        if not any(visible):
            raise CorpusError(f"none of the {len(number)} clients of the source has any text.")
        made = _with_text(text, list(number), groups, (owners, sizes, visible, digests), say)
        opened.pop_all()  # who holds the clients holds the file now
        return made


@contextlib.contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """Turn an error of the disk into one sentence; errors of a source are its own."""
    try:
        yield
    except OSError as error:
        where = folder or "a temporary file"
        raise CorpusError(f"text could not be kept in {where}: {error}.") from None


def _utf8(client: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CorpusError(
            f"client {client!r}: half of a surrogate pair (\\ud800 to \\udfff) in its text."
        ) from None


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=DIGEST).digest()


def _with_text(
    text: IO[bytes],
    names: list[str],
    groups: list[tuple[str, ...]],
    told: tuple[array[int], array[int], bytearray, bytearray],
    say: Say,
) -> GatheredClients:
    """Put the documents of each client together, and leave out clients without text."""
    owners, sizes = (np.array(values, np.int64) for values in told[:2])
    starts = np.cumsum(sizes + 1) - sizes - 1  # a line end follows each document
    digests = np.frombuffer(told[3], f"S{DIGEST}")
    keep = np.frombuffer(told[2], bool)
    documents = np.bincount(owners, minlength=len(names))
    joined = int(np.count_nonzero(documents > 1))
    order = np.argsort(owners, kind="stable")
    order = order[keep[owners[order]]]
    if not keep.all():
        names = [name for name, kept in zip(names, keep, strict=True) if kept]
        groups = [group for group, kept in zip(groups, keep, strict=True) if kept]
    spans = documents[keep], starts[order], sizes[order]
    clients = GatheredClients(text, names, groups, spans)
    if joined:
        say(f"{joined:,} clients have several documents each, which were joined.")
    copies = len(clients) - clients.distinct(digests[order])
    if copies:
        say(
            f"{copies:,} clients have exactly the text of another one: copies of a person count "
            "as several people, also in a privacy claim."
        )
    return clients
