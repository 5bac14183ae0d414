"""Baselines by counting: unigram, bigram and trigram models with Kneser-Ney smoothing.

In:       rows of training and of held-out tokens, each with two tokens of context; which tokens
          are special.
Out:      perplexity of each order on exactly the targets the model is scored on.
Promise:  probabilities of every context sum to one over the vocabulary; PAD never counts.
Not here: neural models.

Interpolated Kneser-Ney with one discount per order, `n1 / (n1 + 2 n2)` (Ney et al. 1994).
Below the highest order, counts are of distinct left neighbours, as the method prescribes;
the lowest level is smoothed with a uniform distribution, so that unseen tokens have a probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from fedlm.core.types import PAD, SpecialTokens
from fedlm.evaluate.perplexity import perplexity_of

Ints = Int[np.ndarray, " n"]
RowArrays = Int[np.ndarray, "rows width"]


@dataclass(frozen=True)
class Level:
    """Counts of one order: sorted keys `context * vocab + token`, and sums per context."""

    keys: Ints
    counts: Ints
    contexts: Ints
    context_total: Ints
    context_kinds: Ints
    discount: float


def _level(pairs: Ints, vocab: int) -> Level:
    # Sorted once, and read by where values change: an inverse would cost three times as much.
    keys, counts = np.unique(pairs, return_counts=True)
    of = keys // vocab  # rises, as the keys do
    first = np.flatnonzero(np.diff(of, prepend=-1))
    once, twice = int(np.sum(counts == 1)), int(np.sum(counts == 2))
    discount = once / (once + 2 * twice) if once else 0.5
    return Level(
        keys,
        counts,
        of[first],
        np.add.reduceat(counts, first) if len(first) else counts,
        np.diff(first, append=len(keys)),
        discount,
    )


def _find(sorted_keys: Ints, wanted: Ints) -> tuple[Ints, np.ndarray]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted


def _interpolate(level: Level, contexts: Ints, targets: Ints, below: np.ndarray, vocab: int):  # type: ignore[no-untyped-def]
    """Return the discounted probability plus the discounted mass times the probability `below`."""
    at, seen = _find(level.keys, contexts * vocab + targets)
    context_at, context_seen = _find(level.contexts, contexts)
    total = np.where(context_seen, level.context_total[context_at], 1)
    count = np.where(seen, level.counts[at], 0)
    kinds = level.context_kinds[context_at]
    here = np.maximum(count - level.discount, 0.0) / total
    rest = level.discount * kinds / total
    return np.where(context_seen, here + rest * below, below)


class NGrams:
    """Counts of a training corpus up to order three."""

    def __init__(self, blocks: Iterable[RowArrays], vocab: int, special: SpecialTokens) -> None:
        self.vocab = vocab
        # Of all special tokens only EOS and OOV can be targets. The uniform distribution is over
        # targets.
        self.targets = vocab - len(set(special.reserved) - {special.eos, special.oov})
        parts = [_triples(rows) for rows in blocks]
        first, second, third = (np.concatenate(p) for p in zip(*parts, strict=True))
        pairs = second * vocab + third
        self.unigram = _level(third, vocab)
        self.bigram = _level(pairs, vocab)
        self.trigram = _level(first * vocab * vocab + pairs, vocab)
        # Continuation counts: the number of distinct contexts of a token or a pair.
        self.unigram_kinds = _level(self.bigram.keys % vocab, vocab)
        self.bigram_kinds = _level(self.trigram.keys % (vocab * vocab), vocab)

    def probabilities(self, first: Ints, second: Ints, targets: Ints) -> dict[str, np.ndarray]:
        """Return the probability of each target given the two tokens before it, by order."""
        v = self.vocab
        none = np.zeros_like(targets)
        floor = np.full(len(targets), 1.0 / self.targets)
        lowest = _interpolate(self.unigram_kinds, none, targets, floor, v)
        return {
            "unigram": _interpolate(self.unigram, none, targets, floor, v),
            "bigram": _interpolate(self.bigram, second, targets, lowest, v),
            "trigram": _interpolate(
                self.trigram,
                first * v + second,
                targets,
                _interpolate(self.bigram_kinds, second, targets, lowest, v),
                v,
            ),
        }

    def perplexities(self, rows: RowArrays) -> dict[str, float]:
        """Return the perplexity of each order on the targets of these rows."""
        first, second, targets = _triples(rows)
        return {
            name: perplexity_of(float(-np.log(p).sum()), float(len(targets)))
            for name, p in self.probabilities(first, second, targets).items()
        }


def _triples(rows: RowArrays) -> tuple[Ints, Ints, Ints]:
    """Return the two tokens before each target that is not PAD, and the target."""
    wide = rows.astype(np.int64)
    real = wide[:, 2:] != PAD
    return wide[:, :-2][real], wide[:, 1:-1][real], wide[:, 2:][real]
