"""Which codecs are unbiased, by a test that a wrong law fails."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from fedlm.wire.bitwise import words
from fedlm.wire.quantize import uniform
from fedlm.wire.rotation import drive, rotated, unrotated
from fedlm.wire.ternary import ternary
from fedlm.wire.top_k import topk

DRAWS = 3000


def drawn(codec, x):
    """What arrives, for many keys."""
    keys = jr.split(jr.key(7), DRAWS)
    run = jax.jit(lambda keys: jax.lax.map(lambda k: codec.apply({"x": x}, k)["x"], keys))
    return np.asarray(run(keys), np.float64)


def fits(samples, truth):
    """Whether samples could have this mean: the sum of squared z-scores against chi-squared.

    A value that never moved may still have a chance to move below one in 400, by a step.
    """
    truth = np.asarray(truth, np.float64)
    spread = samples.std(axis=0) / np.sqrt(len(samples))
    away = samples.mean(axis=0) - truth
    fixed = spread < 1e-7 * np.abs(truth).max()
    steps = np.diff(np.unique(samples))
    rarely = steps.min(initial=np.inf) / 400 if len(steps) else 0.0
    if np.abs(away[fixed]).max(initial=0) > 1e-6 * np.abs(truth).max() + rarely:
        return False
    z = away[~fixed] / spread[~fixed]
    return bool(stats.chi2.sf(np.sum(z**2), len(z)) > 1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 64, 1000])
def test_words_are_threefry(count):
    seed = jnp.asarray([7, 2**31 + 5], jnp.uint32)
    wanted = threefry_2x32(seed, jnp.arange(count, dtype=jnp.uint32))
    np.testing.assert_array_equal(words(seed, count), wanted)


X = np.random.default_rng(0).normal(size=48).astype(np.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits, block", [(1, None), (2, None), (5, None), (8, None), (3, 16)])
def test_uniform_rounding_is_unbiased(bits, block):
    assert fits(drawn(uniform(bits, block), X), X)


@pytest.mark.parametrize("law", ["nearest", "fair coin", "up a little too often"])
def test_a_wrong_rounding_is_found_out(law):
    rng = np.random.default_rng(0)
    x = np.asarray(X, np.float64)
    step = np.ptp(x) / 3
    u = (x - x.min()) / step
    floor, chance = np.floor(u), u - np.floor(u)
    up = {
        "nearest": np.tile(chance > 0.5, (DRAWS, 1)),
        "fair coin": (rng.random((DRAWS, len(x))) < 0.5) & (chance > 0),
        "up a little too often": rng.random((DRAWS, len(x)))
        < np.where(chance > 0, chance + 0.03, 0),
        "right": rng.random((DRAWS, len(x))) < chance,
    }
    assert not fits(x.min() + step * (floor + up[law]), x)
    assert fits(x.min() + step * (floor + up["right"]), x)


def test_ternary_is_unbiased_for_what_the_clip_leaves_and_not_before():
    x = X.copy()
    x[5] = 9.0
    limit = 2.5 * np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))
    assert limit < 9
    samples = drawn(ternary(), x)
    assert fits(samples, np.clip(np.asarray(x, np.float64), -limit, limit))
    assert not fits(samples, x)


@pytest.mark.parametrize(
    "codec, near", [(drive("unbiased", 256), True), (drive("mse", 256), False)]
)
def test_one_scale_of_the_rotation_is_nearly_unbiased(codec, near):
    """Off by the sampling error sqrt(0.57 / draws) = 0.014, and by 1 - 2 / pi = 0.36 otherwise."""
    x = np.random.default_rng(3).normal(size=256).astype(np.float32)
    away = drawn(codec, x).mean(axis=0) - np.asarray(x)
    off = np.linalg.norm(away) / np.linalg.norm(x)
    assert off < 0.03 if near else 0.33 < off < 0.4


def test_topk_is_biased_and_error_feedback_repairs_it():
    """Sent with what was left over, a constant update arrives in full on average."""
    codec, x = topk(0.25), {"x": X}
    once = np.asarray(codec.apply(x, jr.key(0))["x"])
    memory, total = np.zeros_like(X), np.zeros_like(X)
    for _ in range(200):
        sent = np.asarray(codec.apply({"x": X + memory}, jr.key(0))["x"])
        memory, total = X + memory - sent, total + sent
    assert np.linalg.norm(once - X) > 0.3 * np.linalg.norm(X)
    assert np.linalg.norm(total / 200 - X) < 0.05 * np.linalg.norm(X)


def test_the_error_of_a_code_is_that_of_the_formula():
    """Stochastic rounding with a step s has the variance s^2 / 6 where fractions are even."""
    x = np.random.default_rng(4).uniform(-1.0, 1.0, 20_000).astype(np.float32)
    found = np.asarray(uniform(4).apply({"x": x}, jr.key(5))["x"])
    step = np.ptp(x) / 15
    assert np.mean((found - x) ** 2) == pytest.approx(step**2 / 6, rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 100, 4096, 5000])
def test_a_shared_rotation_keeps_norms_and_sums_and_turns_back(size):
    seed = jnp.asarray([3, 9], jnp.uint32)
    x, y = (np.random.default_rng(i).normal(size=size).astype(np.float32) for i in (0, 1))
    turned = np.asarray(rotated(x, seed))
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(x), rel=1e-5)
    np.testing.assert_allclose(unrotated(turned, seed, size), x, atol=1e-5)
    both = turned + np.asarray(rotated(y, seed))
    np.testing.assert_allclose(unrotated(both, seed, size), x + y, atol=1e-5)
    spike = np.zeros(4096, np.float32)
    spike[7] = 1.0
    assert np.abs(rotated(spike, seed)).max() == pytest.approx(1 / 64)
