"""Rows as they are, or without the places where a short row holds nothing.

In:       features of positions, layers, computations on rows.
Out:      features of positions.
Promise:  where a target counts, value and gradient are the same in both layouts; the products
          of a packed batch grow with its tokens, not with its places.
Not here: which token stands in which column (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedlm.models.layers import Linear
from fedlm.models.packing import Packing, dense_zero, enough

SIZES = 8  # compiled sizes of a product, forward and backward, for every layer


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
        columns = batch * seq
        self.shape, self.size = (batch, seq), packing.size
        self.home = packing.row * seq + packing.time
        at = jnp.where(packing.used, self.home, columns)
        every = jnp.arange(columns)
        self.column = jnp.zeros_like(every).at[at].set(every, mode="drop")

    def product(self, layer: Linear, x: Array) -> Array:
        """Apply a linear layer to every column in use."""
        return layer(x, lambda weight, x: product(self.size, weight, x))

    def rows(self, compute: Callable[..., Array], *x: Array) -> Array:
        """Unpack columns into rows, apply `compute`, and pack the result.

        Places beyond the end of a row hold the features of some other token.
        """
        made = compute(*(part[self.column].reshape(*self.shape, -1) for part in x))
        return made.reshape(made.shape[0] * made.shape[1], -1)[self.home]


Layout = Whole | Packed


@jax.custom_vjp
def product(
    size: Int[Array, ""], weight: Float[Array, "out in"], x: Float[Array, "columns in"]
) -> Float[Array, "columns out"]:
    """Return `x W^T` for the first `size` columns, and zero for the others.

    Here n is the least compiled size that holds `size` columns.

        forward    y[:n] = x[:n] W^T,  y[n:] = 0       keeps: size, W, x
        backward   d_W = d_y[:n]^T x[:n]               unless W is frozen
                   d_x[:n] = d_y[:n] W,  d_x[n:] = 0   unless x depends on nothing that is trained
    """
    return _product(size, weight, x)


# Traced and lowered once per shape, not once per layer: they are many branches.
@jax.jit
def _product(size, weight, x):  # type: ignore[no-untyped-def]
    columns = x.shape[0]

    def first(n):  # type: ignore[no-untyped-def]
        return jnp.pad(x[:n] @ weight.T, ((0, columns - n), (0, 0)))

    return enough(size, columns, first, SIZES)


def _forward(size, weight, x):  # type: ignore[no-untyped-def]
    # What one gradient does not need is not kept: a frozen model has more layers than inputs.
    kept = size.value, weight.value, x.value if weight.perturbed else None
    return _product(size.value, weight.value, x.value), kept


def _backward(saved, d_y):  # type: ignore[no-untyped-def]
    return (None, *_gradients(*saved, dense_zero(d_y)))


@jax.jit
def _gradients(size, weight, x, d_y):  # type: ignore[no-untyped-def]
    columns = d_y.shape[0]

    def first(n):  # type: ignore[no-untyped-def]
        d_x = jnp.pad(d_y[:n] @ weight, ((0, columns - n), (0, 0)))
        return (None if x is None else d_y[:n].T @ x[:n]), d_x

    return enough(size, columns, first, SIZES)


product.defvjp(_forward, _backward, symbolic_zeros=True)
