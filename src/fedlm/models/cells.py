"""Recurrent cells: the arithmetic of one time step, without its matrix products.

In:       pre-activations of all gates, stacked gate by gate, and the cell state.
Out:      the emitted vector (before projection) and the next cell state.
Promise:  each cell is its published equations; the scale-invariant one does not change when
          the pre-activations of a gate are multiplied by a positive number.
Not here: weights and sequences (`recurrent.py`).

Arrays are feature-major, `(units, batch)`: one column a row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

State = Float[Array, "units batch"]
Gates = Float[Array, "gates_times_units batch"]


class Cell(NamedTuple):
    """How many gates the cell has, and one step of it."""

    gates: int
    step: Callable[[Gates, State], tuple[State, State]]


def max_norm(x: State, floor: float) -> State:
    """`MaxN`: divides a vector by its largest magnitude, and leaves a zero vector zero."""
    return x / jnp.maximum(jnp.max(jnp.abs(x), axis=0, keepdims=True), floor)


def lstm(z: Gates, c: State) -> tuple[State, State]:
    """Input, forget and output gates, and a candidate."""
    i, f, o, g = jnp.split(z, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def cifg(z: Gates, c: State) -> tuple[State, State]:
    """Coupled input and forget gates: what is not kept is replaced."""
    f, o, g = jnp.split(z, 3)
    keep = jax.nn.sigmoid(f)
    c = keep * c + (1.0 - keep) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def si_cifg(floor: float = 1e-6) -> Callable[[Gates, State], tuple[State, State]]:
    """CIFG with sigmoid replaced by MaxN of ReLU, and tanh by MaxN."""

    def step(z: Gates, c: State) -> tuple[State, State]:
        f, o, g = jnp.split(z, 3)
        keep = max_norm(jax.nn.relu(f), floor)
        c = keep * c + (1.0 - keep) * max_norm(g, floor)
        return max_norm(jax.nn.relu(o), floor) * max_norm(c, floor), c

    return step


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, lstm),
    "cifg": Cell(3, cifg),
    "si-cifg": Cell(3, si_cifg()),
}
