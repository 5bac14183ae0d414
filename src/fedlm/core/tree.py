"""Arithmetic on parameter trees.

In:       trees of arrays with the same structure.
Out:      trees or scalars.
Promise:  plain element-wise arithmetic; nothing here claims a bound or a law.
Not here: means (`server/aggregate.py`) and clips (`privacy`): they claim something, so each
          has its own package.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedlm.core.types import PyTree


def add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


def sub(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.subtract, a, b)


def scale(a: PyTree, factor: float | Float[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: x * factor, a)


def add_scaled(a: PyTree, b: PyTree, factor: float | Float[Array, ""]) -> PyTree:
    """Return `a + factor * b`, computed in one pass."""
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def from_host(a: PyTree) -> PyTree:
    """Return a tree with copies of its host arrays as arrays of JAX.

    `jnp.asarray` would compile a program for every shape, and a lone `device_put` may go on to
    read the memory that it was given.
    """
    return jax.device_put(jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), a))


def zeros_like(a: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, a)


def squared_norm(a: PyTree) -> Float[Array, ""]:
    leaves = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(a)]
    return once(jnp.sum(jnp.stack(leaves))) if leaves else jnp.zeros(())


def once(number: Float[Array, ""]) -> Float[Array, ""]:
    """Return a number as it is, made such that a compiled program computes it once.

    XLA writes cheap arithmetic on numbers again into the program of every leaf that needs them: the
    squared norm of a model of 54 leaves was 53 additions in each of 54 programs. It drops barriers
    before it does so, but does not repeat a division; what it divides by here is one.
    """
    return number / (jnp.minimum(jnp.abs(number), 0.0) + 1.0)


def norm(a: PyTree) -> Float[Array, ""]:
    return jnp.sqrt(squared_norm(a))


def where(ok: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """Return `a` if `ok`, else `b`, leaf by leaf; the other tree may hold NaN."""
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), a, b)


def size(a: PyTree) -> int:
    """Count the numbers in a tree; its leaves may also be shapes without values."""
    # Not np.prod, which is silent where 64 bits are too few.
    return sum(math.prod(x.shape) for x in jax.tree.leaves(a))


def named_leaves(a: PyTree) -> dict[str, Any]:
    """Return the leaves by dotted path, in tree order.

    >>> list(named_leaves({"cell": {"bias": 1, "weight": 2}}))
    ['cell.bias', 'cell.weight']
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(a)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def with_leaves(a: PyTree, leaves: dict[str, Any]) -> PyTree:
    """Return `a` with every leaf replaced by the leaf of the same name in `leaves`."""
    flat, structure = jax.tree_util.tree_flatten_with_path(a)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    return jax.tree_util.tree_unflatten(structure, [leaves[name] for name in names])


def split(a: PyTree, keep: Sequence[bool]) -> tuple[PyTree, PyTree]:
    """Split a tree into the leaves that `keep` marks and the others, with None in the gaps."""
    leaves, structure = jax.tree.flatten(a)
    both = list(zip(leaves, keep, strict=True))
    kept = jax.tree.unflatten(structure, [x if k else None for x, k in both])
    return kept, jax.tree.unflatten(structure, [None if k else x for x, k in both])


def join(a: PyTree, b: PyTree) -> PyTree:
    """Join the two trees that `split` made; return `a` itself if `b` is None."""
    if b is None:
        return a
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=_is_none)


def without(a: PyTree, b: PyTree) -> PyTree:
    """Return `a` with None wherever `b` has a leaf, or `a` itself if `b` is None."""
    if b is None:
        return a
    return jax.tree.map(lambda held, x: x if held is None else None, b, a, is_leaf=_is_none)


def _is_none(x: object) -> bool:
    return x is None


def take(a: PyTree, at: Any) -> PyTree:
    """Return row `at` of every leaf, or several rows if `at` selects several."""
    return jax.tree.map(lambda x: x[at], a)


def thin(a: PyTree, keep: Sequence[bool] | None) -> PyTree:
    """Replace the leaves that `keep` does not mark by empty arrays; None keeps all leaves."""
    if keep is None:
        return a
    leaves, structure = jax.tree.flatten(a)
    made = [x if k else np.zeros(0, x.dtype) for x, k in zip(leaves, keep, strict=True)]
    return jax.tree.unflatten(structure, made)


def fill(a: PyTree, like: PyTree, keep: Sequence[bool] | None) -> PyTree:
    """Undo `thin`, with zeros for the leaves that it emptied."""
    if keep is None:
        return a
    leaves, structure = jax.tree.flatten(a)
    wide = zip(leaves, jax.tree.leaves(like), keep, strict=True)
    return jax.tree.unflatten(structure, [x if k else jnp.zeros_like(y) for x, y, k in wide])


def sha256(a: PyTree) -> str:
    """Hash the names, shapes, types and bytes of all leaves."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(a).items():
        array = np.asarray(leaf)
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
