"""The text of many clients, cut into numbered pieces: most of the work of preparing a store.

In:       a file of text and where each client's text lies in it; a share to hold out.
Out:      `PieceBlock`s: the distinct pieces of a block of clients, its text as their numbers, and
          how often each piece stands in training text.
Promise:  the pieces of a line, joined by blanks, are the line; a piece has the same tokens wherever
          it stands, so that a tokenizer is asked once per distinct piece. The text of a
          block does not depend on who cut it; the numbers of its pieces do.
Not here: tokens of a piece (`tokenizer.py`), processes (`piece_workers.py`).

This module imports nothing that takes long, because worker processes begin with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlm.corpus.split import cut_parts, cut_tail, lines_of

MOST_PIECES = 1 << 20  # that a process knows at a time: about 150 MB
TEXT_AT_A_TIME = 1 << 17  # characters that become numbers at a time
WORDS = 3  # of eight bytes, in the key of a piece
LONGEST = 8 * WORDS  # bytes of a piece that is looked up by its key
PLACE_BITS = 19
# The bytes of each word of a key that belong to a piece, by its size.
FIRST_BYTES = [
    np.array([(1 << 8 * min(max(size - 8 * word, 0), 8)) - 1 for size in range(LONGEST + 1)], "u8")
    for word in range(WORDS)
]
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
LINE_END = 0  # the number of the piece that ends a line, in every numbering
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


class Numbering(dict[str, int]):
    """The number of each piece, in the order in which pieces are first met.

    Pieces of at most `LONGEST` bytes are looked up many at a time, without a string for each: their
    bytes are a key of a few words, whose hash is a place that knows one piece. What is not found
    there is asked of the dictionary.
    """

    def __init__(self) -> None:
        super().__init__({"\n": LINE_END})
        self.order = ["\n"]
        self._edges = bytearray(1)  # of each piece so far: what it begins and ends with
        self._places = np.zeros(1 << PLACE_BITS, np.int64)  # LINE_END is nobody
        self._keys = np.zeros((WORDS, 1), np.uint64)  # of each piece so far
        self._sizes = np.full(1, -1, np.int64)  # in bytes; -1 is found by nobody

    def __missing__(self, piece: str) -> int:
        self[piece] = number = len(self.order)
        self.order.append(piece)
        return number

    def of(self, pieces: Sequence[str]) -> np.ndarray:
        """Return the numbers of pieces."""
        return np.fromiter(map(self.__getitem__, pieces), np.uint32, len(pieces))

    def of_lines(self, lines: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the pieces of lines, and the places after each line's end.

        A piece ends at a blank or at the end of its line; every line has an end.
        """
        padded = np.frombuffer(lines + bytes(8 * WORDS), np.uint8)
        text = padded[: len(lines)]
        stops = np.flatnonzero((text == ord(" ")) | (text == ord("\n")))
        starts = np.concatenate([[0], stops[:-1] + 1])
        sizes = stops - starts
        keys, places = _keys(padded, starts, sizes)
        found = self._places[places]
        known = self._sizes[found] == sizes
        for own, key in zip(self._keys, keys, strict=True):
            known &= own[found] == key
        missed = np.flatnonzero(~known)
        if len(missed):
            spans = zip(starts[missed].tolist(), stops[missed].tolist(), strict=True)
            numbers = self.of([lines[start:stop].decode() for start, stop in spans])
            found[missed] = numbers
            self._remember(numbers, keys[:, missed], sizes[missed], places[missed])
        line_ends = text[stops] == ord("\n")
        before = np.cumsum(line_ends) - line_ends  # ends of lines before each piece
        at = np.arange(len(stops)) + before
        numbers = np.full(len(stops) + np.count_nonzero(line_ends), LINE_END, np.uint32)
        numbers[at] = found
        return numbers, at[line_ends] + 2

    def _remember(
        self, numbers: np.ndarray, keys: np.ndarray, sizes: np.ndarray, places: np.ndarray
    ) -> None:
        """Keep pieces in places that are free; who came first is likely to come often."""
        if len(self.order) > len(self._sizes):
            more = 2 * len(self.order) - len(self._sizes)
            self._sizes = np.concatenate([self._sizes, np.full(more, -1)])
            self._keys = np.pad(self._keys, ((0, 0), (0, more)))
        free = (sizes <= LONGEST) & (self._places[places] == LINE_END)
        self._keys[:, numbers[free]] = keys[:, free]
        self._sizes[numbers[free]] = sizes[free]
        self._places[places[free]] = numbers[free]

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each piece whether it begins, and whether it ends, with something visible."""
        for piece in self.order[len(self._edges) :]:
            begins, ends = bool(piece[:1].strip()), bool(piece[-1:].strip())
            self._edges.append(begins + 2 * ends)
        both = np.frombuffer(bytes(self._edges), np.uint8)
        return (both & 1).astype(bool), both >= 2


def _keys(
    padded: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first bytes of pieces as a few words each, and the place of their hash."""
    words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # at every byte
    keys = np.empty((WORDS, len(starts)), np.uint64)
    mixed = sizes.astype(np.uint64)
    sizes = np.minimum(sizes, LONGEST)
    for word in range(WORDS):
        np.bitwise_and(words[starts + 8 * word], FIRST_BYTES[word][sizes], out=keys[word])
        mixed = (mixed ^ keys[word]) * ODD
        mixed ^= mixed >> np.uint64(29)
    return keys, (mixed * ODD >> np.uint64(64 - PLACE_BITS)).astype(np.int64)


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


