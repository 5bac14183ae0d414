"""Noise that is correlated over rounds, so that running sums have little of it.

In:       each round's sum, once, in order, with the key of that round.
Out:      the sum plus this round's increment of the noise of the running sum.
Promise:  the noise of T rounds is normal with the covariance of the tree, or of M^-1, and nothing
          else; a round beyond those planned becomes NaN instead of going out with too little.
Not here: which matrix (`strategy.py`), what it costs (`sensitivity.py`, `account.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedlm.core.by_value import by_value
from fedlm.core.chacha import CipherKey
from fedlm.core.late import late
from fedlm.core.tree import where
from fedlm.core.types import Params, PyTree
from fedlm.privacy.noise import Noise
from fedlm.privacy.normal import standard_normal
from fedlm.privacy.strategy import Strategy

toeplitz = late("jax_privacy.matrix_factorization.toeplitz")  # over a second
buffered_toeplitz = late("jax_privacy.matrix_factorization.buffered_toeplitz")  # over a second

Memory = dict[str, Any]


@by_value
def tree_noise(stddev: float, restart_every: int = 0, *, rounds: int) -> Noise:
    """Make the noise of the binary tree, in Honaker's form of least variance.

    Every dyadic block of rounds has a node with fresh noise. A complete block is estimated from its
    node and from its two halves, so its variance is 1 / (2 - 2^-d) at height d instead of 1. The
    running sum after t rounds is the sum of the blocks of t's binary digits. Only those blocks are
    remembered: about log2(rounds) of them. Round t closes as many blocks as t has trailing zeros;
    their halves leave the running sum and the closed block enters it, and that is the increment.
    """
    length = min(restart_every or rounds, rounds)
    heights = length.bit_length()
    shares = (1 / (2 - 2.0 ** -np.arange(heights))).astype(np.float32)

    def init(params: Params) -> Memory:
        return {"round": jnp.int32(0), "nodes": _stacked(params, heights)}

    def draw(like: Params, memory: Memory, key: CipherKey) -> tuple[Params, Memory]:
        weights = jnp.asarray(shares)
        since, nodes = memory["round"] % length, memory["nodes"]
        top = jax.lax.population_count(since ^ (since + 1)) - 1  # trailing ones of `since`

        def close(height: Int[Array, ""], carry: PyTree) -> Any:
            right, gone = carry
            left = jax.tree.map(lambda b: b[height], nodes)
            fresh = standard_normal(key, like, height + 1)
            block = jax.tree.map(lambda a, b, f: 0.5 * (a + b) + f, left, right, fresh)
            return block, jax.tree.map(lambda g, a: g + weights[height] * a, gone, left)

        leaf = standard_normal(key, like)
        nothing = jax.tree.map(jnp.zeros_like, leaf)
        block, gone = jax.lax.fori_loop(0, top, close, (leaf, nothing))
        step = jax.tree.map(lambda b, g: weights[top] * b - g, block, gone)
        nodes = jax.tree.map(lambda n, b: n.at[top].set(b), nodes, block)
        step = _planned(step, memory["round"], rounds)
        return step, {"round": memory["round"] + 1, "nodes": nodes}

    return Noise(stddev, init, draw)


def for_strategy(stddev: float, chosen: Strategy, *, rounds: int) -> Noise:
    """Make noise from the rows of M^-1 Z, which jax_privacy streams with the strategy's buffers.

    After the rounds of the strategy it begins anew, with nothing remembered.
    """
    inverse = _inverse(chosen)

    def empty(params: Params) -> Any:
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _wide(x)), params)
        return inverse.init_multiply(wide)

    def init(params: Params) -> Memory:
        return {"round": jnp.int32(0), "buffers": empty(params)}

    def draw(like: Params, memory: Memory, key: CipherKey) -> tuple[Params, Memory]:
        buffers = memory["buffers"]
        if chosen.rounds < rounds:
            buffers = where(memory["round"] % chosen.rounds == 0, empty(like), buffers)
        # Accelerators would round the products; the library lets ranks broadcast.
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            row, buffers = inverse.multiply_next(standard_normal(key, like), buffers)
        row = _planned(row, memory["round"], rounds)
        return row, {"round": memory["round"] + 1, "buffers": buffers}

    return Noise(stddev, init, draw)


def _inverse(chosen: Strategy) -> Any:
    """Make jax_privacy's streaming form of M^-1."""
    # Imported here: it costs over a second, which runs without such noise need not pay.
    if chosen.decay is not None:
        terms = buffered_toeplitz.BufferedToeplitz.build(
            chosen.decay, chosen.scale, dtype=jnp.float32
        )
        return terms.inverse_as_streaming_matrix()
    return toeplitz.inverse_as_streaming_matrix(
        jnp.asarray(chosen.coefficients, jnp.float32),
        column_normalize_for_n=chosen.rounds if chosen.normalized else None,
    )


def _planned(noise: Params, round: Int[Array, ""], rounds: int) -> Params:
    """Return the noise, or NaN in a round beyond the planned ones."""
    return jax.tree.map(lambda n: jnp.where(round < rounds, n, jnp.nan), noise)


def _stacked(params: Params, copies: int) -> Params:
    return jax.tree.map(lambda x: jnp.zeros((copies, *x.shape), _wide(x)), params)


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
