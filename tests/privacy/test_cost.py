"""Composition of releases: the tightest accountant that all of them allow."""

import math

import dp_accounting
import pytest

from fedlm.privacy.account import event_of, spent
from fedlm.privacy.cost import compose, gaussian_event, sampled_event
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


def test_a_chance_of_failure_is_taken_off_delta():
    assert compose([GAUSSIAN(2.0)], 2e-6, 1e-6)[0] == compose([GAUSSIAN(2.0)], 1e-6)[0]
    assert compose([GAUSSIAN(2.0)], 1e-6, 1e-6)[0] == math.inf


@pytest.mark.parametrize("name", ["gaussian", "tree", "toeplitz"])
def test_the_event_of_a_plan_costs_what_the_plan_costs(name):
    chosen = PLANS[name]
    epsilon, _ = compose([event_of(chosen, 5)], chosen.delta)
    assert 0.9 * spent(chosen, 5).epsilon < epsilon <= spent(chosen, 5).epsilon * (1 + 1e-9)
    assert compose([event_of(chosen, 0)], chosen.delta)[0] == 0
