"""Every number as it is, four bytes each.

In:       an update.
Out:      a frame of float32 in tree order, and back.
Promise:  lossless; the size depends on shapes alone.
Not here: the envelope (`frame.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.core.types import Codec, Params
from fedlm.wire.frame import open_frame, overhead, seal

NAME = "dense"


def _encode(update: Params, key: PRNGKeyArray) -> bytes:
    parts = [np.asarray(leaf, "<f4").tobytes() for leaf in jax.tree.leaves(update)]
    return seal(NAME, b"".join(parts))


def _decode(payload: bytes, like: Params) -> Params:
    body = open_frame(payload, NAME)
    leaves, structure = jax.tree.flatten(like)
    wanted = 4 * sum(leaf.size for leaf in leaves)
    if len(body) != wanted:
        raise WireError(f"dense frame holds {len(body)} bytes: this model needs {wanted}.")
    flat = np.frombuffer(body, "<f4")
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = np.split(flat, ends[:-1]) if leaves else []
    made = [jnp.asarray(p.reshape(leaf.shape)) for p, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def dense() -> Codec:
    """The codec that changes nothing."""
    return Codec(
        name=NAME,
        encode=_encode,
        decode=_decode,
        apply=lambda update, key: update,
        encoded_bytes=lambda like: overhead(NAME) + 4 * tree.size(like),
        norm_gain=1.0,
    )
