"""Which numbers of a model a member trains.

In:       a model's shapes, a share, a rank, keys that both sides know.
Out:      a `TrainablePart`: all of it, a subset of its leaves, or low-rank factors of them; the
          leaves that a fraction or name patterns choose.
Promise:  what is not trained keeps its bits; a subset follows from its key alone, so that no
          index travels.
Not here: backbones and personal layers (`split.py`), optimisers, bytes (`wire`).

Only tensors that multiply may be frozen (matrices, embeddings, gains of norms); shifts and biases
are few and always train. A subset is drawn by visiting tensors in random order: a tensor is taken
if that brings the sum of sizes nearer to the requested share.

If the subset is the same in every round, the server never changes the other leaves: they are an
algorithm's base (`tree.split`), and members train `ON_BASE`. Otherwise the server holds
the whole model, and `subset` picks what a round trains.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.errors import ConfigError
from fedlm.core.types import Params, Shared, TrainablePart
from fedlm.models import adapters
from fedlm.models.layers import Adapted

ON_BASE = TrainablePart(
    init=lambda shared: shared.rest,
    merge=lambda shared, trained: tree.join(trained, shared.base),
)
"""All leaves that a server sends; members hold the other leaves as their base (`OnBase`)."""


def may_freeze(params: Params) -> list[bool]:
    """Tell for each leaf, in tree order, whether it may be frozen."""
    leaves = tree.named_leaves(params).items()
    return [len(x.shape) >= 2 or name.endswith("gain") for name, x in leaves]


def draw_leaves(params: Params, share: float, key: PRNGKeyArray) -> Float[Array, " leaves"]:
    """Draw the leaves that train: one for each of them, zero for the others."""
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
    """Choose the leaves that train: a fraction of those that may be frozen, and all others."""
    return [bool(x) for x in np.asarray(draw_leaves(like, fraction, key))]


def leaves_by_name(like: Params, patterns: Sequence[str]) -> list[bool]:
    """Choose the leaves whose dotted name matches one of the patterns.

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
    """Return the part that trains the leaves marked in `keep`.

    No gradients are computed for the other leaves.
    """
    return _subset(tuple(keep))


@by_value
def _subset(keep: tuple[bool, ...]) -> TrainablePart:
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
    """Draw one subset that all members train."""
    return subset(leaves_by_fraction(params, share, key))


@by_value
def own_subset(share: float) -> TrainablePart:
    """Return the part in which each member trains the leaves that its own key draws.

    One program serves all members: it holds all leaves, and a mask selects those of a member.
    """
    return TrainablePart(draw=lambda params, key: draw_leaves(params, share, key))


class Basis(NamedTuple):
    """A frozen model, and for each matrix the factor that members do not train."""

    params: Params
    fixed: list[Any]


def low_rank(like: Params, rank: int) -> TrainablePart:
    """Return the part that trains low-rank updates of matrices.

    For a matrix of m by n, n the smaller, the update is B A. Members train B (m by `rank`). A has
    nearly orthonormal rows, is drawn anew in each round, and is known to all. Since A is common,
    the mean of the products is the product of the mean B with A: aggregation approximates
    nothing. Leaves that are no matrix, or too small to gain, are trained in full.
    """
    return _low_rank(tuple(x.shape for x in jax.tree.leaves(like)), rank)


@by_value
def _low_rank(shapes: tuple[tuple[int, ...], ...], rank: int) -> TrainablePart:
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


def _fixed_factors(shapes: tuple[tuple[int, ...], ...], rank: int, key: PRNGKeyArray) -> list[Any]:
    """Draw the factor that is not trained, for each matrix that is larger than the rank."""
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


