"""The two parts of a model, and attention between the personal layers of nodes.

In:       models; personal layers as vectors by name, a common origin of them, a temperature.
Out:      a model's backbone and personal layers, and back; a node's next personal layers and the
          weights that made them; which residual goes to which node.
Promise:  layer by layer, weights are positive and sum to one; an infinite temperature is the mean
          of self and peers, temperature zero keeps self, and peers equal to self change nothing.
Not here: which leaves are personal (`models/split.py`), which peers a node has (`tree_round.py`).

Two nodes are alike in a layer if they moved in the same direction: the cosine of their changes.
Weights themselves would not tell: near their start all of them are alike. Changes are measured
from a common origin: where all began, or where the root is now, which leaves out what all nodes
have learned in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fedlm.core.types import Params, PyTree, Vector

Layers = dict[str, Vector]
"""Personal layers by name, each one long vector."""

Backbone = tuple[Any, ...]
"""The leaves of a model that a federation shares, in the order of the model."""

ENTRIES_AT_A_TIME = 1 << 15  # of each vector, when many are compared with many
# When few are compared: BLAS would start threads for longer ones, whose waiting costs more than the
# sum, and whose number would decide on its last bits.
ENTRIES_OF_A_SUM = 1 << 13

LeafLayers = Sequence[str | None]
"""Of each leaf of a model, the personal layer that it belongs to; None is the backbone."""


# ---- the two parts of a model ------------------------------------------------------------


def backbone_of(leaf_layers: LeafLayers, params: Params) -> Backbone:
    """Return the leaves that a federation shares."""
    leaves = jax.tree.leaves(params)
    return tuple(x for x, layer in zip(leaves, leaf_layers, strict=True) if layer is None)


def personal_of(leaf_layers: LeafLayers, params: Params) -> Layers:
    """Return the personal layers as vectors."""
    return dict(LayersOf(leaf_layers, params))


class LayersOf(Mapping[str, Vector]):
    """The personal layers of a model, each of them made when it is asked for, and not kept."""

    def __init__(self, leaf_layers: LeafLayers, params: Params) -> None:
        self._parts: dict[str, list[Any]] = {}
        for leaf, layer in zip(jax.tree.leaves(params), leaf_layers, strict=True):
            if layer is not None:
                self._parts.setdefault(layer, []).append(leaf)

    def __getitem__(self, layer: str) -> Vector:
        return np.concatenate(self.parts(layer))

    def parts(self, layer: str) -> list[Vector]:
        """Return the leaves of a layer as vectors, without a copy."""
        return [np.asarray(leaf).ravel() for leaf in self._parts[layer]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def join_layers(
    leaf_layers: LeafLayers, like: Params, backbone: Backbone, personal: Layers
) -> Params:
    """Return the model that a backbone and personal layers make up."""
    leaves, structure = jax.tree.flatten(like)
    shared, used = iter(backbone), dict.fromkeys(personal, 0)
    made = []
    for leaf, layer in zip(leaves, leaf_layers, strict=True):
        if layer is None:
            made.append(next(shared))
        else:
            at = used[layer]
            used[layer] = at + leaf.size
            made.append(personal[layer][at : at + leaf.size].reshape(leaf.shape))
    return jax.tree.unflatten(structure, made)


def length(part: PyTree) -> float:
    """Return the L2 norm of a part of a model."""
    return math.sqrt(sum(float(np.vdot(x, x)) for x in jax.tree.leaves(part)))


class MeanChange(NamedTuple):
    """The weighted mean of changes of a backbone, and how far they agree."""

    change: Backbone
    agreement: float  # the norm of the mean over the mean norm: 1 if all agree, near 0 if none do


def mean_change(
    after: Sequence[Backbone], before: Sequence[Backbone], share: Sequence[float]
) -> MeanChange:
    """Return the weighted mean of the changes from one backbone to another.

    One leaf of one change is in memory at a time: a federation may have many children.
    """
    part = np.asarray(share, np.float32) / np.float32(sum(share))
    squares, mean = [0.0] * len(after), []
    for leaf in range(len(after[0])):
        total = None
        for number, (new, old) in enumerate(zip(after, before, strict=True)):
            change = np.asarray(np.subtract(new[leaf], old[leaf]))
            squares[number] += float(np.vdot(change, change))
            scaled = change * part[number]
            total = scaled if total is None else np.add(total, scaled, out=total)
        mean.append(total)
    norm = float(np.average(np.sqrt(squares), weights=share))
    found = tuple(mean)
    return MeanChange(found, length(found) / norm if norm > 0 else 1.0)


# ---- attention ---------------------------------------------------------------------------


class Residual(NamedTuple):
    """One layer of one node, on its way to others."""

    layer: str
    origin: int  # the node whose layer it is
    values: Vector


Parts = Sequence[Vector]
"""A vector in parts, as the leaves of a layer are: so nobody has to join them."""


def cosine(a: Vector, b: Vector, origin: Vector) -> float:
    """Return the cosine of the changes of two layers; zero if one of them has not moved."""
    return cosines(a, [[b]], origin)[0]


def cosines(own: Vector, others: Sequence[Parts], origin: Vector) -> list[float]:
    """Return the cosine of a layer's change and each of other changes of that layer."""
    square, squares, dots = 0.0, [0.0] * len(others), [0.0] * len(others)
    for here, (x, y, start) in _blocks(own.size, 3):
        start[:], x[:] = origin[here], own[here]
        x -= start
        square += float(x @ x)
        for number, other in enumerate(others):
            _read(other, here, y)
            y -= start
            squares[number] += float(y @ y)
            dots[number] += float(x @ y)
    lengths = [math.sqrt(square * one) for one in squares]
    return [
        dot / length if length > 0 and math.isfinite(length) else 0.0
        for dot, length in zip(dots, lengths, strict=True)
    ]


