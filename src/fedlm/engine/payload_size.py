"""A member's frame: its real bytes, and its size without them.

In:       what a member carries after its last batch; or only which member it is.
Out:      what arrives through bytes, and how many there were.
Promise:  a stated size is the size of the frame that would be sent.
Not here: formats (`wire`), sums (`loop.py`, `mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.core.types import ClientMethod, Codec, Prepared
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import Trip, member_half


class Work(NamedTuple):
    """A member at the end of its work: `state` has its carry and what it remembered before."""

    shared: Any
    state: Any
    examples: Any
    clip_norm: Any


def kept_leaves(mask: Any) -> list[bool] | None:
    """A member's mask, as codecs want it."""
    return None if mask is None else [bool(x) for x in np.asarray(mask)]


def through_bytes(codec: Codec, delta: Any, mask: Any, key: PRNGKeyArray) -> tuple[Any, int]:
    """What arrives, and in how many bytes; leaves that are held still are not among them."""
    keep = kept_leaves(mask)
    payload = codec.encode(delta, key, keep)
    arrived = codec.decode(payload, tree.thin(delta, keep))
    return tree.fill(arrived, delta, keep), len(payload)


def upload_key(seed: int, one: Prepared) -> PRNGKeyArray:
    """The key of the only member of a cohort."""
    return key_for(seed, "upload", round=one.round, member=one.members[0])


def really_sent(algorithm: Algorithm, local: ClientMethod, work: Work, key: PRNGKeyArray) -> int:
    """How many bytes the frame of this member takes: it is made, and thrown away."""
    sizes = []
    carry = work.state.carry

    def send(delta: Any) -> Any:
        sizes.append(len(algorithm.upload.encode(delta, key, kept_leaves(carry.mask))))
        return delta

    trip = Trip(send, jnp.asarray(work.clip_norm), work.state.client_state)
    member_half(algorithm, local, work.shared, carry, jnp.float32(work.examples), trip)
    return sizes[0]


def sizes(algorithm: Algorithm, sent: Any, cohort: Prepared, seed: int) -> Iterator[int]:
    """The size of each member's frame, by arithmetic on shapes."""
    codec, local = algorithm.upload, algorithm.local_of(cohort.round)
    like = update_like(algorithm, sent, cohort.round).delta
    if local.draw is None:
        size = codec.encoded_bytes(like)
        yield from (size for _ in cohort.members)
        return
    for member in cohort.members:
        keep = own_leaves(local, like, seed, cohort.round, member)
        yield codec.encoded_bytes(tree.thin(like, keep))


def own_leaves(
    local: ClientMethod, like: Any, seed: int, round: int, member: int
) -> list[bool] | None:
    """Which leaves a member trains, where it has leaves of its own: both sides can tell."""
    if local.draw is None:
        return None
    leaves, structure = jax.tree.flatten(like)
    shapes = tuple(leaf.shape for leaf in leaves)
    key = key_for(seed, "upload", round=round, member=member)
    mask = _draw(local.draw, structure, shapes, jr.fold_in(key, 1))
    return [bool(x) for x in np.asarray(mask)]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(draw: Callable[..., Any], structure: Any, shapes: Any, key: PRNGKeyArray) -> Any:
    """A member's leaves, from the shapes of all of them."""
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return draw(jax.tree.unflatten(structure, leaves), key)
