"""Integers of secure sums: no overflow, no order, no bias."""

import itertools
import math

import jax
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlm.core.errors import ConfigError, WireError
from fedlm.wire.catalog import codec
from fedlm.wire.fixed_point import FixedPoint, check_additive
from tests.wire.cases import same_bits


@given(
    st.integers(2, 64),
    st.floats(1e-9, 1e9),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_the_worst_sum_fits_or_the_grid_is_refused(bits, clip, members, reserve):
    try:
        grid = FixedPoint(bits=bits, clip=clip, members=members, reserve=reserve)
    except ConfigError as error:
        assert "could overflow" in str(error) and members + reserve > 2 ** (bits - 1) - 1
        return
    largest = math.ceil(clip / grid.step)
    assert math.frexp(grid.step)[0] == 0.5 and largest <= grid.most
    worst = largest * members + reserve
    assert worst <= 2 ** (bits - 1) - 1
    ends = np.array([worst, -worst], np.int64)
    np.testing.assert_array_equal(grid.signed(grid.wrapped(ends)), ends)


def test_a_grid_for_too_few_members_would_wrap_and_an_integer_beyond_it_is_noticed():
    grid = FixedPoint(bits=8, clip=1.0, members=4)
    full = np.full(3, grid.most)
    np.testing.assert_array_equal(grid.signed(grid.wrapped(4 * full)), 4 * grid.most)
    with pytest.raises(WireError, match="beyond 31"):
        grid.check(full + 1)
    # What would have happened: the sum comes out with the other sign.
    assert (grid.signed(grid.wrapped(5 * full)) < 0).all()


@pytest.mark.parametrize("members", [128, 1000])
def test_a_range_that_could_overflow_is_refused_at_the_start(members):
    with pytest.raises(ConfigError, match=r"^bits = 8: expected at least (9|11)"):
        codec("secure", bits=8, clip=1.0, members=members)


def test_updates_that_a_codec_rounded_are_integers_and_sums_do_not_depend_on_order():
    made = codec("secure", bits=20, clip=0.5, members=4)
    grid = FixedPoint(bits=20, clip=0.5, members=4)
    like = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(2, np.float32)}
    rng = np.random.default_rng(3)
    sent = [
        {name: rng.normal(0, 0.4, x.shape).astype(np.float32) for name, x in like.items()}
        for _ in range(4)
    ]
    arrived = [made.apply(x, jr.key(9 + k)) for k, x in enumerate(sent)]
    codes = [grid.integers(x) for x in arrived]
    for x, c in zip(arrived, codes, strict=True):
        same_bits(grid.values(grid.wrapped(c), like), x)
    orders = itertools.permutations(codes)
    sums = {grid.wrapped(np.sum(order, axis=0)).tobytes() for order in orders}
    left, right = (grid.wrapped(np.sum(half, axis=0)) for half in (codes[:2], codes[2:]))
    sums.add(((left + right) & np.uint32(2**20 - 1)).tobytes())
    assert len(sums) == 1
    found = grid.values(np.frombuffer(sums.pop(), np.uint32), like)
    for name in like:
        exact = sum(np.clip(np.asarray(x[name], np.float64), -0.5, 0.5) for x in sent)
        assert np.abs(found[name] - exact).max() < 4 * grid.step


def test_an_update_that_was_not_rounded_is_refused():
    grid = FixedPoint(bits=12, clip=1.0, members=2)
    for value in (grid.step / 2, math.nan, math.inf):
        with pytest.raises(WireError, match="not on the grid"):
            grid.integers({"x": np.array([0.0, value])})
    with pytest.raises(WireError, match="beyond"):
        grid.integers({"x": np.array([4.0])})
    assert grid.integers({}).size == 0


@pytest.mark.parametrize("wrong", [None, "nearest", "up a little too often"])
def test_rounding_is_unbiased_and_a_wrong_law_is_found_out(wrong):
    x = np.linspace(-0.9, 0.9, 37).astype(np.float32)
    grid = FixedPoint(bits=6, clip=1.0, members=2)
    made = codec("secure", bits=6, clip=1.0, members=2)
    keys = jr.split(jr.key(5), 2000)
    run = jax.jit(lambda keys: jax.lax.map(lambda k: made.apply({"x": x}, k)["x"], keys))
    samples = np.asarray(run(keys), np.float64)
    low = np.floor(x / grid.step) * grid.step
    if wrong == "nearest":
        samples = np.tile(np.round(x / grid.step) * grid.step, (2000, 1))
    elif wrong:
        samples = np.where(np.random.default_rng(0).random(samples.shape) < 0.03, low, samples)
    chance = (x - low) / grid.step
    spread = np.sqrt(chance * (1 - chance) / 2000) * grid.step
    z = (samples.mean(axis=0) - x)[spread > 0] / spread[spread > 0]
    pvalue = stats.chi2.sf(np.sum(z**2), len(z))
    assert pvalue > 1e-3 if wrong is None else pvalue < 1e-6


@pytest.mark.parametrize("name", ["ternary", "float32", "uniform"])
def test_a_codec_that_does_not_add_up_is_refused(name):
    with pytest.raises(ConfigError, match=r"wire\.upload = .*sees no single update"):
        check_additive("wire.upload", codec(name))
    with pytest.raises(ConfigError, match="zlib"):
        check_additive("wire.upload", codec("secure", deflate=True))
    check_additive("wire.upload", codec("secure"))


def test_wrong_settings_of_the_codec_are_named():
    for options, said in (
        ({"bits": 33}, "bits = 33"),
        ({"clip": 0.0}, "clip = 0"),
        ({"clip": math.inf}, "clip = inf"),
        ({"members": 0}, "members = 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            codec("secure", **options)
