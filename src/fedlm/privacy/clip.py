"""Sensitivity: how long one member's update may be.

In:       an update of any length.
Out:      the same direction, with L2 norm at most `clip_norm` and weight one, and whether it
          was within it before.
Promise:  no input, however large or malformed, leaves with a longer norm or a larger weight; what
          is not finite, or close to it, leaves as zero and counts as refused.
Not here: noise (`noise.py`); gradient clipping for stability (`methods/optimizers.py`).

An adaptive clip norm follows a quantile of the update norms (Andrew et al. 2021): how many members
were unclipped, less half of how many came, is a count that one member moves by a half either way,
and not at all if it is replaced by zero. It is released with noise of its own and moves the
clip norm of the next round.

Correlated noise is made for one clip norm, so there it stands still until the noise restarts. All
counts of a restart are added up and released once, at its end, with one noise of stddev c. Let a
client join n_k rounds of restart k, and n_v rounds in the block of node v of a tree. It moves the
count by n_k / 2 at most, and node v by n_v; counts and nodes together are one release with normal
noise, whose squared sensitivity in units of the noises is the maximum over placements of

    sum_v n_v^2 / s^2 + sum_k n_k^2 / (2 c)^2

A restart of L rounds is covered by as many complete blocks as L has binary ones, b of them, which
are nodes: n_k^2 <= b sum_blocks n_v^2. Single rounds are nodes too, so that n_k^2 <= p n_k is at
most p times the sum over these, if a client can join p rounds of a restart. With w = min(b, p),
sum_k n_k^2 <= w sum_v n_v^2 for every placement and after any number of rounds, as a count is
released only after its restart, when all these nodes are complete. So s^-2 + w (2 c)^-2 = z^-2
makes the whole cost no more than nodes alone with noise z, the plan's noise multiplier.

The account takes what the tree releases in place of its nodes, R_k = |M u|^2 for the released
matrix M (`sensitivity.released_tree`), which is less. The same w serves: the running sum at the end
of a restart is computed from the releases, a client moves it by n_k and its variance is at most b,
so n_k^2 <= b R_k; and M has no negative entry and ones or more on its diagonal, so that each of the
n_k rounds adds at least one to R_k and n_k^2 <= p n_k <= p R_k.

Noise that a matrix makes: R_k = |M u|^2 again, and w = p. The matrices of toeplitz and blt have no
negative entry and ones on their diagonal, as above. Columns of banded noise have length one and
those of one client do not overlap, so that R_k = n_k. A count is released when its restart is
complete, so no column of it is cut.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedlm.core import tree
from fedlm.core.chacha import CipherKey, fold_in
from fedlm.core.types import Scalar, Total, Update
from fedlm.privacy.grid import FINE, add_on_grid
from fedlm.privacy.normal import standard_normal
from fedlm.privacy.plan import PrivacyPlan

# Norms are rounded; a slightly smaller scale keeps them below it in any order of summation.
HAIR = 1.0 - 2.0**-18
# The inverse of a larger number is so small that processors take it for zero.
LARGEST = 2.0**125
# The range of an adaptive clip norm if updates vanish or explode: squared norms stay finite.
SHORTEST, LONGEST = 1e-12, 1e12
COUNT = FINE + 1  # the stream of a key that the key of the count's noise is made from


# Alone it is one program; operation by operation there would be several for each shape of a leaf.
@functools.partial(jax.jit, inline=True)
def clip(update: Update, clip_norm: Scalar) -> Update:
    """Scale an update down to the clip norm if it is longer."""
    leaves = jax.tree.leaves(update.delta)
    tops = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]
    top = tree.once(jnp.max(jnp.stack(tops)))
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


class ClipState(NamedTuple):
    """The clip norm of the next round, and what an adaptive one remembers."""

    clip_norm: Scalar
    unclipped: Scalar  # the noisy share of unclipped members that moved it last; NaN before
    counted: Scalar  # the exact centred count since then, which nobody may see


def next_clip_state(
    plan: PrivacyPlan, round: Int[Array, ""], before: ClipState, total: Total, key: CipherKey
) -> ClipState:
    """Return the clip norm after a round; it moves every `plan.clip_every` rounds."""
    every = plan.clip_every
    counted = before.counted + total.unclipped - total.members / 2
    noisy = counted
    if plan.clip_noise:
        own = fold_in(key, COUNT)
        noisy = add_on_grid(counted, standard_normal(own, counted), plan.clip_noise, 1.0, own)
    share = jnp.clip(0.5 + noisy / (plan.denominator * every), 0.0, 1.0)
    moved = before.clip_norm * jnp.exp(-plan.clip_rate * (share - plan.clip_quantile))
    after = ClipState(jnp.clip(moved, SHORTEST, LONGEST), share, jnp.zeros_like(counted))
    stays = before._replace(counted=counted)
    return after if every == 1 else tree.where((round + 1) % every == 0, after, stays)
