"""Banded noise on cyclic Poisson cohorts against brute force, and sampled as it is accounted."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fedlm.core.errors import ConfigError
from fedlm.core.types import Sampling
from fedlm.privacy.account import event_of, spent
from fedlm.privacy.catalog import MECHANISMS, check_plan
from fedlm.privacy.cost import compose
from tests.privacy.plans import COLUMN, CYCLIC, PLANS, plan, strategy_of

DRAWS = 200_000
CASES = {
    "2 bands": ((0.9, 0.43), 6, 0.3),
    "3 bands": (COLUMN, 7, 0.5),
    "fewer bands than groups": ((0.9, 0.43), 7, 0.4),
}


def case(name, noise=0.9):
    """A plan of a few rounds; clients join a round of their group with the chance given."""
    column, rounds, chance = CASES[name]
    groups = 3 if "fewer" in name else len(column)
    sampling = Sampling(
        law="cyclic-poisson",
        population=10 * groups,
        cohort=round(10 * chance),
        min_separation=groups - 1,
    )
    return plan(
        "banded",
        sampling,
        rounds=rounds,
        noise_multiplier=noise,
        bands=len(column),
        matrix=column,
        delta=1e-2,
    )


def delta_by_sampling(chosen, epsilon, turns):
    """The divergence of a client that joins by coins from one that never does, and its error.

    From the covariance of the noise on all rounds alone: nothing is known here of blocks or bands.
    """
    rng, rounds = np.random.default_rng(0), chosen.rounds
    factor = np.linalg.inv(strategy_of(chosen).matrix()) * chosen.noise_multiplier
    chance = chosen.sampling.cohort / 10
    coins = np.array(list(itertools.product((0, 1), repeat=len(turns))))
    centres = np.zeros((len(coins), rounds))
    centres[:, turns] = coins
    weights = chance ** coins.sum(1) * (1 - chance) ** (len(turns) - coins.sum(1))
    joined = centres[rng.choice(len(coins), DRAWS, p=weights)]
    seen = joined + rng.normal(size=(DRAWS, rounds)) @ factor.T
    white, at = (np.linalg.solve(factor, x.T).T for x in (seen, centres))
    ratio = np.exp(white @ at.T - (at**2).sum(1) / 2) @ weights  # with over without
    forth = np.maximum(1 - np.exp(epsilon) / ratio, 0)
    return forth.mean(), forth.std() / math.sqrt(DRAWS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_the_account_is_what_brute_force_finds(name):
    chosen = case(name)
    cost = spent(chosen, chosen.rounds)
    groups = chosen.sampling.min_separation + 1
    found = [
        delta_by_sampling(chosen, cost.epsilon, np.arange(first, chosen.rounds, groups))
        for first in range(groups)
    ]
    worst, error = max(found)
    assert abs(worst - chosen.delta) < 5 * error + 1e-5, "the first group has the most turns"
    assert all(delta <= chosen.delta + 5 * error for delta, error in found)
    cheaper = compose([event_of(chosen, chosen.rounds - groups)], chosen.delta)[0]
    worst, error = delta_by_sampling(chosen, cheaper, np.arange(0, chosen.rounds, groups))
    assert worst > chosen.delta + 8 * error, "an account of fewer turns is found out"


def test_coins_make_banded_noise_cheaper_than_certain_turns():
    coins = PLANS["banded, cyclic"]
    certain = dataclasses.replace(coins, sampling=dataclasses.replace(CYCLIC, law="spaced"))
    assert spent(coins, 8).epsilon < 0.5 * spent(certain, 8).epsilon
    always = dataclasses.replace(coins, sampling=dataclasses.replace(CYCLIC, population=30))
    assert math.isclose(spent(always, 8).epsilon, spent(certain, 8).epsilon, rel_tol=1e-5)


def test_the_event_is_that_of_the_library():
    from jax_privacy.experimental.accounting import amplified_bandmf_event

    theirs = amplified_bandmf_event(2.0, 8, num_bands=3, sampling_prob=0.05)
    assert event_of(PLANS["banded, cyclic"], 8) == theirs


def test_only_narrow_bands_and_no_limit_of_turns_go_with_coins():
    limited = dataclasses.replace(CYCLIC, max_participations=2)
    for refused, wanted in (
        (plan("banded", limited), "does not enforce it"),
        (plan("banded", CYCLIC, bands=4), "at most min_separation"),
        (plan("tree", CYCLIC), "banded when server.sampling = .cyclic-poisson."),
        (plan("banded", dataclasses.replace(CYCLIC, population=29)), "at most 1"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            check_plan(refused)
    assert MECHANISMS["banded"].laws == ("spaced", "cyclic-poisson", "balls-in-bins")
