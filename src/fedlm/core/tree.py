"""Arithmetic on parameter trees.

In:       trees of arrays with the same structure.
Out:      trees or scalars.
Promise:  plain element-wise arithmetic; nothing here claims a bound or a law.
Not here: means (`server/aggregate.py`) and clips (`privacy`): those are claims and have rooms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Tree = Any


def add(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.subtract, a, b)


def scale(a: Tree, factor: float | Float[Array, ""]) -> Tree:
    return jax.tree.map(lambda x: x * factor, a)


def add_scaled(a: Tree, b: Tree, factor: float | Float[Array, ""]) -> Tree:
    """`a + factor * b` in one pass."""
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def zeros_like(a: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, a)


def squared_norm(a: Tree) -> Float[Array, ""]:
    leaves = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(a)]
    return jnp.sum(jnp.stack(leaves)) if leaves else jnp.zeros(())


def norm(a: Tree) -> Float[Array, ""]:
    return jnp.sqrt(squared_norm(a))


def where(ok: Bool[Array, ""], a: Tree, b: Tree) -> Tree:
    """`a` if `ok`, else `b`, leaf by leaf; what is not chosen may be NaN."""
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), a, b)


def size(a: Tree) -> int:
    """How many numbers the tree holds; works on shapes without values too."""
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(a))


def named_leaves(a: Tree) -> dict[str, Any]:
    """Leaves by dotted path, in tree order.

    >>> list(named_leaves({"cell": {"bias": 1, "weight": 2}}))
    ['cell.bias', 'cell.weight']
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(a)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def with_leaves(a: Tree, leaves: dict[str, Any]) -> Tree:
    """`a` with every leaf replaced by the one of the same name."""
    flat, structure = jax.tree_util.tree_flatten_with_path(a)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    return jax.tree_util.tree_unflatten(structure, [leaves[name] for name in names])


def split(a: Tree, keep: Sequence[bool]) -> tuple[Tree, Tree]:
    """Return the leaves that `keep` names and the others, each with None in place of the rest."""
    leaves, structure = jax.tree.flatten(a)
    both = list(zip(leaves, keep, strict=True))
    kept = jax.tree.unflatten(structure, [x if k else None for x, k in both])
    return kept, jax.tree.unflatten(structure, [None if k else x for x, k in both])


def join(a: Tree, b: Tree) -> Tree:
    """Return the tree that was split into `a` and `b`; without `b`, `a` itself."""
    if b is None:
        return a
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=_is_none)


def without(a: Tree, b: Tree) -> Tree:
    """Return `a` with None wherever `b` has a leaf; without `b`, `a` itself."""
    if b is None:
        return a
    return jax.tree.map(lambda held, x: x if held is None else None, b, a, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def take(a: Tree, at: Any) -> Tree:
    """Row `at` of every leaf, or several rows."""
    return jax.tree.map(lambda x: x[at], a)


def thin(a: Tree, keep: Sequence[bool] | None) -> Tree:
    """`a` with the leaves that are not kept replaced by empty ones; None keeps all."""
    if keep is None:
        return a
    leaves, structure = jax.tree.flatten(a)
    made = [x if k else np.zeros(0, x.dtype) for x, k in zip(leaves, keep, strict=True)]
    return jax.tree.unflatten(structure, made)


def fill(a: Tree, like: Tree, keep: Sequence[bool] | None) -> Tree:
    """The inverse of `thin`, with zeros for what was left out."""
    if keep is None:
        return a
    leaves, structure = jax.tree.flatten(a)
    wide = zip(leaves, jax.tree.leaves(like), keep, strict=True)
    return jax.tree.unflatten(structure, [x if k else jnp.zeros_like(y) for x, y, k in wide])


def sha256(a: Tree) -> str:
    """A fingerprint of names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(a).items():
        array = np.asarray(leaf)
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
