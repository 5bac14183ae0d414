"""Layers that several architectures share.

In:       arrays of rows.
Out:      arrays of rows.
Promise:  what is said to be scale-invariant does not change when the weights it names are
          multiplied by a positive number; no layer looks ahead in time.
Not here: whole models.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

# A plain norm needs a floor against rows of equal numbers; an invariant one would be bent by it.
PLAIN_FLOOR, INVARIANT_FLOOR = 1e-5, 1e-12


class Linear(eqx.Module):
    """`x W^T + b`; without a bias where homogeneity does not allow one."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        y = x @ self.weight.T
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)


def linear(key: PRNGKeyArray, inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    """Glorot weights, zero bias."""
    spread = (6.0 / (inputs + outputs)) ** 0.5
    weight = jr.uniform(key, (outputs, inputs), minval=-spread, maxval=spread)
    return Linear(weight, jnp.zeros(outputs) if bias else None)


class Norm(eqx.Module):
    """Layer norm; gain and shift only where the architecture has them."""

    gain: Float[Array, " embed"] | None
    shift: Float[Array, " embed"] | None
    floor: float = eqx.field(static=True, default=PLAIN_FLOOR)

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.floor)
        if self.gain is not None:
            x = x * jnp.broadcast_to(self.gain, x.shape)
        return x if self.shift is None else x + jnp.broadcast_to(self.shift, x.shape)


def norm(embed: int, *, shift: bool = True) -> Norm:
    """The usual layer norm."""
    return Norm(jnp.ones(embed), jnp.zeros(embed) if shift else None)


def bare_norm() -> Norm:
    """Layer norm without weights: the same for `x` and `k x`."""
    return Norm(None, None, INVARIANT_FLOOR)


def sinusoids(positions: Float[Array, " seq"], embed: int) -> Float[Array, "seq embed"]:
    """Positions as sines and cosines of falling frequency (Vaswani et al. 2017)."""
    half = embed // 2
    rates = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / max(1, half - 1))
    angles = positions[:, None] * rates[None, :]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return jnp.pad(waves, ((0, 0), (0, embed - 2 * half)))


def alibi_slopes(heads: int) -> np.ndarray:
    """How steeply each head forgets with distance (Press et al. 2022)."""
    power = 2 ** int(np.floor(np.log2(heads)))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    if power < heads:
        more = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
        slopes = np.concatenate([slopes, more])
    return slopes.astype(np.float32)


class Predictors(NamedTuple):
    """Predictions in any order: a target of PAD does not count."""

    features: Float[Array, "rows embed"]
    readout: Float[Array, "vocab embed"]
    targets: Int[Array, " rows"]


@jax.custom_vjp
def tied(
    embedding: Float[Array, "vocab embed"], tokens: Int[Array, "..."]
) -> tuple[Float[Array, "... embed"], Float[Array, "vocab embed"]]:
    """Embeddings of tokens, and the embedding itself for use as output matrix.

    The gradient of the output matrix has every entry; that of the look-up is added to it in
    place, so that no second array of that size is filled and summed.
    """
    return embedding[tokens], embedding


def _tied_forward(embedding, tokens):  # type: ignore[no-untyped-def]
    return tied(embedding, tokens), tokens


def _tied_backward(tokens, gradients):  # type: ignore[no-untyped-def]
    d_found, d_embedding = gradients
    return d_embedding.at[tokens].add(d_found), None


tied.defvjp(_tied_forward, _tied_backward)


def softmax_weights(
    scores: Float[Array, "... query key"], allowed: Array, bias: Array | None
) -> Float[Array, "... query key"]:
    """Attention as a softmax over the keys that a query may see."""
    scores = scores * 1.0 if bias is None else scores + jnp.broadcast_to(bias, scores.shape)
    return jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)


def relu_weights(
    scores: Float[Array, "... query key"],
    allowed: Array,
    bias: Array | None,
    *,
    largest: Float[Array, "... query key"],
    floor: float,
) -> Float[Array, "... query key"]:
    """Scale-invariant attention: ReLU, then each row divided by its sum.

    A distance bias acts as a factor `exp(bias)`, which a positive scale of the scores passes
    through. A row without a positive score attends to nothing, and its output is zero. Near
    such a row the quotient alone turns rounding into any weight, so a share `floor` of the
    `largest` scores that queries and keys of these lengths can have joins the sum: it scales
    as the scores do, and 0 gives the published rule.
    """
    factor = jnp.where(allowed, 1.0, 0.0)
    if bias is not None:
        factor = factor * jnp.broadcast_to(jnp.exp(bias), factor.shape)
    kept = jax.nn.relu(scores) * factor
    total = jnp.sum(kept, axis=-1, keepdims=True)
    if floor:
        total = total + floor * jnp.sum(largest * factor, axis=-1, keepdims=True)
    return kept / jnp.where(total > 0, total, 1.0)


def lengths(x: Float[Array, "... width"]) -> Float[Array, "..."]:
    """Euclidean lengths whose gradient at zero is zero."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + 1e-30)
