"""Discrete Gaussian shares: the law, the bound on integers, and what sums of shares cost."""

import functools
import math

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from scipy import special, stats

from fedlm.core.errors import ConfigError, EngineError
from fedlm.privacy.discrete_gaussian import _Coins, discrete_gaussian
from fedlm.privacy.distributed import DistributedNoise, shares_for
from fedlm.recipe.sum_rules import check_honest_nodes

SEED = bytes(range(32))


def law(variance, most):
    """The exact law on -most to most, by its definition."""
    k = np.arange(-most, most + 1)
    weights = np.exp(-(k.astype(np.float64) ** 2) / (2 * variance))
    return k, weights / weights.sum()


def fits(drawn, variance):
    """The p-value of: these integers have the discrete Gaussian law."""
    most = math.ceil(10 * math.sqrt(variance)) + 2
    k, p = law(variance, most)
    assert np.abs(drawn).max() <= most
    seen = np.bincount(drawn + most, minlength=len(k)).astype(np.float64)
    middle = p * len(drawn) >= 8
    rest = (seen[~middle].sum(), p[~middle].sum() * len(drawn))
    table = [(s, e) for s, e in zip(seen[middle], p[middle] * len(drawn), strict=True)]
    table += [rest] if rest[1] > 1e-3 else []
    seen, wanted = np.array(table).T
    return stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("variance", [1, 2, 9, 400])
def test_the_law_is_the_discrete_gaussian(variance):
    assert fits(discrete_gaussian(SEED, variance, 30_000), variance) > 1e-4


def test_wrong_laws_are_found_out():
    """A rounded normal of the same variance, a wider one, and one that leaves out zero."""
    rng = np.random.default_rng(0)
    n = 30_000
    assert fits(np.rint(rng.normal(0, 1, n)).astype(int), 1) < 1e-9
    right = discrete_gaussian(SEED, 9, n)
    assert fits(right, 8) < 1e-9
    assert fits(np.where(right == 0, 1, right), 9) < 1e-9
    assert fits(np.abs(right), 9) < 1e-9


def test_large_variances_are_normal_up_to_a_step():
    s = 2**26
    drawn = discrete_gaussian(SEED, s, 50_000) / math.sqrt(s)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.kstest(drawn * 1.05, "norm").pvalue < 1e-5


def test_numbers_too_large_for_words_are_decided_by_exact_integers():
    """The two ways of deciding give the same law."""
    coins = _Coins(SEED)
    tossed = [coins.number_decay(7, 5) for _ in range(4000)]
    assert stats.binomtest(sum(tossed), 4000, math.exp(-1.4)).pvalue > 1e-3
    many = coins.decay(np.full(4000, 7), np.full(4000, 5))
    assert stats.binomtest(int(many.sum()), 4000, math.exp(-1.4)).pvalue > 1e-3
    assert stats.binomtest(int(many.sum()), 4000, math.exp(-1.2)).pvalue < 1e-3
    huge = [coins.number_decay(2**80, 2**80) for _ in range(2000)]
    assert stats.binomtest(sum(huge), 2000, math.exp(-1)).pvalue > 1e-3


