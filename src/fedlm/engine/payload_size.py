"""A member's frame: its real bytes, and its size without them.

In:       what a member carries after its last batch; or only which member it is.
Out:      what arrives through bytes, and how many there were.
Promise:  a stated size is the size of the frame that would be sent.
Not here: formats (`wire`), sums (`loop.py`, `mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.core.types import ClientMethod, Codec, Cohort, Message, PyTree
from fedlm.federation.algorithm import Algorithm, ClientHalf, update_like
from fedlm.federation.member import Finished, member_half


def kept_leaves(mask: PyTree) -> list[bool] | None:
    """Return a member's mask in the form that codecs take."""
    return None if mask is None else [bool(x) for x in np.asarray(mask)]


def through_bytes(
    codec: Codec, delta: PyTree, mask: PyTree, key: PRNGKeyArray
) -> tuple[PyTree, int]:
    """Encode and decode a change; return the result and its bytes, frozen leaves left out."""
    keep = kept_leaves(mask)
    payload = codec.encode(delta, key, keep)
    arrived = codec.decode(payload, tree.thin(delta, keep))
    return tree.fill(arrived, delta, keep), len(payload)


def to_send(half: ClientHalf, local: ClientMethod, done: Finished) -> PyTree:
    """Return the change that a member gives to its codec."""
    given = []

    def send(delta: PyTree) -> PyTree:
        given.append(delta)
        return delta

    member_half(half, local, done, send)
    return given[0]


def really_sent(codec: Codec, delta: PyTree, mask: PyTree, key: PRNGKeyArray) -> int:
    """Return the size of a member's frame by making it."""
    return len(codec.encode(delta, key, kept_leaves(mask)))


def sizes(algorithm: Algorithm, sent: Message, cohort: Cohort, seed: int) -> Iterator[int]:
    """Return the size of each member's frame, by arithmetic on shapes."""
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
    local: ClientMethod, like: PyTree, seed: int, round: int, member: int
) -> list[bool] | None:
    """Return the leaves that a member draws to train; both sides can derive them."""
    if local.draw is None:
        return None
    leaves, structure = jax.tree.flatten(like)
    shapes = tuple(leaf.shape for leaf in leaves)
    key = key_for(seed, "upload", round=round, member=member)
    mask = _draw(local.draw, structure, shapes, jr.fold_in(key, 1))
    return [bool(x) for x in np.asarray(mask)]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(draw: Callable[..., Any], structure: Any, shapes: Any, key: PRNGKeyArray) -> PyTree:
    """Draw a member's leaves from the shapes of all leaves."""
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return draw(jax.tree.unflatten(structure, leaves), key)
