"""Where the parts of a model lie, if the devices of a lane share it.

In:       the devices of a run, how many of them share a model, the shapes of arrays.
Out:      a mesh of lanes and shards, and a place in it for every array.
Promise:  a place follows from a shape alone, so parameters, gradients, moments of optimisers and
          sums of one shape lie in the same way, and no step moves them; with one shard per lane
          everything is as if there were lanes alone.
Not here: what lanes do (`mesh.py`); how the compiler divides the work (`docs/scale.md`).

Within a lane the compiler puts exchanges between its devices where they are needed, also into loops
and branches. Lanes take as many steps as they have batches, so that no exchange may wait for
devices of another lane; some kinds do (a permutation names the pairs of all lanes at once). So each
lane has a program of its own, and lanes meet in the sum alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedlm.core.errors import require
from fedlm.core.types import PyTree

LANES, SHARDS = "lanes", "shards"


def divided_axis(shape: Sequence[int], shards: int) -> int | None:
    """Return the axis along which an array is divided, or None for one that all devices hold whole.

    It is the longest axis of a matrix that the number of shards divides, the first of several.
    Vectors (biases, gains of norms) stay whole: they are small, and XLA would divide the features
    that a divided one is added to.

    >>> divided_axis((10_000, 96), 4), divided_axis((30, 96), 4), divided_axis((96,), 4)
    (0, 1, None)
    >>> divided_axis((30, 50), 4), divided_axis((96, 96), 1)
    (None, None)
    """
    fits = [axis for axis, size in enumerate(shape) if size and size % shards == 0]
    if shards == 1 or len(shape) < 2 or not fits:
        return None
    return max(fits, key=lambda axis: (shape[axis], -axis))


def divided(shape: Sequence[int], shards: int) -> P:
    """Return how an array of a lane is spread over the devices of the lane."""
    axis = divided_axis(shape, shards)
    return P() if axis is None else P(*[None] * axis, SHARDS)


def check_shards(devices: int, shards: int) -> None:
    """Raise `ConfigError` if so many devices of this machine cannot be lanes of so many shards."""
    require(
        devices % shards == 0,
        "run.shard",
        shards,
        f"a number that divides the {devices} devices of this machine",
        "Set run.devices to a multiple of it.",
    )


class LaneMesh:
    """The devices of a run as lanes, each of as many devices as share a model."""

    def __init__(self, devices: tuple[jax.Device, ...], shards: int = 1) -> None:
        self.devices, self.shards, self.lanes = devices, shards, len(devices) // shards
        by_lane = np.array(devices).reshape(self.lanes, shards)
        self._by_lane = by_lane
        # With one axis where one is enough: programs are then those of lanes alone.
        self.mesh = Mesh(by_lane, (LANES, SHARDS)) if shards > 1 else Mesh(by_lane[:, 0], (LANES,))
        self.per_lane = NamedSharding(self.mesh, P(LANES))
        self.replicated = NamedSharding(self.mesh, P())
        here = jax.process_index()
        self.mine = [i for i, lane in enumerate(by_lane) if lane[0].process_index == here]

    def of_lanes(self, values: PyTree) -> PyTree:
        """Return the shardings of arrays whose first axis is the lane."""
        if self.shards == 1:
            return self.per_lane
        return jax.tree.map(
            lambda x: NamedSharding(self.mesh, P(LANES, *divided(x.shape[1:], self.shards))), values
        )

    def of_all(self, values: PyTree) -> PyTree:
        """Return the shardings of arrays that are the same in every lane."""
        if self.shards == 1:
            return self.replicated
        return jax.tree.map(
            lambda x: NamedSharding(self.mesh, divided(x.shape, self.shards)), values
        )

    def hold(self, values: PyTree) -> PyTree:
        """Constrain the arrays of a lane to their shardings, inside a lane's program."""
        if self.shards == 1:
            return values

        def one(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, divided(x.shape, self.shards))

        return jax.tree.map(one, values)

    def on_first_lane(self, values: PyTree) -> PyTree:
        """Return arrays that are the same in every lane on the first lane of this process alone."""
        if self.shards == 1:
            return jax.tree.map(lambda x: x.addressable_data(0), values)
        return self.same_of(values, self.alone[0])

    @cached_property
    def alone(self) -> list[LaneMesh]:
        """The lanes of this process, each as a mesh of its own."""
        return [LaneMesh(tuple(self._by_lane[lane]), self.shards) for lane in self.mine]

    def row_of(self, values: PyTree, lane: LaneMesh) -> PyTree:
        """Return one lane's row of arrays whose first axis is the lane, on that lane alone.

        Nothing is copied: these are other views of the same buffers.
        """
        return jax.tree.map(lambda x: _on(lane, x, (1, *x.shape[1:])), values)

    def same_of(self, values: PyTree, lane: LaneMesh) -> PyTree:
        """Return arrays that are the same in every lane, on one lane alone; nothing is copied."""
        return jax.tree.map(lambda x: _on(lane, x, x.shape), values)

    def joined(self, rows: Sequence[PyTree]) -> PyTree:
        """Return the rows of this process's lanes as arrays of all lanes; nothing is copied."""

        def one(*parts: jax.Array) -> jax.Array:
            held = [shard.data for part in parts for shard in part.addressable_shards]
            shape = (self.lanes, *parts[0].shape[1:])
            place = NamedSharding(self.mesh, P(LANES, *divided(shape[1:], self.shards)))
            return jax.make_array_from_single_device_arrays(shape, place, held)

        return jax.tree.map(one, *rows)


def _on(lane: LaneMesh, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the part of an array that lies on one lane."""
    place = NamedSharding(lane.mesh, x.sharding.spec)  # type: ignore[attr-defined]
    held = [shard.data for shard in x.addressable_shards if shard.device in lane.devices]
    return jax.make_array_from_single_device_arrays(shape, place, held)


def of_lane(spread: PyTree, lane: int) -> PyTree:
    """Return one lane's entry on the host; no lane waits for another over it."""

    def one(x: jax.Array) -> np.ndarray:
        parts = [part for part in x.addressable_shards if (part.index[0].start or 0) == lane]
        return _joined(x.shape[1:], [(p.index[1:], np.asarray(p.data)[0]) for p in parts])

    return jax.tree.map(one, spread)


def of_any_lane(same: PyTree) -> PyTree:
    """Return arrays that are the same in every lane on the host."""

    def one(x: jax.Array) -> np.ndarray:
        return _joined(x.shape, [(p.index, p.data) for p in x.addressable_shards])

    return jax.tree.map(one, same)


def _joined(shape: tuple[int, ...], parts: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """Return the array of which these are parts, at these places; each part is fetched once."""
    if parts[0][1].shape == shape:
        return np.asarray(parts[0][1])
    whole = np.empty(shape, parts[0][1].dtype)
    for place, part in {str(place): (place, part) for place, part in parts}.values():
        whole[place] = np.asarray(part)
    return whole
