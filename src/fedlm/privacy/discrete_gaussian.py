"""Discrete Gaussian noise, drawn exactly.

In:       a variance that is a whole number, a secret seed.
Out:      integers k with probability proportional to exp(-k^2 / (2 variance)).
Promise:  the law is exact: integers only, no floating point; the coins are the key stream of
          ChaCha20 under the seed; the same seed gives the same integers.
Not here: what a sum of such noise costs (`distributed.py`).

The method is that of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy",
NeurIPS 2020 (algorithms 1 to 3), on whole arrays. A coin of probability exp(-a/b), a <= b, is the
parity of the first k at which a coin of probability a/(b k) fails. A discrete Laplace number of
scale t is u + t v with a random sign: u uniform below t, kept with probability exp(-u/t), v the
number of coins exp(-1) before one fails; minus zero is drawn again. A discrete Laplace number x of
scale t = floor(sigma) + 1 is kept with probability exp(-(|x| t - s)^2 / (2 s t^2)), where s is the
variance. Every a, b and b k fits into 63 bits while s <= 2^26 and |x| < 2^17 sigma-like steps; the
few larger x are decided with Python's integers.

How long a draw takes depends on the numbers drawn: whoever measures that time exactly is not
defended against.
"""

from __future__ import annotations

import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedlm.core.errors import require

MOST_VARIANCE = 2**26
_WORDS = 1 << 16  # words of the key stream that are made at a time


class _Coins:
    """Uniform integers from the key stream of ChaCha20."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise ValueError("a seed has 32 bytes")
        self._stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return uniform 64-bit words."""
        parts = []
        for at in range(0, count, _WORDS):
            parts.append(self._stream.update(bytes(8 * min(_WORDS, count - at))))
        return np.frombuffer(b"".join(parts), "<u8")

    def below(self, limits: np.ndarray) -> np.ndarray:
        """Return a uniform integer below each limit; limits are at most 2^63."""
        limits = limits.astype(np.uint64)
        # Words below the largest multiple of the limit are kept: each remainder is as likely.
        spare = (np.uint64(2**64 - 1) % limits + np.uint64(1)) % limits
        found = np.empty(len(limits), np.uint64)
        left = np.arange(len(limits))
        while len(left):
            drawn = self.words(len(left))
            good = drawn <= np.uint64(2**64 - 1) - spare[left]
            found[left[good]] = drawn[good] % limits[left[good]]
            left = left[~good]
        return found

    def number_below(self, limit: int) -> int:
        """Return a uniform integer below a limit of any size."""
        size = (limit.bit_length() + 7) // 8 + 8
        top = 256**size - 256**size % limit
        while True:
            drawn = int.from_bytes(self._stream.update(bytes(size)), "little")
            if drawn < top:
                return drawn % limit

    def decay(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Toss a coin of probability exp(-above/below) for each pair."""
        above, below = above.astype(np.uint64), below.astype(np.uint64)
        whole, rest = above // below, above % below
        kept = self._decay_small(rest, below)
        # exp(-w) = exp(-1)^w: most fail at the first coins.
        live = np.flatnonzero(kept & (whole > 0))
        whole = whole.copy()
        one = np.uint64(1)
        while len(live):
            ones = np.ones(len(live), np.uint64)
            good = self._decay_small(ones, ones)
            kept[live[~good]] = False
            whole[live] -= one
            live = live[good & (whole[live] > 0)]
        return kept

    def _decay_small(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Toss a coin of probability exp(-above/below) for each pair with above <= below."""
        odd = np.ones(len(above), bool)  # whether the first failure so far would be at an odd k
        live = np.arange(len(above))
        k = 1
        while len(live):
            hit = self.below(below[live] * np.uint64(k)) < above[live]
            live = live[hit]
            odd[live] = ~odd[live]
            k += 1
        return odd

    def number_decay(self, above: int, below: int) -> bool:
        """Toss a coin of probability exp(-above/below), for integers of any size."""
        while above > below:
            if not self.number_decay(1, 1):
                return False
            above -= below
        k = 1
        while self.number_below(below * k) < above:
            k += 1
        return k % 2 == 1


def discrete_gaussian(seed: bytes, variance: int, size: int) -> np.ndarray:
    """Return integers of the discrete Gaussian law with a parameter that is its variance or more.

    Args:
      seed: 32 secret bytes, used for nothing else.
      variance: sigma^2, a whole number from 1 to 2^26.
      size: how many.
    """
    whole = isinstance(variance, int) and 1 <= variance <= MOST_VARIANCE
    require(whole, "noise variance", variance, f"a whole number of steps, 1 to {MOST_VARIANCE}")
    coins, scale = _Coins(seed), math.isqrt(variance) + 1
    found = np.empty(size, np.int64)
    left = np.arange(size)
    while len(left):
        drawn = _laplace(coins, scale, len(left))
        kept = _accepted(coins, np.abs(drawn), scale, variance)
        found[left[kept]] = drawn[kept]
        left = left[~kept]
    return found


def _laplace(coins: _Coins, scale: int, count: int) -> np.ndarray:
    """Return discrete Laplace numbers of an integer scale."""
    found = np.empty(count, np.int64)
    left = np.arange(count)
    while len(left):
        limits = np.full(len(left), scale, np.uint64)
        low = coins.below(limits)
        kept = coins.decay(low, limits)
        at = left[kept]
        high = np.zeros(len(at), np.int64)
        live = np.arange(len(at))
        while len(live):
            ones = np.ones(len(live), np.uint64)
            live = live[coins.decay(ones, ones)]
            high[live] += 1
        size = low[kept].astype(np.int64) + scale * high
        minus = (coins.words(len(at)) & np.uint64(1)).astype(bool)
        good = ~(minus & (size == 0))
        found[at[good]] = np.where(minus, -size, size)[good]
        left = np.concatenate([left[~kept], at[~good]])
    return found


def _accepted(coins: _Coins, sizes: np.ndarray, scale: int, variance: int) -> np.ndarray:
    """Toss a coin of probability exp(-(x t - s)^2 / (2 s t^2)) for each size x."""
    below = 2 * variance * scale * scale
    small = sizes * scale + variance < 2**31  # then the square has less than 63 bits
    kept = np.zeros(len(sizes), bool)
    away = np.abs(sizes[small] * scale - variance).astype(np.uint64)
    kept[small] = coins.decay(away * away, np.full(len(away), below, np.uint64))
    for place in np.flatnonzero(~small):
        far = abs(int(sizes[place]) * scale - variance)
        kept[place] = coins.number_decay(far * far, below)
    return kept
