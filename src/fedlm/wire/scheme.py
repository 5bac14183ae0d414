"""How a codec is made from its arithmetic and its bytes.

In:       a `Scheme`: squeeze and expand inside a program, write and read outside.
Out:      a `Codec`.
Promise:  `encode` sends what `squeeze` made and `decode` hands the same to `expand`, so
          `apply = expand after squeeze` is what arrives; shapes and types are kept; the body's
          length is checked against the model before anything is read.
Not here: any one format (one file a family).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt16

from fedlm.core.errors import WireError
from fedlm.core.types import Codec, Params
from fedlm.wire.bitwise import coins, tame
from fedlm.wire.frame import Reader, open_frame, overhead, seal_frame

Vector = Float[Array, " n"]
Vectors = list[Vector]
Coins = UInt16[Array, " n"]
Sizes = tuple[int, ...]
Parts = Any
"""What a scheme sends: a tree of small arrays."""


class Scheme(NamedTuple):
    """A codec without its envelope, over the tamed vectors of a tree that are not empty."""

    name: str
    squeeze: Callable[[Vectors, PRNGKeyArray], Parts]
    expand: Callable[[Parts, Sizes], Vectors]
    write: Callable[[Parts, Sizes], Iterable[bytes]]
    read: Callable[[Reader, Sizes], Parts]
    body_bytes: Callable[[Sizes], int]
    norm_gain: float


class LeafScheme(NamedTuple):
    """The same for one vector; `random` says whether `squeeze` needs coins."""

    name: str
    squeeze: Callable[[Vector, Coins | None], Parts]
    expand: Callable[[Parts, int], Vector]
    write: Callable[[Parts, int], bytes]
    read: Callable[[Reader, int], Parts]
    leaf_bytes: Callable[[int], int]
    norm_gain: float
    random: bool = False


def codec_of(scheme: Scheme, *, by_leaf: bool = False) -> Codec:
    """The codec of a scheme; `by_leaf`: its parts are a list, one a leaf."""
    squeeze = jax.jit(lambda update, key: _squeeze(scheme, update, key))
    # Leaves that are left out make any number of different lists: those are not compiled whole.
    expand = scheme.expand if by_leaf else jax.jit(scheme.expand, static_argnums=1)

    def encode(update: Params, key: PRNGKeyArray, keep: Sequence[bool] | None = None) -> bytes:
        parts, sizes = jax.tree.map(np.asarray, squeeze(update, key)), sizes_of(update)
        if keep is not None:
            if not by_leaf:
                raise WireError(f"codec {scheme.name}: leaves are mixed, none can be left out.")
            whole = [leaf.size > 0 for leaf in jax.tree.leaves(update)]
            sent = [kept for kept, some in zip(keep, whole, strict=True) if some]
            parts = [part for part, kept in zip(parts, sent, strict=True) if kept]
            sizes = tuple(size for size, kept in zip(sizes, sent, strict=True) if kept)
        return seal_frame(scheme.name, *scheme.write(parts, sizes))

    def decode(payload: bytes, like: Params) -> Params:
        sizes = sizes_of(like)
        reader = Reader(open_frame(payload, scheme.name), scheme.body_bytes(sizes))
        return _rebuild(expand(scheme.read(reader, sizes), sizes), like)

    @jax.jit
    def apply(update: Params, key: PRNGKeyArray) -> Params:
        parts = _squeeze(scheme, update, key)
        return _rebuild(scheme.expand(parts, sizes_of(update)), update)

    def encoded_bytes(like: Params) -> int:
        return overhead(scheme.name) + scheme.body_bytes(sizes_of(like))

    gain = scheme.norm_gain
    return Codec(scheme.name, encode, decode, apply, encoded_bytes, gain, by_leaf=by_leaf)


def sizes_of(like: Params) -> Sizes:
    """How many numbers each leaf holds, without the empty ones."""
    sizes = (int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(like))
    return tuple(size for size in sizes if size)


def per_leaf(scheme: LeafScheme) -> Codec:
    """The codec of a scheme that knows one vector and nothing of the others."""

    expand = jax.jit(scheme.expand, static_argnums=1)

    def squeeze(vectors: Vectors, key: PRNGKeyArray) -> Parts:
        sizes = [len(x) for x in vectors]
        drawn = coins(key, sizes) if scheme.random else [None] * len(sizes)
        return [scheme.squeeze(x, coin) for x, coin in zip(vectors, drawn, strict=True)]

    return codec_of(
        Scheme(
            name=scheme.name,
            squeeze=squeeze,
            expand=lambda parts, sizes: list(map(expand, parts, sizes)),
            write=lambda parts, sizes: map(scheme.write, parts, sizes),
            read=lambda reader, sizes: [scheme.read(reader, size) for size in sizes],
            body_bytes=lambda sizes: sum(map(scheme.leaf_bytes, sizes)),
            norm_gain=scheme.norm_gain,
        ),
        by_leaf=True,
    )


def _squeeze(scheme: Scheme, update: Params, key: PRNGKeyArray) -> Parts:
    leaves = [leaf for leaf in jax.tree.leaves(update) if leaf.size]
    flat = [tame(jnp.ravel(leaf).astype(jnp.float32)) for leaf in leaves]
    return scheme.squeeze(flat, key)


def _rebuild(vectors: Vectors, like: Params) -> Params:
    leaves, structure = jax.tree.flatten(like)
    rest = iter(vectors)
    made = [
        (next(rest) if leaf.size else jnp.zeros((0,))).reshape(leaf.shape).astype(leaf.dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, made)
