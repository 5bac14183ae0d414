"""A grid for noisy sums, so that their lowest bits tell nothing.

In:       a round's sum, noise for it in 32 bits, the key of the round.
Out:      the sum plus the noise, on a grid.
Promise:  what comes out is a function of an integer (the sum, rounded) plus another that was drawn
          without looking at the sum; the noise is larger by the factor by which rounding raises
          the sensitivity, so that epsilon holds for the rounded sum.
Not here: the law of the noise (`noise.py`, `correlated.py`), its cost (`cost.py`).

Why. Noise in floating point takes only some values, and x + n is rounded once more: which results
can occur, and how often, depends on x far beyond the law of n. Whoever sees all bits of a sum with
such noise can tell x from a neighbour though epsilon is small (Mironov 2012).

How. Let s be the noise's standard deviation times the clip norm C, and d the size of the sum. A
cell c is the power of two with s 2^-13 < c <= s 2^-12, and the grid is g = c 2^-a. With the sum x
and drawn noise n:

    k = round(x / g)       m = floor(n (1 + h) / c) 2^a + f      f = floor(2^(a+1) z)
    released: g (k + m), or rather a 32-bit number next to it

where z is another standard normal: f is fine noise of two cells. k and m are integers of 43 bits,
held in two words, so that k + m is exact; the 32-bit number is computed from k + m alone. All
scaling of x is by powers of two, hence exact.

What is defended. The released numbers are post-processing of k + m, and m does not depend on x. So
x leaves nothing behind but the mean of a fixed law on all integers within its reach: neighbours
have the same set of possible results. As to that law:
- Sensitivity. Rounding moves each of two neighbouring numbers by at most g / 2, so in a round that
  it joins a client moves g k by at most C + g sqrt(d) in length, and not at all in another round.
  The noise is multiplied by 1 + h with h >= g sqrt(d) / C. a is the least in 4 to 14 with
  h <= 2^-10, if there is any: at s = C, h is 0.0005 for 20 million numbers.
- Law. Rounding n down to cells is the same as adding to n an error inside a cell, which depends on
  n. Added f makes that harmless: the characteristic function of f is exp(-79) where the cells'
  pattern repeats, so up to that c floor(n / c) + g f has the law of n + c U + g f with U uniform
  and independent. That is n plus independent noise on a mechanism whose cost is that of n alone:
  post-processing. In correlated noise the same holds given the past, as every round draws afresh;
  memories keep n, which is not rounded.
- Ties. Rounding down treats all cells alike; to the nearest even number it would not.

What is not defended. n and z are 32-bit normals: each has the law of the true normal only as well
as 32-bit logarithms and products compute it (relative error near 2^-22), and ends at 9.4
(probability 2^-64 per pair of numbers). Clients' updates are summed in 32 bits before this, and
sensitivity is that of exact sums: in the worst case b clients of one cohort lose b^2 2^-23 clip
norms to rounding. Time is not hidden, but no step here takes longer for other values.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedlm.core import tree
from fedlm.core.chacha import CipherKey
from fedlm.core.types import Params
from fedlm.privacy.normal import standard_normal

CELL_BITS = 12  # a cell in units of the noise's standard deviation
FEWEST, MOST = 4, 14  # bits of a cell
FINE = 2**30  # the stream of a key that fine noise is drawn from
SLACK = 2.0**-20  # for the rounding of the factors
LARGEST = 2.0**30  # cells; what is larger is cut, which moves no two sums apart
LEAST = 2.0**-6  # the least standard deviation that cells are made for: 4096 clip norms fit


def fine_bits(stddev: float, size: int) -> int:
    """Return a: how many bits of the grid are below a cell."""
    wanted = math.ceil(math.log2(max(stddev, LEAST) * math.sqrt(max(size, 1)))) + 10 - CELL_BITS
    return min(max(wanted, FEWEST), MOST)


def inflation(stddev: float, size: int) -> float:
    """Return 1 + h: the factor on the noise that pays for the rounding of a sum of `size` numbers.

    >>> round(inflation(1.0, 20_000_000), 6)
    1.000534
    """
    grid = max(stddev, LEAST) * 2.0 ** -(CELL_BITS + fine_bits(stddev, size))
    return (1 + grid * math.sqrt(size)) * (1 + SLACK)


@functools.partial(jax.jit, static_argnames="stddev", inline=True)
def add_on_grid(
    total: Params,
    noise: Params,
    stddev: float,
    clip_norm: float | Float[Array, ""],
    key: CipherKey,
) -> Params:
    """Return the sum plus `stddev` times the clip norm times the noise, on the grid.

    Fine noise is drawn from a stream of the key that nobody else uses. NaN in the noise stays.
    """
    size = tree.size(total)
    bits, factor = fine_bits(stddev, size), inflation(stddev, size)
    unit = jnp.asarray(clip_norm, jnp.float32)
    exponent = jnp.frexp(max(stddev, LEAST) * unit)[1] - 1
    cell = jnp.ldexp(jnp.float32(1), exponent - CELL_BITS)
    step = factor * stddev * unit / cell
    fine = standard_normal(key, total, FINE)

    def add(x: Array, n: Array, z: Array) -> Array:
        coarse, rest = _split(x.astype(jnp.float32), cell, bits)
        coarse += _cells(jnp.floor(n * step))
        rest += jnp.floor(z * 2.0 ** (bits + 1)).astype(jnp.int32)
        # Half a cell, because floor(n / c) is by so much too low in the mean.
        carry = (rest + 2**bits) >> bits
        coarse, rest = coarse + carry, rest + 2 ** (bits - 1) - (carry << bits)
        noisy = (coarse.astype(jnp.float32) + rest.astype(jnp.float32) * 2.0**-bits) * cell
        return jnp.where(jnp.isnan(n), jnp.nan, noisy).astype(x.dtype)

    return jax.tree.map(add, total, noise, fine)


def _split(x: Array, cell: Array, bits: int) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Return x as whole cells, and as the nearest number of grid steps beyond them."""
    whole = jnp.round(x / cell)
    rest = jnp.round((x - whole * cell) * (2.0**bits / cell))
    return _cells(whole), rest.astype(jnp.int32)


def _cells(x: Array) -> Int[Array, "..."]:
    return jnp.clip(x, -LARGEST, LARGEST).astype(jnp.int32)
