"""No update leaves longer than the clip_norm, or counts more than once, whatever it was."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.core.keys import cipher_key_for
from fedlm.core.types import Total, Update
from fedlm.privacy.clip import LARGEST, LONGEST, SHORTEST, clip, next_clip_norm
from tests.privacy.plans import plan

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
LIMITS = st.sampled_from([1e-12, 1e-6, 0.3, 1.0, 1e12])


def update(values, weight=1.0):
    zero = jnp.zeros(())
    half = len(values) // 2
    delta = {"a": jnp.asarray(values[:half], jnp.float32), "b": jnp.asarray(values[half:])}
    return Update(delta, jnp.float32(weight), zero, zero, zero, zero, jnp.ones(()))


clipped = jax.jit(clip)


def flat(delta):
    """In 64 bits, so that lengths are measured and not rounded."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(delta)])


@given(st.lists(FLOATS, min_size=4, max_size=4), LIMITS, FLOATS)
@settings(deadline=None, max_examples=300)
def test_nothing_leaves_longer_than_the_limit(values, clip_norm, weight):
    values = np.array(values, np.float32)
    found = clipped(update(values, weight), jnp.float32(clip_norm))
    after = flat(found.delta)
    assert np.linalg.norm(after) <= np.float32(clip_norm)
    if not (np.abs(values) < LARGEST).all():
        assert not after.any()
        assert (found.weight, found.unclipped, found.refused) == (0, 0, 1)
        return
    assert (found.weight, found.refused) == (1, 0)
    before = values.astype(np.float64)
    length = np.linalg.norm(before)
    if found.unclipped:
        assert length <= clip_norm
        np.testing.assert_array_equal(after, before)
    else:
        assert length > 0.9999 * clip_norm
        np.testing.assert_allclose(after / clip_norm, before / length, atol=1e-4)


@pytest.mark.parametrize("size", [1, 1000, 300_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_long_updates_leave_at_the_limit_and_not_far_below(size, scale):
    values = scale * np.random.default_rng(0).normal(size=2 * size).astype(np.float32)
    length = np.linalg.norm(values.astype(np.float64))
    clip_norm = np.float32(length / 3)
    found = clipped(update(values), jnp.float32(clip_norm))
    left = np.linalg.norm(flat(found.delta))
    assert 0.9999 * clip_norm < left <= clip_norm and found.unclipped == 0


@pytest.mark.parametrize("values", [[0.0, -0.0], [1e-45, -1e-45]])
def test_nothing_to_clip(values):
    found = clipped(update(np.array(values, np.float32)), jnp.float32(1.0))
    assert (found.unclipped, found.refused, found.weight) == (1, 0, 1)
    assert np.linalg.norm(flat(found.delta)) <= 1e-44


def test_a_refusal_is_kept():
    """ClientMethod training found the loss not finite, and sent zeros."""
    sent = update(np.zeros(2, np.float32))
    told = Update(sent.delta, jnp.zeros(()), *([jnp.zeros(())] * 3), jnp.ones(()), jnp.ones(()))
    assert clipped(told, jnp.float32(1.0)).refused == 1


# ---- a limit that follows a quantile ---------------------------------------------------

EXACT = plan("gaussian", clip_quantile=0.5, clip_noise=1e-6, noise_multiplier=0.0)


def total(unclipped, members):
    rest = [jnp.zeros(())] * 5
    return Total({"w": jnp.zeros(2)}, *rest, jnp.float32(unclipped), jnp.float32(members))


def moved(unclipped, members):
    key = cipher_key_for(0, "noise")
    clip_norm, share = next_clip_norm(EXACT, jnp.float32(1.0), total(unclipped, members), key)
    return float(clip_norm), float(share)


def test_the_limit_goes_towards_the_quantile():
    assert moved(10, 10)[0] == pytest.approx(math.exp(-0.1), rel=1e-4)
    assert moved(0, 10)[0] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert moved(5, 10) == pytest.approx((1.0, 0.5), rel=1e-4)


def shares(unclipped, members, draws=1000):
    chosen = plan("gaussian", clip_quantile=0.5, clip_noise=1.0)
    step = jax.jit(lambda t, key: next_clip_norm(chosen, jnp.float32(1.0), t, key)[1])
    told = total(unclipped, members)
    found = [float(step(told, cipher_key_for(0, "noise", round=r))) for r in range(draws)]
    return (np.array(found) - 0.5) * chosen.denominator


def test_one_member_moves_what_is_released_by_a_half():
    """The accountant counts on it: the noise is `2 * clip_noise` times what a member can do."""
    rest = shares(3, 6)
    for unclipped in (0, 1):
        with_one = shares(3 + unclipped, 7)
        np.testing.assert_allclose(np.abs(with_one - rest), 0.5, atol=1e-4)


def test_the_count_has_the_noise_of_the_plan():
    found = shares(3, 6)
    assert scipy.stats.kstest(found, scipy.stats.norm(0, 1.0).cdf).pvalue > 0.001
    assert scipy.stats.kstest(found, scipy.stats.norm(0, 0.7).cdf).pvalue < 1e-4


def test_sum_and_count_together_cost_what_the_plan_says():
    """Two normal releases of one member: inverse variances add up."""
    chosen = plan("gaussian", clip_quantile=0.5, clip_noise=3.0)
    assert chosen.sum_multiplier > chosen.noise_multiplier
    together = chosen.sum_multiplier**-2 + (0.5 / chosen.clip_noise) ** 2
    assert together == pytest.approx(chosen.noise_multiplier**-2)


def test_a_limit_stays_a_number():
    """Even if all updates vanish, or none is unclipped, for ever."""
    for start, unclipped in ((SHORTEST, 10), (LONGEST, 0)):
        clip_norm, _ = next_clip_norm(
            EXACT, jnp.float32(start), total(unclipped, 10), cipher_key_for(0, "noise")
        )
        assert float(clip_norm) == np.float32(start)
