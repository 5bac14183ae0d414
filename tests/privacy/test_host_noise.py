"""Noise of the host: the law that it claims, and no other."""

import numpy as np
import scipy.stats

from fedlm.privacy.host_noise import on_grid, standard_normal


def test_the_noise_is_standard_normal_and_another_law_is_rejected():
    drawn = standard_normal(11, "vocabulary", 200_001)
    assert drawn.shape == (200_001,)
    assert scipy.stats.kstest(drawn, "norm").pvalue > 1e-3
    assert scipy.stats.kstest(drawn * 1.05, "norm").pvalue < 1e-6
    halves = drawn[:100_000], drawn[100_001:]
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.015  # the two numbers of a pair


def test_an_address_gives_the_same_noise_and_another_address_other_noise():
    same = standard_normal(1, "vocabulary", 5)
    np.testing.assert_array_equal(same, standard_normal(1, "vocabulary", 5))
    for other in ((2, "vocabulary", 0), (1, "evaluate", 0), (1, "vocabulary", 1)):
        seed, purpose, round = other
        assert not np.isin(same, standard_normal(seed, purpose, 5, round=round)).any()


def test_released_numbers_lie_on_a_grid():
    found = on_grid(standard_normal(3, "evaluate", 100) * 40)
    np.testing.assert_array_equal(found * 1024, np.round(found * 1024))
