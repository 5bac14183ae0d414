"""Rows of different lengths as columns without gaps.

In:       target tokens of a batch, PAD where a row has ended.
Out:      a `Packing`: which token stands in which column, and how many columns are in use.
Promise:  every target that counts has exactly one column; columns of one time step stand
          together, fullest slot first; what is computed for unused columns is never read.
Not here: what is computed (`recurrent.py`, `packed_layout.py`, `loss.py`).

A loop over time processes rows side by side, in slots. Two rows share a slot, one after the
other: the longest with the shortest, and so on, so that slots have about the same length. The slots
that still run at a time step are the first slots. A step has one of four widths (all slots, three
quarters, a half, a quarter), and time is divided into one stage per width: all steps of a stage
have the same width, and the length of a stage is data.

Where a step must read more weights than a cache holds, half as many steps are worth more than even
slots: if rows are nearly full, each has a slot to itself (`alone`), in a stage before the others.

Rows that are cut as windows are all full but the last of a client, and the empty ones behind it in
its last batch (`full_rows`). There is nothing to pair then: each row has a slot, a step has all
slots or a half of them, and far fewer sizes are compiled. What is computed is right for any rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Int, Shaped

from fedlm.core.types import PAD, PyTree

T = TypeVar("T")
# With fewer columns, choosing a size costs more than skipping unused columns saves.
FEWEST_COLUMNS = 128
FEWEST_ROWS = 16
FULL = 7 / 8  # of all places hold a token: rows may be alone
# Compiled sizes for full rows: of the loss, and of products that fill all columns or a half.
FULL_ROW_LOSSES, FULL_ROW_PRODUCTS = 8, 2


class Packing(NamedTuple):
    """The place of each column's token in the batch.

    All fields are data (traced arrays); only the number of columns is fixed at compile time.
    """

    row: Int[Array, " columns"]
    time: Int[Array, " columns"]  # position in the row
    used: Bool[Array, " columns"]  # the column holds a token: a slot may end before its stage
    ends: Int[Array, " stages"]  # the first time step beyond each stage
    size: Int[Array, ""]  # number of leading columns that are computed

    def leading(self, columns: int) -> Packing:
        """Return the packing of the first columns alone."""
        row, time, used = (x[:columns] for x in (self.row, self.time, self.used))
        return self._replace(row=row, time=time, used=used)


def widths(batch: int, alone: bool = False, full_rows: bool = False) -> tuple[int, ...]:
    """Return the numbers of slots that a time step may have, widest first.

    >>> widths(16), widths(16, alone=True), widths(16, full_rows=True), widths(3)
    ((8, 6, 4, 2), (16, 8, 6, 4, 2), (16, 8), (3,))
    """
    if batch < FEWEST_ROWS or batch % 8:
        return (batch,)
    if full_rows:
        return (batch, batch // 2)
    paired = tuple(batch * part // 8 for part in (4, 3, 2, 1))
    return (batch, *paired) if alone else paired


def pack(targets: Int[Array, "batch seq"], alone: bool = False, full_rows: bool = False) -> Packing:
    """Assign columns to the targets that count; a row ends with its last target that is not PAD.

    With `alone`, rows that are nearly full have slots to themselves; with `full_rows`, all have.
    """
    batch, seq = targets.shape
    slots = widths(batch, full_rows=full_rows)[0]
    lengths = jnp.max(jnp.where(targets != PAD, jnp.arange(seq)[None] + 1, 0), axis=1)
    first, second = _slots(lengths, slots)
    load = lengths[first] + jnp.where(first == second, 0, lengths[second])
    if alone and len(first) < batch:
        full = jnp.sum(lengths) > FULL * batch * seq
        order, empty = jnp.argsort(-lengths, stable=True), (0, batch - len(first))
        first, second = (jnp.where(full, order, jnp.pad(x, empty)) for x in (first, second))
        load = jnp.where(full, lengths[order], jnp.pad(load, empty))
    until = lengths[first]
    steps = batch * seq // slots
    slot, when, ends, size = _stages(load, steps, batch * seq, widths(batch, alone, full_rows))
    # One gather of four numbers: each gather is a kernel that XLA compiles.
    first, second, until, load = jnp.stack([first, second, until, load], 1)[slot].T
    later = when >= until
    time = when - jnp.where(later, until, 0)
    return Packing(
        row=jnp.where(later, second, first),
        time=jnp.minimum(time, seq - 1),
        used=when < load,
        ends=ends,
        size=size,
    )


def _slots(
    lengths: Int[Array, " batch"], slots: int
) -> tuple[Int[Array, " slots"], Int[Array, " slots"]]:
    """Return the first and the second row of each slot, the fullest slot first."""
    order = jnp.argsort(-lengths, stable=True)
    if slots == lengths.shape[0]:
        return order, order
    first, second = order[:slots], order[: slots - 1 : -1]
    fullest = jnp.argsort(-(lengths[first] + lengths[second]), stable=True)
    return first[fullest], second[fullest]


def _stages(load: Int[Array, " slots"], steps: int, columns: int, widths: tuple[int, ...]):  # type: ignore[no-untyped-def]
    """Return slot and time step of each column, the end of each stage, and the column count."""
    running = jnp.sum(load[:, None] > jnp.arange(steps)[None], axis=0)
    ends = jnp.stack([jnp.sum(running > narrower) for narrower in (*widths[1:], 0)])
    wide = jnp.zeros(steps, jnp.int32)
    for width, narrower in zip(widths, (*widths[1:], 0), strict=True):
        wide = jnp.where((running > narrower) & (running <= width), width, wide)
    after = jnp.cumsum(wide)
    column = jnp.arange(columns)
    when = jnp.sum(after[None, :] <= column[:, None], axis=1)
    begin = (after - wide)[jnp.minimum(when, steps - 1)]
    slot = jnp.where(when < steps, column - begin, 0)
    return slot, when, ends.astype(jnp.int32), after[-1].astype(jnp.int32)


def gather(packing: Packing, tokens: Int[Array, "batch seq"]) -> Int[Array, " columns"]:
    """Return the token of each column, or PAD if the column is not in use."""
    return jnp.where(packing.used, tokens[packing.row, packing.time], PAD)


def choices(columns: int, sizes: int) -> tuple[int, ...]:
    """Return `sizes` evenly spaced numbers of columns, or all of them alone if they are few.

    >>> choices(320, 4), choices(32, 4)
    ((80, 160, 240, 320), (32,))
    """
    if columns < FEWEST_COLUMNS:
        return (columns,)
    return tuple(-(-columns * part // sizes) for part in range(1, sizes + 1))


def enough(used: Int[Array, ""], choice: tuple[int, ...], compute: Callable[[int], T]) -> T:
    """Return `compute(n)` for the least of the `choice` that holds the columns in use.

    Every size is compiled, one is run; the shape of the result must not depend on `n`.
    """
    if len(choice) == 1:
        return compute(choice[0])
    which = jnp.sum(used > jnp.asarray(choice[:-1]))
    branches = [lambda n=n: compute(n) for n in choice]
    chosen: T = jax.lax.switch(which, branches)
    return chosen


def nats_of_enough(
    compute: Callable[[int, PyTree, PyTree], Array],
    choice: tuple[int, ...],
    used: Int[Array, ""],
    model: PyTree,
    batch: PyTree,
) -> Array:
    """Return `compute(n, model, batch)` for the least of the `choice` that holds those in use.

    The gradient for the model is computed with the value, in the same branch: all that lies
    between has `n` columns then, and nothing is padded, cut or kept for a backward pass.

        forward    model, batch -> nats;  keeps: d_model, of leaves that are trained
        backward   g = d_nats  ->  model: g d_model
    """

    @jax.custom_vjp
    def nats(used, model, batch):  # type: ignore[no-untyped-def]
        return enough(used, choice, lambda n: compute(n, model, batch))

    def forward(used, model, batch):  # type: ignore[no-untyped-def]
        leaves, structure = jax.tree.flatten(model)
        used, batch = jax.tree.map(lambda x: x.value, (used, batch))
        trained = [leaf.value for leaf in leaves if leaf.perturbed]

        def of(n, trained):  # type: ignore[no-untyped-def]
            left = iter(trained)
            whole = [next(left) if leaf.perturbed else leaf.value for leaf in leaves]
            return compute(n, jax.tree.unflatten(structure, whole), batch)

        value, made = enough(used, choice, lambda n: jax.value_and_grad(partial(of, n))(trained))
        left = iter(made)
        gradient = [next(left) if leaf.perturbed else None for leaf in leaves]
        return value, jax.tree.unflatten(structure, gradient)

    def backward(gradient, d_nats):  # type: ignore[no-untyped-def]
        scale = dense_zero(d_nats)
        return None, jax.tree.map(lambda x: x * scale.astype(x.dtype), gradient), None

    nats.defvjp(forward, backward, symbolic_zeros=True)
    return nats(used, model, batch)


def leading(
    x: Shaped[Array, "columns width"], factors: Shaped[Array, " columns"], size: int
) -> Shaped[Array, "size width"]:
    """Return the first rows, each times its factor.

    Sizes are many, and XLA takes about 30 ms to compile a kernel of whatever length, but compiles
    equal kernels once. So rows are cut out in this one way, also where the factors are a mask.
    """
    return (x * factors[:, None]).astype(x.dtype)[:size]


def dense_zero(gradient: Any) -> Array:
    """Return a gradient as an array, also if JAX knows it to be zero and passes a symbol."""
    if isinstance(gradient, SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype)
    return gradient
