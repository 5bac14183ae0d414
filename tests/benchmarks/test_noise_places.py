"""All sides of the comparison hide a user at the same epsilon."""

import argparse
import math
from types import SimpleNamespace

import pytest

from benchmarks.noise_places import SIDES, multiplier, tables
from fedlm.core.types import Sampling
from fedlm.privacy import account
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import parse

ASKED = argparse.Namespace(
    epsilon=8.0, delta=1e-5, rounds=60, passes=2, embedding_size=16, hidden_size=32
)
STORE = SimpleNamespace(path="store", training_clients=range(4000))


def made(side):
    return parse(tables(ASKED, STORE, side, 0.03, 0.3, 7))


@pytest.mark.parametrize("side", SIDES)
def test_every_side_has_the_same_rounds_and_cohorts(side):
    recipe = made(side)
    assert (recipe.server.rounds, recipe.server.cohort) == (60, 133)
    assert (recipe.privacy.min_separation, recipe.privacy.max_participations) == (29, 2)


def test_noise_of_one_release_is_enough_for_one_user_and_others_add_theirs():
    alone = multiplier(ASKED, 4000, 133)
    spaced = Sampling(
        law="spaced", population=4000, cohort=133, min_separation=29, max_participations=2
    )
    plan = PrivacyPlan(
        mechanism="toeplitz",
        bands=1,
        sampling=spaced,
        rounds=60,
        clip_norm=0.3,
        noise_multiplier=alone,
        delta=1e-5,
    )
    assert 7.9 < account.spent(plan, 60).epsilon <= 8.0
    found = {side: made(side).privacy.noise_multiplier for side in SIDES if side != "nodes"}
    assert found["none"] == 0.0 and found["server"] == pytest.approx(alone)
    assert found["clients"] == pytest.approx(alone * math.sqrt(133))
    assert found["node sums"] == pytest.approx(alone * math.sqrt(5))
    assert made("nodes").privacy.epsilon == 8.0
