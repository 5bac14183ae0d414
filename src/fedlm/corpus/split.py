"""The split of text into training text and held-out text.

In:       client names and texts; shares; a seed.
Out:      the set of test clients; each training client's text, cut in two.
Promise:  depends on names, text and seed alone, not on order; no line is in two parts.
Not here: the sampling of rounds (`cohort/sampling.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank, for both the split and the tokenizer.

    >>> lines_of("a b\\r\\n\\n \\rc")
    ['a b', 'c']
    """
    # A regular expression of both ends would take most of the time of reading words.
    lines = text.replace("\r", "\n").split("\n")
    return [line for line in lines if line and not line.isspace()]


def held_out_clients(clients: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """Choose the test clients, whose whole text is held out, by the lowest hashes."""
    names = sorted(set(clients), key=lambda name: _rank(name, seed))
    count = round(share * len(names))
    if share > 0:
        count = min(max(1, count), len(names) - 1)
    return frozenset(names[:count])


def _rank(name: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """Cut a text between lines into training text and the validation tail closest to `share`.

    A text of one line is cut between words, so that long single-line documents have a tail
    too; a text of one word stays whole in training.

    >>> cut_tail("a b\\nc d\\ne f\\ng h", 0.25)
    ('a b\\nc d\\ne f', 'g h')
    """
    if share <= 0:
        return text, ""
    joint, train, held = cut_parts(text, share)
    return joint.join(train), joint.join(held)


def cut_parts(text: str, share: float) -> tuple[str, list[str], list[str]]:
    """Return what `cut_tail` joins: the joint, the parts of training text, and those of the tail.

    >>> cut_parts("a b\\nc d", 0.5), cut_parts("a b c d", 0.5)
    (('\\n', ['a b'], ['c d']), (' ', ['a', 'b'], ['c', 'd']))
    """
    joint, parts = "\n", lines_of(text)
    if len(parts) <= 1:
        joint, parts = " ", text.split()
    at = _place_of_cut(parts, share)
    return joint, parts[:at], parts[at:]


def _place_of_cut(parts: list[str], share: float) -> int:
    """Return how many parts are training text: at least one, and not all of several.

    The cut is before the first part whose middle is not within the share of training text. It is
    sought from the end, because the tail is short.
    """
    sizes = list(map(len, parts))
    taken = sum(sizes)
    wanted, at = (1 - share) * taken, len(parts)
    if at:
        at -= 1
        taken -= sizes[at]
    while at > 1 and taken - sizes[at - 1] + sizes[at - 1] / 2 >= wanted:
        at -= 1
        taken -= sizes[at]
    return max(1, at)
