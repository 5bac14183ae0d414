"""The numbers of pieces of text, in the order in which pieces are first met.

In:       pieces, or lines in UTF-8 that are cut into pieces at blanks.
Out:      their numbers; lines as numbers of pieces, each line with `LINE_END` after it.
Promise:  equal pieces have equal numbers, and others have others; the pieces of a line, joined by
          blanks, are the line.
Not here: whose lines they are (`line_split.py`), blocks of clients (`pieces.py`).

This module imports nothing that takes long, because worker processes begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORDS = 3  # of eight bytes, in the key of a long piece
LONGEST = 8 * WORDS - 1  # bytes of a piece that is looked up by its key
PLACE_BITS = 19  # of the hash of a key: 6 MB for keys of one word, 15 MB for longer ones
# The bytes of each word of a key that belong to a piece or to the blank after it, by its size.
OWN_BYTES = [
    np.array(
        [(1 << 8 * min(max(size + 1 - 8 * word, 0), 8)) - 1 for size in range(8 * WORDS)], "u8"
    )
    for word in range(WORDS)
]
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
LINE_END = 0  # the number of the piece that ends a line, in every numbering


class KeyTable:
    """Numbers of pieces that are shorter than a few words of eight bytes.

    The key of a piece is its bytes and the blank after it, without which "a" and "a\\0" would be
    one. The hash of a key is a place, which keeps one key and its number.
    """

    def __init__(self, words: int) -> None:
        self._keys = np.zeros((words, 1 << PLACE_BITS), np.uint64)  # no key is 0
        self._numbers = np.zeros(1 << PLACE_BITS, np.uint32)

    def find(
        self, words: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of pieces, and the places of those that are not known."""
        keys, places = self._of(words, starts, sizes)
        missed = sizes >= 8 * len(keys)
        for own, key in zip(self._keys, keys, strict=True):
            missed |= own.take(places) != key
        return self._numbers.take(places), np.flatnonzero(missed)

    def keep(
        self, words: np.ndarray, starts: np.ndarray, sizes: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """Keep pieces in places that are free, and return the places of the others.

        Who came first stays, and is likely to come often.
        """
        keys, places = self._of(words, starts, sizes)
        free = (sizes < 8 * len(keys)) & (self._numbers[places] == LINE_END)
        for own, key in zip(self._keys, keys, strict=True):
            own[places[free]] = key[free]
        self._numbers[places[free]] = numbers[free]
        return np.flatnonzero(~free)

    def _of(
        self, words: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the words of the keys of pieces, and the hashes of the keys."""
        keys, mixed = [], np.zeros(len(starts), np.uint64)
        for word in range(len(self._keys)):
            key = words.take(starts + 8 * word)
            key &= OWN_BYTES[word].take(sizes, mode="clip")
            mixed ^= mixed >> np.uint64(29)
            mixed ^= key
            mixed *= ODD
            keys.append(key)
        mixed >>= np.uint64(64 - PLACE_BITS)
        return keys, mixed.view(np.int64)


class Numbering(dict[str, int]):
    """The number of each piece.

    Short pieces are looked up many at a time, without a string for each. What is not found so is
    asked of the dictionary.
    """

    def __init__(self) -> None:
        super().__init__({"\n": LINE_END})
        self.order = ["\n"]
        self._edges = bytearray(1)  # of each piece so far: what it begins and ends with
        # One word is enough for six of seven pieces of English text.
        self._tables = KeyTable(1), KeyTable(WORDS)

    def __missing__(self, piece: str) -> int:
        self[piece] = number = len(self.order)
        self.order.append(piece)
        return number

    def of(self, pieces: Sequence[str]) -> np.ndarray:
        """Return the numbers of pieces."""
        return np.fromiter(map(self.__getitem__, pieces), np.uint32, len(pieces))

    def of_lines(self, lines: bytes, byte_pairs: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the pieces of lines, and the places after each line's end.

        A piece ends at a blank or at the end of its line; every line has an end. With
        `byte_pairs` it ends only at blanks that have something visible on either side.
        """
        text = lines.replace(b"\n", b" ") + bytes(LONGEST)
        stops = np.flatnonzero(np.frombuffer(text, np.uint8) == ord(" "))
        starts = np.append(0, stops + 1)[:-1]
        lasts = np.flatnonzero(np.frombuffer(lines, np.uint8).take(stops) == ord("\n"))
        words = np.array(np.ndarray(len(text) - 7, "<u8", text, strides=(1,)))  # at every byte
        numbers = self._look_up(text, words, starts, stops)
        if byte_pairs:
            inside = self._inner_blanks(numbers, lasts)
            if len(inside):
                heads, tails = _runs(inside)
                numbers[heads] = self._look_up(text, words, starts[heads], stops[tails])
                numbers = np.delete(numbers, inside + 1)
                lasts -= np.searchsorted(inside, lasts)
        ends = lasts + np.arange(2, len(lasts) + 2)
        made = np.zeros(len(numbers) + len(lasts), np.uint32)
        is_piece = np.ones(len(made), bool)
        is_piece[ends - 1] = False  # there is `LINE_END`
        made[is_piece] = numbers
        return made, ends

    def _look_up(
        self, text: bytes, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Return the numbers of the pieces that start and stop at places in a text."""
        short, long = self._tables
        sizes = stops - starts
        numbers, missed = short.find(words, starts, sizes)
        numbers[missed], again = long.find(words, starts[missed], sizes[missed])
        missed = missed[again]
        if len(missed):
            spans = zip(starts[missed].tolist(), stops[missed].tolist(), strict=True)
            numbers[missed] = self.of([text[start:stop].decode() for start, stop in spans])
            for table in self._tables:
                own = starts[missed], sizes[missed], numbers[missed]
                missed = missed[table.keep(words, *own)]
        return numbers

    def _inner_blanks(self, numbers: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Return the places of pieces after which a blank has nothing visible on one side."""
        for piece in self.order[len(self._edges) :]:
            begins, ends = bool(piece[:1].strip()), bool(piece[-1:].strip())
            self._edges.append(begins + 2 * ends)
        edges = np.frombuffer(self._edges, np.uint8).take(numbers)
        odd = np.flatnonzero(edges != 3)
        inside = np.zeros(len(numbers) + 1, bool)  # the blank before each piece, and the last
        inside[odd[edges[odd] & 1 == 0]] = True
        inside[odd[edges[odd] & 2 == 0] + 1] = True
        inside[0] = inside[lasts + 1] = False  # these are ends of lines
        return np.flatnonzero(inside) - 1


def _runs(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first of each run of places, and what follows the last of it.

    >>> _runs(np.array([2, 3, 7]))
    (array([2, 7]), array([4, 8]))
    """
    new = np.diff(places, prepend=-2) > 1
    return places[new], places[np.append(new[1:], True)] + 1
