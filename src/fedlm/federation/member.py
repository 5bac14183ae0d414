"""A member's half of a round, up to the sum.

In:       what a member carries after its last batch, and how it travels.
Out:      the update that arrives, and the sum it goes into.
Promise:  the same functions in every engine; clip, then codec, then clip again where the codec may
          lengthen; a member that does not count changes nothing.
Not here: loops over members (`engine`), what the server does with the sum (`round.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedlm.core import tree
from fedlm.core.types import ClientMethod, Params, Total, Update
from fedlm.federation.algorithm import Algorithm
from fedlm.local.train import masked
from fedlm.privacy.clip import clip


class ClientState(NamedTuple):
    """What a member remembers between its turns."""

    own: Any  # as its method wants it
    residual: Any  # what its codec left out


def empty_total(delta: Params, leaves: int | None = None) -> Total:
    """The sum over nobody; `leaves` where each member trains some of so many."""
    zero = jnp.zeros(())
    shares = None if leaves is None else jnp.zeros(leaves)
    return Total(tree.zeros_like(delta), zero, zero, zero, zero, zero, zero, zero, shares)


def add_member(total: Total, update: Update, counts: Bool[Array, ""] | bool = True) -> Total:
    """One more member in the sum; one that does not count yet leaves it as it was."""
    one = jnp.where(counts, 1.0, 0.0)
    weight = one * update.weight
    return Total(
        delta=tree.add_scaled(total.delta, update.delta, weight),
        weight=total.weight + weight,
        nats=total.nats + one * update.nats,
        tokens=total.tokens + one * update.tokens,
        steps=total.steps + one * update.steps,
        refused=total.refused + one * update.refused,
        unclipped=total.unclipped + one * update.unclipped,
        members=total.members + one,
        shares=None if update.mask is None else total.shares + weight * update.mask,
    )


class Trip(NamedTuple):
    """How an update gets from a member to the sum."""

    send: Callable[[Params], Params]  # what arrives of what is sent
    clip_norm: Array
    client_state: Any = None


def member_half(
    algorithm: Algorithm, local: ClientMethod, shared: Any, carry: Any, examples: Array, trip: Trip
) -> Update:
    """What arrives of a member's work: an update, and under a plan one within the limit."""
    update = local.finish(shared, carry, examples)
    if algorithm.plan is not None:
        update = clip(update, trip.clip_norm)
    wanted = update.delta
    if algorithm.feedback:
        wanted = tree.add(wanted, trip.client_state.residual)
    arrived = masked(trip.send(wanted), update.mask)
    there = eqx.tree_at(lambda u: u.delta, update, arrived)
    return _remember(
        algorithm, clip_again(algorithm, there, trip.clip_norm), wanted, trip.client_state
    )


def clip_again(algorithm: Algorithm, arrived: Update, clip_norm: Array) -> Update:
    """What arrived, clipped again under a plan where the codec may have made it longer."""
    if algorithm.plan is None or algorithm.upload.norm_gain == 1.0:
        return arrived
    return eqx.tree_at(lambda u: u.unclipped, clip(arrived, clip_norm), arrived.unclipped)


def _remember(algorithm: Algorithm, update: Update, wanted: Params, client_state: Any) -> Update:
    if not algorithm.remembers:
        return update
    residual = None
    if algorithm.feedback:
        # A refused member sent nothing, and still has what it had.
        left = tree.sub(wanted, update.delta)
        residual = tree.where(update.refused > 0, client_state.residual, left)
    return eqx.tree_at(
        lambda u: u.client_state,
        update,
        ClientState(update.client_state, residual),
        is_leaf=lambda x: x is None,
    )
