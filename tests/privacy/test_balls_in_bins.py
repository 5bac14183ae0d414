"""The account of balls-in-bins cohorts against integrals, against samples, and as it composes."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr

from fedlm.core.errors import ConfigError
from fedlm.privacy import balls_in_bins, bin_samples
from fedlm.privacy.account import calibrate, event_of, spent
from fedlm.privacy.balls_in_bins import BallsInBinsEvent
from fedlm.privacy.catalog import check_plan
from fedlm.privacy.cost import compose, epsilon_of_shift, gaussian_event
from tests.privacy.plans import BINS, COLUMN, PLANS, plan, strategy_of

TWO = dataclasses.replace(BINS, min_separation=1, population=20)
# Noise, turns of each bin, the chance to be in a bin at all.
CASES = [
    (1.0, (1, 1), 1.0),
    (0.8, (2, 1), 1.0),
    (1.5, (2, 2), 0.6),
    (1.0, (1, 1, 1), 1.0),
    (1.2, (2, 2, 1), 0.9),
    (0.9, (1, 1, 0), 1.0),
]


def deltas_by_integral(noise, turns, share, epsilon):
    """Both divergences, by quadrature over all bins but the first, which has a closed form."""
    z = np.linspace(-9, 9, 401)
    weight = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    rest, chance = np.zeros(1), np.ones(1)
    for t in turns[1:]:
        s = math.sqrt(t) / noise
        rest = np.add.outer(rest, np.exp(s * z - s * s / 2)).ravel()
        chance = np.multiply.outer(chance, weight).ravel()
    s, count = math.sqrt(turns[0]) / noise, len(turns)

    def over(bound):
        """The mean of (a - bound)_+ and of (bound - a)_+ for the first bin's a, of mean one."""
        safe = np.maximum(bound, 1e-300)
        d = (-np.log(safe) + s * s / 2) / s
        call = np.where(bound > 0, ndtr(d) - safe * ndtr(d - s), 1 - bound)
        return call, call - 1 + bound

    def bound(ratio):
        return (ratio - (1 - share)) * count / share - rest

    forth = (share / count) * (chance * over(bound(math.exp(epsilon)))[0]).sum()
    back = math.exp(epsilon) * (share / count) * (chance * over(bound(math.exp(-epsilon)))[1]).sum()
    return forth, back


@pytest.mark.sample(2)
@pytest.mark.parametrize(("noise", "turns", "share"), CASES)
def test_the_account_is_the_integral_and_never_below_it(noise, turns, share):
    counts = tuple((t, turns.count(t)) for t in sorted(set(turns)))
    loss = balls_in_bins.bins_loss(BallsInBinsEvent(noise, counts, share), 1e-4)
    for epsilon in (0.05, 1.0, 2.0):
        exact = max(deltas_by_integral(noise, turns, share, epsilon))
        found = loss.get_delta_for_epsilon(epsilon)
        assert exact * (1 - 1e-6) - 1e-12 <= found <= exact * 1.01 + 1e-9


def test_a_wrong_law_is_found_out():
    """Accounts of one turn fewer, of another bin, or of coins in each round, are not the truth."""
    exact = max(deltas_by_integral(1.0, (2, 2), 1.0, 1.0))
    for bins, share in ((((1, 2),), 1.0), (((2, 3),), 1.0), (((2, 2),), 0.9)):
        wrong = balls_in_bins.bins_loss(BallsInBinsEvent(1.0, bins, share), 1e-4)
        assert abs(wrong.get_delta_for_epsilon(1.0) - exact) > 0.03 * exact
    coins = plan("gaussian", dataclasses.replace(BINS, law="poisson", min_separation=0), rounds=6)
    assert abs(spent(coins, 6).epsilon / spent(PLANS["gaussian, bins"], 6).epsilon - 1) > 0.2


