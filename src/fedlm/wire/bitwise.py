"""Arithmetic that gives the same bits in every compiled program.

In:       vectors inside a program that is being traced.
Out:      tamed values, sums, scales, random coins.
Promise:  each function returns the same bits whatever program it is compiled into, so that
          `apply` inside an engine equals `decode(encode(...))` outside.
Not here: formats (one file per codec).

A compiler may join a product and a sum into one rounding, and may add up a vector in any order.
It may turn a division by a constant into a product, if it sees that it is constant. So sums here
are folds of plain additions, products that feed a sum are exact or rounded on purpose, inverses
of constants are written out, and everything else is a comparison, a selection, or one operation
rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, UInt16, UInt32

LEAST, MOST = 2.0**-100, 2.0**100
_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32
SLACK = 1 + 2e-6  # bounds the factor by which float32 rounding can lengthen a norm


def tame(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Set NaN, infinities and magnitudes below 2**-100 to zero, and cap magnitudes at 2**100.

    Every lossy codec does this first.
    """
    size = jnp.abs(x)
    kept = jnp.isfinite(x) & (size >= LEAST)
    return jnp.where(kept, jnp.clip(x, -MOST, MOST), 0.0)


def power_below(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the largest power of two not above a positive tame number, or 1 for zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return jnp.where(x > 0, jax.lax.bitcast_convert_type(bits, jnp.float32), 1.0)


def fold(x: Float[Array, "rows n"]) -> Float[Array, " rows"]:
    """Sum each row by adding its eighths in pairs; the error grows with log n, not with n."""
    while x.shape[1] > 1:
        n = x.shape[1]
        run = n // 8 if n >= 8 else 1
        runs = min(8, n)
        v = [x[:, i * run : (i + 1) * run] for i in range(runs)]
        while len(v) > 1:
            v = [v[i] + v[i + 1] if i + 1 < len(v) else v[i] for i in range(0, len(v), 2)]
        # Without the barrier, the program computes each part again inside the next one.
        rest = x[:, runs * run :]
        x = jax.lax.optimization_barrier(jnp.concatenate([v[0], rest], axis=1))
    return x[:, 0]


def square(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return x * x rounded to 23 bits, so that no compiler can join the product with a sum."""
    return jax.lax.reduce_precision(x * x, exponent_bits=8, mantissa_bits=22)


def round_up(x: Float[Array, "*n"], bits: int) -> Float[Array, "*n"]:
    """Round x > 0 up to the nearest float whose lowest `bits` of 24 significant bits are zero."""
    mask = jnp.uint32((1 << bits) - 1)
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((raw + mask) & ~mask, jnp.float32)


def words(seed: UInt32[Array, "2"], count: int) -> UInt32[Array, " count"]:
    """Draw random words by Threefry-2x32 of a counter, and use both halves of every block.

    JAX's own `bits` draws a block for each word and loops over rounds; here the rounds are written
    out, which takes a third of the time, and a stochastic codec spends most of its time here.
    """
    blocks = -(-count // 2)
    x = jnp.arange(blocks, dtype=jnp.uint32)
    y = x + jnp.uint32(blocks)
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for turn in _TURNS[i % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return jax.lax.optimization_barrier(jnp.stack([x, y])).reshape(-1)[:count]


def seed_of(key: PRNGKeyArray) -> UInt32[Array, "2"]:
    """Derive eight bytes from a key of any kind, which do not reveal the key."""
    return jr.bits(key, (2,), jnp.uint32)


def coins(key: PRNGKeyArray, sizes: list[int]) -> list[UInt16[Array, " n"]]:
    """Draw sixteen random bits per value, two values from each word.

    Sixteen is the number of bits that the fraction of an 8-bit code has in float32; a probability
    is off by at most 2**-17.
    """
    drawn = words(seed_of(key), -(-sum(sizes) // 2))
    both = jnp.concatenate([drawn & jnp.uint32(0xFFFF), drawn >> 16]).astype(jnp.uint16)
    return pieces(both, sizes)


def pieces(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Cut a vector from its front into parts of the given sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[end - n : end] for end, n in zip(ends, sizes, strict=True)]


def unit(coin: UInt16[Array, " n"]) -> Float[Array, " n"]:
    """Map coins to numbers strictly between 0 and 1."""
    return (coin.astype(jnp.float32) + 0.5) * 2.0**-16
