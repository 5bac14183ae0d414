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
from jaxtyping import Array, Float

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


class Whole:
    """The layout of unpacked rows: features are `(batch, seq, embed)`."""

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every position."""
        return layer(x)

    def rows(self, compute: Callable[..., Array], *x: Array) -> Array:
        """Apply `compute` to rows."""
        return compute(*x)


class Packed:
    """The layout of packed columns: features are `(columns, embed)`.

    Columns become rows only for computations that mix positions.
    """

    def __init__(self, packing: Packing, batch: int, seq: int) -> None:
        self.shape, places = (batch, seq), batch * seq
        self.home = packing.row * seq + packing.time
        at = jnp.where(packing.used, self.home, places)
        every = jnp.arange(len(at))
        self.column = jnp.zeros(places, every.dtype).at[at].set(every, mode="drop")

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every column."""
        return layer(x, product)

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
