"""Keystrokes that suggestions save.

In:       the words of a text in order, and a way to ask for suggestions.
Out:      how many keys the text needs with suggestions, and without.
Promise:  a key is a letter, a mark, a blank or a tap on a suggestion; nobody is assumed to look
          ahead: a word that is suggested is tapped as soon as it is.
Not here: which words are suggested (`inference.py`), where the text comes from (`cli`).

Before every letter of a word, the first one too, three suggestions are shown. If the word is among
them it is tapped: one key for the rest of its letters and for the blank after it. Otherwise the
next letter is typed. Without suggestions every letter and every blank is a key. Marks and words
that the tokenizer does not know are typed in full in both counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SUGGESTIONS = 3


class TypedWord(NamedTuple):
    """A word or a mark as somebody types it."""

    text: str
    blank: bool  # a blank follows
    suggestible: bool = True  # not a mark, and not a word outside the vocabulary


class Keystrokes(NamedTuple):
    """Keys with suggestions and without, and how many words were tapped."""

    with_suggestions: int = 0
    without: int = 0
    words: int = 0
    tapped: int = 0

    @property
    def saved(self) -> float | None:
        """The share of keys that suggestions save; None for an empty text."""
        return 1.0 - self.with_suggestions / self.without if self.without else None


def keystrokes(
    text: Iterable[TypedWord], suggest: Callable[[int, str], Sequence[str]]
) -> Keystrokes:
    """Count the keys of a text; `suggest(n, typed)` gives words when so much of the n-th is typed.

    >>> words = [TypedWord("good", True), TypedWord("day", False), TypedWord("!", False, False)]
    >>> found = keystrokes(words, lambda n, typed: ["good"] if n == 0 else ["day"] if typed else [])
    >>> found.with_suggestions, found.without, found.tapped
    (4, 9, 2)
    """
    keys = full = words = tapped = 0
    for number, word in enumerate(text):
        length = len(word.text) + word.blank
        full += length
        if not word.suggestible:
            keys += length
            continue
        words += 1
        for typed in range(len(word.text)):
            if word.text in suggest(number, word.text[:typed])[:SUGGESTIONS]:
                keys += typed + 1
                tapped += 1
                break
        else:
            keys += length
    return Keystrokes(keys, full, words, tapped)
