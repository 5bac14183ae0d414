"""Packing of small integers into few bytes.

In:       integers of a known width, or ternary digits.
Out:      bytes, and back.
Promise:  n integers of w bits take `packed_bytes(n, w)` bytes, at most three more than
          n * w / 8 rounded up; unused bits are zero, and a body in which they are not is a
          `WireError`, so that a value has one encoding.
Not here: the meaning of the integers.

A width is the sum of at most one each of 1, 2 and 4 and of 8s; an integer is cut, lowest bits
first, into fields of these widths in this order, and each field has a section of its own. (The
narrow fields come first because the lowest bits of a code are noise: the wide ones then hold
nearly all that an entropy coder can find.) Within a section of width w the values lie in 8/w
runs of m = ceil(n * w / 8): byte j holds value j in its lowest bits, then value m + j, and so on.
Runs instead of neighbours make every step a pass over contiguous memory. Ternary digits do the
same with five runs and powers of three.
"""

from __future__ import annotations

import numpy as np

from fedlm.core.errors import WireError
from fedlm.wire.frame import Reader

CHUNK = 1 << 15  # values that are worked on at a time: they stay in the processor's cache


def sections(width: int) -> list[int]:
    """Return the widths of the fields of an integer.

    >>> sections(13)
    [1, 4, 8]
    """
    rest = width % 8
    return [w for w in (1, 2, 4) if rest & w] + [8] * (width // 8)


def packed_bytes(count: int, width: int) -> int:
    """Return the number of bytes that `pack` makes."""
    return sum(_runs(count, w)[1] for w in sections(width))


def _runs(count: int, width: int) -> tuple[int, int]:
    per_byte = 8 // width
    return per_byte, -(-count // per_byte)


def pack(values: np.ndarray, width: int) -> bytes:
    """Pack unsigned integers below 2**width."""
    if width in (8, 16, 32, 64):
        return _planes(values, width)
    parts, shift = [], 0
    for w in sections(width):
        parts.append(_pack_field(values, shift, w))
        shift += w
    return b"".join(parts)


def _planes(values: np.ndarray, width: int) -> bytes:
    count = width // 8
    whole = np.ascontiguousarray(values, f"<u{count}")
    return whole.view(np.uint8).reshape(-1, count).T.tobytes()


def _pack_field(values: np.ndarray, shift: int, width: int) -> bytes:
    """Pack the bits from `shift` on of each value."""
    runs, length = _runs(len(values), width)
    out, mask = np.zeros(length, np.uint8), np.uint8((1 << width) - 1)
    for at in range(0, length, CHUNK):
        end = min(at + CHUNK, length)
        for i in range(runs):
            part = (values[i * length + at : i * length + end] >> shift).astype(np.uint8)
            part &= mask
            out[at : at + len(part)] |= part << (i * width)
    return out.tobytes()


def unpack(reader: Reader, count: int, width: int) -> np.ndarray:
    """Unpack the next `count` integers of a body."""
    least = min(size for size in (1, 2, 4, 8) if width <= 8 * size)
    out = np.zeros(count, f"u{least}")
    shift = 0
    for w in sections(width):
        _unpack_field(reader, out, shift, w)
        shift += w
    return out


def _unpack_field(reader: Reader, out: np.ndarray, shift: int, width: int) -> None:
    """Put the next section of a body into the bits from `shift` on of each value."""
    runs, length = _runs(len(out), width)
    body, mask = reader.take(length, "u1"), np.uint8((1 << width) - 1)
    for at in range(0, length, CHUNK):
        part = body[at : at + CHUNK]
        for i in range(runs):
            field, first = (part >> (i * width)) & mask, i * length + at
            fits = out[first : first + len(part)]
            if len(fits) < len(part):
                _only(field, len(fits))
            fits |= np.left_shift(field[: len(fits)], shift, dtype=out.dtype)


def _only(values: np.ndarray, count: int) -> np.ndarray:
    if values[count:].any():
        raise WireError("frame holds bits beyond its last value.")
    return values[:count]


def trit_bytes(count: int) -> int:
    """Return the number of bytes that `pack_trits` makes."""
    return -(-count // 5)


def pack_trits(digits: np.ndarray) -> bytes:
    """Pack digits 0, 1 and 2, five per byte (3**5 = 243)."""
    length = trit_bytes(len(digits))
    out = np.zeros(length, np.uint8)
    for i in range(5):
        part = digits[i * length : (i + 1) * length]
        out[: len(part)] += part * np.uint8(3**i)
    return out.tobytes()


def unpack_trits(reader: Reader, count: int) -> np.ndarray:
    """Unpack the next `count` ternary digits of a body."""
    length = trit_bytes(count)
    rest = reader.take(length, "u1")
    if length and rest.max() >= 243:
        raise WireError("frame holds a byte that is not five ternary digits.")
    out = np.empty(5 * length, np.uint8)
    for i in range(5):
        rest, out[i * length : (i + 1) * length] = rest // 3, rest % 3
    return _only(out, count)
