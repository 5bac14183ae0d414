"""Law 6: decoded bytes equal what simulation assumed; the reported size is the real size."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.core import tree
from fedlm.core.errors import ConfigError, WireError
from fedlm.wire.bitwise import seed_of, words
from fedlm.wire.catalog import CODECS as NAMES
from fedlm.wire.catalog import codec as by_name
from fedlm.wire.catalog import named
from fedlm.wire.dense import bfloat16, dense
from fedlm.wire.entropy import deflated
from fedlm.wire.quantize import uniform
from fedlm.wire.rotation import drive, hadamard
from fedlm.wire.ternary import ternary
from fedlm.wire.top_k import kept, topk
from tests.wire.cases import (
    BY_NAME,
    CODECS,
    all_codecs,
    all_names,
    filled,
    length,
    lossy,
    over,
    same_bits,
    update,
)

RANDOM = [c for c in CODECS if c.name.startswith(("uniform", "ternary", "drive", "secure-12"))]
HARD = [0.0, -0.0, 1.0, -1.0, 1 + 2**-23, 1e-3, -3e-7, 1e-31, 1e-40, -1e29, 3e38, -3e38, 65519.0]


def normal(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def arrived(codec, sent, key):
    return codec.decode(codec.encode(sent, key), sent)


@all_codecs
def test_bytes_carry_exactly_what_simulation_assumes(codec):
    for seed in range(3):
        same_bits(
            arrived(codec, update(seed), jr.key(seed)), codec.apply(update(seed), jr.key(seed))
        )


@pytest.mark.sample(2)
@all_codecs
def test_so_they_do_inside_a_larger_compiled_program(codec):
    """As an engine uses it: in a loop, on a computed update, added to a sum."""

    @jax.jit
    def program(sent, key):
        def body(_, carry):
            total, _ = carry
            found = codec.apply(jax.tree.map(lambda x: 2.0 * (0.5 * x), sent), key)
            return tree.add_scaled(total, found, 1.7), found

        return jax.lax.fori_loop(0, 2, body, (tree.zeros_like(sent), sent))[1]

    same_bits(arrived(codec, update(), jr.key(1)), program(update(), jr.key(1)))


@pytest.mark.slow
@all_codecs
def test_so_they_do_without_a_compiled_program(codec):
    with jax.disable_jit():
        one_by_one = codec.apply(update(), jr.key(1))
    same_bits(arrived(codec, update(), jr.key(1)), one_by_one)


@given(st.lists(st.sampled_from(HARD), min_size=1, max_size=40), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
@all_names
def test_hard_numbers_arrive_as_simulated_within_the_stated_gain(name, values, seed):
    codec, sent = BY_NAME[name], filled(values)
    found = arrived(codec, sent, jr.key(seed))
    same_bits(found, codec.apply(sent, jr.key(seed)))
    if length(sent):
        assert length(found) <= codec.norm_gain * length(sent)


@all_codecs
def test_the_stated_size_is_the_real_size(codec):
    size = len(codec.encode(update(), jr.key(1)))
    stated = codec.encoded_bytes(update())
    assert size == stated if codec.fixed_size else size <= stated


def test_deflate_shortens_codes_to_nearly_their_entropy():
    x = {"x": normal(20_000)}
    inner, outer = uniform(4), deflated(uniform(4))
    payload = outer.encode(x, jr.key(1))
    same_bits(outer.decode(payload, x), inner.apply(x, jr.key(1)))
    codes = np.unique(np.asarray(inner.apply(x, jr.key(1))["x"]), return_counts=True)[1] / 20_000
    entropy = -20_000 / 8 * np.sum(codes * np.log2(codes))
    assert entropy < len(payload) < 1.03 * entropy < 0.95 * inner.encoded_bytes(x)


@pytest.mark.sample(3)
@all_codecs
def test_leaves_can_be_left_out_with_the_draws_of_the_whole(codec):
    """A member that trains some leaves sends those as if it sent all; no byte is of the others."""
    whole = update()
    leaves = jax.tree.leaves(whole)
    keep = [place % 2 == 0 for place in range(len(leaves))]
    if not codec.by_leaf:
        with pytest.raises(WireError, match="none can be left out"):
            codec.encode(whole, jr.key(1), keep)
        return
    thin = tree.thin(whole, keep)
    payload = codec.encode(whole, jr.key(1), keep)
    assert len(payload) <= codec.encoded_bytes(thin) < codec.encoded_bytes(whole)
    found = tree.fill(codec.decode(payload, thin), whole, keep)
    wanted = jax.tree.leaves(codec.apply(whole, jr.key(1)))
    for x, y, sent in zip(jax.tree.leaves(found), wanted, keep, strict=True):
        np.testing.assert_array_equal(x, y if sent else np.zeros_like(y))


@all_codecs
def test_a_recipe_names_a_codec_as_its_frames_do(codec):
    assert named("wire.upload", codec.name).name == codec.name


@all_codecs
def test_the_size_is_known_from_shapes_alone(codec):
    shapes = jax.eval_shape(update)
    assert codec.encoded_bytes(shapes) == codec.encoded_bytes(update())


@all_codecs
def test_the_stated_gain_bounds_the_norm(codec):
    for seed in range(5):
        found = codec.apply(update(seed), jr.key(seed))
        assert length(found) <= codec.norm_gain * length(update(seed))


@all_codecs
def test_zero_stays_zero(codec):
    nothing = jax.tree.map(np.zeros_like, update())
    assert length(arrived(codec, nothing, jr.key(3))) == 0


@pytest.mark.sample(5)
@all_codecs
def test_a_tree_without_numbers_is_a_short_frame(codec):
    for nothing in ({}, {"none": np.zeros((0, 3), np.float32)}):
        payload = codec.encode(nothing, jr.key(0))
        assert len(payload) < 60
        same_bits(codec.decode(payload, nothing), nothing)


@pytest.mark.sample(1)
@all_codecs
def test_leaves_of_half_precision_keep_their_type(codec):
    sent = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), update())
    same_bits(arrived(codec, sent, jr.key(2)), codec.apply(sent, jr.key(2)))


@all_codecs
def test_the_key_decides_everything(codec):
    assert codec.encode(update(), jr.key(4)) == codec.encode(update(), jr.key(4))


@over(RANDOM)
def test_another_key_is_another_draw(codec):
    assert codec.encode(update(), jr.key(4)) != codec.encode(update(), jr.key(5))


@lossy
def test_numbers_that_are_not_finite_count_as_zero(codec):
    sent = filled([1.0, np.nan, -2.0, np.inf, 0.5, -np.inf, 1e-38, 3e38])
    clean = filled([1.0, 0.0, -2.0, 0.0, 0.5, 0.0, 0.0, 2.0**100])
    same_bits(arrived(codec, sent, jr.key(0)), arrived(codec, clean, jr.key(0)))


def test_float32_keeps_every_bit():
    values = {"x": np.array([1e-45, -0.0, 3.4e38, np.inf, np.nan], np.float32)}
    same_bits(arrived(dense(), values, jr.key(0)), values)


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even():
    x = np.concatenate([np.float32(1) + np.arange(513, dtype=np.float32) * 2**-9, [-1e-7, 3e9]])
    x = x.astype(np.float32)
    found = arrived(bfloat16(), {"x": x}, jr.key(0))["x"]
    np.testing.assert_array_equal(found, x.astype(jnp.bfloat16).astype(np.float32))


def test_the_gain_of_bfloat16_is_reached():
    x = {"x": np.array([np.nextafter(np.float32(1 + 2**-8), np.float32(2))])}
    assert length(arrived(bfloat16(), x, jr.key(0))) / length(x) > (1 + 1 / 257) * (1 - 1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [1, 2, 5, 8, 9, 15, 16])
def test_a_uniform_grid_moves_no_value_by_a_step_and_keeps_constants(bits):
    x = {"x": normal(203), "c": np.full(9, 0.1, np.float32), "one": np.float32(1e-9)}
    codec = uniform(bits)
    found = arrived(codec, x, jr.key(0))
    same_bits({k: found[k] for k in ("c", "one")}, {k: x[k] for k in ("c", "one")})
    step = float(np.ptp(x["x"])) / (2**bits - 1) * (1 + 2.0 ** (bits - 22))
    assert np.abs(found["x"] - x["x"]).max() < step
    assert len(np.unique(found["x"])) <= 2**bits


def test_no_gain_holds_for_uniform_grids_of_every_size():
    """Why it is stated as infinite: one bit, two values at the ends, zeros between."""
    for size, gain in ((100, 5), (10_000, 50)):
        x = {"x": np.concatenate([[-1, 1], np.zeros(size - 2)]).astype(np.float32)}
        assert length(uniform(1).apply(x, jr.key(0))) > gain * length(x)
        assert length(uniform(1, block=16).apply(x, jr.key(0))) < 5 * length(x)


def test_ternary_values_are_three_and_the_gain_is_the_clip():
    x = {"x": normal(999)}
    found = np.asarray(ternary().apply(x, jr.key(0))["x"])
    assert len(np.unique(found)) == 3
    sigma = np.sqrt(np.mean(np.square(np.asarray(x["x"], np.float64))))
    assert np.abs(found).max() == pytest.approx(2.5 * sigma, rel=1e-6)
    assert 1.2 < length({"x": found}) / length(x) < 1.6  # sqrt(2.5 * E|x|), at most 2.5


def test_hadamard_is_the_matrix():
    x = normal((3, 32))
    h = np.ones((1, 1))
    while len(h) < 32:
        h = np.kron(h, [[1, 1], [1, -1]])
    np.testing.assert_allclose(jax.jit(hadamard)(x), x @ h, rtol=1e-4, atol=1e-5)


def test_the_gain_of_the_unbiased_rotation_is_reached():
    """By the signs of this very rotation: turned around they are all ones, rotated one value."""
    codec, key = drive("unbiased", 64), jr.key(9)
    drawn = np.asarray(jax.jit(lambda key: words(seed_of(key), 2))(key))
    flips = np.unpackbits(drawn.view(np.uint8), bitorder="little")
    worst = {"x": np.float32(1) - 2 * flips.astype(np.float32)}
    gain = length(codec.apply(worst, key)) / length(worst)
    assert codec.norm_gain * (1 - 1e-5) < gain <= codec.norm_gain
    assert length(drive("mse", 64).apply(worst, key)) < length(worst)


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale, wanted", [("mse", 2 / np.pi), ("unbiased", 1.0)])
def test_the_scales_of_the_rotation(scale, wanted):
    """Along the update: what is left of it."""
    x = normal(4096)
    found = np.asarray(drive(scale).apply({"x": x}, jr.key(2))["x"])
    assert float(found @ x / (x @ x)) == pytest.approx(wanted, rel=0.03)
    if scale == "mse":
        left = np.sum((found - x) ** 2) / (x @ x)
        for factor in (0.9, 1.1):
            assert left < np.sum((factor * found - x) ** 2) / (x @ x)


def test_topk_keeps_the_largest_and_ties_go_to_the_lower_place():
    x = {"x": np.array([1.0, -3.0, 2.0, 3.0, -2.0, 2.0], np.float32)}
    found = arrived(topk(0.5), x, jr.key(0))
    np.testing.assert_array_equal(found["x"], [0, -3, 2, 3, 0, 0])


@given(st.integers(1, 3000), st.floats(0.001, 1.0))
def test_places_cost_what_is_stated(size, share):
    k = kept(size, share)
    codec = topk(share)
    places = codec.encoded_bytes({"x": np.zeros(size)}) - codec.encoded_bytes({}) - 4 * k
    assert 1 <= k <= size and 8 * places <= k * (2 + np.log2(size / k)) + 40


@lossy
def test_a_payload_of_another_model_is_a_typed_error(codec):
    with pytest.raises(WireError):
        codec.decode(codec.encode(update(), jr.key(1)), {"a": np.zeros((2, 2), np.float32)})


def test_every_name_makes_a_codec_and_is_tested():
    tested = {c.name.split("-")[0].split("+")[0] for c in CODECS}
    assert tested == set(NAMES)


@pytest.mark.parametrize(
    "name, options, text",
    [
        ("unifrm", {}, "Did you mean 'uniform'"),
        ("uniform", {"bit": 3}, "Did you mean 'bits'"),
        ("uniform", {"bits": 17}, "bits = 17: expected 1 to 16"),
        ("uniform", {"block": 1}, "block = 1"),
        ("ternary", {"clip": 0}, "clip = 0"),
        ("drive", {"block": 100}, "a power of two"),
        ("drive", {"scale": "best"}, "scale = 'best'"),
        ("topk", {"share": 0}, "share = 0"),
        ("topk", {"values": "int8"}, "values = 'int8'"),
    ],
)
def test_a_wrong_setting_is_named(name, options, text):
    with pytest.raises(ConfigError, match=text):
        by_name(name, **options)
