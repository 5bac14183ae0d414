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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fedlm.core.types import Params, PyTree, Vector

Layers = dict[str, Vector]
"""Personal layers by name, each one long vector."""

Backbone = tuple[Any, ...]
"""The leaves of a model that a federation shares, in the order of the model."""

LeafLayers = Sequence[str | None]
"""Of each leaf of a model, the personal layer that it belongs to; None is the backbone."""


# ---- the two parts of a model ------------------------------------------------------------


def backbone_of(leaf_layers: LeafLayers, params: Params) -> Backbone:
    """Return the leaves that a federation shares."""
    leaves = jax.tree.leaves(params)
    return tuple(x for x, layer in zip(leaves, leaf_layers, strict=True) if layer is None)


def personal_of(leaf_layers: LeafLayers, params: Params) -> Layers:
    """Return the personal layers as vectors."""
    parts: dict[str, list[np.ndarray]] = {}
    for leaf, layer in zip(jax.tree.leaves(params), leaf_layers, strict=True):
        if layer is not None:
            parts.setdefault(layer, []).append(np.asarray(leaf).ravel())
    return {layer: np.concatenate(found) for layer, found in parts.items()}


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


def layer_difference(after: Backbone, before: Backbone) -> Backbone:
    """Return the change from one backbone to another."""
    return tuple(np.subtract(x, y) for x, y in zip(after, before, strict=True))


def mean_change(changes: Sequence[Backbone], share: Sequence[float]) -> Backbone:
    """Return the weighted mean of changes of a backbone."""
    part = np.asarray(share, np.float32) / np.float32(sum(share))
    return tuple(
        sum((x * p for x, p in zip(leaves[1:], part[1:], strict=True)), leaves[0] * part[0])
        for leaves in zip(*changes, strict=True)
    )


def agreement(mean: Backbone, changes: Sequence[Backbone], share: Sequence[float]) -> float:
    """Return the norm of the mean change over the mean norm: 1 if all agree, near 0 if none do."""
    norm = float(np.average([length(change) for change in changes], weights=share))
    return length(mean) / norm if norm > 0 else 1.0


# ---- attention ---------------------------------------------------------------------------


class Residual(NamedTuple):
    """One layer of one node, on its way to others."""

    layer: str
    origin: int  # the node whose layer it is
    values: Vector


def cosine(a: Vector, b: Vector, origin: Vector) -> float:
    """Return the cosine of the changes of two layers; zero if one of them has not moved."""
    x, y = (np.asarray(v, np.float64) - origin for v in (a, b))
    length = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / length if length > 0 and math.isfinite(length) else 0.0


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
    peers: Sequence[Layers],
    origin: Layers,
    temperature: float,
    residuals: Sequence[Residual] = (),
) -> Attended:
    """Mix each layer with the peers' layers and with the residuals that came for it."""
    made: Layers = {}
    found: dict[str, np.ndarray] = {}
    for layer, mine in own.items():
        bank = [mine, *(peer[layer] for peer in peers)]
        bank += [r.values for r in residuals if r.layer == layer]
        likeness = [1.0, *(cosine(mine, other, origin[layer]) for other in bank[1:])]
        found[layer] = attention_weights(likeness, temperature)
        made[layer] = mix(bank, found[layer])
    return Attended(made, found)


def mix(bank: Sequence[Vector], share: Float[np.ndarray, " peers"]) -> Vector:
    """Return the weighted mean as self plus differences, so equal peers give exactly self."""
    mixed = np.asarray(bank[0], np.float64).copy()
    for other, part in zip(bank[1:], share[1:], strict=True):
        if part > 0:
            mixed += part * (np.asarray(other, np.float64) - bank[0])
    return mixed.astype(bank[0].dtype)


def mean_layers(nodes: Sequence[Layers], share: Sequence[float]) -> Layers:
    """Return the weighted mean of several nodes' personal layers."""
    part = np.asarray(share, np.float64) / float(np.sum(share))
    return {layer: mix([own[layer] for own in nodes], part) for layer in nodes[0]}


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
    children: Mapping[int, tuple[Layers, frozenset[int]]],
    origin: Layers,
) -> list[Routed]:
    """Send each residual to the most alike child, never to the subtree that it came from.

    `children` gives the personal layers of each child, and the nodes of its subtree.
    """
    routed = []
    for residual in residuals:
        likeness = {
            child: cosine(residual.values, layers[residual.layer], origin[residual.layer])
            for child, (layers, subtree) in children.items()
            if residual.origin not in subtree
        }
        if likeness:
            best = max(likeness, key=lambda child: (likeness[child], -child))
            routed.append(Routed(residual, best, likeness))
    return routed
