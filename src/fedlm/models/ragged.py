"""Rows of different lengths as columns without gaps.

In:       target tokens of a batch, PAD where a row has ended.
Out:      a `Packing`: which token stands in which column, and how many columns are in use.
Promise:  every target that counts has exactly one column; columns of one time step stand
          together, longest row first; what is computed for unused columns is never read.
Not here: what is computed (`recurrent.py`, `loss.py`).

A batch is sorted by falling length, so the rows that still run at a time step are its first
ones. Widths are few (the batch, three quarters, a half, a quarter of it), and time falls into
as many stages: within a stage every step has the same width, and a stage's length is data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fedlm.core.types import PAD

T = TypeVar("T")
# Below this, choosing a size costs more than the columns it leaves out.
FEWEST_COLUMNS = 128
FEWEST_ROWS = 16


class Packing(NamedTuple):
    """Where each column's token is; all of it is data, the number of columns is not."""

    row: Int[Array, " columns"]
    time: Int[Array, " columns"]
    used: Bool[Array, " columns"]
    ends: Int[Array, " stages"]  # the first time step beyond each stage
    size: Int[Array, ""]  # columns in use


def widths(batch: int) -> tuple[int, ...]:
    """How wide a time step may be.

    >>> widths(16), widths(3)
    ((16, 12, 8, 4), (3,))
    """
    if batch < FEWEST_ROWS or batch % 4:
        return (batch,)
    return tuple(batch * part // 4 for part in (4, 3, 2, 1))


def pack(targets: Int[Array, "batch seq"]) -> Packing:
    """Columns for the targets that count; a row ends with its last one."""
    batch, seq = targets.shape
    time = jnp.arange(seq)
    lengths = jnp.max(jnp.where(targets != PAD, time[None] + 1, 0), axis=1)
    order = jnp.argsort(-lengths, stable=True)
    return _columns(order, jnp.sum(lengths[:, None] > time[None], axis=0), batch)


def _columns(order: Int[Array, " batch"], running: Int[Array, " seq"], batch: int) -> Packing:
    """`running` rows are left at each time step."""
    steps = widths(batch)
    seq = running.shape[0]
    ends = jnp.stack([jnp.sum(running > narrower) for narrower in (*steps[1:], 0)])
    wide = jnp.zeros(seq, jnp.int32)
    for width, narrower in zip(steps, (*steps[1:], 0), strict=True):
        wide = jnp.where((running > narrower) & (running <= width), width, wide)
    after = jnp.cumsum(wide)
    column = jnp.arange(batch * seq)
    when = jnp.sum(after[None, :] <= column[:, None], axis=1)
    used = when < seq
    when = jnp.minimum(when, seq - 1)
    which = jnp.where(used, column - (after - wide)[when], 0)
    return Packing(order[which], when, used, ends.astype(jnp.int32), after[-1].astype(jnp.int32))


def gather(packing: Packing, tokens: Int[Array, "batch seq"]) -> Int[Array, " columns"]:
    """The token of each column; PAD where a column is not in use."""
    return jnp.where(packing.used, tokens[packing.row, packing.time], PAD)


def enough(used: Int[Array, ""], columns: int, compute: Callable[[int], T]) -> T:
    """`compute(n)` for the least of eight sizes `n` that holds the columns in use.

    Every size is compiled, one is run; what `compute` returns must not depend on `n` in shape.
    """
    if columns < FEWEST_COLUMNS:
        return compute(columns)
    sizes = [-(-columns * eighth // 8) for eighth in range(1, 9)]
    which = jnp.sum(used > jnp.asarray(sizes[:-1]))
    branches = [lambda n=n: compute(n) for n in sizes]
    chosen: T = jax.lax.switch(which, branches)
    return chosen
