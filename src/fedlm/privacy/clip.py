"""Sensitivity: how long one member's update may be.

In:       an update of any length.
Out:      the same direction, with L2 norm at most `limit`, and whether it was inside before.
Promise:  no input, however large or malformed, leaves with a longer norm; what is not finite
          leaves as zero and counts as refused.
Not here: noise (`noise.py`); gradient clipping for stability (`federation/algorithms.py`).

An adaptive limit follows a quantile of the update norms (Andrew et al. 2021): how many members
were inside is a count to which one member adds at most one, so it is released with noise of its
own and moves the limit of the next round.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.types import Update
from fedlm.privacy.plan import PrivacyPlan

Scalar = Float[Array, ""]
# The scaled norm is rounded; a hair less keeps it below the limit in any order of summation.
HAIR = 1.0 - 2.0**-18


def clip(update: Update, limit: Scalar) -> Update:
    """The update, scaled down to the limit if it is longer."""
    norm = tree.norm(update.delta)
    sound = jnp.isfinite(norm)
    inside = norm <= limit
    factor = jnp.where(inside, 1.0, HAIR * limit / jnp.where(norm > 0, norm, 1.0))
    short = tree.scale(update.delta, factor)
    return eqx.tree_at(
        lambda u: (u.delta, u.weight, u.inside, u.refused),
        update,
        (
            tree.where(sound, short, tree.zeros_like(short)),
            jnp.where(sound, update.weight, 0.0),
            jnp.where(sound & inside, 1.0, 0.0),
            jnp.maximum(update.refused, jnp.where(sound, 0.0, 1.0)),
        ),
    )


def next_limit(
    plan: PrivacyPlan, limit: Scalar, inside: Scalar, key: PRNGKeyArray
) -> tuple[Scalar, Scalar]:
    """The limit of the next round, and the noisy share of members inside that moved it."""
    # Centred, a member moves the count by a half either way.
    noisy = inside + plan.clip_noise * jr.normal(key)
    share = jnp.clip(noisy / plan.denominator, 0.0, 1.0)
    return limit * jnp.exp(-plan.clip_rate * (share - plan.clip_quantile)), share
