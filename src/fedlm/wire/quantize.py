"""Stochastic rounding to a uniform grid of 2 to 65,536 levels.

In:       an update, a width of 1 to 16 bits, and optionally a block size.
Out:      for each block (by default a whole tensor) its least value and its step, then a packed
          code for each value.
Promise:  unbiased; a constant tensor arrives exactly; the size depends on shapes alone.
Not here: packing (`pack.py`), ternary values (`ternary.py`).

With k = 2**bits levels, lo and hi the least and greatest value of a block:

    step = (hi - lo) / (k - 1), rounded up to 24 - bits significant bits
    u    = (v - lo) / step
    code = floor(u) + 1 with probability u - floor(u), else floor(u)
    v'   = lo + code * step

Rounding the step up makes `code * step` exact in float32, so that v' is the same number however
it is computed; it widens the grid by at most 2**(bits - 23) of itself (0.8 percent at 16 bits,
0.003 percent at 8).

Gain. Let B be the size of a block and d that widening. A value moves by less than a step, and
lo and hi are both in the block, so ||v||^2 >= lo^2 + hi^2 >= (hi - lo)^2 / 2 and the move of a
block is at most sqrt(B) * step <= sqrt(2 B) (1 + d) ||v|| / (k - 1). Values also stay within
[lo, hi + d (hi - lo)], hence are at most (1 + 2 d) max|v| each. The smaller of the two bounds is
`norm_gain`. With one block per tensor no bound holds for tensors of every size: the gain is
infinite, and a private run must clip the decoded update once more.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedlm.core.errors import WireError, require
from fedlm.core.types import Codec
from fedlm.wire.bitwise import SLACK, round_up, unit
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack
from fedlm.wire.scheme import Coins, LeafScheme, Vector, per_leaf

LEAST_STEP = 2.0**-120  # the least step that float32 can still round up and divide by


class Grid(NamedTuple):
    """One tensor, quantised: the grid of each block and the code of each value."""

    lo: Any  # blocks
    step: Any  # blocks
    code: Any  # n


def uniform(bits: int = 8, block: int | None = None) -> Codec:
    """Make a codec of `bits` per value and eight bytes per block (None: a tensor is one block)."""
    require(1 <= bits <= 16, "bits", bits, "1 to 16")
    require(block is None or block >= 2, "block", block, "at least 2, or nothing")
    return per_leaf(
        LeafScheme(
            name=f"uniform-{bits}" + (f"-block{block}" if block else ""),
            squeeze=lambda x, coin: _squeeze(x, coin, bits, block or len(x)),
            expand=lambda grid, size: _expand(grid, size, block or size),
            write=lambda grid, size: _write(grid, bits),
            read=lambda reader, size: _read(reader, size, bits, _blocks(size, block)),
            leaf_bytes=lambda size: 8 * _blocks(size, block) + packed_bytes(size, bits),
            norm_gain=_gain(bits, block),
            random=True,
        )
    )


def _blocks(size: int, block: int | None) -> int:
    return -(-size // block) if block else 1


def _gain(bits: int, block: int | None) -> float:
    if block is None:
        return math.inf
    widening = 2.0 ** (bits - 23)
    by_step = 1 + math.sqrt(2 * block) * (1 + widening) / (2**bits - 1)
    return SLACK * min(by_step, math.sqrt(block) * (1 + 2 * widening))


def _rows(x: Vector, block: int) -> Float[Array, "blocks block"]:
    """Cut a vector into blocks and fill the last one with the last value, which keeps lo and hi."""
    short = -len(x) % block
    return (jnp.pad(x, (0, short), mode="edge") if short else x).reshape(-1, block)


def _squeeze(x: Vector, coin: Coins | None, bits: int, block: int) -> Grid:
    assert coin is not None
    top = 2**bits - 1
    rows = _rows(x, block)
    lo, hi = jnp.min(rows, axis=1), jnp.max(rows, axis=1)
    # A product, because compilers do not always divide by a constant in the same way.
    step = jnp.maximum(round_up((hi - lo) * (1 / top), bits), LEAST_STEP)
    u = ((rows - lo[:, None]) / step[:, None]).reshape(-1)[: len(x)]
    floor = jnp.floor(u)
    code = floor + (unit(coin) < u - floor)
    width = jnp.uint8 if bits <= 8 else jnp.uint16
    return Grid(lo, jnp.where(hi > lo, step, 0.0), jnp.minimum(code, top).astype(width))


def _expand(grid: Grid, size: int, block: int) -> Vector:
    short = -size % block
    code = jnp.pad(grid.code, (0, short)).reshape(-1, block).astype(jnp.float32)
    values = grid.lo[:, None] + code * grid.step[:, None]
    return values.reshape(-1)[:size]


def _write(grid: Grid, bits: int) -> bytes:
    lo, step = (x.astype("<f4").tobytes() for x in (grid.lo, grid.step))
    return lo + step + pack(grid.code, bits)


def _read(reader: Reader, size: int, bits: int, blocks: int) -> Grid:
    lo, step = reader.finite(blocks), reader.finite(blocks)
    greatest = lo.astype(np.float64) + (2**bits - 1) * step.astype(np.float64)
    if (step < 0).any() or (np.abs(greatest) > np.finfo(np.float32).max).any():
        raise WireError("frame holds a grid that leaves the range of float32.")
    return Grid(lo, step, unpack(reader, size, bits))
