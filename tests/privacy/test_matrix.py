"""The numbers of a matrix are found once: noise, accounts and resumed runs read them."""

import dataclasses
import json

import numpy as np
import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.privacy import strategy
from fedlm.privacy.account import calibrate, plan_from, spent
from fedlm.privacy.catalog import MECHANISMS, check_plan, noise_for, with_matrix
from fedlm.recipe.privacy_plan import participation_of
from fedlm.recipe.settings import load
from fedlm.record.journal import dumps
from tests.privacy.plans import BLT, COLUMN, PLANS, plan

SEARCHED = {"blt": BLT, "banded": COLUMN}
SPACED = (
    "privacy.mechanism=blt",
    "privacy.buffers=2",
    "privacy.min_separation=2",
    "privacy.noise_multiplier=2.0",
    "server.sampling=spaced",
    "server.rounds=8",
)


@pytest.fixture
def no_search(monkeypatch):
    """Lets nobody search for a matrix."""

    def searched(*args):
        raise AssertionError("an optimiser was asked for numbers that the plan has")

    for name in ("find_blt", "find_banded"):
        monkeypatch.setattr(strategy, name, searched)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SEARCHED)
def test_a_stored_plan_is_accounted_for_and_made_noise_of_without_a_search(no_search, name):
    header = json.loads(dumps({"privacy": dataclasses.asdict(PLANS[name])}))
    read = plan_from(header["privacy"])
    assert read == with_matrix(read) == PLANS[name] and read.matrix == SEARCHED[name]
    assert spent(read, 4) == spent(PLANS[name], 4)
    noise_for(read)
    assert calibrate(read, 2.0) > 0
    with pytest.raises(AssertionError, match="optimiser"):
        spent(dataclasses.replace(read, matrix=()), 5)


@pytest.mark.parametrize("name", SEARCHED)
def test_other_numbers_are_other_noise_at_another_cost(name):
    other = dataclasses.replace(PLANS[name], matrix=tuple(0.9 * x for x in SEARCHED[name]))
    there, here = (MECHANISMS[p.mechanism].strategy(p).matrix() for p in (PLANS[name], other))
    same = np.allclose(there, here)
    assert same == (name == "banded"), "columns of length one do not see a common factor"
    if name == "blt":
        assert spent(other, 8).epsilon < spent(PLANS[name], 8).epsilon


def test_a_plan_on_record_without_its_matrix_has_no_known_cost():
    for name in SEARCHED:
        facts = dataclasses.asdict(dataclasses.replace(PLANS[name], matrix=()))
        with pytest.raises(RecordError, match="lacks the matrix"):
            plan_from(json.loads(dumps(facts)))
    facts = dataclasses.asdict(PLANS["blt"]) | {"matrix": ["a"]}
    with pytest.raises(RecordError, match="plan is damaged: matrix"):
        plan_from(facts)


@pytest.mark.parametrize(
    "mechanism, settings, wanted",
    [
        ("blt", {"buffers": 2, "matrix": (0.5, 0.5, 0.2)}, "2 decays and 2 scales"),
        ("blt", {"buffers": 2, "matrix": (0.5, 0.5, 0.8, 0.3)}, "together at most 1"),
        ("blt", {"buffers": 2, "matrix": (1.5, 0.5, 0.2, 0.3)}, "from 0 to 1"),
        ("banded", {"matrix": (1.0, 0.5)}, "3 numbers"),
        ("banded", {"matrix": (0.0, 0.5, 0.5)}, "first of them positive"),
        ("tree", {"matrix": (1.0,)}, "no matrix to choose"),
    ],
)
def test_numbers_that_make_no_such_matrix(mechanism, settings, wanted):
    with pytest.raises(ConfigError, match=wanted):
        check_plan(plan(mechanism, **settings))


def test_a_resumed_run_takes_the_matrix_of_its_journal(no_search, tiny_recipe, tmp_path):
    recipe, stored = load(tiny_recipe, SPACED), (0.4, 0.3, 0.2, 0.1)
    begun = plan_of_recipe = participation_of(recipe, 18)
    assert begun.matrix == (), "without a run's directory nothing is searched for"
    begun = dataclasses.replace(plan_of_recipe, matrix=stored)
    header = {"kind": "header", "privacy": dataclasses.asdict(begun)}
    (tmp_path / "journal.jsonl").write_text(dumps(header) + "\n")
    assert participation_of(recipe, 18, tmp_path) == begun
    assert participation_of(recipe, 16, tmp_path).matrix == stored, "it is the same for any crowd"
    longer = load(tiny_recipe, (*SPACED, "server.rounds=9"))
    with pytest.raises(AssertionError, match="optimiser"):
        participation_of(longer, 18, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_what_these_tests_hold(name):
    found = MECHANISMS[name].find_matrix(dataclasses.replace(PLANS[name], matrix=()))
    np.testing.assert_allclose(found, SEARCHED[name], atol=2e-3)
    assert all(number == round(number, 6) for number in found)