def test_uniform_integers_below_limits_that_do_not_divide_a_word():
    limit = 3 * 2**61  # a remainder of plain words would be twice as often in the first third
    drawn = _Coins(SEED).below(np.full(9000, limit, np.uint64))
    thirds = np.bincount((drawn // np.uint64(2**61)).astype(int), minlength=3)
    assert stats.chisquare(thirds).pvalue > 1e-3 and drawn.max() < limit
    plain = _Coins(SEED).words(9000) % np.uint64(limit)
    wrong = np.bincount((plain // np.uint64(2**61)).astype(int), minlength=3)
    assert stats.chisquare(wrong).pvalue < 1e-9


def test_a_seed_gives_the_same_noise_and_another_seed_other_noise():
    a, b = (discrete_gaussian(seed, 400, 50) for seed in (SEED, SEED))
    np.testing.assert_array_equal(a, b)
    assert (a != discrete_gaussian(bytes(32), 400, 50)).any()
    for wrong in (0, 2**27, 1.5):
        with pytest.raises(ConfigError, match="noise variance"):
            discrete_gaussian(SEED, wrong, 1)


# ---- what sums of shares cost --------------------------------------------------------------------


@functools.cache
def summed(variance, count, most=None):
    """The logarithms of the exact law of a sum of shares, by convolution.

    In logarithms, because orders as high as 9 look at probabilities far below the least float.
    """
    most = most or math.ceil(14 * math.sqrt(variance)) + 50
    k = np.arange(-most, most + 1)
    one = -(k.astype(np.float64) ** 2) / (2 * variance)
    one -= special.logsumexp(one)
    total = one
    for _ in range(count - 1):
        pad = np.full(len(one) - 1, -np.inf)
        windows = sliding_window_view(np.concatenate([pad, total, pad]), len(one))
        total = special.logsumexp(windows + one[::-1], axis=1)
    return total


def divergence(logs, shift, order):
    """The Renyi divergence between a law on the integers and the same law moved by `shift`."""
    long, moved = logs[shift:], logs[:-shift]
    return special.logsumexp(order * long + (1 - order) * moved) / (order - 1)


ORDERS = (1.01, 1.1, 1.5, 2, 3, 5, 9)


@pytest.mark.parametrize("variance, honest", [(1, 1), (1, 2), (1, 5), (2, 3), (4, 10)])
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_the_stated_rho_bounds_brute_force(variance, honest, shift):
    """One value that a client moves by `shift`: rho times the order, for every order."""
    noise = made_for_shift(variance, honest, shift)
    found = max(divergence(summed(variance, honest), shift, a) / a for a in ORDERS)
    assert found <= noise.rho * (1 + 1e-9)
    # The bound is not idle: half of it would be wrong, and so would that of more shares.
    assert found > noise.rho / 2
    assert found > made_for_shift(variance, 2 * honest + 1, shift).rho


def made_for_shift(variance, honest, shift):
    """Noise for integers whose norm is at most `shift`: the bound of the rounding set by hand."""

    class Bounded(DistributedNoise):
        squared_bound = shift**2

    return Bounded(clip=1.0, size=1, variance=variance, honest=honest)


def test_two_values_cost_what_their_norm_says():
    """A client that moves two values by one each: the divergences of two coordinates add up."""
    noise = made_for_shift(1, 3, math.sqrt(2))
    one = max(divergence(summed(1, 3), 1, a) / a for a in ORDERS)
    assert one < 2 * one <= noise.rho * (1 + 1e-9)


def test_epsilon_is_that_of_zcdp_and_grows_with_rounds_and_falls_with_honest_nodes():
    base = DistributedNoise(clip=100.0, size=1000, variance=40_000, honest=4)
    assert base.rho == pytest.approx(base.squared_bound / (2 * 4 * 40_000))
    more = DistributedNoise(clip=100.0, size=1000, variance=40_000, honest=8)
    assert more.epsilon(10, 1e-6) < base.epsilon(10, 1e-6) < base.epsilon(20, 1e-6)
    # zCDP's plain conversion is an upper bound.
    rho = 10 * base.rho
    assert base.epsilon(10, 1e-6) <= rho + 2 * math.sqrt(rho * math.log(1e6))
    assert base.excess(6) == 1.5


def test_shares_carry_the_central_noise_and_no_less():
    made = shares_for(clip=50.0, size=200, noise_multiplier=1.3, honest=5)
    assert made.honest * made.variance >= 1.3**2 * made.squared_bound
    assert (
        made.rho
        <= 1 / (2 * 1.3**2)
        < shares_for(clip=50.0, size=200, noise_multiplier=1.2, honest=5).rho
    )


# ---- rounding ------------------------------------------------------------------------------------


def test_rounding_keeps_to_the_bound_and_is_nearly_unbiased():
    rng = np.random.default_rng(1)
    x = rng.normal(size=64)
    noise = DistributedNoise(clip=6.0, size=64, variance=1, honest=1)
    inside = x * 6.0 / np.linalg.norm(x)
    drawn = np.stack(
        [noise.rounded(7 * x, i.to_bytes(32, "big")) for i in range(1500)]
    )  # shortened to the clip
    squared = (drawn**2).sum(axis=1)
    assert squared.max() <= noise.squared_bound < (6.0 + 8.0) ** 2
    assert np.abs(drawn - inside).max() < 1
    assert np.linalg.norm(drawn.mean(axis=0) - inside) < 0.12 * 6.0
    # Without the condition some roundings would be longer than the bound.
    free = np.floor(inside) + (rng.random((1500, 64)) < inside - np.floor(inside))
    assert (free**2).sum(axis=1).max() > noise.squared_bound


def test_what_cannot_be_rounded():
    noise = DistributedNoise(clip=6.0, size=3, variance=1, honest=1)
    for bad in (math.nan, math.inf):
        assert not noise.rounded(np.array([1.0, bad, 2.0]), SEED).any()
    assert not noise.rounded(np.zeros(3), SEED).any()
    with pytest.raises(EngineError, match="4 values: expected 3"):
        noise.rounded(np.zeros(4), SEED)


def test_the_squared_norm_is_exact_for_large_integers():
    noise = DistributedNoise(clip=2.0**38, size=2, variance=1, honest=1)
    found = noise.rounded(np.array([2.0**38, 0.0]), SEED)
    assert int(found[0]) == 2**38 and noise.squared_bound >= 2**76


def test_the_reserve_holds_the_noise_of_all_nodes():
    noise = DistributedNoise(clip=6.0, size=1000, variance=100, honest=3)
    reserve = noise.reserve(5)
    drawn = sum(noise.share(bytes([i]) * 32) for i in range(5))
    assert np.abs(drawn).max() < reserve
    # By the exact law: the chance of leaving it, times the values, is below the stated one.
    p = np.exp(summed(100, 5))
    away = np.abs(np.arange(len(p)) - len(p) // 2) > reserve
    assert 1000 * p[away].sum() < 2.0**-40
    near = np.abs(np.arange(len(p)) - len(p) // 2) > reserve / 2
    assert 1000 * p[near].sum() > 2.0**-40


@pytest.mark.parametrize("honest, words", [(0, "1 to 4"), (5, "1 to 4"), (1, "at least 2")])
def test_a_number_of_honest_nodes_that_nobody_can_promise_is_refused(honest, words):
    """Of five nodes, four stay: with one honest node the others could sign two lists."""
    with pytest.raises(ConfigError, match=rf"privacy\.honest_nodes.*{words}"):
        check_honest_nodes(5, 4, honest)
    check_honest_nodes(5, 4, 2)
