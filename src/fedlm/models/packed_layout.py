"""Rows as they are, or without the places where a short row holds nothing.

In:       features of positions, layers, computations on rows.
Out:      features of positions.
Promise:  where a target counts, value and gradient are the same in both layouts; the products
          of a packed batch grow with its tokens, not with its places.
Not here: which token stands in which column (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedlm.models.layers import Linear, weight_gradient
from fedlm.models.packing import Packing, dense_zero, enough

SIZES = 8  # compiled sizes of a product, forward and backward, for every layer
# Of all blocks together. XLA prepares every product of every size anew at each start, also of a
# program that was kept: about 5 ms each, 40 s for 30 blocks with eight sizes (docs/log.md).
SIZES_OF_ALL_BLOCKS = 96


def sizes_of(blocks: int) -> int:
    """Return how many sizes of a product are compiled in a model of so many blocks.

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

    def __init__(self, packing: Packing, batch: int, seq: int, sizes: int = SIZES) -> None:
        columns = batch * seq
        self.sizes = sizes
        self.shape, self.size = (batch, seq), packing.size
        self.home = packing.row * seq + packing.time
        at = jnp.where(packing.used, self.home, columns)
        every = jnp.arange(columns)
        self.column = jnp.zeros_like(every).at[at].set(every, mode="drop")

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every column in use."""
        return layer(x, lambda weight, x: product(self.sizes, self.size, weight, x))

    def rows(self, compute: Callable[..., Array], *x: Array) -> Array:
        """Unpack columns into rows, apply `compute`, and pack the result.

        Places beyond the end of a row hold the features of some other token.
        """
        made = compute(*(part[self.column].reshape(*self.shape, -1) for part in x))
        return made.reshape(made.shape[0] * made.shape[1], -1)[self.home]


Layout = Whole | Packed


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    sizes: int, size: Int[Array, ""], weight: Float[Array, "out in"], x: Float[Array, "columns in"]
) -> Float[Array, "columns out"]:
    """Return `x W^T` for the first `size` columns, and zero for the others.

    Here n is the least of so many compiled `sizes` that holds `size` columns.

        forward    y[:n] = x[:n] W^T,  y[n:] = 0       keeps: size, W, x
        backward   d_W = d_y[:n]^T x[:n]               unless W is frozen
                   d_x[:n] = d_y[:n] W,  d_x[n:] = 0   unless x depends on nothing that is trained
    """
    return _product(sizes, size, weight, x)


# Traced and lowered once per shape, not once per layer: they are many branches.
@partial(jax.jit, static_argnums=0)
def _product(sizes, size, weight, x):  # type: ignore[no-untyped-def]
    columns = x.shape[0]

    def first(n):  # type: ignore[no-untyped-def]
        return jnp.pad(x[:n] @ weight.T, ((0, columns - n), (0, 0)))

    return enough(size, columns, first, sizes)


def _forward(sizes, size, weight, x):  # type: ignore[no-untyped-def]
    # What one gradient does not need is not kept: a frozen model has more layers than inputs.
    kept = size.value, weight.value, x.value if weight.perturbed else None
    return _product(sizes, size.value, weight.value, x.value), kept


def _backward(sizes, saved, d_y):  # type: ignore[no-untyped-def]
    return (None, *_gradients(sizes, *saved, dense_zero(d_y)))


@partial(jax.jit, static_argnums=0)
def _gradients(sizes, size, weight, x, d_y):  # type: ignore[no-untyped-def]
    columns = d_y.shape[0]

    def first(n):  # type: ignore[no-untyped-def]
        d_x = jnp.pad(d_y[:n] @ weight, ((0, columns - n), (0, 0)))
        return (None if x is None else weight_gradient(d_y[:n], x[:n])), d_x

    return enough(size, columns, first, sizes)


product.defvjp(_forward, _backward, symbolic_zeros=True)
