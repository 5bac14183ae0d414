"""An empirical privacy audit: how much a released model reveals about planted clients.

In:       cosines of the model's change with the directions that canaries sent, and with directions
          that nobody sent; how many numbers the model has; a delta.
Out:      an estimate of epsilon, and lower bounds at a confidence.
Promise:  for normal scores of equal spread the estimate is the exact epsilon of that separation;
          a bound holds with its confidence if the canaries' scores are independent.
Not here: canaries and their directions (`federation/audit.py`), what was promised (`account.py`).

One run suffices (Andrew et al. 2023). A canary is a client that sends a random direction of the
full length allowed. The cosine of a random direction of d numbers with anything that does not know
it has the law of one coordinate of a random point on the sphere: its square is
Beta(1/2, (d - 1)/2), which is close to N(0, 1/d). Canaries that took part have cosines a little
higher. How well the two laws can be told apart measures what this attack learns from the release.
The attack reads the last model alone; the account allows for all rounds, and for the worst client.

A test "score > t" is right about a canary with chance p and wrong about a stranger with chance q;
under (epsilon, delta) p <= e^epsilon q + delta. So every threshold gives the lower bound
log((p - delta) / q), and for two normal laws of one spread the best threshold gives epsilon itself.

scipy and jax_privacy are imported inside functions: training does not need them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedlm.core.errors import require
from fedlm.core.late import late

scipy = late("scipy")  # up to a second
auditing = late("jax_privacy.auditing")  # over a second

Scores = np.ndarray
# Ranks at which a lower bound is looked for, as shares of the canaries; each costs confidence.
RANKS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95)
LEAST_CANARIES = 2


class Audit(NamedTuple):
    """The result of auditing the scores of one run."""

    estimate: float  # epsilon that separates the two normal laws
    lower: float  # epsilon is at least this, with the confidence
    second_lower: float  # the same question, answered by jax_privacy from scores of strangers
    confidence: float
    mean: float  # of the canaries' scores, in standard deviations of a stranger's
    spread: float  # their standard deviation, in the same unit


def audit(
    scores: Scores, strangers: Scores, dimensions: int, delta: float, confidence: float = 0.95
) -> Audit:
    """Audit the scores of one run."""
    require(
        len(scores) >= LEAST_CANARIES,
        "privacy.canaries",
        len(scores),
        f"at least {LEAST_CANARIES} that took part; a hundred give a steady answer",
    )
    unit = math.sqrt(dimensions)
    mean, spread = unit * float(np.mean(scores)), unit * float(np.std(scores, ddof=1))
    return Audit(
        # A canary pulls towards its direction: a mean below zero is chance.
        estimate=epsilon_between(max(mean, 0.0), _beyond_chance(spread, len(scores)), delta),
        lower=lower_bound(scores, dimensions, delta, confidence),
        second_lower=second_opinion(scores, strangers, delta, confidence),
        confidence=confidence,
        mean=mean,
        spread=spread,
    )


def _beyond_chance(spread: float, count: int) -> float:
    """Return the spread, or 1 if its distance from the strangers' spread can be chance.

    At a delta of one in a million, a few percent more spread look like an epsilon of one, and
    a hundred canaries deviate by a few percent by chance.
    """
    low, high = scipy.stats.chi2.interval(0.99, count - 1)
    return 1.0 if low <= (count - 1) * spread**2 <= high else spread


def epsilon_between(mean: float, spread: float, delta: float) -> float:
    """Return the epsilon at delta that a threshold between N(mean, spread^2) and N(0, 1) shows.

    It is the largest over both tails and both orders of the two laws. For spread 1 it is the
    epsilon of the Gaussian mechanism with sensitivity `mean` and noise 1.
    """
    spread = max(spread, 1e-6)
    seen, turned, null = (mean, spread), (-mean, spread), (0.0, 1.0)
    pairs = ((seen, null), (null, turned), (turned, null), (null, seen))
    return max(0.0, *(_one_way(a, b, delta) for a, b in pairs))


def _one_way(a: tuple[float, float], b: tuple[float, float], delta: float) -> float:
    """Return the maximum over thresholds t of log((P_a(x > t) - delta) / P_b(x > t))."""

    def log_above(law: tuple[float, float], t: np.ndarray) -> np.ndarray:
        return scipy.special.log_ndtr((law[0] - t) / law[1])

    def minus(t: np.ndarray) -> np.ndarray:
        chance = log_above(a, t)
        left = np.maximum(-np.expm1(math.log(delta) - chance), 1e-300)
        return -(chance + np.log(left) - log_above(b, t))

    # Beyond the last threshold fewer than delta are above; before the first all are.
    last = a[0] - a[1] * float(scipy.special.ndtri(delta))
    grid = np.linspace(a[0] - 10 * a[1], last - 1e-9 * a[1], 4001)
    best = int(np.argmin(minus(grid)))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = scipy.optimize.minimize_scalar(
        lambda t: float(minus(np.asarray(t))), bounds=around, method="bounded"
    )
    return -min(float(found.fun), float(minus(grid[best])))


def lower_bound(scores: Scores, dimensions: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on epsilon from counts alone, without a law for the canaries.

    At the j-th highest of n scores, the chance that a canary is above it has the law
    Beta(j, n - j + 1): Clopper and Pearson's lower bound for j of n. That a stranger is above it
    needs no sample, because its law is known. The confidence is divided among the ranks tried.
    """
    ordered = np.sort(np.asarray(scores, np.float64))[::-1]
    ranks = sorted({max(1, math.ceil(share * len(ordered))) for share in RANKS})
    wrong, best = (1 - confidence) / len(ranks), 0.0
    for rank in ranks:
        chance = float(scipy.special.betaincinv(rank, len(ordered) - rank + 1, wrong))
        if chance > delta:
            found = math.log(chance - delta) - log_stranger_above(ordered[rank - 1], dimensions)
            best = max(best, found)
    return best


def log_stranger_above(cosine: float, dimensions: int) -> float:
    """Return the exact log probability that a random direction has a higher cosine.

    (1 + cosine) / 2 has the law Beta((d - 1)/2, (d - 1)/2), the same statement as that of its
    square. Far out, where that probability underflows, Mill's ratio replaces it.
    """
    half, cosine = (dimensions - 1) / 2, min(cosine, 1 - 1e-12)
    chance = float(scipy.special.betaincc(half, half, (1 + cosine) / 2))
    if chance > 1e-280:
        return math.log(chance)
    # Density over its own decay: above the true chance, so that the bound stays below.
    log_density = (
        (half - 1) * math.log1p(-(cosine**2))
        + scipy.special.gammaln(half + 0.5)
        - scipy.special.gammaln(half)
        - 0.5 * math.log(math.pi)
    )
    decay = 2 * (half - 1) * cosine / (1 - cosine**2)
    return float(log_density - math.log(decay))


def second_opinion(
    scores: Scores, strangers: Scores, delta: float, confidence: float = 0.95
) -> float:
    """Return jax_privacy's lower bound, which samples strangers instead of using their law."""
    auditor = auditing.CanaryScoreAuditor(scores, strangers)
    return float(auditor.epsilon_clopper_pearson(1 - confidence, delta, one_sided=True))
