"""Composition of releases: the tightest accountant that all of them allow."""

import contextlib
import math

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from fedlm.privacy import cost
from fedlm.privacy.account import event_of, spent
from fedlm.privacy.cost import (
    compose,
    epsilon_of_rho,
    epsilon_of_shift,
    fixed_size_event,
    gaussian_event,
    poisson_by_rdp,
    sampled_event,
)
from tests.privacy.plans import PLANS, plan

GAUSSIAN = dp_accounting.GaussianDpEvent


def test_gaussian_releases_are_one_with_an_exact_profile():
    """Shifts of 1/4 and 1/3 are one of 5/12."""
    epsilon, name = compose([GAUSSIAN(4.0), GAUSSIAN(3.0)], 1e-6)
    assert name == "exact Gaussian profile"
    assert math.isclose(epsilon, dp_accounting.get_epsilon_gaussian(12 / 5, 1e-6), rel_tol=1e-9)
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.ComposedDpEvent([GAUSSIAN(2.0)]), 4)
    assert math.isclose(compose([nested], 1e-6)[0], compose([GAUSSIAN(1.0)], 1e-6)[0])


def test_a_sampled_release_and_another_one_compose_by_their_loss_distributions():
    rounds, other = sampled_event(1.0, 0.01, 50), GAUSSIAN(5.0)
    alone, name = compose([rounds], 1e-5)
    assert name == "PLD" and alone == spent(plan("gaussian", noise_multiplier=1.0), 50).epsilon
    both = compose([rounds, other], 1e-5)[0]
    assert alone < both < alone + compose([other], 1e-5)[0]


def test_what_has_no_loss_distribution_is_composed_by_renyi_divergences():
    tuned = dp_accounting.dp_event.RepeatAndSelectDpEvent(GAUSSIAN(5.0), 10.0, 1.0)
    epsilon, name = compose([tuned, GAUSSIAN(8.0)], 1e-6)
    assert name == "RDP" and compose([tuned], 1e-6)[0] < epsilon < math.inf


def test_nothing_costs_nothing_and_no_noise_has_no_epsilon():
    assert compose([], 1e-6)[0] == compose([gaussian_event(2.0, 0.0)], 1e-6)[0] == 0
    assert compose([GAUSSIAN(1.0), GAUSSIAN(0.0)], 1e-6)[0] == math.inf
    assert compose([sampled_event(0.0, 0.1, 3)], 1e-6)[0] == math.inf


def test_next_to_no_noise_has_no_finite_epsilon():
    """A recipe may ask for it; losses beyond the largest number ended in a traceback."""
    for events in (
        [gaussian_event(1e-200)],
        [sampled_event(1.0, 0.1, 4), gaussian_event(1e-9)],
        [sampled_event(1e-200, 0.1, 4)],
    ):
        assert compose(events, 1e-6)[0] == math.inf
    # Of cohorts of fixed size another bound holds, as if everybody joined each.
    drawn, joined = fixed_size_event(1e-3, 10, 100, 4), compose([gaussian_event(5e-4)], 1e-6)
    assert compose([drawn], 1e-6) == joined


def test_a_chance_of_failure_is_taken_off_delta():
    assert compose([GAUSSIAN(2.0)], 2e-6, 1e-6)[0] == compose([GAUSSIAN(2.0)], 1e-6)[0]
    assert compose([GAUSSIAN(2.0)], 1e-6, 1e-6)[0] == math.inf


@pytest.mark.parametrize("name", ["gaussian", "tree", "toeplitz"])
def test_the_event_of_a_plan_costs_what_the_plan_costs(name):
    chosen = PLANS[name]
    epsilon, _ = compose([event_of(chosen, 5)], chosen.delta)
    assert 0.9 * spent(chosen, 5).epsilon < epsilon <= spent(chosen, 5).epsilon * (1 + 1e-9)
    assert compose([event_of(chosen, 0)], chosen.delta)[0] == 0


def test_accounts_are_silent(caplog, monkeypatch):
    """dp_accounting warns where it leaves an order out: any order is valid."""
    with caplog.at_level("DEBUG", logger="absl"):
        poisson_by_rdp(0.5, 0.9, 2, 1e-5)
        assert not caplog.records
        monkeypatch.setattr(cost, "quiet", lambda name: contextlib.nullcontext())
        poisson_by_rdp(0.5, 0.9, 2, 1e-5)
        assert caplog.records, "it has nothing to silence any more"


# ---- the exact profile of normal noise ---------------------------------------------------------


def integrated(shift, epsilon):
    """The mass that N(shift, 1) has above e^epsilon times N(0, 1), by adding up slices."""
    begin = epsilon / shift + shift / 2  # where the densities are in that ratio
    x = np.linspace(begin, begin + 40 + shift, 2_000_001)
    ratio = np.expm1(epsilon - shift * x + shift**2 / 2)  # minus the share that is above
    return scipy.integrate.trapezoid(scipy.stats.norm.pdf(x, shift) * -ratio, x)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shift", [0.01, 0.3, 1.27, 5.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_the_profile_is_the_integral(shift, delta):
    epsilon = epsilon_of_shift(shift, delta)
    assert np.isclose(integrated(shift, epsilon), delta, rtol=1e-4)
    assert integrated(shift, epsilon * 0.999) > delta, "a smaller epsilon would be a lie"
    assert epsilon <= epsilon_of_rho(shift**2 / 2, delta) * (1 + 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shift", [0.3, 2.0])
def test_the_profile_is_that_of_the_loss_distribution(shift):
    accountant = dp_accounting.pld.PLDAccountant().compose(GAUSSIAN(1 / shift))
    exact, rounded_up = epsilon_of_shift(shift, 1e-6), accountant.get_epsilon(1e-6)
    assert exact <= rounded_up < exact * 1.001


def test_profiles_at_the_ends():
    assert epsilon_of_shift(0.0, 1e-6) == 0 and epsilon_of_shift(math.inf, 1e-6) == math.inf
    assert epsilon_of_shift(1e-9, 1e-6) == 0, "so little moves that delta alone covers it"
    loud = [epsilon_of_shift(shift, 1e-300) for shift in (1e-3, 1.0, 1e3, 1e4)]
    assert all(np.isfinite(loud)) and loud == sorted(loud)
    assert np.isclose(loud[-1], 1e8 / 2 + 1e4 * -scipy.stats.norm.ppf(1e-300), rtol=1e-6)
