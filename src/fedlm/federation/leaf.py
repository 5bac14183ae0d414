"""What a leaf of a tree begins a round with, and what leaves it.

In:       the rules of a tree, the update of all text of a leaf, the leaf's secret.
Out:      the part of its change that others get to see; what it needs of them to begin a round.
Promise:  a simulation and a node do this by the same functions. What leaves is clipped and noisy
          where the rules say so; at temperature zero it holds no personal layer; the same change
          of the same leaf in the same round always leaves with the same noise.
Not here: rounds of a tree (`tree_round.py`), what a node keeps (`deploy/leaf_worker.py`),
          attention between layers (`layer_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.keys import cipher_key_for
from fedlm.core.types import Params, Update
from fedlm.federation import layer_attention
from fedlm.federation.layer_attention import Backbone, Layers, Residual
from fedlm.privacy.clip import clip
from fedlm.privacy.grid import add_on_grid
from fedlm.privacy.normal import standard_normal


@dataclass(frozen=True, kw_only=True)
class LeafRules:
    """How a leaf mixes personal layers, and how it clips and noises what it uploads."""

    personal_layers: tuple[str | None, ...]  # of each leaf of the model; None is the backbone
    temperature: float
    clip_norm: float  # the longest change that leaves; 0 is any
    noise_multiplier: float  # on what leaves, in multiples of the clip norm

    @property
    def layers_stay(self) -> bool:
        """Whether personal layers never leave their node."""
        return self.temperature == 0

    @property
    def hides(self) -> bool:
        """Whether what leaves is clipped, and perhaps noisy."""
        return self.clip_norm > 0

    @property
    def keeps(self) -> bool:
        """Whether a leaf holds parameters that must not leave its node."""
        personal = any(layer is not None for layer in self.personal_layers)
        return self.hides or (self.layers_stay and personal)

    def part(self, change: Params) -> Any:
        """Return the part of a model, or of a change of it, that leaves."""
        if not self.layers_stay:
            return change
        return layer_attention.backbone_of(self.personal_layers, change)

    def whole(self, part: Any, like: Params) -> Params:
        """Return a part that arrived as a change of the whole model: what stayed is zero."""
        if not self.layers_stay:
            return part
        leaves, structure = jax.tree.flatten(like)
        sent, made = iter(part), []
        for leaf, layer in zip(leaves, self.personal_layers, strict=True):
            made.append(next(sent) if layer is None else np.zeros(leaf.shape, leaf.dtype))
        return jax.tree.unflatten(structure, made)


class LeafStart(NamedTuple):
    """What a leaf that keeps its own model needs of the others to begin a round."""

    backbone: Backbone
    own: Layers | None = None  # the layers that all began with, for a leaf that has none yet
    parent: Layers | None = None  # None where layers stay
    origin: Layers | None = None  # what changes are measured from, if not those that all began with
    residuals: tuple[Residual, ...] = ()


def leaving(rules: LeafRules, update: Update, secret: int, round: int, node: int) -> Any:
    """Return the part of a leaf's change that leaves, clipped and noisy where the rules say so.

    Args:
      rules: the rules.
      update: of all text of the leaf.
      secret: the leaf's, from which its noise is drawn.
      round: the number of the round.
      node: the number of the leaf in the tree.
    """
    part = rules.part(update.delta)
    if not rules.hides:
        return part
    sent = eqx.tree_at(lambda u: u.delta, update, part)
    part = jax.device_get(clip(sent, jnp.float32(rules.clip_norm)).delta)
    if not rules.noise_multiplier:
        return part
    # The change and its limits count too: the same noise on another change, or at another scale on
    # the same one, would cancel in the difference.
    limits = np.asarray([rules.clip_norm, rules.noise_multiplier], np.float64)
    change_is = int(tree.sha256((np.int64(node), limits, part)), 16)
    key = cipher_key_for(secret, "noise", round=round, member=change_is)
    drawn = standard_normal(key, part)
    noisy = add_on_grid(part, drawn, rules.noise_multiplier, rules.clip_norm, key)
    return jax.device_get(noisy)
