"""The privacy loss of normal noise on balls-in-bins cohorts.

In:       the noise, the bins that a client may be in, how often each had its turn.
Out:      a privacy loss distribution of dp_accounting, to be composed with other releases.
Promise:  it dominates what all rounds together release about a client, whatever the clients send
          and whatever they know of earlier rounds, in both directions; for independent noise no
          smaller one does, up to the rounding of numbers, which goes up.
Not here: the draw (`cohort/sampling.py`), composition and epsilon (`cost.py`), which plans may have
          it (`gaussian.py`, `spaced.py`).

Balls-in-bins (Chua et al. 2024, arXiv 2412.16802; Choquette-Choo et al. 2024, arXiv 2410.06266):
before the first round each client falls into one of b bins, secretly and by chance alone, and joins
exactly the rounds of its bin: i, i + b, i + 2b, ... Here it falls into each bin with chance
cohort / population, and into none with what is left, r = 1 - b cohort / population.

Both papers sample the privacy loss (Monte Carlo), and can then only bound a delta of 1e-6 by
hundreds of millions of samples. Here the loss of independent noise is computed; that of banded
noise is computed up to a bound, and sampled in a way that needs few samples (`bin_samples.py`).
The smaller bound counts.

1. The likelihood ratio. Noise is M^-1 Z, M without negative entries, so M x + Z is released, row by
   row. Let a_i be the ratio of what was seen so far "if the client is in bin i" to "if it sends
   zero". Seen from a run without the client, row r multiplies a_i by exp(g_i - Var g_i / 2), where
   g_i is the product of standard normal noise with w_i, the sum over the client's rounds t of bin i
   of M_rt times what it sends in t, over the noise; w_i is fixed by earlier rows. After all rounds
       L = r + (1 - r) (a_1 + ... + a_b) / b    is P(with the client) / Q(without),
   H_k(P, Q) = E_Q (L - k)_+ and H_k(Q, P) = E_Q (1 - k L)_+: expectations of convex functions of L.
2. The worst client sends one vector of full length in all rounds. Let V(a) be the expectation of
   such a function if this client goes on from a. No second derivative of V is negative: V is a
   mixture of convex functions of sums of the a_i with positive weights. So, by Kahane's inequality
   (1985), the expectation of V after a row does not fall if a covariance <w_i, w_j>, or a variance,
   rises; and all are largest if everything that is sent is one vector of length one, because M is
   not negative. Row by row from the last, no client has a larger expectation than this one. For the
   same reason a turn more never lowers delta.
3. So a_i = exp(u_i - G_ii / 2) with u normal of covariance G, the products of the vectors M 1_i
   over the squared noise, 1_i the rounds of bin i: one pair that dominates in both directions, and
   is reached. For independent noise G is diagonal: the turns of the bins over the squared noise.
4. Bands. M has p bands with columns of length at most one, and p divides b. Tell the attacker the
   client's bin modulo p, and draw that number for a client in no bin too. Divergences are jointly
   convex, so this can only raise delta on average, and no more than the worst of the p values does.
   What is left to guess is one of the bins g, g + p, g + 2p, ..., whose columns do not overlap: a
   row holds one contribution of the client, so that signs in M do not matter, and G is diagonal.
   Residue g = 0, whose bins come first and have the most turns, is the worst.

The law of a sum of independent a_i is computed by doubling. After each step its values are moved to
a grid that is even in logarithms; each is split between its two neighbours so that its mean stays.
A split only raises expectations of convex functions (Jensen), in both directions at once, so the
account is never below the truth. Values beyond the grid are dropped, which lowers L; the mean of L
that is missing afterwards is a chance of failure, below 1e-12.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedlm.core.late import late
from fedlm.core.types import Vector
from fedlm.privacy import bin_samples
from fedlm.privacy.bin_samples import Overlap
from fedlm.privacy.fixed_size import distribution_of

scipy = late("scipy")  # up to a second

LAW = "balls-in-bins"
POINTS = 600  # of the grid: the work grows with the square
FAR = 8.6  # standard deviations: the chance beyond is below 1e-17
TAIL = 1e-17
MOST_SIGNAL = 25.0  # beyond 30 the largest ratio of a turn is no number


@dataclass(frozen=True)
class BallsInBinsEvent:
    """What rounds release about a client that is in one of several bins."""

    noise_multiplier: float
    bins: tuple[tuple[int, int], ...]  # turns so far, and how many bins have had so many
    share: float  # the chance to be in a bin at all
    overlap: Overlap | None = None  # of the bins of banded noise, whose residue is not told

    @property
    def most_turns(self) -> int:
        """The turns of the bin that has had the most."""
        return max(turns for turns, _ in self.bins)


def event_of_bins(
    noise: float,
    rounds: int,
    bins: int,
    bands: int,
    share: float,
    overlap: Overlap | None = None,
) -> BallsInBinsEvent:
    """Return what the first `rounds` rounds release; `bands` divides the number of bins."""
    turns = (max(0, -(-(rounds - first) // bins)) for first in range(0, bins, bands))
    return BallsInBinsEvent(noise, tuple(sorted(Counter(turns).items())), share, overlap)


def bins_loss(event: BallsInBinsEvent, step: float) -> Any:
    """Return the privacy loss distribution of an event, on multiples of `step`.

    Raises `OverflowError` if the noise is so little that likelihood ratios are no numbers.
    """
    if math.sqrt(event.most_turns) > MOST_SIGNAL * event.noise_multiplier:
        raise OverflowError("too little noise")
    ratio = _ratio(event)
    values, chances = ratio.values, ratio.chances
    more = np.cumsum(chances[::-1])[::-1]  # the chance of a value or more
    means = np.cumsum((chances * values)[::-1])[::-1]
    fewer, lower = np.cumsum(chances), np.cumsum(chances * values)
    missing, lost = (max(0.0, 1.0 - total[0]) + 1e-15 for total in (means, more))

    def forward(epsilons: Vector) -> Vector:
        at = np.searchsorted(values, np.exp(epsilons), side="right")
        over = np.append(means, 0.0)[at] - np.exp(epsilons) * np.append(more, 0.0)[at]
        return missing + np.maximum(over, 0.0)

    def backward(epsilons: Vector) -> Vector:
        at = np.searchsorted(values, np.exp(-epsilons))
        under = np.append(0.0, fewer)[at] - np.exp(epsilons) * np.append(0.0, lower)[at]
        return lost + np.maximum(under, 0.0)

    least = values[np.flatnonzero(fewer > TAIL)[0]]
    ends = math.log(values[-1]), -math.log(max(least, 1e-300))
    up, down = (np.arange(max(math.ceil(end / step), 1) + 1) * step for end in ends)
    above, below = forward(up), backward(down)
    if event.overlap is not None:
        # Rounded up, so that the rounds of one turn share their samples.
        furthest = step * max(1, int(np.count_nonzero(above > 1e-13)) - 1)
        last = math.pow(2.0, math.ceil(2 * math.log2(furthest)) / 2)
        forth, back = bin_samples.deltas(event.overlap, event.noise_multiplier, event.share, last)
        above, below = np.minimum(above, forth.at(up)), np.minimum(below, back.at(down))
        return distribution_of(above, below, step, convex=False)
    return distribution_of(above, below, step)


# ---- the law of the likelihood ratio --------------------------------------------------------


class _Law(NamedTuple):
    """A distribution on finitely many non-negative numbers, in ascending order."""

    values: Vector
    chances: Vector


@functools.lru_cache(maxsize=64)
def _ratio(event: BallsInBinsEvent) -> _Law:
    """Return the law of the likelihood ratio L in a run without the client."""
    count = sum(number for _, number in event.bins)
    whole = _Law(np.zeros(1), np.ones(1))
    for turns, number in event.bins:
        if turns:
            one = _one_bin(math.sqrt(turns) / event.noise_multiplier)
            whole = _sum(whole, _times(one, number))
        else:
            whole = _Law(whole.values + number, whole.chances)
    return _Law(1 - event.share + event.share * whole.values / count, whole.chances)


def _one_bin(s: float) -> _Law:
    """Return the law of exp(N(0, s^2) - s^2 / 2), each interval split between its ends."""
    z = np.linspace(-FAR, FAR + s, POINTS)
    values = np.append(0.0, np.exp(s * z - s * s / 2))
    edges = np.append(-np.inf, z)
    # The mean over an interval is its chance when N has mean s; far out, by the nearer tail.
    chance, mean = (_between(edges - shift, scipy.special.ndtr) for shift in (0.0, s))
    upper = np.clip((mean - values[:-1] * chance) / np.diff(values), 0.0, chance)
    chances = np.zeros(POINTS + 1)
    chances[:-1] += chance - upper
    chances[1:] += upper
    chances[0] += math.exp(scipy.special.log_ndtr(-z[-1]))  # beyond the last value: dropped
    return _Law(values, chances)


def _between(edges: Vector, ndtr: Any) -> Vector:
    low, high = edges[:-1], edges[1:]
    far: Vector = np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    return far


def _times(one: _Law, count: int) -> _Law:
    """Return the law of the sum of `count` independent draws."""
    whole = _Law(np.zeros(1), np.ones(1))
    while count:
        whole = _sum(whole, one) if count & 1 else whole
        count >>= 1
        one = _sum(one, one) if count else one
    return whole


def _sum(a: _Law, b: _Law) -> _Law:
    """Return a law that is not below that of the sum of two in the convex order."""
    if min(len(a.values), len(b.values)) == 1:
        a, b = sorted((a, b), key=lambda law: len(law.values))
        return _Law(b.values + a.values[0], b.chances * a.chances[0])
    values = np.add.outer(a.values, b.values).ravel()
    chances = np.multiply.outer(a.chances, b.chances).ravel()
    logs = np.log(np.maximum(values, 1e-300))
    low, high = _limits(logs, values, chances)
    step = (high - low) / (POINTS - 1)
    grid = np.exp(low + step * np.arange(POINTS))
    kept = logs < high
    dropped = chances[~kept].sum()
    values, chances, logs = values[kept], chances[kept], logs[kept]
    # Index 0 is zero: what lies below the grid is split between zero and the lowest point.
    at = np.clip(np.floor((logs - low) / step).astype(np.int64) + 1, 0, POINTS - 1)
    points = np.append(0.0, grid)
    share = np.clip((values - points[at]) / (points[at + 1] - points[at]), 0.0, 1.0)
    found = np.bincount(at, chances * (1 - share), POINTS + 1)
    found += np.bincount(at + 1, chances * share, POINTS + 1)
    found[0] += dropped
    return _Law(points, found)


def _limits(logs: Vector, values: Vector, chances: Vector) -> tuple[float, float]:
    """Return logarithms between which all but `TAIL` of the chance, and of the mean, lies."""
    low, high, cells = float(logs[values > 0].min()), float(logs.max()), 4096
    width = (high - low) / cells or 1.0
    cell = np.clip(((logs - low) / width).astype(np.int64), 0, cells - 1)
    below = np.cumsum(np.bincount(cell, chances, cells))
    mean = np.bincount(cell, chances * values, cells)
    above = np.cumsum(mean[::-1])[::-1] / max(mean.sum(), 1e-300)
    first = int(np.searchsorted(below, TAIL, side="right"))
    last = int(np.flatnonzero(above > TAIL)[-1]) + 1
    return low + first * width, low + max(last, first + 1) * width + 1e-9
