"""Law 6: decoded bytes equal what simulation assumed; the reported size is the real size."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.wire.dense import dense
from fedlm.wire.frame import open_frame, seal

CODECS = [dense()]
all_codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)


def update(seed=0):
    shapes = {"a": (3, 4), "b": (7,), "c": ()}
    keys = jr.split(jr.key(seed), len(shapes))
    return {n: jr.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


@all_codecs
def test_bytes_carry_exactly_what_simulation_assumes(codec):
    arrived = codec.decode(codec.encode(update(), jr.key(1)), update())
    assert eqx.tree_equal(arrived, codec.apply(update(), jr.key(1)))


@all_codecs
def test_the_stated_size_is_the_real_size(codec):
    assert len(codec.encode(update(), jr.key(1))) == codec.encoded_bytes(update())


@all_codecs
def test_the_stated_gain_bounds_the_norm(codec):
    for seed in range(5):
        sent = update(seed)
        arrived = codec.apply(sent, jr.key(seed))
        assert float(tree.norm(arrived)) <= codec.norm_gain * float(tree.norm(sent)) * (1 + 1e-6)


@all_codecs
def test_a_damaged_payload_is_a_typed_error(codec):
    payload = codec.encode(update(), jr.key(1))
    for at in range(0, len(payload), 3):
        hurt = bytearray(payload)
        hurt[at] ^= 0x41
        with pytest.raises(WireError):
            codec.decode(bytes(hurt), update())
        with pytest.raises(WireError):
            codec.decode(payload[:at], update())
    with pytest.raises(WireError):
        codec.decode(payload + b"x", update())


@all_codecs
def test_a_payload_of_another_model_is_a_typed_error(codec):
    with pytest.raises(WireError):
        codec.decode(codec.encode(update(), jr.key(1)), {"a": jnp.zeros((2, 2))})


@given(st.binary(max_size=200))
def test_noise_is_never_a_frame(data):
    with pytest.raises(WireError):
        open_frame(data, "dense")


@given(st.binary(max_size=200))
def test_a_frame_gives_back_its_body(body):
    assert bytes(open_frame(seal("dense", body), "dense")) == body


def test_a_frame_names_its_codec():
    with pytest.raises(WireError, match="made by codec"):
        open_frame(seal("other", b"abc"), "dense")


def test_dense_keeps_every_bit():
    values = {"x": jnp.asarray(np.array([1e-45, -0.0, 3.4e38, np.inf], np.float32))}
    codec = dense()
    arrived = codec.decode(codec.encode(values, jr.key(0)), values)
    assert np.asarray(arrived["x"]).tobytes() == np.asarray(values["x"]).tobytes()