def read_text(file: int, starts: Sequence[int], sizes: Sequence[int]) -> str:
    """Read the documents of a client from an open file, a line end between any two."""
    found = [_read(file, start, size) for start, size in zip(starts, sizes, strict=True)]
    return b"\n".join(found).decode()


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
        cut = _Cut(number, task.byte_pairs)
        starts, sizes, at = task.starts.tolist(), task.sizes.tolist(), 0
        for documents, test in zip(task.documents.tolist(), task.test.tolist(), strict=True):
            own = slice(at, at + documents)
            at += documents
            cut.add(read_text(self._file, starts[own], sizes[own]), test, task.validation)
        numbers, ends = cut.finish()
        trained, counts = _train_counts(number, numbers, ends, cut.uneven, task.byte_pairs)
        return PieceBlock(
            first=task.first,
            maker=self._maker,
            known=known,
            pieces="".join(f"\n{piece}" for piece in number.order[known:]).encode(),
            numbers=numbers,
            ends=ends,
            held_bytes=np.array(cut.held_bytes, np.int64),
            trained=trained,
            train_counts=counts,
        )


class _Cut:
    """A block at work: lines become numbers some at a time, while they are in the cache."""

    def __init__(self, number: Numbering, byte_pairs: bool) -> None:
        self._number, self._byte_pairs = number, byte_pairs
        self._lines: list[str] = []
        self._ends: list[int] = []  # of the parts of clients, in lines that wait
        self._size = 0
        self._numbers: list[np.ndarray] = []
        self._all_ends: list[np.ndarray] = []
        self._count, self._parts = 0, 0
        self.held_bytes: list[int] = []
        self.uneven: list[tuple[int, str]] = []  # training text with blank lines or other line ends

    def add(self, text: str, test: bool, validation: float) -> None:
        """Cut the text of the next client."""
        if test or validation <= 0:
            train, held = cut_text(text, test, validation)
            parts = [lines_of(train), lines_of(held)]
            if train and "\n".join(parts[0]) != train:
                self.uneven.append((self._parts, train))
            self.held_bytes.append(len(held.encode()))
        else:
            joint, *parts = cut_parts(text, validation)
            if joint == " ":
                parts = [[" ".join(part)] if part else [] for part in parts]
            self.held_bytes.append(len("\n".join(parts[1]).encode()))
        for part in parts:
            self._lines += part
            self._ends.append(len(self._lines))
        self._parts += 2
        self._size += len(text)
        if self._size >= TEXT_AT_A_TIME:
            self._number_lines()

    def _number_lines(self) -> None:
        ends = np.array(self._ends, np.int64)
        numbers, places = np.zeros(0, np.uint32), np.zeros(1, np.int64)
        if self._lines:
            numbers, stops = self._number.of_lines(("\n".join(self._lines) + "\n").encode())
            if self._byte_pairs:
                numbers, stops = _join_blanks(self._number, numbers, stops)
            places = np.concatenate([places, stops])
        self._numbers.append(numbers)
        self._all_ends.append(places[ends] + self._count)
        self._count += len(numbers)
        self._lines, self._ends, self._size = [], [], 0

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all pieces, and where each part of a client ends."""
        self._number_lines()
        return np.concatenate(self._numbers), np.concatenate(self._all_ends)


def _join_blanks(
    number: Numbering, numbers: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Join pieces between which BPE may see more than one blank.

    Return all numbers, and the places after each line's end.
    """
    begins, ends = number.edges()
    left, right = numbers[:-1], numbers[1:]
    one = (ends[left] & begins[right]) | (left == LINE_END) | (right == LINE_END)
    joints = np.flatnonzero(~one)  # between a place and the next one
    if not len(joints):
        return numbers, stops
    first = np.flatnonzero(np.diff(joints, prepend=-2) > 1)  # joints that follow another go on
    begin = joints[first]
    stop = np.append(joints[first[1:] - 1], joints[-1]) + 2
    spans = zip(begin.tolist(), stop.tolist(), strict=True)
    together = [map(number.order.__getitem__, numbers[a:b].tolist()) for a, b in spans]
    numbers = numbers.copy()
    numbers[begin] = number.of([" ".join(pieces) for pieces in together])
    return np.delete(numbers, joints + 1), stops - np.searchsorted(joints, stops)


def _train_counts(
    number: Numbering,
    numbers: np.ndarray,
    ends: np.ndarray,
    uneven: list[tuple[int, str]],
    byte_pairs: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the pieces of training text; of `uneven` parts as they are, blank lines included."""
    sizes = np.diff(ends, prepend=0)
    trains = np.zeros(len(ends), bool)
    trains[::2] = True
    trains[[part for part, _ in uneven]] = False
    found = [numbers[np.repeat(trains, sizes)]]
    for _, text in uneven:
        for line in text.split("\n"):
            found.append(number.of(pieces_of_line(line, byte_pairs)))
    counts = np.bincount(np.concatenate(found), minlength=len(number))
    counts[LINE_END] = 0
    trained = np.flatnonzero(counts).astype(np.uint32)
    return trained, counts[trained]
