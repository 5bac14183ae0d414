"""What counting can do: unigram, bigram and trigram models with Kneser-Ney smoothing.

In:       rows of training and of held-out tokens, each with two tokens of context; which tokens
          are special.
Out:      perplexity of each order on exactly the targets the model is scored on.
Promise:  probabilities of every context sum to one over the vocabulary; PAD never counts.
Not here: neural models.

Interpolated Kneser-Ney with one discount an order, `n1 / (n1 + 2 n2)` (Ney et al. 1994).
Below the highest order, counts are of distinct left neighbours, as the method prescribes;
the lowest level is smoothed with a uniform law so that unseen tokens have a price.
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


def _level(pairs: Ints, weights: Ints | None, vocab: int) -> Level:
    keys, inverse = np.unique(pairs, return_inverse=True)
    counts = np.bincount(inverse, weights=weights, minlength=len(keys)).astype(np.int64)
    contexts, where = np.unique(keys // vocab, return_inverse=True)
    once, twice = int(np.sum(counts == 1)), int(np.sum(counts == 2))
    discount = once / (once + 2 * twice) if once else 0.5
    return Level(
        keys,
        counts,
        contexts,
        np.bincount(where, weights=counts).astype(np.int64),
        np.bincount(where),
        discount,
    )


def _find(sorted_keys: Ints, wanted: Ints) -> tuple[Ints, np.ndarray]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted


def _interpolate(level: Level, contexts: Ints, targets: Ints, below: np.ndarray, vocab: int):  # type: ignore[no-untyped-def]
    """Discounted probability at this level plus what was taken off, given to the level below."""
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
        # Of all special tokens only these two can be targets; the uniform law is over targets.
        self.targets = vocab - len(set(special.reserved) - {special.eos, special.oov})
        parts = [_triples(rows) for rows in blocks]
        first, second, third = (np.concatenate(p) for p in zip(*parts, strict=True))
        pairs = second * vocab + third
        triples = np.unique((first * vocab + second) * vocab + third)
        distinct_pairs = np.unique(pairs)
        self.unigram = _level(third, None, vocab)
        self.bigram = _level(pairs, None, vocab)
        self.trigram = _level((first * vocab + second) * vocab + third, None, vocab)
        # Continuation counts: in how many distinct contexts a token, or a pair, was seen.
        self.unigram_kinds = _level(distinct_pairs % vocab, None, vocab)
        self.bigram_kinds = _level(triples % (vocab * vocab), None, vocab)

    def probabilities(self, first: Ints, second: Ints, targets: Ints) -> dict[str, np.ndarray]:
        """Probability of each target given the two tokens before it, by order."""
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
        """Perplexity of each order on the targets of these rows."""
        first, second, targets = _triples(rows)
        return {
            name: perplexity_of(float(-np.log(p).sum()), float(len(targets)))
            for name, p in self.probabilities(first, second, targets).items()
        }


def _triples(rows: RowArrays) -> tuple[Ints, Ints, Ints]:
    """Each target that is not PAD, after the two tokens before it."""
    wide = rows.astype(np.int64)
    real = wide[:, 2:] != PAD
    return wide[:, :-2][real], wide[:, 1:-1][real], wide[:, 2:][real]
