"""Noise for a stream of sums.

In:       each round's sum, once, in order, with the key of that round.
Out:      the sum plus noise, and what the next round must remember.
Promise:  the noise has the stated law; the same key gives the same noise; memory is a tree of
          arrays of constant size, so that a checkpoint holds all of it.
Not here: correlated noise (`correlated.py`), the noise of a plan (`catalog.py`), what noise costs
          (`cost.py`), seeds (the caller).

What is added in a round is the increment of the noise of the running sum. A server optimiser that
adds its inputs up, as SGD does, with or without momentum, therefore takes the steps of DP-FTRL:
with u_t = g_t + N_t - N_(t-1), the momentum m_t = beta m_(t-1) + u_t sums to
V_t = beta V_(t-1) + (g_1 + ... + g_t + N_t), and w_0 - eta V_t is what DP-FTRL computes from the
noisy prefix sum. Any other optimiser is post-processing of the same noisy sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PRNGKeyArray

from fedlm.core.types import Params


class Noise(NamedTuple):
    """Noise for a stream of sums; `add` sees each round's sum exactly once."""

    init: Callable[[Params], Any]
    add: Callable[[Params, Any, PRNGKeyArray], tuple[Params, Any]]


def silent() -> Noise:
    """Return a `Noise` that adds nothing."""
    return Noise(init=lambda params: (), add=lambda total, memory, key: (total, memory))


def gaussian(stddev: float) -> Noise:
    """Make independent normal noise for every round."""

    def add(total: Params, memory: Any, key: PRNGKeyArray) -> tuple[Params, Any]:
        return add_scaled(total, standard_normal(key, total), stddev), memory

    return Noise(init=lambda params: (), add=add)


def standard_normal(key: PRNGKeyArray, like: Params) -> Params:
    """Draw independent standard normals in the shapes of `like`, in at least 32 bits."""
    leaves, structure = jax.tree.flatten(like)
    keys = jr.split(key, max(len(leaves), 1))
    draws = [
        jr.normal(k, x.shape, jnp.promote_types(x.dtype, jnp.float32))
        for k, x in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(structure, draws)


def add_scaled(total: Params, noise: Params, stddev: float) -> Params:
    """Return the sum plus `stddev` times the noise, in the types of the sum."""
    return jax.tree.map(lambda x, n: (x + stddev * n).astype(x.dtype), total, noise)
