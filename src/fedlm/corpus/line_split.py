"""The split of the text of many clients at once: what `split.py` gives for each of them.

In:       the text of clients in UTF-8, one after another; who is held out whole; a share.
Out:      `SplitLines`: the lines that are not blank, and which of them are training text.
Promise:  lines, cuts and sizes are those of `lines_of` and `cut_tail`, client by client.
Not here: the law of the split (`split.py`), pieces of lines (`pieces.py`).

Strings are made only of clients with a single line, and of lines that may be blank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedlm.corpus.split import cut_parts, lines_of

LINE_FEED = ord("\n")
# Bytes with which a blank may begin in UTF-8: those of ASCII, U+0085 and U+00A0, U+1680, U+2000 to
# U+205F, U+3000. A line that begins with another byte is not blank.
MAY_BE_BLANK = np.zeros(256, bool)
MAY_BE_BLANK[[*b"\t\n\v\f\r\x1c\x1d\x1e\x1f ", 0xC2, 0xE1, 0xE2, 0xE3]] = True


class SplitLines(NamedTuple):
    """The lines of some clients that are not blank."""

    text: bytes  # each line with its end, client by client, training text before held-out text
    ends: np.ndarray  # after how many lines each client's training text and held-out text end
    held_bytes: np.ndarray  # of each client
    uneven: list[tuple[int, str]]  # training text that is not its lines joined, and its client


def split_lines(raw: bytes, ends: np.ndarray, test: np.ndarray, share: float) -> SplitLines:
    r"""Split the text of clients, each of which ends with a line end that is not its own.

    `ends` tells where each client's text ends, that line end included; `test` tells which clients
    are held out whole.

    >>> split_lines(b"a b\n\nc d\ne f\n", np.array([9, 13]), np.array([False, True]), 0.5)[:2]
    (b'a b\nc d\ne f\n', array([1, 2, 2, 3]))
    """
    text = raw.replace(b"\r", b"\n") if b"\r" in raw else raw
    stops = np.flatnonzero(np.frombuffer(text, np.uint8) == LINE_FEED)
    last = np.searchsorted(stops, ends)  # line after each client
    blank = _blank_lines(text, stops)
    if len(blank):
        text, stops = _without(text, stops, blank)
        last -= np.searchsorted(blank, last)
    lines, sizes = np.diff(last, prepend=0), np.diff(ends, prepend=0) - 1
    if share <= 0:
        train, held_bytes = np.where(test, 0, lines), np.where(test, sizes, 0)
        whole = _texts(raw, ends, np.flatnonzero(~test))
        uneven = [(n, own) for n, own in whole if own and "\n".join(lines_of(own)) != own]
        return SplitLines(text, _part_ends(train, lines - train), held_bytes, uneven)
    bounds = np.concatenate([[0], stops + 1])
    train = np.where(test, 0, _lines_before_cut(text, bounds, last, lines, share))
    held, held_bytes = lines - train, bounds[last] - bounds[last - lines + train] - 1
    held_bytes[test] = sizes[test]
    made, done = list[bytes](), 0
    for n, own in _texts(raw, ends, np.flatnonzero((lines <= 1) & ~test)):
        parts = [" ".join(part).encode() for part in cut_parts(own, share)[1:]]
        train[n], held[n], held_bytes[n] = bool(parts[0]), bool(parts[1]), len(parts[1])
        made += [text[done : bounds[last[n] - lines[n]]], *(part + b"\n" for part in parts if part)]
        done = bounds[last[n]]
    text = b"".join([*made, text[done:]]) if made else text
    return SplitLines(text, _part_ends(train, held), held_bytes, [])


def _part_ends(train: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return after how many lines each part of each client ends."""
    return np.cumsum(np.stack([train, held], axis=1))


def _texts(raw: bytes, ends: np.ndarray, clients: np.ndarray) -> Iterator[tuple[int, str]]:
    for n in clients.tolist():
        yield n, raw[ends[n - 1] if n else 0 : ends[n] - 1].decode()


def _blank_lines(text: bytes, stops: np.ndarray) -> np.ndarray:
    """Return the numbers of the lines that are empty or white space."""
    starts = np.concatenate([[0], stops[:-1] + 1])
    candidates = np.flatnonzero(MAY_BE_BLANK[np.frombuffer(text, np.uint8)[starts]])
    spans = zip(starts[candidates].tolist(), stops[candidates].tolist(), strict=True)
    blank = [start == stop or text[start:stop].decode().isspace() for start, stop in spans]
    return candidates[np.array(blank, bool)]


def _without(text: bytes, stops: np.ndarray, blank: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Leave out lines; return the others, and where they stop."""
    bounds = np.concatenate([[0], stops + 1])
    begins, ends = bounds[blank], bounds[blank + 1]
    spans = zip([0, *ends.tolist()], [*begins.tolist(), len(text)], strict=True)
    kept = np.delete(np.diff(bounds), blank)
    return b"".join([text[start:stop] for start, stop in spans]), np.cumsum(kept) - 1


def _lines_before_cut(
    text: bytes, bounds: np.ndarray, last: np.ndarray, lines: np.ndarray, share: float
) -> np.ndarray:
    """Return how many lines of each client are training text, if it has several.

    `split.py` seeks the first line whose middle is not within the share of training text. Twice
    the middle is a whole number, which grows from line to line.
    """
    before = bounds - np.arange(len(bounds))  # characters before each line, without line ends
    if not text.isascii():
        following = np.flatnonzero(np.frombuffer(text, np.int8) < -64)  # bytes 80 to BF
        before -= np.searchsorted(following, bounds)
    begin = before[last - lines]
    wanted = np.ceil(2 * ((1 - share) * (before[last] - begin))).astype(np.int64)
    found = np.searchsorted(before[:-1] + before[1:], 2 * begin + wanted) - (last - lines)
    return np.minimum(np.clip(found, 1, np.maximum(lines - 1, 1)), lines)
