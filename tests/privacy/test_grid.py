"""The lowest bits of a noisy sum tell nothing of the sum."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats

from fedlm.core.keys import cipher_key_for, key_for
from fedlm.privacy.grid import CELL_BITS, fine_bits, inflation
from fedlm.privacy.noise import gaussian
from fedlm.privacy.normal import PAIRS, _normals, standard_normal

SIZE = 40_000
KEY = cipher_key_for(0, "noise")
GRID = 2.0 ** -(CELL_BITS + fine_bits(1.0, SIZE))  # with noise and clip of one


def released(x, key=KEY, stddev=1.0, clip_norm=1.0):
    total = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (SIZE,))
    return np.asarray(gaussian(stddev).add(total, (), key, clip_norm)[0])


def in_floating_point(x):
    """Noise as it was: a 32-bit normal, added in 32 bits."""
    return np.asarray(x + jr.normal(key_for(0, "noise"), (SIZE,)))


def on_grid(values, step):
    return values == np.round(values / step) * step


def gives_away(values):
    """Small results with digits that one plus a normal cannot have: the sum was not one."""
    return np.mean((np.abs(values) < 0.25) & ~on_grid(values, 2.0**-24))


def test_an_attacker_who_looks_at_the_lowest_bits():
    """Of two neighbours, sums of 0 and 1, noise in floating point shows which it was."""
    assert gives_away(in_floating_point(0.0)) > 0.1 and gives_away(in_floating_point(1.0)) == 0
    assert gives_away(released(0.0)) == gives_away(released(1.0)) == 0


@pytest.mark.parametrize("x", [0.0, 1.0, 0.3, -7.123456])
def test_the_lowest_bits_are_the_same_coins_whatever_the_sum(x):
    values = released(x, cipher_key_for(1, "noise"))
    assert on_grid(values, GRID).all()
    last = np.bincount((values / GRID).astype(np.int64) & 15, minlength=16)
    assert scipy.stats.chisquare(last).pvalue > 0.001
    assert not on_grid(in_floating_point(x), GRID).all()


def test_the_noise_does_not_look_at_the_sum():
    """With the same key, two results differ by what the rounded sums differ by, to the last bit."""
    rest = released(0.0).astype(np.float64)
    for x in (1.0, -0.3, GRID / 3, 0.7 * GRID, 5.4321, np.linspace(-3, 3, SIZE, dtype=np.float32)):
        moved = released(x).astype(np.float64) - rest
        assert (moved == np.round(np.float64(np.float32(x)) / GRID) * GRID).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("stddev", [1e-5, 0.1, 1.0, 50.0])
@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 1e6])
def test_the_noise_pays_for_the_rounding(stddev, clip_norm):
    """Rounding moves each of d numbers by half a step: a client moves them by C + g sqrt(d)."""
    values = released(0.0, stddev=stddev, clip_norm=clip_norm)
    near, step = np.sort(np.abs(values))[:1000].astype(np.float64), 2.0**40
    while not on_grid(near, step).all():
        step /= 2
    h = inflation(stddev, SIZE) - 1
    assert step * np.sqrt(SIZE) <= h * clip_norm and h < 0.002
    if stddev > 0.01:
        assert abs(values.std() / (stddev * clip_norm) - 1) < 4 / np.sqrt(2 * SIZE)


def test_the_inflation_of_large_models():
    assert inflation(1.0, 20_000_000) == pytest.approx(1.00053, abs=1e-5)
    assert inflation(1.0, 1) < 1.0001 and inflation(10.0, 10**9) < 1.02


def test_sums_out_of_range_are_cut_and_missing_noise_stays_missing():
    assert np.isfinite(released(1e30)).all() and (released(1e30) > 1e5).all()
    assert released(3000.0, stddev=1e-6).mean() == pytest.approx(3000, abs=1e-3)


def test_normals_have_no_holes():
    """Of the old normals none is beyond 5.42, and the last cells before it are mostly empty."""
    top = jnp.asarray([[0], [0], [0]], jnp.uint32)  # the smallest u, straight ahead
    assert float(jnp.max(jax.jit(_normals)(top))) == pytest.approx(
        np.sqrt(2 * 65 * np.log(2)), rel=1e-5
    )
    every = jr.randint(key_for(0, "noise"), (1000,), 0, 2**30).astype(jnp.uint32)
    near = jnp.stack([jnp.full(1000, 100, jnp.uint32), every * 4, every])  # radius near 5.9
    radius = np.hypot(*np.asarray(jax.jit(_normals)(near), np.float64))
    assert len(np.unique(radius)) > 100 and (radius > 5.4).all()


def test_normals_are_normal():
    z = np.asarray(standard_normal(KEY, jnp.zeros(200_000)), np.float64)
    assert scipy.stats.kstest(z, "norm").pvalue > 0.001
    assert scipy.stats.kstest(1.02 * z, "norm").pvalue < 0.001
    assert scipy.stats.kstest(z + 0.02, "norm").pvalue < 0.001
    half = z.size // 2
    for a, b in ((z[:half], z[half:]), (z[:-1], z[1:]), (z[:half] ** 2, z[half:] ** 2)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(half)


def test_pieces_of_a_long_stream_differ():
    long = np.asarray(jax.jit(lambda: standard_normal(KEY, jnp.zeros(4 * PAIRS + 7)))())
    assert len(np.unique(long)) > 0.98 * long.size and np.isfinite(long).all()
    assert abs(np.corrcoef(long[: 2 * PAIRS], long[2 * PAIRS : 4 * PAIRS])[0, 1]) < 0.02
