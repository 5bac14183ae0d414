"""One function makes the words of a claim, and they say when there is none."""

import dataclasses
import math

import pytest

from fedlm.privacy.account import spent
from fedlm.privacy.claim import HELD_OUT, Context, claim_of
from tests.privacy.plans import plan

PLAN = plan("gaussian")


def claim(chosen=PLAN, **context):
    return claim_of(spent(chosen, 8), chosen, 8, Context(**context))


def test_a_claim_says_what_it_means_and_what_it_does_not_cover():
    found = claim(uncovered=("the vocabulary",), covered=("4 noisy releases for evaluation",))
    assert found.sentence.startswith(f"Epsilon {found.epsilon:.4g} at delta 1e-05: for any one")
    assert f"at most {math.exp(found.epsilon):.3g} times as likely" in found.sentence
    assert found.covers[0].startswith("the noisy sums of 8 released rounds")
    assert found.not_covered[:2] == ("the vocabulary", HELD_OUT)
    assert "promises next to nothing" not in found.sentence
    assert HELD_OUT not in claim(held_out=False).not_covered


def test_a_large_epsilon_is_called_what_it_is():
    found = claim(plan("tree", noise_multiplier=0.2))
    assert found.epsilon > 10 and "promises next to nothing" in found.sentence


@pytest.mark.parametrize(
    "change, context, words",
    [
        ({}, {"broken": ("because",)}, "No finite epsilon holds: because."),
        ({"noise_multiplier": 0.0}, {}, "No finite epsilon holds: the noise is zero."),
        ({"reveal": True}, {}, "Nothing is promised against readers of this run's files"),
    ],
)
def test_where_nothing_finite_holds_no_epsilon_stands(change, context, words):
    found = claim(dataclasses.replace(PLAN, **change), **context)
    assert math.isinf(found.epsilon) and found.sentence.startswith(words)
    assert (found.models_epsilon is not None) == ("reveal" in change)


def test_a_fixed_seed_is_called_unsafe():
    found = claim(unsafe_seed=True)
    assert found.sentence.startswith("Unsafe for release") and "subtract" in str(found.not_covered)


def test_noise_at_a_leaf_hides_the_leaf():
    leaf = dataclasses.replace(
        PLAN,
        unit="leaf",
        sampling=dataclasses.replace(PLAN.sampling, population=4, cohort=4),
    )
    assert "any one leaf of the tree" in claim(leaf).sentence
    assert "changes of every leaf" in claim(leaf).covers[0]
