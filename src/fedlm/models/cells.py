"""Recurrent cells: the arithmetic of one time step, without its matrix products.

In:       pre-activations, one array per gate, and the cell state.
Out:      the emitted vector (before projection) and the next cell state.
Promise:  each cell is its published equations; the scale-invariant one does not change when
          the pre-activations of a gate are multiplied by a positive number.
Not here: weights and sequences (`recurrent.py`).

Arrays are `(batch, units)`: one row per row of the batch. Cells compare by value: two cells with
the same options are equal, so programs compiled for one cell serve the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

State = Float[Array, "batch units"]
Floor = float | Float[Array, "batch 1"]  # one for all rows, or one for each
Gates = Sequence[State]


class Cell(Protocol):
    """A recurrent cell: its number of gates, and one time step."""

    @property
    def gates(self) -> int: ...

    def step(self, z: Gates, c: State) -> tuple[State, State]: ...


def max_norm(x: State, floor: Floor) -> State:
    """Divide a vector by its largest magnitude (`MaxN`); a zero vector stays zero."""
    return x / jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), floor)


def l2_norm(x: State, floor: Floor) -> State:
    """Divide a vector by its Euclidean length."""
    square = jnp.sum(jnp.square(x), axis=1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, floor**2))


def rms_norm(x: State, floor: Floor) -> State:
    """Divide a vector by its root mean square."""
    square = jnp.mean(jnp.square(x), axis=1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, floor**2))


def power_norm(power: int) -> Callable[[State, Floor], State]:
    """Return the division by the p-norm, a smooth bound of the largest magnitude from above.

    It has the same degree as the maximum, so that it is as invariant; its gradient spreads over
    all large units and has no jump where another unit becomes the largest.
    """

    def norm(x: State, floor: Floor) -> State:
        # Neither value nor gradient depends on `most`: it keeps powers from overflowing.
        most = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), floor)
        y = x / jax.lax.stop_gradient(most)
        total = jnp.sum(y**power, axis=1, keepdims=True)  # at least one, unless all are tiny
        return y * jnp.maximum(total, 0.5) ** (-1.0 / power)

    return norm


MEASURES: dict[str, Callable[[State, Floor], State]] = {
    "max": max_norm,
    "p8": power_norm(8),
    "p16": power_norm(16),
    "l2": l2_norm,
    "rms": rms_norm,
    "none": lambda x, floor: x,
}
SOFTNESS = 0.2  # of the soft rectifier, in root mean squares of its vector


def soft_relu(x: State) -> State:
    """Return a ReLU with a round corner, whose width is a share of the vector's own size.

    So it has the degree of ReLU, and what it is divided by never falls far below that size.
    """
    size = jnp.maximum(jnp.mean(jnp.square(x), axis=1, keepdims=True), 1e-24)
    return 0.5 * (x + jnp.sqrt(jnp.square(x) + SOFTNESS**2 * size))


RECTIFIERS: dict[str, Callable[[State], State]] = {"relu": jax.nn.relu, "soft": soft_relu}


def _gates(z: Gates, layer_norm: bool) -> Gates:
    return [_standardize(part) for part in z] if layer_norm else z


def _standardize(x: State) -> State:
    """Apply layer norm over the units of one gate, without gain or shift."""
    x = x - jnp.mean(x, axis=1, keepdims=True)
    return rms_norm(x, 1e-6)


@dataclass(frozen=True)
class Lstm:
    """LSTM cell: input, forget and output gates, and a candidate."""

    layer_norm: bool = False
    gates: int = 4

    def step(self, z: Gates, c: State) -> tuple[State, State]:
        i, f, o, g = _gates(z, self.layer_norm)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


@dataclass(frozen=True)
class Cifg:
    """LSTM cell with coupled gates: the input gate is one minus the forget gate."""

    layer_norm: bool = False
    gates: int = 3

    def step(self, z: Gates, c: State) -> tuple[State, State]:
        f, o, g = _gates(z, self.layer_norm)
        keep = jax.nn.sigmoid(f)
        c = keep * c + (1.0 - keep) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


@dataclass(frozen=True)
class SiCifg:
    """CIFG with sigmoid replaced by MaxN of ReLU, and tanh by MaxN.

    The options are what the paper leaves open: the floor of the divisor, another measure in
    place of the maximum, and whether the candidate and the emitted state are normalised. Two more
    bound the gradient of a gate with hardly anything positive in it, which the published rule
    stretches to a largest value of one: a soft rectifier, or a floor of the divisor that is a
    share of the gate's largest magnitude. Both have the degree of what they replace.
    """

    layer_norm: bool = False
    measure: str = "max"  # a name in `MEASURES`
    floor: float = 1e-6
    candidate: bool = True
    state: bool = True
    rectifier: str = "relu"  # a name in `RECTIFIERS`
    scaled_floor: float = 0.0
    gates: int = 3

    def step(self, z: Gates, c: State) -> tuple[State, State]:
        f, o, g = _gates(z, self.layer_norm)
        keep = self._open(f)
        g = self._norm(g) if self.candidate else g
        c = keep * c + (1.0 - keep) * g
        shown = self._norm(c) if self.state else c
        return self._open(o) * shown, c

    def _open(self, z: State) -> State:
        """Return how far a gate is open, from nothing to one."""
        floor: Floor = self.floor
        if self.scaled_floor:
            largest = jnp.max(jnp.abs(z), axis=1, keepdims=True)
            floor = jnp.maximum(floor, self.scaled_floor * largest)
        return MEASURES[self.measure](RECTIFIERS[self.rectifier](z), floor)

    def _norm(self, x: State) -> State:
        return MEASURES[self.measure](x, self.floor)
