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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from fedlm.core.types import Params, PyTree, Vector

Layers = dict[str, Vector]
"""Personal layers by name, each one long vector."""

Backbone = tuple[Any, ...]
"""The leaves of a model that a federation shares, in the order of the model."""

# Of one sum: BLAS would start threads for longer ones, whose waiting costs more than the sum, and
# whose number would decide on its last bits.
ENTRIES_OF_A_SUM = 1 << 13
# A block of as many sums has buffers that fit into a core's cache, and is long enough that two
# threads seldom wait for each other's Python: 8,192 entries took a third more processor time.
SUMS_OF_A_BLOCK = 4
# Rows, columns and entries of products for which BLAS starts none either: 262,144 at most.
PRODUCTS_OF_ONE_THREAD = (4, 128, 512)

T = TypeVar("T")

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

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the layers, none of which is made for it."""
        return {
            layer: jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves),), leaves[0].dtype)
            for layer, leaves in self._parts.items()
        }

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
    leaves = [np.asarray(x).ravel() for x in jax.tree.leaves(part)]
    return math.sqrt(_added(dot for x in leaves for dot in _dots(x, x)))


class MeanChange(NamedTuple):
    """The weighted mean of changes of a backbone, and how far they agree."""

    change: Backbone
    agreement: float  # the norm of the mean over the mean norm: 1 if all agree, near 0 if none do


def mean_change(
    after: Sequence[Backbone], before: Sequence[Backbone], share: Sequence[float]
) -> MeanChange:
    """Return the weighted mean of the changes from one backbone to another.

    A few entries of one change are in memory at a time: a federation may have many children.
    """
    part = np.asarray(share, np.float32) / np.float32(sum(share))
    squares, mean = [0.0] * len(after), []
    for leaf, like in enumerate(after[0]):
        pairs = [
            (np.asarray(new[leaf]).ravel(), np.asarray(old[leaf]).ravel())
            for new, old in zip(after, before, strict=True)
        ]
        total, found = _mean_of_leaf(pairs, part)
        mean.append(total.reshape(like.shape))
        squares = [_added(dots, start) for start, dots in zip(squares, found, strict=True)]
    norm = float(np.average(np.sqrt(squares), weights=share))
    change = tuple(mean)
    return MeanChange(change, length(change) / norm if norm > 0 else 1.0)


def _mean_of_leaf(
    pairs: Sequence[tuple[Vector, Vector]], part: Float[np.ndarray, " pairs"]
) -> tuple[Vector, list[list[float]]]:
    """Return the weighted sum of changes of a leaf, and the parts of each change's square."""
    total = np.empty(pairs[0][0].size, np.result_type(pairs[0][0], part))

    def work(blocks: Sequence[slice]) -> list[list[list[float]]]:
        made, buffer = [], np.empty(_longest(blocks), pairs[0][0].dtype)
        for here in blocks:
            change, found = buffer[: here.stop - here.start], []
            for number, (new, old) in enumerate(pairs):
                np.subtract(new[here], old[here], out=change)
                found.append(_dots(change, change))
                if number:
                    change *= part[number]
                    total[here] += change
                else:
                    np.multiply(change, part[0], out=total[here])
            made.append(found)
        return made

    by_block = _in_two_threads(total.size, work)
    return total, [[x for block in by_block for x in block[n]] for n in range(len(pairs))]


# ---- attention ---------------------------------------------------------------------------


Parts = Sequence[Vector]
"""A vector in parts, as the leaves of a layer are: so nobody has to join them."""


class Residual(NamedTuple):
    """One layer of one node, on its way to others."""

    layer: str
    origin: int  # the node whose layer it is
    parts: Parts

    @property
    def values(self) -> Vector:
        """The layer as one vector; a copy if it has several parts."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


def cosine(a: Parts, b: Parts, origin: Vector) -> float:
    """Return the cosine of the changes of two layers; zero if one of them has not moved."""
    return cosines(a, [b], origin)[0]


def cosines(own: Parts, others: Sequence[Parts], origin: Vector) -> list[float]:
    """Return the cosine of a layer's change and each of other changes of that layer."""

    def work(blocks: Sequence[slice]) -> list[list[list[float]]]:
        made = []
        for here, (x, y, start) in _buffered(blocks):
            start[:] = origin[here]
            _read(own, here, x)
            x -= start
            found = [_dots(x, x)]
            for other in others:
                _read(other, here, y)
                y -= start
                found += [_dots(y, y), _dots(x, y)]
            made.append(found)
        return made

    by_block = _in_two_threads(origin.size, work)
    # In the order of the entries, whichever thread was first.
    sums = [_added(x for block in by_block for x in block[n]) for n in range(1 + 2 * len(others))]
    square, squares, dots = sums[0], sums[1::2], sums[2::2]
    lengths = [math.sqrt(square * one) for one in squares]
    return [
        dot / length if length > 0 and math.isfinite(length) else 0.0
        for dot, length in zip(dots, lengths, strict=True)
    ]


def _dots(x: Vector, y: Vector) -> list[float]:
    """Return the scalar products of the parts of two vectors that are added up at once."""
    whole = x.size - x.size % ENTRIES_OF_A_SUM
    rows = (-1, ENTRIES_OF_A_SUM)
    found = np.vecdot(x[:whole].reshape(rows), y[:whole].reshape(rows)).tolist()
    return [*found, float(x[whole:] @ y[whole:])] if whole < x.size else found


