"""Packing: every width gives back what it was given, in the stated number of bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import WireError
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, pack_trits, packed_bytes, trit_bytes, unpack, unpack_trits


@given(st.integers(0, 64), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_integers_come_back(width, count, seed):
    values = np.random.default_rng(seed).integers(0, 2**width, count, np.uint64)
    body = pack(values, width)
    assert len(body) == packed_bytes(count, width) <= -(-count * width // 8) + 3
    np.testing.assert_array_equal(unpack(Reader(memoryview(body), len(body)), count, width), values)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_ternary_digits_come_back(digits):
    body = pack_trits(np.array(digits, np.uint8))
    assert len(body) == trit_bytes(len(digits))
    np.testing.assert_array_equal(
        unpack_trits(Reader(memoryview(body), len(body)), len(digits)), digits
    )


def test_the_layout_is_the_one_that_is_written_down():
    """Runs, lowest bits first: docs/wire.md."""
    assert pack(np.array([1, 2, 3, 4, 5]), 4) == bytes([0x41, 0x52, 0x03])
    assert pack(np.array([1, 2, 3, 4, 5]), 3) == bytes([0b10101, 0b100100, 0b1001])
    assert pack(np.array([0x0102, 0x0304]), 16) == bytes([2, 4, 1, 3])
    assert pack_trits(np.array([1, 2, 0, 1, 2, 1], np.uint8)) == bytes(
        [1 + 0 * 3 + 2 * 9, 2 + 1 * 3 + 1 * 9]
    )


@pytest.mark.parametrize("body, width", [(b"\xf0", 4), (b"\x02", 1), (b"\x40", 2)])
def test_bits_that_hold_nothing_must_be_zero(body, width):
    with pytest.raises(WireError, match="beyond"):
        unpack(Reader(memoryview(body), 1), 1, width)


@pytest.mark.parametrize("byte", [243, 255, 3])
def test_a_byte_must_be_ternary_digits(byte):
    with pytest.raises(WireError):
        unpack_trits(Reader(memoryview(bytes([byte])), 1), 1)
