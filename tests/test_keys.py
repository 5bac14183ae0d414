"""Randomness is addressed, not ordered."""

import itertools

import jax.random as jr
import pytest

from fedlm.core.keys import PURPOSES, generator_for, key_for

ADDRESSES = list(itertools.product((0, 1), ("cohort", "shuffle"), (0, 1), (0, 1)))


def test_every_address_has_its_own_numbers():
    draws = {float(jr.uniform(key_for(s, p, round=r, member=m))) for s, p, r, m in ADDRESSES}
    host = {generator_for(s, p, round=r, member=m).random() for s, p, r, m in ADDRESSES}
    assert len(draws) == len(host) == len(ADDRESSES)


def test_the_same_address_has_the_same_numbers():
    for purpose in PURPOSES:
        assert (
            generator_for(3, purpose, round=5).random()
            == generator_for(3, purpose, round=5).random()
        )
        assert jr.bits(key_for(3, purpose, round=5)) == jr.bits(key_for(3, purpose, round=5))


def test_an_unknown_purpose_is_refused():
    with pytest.raises(ValueError, match="unknown purpose"):
        key_for(0, "luck")
