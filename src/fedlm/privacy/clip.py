"""Sensitivity: how long one member's update may be.

In:       an update of any length.
Out:      the same direction, with L2 norm at most `limit` and weight one, and whether it was
          inside before.
Promise:  no input, however large or malformed, leaves with a longer norm or a larger weight; what
          is not finite, or close to it, leaves as zero and counts as refused.
Not here: noise (`noise.py`); gradient clipping for stability (`methods/optimizers.py`).

An adaptive limit follows a quantile of the update norms (Andrew et al. 2021): how many members
were unclipped, less half of how many came, is a count that one member moves by a half either way,
and not at all if it is replaced by zero. It is released with noise of its own and moves the limit
of the next round.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedlm.core import tree
from fedlm.core.chacha import CipherKey, fold_in
from fedlm.core.types import Total, Update
from fedlm.privacy.grid import FINE, add_on_grid
from fedlm.privacy.normal import standard_normal
from fedlm.privacy.plan import PrivacyPlan

Scalar = Float[Array, ""]
# Norms are rounded; a slightly smaller scale keeps them below the limit in any summation order.
HAIR = 1.0 - 2.0**-18
# The inverse of a larger number is so small that processors take it for zero.
LARGEST = 2.0**125
# The range of an adaptive limit if updates vanish or explode: squared norms stay finite.
SHORTEST, LONGEST = 1e-12, 1e12
COUNT = FINE + 1  # the stream of a key that the key of the count's noise is made from


def clip(update: Update, clip_norm: Scalar) -> Update:
    """Scale an update down to the clip norm if it is longer."""
    leaves = jax.tree.leaves(update.delta)
    top = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]))
    sound = top < LARGEST  # not true of NaN either
    # Divided by its largest entry, an update neither overflows nor vanishes when it is squared.
    unit = jax.tree.map(lambda x: x / jnp.where(top > 0, top, 1.0), update.delta)
    norm = jnp.maximum(tree.norm(unit), 1.0)
    unclipped = top * norm <= HAIR * clip_norm
    short = tree.scale(unit, HAIR * clip_norm / norm)
    clipped = tree.where(unclipped, update.delta, short)
    return eqx.tree_at(
        lambda u: (u.delta, u.weight, u.unclipped, u.refused),
        update,
        (
            tree.where(sound, clipped, tree.zeros_like(clipped)),
            jnp.where(sound, 1.0, 0.0),
            jnp.where(sound & unclipped, 1.0, 0.0),
            jnp.maximum(update.refused, jnp.where(sound, 0.0, 1.0)),
        ),
    )


def next_clip_norm(
    plan: PrivacyPlan, clip_norm: Scalar, total: Total, key: CipherKey
) -> tuple[Scalar, Scalar]:
    """Return the next round's limit, and the noisy share of unclipped members that moved it."""
    centred = total.unclipped - total.members / 2
    noisy = centred
    if plan.clip_noise:
        own = fold_in(key, COUNT)
        noisy = add_on_grid(centred, standard_normal(own, centred), plan.clip_noise, 1.0, own)
    share = jnp.clip(0.5 + noisy / plan.denominator, 0.0, 1.0)
    moved = clip_norm * jnp.exp(-plan.clip_rate * (share - plan.clip_quantile))
    return jnp.clip(moved, SHORTEST, LONGEST), share