def _added(numbers: Iterable[float], start: float = 0.0) -> float:
    """Add numbers one after the other; `sum` is more exact in later versions of Python."""
    return reduce(add, numbers, start)


def _in_two_threads(
    size: int, work: Callable[[Sequence[slice]], list[T]], step: int = 0
) -> list[T]:
    """Return what `work` makes of the blocks of a vector, in order; half of them beside the other.

    Where blocks begin does not depend on how the vector is stored, nor on threads: sums have one
    order everywhere. numpy's loops run without Python's lock.
    """
    step = step or SUMS_OF_A_BLOCK * ENTRIES_OF_A_SUM
    blocks = [slice(first, min(first + step, size)) for first in range(0, size, step)]
    half = len(blocks) // 2
    if half < 2:  # a thread would take longer to start
        return work(blocks)
    with ThreadPoolExecutor(1) as other:
        second = other.submit(work, blocks[half:])
        return [*work(blocks[:half]), *second.result()]


def _longest(blocks: Sequence[slice]) -> int:
    return max((here.stop - here.start for here in blocks), default=0)


def _buffered(blocks: Sequence[slice]) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """Yield blocks, each with three buffers of 64 bits of its length."""
    buffers = np.empty((3, _longest(blocks)))
    for here in blocks:
        yield here, [buffer[: here.stop - here.start] for buffer in buffers]


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
    own: Mapping[str, Vector],
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
    for layer in own:
        mine, others = parts_of(own, layer), [parts_of(peer, layer) for peer in peers]
        others += [r.parts for r in residuals if r.layer == layer]
        likeness = [1.0, *cosines(mine, others, origin[layer])]
        found[layer] = attention_weights(likeness, temperature)
        made[layer] = mix(mine, others, found[layer])
    return Attended(made, found)


def mix(own: Parts, others: Sequence[Parts], share: Float[np.ndarray, " peers"]) -> Vector:
    """Return the weighted mean as self plus differences, so equal peers give exactly self."""
    mixed = np.empty(sum(part.size for part in own), own[0].dtype)
    counted = [(other, part) for other, part in zip(others, share[1:], strict=True) if part > 0]

    def work(blocks: Sequence[slice]) -> list[None]:
        for here, (mine, total, difference) in _buffered(blocks):
            _read(own, here, mine)
            total[:] = mine
            for other, part in counted:
                _read(other, here, difference)
                difference -= mine
                difference *= part
                total += difference
            mixed[here] = total
        return []

    _in_two_threads(mixed.size, work)
    return mixed


def mean_layers(nodes: Sequence[Mapping[str, Vector]], share: Sequence[float]) -> Layers:
    """Return the weighted mean of several nodes' personal layers."""
    part = np.asarray(share, np.float64) / float(np.sum(share))
    made: Layers = {}
    for layer in nodes[0]:
        first, *others = (parts_of(node, layer) for node in nodes)
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
        here.sort(key=lambda r: (cosine(r.parts, [mine], origin[r.layer]), r.origin))
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
            [parts_of(layers, layer) for layers, _ in children.values()],
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


def parts_of(layers: Mapping[str, Vector], layer: str) -> Parts:
    """Return a layer in the parts in which it is held, without a copy."""
    return layers.parts(layer) if isinstance(layers, LayersOf) else [layers[layer]]


def cosine_matrix(
    rows: Sequence[Vector], columns: Sequence[Sequence[Vector]], origin: Vector
) -> Float[np.ndarray, "rows columns"]:
    """Return the cosines between two sets of changes of a layer; columns come in parts.

    Some entries of all layers are in memory at a time. Pair by pair, each of a hundred nodes would
    be read a hundred times.
    """

    def work(blocks: Sequence[slice]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        dots, of_rows = np.zeros((len(rows), len(columns))), np.zeros(len(rows))
        of_columns, longest = np.zeros(len(columns)), _longest(blocks)
        x, y = np.empty((len(rows), longest)), np.empty((len(columns), longest))
        for here in blocks:
            start, now = origin[here].astype(np.float64), slice(here.stop - here.start)
            for changes, parts in ((x, ([row] for row in rows)), (y, columns)):
                for change, one in zip(changes[:, now], parts, strict=True):
                    _read(one, here, change)
                    change -= start
            of_rows += np.vecdot(x[:, now], x[:, now])
            of_columns += np.vecdot(y[:, now], y[:, now])
            _add_products(dots, x[:, now], y[:, now])
        return [(dots, of_rows, of_columns)]

    halves = _in_two_threads(origin.size, work, ENTRIES_OF_A_SUM)
    dots, *squares = (sum(of_half[1:], of_half[0]) for of_half in zip(*halves, strict=True))
    lengths = np.sqrt(np.outer(*squares))
    usable = (lengths > 0) & np.isfinite(lengths)
    return np.where(usable, dots / np.where(usable, lengths, 1.0), 0.0)


def _add_products(dots: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Add the products of all rows of two matrices, in pieces for which BLAS starts no threads.

    On busy cores its threads wait for each other: a hundred by a hundred rows took 8 to 40 times
    the processor time of one thread.
    """
    rows, columns, entries = PRODUCTS_OF_ONE_THREAD
    for first in range(0, x.shape[1], entries):
        here = slice(first, first + entries)
        for left in range(0, len(x), rows):
            for right in range(0, len(y), columns):
                to = slice(left, left + rows), slice(right, right + columns)
                dots[to] += x[to[0], here] @ y[to[1], here].T
