"""Epsilons against published ones and against dp_accounting; noise and rounds for a target."""

import dataclasses
import itertools
import json
import math

import dp_accounting
import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.core.types import Sampling
from fedlm.privacy.account import (
    allowed_rounds,
    calibrate,
    plan_from,
    plans_from,
    spent,
)
from fedlm.privacy.cost import epsilon_of_shift
from fedlm.record.journal import dumps
from tests.privacy.plans import FIXED, PLANS, ROUNDS, plan

RELATION = dp_accounting.NeighboringRelation


def separated(rounds, apart, most=0):
    return Sampling(
        law="spaced",
        population=max(apart + 1, rounds),
        cohort=1,
        min_separation=apart,
        max_participations=most,
    )


def test_a_published_tree():
    chosen = plan("tree", separated(2000, 313, 6), rounds=2000, noise_multiplier=7, delta=1e-10)
    cost = spent(chosen, 2000)
    assert f"{cost.rho:.2f} {cost.published_epsilon:.2f}" == "0.81 8.90"
    nodes = epsilon_of_shift(math.sqrt(79) / 7, 1e-10)
    assert f"{nodes:.2f}" == "8.53", "the profile is exact, the conversion is not"
    assert f"{cost.epsilon:.2f}" == "7.99", "and the nodes of the tree are not released"
    assert "squared sensitivity 70.3012: the exact maximum" in " ".join(cost.assumptions)


@pytest.mark.sample(4)
@pytest.mark.parametrize("noise, epsilon", [(1, "57"), (2, "22"), (4, "9.2"), (7, "4.8")])
@pytest.mark.parametrize("rounds, apart", [(100, 19), (500, 99)])
def test_small_trees(rounds, apart, noise, epsilon):
    chosen = plan("tree", separated(rounds, apart, 5), rounds=rounds, noise_multiplier=noise)
    cost = spent(chosen, rounds)
    assert f"{cost.published_epsilon:.2g}" == epsilon and cost.epsilon < cost.published_epsilon


@pytest.mark.slow
def test_a_published_banded_matrix():
    """Two participations that do not overlap, multiplier 8.35: rho 0.0144, epsilon 0.994."""
    chosen = plan("banded", noise_multiplier=8.35, delta=1e-10, sampling=separated(8, 2, 2))
    cost = spent(chosen, 8)
    assert abs(cost.rho - 0.0144) < 1e-4 and abs(cost.epsilon - 0.994) < 0.001
    assert 0.994 < cost.published_epsilon < 1.05


@pytest.mark.parametrize("rounds", [1, 6, 40])
def test_one_participation_is_the_tree_of_dp_accounting(rounds):
    chosen = plan("tree", separated(rounds, rounds, 1), rounds=rounds)
    event = dp_accounting.SingleEpochTreeAggregationDpEvent(2.0, rounds)
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=RELATION.REPLACE_SPECIAL)
    theirs = accountant.compose(event).get_epsilon(1e-5)
    assert theirs * 0.99 < spent(chosen, rounds).published_epsilon <= theirs * 1.00001


def poisson_by_library(noise, rounds, accountant):
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return accountant.get_epsilon(1e-5)


def test_poisson_is_the_privacy_loss_distribution_of_the_library():
    cost = spent(plan("gaussian", noise_multiplier=0.9), 50)
    assert cost.epsilon == poisson_by_library(0.9, 50, dp_accounting.pld.PLDAccountant())
    assert cost.epsilon < poisson_by_library(0.9, 50, dp_accounting.rdp.RdpAccountant())
    assert cost.rho is None and "PLD" in cost.accountant


def test_a_fixed_size_costs_more_and_says_so():
    cost = spent(plan("gaussian", FIXED, noise_multiplier=4.0), 50)
    assert cost.epsilon > spent(plan("gaussian", noise_multiplier=4.0), 50).epsilon
    assert "PLD" in cost.accountant and "takes the place" in " ".join(cost.assumptions)
    half = dp_accounting.GaussianDpEvent(2.0)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, half)
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=RELATION.REPLACE_ONE)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 50))
    assert cost.epsilon < accountant.get_epsilon(1e-5), "RDP at half the noise is a looser bound"


