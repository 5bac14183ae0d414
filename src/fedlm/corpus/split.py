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
    return [line for line in text.replace("\r", "\n").split("\n") if line.strip()]


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
    lines = lines_of(text)
    if len(lines) > 1:
        return _cut(lines, share, "\n")
    return _cut(text.split(), share, " ") if text.split() else ("", "")


def _cut(parts: list[str], share: float, joint: str) -> tuple[str, str]:
    wanted = (1 - share) * sum(len(p) for p in parts)
    taken, at = 0, 0
    while at < len(parts) - 1 and taken + len(parts[at]) / 2 < wanted:
        taken += len(parts[at])
        at += 1
    at = max(1, at)
    return joint.join(parts[:at]), joint.join(parts[at:])
