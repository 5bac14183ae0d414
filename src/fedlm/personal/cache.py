"""A cache of a member's own words: unigrams and bigrams, counted.

In:       rows of tokens.
Out:      the chance of each target given the token before it; the chances of all next tokens.
Promise:  chances sum to one over the vocabulary; PAD never counts; what is saved is loaded equal,
          and a damaged file is refused.
Not here: mixing with a model (`model.py`).

    p(w | v) = m(v) n(v, w) / n(v) + (1 - m(v)) n(w) / n,   m(v) = n(v) / (n(v) + kinds(v))

m(v) is Witten and Bell's weight (1991): the more kinds of words followed v, the less its counts
say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedlm.core.errors import SURPRISES, RecordError
from fedlm.core.types import PAD


@dataclass(frozen=True, eq=False)
class WordCache:
    """Counts of words and of pairs of words."""

    vocabulary: int
    words: Int[np.ndarray, " words"]  # sorted
    word_counts: Int[np.ndarray, " words"]
    pairs: Int[np.ndarray, " pairs"]  # before * vocabulary + word, sorted
    pair_counts: Int[np.ndarray, " pairs"]

    def chances(self, rows: Int[np.ndarray, "rows width"]) -> Float[np.ndarray, "rows targets"]:
        """Return the chance of every target of some rows; zero where a target is PAD."""
        before, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        real = (targets != PAD) & (before != PAD)
        at = np.where(real, before, 0), np.where(real, targets, 0)
        once = _counts(self.words, self.word_counts, at[1]) / max(1, self.word_counts.sum())
        total, kinds = self._followers(at[0])
        twice = _counts(self.pairs, self.pair_counts, at[0] * self.vocabulary + at[1])
        share = total / np.maximum(total + kinds, 1)
        found = share * twice / np.maximum(total, 1) + (1 - share) * once
        return np.where(real, found, 0.0)

    def next(self, before: int) -> Float[np.ndarray, " vocabulary"]:
        """Return the chances of all tokens after a token."""
        row = np.stack([np.full(self.vocabulary, before), np.arange(self.vocabulary)], axis=1)
        return self.chances(row)[:, 0]

    def _followers(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many words followed each word, and how many kinds of them."""
        first = np.searchsorted(self.pairs, before * self.vocabulary)
        end = np.searchsorted(self.pairs, (before + 1) * self.vocabulary)
        sums = np.concatenate([[0], np.cumsum(self.pair_counts)])
        return sums[end] - sums[first], end - first

    def to_bytes(self) -> bytes:
        """Return the counts as safetensors."""
        arrays = {
            "vocabulary": np.array([self.vocabulary], np.int64),
            "words": self.words,
            "word_counts": self.word_counts,
            "pairs": self.pairs,
            "pair_counts": self.pair_counts,
        }
        return bytes(save(arrays))


def _counts(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if not len(keys):
        return np.zeros(wanted.shape)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)


def cache_of(rows: Int[np.ndarray, "rows width"], vocabulary: int) -> WordCache:
    """Count the targets of rows, and their pairs with the tokens before them.

    >>> cache = cache_of(np.array([[1, 5, 6], [1, 5, 7]]), 8)
    >>> cache.next(5).round(3).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.375, 0.375]
    """
    before, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    real = (targets != PAD) & (before != PAD)
    words, word_counts = np.unique(targets[real], return_counts=True)
    pairs, pair_counts = np.unique((before * vocabulary + targets)[real], return_counts=True)
    return WordCache(vocabulary, words, word_counts, pairs, pair_counts)


def cache_from(data: bytes, vocabulary: int, what: str) -> WordCache:
    """Read saved counts, or raise `RecordError`."""
    try:
        arrays = load(data)
        made = WordCache(
            int(arrays["vocabulary"][0]),
            arrays["words"],
            arrays["word_counts"],
            arrays["pairs"],
            arrays["pair_counts"],
        )
    except (SafetensorError, *SURPRISES) as error:
        raise RecordError(f"{what} is damaged: {' '.join(str(error).split())[:200]}.") from None
    both = ((made.words, made.word_counts, 1), (made.pairs, made.pair_counts, vocabulary))
    for keys, counts, most in both:
        whole = all(x.ndim == 1 and x.dtype == np.int64 for x in (keys, counts))
        if (
            made.vocabulary != vocabulary
            or not whole
            or len(keys) != len(counts)
            or bool(np.any(np.diff(keys) <= 0))
            or bool(np.any((keys < 0) | (keys >= vocabulary * most)))
            or bool(np.any((counts < 1) | (counts > 1 << 40)))
        ):
            raise RecordError(f"{what} is damaged: its counts do not fit {vocabulary} words.")
    return made
