"""The estimate is exact where the answer is known; bounds keep their confidence."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from scipy.special import log_ndtr

from fedlm.core.errors import ConfigError
from fedlm.privacy import audit

DELTA = 1e-5


def gaussian_epsilon(mu, delta):
    """Epsilon of the Gaussian mechanism (Balle and Wang 2018), by its delta at each epsilon."""

    def over(epsilon):
        lost = log_ndtr(-epsilon / mu - mu / 2) + epsilon - log_ndtr(mu / 2 - epsilon / mu)
        return log_ndtr(mu / 2 - epsilon / mu) + math.log(-math.expm1(lost)) - math.log(delta)

    return scipy.optimize.brentq(over, 0, mu**2 + 20 * mu)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_equal_spreads_are_the_gaussian_mechanism(mu, delta):
    wanted = gaussian_epsilon(mu, delta) if mu > 3 * delta else 0
    assert audit.epsilon_between(mu, 1.0, delta) == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_nothing_to_tell_apart():
    assert audit.epsilon_between(0.0, 1.0, DELTA) == pytest.approx(0, abs=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mean, spread", [(0.0, 1.3), (0.5, 1.2), (2.0, 0.8), (1.0, 3.0)])
def test_other_spreads_against_plain_search(mean, spread):
    """All four kinds of threshold test, on a plain grid."""
    t = np.linspace(-40, 40, 400_001)
    seen, null = scipy.stats.norm(mean, spread), scipy.stats.norm(0, 1)
    best = 0.0
    for one, other in ((seen, null), (null, seen)):
        for chance, wrong in ((one.sf(t), other.logsf(t)), (one.cdf(t), other.logcdf(t))):
            good = chance > DELTA
            best = max(best, np.max(np.log(chance[good] - DELTA) - wrong[good]))
    assert audit.epsilon_between(mean, spread, DELTA) == pytest.approx(best, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("size", [3, 50, 4000])
def test_the_law_of_a_stranger_is_that_of_random_directions(size):
    drawn = np.random.default_rng(size).normal(size=(4000, size if size < 4000 else 400))
    cosines = drawn[:, 0] / np.linalg.norm(drawn, axis=1)
    size = drawn.shape[1]

    def law(dimensions):
        above = [math.exp(audit.log_stranger_above(c, dimensions)) for c in cosines]
        return scipy.stats.kstest(above, "uniform").pvalue

    assert law(size) > 0.001
    assert law(2 * size) < 1e-4, "and not that of another number of dimensions"


@pytest.mark.parametrize("size", [50, 4000, 10**6])
def test_far_tails_of_a_stranger(size):
    """Half of Beta(1/2, (d-1)/2) for the square, and nearly normal for many dimensions."""
    for sigmas in (0.5, 3.0, 6.0, 10.0, 30.0):
        cosine = sigmas / math.sqrt(size)
        found = audit.log_stranger_above(min(cosine, 0.999), size)
        if cosine < 0.9:
            square = scipy.stats.beta(0.5, (size - 1) / 2).logsf(cosine**2) - math.log(2)
            if math.isfinite(square):
                assert found == pytest.approx(square, rel=1e-6)
        if size == 10**6:
            assert found == pytest.approx(scipy.stats.norm.logsf(sigmas), rel=2e-3)
    assert audit.log_stranger_above(1.0, size) < audit.log_stranger_above(0.99, size) < -20
    # Where the chance is no longer a number the bound goes on without a step.
    near = [audit.log_stranger_above(c / math.sqrt(10**6), 10**6) for c in (35.0, 35.7, 36.5)]
    assert near[0] > near[1] > near[2] > near[0] - 70


def scores(mu, count, size, seed):
    """Cosines of canaries that are mu standard deviations off."""
    rng = np.random.default_rng(seed)
    return (mu + rng.normal(size=count)) / math.sqrt(size)


def test_a_lower_bound_is_below_epsilon_as_often_as_it_says():
    """And a bound that forgets to be one is caught."""
    mu, size, runs = 2.0, 10_000, 400
    epsilon = gaussian_epsilon(mu, DELTA)
    bounds = np.array(
        [audit.lower_bound(scores(mu, 60, size, s), size, DELTA) for s in range(runs)]
    )
    failed = int((bounds > epsilon).sum())
    assert scipy.stats.binomtest(failed, runs, 0.05, alternative="greater").pvalue > 0.001
    assert bounds.mean() > epsilon / 3, "it also says something"
    nothing = [audit.lower_bound(scores(0, 60, size, s), size, DELTA) > 0 for s in range(runs)]
    assert scipy.stats.binomtest(sum(nothing), runs, 0.05, alternative="greater").pvalue > 0.001
    shifted = [audit.lower_bound(scores(0.6, 60, size, s), size, DELTA) > 0 for s in range(runs)]
    assert scipy.stats.binomtest(sum(shifted), runs, 0.05, alternative="greater").pvalue < 1e-6


def test_a_higher_confidence_claims_less():
    seen = scores(3.0, 100, 10_000, 0)
    found = [audit.lower_bound(seen, 10_000, DELTA, c) for c in (0.8, 0.95, 0.999)]
    assert found[0] > found[1] > found[2] > 0


def test_the_whole_answer():
    size = 10_000
    strangers = scores(0, 1000, size, 1)
    seen = scores(3.0, 2000, size, 2)
    found = audit.audit(seen, strangers, size, DELTA)
    epsilon = gaussian_epsilon(3.0, DELTA)
    assert found.estimate == pytest.approx(epsilon, rel=0.1)
    assert 0 < found.second_lower < found.lower < epsilon
    assert (found.mean, found.spread) == pytest.approx((3, 1), abs=0.1)
    nothing = audit.audit(scores(0, 2000, size, 3), strangers, size, DELTA)
    assert nothing.estimate < 0.6 and nothing.lower == 0 and nothing.second_lower == 0
    away = audit.audit(-seen, strangers, size, DELTA)
    assert away.estimate < 0.6, "a canary pulls; what pushes is chance"


def test_spread_counts_where_chance_does_not_explain_it():
    """Canaries that took part more or less often: a mixture, wider than strangers are."""
    size, strangers = 10_000, scores(0, 1000, 10_000, 1)
    even, uneven = scores(1.0, 400, size, 2), scores(1.0, 400, size, 2)
    uneven += np.tile([-2.0, 2.0], 200) / math.sqrt(size)
    known = audit.audit(even, strangers, size, DELTA)
    assert known.spread != 1
    assert known.estimate == pytest.approx(gaussian_epsilon(known.mean, DELTA), rel=1e-3)
    mixed = audit.audit(uneven, strangers, size, DELTA)
    assert mixed.spread > 2 and mixed.estimate > known.estimate + 5


def test_one_canary_is_none():
    with pytest.raises(ConfigError, match=r"privacy\.canaries = 1: expected at least 2"):
        audit.audit(np.array([0.1]), np.zeros(3), 100, DELTA)