def _blocks(size: int, count: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """Yield slices of a vector that fit into a core's cache, each with `count` buffers.

    Where they begin does not depend on how the vector is stored: sums have one order everywhere.
    """
    buffers = np.empty((count, min(size, ENTRIES_OF_A_SUM)))
    for first in range(0, size, ENTRIES_OF_A_SUM):
        here = slice(first, min(first + ENTRIES_OF_A_SUM, size))
        yield here, [buffer[: here.stop - first] for buffer in buffers]


def _read(parts: Parts, here: slice, out: np.ndarray) -> None:
    """Write some entries of a vector into a buffer of 64 bits."""
    begin = 0
    for part in parts:
        first, stop = max(here.start - begin, 0), min(here.stop - begin, part.size)
        if first < stop:
            at = begin - here.start
            out[at + first : at + stop] = part[first:stop]
        begin += part.size


def attention_weights(likeness: Sequence[float], temperature: float) -> Float[np.ndarray, " peers"]:
    """Return the softmax over likeness; the first entry is self.

    >>> [attention_weights([1.0, 0.2], softness).tolist() for softness in (0.0, math.inf)]
    [[1.0, 0.0], [0.5, 0.5]]
    """
    scores = np.asarray(likeness, np.float64)
    if temperature == 0:
        return np.eye(len(scores))[0]
    powers = np.exp((scores - scores.max()) / temperature)
    return powers / powers.sum()


class Attended(NamedTuple):
    """Personal layers after attention, and the weights of self and peers in each."""

    layers: Layers
    attention_weights: dict[str, Float[np.ndarray, " peers"]]


def attend(
    own: Layers,
    peers: Sequence[Mapping[str, Vector]],
    origin: Layers,
    temperature: float,
    residuals: Sequence[Residual] = (),
) -> Attended:
    """Mix each layer with the peers' layers and with the residuals that came for it.

    A few entries of all of them are in memory at a time.
    """
    made: Layers = {}
    found: dict[str, np.ndarray] = {}
    for layer, mine in own.items():
        others: list[Parts] = [_parts_of(peer, layer) for peer in peers]
        others += [[r.values] for r in residuals if r.layer == layer]
        likeness = [1.0, *cosines(mine, others, origin[layer])]
        found[layer] = attention_weights(likeness, temperature)
        made[layer] = mix([mine], others, found[layer])
    return Attended(made, found)


def mix(own: Parts, others: Sequence[Parts], share: Float[np.ndarray, " peers"]) -> Vector:
    """Return the weighted mean as self plus differences, so equal peers give exactly self."""
    mixed = np.empty(sum(part.size for part in own), own[0].dtype)
    counted = [(other, part) for other, part in zip(others, share[1:], strict=True) if part > 0]
    for here, (mine, total, difference) in _blocks(mixed.size, 3):
        _read(own, here, mine)
        total[:] = mine
        for other, part in counted:
            _read(other, here, difference)
            difference -= mine
            difference *= part
            total += difference
        mixed[here] = total
    return mixed


def mean_layers(nodes: Sequence[Mapping[str, Vector]], share: Sequence[float]) -> Layers:
    """Return the weighted mean of several nodes' personal layers."""
    part = np.asarray(share, np.float64) / float(np.sum(share))
    made: Layers = {}
    for layer in nodes[0]:
        first, *others = (_parts_of(node, layer) for node in nodes)
        made[layer] = mix(first, others, part)
    return made


def entropy(found: Mapping[str, Float[np.ndarray, " peers"]]) -> float | None:
    """Return the mean entropy of attention over layers: 0 is one peer alone, 1 is all alike."""
    spreads = []
    for share in found.values():
        if len(share) > 1:
            real = share[share > 0]
            spreads.append(float(-(real * np.log(real)).sum() / math.log(len(share))))
    return float(np.mean(spreads)) if spreads else None


# ---- residuals ---------------------------------------------------------------------------


def worst(
    candidates: Sequence[Residual], own: Layers, origin: Layers, count: int
) -> tuple[Residual, ...]:
    """Return for each layer the `count` candidates that are least like the node's own layer."""
    chosen: list[Residual] = []
    for layer, mine in own.items():
        here = [r for r in candidates if r.layer == layer]
        here.sort(key=lambda r: (cosine(r.values, mine, origin[r.layer]), r.origin))
        chosen += here[:count]
    return tuple(chosen)


class Routed(NamedTuple):
    """The node that a residual goes to, and how alike it is to each node it could go to."""

    residual: Residual
    to: int
    likeness: dict[int, float]


def route(
    residuals: Sequence[Residual],
    children: Mapping[int, tuple[Mapping[str, Vector], frozenset[int]]],
    origin: Layers,
) -> list[Routed]:
    """Send each residual to the most alike child, never to the subtree that it came from.

    `children` gives the personal layers of each child, and the nodes of its subtree.
    """
    routed = []
    by_layer = {layer: [r for r in residuals if r.layer == layer] for layer in origin}
    alike = {
        layer: cosine_matrix(
            [r.values for r in found],
            [_parts_of(layers, layer) for layers, _ in children.values()],
            start,
        )
        for layer, start in origin.items()
        if (found := by_layer[layer]) and children
    }
    rows = {layer: iter(values) for layer, values in alike.items()}
    for residual in residuals if children else ():
        told = zip(children.items(), next(rows[residual.layer]).tolist(), strict=True)
        likeness = {
            child: value for (child, (_, subtree)), value in told if residual.origin not in subtree
        }
        if likeness:
            best = max(likeness, key=lambda child: (likeness[child], -child))
            routed.append(Routed(residual, best, likeness))
    return routed


def _parts_of(layers: Mapping[str, Vector], layer: str) -> list[Vector]:
    return layers.parts(layer) if isinstance(layers, LayersOf) else [layers[layer]]


def cosine_matrix(
    rows: Sequence[Vector], columns: Sequence[Sequence[Vector]], origin: Vector
) -> Float[np.ndarray, "rows columns"]:
    """Return the cosines between two sets of changes of a layer; columns come in parts.

    Some entries of all layers are in memory at a time. Pair by pair, each of a hundred nodes would
    be read a hundred times.
    """
    dots = np.zeros((len(rows), len(columns)))
    squares = [np.zeros(len(rows)), np.zeros(len(columns))]
    begin = 0
    for parts in zip(*columns, strict=True):
        for first in range(0, parts[0].size, ENTRIES_AT_A_TIME):
            here = slice(first, min(first + ENTRIES_AT_A_TIME, parts[0].size))
            whole = slice(begin + here.start, begin + here.stop)
            x = _changes([row[whole] for row in rows], origin[whole])
            y = _changes([part[here] for part in parts], origin[whole])
            dots += x @ y.T
            squares[0] += np.einsum("rn,rn->r", x, x)
            squares[1] += np.einsum("rn,rn->r", y, y)
        begin += parts[0].size
    lengths = np.sqrt(np.outer(*squares))
    usable = (lengths > 0) & np.isfinite(lengths)
    return np.where(usable, dots / np.where(usable, lengths, 1.0), 0.0)


def _changes(vectors: Sequence[Vector], origin: Vector) -> Float[np.ndarray, "vectors entries"]:
    made = np.empty((len(vectors), len(origin)))
    for row, vector in zip(made, vectors, strict=True):
        np.subtract(vector, origin, out=row, dtype=np.float64)
    return made
