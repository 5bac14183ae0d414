"""Rows as they are, or without the places where a short row holds nothing.

In:       features of positions, layers, computations on rows.
Out:      features of positions.
Promise:  where a target counts, value and gradient are the same in both layouts; a packed batch
          costs what its tokens cost, not its places.
Not here: which token stands in which column, and how many columns there are (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedlm.models.layers import Linear, weight_gradient
from fedlm.models.packing import Packing, dense_zero

SIZES = 8  # compiled sizes of a model, each with a backward pass
# Of all blocks together. XLA prepares every product of every size anew at each start, also of a
# program that was kept: about 5 ms each, 40 s for 30 blocks with eight sizes (docs/log.md).
SIZES_OF_ALL_BLOCKS = 96


def sizes_of(blocks: int) -> int:
    """Return how many sizes of a model of so many blocks are compiled.

    >>> sizes_of(3), sizes_of(12), sizes_of(30), sizes_of(200)
    (8, 8, 3, 2)
    """
    return max(2, min(SIZES, SIZES_OF_ALL_BLOCKS // max(1, blocks)))


def _one(number: Int[Array, ""]) -> Float[Array, ""]:
    """Return one, made of some number so that no compiler can know it."""
    return jnp.where(number == jnp.iinfo(number.dtype).min, 2.0, 1.0)


def _add(x: Array, y: Array, one: Array) -> Array:
    """Return `x + y`, and see to it that XLA computes the sum, and its gradient, only once.

    XLA makes additions a part of each kernel that reads their result. A stream to which every block
    adds is then added up from its beginning again, in every kernel of every block: at twelve blocks
    that was a sixth of a step. It repeats no division, and a division by one changes no bit
    (`tree.once` does the same for numbers).
    """
    return (x + y) / one.astype(x.dtype)


class Whole:
    """The layout of unpacked rows: features are `(batch, seq, embed)`.

    Where a gradient is wanted it takes any `number` of the batch, which `add` needs.
    """

    def __init__(self, number: Int[Array, ""] | None = None) -> None:
        self.one = None if number is None else _one(number)

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every position."""
        return layer(x)

    def add(self, x: Array, y: Array) -> Array:
        """Add to the stream that runs through all blocks."""
        return x + y if self.one is None else _add(x, y, self.one)

    def rows(self, compute: Callable[..., Array], *x: Array) -> Array:
        """Apply `compute` to rows."""
        return compute(*x)


class Packed:
    """The layout of packed columns: features are `(columns, embed)`.

    Columns become rows only for computations that mix positions.
    """

    def __init__(self, packing: Packing, batch: int, seq: int) -> None:
        self.shape, places = (batch, seq), batch * seq
        self.one = _one(packing.size)
        self.home = packing.row * seq + packing.time
        at = jnp.where(packing.used, self.home, places)
        every = jnp.arange(len(at))
        self.column = jnp.zeros(places, every.dtype).at[at].set(every, mode="drop")

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every column."""
        return layer(x, product)

    def add(self, x: Array, y: Array) -> Array:
        """Add to the stream that runs through all blocks."""
        return _add(x, y, self.one)

    def rows(self, compute: Callable[..., Array], *x: Array) -> Array:
        """Unpack columns into rows, apply `compute`, and pack the result.

        Places beyond the end of a row hold the features of some other token.
        """
        made = compute(*(part[self.column].reshape(*self.shape, -1) for part in x))
        return made.reshape(made.shape[0] * made.shape[1], -1)[self.home]


Layout = Whole | Packed


@jax.custom_vjp
def product(
    weight: Float[Array, "out in"], x: Float[Array, "columns in"]
) -> Float[Array, "columns out"]:
    """Return `x W^T`.

    forward    y = x W^T           keeps: W, x
    backward   d_W = d_y^T x       unless W is frozen
               d_x = d_y W
    """
    return x @ weight.T


def _forward(weight, x):  # type: ignore[no-untyped-def]
    # What one gradient does not need is not kept: a frozen model has more layers than inputs.
    kept = weight.value, x.value if weight.perturbed else None
    return product(weight.value, x.value), kept


def _backward(saved, d_y):  # type: ignore[no-untyped-def]
    weight, x = saved
    d_y = dense_zero(d_y)
    return None if x is None else weight_gradient(d_y, x), d_y @ weight


product.defvjp(_forward, _backward, symbolic_zeros=True)
