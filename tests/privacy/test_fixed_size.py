"""Cohorts of fixed size against brute force over what all clients might send."""

import itertools

import numpy as np
import pytest
import scipy.stats

from fedlm.privacy.cost import compose, fixed_size_event
from fedlm.privacy.fixed_size import ROUNDING, backward, fixed_size_loss, forward

EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 2.0])
GRID = np.linspace(-9, 9, 1201)
STEP = GRID[1] - GRID[0]
SLICES = 2e-5  # what adding up slices may be wrong by
SENT = (-1.0, -0.4, 0.0, 1.0)


def released(others, own, cohort, noise):
    """The density of a round's noisy sum on `GRID`, over all cohorts."""
    sent = (own, *others)
    sums = [
        sum(sent[i] for i in drawn) for drawn in itertools.combinations(range(len(sent)), cohort)
    ]
    return np.mean([scipy.stats.norm.pdf(GRID, total, noise) for total in sums], axis=0)


def deltas(p, q, cell=STEP):
    """The divergences of two densities at each epsilon."""
    return np.array([np.maximum(p - np.exp(e) * q, 0).sum() * cell for e in EPSILONS])


@pytest.mark.sample(2)
@pytest.mark.parametrize("noise", [0.5, 1.0])
@pytest.mark.parametrize("population, cohort", [(3, 1), (3, 2), (4, 1), (5, 2)])
def test_one_round_costs_the_worst_that_clients_can_do_and_no_more(population, cohort, noise):
    loss = fixed_size_loss(noise, cohort / population, 1e-3)
    forth = np.array(loss.get_delta_for_epsilon(EPSILONS.tolist()))
    worst = np.zeros(len(EPSILONS))
    for others in itertools.combinations_with_replacement(SENT, population - 1):
        without = released(others, 0.0, cohort, noise)
        for own in (-1.0, 0.7, 1.0):
            joined = released(others, own, cohort, noise)
            worst = np.maximum(worst, np.maximum(deltas(joined, without), deltas(without, joined)))
    assert (worst <= forth + SLICES).all(), "the bound is below what clients can do"
    reached = worst[:3] / forth[:3]
    assert (reached > 0.99).all() and (reached < 1.001).all(), "the bound is not reached"


@pytest.mark.sample(1)
@pytest.mark.parametrize("population, cohort", [(3, 1), (4, 2)])
def test_two_rounds_with_other_updates_in_each(population, cohort):
    noise, grid = 0.8, GRID[::6]
    two = fixed_size_loss(noise, cohort / population, 1e-3).self_compose(2)
    bound = np.array(two.get_delta_for_epsilon(EPSILONS.tolist()))
    pairs = []
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), population - 1):
        for own in (-1.0, 1.0):
            p, q = (released(others, sent, cohort, noise)[::6] for sent in (own, 0.0))
            pairs.append((p, q))
    cell, worst = (grid[1] - grid[0]) ** 2, np.zeros(len(EPSILONS))
    for (p1, q1), (p2, q2) in itertools.combinations_with_replacement(pairs, 2):
        p, q = np.outer(p1, p2), np.outer(q1, q2)
        worst = np.maximum(worst, np.maximum(deltas(p, q, cell), deltas(q, p, cell)))
    assert (worst <= bound + SLICES).all() and worst[2] > 0.9 * bound[2]


def test_no_direction_in_the_plane_is_worse_than_the_line():
    """Kahane's inequality, tried: updates of two clients at any angle and of any length."""
    noise, rate, rng = 0.7, 0.3, np.random.default_rng(0)
    x = np.stack(np.meshgrid(GRID[::8], GRID[::8]), axis=-1)
    cell = (8 * STEP) ** 2

    def normal(centre):
        return np.exp(-((x - centre) ** 2).sum(-1) / (2 * noise**2)) / (2 * np.pi * noise**2)

    nearest = 0.0
    for _ in range(40):
        u, v = rng.normal(size=(2, 2))
        u, v = u / max(1, np.linalg.norm(u)), v / max(1, np.linalg.norm(v))
        p = (1 - rate) * normal(u) + rate * normal(v)
        q = (1 - rate) * normal(u) + rate * normal(np.zeros(2))
        forth, back = deltas(p, q, cell), deltas(q, p, cell)
        assert (forth <= forward(EPSILONS, noise, rate) + SLICES).all()
        assert (back <= backward(EPSILONS, noise, rate) + SLICES).all()
        nearest = max(nearest, forth[2] / forward(EPSILONS, noise, rate)[2])
    assert nearest > 0.8


def test_the_published_case_costs_little_more_than_the_worst_pair_found():
    """An audit by search found a pair that needs 12.1; RDP at half the noise says 23.3."""
    epsilon, name = compose([fixed_size_event(1.0, 100, 10_000, 1000)], 1e-6)
    assert name == "PLD" and 12.1 < epsilon < 12.25


def test_what_rounding_takes_from_a_profile_is_counted():
    """Against sixty digits: a difference of normal tails loses what is below 1e-16."""
    mpmath = pytest.importorskip("mpmath")
    noise, rate, epsilon = 1.0, 0.999, 5.9
    with mpmath.workdps(60):
        b = 1 + mpmath.expm1(epsilon) / mpmath.mpf(rate)
        begin = mpmath.log(b) * noise + 1 / (2 * mpmath.mpf(noise))
        true = rate * (mpmath.ncdf(1 / noise - begin) - b * mpmath.ncdf(-begin))
        short = float(true) - backward(np.array([epsilon]), noise, rate)[0]
    assert 0 < abs(short) < ROUNDING * rate
    least = fixed_size_loss(noise, rate, 1e-2).get_delta_for_epsilon(50.0)
    assert least >= ROUNDING * rate


@pytest.mark.slow
def test_little_noise_and_small_cohorts_have_numbers():
    for noise, cohort, population in ((0.1, 1, 10), (30.0, 1, 10**6), (0.5, 9, 10)):
        epsilon, _ = compose([fixed_size_event(noise, cohort, population, 10)], 1e-6)
        every = compose([fixed_size_event(noise, population, population, 10)], 1e-6)[0]
        assert 0 <= epsilon <= every
