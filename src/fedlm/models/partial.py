"""Which numbers of a model a member trains.

In:       a model's shapes, a share, a rank, keys that both sides know.
Out:      a `TrainablePart`: all of it, a subset of its leaves, or low-rank factors of them; the
          leaves that a fraction or name patterns choose.
Promise:  what is not trained keeps its bits; a subset follows from its key alone, so that no
          index travels.
Not here: backbones and personal layers (`split.py`), optimisers, bytes (`wire`).

Only tensors that multiply may be held still (matrices, embeddings, gains of norms); shifts and
biases are few and always train. Subsets are drawn in random order: a tensor is taken if that brings
the sum of sizes nearer to the share asked for.

Where the subset is the same in every round, the server has nothing to say about the other leaves:
they are an algorithm's base (`tree.split`), and members train `ON_BASE`. Otherwise the server holds
the whole model, and `subset` picks what a round trains.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.types import Params, TrainablePart

ON_BASE = TrainablePart(
    init=lambda shared: shared.rest,
    merge=lambda shared, trained: tree.join(trained, shared.base),
)
"""What a server sends, trained whole; members hold the other leaves as their base (`OnBase`)."""


def may_freeze(params: Params) -> list[bool]:
    """The leaves that may be held still, in tree order."""
    leaves = tree.named_leaves(params).items()
    return [len(x.shape) >= 2 or name.endswith("gain") for name, x in leaves]


def draw_leaves(params: Params, share: float, key: PRNGKeyArray) -> Float[Array, " leaves"]:
    """One for each leaf that trains, zero for the others."""
    free = np.array(may_freeze(params))
    sizes = np.array([tree.size(leaf) for leaf in jax.tree.leaves(params)])
    target = share * float(sizes[free].sum())
    order = jr.permutation(key, len(sizes))

    def take(filled: Array, place: Array) -> tuple[Array, Array]:
        size = jnp.asarray(np.where(free, sizes, 0), jnp.float32)[place]
        nearer = jnp.abs(filled + size - target) < jnp.abs(filled - target)
        chosen = jnp.asarray(free)[place] & nearer
        return filled + jnp.where(chosen, size, 0.0), chosen

    _, chosen = jax.lax.scan(take, jnp.zeros(()), order)
    taken = jnp.zeros(len(sizes), bool).at[order].set(chosen)
    return (taken | ~jnp.asarray(free)).astype(jnp.float32)


def leaves_by_fraction(like: Params, fraction: float, key: PRNGKeyArray) -> list[bool]:
    """Choose the leaves that train: a fraction of what may be held still, and all the rest."""
    return [bool(x) for x in np.asarray(draw_leaves(like, fraction, key))]


def leaves_by_name(like: Params, patterns: Sequence[str]) -> list[bool]:
    """Choose the leaves that train: those whose dotted name one of the patterns matches.

    >>> leaves_by_name({"embedding": 0, "blocks": [{"bias": 1}, {"bias": 2}]}, ["blocks.1.*"])
    [False, True, False]

    Raises:
        ConfigError: if a pattern matches no leaf.
    """
    names = list(tree.named_leaves(like))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"{pattern!r}: this model has no such leaf; it has {', '.join(names[:6])}, ..."
            )
    return [any(fnmatch.fnmatchcase(name, p) for p in patterns) for name in names]


def subset(keep: Sequence[bool]) -> TrainablePart:
    """The leaves that `keep` names: the backward work of the others is never done."""

    def pick(params: Params) -> Params:
        return tree.split(params, keep)[0]

    def expand(params: Params, key: PRNGKeyArray, delta: Params) -> Params:
        rest = iter(jax.tree.leaves(delta))
        leaves, structure = jax.tree.flatten(params)
        made = [next(rest) if k else jnp.zeros_like(x) for x, k in zip(leaves, keep, strict=True)]
        return jax.tree.unflatten(structure, made)

    return TrainablePart(
        shared=lambda params, key: params,
        init=pick,
        merge=lambda shared, trained: eqx.combine(trained, shared),
        expand=expand,
    )


def drawn_subset(params: Params, share: float, key: PRNGKeyArray) -> TrainablePart:
    """A subset for all members, drawn once."""
    return subset(leaves_by_fraction(params, share, key))


def own_subset(share: float) -> TrainablePart:
    """All leaves in one program; each member trains those that its own key draws."""
    return TrainablePart(draw=lambda params, key: draw_leaves(params, share, key))


class Basis(NamedTuple):
    """A model that is held still, and for each matrix the factor that members do not train."""

    params: Params
    fixed: list[Any]


def low_rank(like: Params, rank: int) -> TrainablePart:
    """Updates of matrices as products of two factors, one drawn anew each round and known to all.

    For a matrix of m by n, n the smaller, members train B of m by `rank` in B A; A has nearly
    orthonormal rows. The mean of products is the product of the mean: nothing is approximated
    when updates are added up. Leaves that are no matrix, or too small to gain, train as they are.
    """
    shapes = [x.shape for x in jax.tree.leaves(like)]

    def start(shared: Basis) -> list[Any]:
        whole = jax.tree.leaves(shared.params)
        both = zip(whole, shared.fixed, strict=True)
        return [x if a is None else jnp.zeros((max(x.shape), rank)) for x, a in both]

    def merge(shared: Basis, trained: list[Any]) -> Params:
        whole, structure = jax.tree.flatten(shared.params)
        all_of = zip(whole, shared.fixed, trained, strict=True)
        made = [b if a is None else x + _product(b, a, x.shape) for x, a, b in all_of]
        return jax.tree.unflatten(structure, made)

    def expand(params: Params, key: PRNGKeyArray, delta: list[Any]) -> Params:
        all_of = zip(shapes, _fixed_factors(shapes, rank, key), delta, strict=True)
        made = [d if a is None else _product(d, a, shape) for shape, a, d in all_of]
        return jax.tree.unflatten(jax.tree.structure(params), made)

    return TrainablePart(
        shared=lambda params, key: Basis(params, _fixed_factors(shapes, rank, key)),
        init=start,
        merge=merge,
        expand=expand,
    )


def _fixed_factors(shapes: list[tuple[int, ...]], rank: int, key: PRNGKeyArray) -> list[Any]:
    """For each matrix that is larger than the rank, the factor that is not trained."""
    keys = jr.split(key, len(shapes))
    return [
        jr.normal(k, (rank, min(shape))) / jnp.sqrt(min(shape))
        if len(shape) == 2 and rank < min(shape)
        else None
        for shape, k in zip(shapes, keys, strict=True)
    ]


def _product(trained: Array, fixed: Array, shape: tuple[int, ...]) -> Array:
    change = trained @ fixed
    return change if shape[0] >= shape[1] else change.T


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """What a kind of part may be made from; each kind reads what it needs."""

    fraction: float = 1.0  # of what may be held still, how much trains
    subsets: int = 4  # that take turns
    rank: int = 8  # of a matrix's update


@dataclass(frozen=True, kw_only=True)
class PartKind:
    """A kind of part: `make(shapes, options, key)` returns those that rounds train in turn."""

    make: Callable[[Params, PartOptions, PRNGKeyArray], tuple[TrainablePart, ...]]
    takes_fraction: bool = False
    takes_feedback: bool = False  # what a codec left out of an update is trained again next time
    by_member: bool = False  # members train leaves of their own, so codecs must take leaf by leaf
    may_be_private: bool = True  # the clip bounds what the noise is added to


def _in_turn(like: Params, options: PartOptions, key: PRNGKeyArray) -> tuple[TrainablePart, ...]:
    keys = jr.split(key, options.subsets)
    return tuple(drawn_subset(like, options.fraction, k) for k in keys)


TRAINABLE: dict[str, PartKind] = {
    "all": PartKind(make=lambda like, options, key: (TrainablePart(),), takes_feedback=True),
    "fixed": PartKind(
        make=lambda like, options, key: (drawn_subset(like, options.fraction, key),),
        takes_fraction=True,
        takes_feedback=True,
    ),
    "round": PartKind(make=_in_turn, takes_fraction=True),
    "member": PartKind(
        make=lambda like, options, key: (own_subset(options.fraction),),
        takes_fraction=True,
        by_member=True,
    ),
    "low-rank": PartKind(
        make=lambda like, options, key: (low_rank(like, options.rank),), may_be_private=False
    ),
}
