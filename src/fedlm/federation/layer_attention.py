"""Key layers of peers: attention between nodes, and residuals that look for a better home.

In:       key layers as vectors by name, a common origin of them, a temperature.
Out:      a node's next key layers and the weights that made them; where a residual goes.
Promise:  layer by layer, weights are positive and sum to one; an infinite temperature is the mean
          of self and peers, temperature zero keeps self, and peers equal to self change nothing.
Not here: the backbone (`tree.py`), which peers a node has (`tree.py`).

Two nodes are alike in a layer if they moved in the same direction: the cosine of their changes.
Weights themselves would not tell: near their start all of them are alike. Changes are measured
from a common origin: where all began, or where the root is now, which leaves out what all nodes
have learned in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, " n"]
Key = dict[str, Vector]
"""Key layers by name, each one long vector."""


class Residual(NamedTuple):
    """One layer of one node, on its way to others."""

    layer: str
    origin: int  # the node whose layer it is
    values: Vector


def cosine(a: Vector, b: Vector, origin: Vector) -> float:
    """How alike two layers moved; zero where one of them has not moved."""
    x, y = (np.asarray(v, np.float64) - origin for v in (a, b))
    length = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / length if length > 0 and math.isfinite(length) else 0.0


def weights(likeness: Sequence[float], temperature: float) -> Float[np.ndarray, " peers"]:
    """Softmax over likeness; the first is self.

    >>> weights([1.0, 0.2], 0.0).tolist(), weights([1.0, 0.2], math.inf).tolist()
    ([1.0, 0.0], [0.5, 0.5])
    """
    scores = np.asarray(likeness, np.float64)
    if temperature == 0:
        return np.eye(len(scores))[0]
    powers = np.exp((scores - scores.max()) / temperature)
    return powers / powers.sum()


class Attended(NamedTuple):
    """Key layers after attention, and the weights on self and peers that each layer had."""

    key: Key
    weights: dict[str, Float[np.ndarray, " peers"]]


def attend(
    own: Key,
    peers: Sequence[Key],
    origin: Key,
    temperature: float,
    residuals: Sequence[Residual] = (),
) -> Attended:
    """Each layer as a mixture of its own, its peers' and the residuals that came for it."""
    made: Key = {}
    found: dict[str, np.ndarray] = {}
    for layer, mine in own.items():
        bank = [mine, *(peer[layer] for peer in peers)]
        bank += [r.values for r in residuals if r.layer == layer]
        likeness = [1.0, *(cosine(mine, other, origin[layer]) for other in bank[1:])]
        found[layer] = weights(likeness, temperature)
        made[layer] = mix(bank, found[layer])
    return Attended(made, found)


def mix(bank: Sequence[Vector], share: Float[np.ndarray, " peers"]) -> Vector:
    """The weighted mean, written as self plus differences: equal peers give exactly self."""
    mixed = np.asarray(bank[0], np.float64).copy()
    for other, part in zip(bank[1:], share[1:], strict=True):
        if part > 0:
            mixed += part * (np.asarray(other, np.float64) - bank[0])
    return mixed.astype(bank[0].dtype)


def mean(keys: Sequence[Key], share: Sequence[float]) -> Key:
    """The weighted mean of key layers."""
    part = np.asarray(share, np.float64) / float(np.sum(share))
    return {layer: mix([key[layer] for key in keys], part) for layer in keys[0]}


def entropy(found: Mapping[str, Float[np.ndarray, " peers"]]) -> float | None:
    """How spread attention is, from 0 (one peer alone) to 1 (all alike), mean over layers."""
    spreads = []
    for share in found.values():
        if len(share) > 1:
            real = share[share > 0]
            spreads.append(float(-(real * np.log(real)).sum() / math.log(len(share))))
    return float(np.mean(spreads)) if spreads else None


# ---- residuals ---------------------------------------------------------------------------


def worst(
    candidates: Sequence[Residual], own: Key, origin: Key, count: int
) -> tuple[Residual, ...]:
    """For each layer the `count` candidates that fit the node's own layer least."""
    chosen: list[Residual] = []
    for layer, mine in own.items():
        here = [r for r in candidates if r.layer == layer]
        here.sort(key=lambda r: (cosine(r.values, mine, origin[r.layer]), r.origin))
        chosen += here[:count]
    return tuple(chosen)


class Routed(NamedTuple):
    """Where a residual went, and how alike it was to each place it could go to."""

    residual: Residual
    to: int
    likeness: dict[int, float]


def route(
    residuals: Sequence[Residual],
    homes: Mapping[int, tuple[Key, frozenset[int]]],
    origin: Key,
) -> list[Routed]:
    """Each residual to the most alike child, never to the subtree that it came from.

    `homes` gives of every child its key layers and the nodes of its subtree.
    """
    routed = []
    for residual in residuals:
        likeness = {
            child: cosine(residual.values, key[residual.layer], origin[residual.layer])
            for child, (key, subtree) in homes.items()
            if residual.origin not in subtree
        }
        if likeness:
            best = max(likeness, key=lambda child: (likeness[child], -child))
            routed.append(Routed(residual, best, likeness))
    return routed
