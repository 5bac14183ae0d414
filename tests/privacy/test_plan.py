"""What a plan may not be, and the sentence that says so."""

import dataclasses
import math

import pytest

from fedlm.core.errors import ConfigError
from fedlm.privacy.catalog import MECHANISMS, check_plan, with_setting
from tests.privacy.plans import APART, CYCLIC, FIXED, PLANS, POISSON, plan


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_are_sound(name):
    check_plan(PLANS[name])
    check_plan(dataclasses.replace(PLANS[name], noise_multiplier=0.0, clip_norm=math.inf))


def separated(**changes):
    return dataclasses.replace(APART, **changes)


REFUSED = [
    (plan("laplace"), "privacy.mechanism = 'laplace'", "one of gaussian"),
    (plan("gaussian", APART), "privacy.mechanism = 'gaussian'", "leaves no such chance"),
    (plan("tree", POISSON), "privacy.mechanism = 'tree'", "how often and how closely"),
    (plan("blt", FIXED), "privacy.mechanism = 'blt'", "server.sampling = 'spaced'"),
    (plan(delta=0.0), "privacy.delta = 0.0", "above 0 and below 1"),
    (plan(delta=-1e-5), "privacy.delta = -1e-05", "above 0"),
    (plan(delta=1.0), "privacy.delta = 1.0", "below 1"),
    (plan(delta=math.nan), "privacy.delta = nan", "above 0"),
    (plan(noise_multiplier=-1.0), "privacy.noise_multiplier = -1.0", "zero or a positive"),
    (plan(noise_multiplier=math.inf), "privacy.noise_multiplier = inf", "zero or a positive"),
    (plan(clip_norm=0.0), "privacy.clip_norm = 0.0", "a positive L2 norm"),
    (plan(clip_norm=math.nan), "privacy.clip_norm = nan", "a positive L2 norm"),
    (plan(clip_norm=math.inf), "privacy.clip_norm = inf", "noise hides only what is bounded"),
    (plan(rounds=0), "server.rounds = 0", "at least one round"),
    (plan("gaussian", dataclasses.replace(POISSON, cohort=0)), "server.cohort = 0", "between 1"),
    (plan(sampling=separated(population=0)), "population = 0", "at least one client"),
    (
        plan("gaussian", dataclasses.replace(POISSON, min_separation=3)),
        "privacy.min_separation = 3",
        "does not enforce it",
    ),
    (
        plan("gaussian", dataclasses.replace(FIXED, max_participations=3)),
        "privacy.max_participations = 3",
        "does not enforce it",
    ),
    (plan(sampling=separated(min_separation=-1)), "privacy.min_separation = -1", "zero or"),
    (plan(sampling=separated(max_participations=-1)), "privacy.max_participations = -1", "zero"),
    (plan(sampling=separated(min_separation=6)), "privacy.min_separation = 6", "at most 5"),
    (
        plan(sampling=separated(max_participations=1)),
        "privacy.max_participations = 1",
        "at least 2",
    ),
    (plan("gaussian", restart_every=4), "privacy.restart_every = 4", "'tree', 'banded'"),
    (plan("blt", restart_every=-1), "privacy.restart_every = -1", "0 (never)"),
    (plan("toeplitz", restart_every=4, bands=5), "privacy.bands = 5", "of a matrix, here 4"),
    (plan(restart_every=-1), "privacy.restart_every = -1", "0 (never)"),
    (plan(bands=2), "privacy.bands = 2", "'banded' or 'toeplitz'"),
    (plan("toeplitz", bands=9), "privacy.bands = 9", "at most the rounds of a matrix, here 8"),
    (plan("banded", bands=4), "privacy.bands = 4", "at most min_separation + 1, here 3"),
    (plan("blt", buffers=0), "privacy.buffers = 0", "between 1 and 10"),
    (plan("blt", buffers=11), "privacy.buffers = 11", "between 1 and 10"),
    (plan("tree", buffers=5), "privacy.buffers = 5", "3 with privacy.mechanism = 'tree'"),
    (plan(sampling=separated(law="weekly")), "privacy.mechanism = 'tree'", "none has a known cost"),
    (plan(clip_quantile=0.5), "privacy.clip_quantile = 0.5", "restart_every below server.rounds"),
    (plan("blt", clip_quantile=0.5), "privacy.clip_quantile = 0.5", "until it restarts"),
    (
        plan("banded", CYCLIC, restart_every=3, clip_quantile=0.5, clip_noise=9.0),
        "privacy.clip_quantile = 0.5",
        "turns whose chances are accounted for one by one",
    ),
    (
        plan(restart_every=3, clip_quantile=0.5, clip_noise=0.9),
        "privacy.clip_noise = 0.9",
        "more than half of",
    ),
    (plan("gaussian", clip_quantile=1.5), "privacy.clip_quantile = 1.5", "below 1"),
]


@pytest.mark.parametrize("refused, setting, wanted", REFUSED)
def test_plans_that_are_refused(refused, setting, wanted):
    with pytest.raises(ConfigError) as error:
        check_plan(refused)
    said = str(error.value)
    assert said.startswith(f"{setting}: expected ") and wanted in said and "\n" not in said


def test_noise_and_denominator():
    chosen = plan(clip_norm=0.5, noise_multiplier=2.0)
    assert chosen.sum_multiplier == 2.0 and chosen.denominator == 10.0
    assert chosen.noise_to_signal(100) == 2.0
    assert plan(clip_norm=math.inf, noise_multiplier=0.0).noise_to_signal(100) == 0.0


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_laws_of_a_mechanism_are_those_that_its_plans_may_have(name):
    more = {"honest_nodes": 3} if name == "distributed" else {}
    for sampling in (APART, FIXED, POISSON):
        if sampling.law in MECHANISMS[name].laws:
            check_plan(plan(name, sampling, **more))
        else:
            with pytest.raises(ConfigError, match=f"^privacy.mechanism = '{name}': expected "):
                check_plan(plan(name, sampling, **more))


def test_settings_name_the_mechanisms_that_have_them():
    assert with_setting("bands") == ["banded", "toeplitz"] and with_setting("delta") == []