def sampled(chosen, epsilon, draws=50_000):
    """Both divergences for a client of full length, from samples of the noise on all rounds.

    Nothing is known here of blocks: from the matrix and the rounds of each bin alone.
    """
    rng, rounds = np.random.default_rng(0), chosen.rounds
    matrix = np.eye(rounds)
    if chosen.mechanism != "gaussian":
        matrix = strategy_of(chosen).matrix()
    bins = chosen.sampling.min_separation + 1
    joins = np.arange(rounds) % bins == np.arange(bins)[:, None]
    centres = joins @ matrix.T / chosen.noise_multiplier
    share = chosen.sampling.cohort * bins / chosen.sampling.population
    centres, weights = np.vstack([centres, np.zeros(rounds)]), [share / bins] * bins + [1 - share]
    found = []
    for with_client in (True, False):
        at = centres[rng.choice(bins + 1, draws, p=weights)] if with_client else 0.0
        seen = at + rng.normal(size=(draws, rounds))
        loss = np.log(np.exp(seen @ centres.T - (centres**2).sum(1) / 2) @ weights)
        excess = np.maximum(1 - np.exp(epsilon - (loss if with_client else -loss)), 0)
        found.append((excess.mean(), excess.std() / math.sqrt(draws)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian, bins", "banded, bins"])
def test_samples_of_all_rounds_do_not_exceed_the_account(name):
    chosen = dataclasses.replace(PLANS[name], delta=1e-2, noise_multiplier=1.0)
    epsilon = spent(chosen, 8).epsilon
    forth, back = sampled(chosen, epsilon)
    assert max(forth[0] - 4 * forth[1], back[0] - 4 * back[1]) <= chosen.delta
    if name.startswith("gaussian"):
        assert forth[0] + 4 * forth[1] >= chosen.delta, "and it is not more than the truth"
    (less, error), _ = sampled(chosen, 0.8 * epsilon)
    assert less > chosen.delta + 4 * error, "a lower epsilon is found out"


def test_sampled_bounds_of_bins_that_overlap_are_just_above_the_integral():
    """Two bins, two bands, two turns: their releases overlap."""
    overlap = bin_samples.overlap_of((0.8, 0.6), 4, 4, 2)
    gram = bin_samples._gram(overlap)
    matrix = strategy_of(plan("banded", TWO, rounds=4, matrix=(0.8, 0.6))).matrix()
    moved = np.array([[1, 0, 1, 0], [0, 1, 0, 1]]) @ matrix.T
    np.testing.assert_allclose(gram, moved @ moved.T, rtol=1e-6)
    z = np.linspace(-9, 9, 801)
    weight = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    weight = np.multiply.outer(weight, weight)

    def exact(gram, k, of=lambda ratio, k: ratio - k):
        root = np.linalg.cholesky(gram)
        u = root[0, 0] * z[:, None], root[1, 0] * z[:, None] + root[1, 1] * z[None]
        ratio = sum(np.exp(u[i] - gram[i, i] / 2) for i in (0, 1)) / 2
        return (weight * np.maximum(of(ratio, k), 0)).sum()

    found, back = bin_samples.deltas(overlap, 1.5, 1.0, 4.0)
    for epsilon in (0.5, 1.5, 2.5):
        truth = exact(gram / 1.5**2, math.exp(epsilon), lambda ratio, k: 1 - k * ratio)
        least = back.at(np.array([epsilon]))[0]
        assert truth <= least and (epsilon < 1 or least <= 1.2 * truth)
        truth = exact(gram / 1.5**2, math.exp(epsilon))
        assert truth <= found.at(np.array([epsilon]))[0] <= 1.1 * truth
        apart = exact(np.diag(np.diag(gram)) / 1.5**2, math.exp(epsilon))
        assert apart < 0.9 * truth, "an account that forgets the overlap is found out"


def test_a_sample_never_exceeds_its_range():
    gram = bin_samples._gram(bin_samples.overlap_of((0.8, 0.5, 0.33), 12, 12, 6)) / 0.8**2
    chances = np.full(6, 1 / 6)
    for order in (2, 4):
        loss, weight = bin_samples._samples(gram, chances, order)
        sums = [bin_samples._log_sum(gram, chances, q) for q in range(1, order)]
        for epsilon in (0.2, 1.0):
            most = bin_samples._log_range(sums, order, epsilon)
            over = loss > epsilon
            sample = weight[over] + epsilon + np.log(np.expm1(loss[over] - epsilon))
            assert sample.max() <= most + 1e-9


@pytest.mark.slow
def test_the_library_samples_the_same_loss():
    from jax_privacy.batch_selection import BallsInBinsSampling
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    chosen = dataclasses.replace(PLANS["gaussian, bins"], noise_multiplier=1.0, delta=1e-2)
    epsilon = spent(chosen, 8).epsilon
    for positive in (True, False):
        losses, _ = sample_generation.get_privacy_loss_sample(
            BallsInBinsSampling(8, 6), 1.0, np.ones(1), 0, positive, num_samples=3_000
        )
        found = delta_calculation.delta_from_epsilon_and_samples(epsilon, losses)
        error = np.maximum(-np.expm1(epsilon - losses), 0).std() / 54
        assert found <= chosen.delta + 5 * error
        assert not positive or found >= chosen.delta - 5 * error


@pytest.mark.slow
def test_more_turns_less_noise_and_fewer_bins_cost_more():
    def epsilon(rounds=12, noise=1.0, apart=5, population=60):
        drawn = dataclasses.replace(BINS, min_separation=apart, population=population)
        return spent(plan("gaussian", drawn, rounds=12, noise_multiplier=noise), rounds).epsilon

    by_rounds = [epsilon(rounds) for rounds in (0, 1, 7, 12)]
    assert by_rounds[0] == 0 and (np.diff(by_rounds) > 0).all()
    assert by_rounds[-1] < min(epsilon(noise=0.7), epsilon(apart=3))
    assert by_rounds[-1] > epsilon(population=120)
    alone = dataclasses.replace(BINS, min_separation=0, population=10)
    certain = spent(plan("gaussian", alone, rounds=4, noise_multiplier=2.0), 4).epsilon
    assert certain == pytest.approx(epsilon_of_shift(1.0, 1e-5), rel=1e-3), "one bin is no secret"


@pytest.mark.slow
def test_a_secret_bin_costs_less_than_a_known_one_also_where_all_bins_overlap():
    drawn = dataclasses.replace(BINS, min_separation=2, population=30)
    chosen = plan("banded", drawn, matrix=COLUMN)
    spaced = dataclasses.replace(chosen, sampling=dataclasses.replace(drawn, law="spaced"))
    assert 0.7 < spent(chosen, 8).epsilon / spent(spaced, 8).epsilon < 0.9
    event = dataclasses.replace(event_of(chosen, 8), overlap=None)
    known = compose([event], chosen.delta)[0]
    assert known == pytest.approx(spent(spaced, 8).epsilon, rel=1e-3)


@pytest.mark.slow
def test_it_composes_with_other_releases_and_calibrates():
    chosen = PLANS["gaussian, bins"]
    event = event_of(chosen, 8)
    alone = compose([event], 1e-5)[0]
    both = compose([event, gaussian_event(3.0)], 1e-5)[0]
    assert alone < both < alone + epsilon_of_shift(1 / 3, 1e-5)
    assert compose([event, event], 1e-5)[0] > alone
    noise = calibrate(dataclasses.replace(chosen, rounds=6), 1.0)
    found = spent(dataclasses.replace(chosen, rounds=6, noise_multiplier=noise), 6).epsilon
    assert 0.99 < found <= 1.0


@pytest.mark.parametrize("mechanism", ["gaussian", "banded"])
@pytest.mark.parametrize("noise", [0.05, 0.001])
def test_little_noise_has_a_cost_and_no_traceback(mechanism, noise):
    """Likelihood ratios beyond all numbers ended the account with an `IndexError`."""
    chosen = dataclasses.replace(PLANS["gaussian, bins"], noise_multiplier=noise, rounds=60)
    if mechanism == "banded":
        chosen = dataclasses.replace(PLANS["banded, bins"], noise_multiplier=noise, rounds=60)
    found = spent(chosen, 60).epsilon
    turns = 60 // (chosen.sampling.min_separation + 1)
    assert found >= 0.9 * epsilon_of_shift(math.sqrt(turns) / noise, chosen.delta) > 100


def test_bins_that_cannot_be_accounted_for_are_refused_in_a_sentence():
    for refused, wanted in (
        (plan("gaussian", dataclasses.replace(BINS, max_participations=1)), "does not enforce it"),
        (plan("gaussian", dataclasses.replace(BINS, min_separation=6)), "at most 5"),
        (plan("banded", BINS, bands=4), "a divisor of min_separation . 1, here 6"),
        (plan("tree", BINS), "gaussian or banded when server.sampling = 'balls-in-bins'"),
        (plan("blt", BINS), "gaussian or banded when server.sampling = 'balls-in-bins'"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            check_plan(refused)


def test_slots_of_the_first_residue_have_the_most_turns():
    for rounds, bins, bands in itertools.product((1, 5, 12, 13), (6, 12), (1, 2, 3)):
        event = balls_in_bins.event_of_bins(1.0, rounds, bins, bands, 1.0)
        by_residue = [
            sorted(len(range(g + k, rounds, bins)) for k in range(0, bins, bands))
            for g in range(bands)
        ]
        told = sorted(itertools.chain(*([turns] * number for turns, number in event.bins)))
        assert told == by_residue[0]
        assert all((np.array(told) >= other).all() for other in by_residue)
