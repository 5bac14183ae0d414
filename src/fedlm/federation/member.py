"""A member's half of a round, up to the sum.

In:       what members of a cohort begin from; what one carries after its last batch.
Out:      one member's start; the update that arrives from it; the sum it goes into.
Promise:  the same functions in every engine; clip, then codec, then clip again where the codec may
          lengthen; a member that does not count changes nothing.
Not here: loops over members (`engine`), what the server does with the sum (`round.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedlm.core import tree
from fedlm.core.types import (
    ClientMethod,
    Message,
    Params,
    PyTree,
    Shared,
    Start,
    Starts,
    Total,
    Update,
)
from fedlm.federation.algorithm import ClientHalf, lifted
from fedlm.local.train import masked
from fedlm.privacy.clip import clip


class ClientState(NamedTuple):
    """The state that a member keeps between its rounds."""

    own: PyTree  # as its method wants it
    residual: PyTree  # what its codec left out


def start_of(starts: Starts, place: int) -> Start:
    """Return the start of one member, by its place in the cohort."""
    if isinstance(starts, Start):
        return replace(starts, client_state=tree.take(starts.client_state, place))
    return starts[place]


def model_like(starts: Starts) -> Message:
    """Return a model with the shapes of the models that members begin from."""
    return starts.model if isinstance(starts, Start) else starts[0].model


def empty_total(delta: Params, leaves: int | None = None) -> Total:
    """Return the empty sum; `leaves` is their number, if members draw the leaves they train."""
    zero = jnp.zeros(())
    shares = None if leaves is None else jnp.zeros(leaves)
    return Total(tree.zeros_like(delta), zero, zero, zero, zero, zero, zero, zero, shares)


def total_like(update: Update) -> Total:
    """Return the empty sum of updates like this one."""
    return empty_total(update.delta, None if update.mask is None else update.mask.shape[0])


def add_member(total: Total, update: Update, counts: Bool[Array, ""] | bool = True) -> Total:
    """Add a member to the sum; leave the sum unchanged unless `counts`."""
    one = jnp.where(counts, 1.0, 0.0)
    weight = tree.once(one * update.weight)
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


class Finished(NamedTuple):
    """A member after its last batch."""

    shared: Shared  # what the members of its round began from
    carry: PyTree  # what its method carried through the batches
    examples: Array  # how many it trained on
    clip_norm: Array  # the longest update it may send
    client_state: ClientState | None = None  # what it remembered before this round


def member_half(
    half: ClientHalf,
    local: ClientMethod,
    done: Finished,
    send: Callable[[Params], Params],
) -> Update:
    """Return a member's update as it arrives; `send` carries its change over the wire."""
    update = local.finish(done.shared, done.carry, done.examples)
    if half.clips:
        update = clip(update, done.clip_norm)
    wanted = update.delta
    if half.feedback:
        assert done.client_state is not None
        wanted = tree.add(wanted, done.client_state.residual)
    arrived = masked(send(wanted), update.mask)
    there = eqx.tree_at(lambda u: u.delta, update, arrived)
    bounded = clip_again(half, there, done.clip_norm)
    if local.lift is not None:  # under no plan, and nothing is remembered
        return lifted(local, done.shared, bounded)
    return _remember(half, bounded, wanted, done.client_state)


def clip_again(half: ClientHalf, arrived: Update, clip_norm: Array) -> Update:
    """Clip an arrived update again if, under a plan, its codec may have made it longer."""
    if not half.clips or half.upload.norm_gain == 1.0:
        return arrived
    return eqx.tree_at(lambda u: u.unclipped, clip(arrived, clip_norm), arrived.unclipped)


def left_out(sent: Update, arrived: Params, before: Params) -> Params:
    """Return the codec's compression error: the update minus its decoded form."""
    left = tree.sub(sent.delta, arrived)
    # A refused member sent nothing and keeps its residual.
    return tree.where(sent.refused > 0, before, left)


def _remember(half: ClientHalf, update: Update, wanted: Params, client_state: PyTree) -> Update:
    if not half.remembers:
        return update
    residual = None
    if half.feedback:
        sent = eqx.tree_at(lambda u: u.delta, update, wanted)
        residual = left_out(sent, update.delta, client_state.residual)
    return eqx.tree_at(
        lambda u: u.client_state,
        update,
        ClientState(update.client_state, residual),
        is_leaf=lambda x: x is None,
    )