def adapters_and_residual() -> TrainablePart:
    """Return the part that trains both factors of adapters, with an exact mean (FedEx-LoRA).

    The mean of products B A is not the product of the means. So members send both factors, the
    server sums their products too, and adds what the mean factors lack to the frozen matrix:

        A <- mean A_i,  B <- mean B_i,  W <- W + scale (mean B_i A_i - mean B_i mean A_i)

    It holds W, A and B of every adapted layer, and sends them; members send A and B (Singhal et
    al. 2024).
    """

    def each(compute: Callable[[Adapted, Adapted], Adapted], a: Params, b: Params) -> Params:
        return jax.tree.map(compute, a, b, is_leaf=lambda x: isinstance(x, Adapted))

    def init(shared: Shared) -> Params:
        def factors(layer: Adapted, _: Adapted) -> Adapted:
            return replace(layer, weight=None)  # type: ignore[arg-type]

        return each(factors, shared.rest, shared.rest)

    def merge(shared: Shared, trained: Params) -> Params:
        whole = each(lambda x, t: replace(t, weight=x.weight), shared.rest, trained)
        return tree.join(whole, shared.base)

    def lift(shared: Shared, delta: Params) -> Params:
        def one(start: Adapted, d: Adapted) -> Adapted:
            return replace(d, weight=_moved_product(start, d))

        return each(one, shared.rest, delta)

    def expand(params: Params, key: PRNGKeyArray, delta: Params) -> Params:
        def one(start: Adapted, d: Adapted) -> Adapted:
            return replace(d, weight=start.scale * (d.weight - _moved_product(start, d)))

        return each(one, params, delta)

    return TrainablePart(init=init, merge=merge, lift=lift, expand=expand)


def _moved_product(start: Adapted, change: Adapted) -> Array:
    """Return by how much a change of both factors moves their product."""
    moved = (start.lora_b + change.lora_b) @ (start.lora_a + change.lora_a)
    return moved - start.lora_b @ start.lora_a


def _both_factors(like: Params) -> list[str]:
    """Return the names of an adapted layer's matrix and factors, for all of them."""
    names = [n.removesuffix("lora_b") for n in tree.named_leaves(like) if n.endswith(".lora_b")]
    return [f"{name}{part}" for name in names for part in ("weight", "lora_a", "lora_b")]


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """Options of all kinds of parts; each kind reads the options that it needs."""

    fraction: float = 1.0  # share that trains, of the leaves that may be frozen
    subsets: int = 4  # number of subsets that take turns
    rank: int = 8  # rank of a matrix's update


def _none(like: Params, options: PartOptions, key: PRNGKeyArray) -> tuple[TrainablePart, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class PartKind:
    """A kind of part: `make(shapes, options, key)` returns the parts that rounds train in turn.

    A kind has `leaves` in its place if all rounds train the same ones.
    """

    make: Callable[[Params, PartOptions, PRNGKeyArray], tuple[TrainablePart, ...]] = _none
    takes_fraction: bool = False
    takes_feedback: bool = False  # the next round trains what a codec left out of an update
    by_member: bool = False  # members train different leaves, so codecs must work per leaf
    may_be_private: bool = True  # the clip bounds what the noise is added to
    # Tells for each leaf whether it trains, if that is the same in every round: then the other
    # leaves are the algorithm's base, which is held once and never sent.
    leaves: Callable[[Params, PartOptions, PRNGKeyArray], list[bool]] | None = None
    adapts: bool = False  # the model gets adapters before it is trained
    # The part that members train where the server holds `leaves` alone.
    on_base: TrainablePart = ON_BASE
    exact_mean: bool = False  # the server must step to the mean itself

    @property
    def outlives_round(self) -> bool:
        """Whether an update means the same in a later round than the one it was made for."""
        return self.takes_feedback or self.by_member


def _in_turn(like: Params, options: PartOptions, key: PRNGKeyArray) -> tuple[TrainablePart, ...]:
    keys = jr.split(key, options.subsets)
    return tuple(drawn_subset(like, options.fraction, k) for k in keys)


def _fraction(like: Params, options: PartOptions, key: PRNGKeyArray) -> list[bool]:
    return leaves_by_fraction(like, options.fraction, key)


def _adapters(like: Params, options: PartOptions, key: PRNGKeyArray) -> list[bool]:
    return leaves_by_name(like, [adapters.TRAINED])


TRAINABLE: dict[str, PartKind] = {
    "all": PartKind(make=lambda like, options, key: (TrainablePart(),), takes_feedback=True),
    "fixed": PartKind(
        leaves=_fraction,
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
    "lora": PartKind(
        leaves=_adapters,
        takes_feedback=True,
        adapts=True,
    ),
    "lora-both": PartKind(
        leaves=lambda like, options, key: leaves_by_name(like, _both_factors(like)),
        on_base=adapters_and_residual(),
        may_be_private=False,
        adapts=True,
        exact_mean=True,
    ),
}
