"""The privacy loss of banded noise on balls-in-bins cohorts, bounded from samples.

In:       the matrix, how many bins there are and how many rounds ran, the noise.
Out:      upper bounds of delta at many epsilons, for the run with the client against that without
          it, and the other way round.
Promise:  all bounds of one plan hold together, but for a chance of `WRONG` in the choice of the
          samples, which is made once and for all (a fixed seed), not by the run; the same numbers
          on the same machine. Whoever takes the best of many plans by their bounds has that chance
          as often as there are plans: a search for noise or rounds looks at less than a hundred.
Not here: the pair of distributions, and why it dominates (`balls_in_bins.py`).

Let L = sum_i p_i a_i be the likelihood ratio of `balls_in_bins.py`, with the chances p_i of the
bins and of none, a_i = exp(u_i - G_ii / 2), u normal with covariance G. delta = E (L - k)_+ at k =
e^epsilon is a matter of rare large L, which plain samples do not meet. Now L^n is the sum over
tuples t of n bins of p_t1 ... p_tn exp(G(t)) times the density of u shifted by G_t1 + ... + G_tn,
where G(t) sums G over the pairs of t. So

    delta = E_t [r(t) E_(u shifted) (L - k)_+ / L^n]

if the bins of t are drawn one after the other, each with a chance in proportion to p_i exp(sum of
G_ij over the bins j before it), and r(t) is the product of the sums by which these were divided.
After q bins no such sum exceeds max_j sum_i p_i exp(q G_ij) (Hoelder), and (L - k)_+ / L^n is at
most (n - 1)^(n - 1) n^-n k^(1 - n). So a sample lies between zero and a known number that is not
far above delta, and the empirical Bernstein bound of Maurer and Pontil (2009) holds. The order n
with the smallest such number is taken at each epsilon, before any sample is drawn.

The other direction, E (1 - k L)_+, is a matter of rare small L. u is shifted by -c G p, so that a
sample weighs exp(c <p, u> + c^2 v / 2) with v = <p, G p>. Where L < 1 / k, the geometric mean,
which is no larger, gives <p, u> <= -h with h = epsilon - sum_i p_i G_ii / 2, and the weight is at
most exp(c^2 v / 2 - c h). The same bound holds, with the best c of a few.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedlm.core.keys import generator_for
from fedlm.core.types import Vector

Matrix = Float[np.ndarray, "bins bins"]
SAMPLES = 60_000  # per order
AT_ONCE = 5_000
WRONG = 1e-6  # the chance that one of the bounds is none
ORDERS = (2, 3, 4, 5, 6, 8)
DOTS = 300  # epsilons at which delta is bounded; between them it is below the chord
MOST_BINS, MOST_ROUNDS = 300, 4000  # more would take minutes


@dataclass(frozen=True)
class Overlap:
    """A banded matrix with columns of length one, and the rounds of bins that it overlaps."""

    column: tuple[float, ...]
    length: int  # rounds of the matrix, after which it begins anew
    rounds: int  # that ran
    bins: int


class Deltas(NamedTuple):
    """Upper bounds of delta at some epsilons."""

    epsilons: Vector
    bounds: Vector

    def at(self, epsilons: Vector) -> Vector:
        """Return bounds at other epsilons: delta is convex in exp(epsilon), and falls."""
        chord = np.interp(np.exp(epsilons), np.exp(self.epsilons), self.bounds)
        return np.where(epsilons > self.epsilons[-1], self.bounds[-1], chord)


def overlap_of(column: tuple[float, ...], length: int, rounds: int, bins: int) -> Overlap | None:
    """Return the overlap of bins; None where it is not sampled.

    That is where there is none, where a negative entry leaves the worst client unknown, and where
    sampling would take minutes.
    """
    if len(column) == 1 or min(column) < 0 or bins > MOST_BINS or not 0 < rounds <= MOST_ROUNDS:
        return None
    return Overlap(column, length, rounds, bins)


@functools.lru_cache(maxsize=64)
def deltas(overlap: Overlap, noise: float, share: float, last: float) -> tuple[Deltas, Deltas]:
    """Return bounds of delta from epsilon zero to `last`: with the client against without; back."""
    gram, chances = _gram(overlap) / noise**2, np.full(overlap.bins, share / overlap.bins)
    if share < 1:  # in no bin: nothing is moved
        gram, chances = np.pad(gram, ((0, 1), (0, 1))), np.append(chances, 1 - share)
    epsilons = np.linspace(0.0, last, DOTS)
    return _forth(gram, chances, epsilons), _back(gram, chances, epsilons)


def _forth(gram: Matrix, chances: Vector, epsilons: Vector) -> Deltas:
    sums = [_log_sum(gram, chances, q) for q in range(1, max(ORDERS))]
    ranges = np.stack([_log_range(sums, order, epsilons) for order in ORDERS])
    bounds = np.ones(DOTS)
    for number, order in enumerate(ORDERS):
        mine = np.flatnonzero(ranges.argmin(axis=0) == number)
        if not len(mine):
            continue
        loss, log_weight = _samples(gram, chances, order)
        for dot in mine:
            over, epsilon = loss > epsilons[dot], epsilons[dot]
            sample = np.exp(log_weight[over] + epsilon) * np.expm1(loss[over] - epsilon)
            bounds[dot] = _bound(sample, ranges[number, dot])
    return Deltas(epsilons, np.minimum.accumulate(bounds))


def _back(gram: Matrix, chances: Vector, epsilons: Vector) -> Deltas:
    spread = float(chances @ gram @ chances)
    below = epsilons - chances @ np.diag(gram) / 2
    shifts = np.maximum(np.quantile(below, (0.0, 0.1, 0.25, 0.5, 0.75)), 0.0) / spread
    ranges = shifts[:, None] ** 2 * spread / 2 - shifts[:, None] * np.maximum(below, 0.0)
    bounds = np.ones(DOTS)
    for number, shift in enumerate(shifts):
        mine = np.flatnonzero((ranges.argmin(axis=0) == number) & (below > 0))
        if not len(mine):
            continue
        loss, log_weight = _shifted(gram, chances, float(shift))
        for dot in mine:
            under = loss < -epsilons[dot]
            sample = np.exp(log_weight[under]) * -np.expm1(loss[under] + epsilons[dot])
            bounds[dot] = _bound(sample, ranges[number, dot])
    return Deltas(epsilons, np.minimum.accumulate(bounds))


def _gram(overlap: Overlap) -> Matrix:
    """Return the products of what a client moves the release by, for each two bins."""
    rows = np.arange(overlap.length)
    matrix = np.zeros((overlap.length, overlap.length))
    for below, value in enumerate(overlap.column):
        matrix[rows[below:], rows[: overlap.length - below]] = value
    matrix /= np.linalg.norm(matrix, axis=0)
    joins = np.arange(overlap.rounds) % overlap.bins == np.arange(overlap.bins)[:, None]
    found = np.zeros((overlap.bins, overlap.bins))
    for first in range(0, overlap.rounds, overlap.length):
        here = joins[:, first : first + overlap.length].astype(float)
        moved = here @ matrix[: here.shape[1], : here.shape[1]].T
        found += moved @ moved.T
    return found


def _log_sum(gram: Matrix, chances: Vector, before: int) -> float:
    """Return the largest logarithm of a sum that chances are divided by after so many bins."""
    top = before * gram.max(axis=1)
    sums = top + np.log(np.exp(before * gram - top[:, None]) @ chances)
    return float(sums.max())


def _log_range(sums: list[float], order: int, epsilons: Vector) -> Vector:
    """Return the logarithm of a number that no sample exceeds."""
    peak = (order - 1) * math.log(order - 1) - order * math.log(order)
    return sum(sums[: order - 1]) + peak - (order - 1) * epsilons


def _samples(gram: Matrix, chances: Vector, order: int) -> tuple[Vector, Vector]:
    """Return samples of log L in shifted runs, and log r(t) - n log L of each."""
    rng = generator_for(0, "account", member=order)
    root, found = _root(gram), []
    for _ in range(SAMPLES // AT_ONCE):
        shift, log_ratio = np.zeros((AT_ONCE, len(gram))), np.zeros(AT_ONCE)
        for _ in range(order):
            top = shift.max(axis=1)
            upto = np.cumsum(chances * np.exp(shift - top[:, None]), axis=1)
            log_ratio += top + np.log(upto[:, -1])
            at = (upto < (rng.random(AT_ONCE) * upto[:, -1])[:, None]).sum(axis=1)
            shift += gram[np.minimum(at, len(gram) - 1)]
        loss = _loss(gram, chances, shift + rng.normal(size=shift.shape) @ root)
        found.append((loss, log_ratio - order * loss))
    loss, log_weight = (np.concatenate(part) for part in zip(*found, strict=True))
    return loss, log_weight


def _shifted(gram: Matrix, chances: Vector, shift: float) -> tuple[Vector, Vector]:
    """Return samples of log L where u is lower by `shift` times G p, and their log weights."""
    rng = generator_for(0, "account", member=0)
    moved, root, found = gram @ chances, _root(gram), []
    for _ in range(SAMPLES // AT_ONCE):
        u = rng.normal(size=(AT_ONCE, len(gram))) @ root - shift * moved
        found.append((_loss(gram, chances, u), shift * u @ chances))
    loss, log_weight = (np.concatenate(part) for part in zip(*found, strict=True))
    return loss, log_weight + shift**2 * float(chances @ moved) / 2


def _root(gram: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(gram)
    root: Matrix = (vectors * np.sqrt(np.maximum(values, 0))).T
    return root


def _loss(gram: Matrix, chances: Vector, u: Float[np.ndarray, "samples bins"]) -> Vector:
    """Return log L."""
    exponents = u - np.diag(gram) / 2
    top = exponents.max(axis=1)
    found: Vector = top + np.log(np.exp(exponents - top[:, None]) @ chances)
    return found


def _bound(sample: Vector, log_range: float) -> float:
    """Return the empirical Bernstein bound of a mean, with its share of `WRONG`.

    Samples that are zero may be left out of `sample`.
    """
    count, log_wrong = SAMPLES // AT_ONCE * AT_ONCE, math.log(2 * 2 * DOTS / WRONG)
    mean = sample.sum() / count
    variance = max((sample**2).sum() / count - mean**2, 0.0) * count / (count - 1)
    rest = 7 * math.exp(min(log_range, 700.0)) * log_wrong / (3 * (count - 1))
    return min(1.0, float(mean + math.sqrt(2 * variance * log_wrong / count) + rest))
