"""DRIVE: one bit per value, after a random rotation.

In:       an update.
Out:      a seed, the signs of the rotated update, and a scale per block.
Promise:  the size depends on shapes alone; the rotation is known to both ends from the seed.
Not here: packing (`pack.py`).

All tensors are laid end to end and cut into blocks of d values; the last block is filled up
with zeros to a power of two. With H the Walsh-Hadamard matrix of size d and D random signs,

    y = H D x;   x' = D H sign(y) * c

    c = ||y||_1 / d^2              "mse": the multiple of D H sign(y) that is nearest to x
    c = ||y||_2^2 / (d ||y||_1)    "unbiased": x' has the component x along x

In the terms of R = H D / sqrt(d), a rotation, the scale S = c sqrt(d) of R^-1 sign(Rx) is
||Rx||_1 / d or ||Rx||_2^2 / ||Rx||_1. The second is unbiased for a rotation drawn from all
rotations; for this one (d sign bits in place of a full draw) it is nearly so where no few
values dominate a block. `decode` does not get the key, so each frame carries eight bytes of
seed drawn from it.

H y is additions alone and H sign(y) small integers, so every block is the same in any program.

Gain. "mse" is a projection onto a line: 1. "unbiased": ||x'|| = ||x||^2 sqrt(d) / ||Rx||_1 and
||Rx||_1 >= ||x||, so sqrt(d), reached where Rx has a single value; about sqrt(pi / 2) = 1.25 is
usual. A private run takes "mse".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from fedlm.core.errors import WireError, require
from fedlm.core.types import Codec
from fedlm.wire.bitwise import MOST, SLACK, fold, pieces, power_below, seed_of, square, words
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack
from fedlm.wire.scheme import Scheme, Sizes, Vectors, codec_of

Scale = Literal["mse", "unbiased"]
RowMatrix = Float[Array, "blocks d"]


class Signs(NamedTuple):
    """The coded blocks of one size; `code` is 1 where y is negative."""

    scale: Any  # blocks
    code: Any  # blocks d


class Rotated(NamedTuple):
    """A coded update: its full blocks, then its smaller last block; either may be missing."""

    seed: Any  # 2
    blocks: list[Signs]


def drive(scale: Scale = "mse", block: int = 4096) -> Codec:
    """Make a codec of one bit per value and four bytes per block of at most `block` values."""
    require(scale in ("mse", "unbiased"), "scale", scale, "'mse' or 'unbiased'")
    ok = 2 <= block <= 2**16 and block & (block - 1) == 0
    require(ok, "block", block, "a power of two from 2 to 65536")
    return codec_of(
        Scheme(
            name=f"drive-{scale}-{block}",
            squeeze=lambda vectors, key: _squeeze(vectors, key, scale, block),
            expand=lambda parts, sizes: _expand(parts, sizes, block),
            write=lambda parts, sizes: _write(parts),
            read=lambda reader, sizes: _read(reader, sum(sizes), block),
            body_bytes=lambda sizes: 8 + _block_bytes(sum(sizes), block),
            norm_gain=SLACK * (1.0 if scale == "mse" else math.sqrt(block)),
        )
    )


def layout(total: int, block: int) -> list[tuple[int, int]]:
    """Return (count, size) of the full blocks, then of the smaller last block.

    >>> layout(10_000, 4096)
    [(2, 4096), (1, 2048)]
    """
    full, rest = divmod(total, block)
    last = 1 << max(0, rest - 1).bit_length()
    return [(full, block)] * (full > 0) + [(1, last)] * (rest > 0)


def _block_bytes(total: int, block: int) -> int:
    return sum(4 * count + packed_bytes(count * d, 1) for count, d in layout(total, block))


def hadamard(rows: RowMatrix) -> RowMatrix:
    """Multiply every row by H with additions only: eight values at a time, then four or two."""
    count, d = rows.shape
    left, right = count, d
    flat = rows.reshape(-1)
    while right > 1:
        radix = min(8, right)
        right //= radix
        flat = jax.lax.optimization_barrier(_butterflies(flat.reshape(left, radix, right)))
        left *= radix
    return flat.reshape(count, d)


def _butterflies(x: Float[Array, "left radix right"]) -> Float[Array, " n"]:
    radix = x.shape[1]
    v = [x[:, j] for j in range(radix)]
    bit = 1
    while bit < radix:
        v = [v[j ^ bit] - v[j] if j & bit else v[j] + v[j | bit] for j in range(radix)]
        bit *= 2
    return jnp.stack(v, axis=1).reshape(-1)


def _flips(seed: UInt32[Array, "2"], total: int) -> Bool[Array, " total"]:
    """Draw the values whose sign D flips, with one random bit per value."""
    drawn = words(seed, -(-total // 32))[:, None]
    bits = (drawn >> jnp.arange(32, dtype=jnp.uint32)[None]) & jnp.uint32(1)
    return bits.reshape(-1)[:total] == 1


def _cut(x: Float[Array, " n"], block: int) -> Iterator[RowMatrix]:
    at = 0
    for count, d in layout(len(x), block):
        part = x[at : at + count * d]
        yield jnp.pad(part, (0, count * d - len(part))).reshape(count, d)
        at += count * d


@functools.partial(jax.jit, static_argnames="block")
def rotated(
    x: Float[Array, " n"], seed: UInt32[Array, "2"], block: int = 4096
) -> Float[Array, " m"]:
    """Return R x with R = H D / sqrt(d) in each block; the last block is filled up with zeros.

    All who know the seed have the same R, so that a sum of rotated vectors can be turned back.
    """
    flipped = jnp.where(_flips(seed, len(x)), -x, x)
    parts = [(hadamard(rows) * rows.shape[1] ** -0.5).reshape(-1) for rows in _cut(flipped, block)]
    return jnp.concatenate([*parts, jnp.zeros(0)])


@functools.partial(jax.jit, static_argnames=("total", "block"))
def unrotated(
    y: Float[Array, " m"], seed: UInt32[Array, "2"], total: int, block: int = 4096
) -> Float[Array, " n"]:
    """Return the `total` values that `rotated` turned into y."""
    x = _turned_back(y, total, block)[:total]
    return jnp.where(_flips(seed, total), -x, x)


def _turned_back(y: Float[Array, " m"], total: int, block: int) -> Float[Array, " m"]:
    """Return H y / sqrt(d) in each block: H is its own inverse up to d."""
    parts, at = [], 0
    for count, d in layout(total, block):
        rows = y[at : at + count * d].reshape(count, d)
        parts.append((hadamard(rows) * d**-0.5).reshape(-1))
        at += count * d
    return jnp.concatenate([*parts, jnp.zeros(0)])


def _squeeze(vectors: Vectors, key: PRNGKeyArray, scale: Scale, block: int) -> Rotated:
    seed = seed_of(key)
    x = jnp.concatenate(vectors) if vectors else jnp.zeros(0)
    x = jnp.where(_flips(seed, len(x)), -x, x)
    return Rotated(seed, [_signs(rows, scale) for rows in _cut(x, block)])


def _signs(rows: RowMatrix, scale: Scale) -> Signs:
    d = rows.shape[1]
    # Division by a power of two is exact; squares then neither overflow nor vanish.
    power = power_below(jnp.max(jnp.abs(rows), axis=1))
    y = hadamard(rows / power[:, None])
    length = fold(jnp.abs(y))
    if scale == "mse":
        c = length / d**2
    else:
        c = fold(square(y)) / jnp.where(length > 0, length * d, 1.0)
    return Signs(c * power, (y < 0).astype(jnp.uint8))


def _expand(parts: Rotated, sizes: Sizes, block: int) -> Vectors:
    total = sum(sizes)
    found = [
        (hadamard(1.0 - 2.0 * s.code.astype(jnp.float32)) * s.scale[:, None]).reshape(-1)
        for s in parts.blocks
    ]
    x = jnp.concatenate(found)[:total] if found else jnp.zeros(0)
    return pieces(jnp.where(_flips(parts.seed, total), -x, x), sizes)


def _write(parts: Rotated) -> Iterator[bytes]:
    yield parts.seed.astype("<u4").tobytes()
    for signs in parts.blocks:
        yield signs.scale.astype("<f4").tobytes()
        yield pack(signs.code.reshape(-1), 1)


def _read(reader: Reader, total: int, block: int) -> Rotated:
    seed = reader.take(2, "<u4")
    blocks = []
    for count, d in layout(total, block):
        scale = reader.finite(count)
        if (scale < 0).any() or (scale > MOST).any():
            raise WireError(f"frame holds a scale outside 0 to {MOST:g}.")
        blocks.append(Signs(scale, unpack(reader, count * d, 1).reshape(count, d)))
    return Rotated(seed, blocks)
