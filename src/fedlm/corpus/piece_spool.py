"""Text as numbers of pieces, between the pass that cuts it and the pass that makes tokens.

In:       blocks of clients, then a tokenizer.
Out:      how often each piece stands in training text; the tokens of each client.
Promise:  memory knows the distinct pieces and one block at a time; the numbers wait in a file that
          has no name. The tokens are those that the tokenizer gives for every line of a client.
Not here: cutting (`pieces.py`), the store (`store.py`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fedlm.core.errors import CorpusError, library_errors
from fedlm.corpus.numbering import LINE_END, Numbering
from fedlm.corpus.pieces import PieceBlock
from fedlm.corpus.tokenizer import TextTokenizer

AT_A_TIME = 1 << 16  # pieces of which a library is asked for tokens
PIECES_AT_A_TIME = 1 << 16  # of a text, that become tokens while they are in the cache


class ClientTokens(NamedTuple):
    """The tokens of one client."""

    train: np.ndarray
    held: np.ndarray
    held_bytes: int


class PieceSpool:
    """Blocks of text as numbers of pieces, kept in a file."""

    def __init__(
        self, blocks: Iterable[PieceBlock], folder: Path, progress: Callable[[int], None]
    ) -> None:
        """Take all blocks; `progress` is told how many clients there are so far."""
        self._number, self._counts = Numbering(), np.zeros(1 << 16, np.int64)
        self._makers: dict[int, np.ndarray] = {}  # the numbers here of each maker's pieces
        self._sizes: list[tuple[int, int]] = []
        with contextlib.ExitStack() as opened:
            try:
                self._file: BinaryIO = opened.enter_context(tempfile.TemporaryFile(dir=folder))
                for block in blocks:
                    self._add(block)
                    progress(block.first + len(block.held_bytes))
                self._file.flush()
            except OSError as error:
                raise CorpusError(f"text could not be kept in {folder}: {error}.") from None
            opened.pop_all()  # `__exit__` closes the file now

    def __enter__(self) -> PieceSpool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _add(self, block: PieceBlock) -> None:
        """Number a block's pieces as all blocks do, and write it to the file."""
        before = self._makers.get(block.maker, np.zeros(1, np.uint32))[: block.known]
        new = block.pieces.decode().split("\n")[1:]
        own = self._makers[block.maker] = np.concatenate([before, self._number.of(new)])
        if len(self._number) > len(self._counts):
            more = np.zeros(2 * len(self._number), np.int64)
            more[: len(self._counts)] = self._counts
            self._counts = more
        self._counts[own[block.trained]] += block.train_counts
        self._sizes.append((len(block.numbers), len(block.held_bytes)))
        for values in (own[block.numbers], block.ends, block.held_bytes):
            self._file.write(values.tobytes())

    def train_counts(self) -> dict[str, int]:
        """Return how often each piece stands in training text."""
        counts = zip(self._number, self._counts.tolist(), strict=False)
        return {piece: times for piece, times in counts if times}

    def tokens(self, tokenizer: TextTokenizer, dtype: DTypeLike) -> Iterator[ClientTokens]:
        """Yield the tokens of each client; every line that has tokens ends with EOS."""
        flat, sizes = self._tokens_of_pieces(tokenizer, dtype)
        starts = np.cumsum(sizes) - sizes
        self._file.seek(0)
        for count, clients in self._sizes:
            numbers = self._read(np.uint32, count)
            ends, held_bytes = self._read(np.int64, 2 * clients), self._read(np.int64, clients)
            for first, last in _some_at_a_time(ends[1::2]):
                begin = ends[2 * first - 1] if first else 0
                parts = ends[2 * first : 2 * last] - begin
                found, places = _expanded(numbers[begin:][: parts[-1]], flat, starts, sizes)
                bounds = [0, *places[parts].tolist()]
                for client, held in enumerate(held_bytes[first:last].tolist()):
                    start, middle, stop = bounds[2 * client : 2 * client + 3]
                    yield ClientTokens(found[start:middle], found[middle:stop], held)

    def _read(self, dtype: DTypeLike, count: int) -> np.ndarray:
        raw = self._file.read(count * np.dtype(dtype).itemsize)
        return np.frombuffer(raw, dtype, count)

    def _tokens_of_pieces(
        self, tokenizer: TextTokenizer, dtype: DTypeLike
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all pieces, one after another, and how many each has."""
        special = tokenizer.special
        barred = frozenset(special.reserved) - {special.oov}
        assert tokenizer.pieces is not None
        flat, sizes, pieces = [np.array([special.eos])], [1], list(self._number)[1:]
        with library_errors("the tokenizer cannot encode this text", "Take another tokenizer."):
            for first in range(0, len(pieces), AT_A_TIME):
                found = tokenizer.pieces.tokens_of(pieces[first : first + AT_A_TIME])
                found = [
                    ids if barred.isdisjoint(ids) else [n for n in ids if n not in barred]
                    for ids in found
                ]
                sizes += map(len, found)
                flat.append(np.array([n for ids in found for n in ids], np.int64))
        return np.concatenate(flat).astype(dtype), np.array(sizes, np.int64)


def _some_at_a_time(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the first client of some with about `PIECES_AT_A_TIME`, and the one after them."""
    first = before = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + PIECES_AT_A_TIME, "right")))
        yield first, last
        first, before = last, int(ends[last - 1])


def _expanded(
    numbers: np.ndarray, flat: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of pieces, and how many there are before each piece and after the last.

    A line end counts only where its line has tokens.
    """
    counts = sizes.take(numbers)
    line_ends = np.flatnonzero(numbers == LINE_END)
    places = np.concatenate([[0], np.cumsum(counts)])
    empty = line_ends[np.diff(places[line_ends + 1], prepend=0) == 1]
    if len(empty):
        counts[empty] = 0
        places = np.concatenate([[0], np.cumsum(counts)])
    begins = np.repeat(starts.take(numbers) - places[:-1], counts)
    begins += np.arange(places[-1])
    return flat.take(begins), places
