"""A member's own change of every matrix of a model, of low rank (LoRA, Hu et al. 2022).

In:       a model; a key.
Out:      factors, a few numbers for every row of a matrix; the model that they make.
Promise:  fresh factors change nothing; the change of a matrix has at most rank `RANK`; the random
          factors follow from the key and are never trained.
Not here: adapters that a federation trains together (`models/adapters.py`), own steps (`ways.py`).

    W' = W + SCALE B A        A random and fixed, B zero at first and trained
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.types import Params

RANK, SCALE = 8, 2.0

Factors = dict[str, Array]  # by the name of the matrix


class Fixed(NamedTuple):
    """What a member's steps leave as it is: the federation's model, and the factors A."""

    model: Params
    across: Factors


def begin(model: Params, key: PRNGKeyArray) -> tuple[Factors, Fixed]:
    """Return fresh factors B for every matrix with at least `RANK` rows and columns."""
    matrices = {
        name: leaf
        for name, leaf in tree.named_leaves(model).items()
        if leaf.ndim == 2 and min(leaf.shape) >= RANK and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    across = {}
    for name, leaf in matrices.items():
        drawn = jr.normal(jr.fold_in(key, zlib.crc32(name.encode())), (RANK, leaf.shape[1]))
        across[name] = drawn * leaf.shape[1] ** -0.5
    return {k: jnp.zeros((x.shape[0], RANK)) for k, x in matrices.items()}, Fixed(model, across)


def adapted(factors: Factors, fixed: Fixed) -> Params:
    """Return the whole model with the change that factors make."""
    leaves = tree.named_leaves(fixed.model)
    for name, factor in factors.items():
        change = SCALE * factor @ fixed.across[name]
        leaves[name] = leaves[name] + change.astype(leaves[name].dtype)
    return tree.with_leaves(fixed.model, leaves)
