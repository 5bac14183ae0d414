"""Bytes from anywhere: a typed error or a finite update, never a crash or a large allocation."""

import functools
import struct
import tracemalloc
import zlib

import jax
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.core.errors import WireError
from fedlm.wire.frame import MAGIC, open_frame, overhead, seal_frame
from tests.wire.cases import BY_NAME, CODECS, DEFAULT, all_codecs, all_names, update

LIKE = update()


@functools.cache
def sent(name):
    """A frame of a codec."""
    return BY_NAME[name].encode(LIKE, jr.key(1))


def must_hold(codec, payload):
    """Decodes to finite numbers in the right shapes, or is refused."""
    try:
        found = codec.decode(payload, LIKE)
    except WireError:
        return
    assert jax.tree.structure(found) == jax.tree.structure(LIKE)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(LIKE), strict=True):
        assert x.shape == y.shape
        assert codec.name == "float32" or np.isfinite(x).all()


@all_codecs
def test_a_damaged_payload_is_a_typed_error(codec):
    payload = sent(codec.name)
    for at in range(0, len(payload), 3):
        hurt = bytearray(payload)
        hurt[at] ^= 0x41
        with pytest.raises(WireError):
            codec.decode(bytes(hurt), LIKE)
        with pytest.raises(WireError):
            codec.decode(payload[:at], LIKE)
    with pytest.raises(WireError):
        codec.decode(payload + b"x", LIKE)


@all_codecs
def test_another_codecs_frame_is_a_typed_error(codec):
    for name in DEFAULT - {codec.name}:
        with pytest.raises(WireError, match="made by codec"):
            codec.decode(sent(name), LIKE)


@pytest.mark.sample(5)
@all_names
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_body_with_a_right_checksum_may_hold_anything(name, data):
    codec, body = BY_NAME[name], bytearray(open_frame(sent(name), name))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(body) - 1))
        few = data.draw(
            st.sampled_from([b"\xff\xff\xff\xff", b"\x00", b"\x00\x00\x80\x7f", b"\x5a"])
        )
        body[at : at + len(few)] = few
    must_hold(codec, seal_frame(name, bytes(body)))


@all_names
@given(st.randoms(use_true_random=False), st.integers(-3, 3))
@settings(max_examples=15, deadline=None)
def test_a_body_of_noise_may_be_of_any_length(name, random, more):
    wanted = BY_NAME[name].encoded_bytes(LIKE) - overhead(name)
    must_hold(BY_NAME[name], seal_frame(name, random.randbytes(wanted + more)))


@given(st.binary(max_size=200))
def test_noise_is_never_a_frame(data):
    with pytest.raises(WireError):
        open_frame(data, "float32")
    with pytest.raises(WireError):
        open_frame(MAGIC + data, "float32")


@given(st.binary(max_size=200))
def test_a_frame_gives_back_its_body(body):
    assert bytes(open_frame(seal_frame("float32", body), "float32")) == body


@all_codecs
def test_a_declared_size_is_not_believed(codec):
    name = codec.name.encode()
    body = b"abc"
    check = zlib.crc32(body, zlib.crc32(name))
    for size in (0, 1, 2**40, 2**63, 2**64 - 1):
        frame = MAGIC + bytes([len(name)]) + name + struct.pack("<QI", size, check) + body
        with pytest.raises(WireError):
            quietly(lambda frame=frame: codec.decode(frame, LIKE))


@pytest.mark.parametrize("name", ["", "é", "x" * 65])
def test_a_name_must_be_a_name(name):
    with pytest.raises(WireError, match="ASCII"):
        seal_frame(name, b"")
    raw = name.encode()
    frame = MAGIC + bytes([len(raw)]) + raw + struct.pack("<QI", 0, zlib.crc32(raw))
    with pytest.raises(WireError, match="made by codec"):
        open_frame(frame, "float32")


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.fixed_size], ids=lambda c: c.name)
def test_a_small_frame_does_not_become_a_large_body(codec):
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = b"\x01" + press.compress(bytes(2**26)) + press.flush()
    short = b"\x01" + zlib.compress(bytes(10), wbits=-15)
    many = codec.encoded_bytes(LIKE) * b"\x00"
    for body in (bomb, short, many, b"", b"\x02abc", b"\x01\xff\xff"):
        with pytest.raises(WireError):
            quietly(lambda body=body: codec.decode(seal_frame(codec.name, body), LIKE))
    large = {"x": np.zeros(2**17, np.float32)}
    with pytest.raises(WireError):
        quietly(lambda: codec.decode(seal_frame(codec.name, bomb), large))


def quietly(run):
    """Runs it, and finds that it asked for no more than a megabyte."""
    tracemalloc.start()
    try:
        run()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
