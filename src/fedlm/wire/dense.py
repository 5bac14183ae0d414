"""Dense codecs: every number in four bytes (float32) or in two (bfloat16).

In:       an update.
Out:      a frame of float32 or bfloat16 in tree order, and back.
Promise:  float32 keeps every bit, NaN and infinities included; bfloat16 rounds every
          tame number to the nearest, ties to even; the size depends on shapes alone.
Not here: the envelope (`frame.py`), few bits per number (`quantize.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt16

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.errors import WireError
from fedlm.core.types import Codec, Params
from fedlm.wire.frame import Reader, open_frame, overhead, seal_frame
from fedlm.wire.scheme import Coins, LeafScheme, Vector, per_leaf

NAME = "float32"


def _encode(update: Params, key: PRNGKeyArray, keep: Sequence[bool] | None = None) -> bytes:
    leaves = jax.tree.leaves(update)
    sent = leaves if keep is None else [x for x, kept in zip(leaves, keep, strict=True) if kept]
    whole = [np.ascontiguousarray(np.asarray(leaf), "<f4").reshape(-1) for leaf in sent]
    return seal_frame(NAME, *(leaf.view(np.uint8).data for leaf in whole))


def _decode(payload: bytes, like: Params) -> Params:
    leaves, structure = jax.tree.flatten(like)
    reader = Reader(open_frame(payload, NAME), 4 * tree.size(like))
    parts = [reader.take(leaf.size, "<f4").reshape(leaf.shape) for leaf in leaves]
    # Views of the frame, no copies: a second copy would be half of a server's memory.
    made = [p.astype(leaf.dtype, copy=False) for p, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


@by_value
def dense() -> Codec:
    """Make the float32 codec, which changes no number."""
    return Codec(
        name=NAME,
        encode=_encode,
        decode=_decode,
        apply=lambda update, key: update,
        encoded_bytes=lambda like: overhead(NAME) + 4 * tree.size(like),
        norm_gain=1.0,
    )


def bfloat16() -> Codec:
    """Make the bfloat16 codec: half the bytes, and 8 of 24 significant bits.

    Rounding moves a number that is not subnormal by at most one part in 257.
    """
    return per_leaf(
        LeafScheme(
            name="bfloat16",
            squeeze=_upper_half,
            expand=_from_upper_half,
            write=lambda parts, size: parts.astype("<u2").tobytes(),
            read=_read_upper_half,
            leaf_bytes=lambda size: 2 * size,
            norm_gain=1 + 1 / 257,
        )
    )


def _upper_half(x: Vector, coin: Coins | None) -> UInt16[Array, " n"]:
    # Rounds the bits themselves: a compiler may leave out a cast to bfloat16 and back.
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    tie = (raw >> 16) & jnp.uint32(1)
    return ((raw + jnp.uint32(0x7FFF) + tie) >> 16).astype(jnp.uint16)


def _from_upper_half(half: UInt16[Array, " n"], size: int) -> Vector:
    return jax.lax.bitcast_convert_type(half.astype(jnp.uint32) << 16, jnp.float32)


def _read_upper_half(reader: Reader, size: int) -> np.ndarray:
    found = reader.take(size, "<u2")
    if np.any((found & 0x7F80) == 0x7F80):
        raise WireError("frame holds a number that is not finite.")
    return found
