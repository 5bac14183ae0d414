"""Top-k: the largest values of every tensor, and their places.

In:       an update, the share of values to keep.
Out:      for each tensor the places of its k largest magnitudes, then their values.
Promise:  ties go to the lower place; the size depends on shapes alone.
Not here: the values left out. A codec keeps no memory; a member may (error feedback,
          `federation/member.py`).

Places are an Elias-Fano list: with l = floor(log2(n / k)), the lowest l bits of each place in
order, packed; then a bit string in which place i of the list sets bit (place >> l) + i. That is
about 2 + log2(n / k) bits per place for any places (at one percent 8.6, where log2 of the
number of choices is 8.1 and plain numbers of a tensor of a million need 20), and it needs no loop
to read.

Values are float32, or float16 after division by the power of two below the largest.

Gain. A part of a vector is not longer than the vector: 1; float16 rounds by at most one part in
2049.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.errors import WireError, require
from fedlm.core.types import Codec
from fedlm.wire.bitwise import MOST, power_below
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack
from fedlm.wire.scheme import Coins, LeafScheme, Vector, per_leaf

Values = Literal["float32", "float16"]


class Chosen(NamedTuple):
    """The kept values of one tensor, divided by `power`, in the order of size or of place."""

    place: Any  # k
    value: Any  # k
    power: Any  # 1


def topk(share: float = 0.01, values: Values = "float32") -> Codec:
    """Make a codec that sends a share of values, each with its place.

    A place takes about 2 + log2(1 / share) bits.
    """
    share = float(share)
    require(0 < share <= 1, "share", share, "more than 0 and at most 1")
    require(values in ("float32", "float16"), "values", values, "'float32' or 'float16'")
    return per_leaf(
        LeafScheme(
            name=f"topk-{share!r}-{values}",
            squeeze=lambda x, coin: _squeeze(x, coin, kept(len(x), share), values),
            expand=_expand,
            write=lambda chosen, size: _write(chosen, size, values),
            read=lambda reader, size: _read(reader, size, kept(size, share), values),
            leaf_bytes=lambda size: _leaf_bytes(size, kept(size, share), values),
            norm_gain=1.0 if values == "float32" else 1 + 1 / 2049,
        )
    )


def kept(size: int, share: float) -> int:
    """Return the number of values of a tensor that are sent: the share, rounded up.

    >>> kept(1000, 0.01), kept(3, 0.01), kept(100, 0.07)
    (10, 1, 7)
    """
    # Shares are decimal: 0.07 * 100 must not become 8 because it is 7.000000000000001.
    return min(size, max(1, math.ceil(round(size * share, 6))))


def _squeeze(x: Vector, coin: Coins | None, k: int, values: Values) -> Chosen:
    # Takes only the places: a program that also uses the sizes sorts the whole tensor.
    _, place = jax.lax.top_k(jnp.abs(x), k)
    value = x[place]
    if values == "float32":
        return Chosen(place, value, jnp.ones(1))
    power = power_below(jnp.max(jnp.abs(x)))[None]
    # Rounds a number in (-2, 2) to float16; not by a cast, which a compiler may leave out.
    return Chosen(place, jax.lax.reduce_precision(value / power, 5, 10), power)


def _expand(chosen: Chosen, size: int) -> Vector:
    return jnp.zeros(size).at[chosen.place].set(chosen.value * chosen.power)


def _low_bits(size: int, k: int) -> int:
    return (size // k).bit_length() - 1


def _string_bits(size: int, k: int) -> int:
    return ((size - 1) >> _low_bits(size, k)) + k


def _leaf_bytes(size: int, k: int, values: Values) -> int:
    places = packed_bytes(k, _low_bits(size, k)) + -(-_string_bits(size, k) // 8)
    return places + (4 * k if values == "float32" else 4 + 2 * k)


def _write(chosen: Chosen, size: int, values: Values) -> bytes:
    order = np.argsort(chosen.place)
    place, value = chosen.place[order], chosen.value[order]
    low = _low_bits(size, len(place))
    string = np.zeros(_string_bits(size, len(place)), np.uint8)
    string[(place >> low) + np.arange(len(place))] = 1
    found = pack(place & ((1 << low) - 1), low) + np.packbits(string, bitorder="little").tobytes()
    if values == "float32":
        return found + value.astype("<f4").tobytes()
    return found + chosen.power.astype("<f4").tobytes() + value.astype("<f2").tobytes()


def _read(reader: Reader, size: int, k: int, values: Values) -> Chosen:
    place = _read_places(reader, size, k)
    power = np.ones(1, np.float32) if values == "float32" else reader.finite(1)
    if not 0 <= power[0] <= MOST:
        raise WireError(f"frame holds a scale outside 0 to {MOST:g}.")
    value = reader.take(k, "<f4" if values == "float32" else "<f2").astype(np.float32)
    if not np.isfinite(value).all():
        raise WireError("frame holds a number that is not finite.")
    return Chosen(place, value, power)


def _read_places(reader: Reader, size: int, k: int) -> np.ndarray:
    low = _low_bits(size, k)
    rest = unpack(reader, k, low)
    bits = _string_bits(size, k)
    string = np.unpackbits(reader.take(-(-bits // 8), "u1"), bitorder="little")
    ones = np.flatnonzero(string)
    if len(ones) != k or ones[-1] >= bits:
        raise WireError(f"frame does not hold {k} places.")
    place = ((ones - np.arange(k)) << low) | rest
    if place[-1] >= size or (np.diff(place) <= 0).any():
        raise WireError("frame holds places that are out of order or beyond the tensor.")
    return place.astype(np.int32)
