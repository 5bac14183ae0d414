"""The text of many clients, cut into numbered pieces: most of the work of preparing a store.

In:       a file of text and where each client's text lies in it; a share to hold out.
Out:      `PieceBlock`s: the distinct pieces of a block of clients, its text as their numbers, and
          how often each piece stands in training text.
Promise:  the pieces of a line, joined by blanks, are the line; a piece has the same tokens wherever
          it stands, so that a tokenizer is asked once per distinct piece. The text of a
          block does not depend on who cut it; the numbers of its pieces do.
Not here: lines (`line_split.py`), numbers (`numbering.py`), tokens of a piece (`tokenizer.py`),
          processes (`piece_workers.py`).

This module imports nothing that takes long, because worker processes begin with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedlm.corpus.line_split import SplitLines, split_lines
from fedlm.corpus.numbering import LINE_END, Numbering
from fedlm.corpus.split import cut_tail

MOST_PIECES = 1 << 20  # that a process knows at a time: about 150 MB
TEXT_AT_A_TIME = 1 << 18  # bytes that become numbers at a time, while they are in the cache
# A blank between two marks: whatever stands on its other side, BPE begins a new token there.
SAFE_BLANK = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class PieceTask:
    """A block of clients: where their documents lie in a file, and which are held out whole."""

    first: int  # the number of the first client
    starts: np.ndarray  # of each document, in bytes
    sizes: np.ndarray
    documents: np.ndarray  # of each client
    test: np.ndarray
    validation: float
    byte_pairs: bool  # the pieces of BPE, whose tokens know about blanks


@dataclass(frozen=True)
class PieceBlock:
    """A block of clients as numbers of pieces; every line ends with `LINE_END`."""

    first: int
    maker: int  # who numbered the pieces; another maker has other numbers
    known: int  # how many pieces its maker knew before this block
    pieces: bytes  # the others, numbered from there on, a line end before each
    numbers: np.ndarray  # of the pieces, client by client, training text before held-out text
    ends: np.ndarray  # where in `numbers` each client's training text and held-out text end
    held_bytes: np.ndarray
    trained: np.ndarray  # the numbers of the pieces that stand in training text
    train_counts: np.ndarray  # and how often


def is_plain(piece: str) -> bool:
    """Return whether a piece has no blank of any kind in it or beside it."""
    return piece.split() == [piece]


def pieces_of_line(line: str, byte_pairs: bool) -> list[str]:
    """Cut a line into pieces whose tokens, one after another, are the tokens of the line.

    BPE puts one blank before each piece, and makes tokens of any others: a piece keeps them.

    >>> pieces_of_line("the  cat sat", False), pieces_of_line("the  cat sat", True)
    (['the', '', 'cat', 'sat'], ['the  cat', 'sat'])
    """
    pieces = line.split(" ")
    if byte_pairs and not all(map(is_plain, pieces)):
        return SAFE_BLANK.split(line)
    return pieces


def cut_text(text: str, test: bool, validation: float) -> tuple[str, str]:
    """Return the training text and the held-out text of a client."""
    return ("", text) if test else cut_tail(text, validation)


def read_lines(file: int, starts: np.ndarray, sizes: np.ndarray) -> bytes:
    """Read documents from an open file, in which a line end follows each of them."""
    apart = np.flatnonzero(starts[1:] != (starts + sizes + 1)[:-1]) + 1
    begins = starts[np.append(0, apart)].tolist()
    ends = (starts + sizes + 1)[np.append(apart - 1, -1)].tolist()
    found = [_read(file, begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
    return b"".join(found)


def _read(file: int, start: int, size: int) -> bytes:
    """Read a part of a file; one call reads at most 2 GB."""
    found = os.pread(file, size, start)
    while len(found) < size:
        more = os.pread(file, size - len(found), start + len(found))
        if not more:
            raise OSError("the file of the clients' text was cut off")
        found += more
    return found


class PieceCutter:
    """Cuts the text of blocks of clients into pieces, and numbers the pieces as it meets them."""

    def __init__(self, file: int, maker: int = 0) -> None:
        """Take the open file that holds the text, and a number of its own."""
        self._file, self._maker, self._number = file, maker, Numbering()

    def cut(self, task: PieceTask) -> PieceBlock:
        """Cut the text of a block of clients."""
        if len(self._number) > MOST_PIECES:
            self._number = Numbering()
        number, known = self._number, len(self._number)
        numbers, ends, held_bytes, uneven, count = [], [], [], list[tuple[int, str]](), 0
        for first, split in self._split(task):
            made, stops = number.of_lines(split.text, task.byte_pairs)
            numbers.append(made)
            ends.append(np.concatenate([[0], stops])[split.ends] + count)
            held_bytes.append(split.held_bytes)
            uneven += [(first + client, text) for client, text in split.uneven]
            count += len(made)
        block = np.concatenate(numbers), np.concatenate(ends)
        trained, counts = _train_counts(number, *block, uneven, task.byte_pairs)
        return PieceBlock(
            first=task.first,
            maker=self._maker,
            known=known,
            pieces="".join(f"\n{piece}" for piece in number.order[known:]).encode(),
            numbers=block[0],
            ends=block[1],
            held_bytes=np.concatenate(held_bytes),
            trained=trained,
            train_counts=counts,
        )

    def _split(self, task: PieceTask) -> Iterator[tuple[int, SplitLines]]:
        """Yield the lines of some clients at a time, with the first of these clients."""
        text = read_lines(self._file, task.starts, task.sizes)
        ends = np.cumsum(task.sizes + 1)[np.cumsum(task.documents) - 1]
        first = before = 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, before + TEXT_AT_A_TIME, "right")))
            own = slice(first, last)
            part = text[before : ends[last - 1]]
            yield first, split_lines(part, ends[own] - before, task.test[own], task.validation)
            first, before = last, int(ends[last - 1])


def _train_counts(
    number: Numbering,
    numbers: np.ndarray,
    ends: np.ndarray,
    uneven: list[tuple[int, str]],
    byte_pairs: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the pieces of training text; of `uneven` clients as they are, blank lines included."""
    trains = np.ones(len(ends) // 2, bool)
    trains[[client for client, _ in uneven]] = False
    begins = np.concatenate([[0], ends[1:-1:2]])[trains]
    spans = zip(begins.tolist(), ends[::2][trains].tolist(), strict=True)
    found = [numbers[begin:end] for begin, end in spans]
    for _, text in uneven:
        for line in text.split("\n"):
            found.append(number.of(pieces_of_line(line, byte_pairs)))
    counts = np.bincount(np.concatenate([numbers[:0], *found]), minlength=len(number))
    counts[LINE_END] = 0
    trained = np.flatnonzero(counts).astype(np.uint32)
    return trained, counts[trained]
