"""Standard normals from a cipher's key.

In:       a cipher's key, the number of a stream, the shapes to fill.
Out:      independent standard normals in at least 32 bits.
Promise:  the same key and number give the same numbers, whatever runs beside; every value up to 9.4
          standard deviations can occur, as finely as 32 bits can say it.
Not here: what scale they get (`noise.py`), how a sum gets them (`grid.py`).

Box and Muller: with u and v uniform, sqrt(-2 log u) (cos 2 pi v, sin 2 pi v) is a pair of
independent normals. u has 64 bits and is known with small relative error near 0 and near 1, so that
neither the tails nor the middle have holes: with probability 2^-64 a pair lies beyond radius 9.4,
where nothing is drawn. `jax.random.normal` has 2^23 different values and ends at 5.4; from 4 on the
gaps between them are wide enough to tell what was added to them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from fedlm.core import chacha, tree
from fedlm.core.chacha import CipherKey
from fedlm.core.types import Params

# Blocks that are drawn at once: they fit into a processor's cache, and three words make a pair.
# On two cores 20 million words take 0.23 s in such pieces and 0.58 s in one piece.
PIECE = 6144
PAIRS = PIECE * chacha.BLOCK // 3


@functools.partial(jax.jit, inline=True)
def standard_normal(key: CipherKey, like: Params, number: int | Int[Array, ""] = 0) -> Params:
    """Draw independent standard normals in the shapes of `like` from one stream of the key."""
    leaves, structure = jax.tree.flatten(like)
    drawn = _flat(key, number, tree.size(leaves))
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        drawn[end - leaf.size : end].reshape(leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _flat(key: CipherKey, number: int | Int[Array, ""], size: int) -> Float[Array, " size"]:
    pairs = -(-size // 2)
    if pairs <= PAIRS:
        words = chacha.blocks(key, number, 0, -(-3 * pairs // chacha.BLOCK)).reshape(-1)
        return _normals(words[: 3 * pairs].reshape(3, -1)).reshape(-1)[:size]

    def piece(i: Int[Array, ""]) -> Float[Array, "2 pairs"]:
        return _normals(chacha.blocks(key, number, i * PIECE, PIECE).reshape(3, -1))

    made = lax.map(piece, jnp.arange(-(-pairs // PAIRS)))
    return made.reshape(-1)[:size]


def _normals(words: UInt32[Array, "3 pairs"]) -> Float[Array, "2 pairs"]:
    """Turn three random words into two normals."""
    high, low, angle = words
    # u is the nearer of the 64 bits and their complement, below a half, so that it keeps its digits
    small = high < np.uint32(2**31)
    high, low = jnp.where(small, high, ~high), jnp.where(small, low, ~low)
    u = _float(high) * 2.0**-32 + (_float(low) + 0.5) * 2.0**-64
    radius = jnp.sqrt(-2.0 * jnp.where(small, jnp.log(u), jnp.log1p(-u)))
    # Three bits of the angle choose an eighth of the circle: there short series are exact.
    x = (_float(angle >> np.uint32(3)) + 0.5) * (np.pi / 4 * 2.0**-29)
    square = x * x
    sine = x * (1 + square * (-1 / 6 + square * (1 / 120 - square / 5040)))
    cosine = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40320)))
    bits = [(angle & np.uint32(bit)) != 0 for bit in (1, 2, 4)]
    across = jnp.where(bits[0], sine, cosine) * jnp.where(bits[1], -radius, radius)
    up = jnp.where(bits[0], cosine, sine) * jnp.where(bits[2], -radius, radius)
    return jnp.stack([across, up])


def _float(words: UInt32[Array, " n"]) -> Float[Array, " n"]:
    return words.astype(jnp.float32)