def test_everyone_in_every_round_is_plain_gaussian_noise():
    everyone = dataclasses.replace(FIXED, cohort=1000)
    exact = dp_accounting.get_epsilon_gaussian(2.5, 1e-5)
    for law in ("fixed", "poisson"):
        chosen = plan("gaussian", dataclasses.replace(everyone, law=law), noise_multiplier=5.0)
        assert math.isclose(spent(chosen, 4).epsilon, exact, rel_tol=1e-9)


SLOW = "banded, bins"  # ten times slower to compose than any other
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == SLOW else name for name in PLANS]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EACH)
def test_more_noise_and_fewer_rounds_cost_less(name):
    chosen = PLANS[name]
    by_rounds = [spent(chosen, r).epsilon for r in (0, 1, 4, ROUNDS)]
    rounding = 1e-9  # with bins, rounds in which a client has no second turn cost nothing more
    assert all(b >= a - rounding for a, b in itertools.pairwise(by_rounds))
    assert by_rounds[0] == 0 < by_rounds[-1]
    by_noise = [
        spent(dataclasses.replace(chosen, noise_multiplier=z), ROUNDS).epsilon for z in (1, 2, 4)
    ]
    assert by_noise == sorted(by_noise, reverse=True) and by_noise[0] > by_noise[-1]
    loud = spent(dataclasses.replace(chosen, noise_multiplier=0.0), ROUNDS)
    assert loud.epsilon == math.inf


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_noise_for_a_target_is_the_least(name):
    target = 0.2  # much noise: small, quick distributions
    noise = calibrate(PLANS[name], target)
    enough = dataclasses.replace(PLANS[name], noise_multiplier=noise)
    less = dataclasses.replace(PLANS[name], noise_multiplier=noise * 0.999)
    assert spent(enough, ROUNDS).epsilon <= target < spent(less, ROUNDS).epsilon


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EACH)
def test_rounds_within_a_budget(name):
    chosen = PLANS[name]
    budget = spent(chosen, 5).epsilon * 1.0001
    fit = allowed_rounds(chosen, budget)
    assert 5 <= fit <= ROUNDS and spent(chosen, fit).epsilon <= budget
    assert fit == ROUNDS or spent(chosen, fit + 1).epsilon > budget
    assert allowed_rounds(chosen, 1e6) == ROUNDS
    assert allowed_rounds(dataclasses.replace(chosen, noise_multiplier=0.0), 1e6) == 0


def test_targets_that_cannot_be():
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"privacy\.epsilon = .*: expected a positive"):
            calibrate(plan("tree"), target)
    with pytest.raises(ConfigError, match="expected a target that some noise can meet"):
        calibrate(plan("tree", delta=1e-300), 1e-12)


def test_a_matrix_is_not_accounted_beyond_its_rounds():
    with pytest.raises(ConfigError, match="at most the 8 rounds"):
        spent(plan("tree"), ROUNDS + 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EACH)
def test_a_journal_tells_its_plan(name):
    header = json.loads(dumps({"privacy": dataclasses.asdict(PLANS[name])}))
    assert plan_from(header["privacy"]) == PLANS[name]
    assert plans_from(header) == {"": PLANS[name]}


def test_journals_that_are_damaged():
    with pytest.raises(RecordError, match="no privacy claim"):
        plans_from({})
    good = dataclasses.asdict(plan("tree"))
    for change in ({"rounds": "8"}, {"clip": 1.0}, {"delta": True}, {"sampling": {"law": "x"}}):
        with pytest.raises(RecordError, match="plan is damaged"):
            plans_from({"privacy": good | change})
    with pytest.raises(ConfigError, match=r"privacy\.delta"):
        spent(plans_from({"privacy": good | {"delta": 2.0}})[""], 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_delta_that_promises_little_is_named(name):
    little = dataclasses.replace(PLANS[name], delta=1 / PLANS[name].sampling.population)
    assert "promises little" in spent(little, 1).assumptions[-1]
    assert "promises little" not in " ".join(spent(PLANS[name], 1).assumptions)
