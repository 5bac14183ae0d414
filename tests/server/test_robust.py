"""Robust centres: what a few liars can do to each, and what honest members get."""

import numpy as np
import pytest

from fedlm.server.robust import RULES, bounded

RULE = pytest.mark.parametrize("rule", [name for name in RULES if name != "mean"])


def honest(members=12, size=50, seed=0):
    return np.random.default_rng(seed).normal(1.0, 0.1, (members, size))


@RULE
def test_a_quarter_of_liars_moves_a_robust_centre_little_and_the_mean_anywhere(rule):
    truth = honest().mean(axis=0)
    liars = np.full((4, 50), 1e6)
    both = np.concatenate([honest(), liars])
    assert np.linalg.norm(RULES[rule](both, 0.25) - truth) < 1.0
    assert np.linalg.norm(RULES["mean"](both, 0.25) - truth) > 1e6


@RULE
def test_too_many_liars_move_it(rule):
    both = np.concatenate([honest(), np.full((14, 50), 1e6)])
    assert np.linalg.norm(RULES[rule](both, 0.25) - 1.0) > 1e4


@RULE
def test_without_liars_it_is_near_the_mean(rule):
    x = honest(40)
    assert np.linalg.norm(RULES[rule](x, 0.1) - x.mean(axis=0)) < 0.15


@pytest.mark.parametrize("rule", RULES)
def test_one_member_and_equal_members_are_their_own_centre(rule):
    one = honest(1)
    np.testing.assert_allclose(RULES[rule](one, 0.4), one[0])
    np.testing.assert_allclose(RULES[rule](np.repeat(one, 7, axis=0), 0.4), one[0])


def test_the_geometric_median_has_the_least_sum_of_distances():
    x = honest(9, 3, seed=4)

    def cost(at):
        return np.linalg.norm(x - at, axis=1).sum()

    best = RULES["geometric-median"](x, 0.0)
    rng = np.random.default_rng(1)
    assert all(cost(best) <= cost(best + rng.normal(0, 0.01, 3)) for _ in range(200))
    assert cost(best) < cost(x.mean(axis=0))


def test_trimming_cuts_at_least_the_stated_part():
    x = np.array([[0.0], [1.0], [2.0], [3.0], [1e9]])
    assert RULES["trimmed-mean"](x, 0.1)[0] == 2.0  # one of five on each side, not none
    assert RULES["trimmed-mean"](x, 0.49)[0] == 2.0  # nothing is left: the median


def test_a_bound_on_norms():
    long = np.array([3.0, 4.0])
    np.testing.assert_allclose(bounded(long, 1.0), [0.6, 0.8])
    np.testing.assert_array_equal(bounded(long, 5.0), long)
    np.testing.assert_array_equal(bounded(np.zeros(2), 1.0), np.zeros(2))
