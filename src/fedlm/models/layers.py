"""Layers that several architectures share.

In:       arrays of rows.
Out:      arrays of rows.
Promise:  what is said to be scale-invariant does not change when the weights it names are
          multiplied by a positive number; no layer looks ahead in time.
Not here: whole models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.core.types import PyTree

# A plain norm needs a floor against rows of equal numbers. In an invariant norm a large floor would
# break the invariance.
PLAIN_FLOOR, INVARIANT_FLOOR = 1e-5, 1e-12


def wide(dtype: Any) -> Any:
    """Return the type for sums over numbers of a type: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def in_dtype(part: PyTree, dtype: str) -> PyTree:
    """Return a part of a model in another type; the gradient comes back in the type it had."""
    return jax.tree.map(lambda x: x.astype(dtype), part)


Product = Callable[[Array, Array], Array]


def _product(weight: Float[Array, "out in"], x: Float[Array, "... in"]) -> Float[Array, "... out"]:
    return x @ weight.T


# From so many outputs and inputs on, gradients of weights have their first factor transposed.
TALLEST_IN_PLACE, FEWEST_INPUTS = 256, 32


def weight_gradient(
    d_y: Float[Array, "rows out"], x: Float[Array, "rows in"]
) -> Float[Array, "out in"]:
    """Return `d_y^T x`.

    XLA's product walks down the columns of `d_y` in place. Where its rows are long, above all where
    their length is a power of two, neighbours of a column fall on the same few lines of a cache:
    320 x 2,048 by 320 x 512 runs at 174 GFLOP/s, and at 239 where `d_y` is transposed before. XLA
    would take that transposition into the product again, if it could see through the barrier.
    """
    if d_y.shape[1] < TALLEST_IN_PLACE or x.shape[1] < FEWEST_INPUTS:
        return d_y.T @ x
    return jax.lax.optimization_barrier(d_y.T) @ x


class Linear(eqx.Module):
    """`x W^T + b`; the bias is left out where homogeneity does not allow it."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __call__(
        self, x: Float[Array, "... in"], product: Product = _product
    ) -> Float[Array, "... out"]:
        y = product(self.weight, x)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)


class Adapted(Linear):
    """A frozen linear layer and a low-rank change of it: `x W^T + b + scale (x A^T) B^T`.

    The change is never added to the matrix: its gradient then costs `rank` columns, not a matrix.
    """

    lora_a: Float[Array, "rank in"]
    lora_b: Float[Array, "out rank"]
    scale: float = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "... in"], product: Product = _product
    ) -> Float[Array, "... out"]:
        change = product(self.lora_b, product(self.lora_a, x))
        return Linear.__call__(self, x, product) + self.scale * change


def has_adapters(part: PyTree) -> bool:
    """Return whether a layer of this part of a model has an adapter."""
    found = jax.tree.leaves(part, is_leaf=lambda x: isinstance(x, Adapted))
    return any(isinstance(x, Adapted) for x in found)


def linear(
    key: PRNGKeyArray, inputs: int, outputs: int, *, bias: bool = True, scale: float = 1.0
) -> Linear:
    """Make a linear layer with Glorot weights, times `scale`, and zero bias."""
    spread = scale * (6.0 / (inputs + outputs)) ** 0.5
    weight = jr.uniform(key, (outputs, inputs), minval=-spread, maxval=spread)
    return Linear(weight, jnp.zeros(outputs) if bias else None)


class Norm(eqx.Module):
    """Layer norm, with gain and shift only if the architecture has them."""

    gain: Float[Array, " embed"] | None
    shift: Float[Array, " embed"] | None
    floor: float = eqx.field(static=True, default=PLAIN_FLOOR)

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        short, x = x.dtype, x.astype(wide(x.dtype))
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.floor)
        if self.gain is not None:
            x = x * jnp.broadcast_to(self.gain, x.shape)
        if self.shift is not None:
            x = x + jnp.broadcast_to(self.shift, x.shape)
        return x.astype(short)


def norm(embed: int, *, shift: bool = True, floor: float = PLAIN_FLOOR) -> Norm:
    """Make the usual layer norm, with a gain and perhaps a shift."""
    return Norm(jnp.ones(embed), jnp.zeros(embed) if shift else None, floor)


# Of fresh features before an output matrix: their largest length, the length of what they have in
# common, and the spread of the logits that they may give.
LAST_LENGTH, COMMON_LENGTH, FIRST_LOGITS = 4.0, 5.0, 0.3


def last_norm(embed: int, *, shift: bool = True, floor: float = PLAIN_FLOOR) -> Norm:
    """Make the norm before a tied output matrix, such that a fresh model guesses and learns fast.

    A norm of gain one gives features of length sqrt(embed). Their product with the embedding of
    the input word, of which they are mostly made, is then so large that the model repeats its
    input; and since a step of SGD moves a logit by the rate times the squared length, large models
    run away at the usual rates. Shorter features alone would learn slowly, and first of all how
    frequent words are, which is learned through what all features have in common. So the shift
    begins with a constant. Norms take the mean away, so that no block sees that direction of the
    stream; in embeddings it serves as a bias of each word's logit.
    """
    # With a type of their own: what JAX calls weak types would have every program compiled twice.
    common = jnp.full(embed, COMMON_LENGTH * embed**-0.5, float) if shift else None
    return Norm(jnp.full(embed, last_gain(embed), float), common, floor)


def last_gain(embed: int) -> float:
    """Return the first gain of a norm before the output matrix.

    >>> [round(last_gain(size) * size**0.5, 2) for size in (16, 64, 512)]
    [2.0, 4.0, 4.0]
    """
    return min(LAST_LENGTH, embed**0.5 / 2) * embed**-0.5


def embedding_length(embed: int, features: float) -> float:
    """Return the first length of embeddings that are also the output matrix.

    The logits of a fresh model have a spread of `features` / sqrt(embed) times that length, which
    costs half of its square.

    >>> [round(embedding_length(size, last_gain(size) * size**0.5), 2) for size in (16, 128, 512)]
    [0.6, 0.85, 1.0]
    """
    return min(1.0, FIRST_LOGITS * embed**0.5 / features)


def residual_scale(layers: int) -> float:
    """Return the first scale of what a sub-block adds to the stream, of two in each layer.

    The stream then keeps its size however deep the model is (Radford et al. 2019).
    """
    return float((2 * layers) ** -0.5)


def bare_norm() -> Norm:
    """Make a layer norm without weights, which maps `x` and `k x` to the same output (k > 0)."""
    return Norm(None, None, INVARIANT_FLOOR)


class RmsNorm(eqx.Module):
    """Root-mean-square norm: lengths alone are made equal, means stay (Zhang & Sennrich 2019)."""

    gain: Float[Array, " embed"]
    floor: float = eqx.field(static=True, default=PLAIN_FLOOR)

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        short, x = x.dtype, x.astype(wide(x.dtype))
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.floor)
        return (x * jnp.broadcast_to(self.gain, x.shape)).astype(short)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: pairs of a head's numbers are turned by angles that grow with position.

    The first `width` numbers of a head are turned, number i together with number i + width / 2
    (Su et al. 2021, in the order of Hugging Face's weights). `scaling` slows the turning, for rows
    longer than those of pretraining: "linear F" everywhere by F; "llama3 F LOW HIGH LENGTH" by F
    where fewer than LOW turns fit into LENGTH tokens, not at all above HIGH, and in between by a
    mixture.
    """

    width: int
    theta: float = 10_000.0
    scaling: str | None = None

    def rates(self) -> np.ndarray:
        """Return the angle per position of each pair."""
        plain: np.ndarray = self.theta ** (-np.arange(0, self.width, 2) / self.width)
        kind, *numbers = (self.scaling or "none").split()
        if kind == "none":
            return plain
        factor, *more = map(float, numbers)
        if kind == "linear":
            return plain / factor
        low, high, length = more
        turns = length * plain / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1 - kept) * plain / factor

    def __call__(
        self, x: Float[Array, "batch heads seq size"], at: Int[Array, " seq"]
    ) -> Float[Array, "batch heads seq size"]:
        exact = wide(x.dtype)  # bfloat16 has no position 257
        angles = at.astype(exact)[:, None] * jnp.asarray(self.rates(), exact)[None]
        turned = (*x.shape[:3], self.width // 2)
        waves = (wave(angles).astype(x.dtype) for wave in (jnp.cos, jnp.sin))
        cos, sin = (jnp.broadcast_to(wave, turned) for wave in waves)
        first, second = jnp.split(x[..., : self.width], 2, axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin, x[..., self.width :]]
        return jnp.concatenate(parts, axis=-1)


def sinusoids(positions: Float[Array, " seq"], embed: int) -> Float[Array, "seq embed"]:
    """Encode positions as sines and cosines of falling frequency (Vaswani et al. 2017)."""
    half = embed // 2
    rates = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / max(1, half - 1))
    angles = positions[:, None] * rates[None, :]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return jnp.pad(waves, ((0, 0), (0, embed - 2 * half)))


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slope of the distance penalty of each head (Press et al. 2022)."""
    power = 2 ** int(np.floor(np.log2(heads)))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    if power < heads:
        more = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
        slopes = np.concatenate([slopes, more])
    return slopes.astype(np.float32)


@jax.custom_vjp
def tied(
    embedding: Float[Array, "vocab embed"], tokens: Int[Array, "..."]
) -> tuple[Float[Array, "... embed"], Float[Array, "vocab embed"]]:
    """Return the embeddings of tokens, and the embedding itself for use as output matrix.

    The gradient of the output matrix is dense. The gradient of the look-up is added to it in
    place, so that no second array of that size is filled and summed.

        forward    embedding -+- [tokens] ---> found
                              +--------------> readout       keeps: tokens
        backward   d_embedding = d_readout;  d_embedding[tokens] += d_found
    """
    return embedding[tokens], embedding


def _tied_forward(embedding, tokens):  # type: ignore[no-untyped-def]
    return tied(embedding, tokens), tokens


def _tied_backward(tokens, gradients):  # type: ignore[no-untyped-def]
    d_found, d_embedding = gradients
    exact = wide(d_embedding.dtype)  # a frequent token adds many small numbers
    d_all = d_embedding.astype(exact).at[tokens].add(d_found.astype(exact))
    return d_all.astype(d_embedding.dtype), None


tied.defvjp(_tied_forward, _tied_backward)  # not called where the embedding is frozen


def softmax_weights(
    scores: Float[Array, "... query key"], allowed: Array, bias: Array | None
) -> Float[Array, "... query key"]:
    """Return attention weights: a softmax over the keys that each query may see."""
    short, scores = scores.dtype, scores.astype(wide(scores.dtype))
    scores = scores * 1.0 if bias is None else scores + jnp.broadcast_to(bias, scores.shape)
    return jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1).astype(short)


def relu_weights(
    scores: Float[Array, "... query key"],
    allowed: Array,
    bias: Array | None,
    *,
    largest: Float[Array, "... query key"],
    floor: float,
) -> Float[Array, "... query key"]:
    """Return scale-invariant attention weights: ReLU, then each row divided by its sum.

    A distance bias acts as a factor `exp(bias)`, so the weights stay invariant to a positive
    scale of the scores. A row without a positive score attends to nothing, and its output is
    zero. Near such a row the quotient would amplify rounding errors, so `floor` times the
    `largest` scores that queries and keys of these lengths can have is added to the sum. This
    term scales as the scores do; a `floor` of 0 gives the published rule.
    """
    short, scores = scores.dtype, scores.astype(wide(scores.dtype))
    factor = jnp.where(allowed, 1.0, 0.0)
    if bias is not None:
        factor = factor * jnp.broadcast_to(jnp.exp(bias), factor.shape)
    kept = jax.nn.relu(scores) * factor
    total = jnp.sum(kept, axis=-1, keepdims=True)
    if floor:
        total = total + floor * jnp.sum(largest * factor, axis=-1, keepdims=True)
    return (kept / jnp.where(total > 0, total, 1.0)).astype(short)


def lengths(x: Float[Array, "... width"]) -> Float[Array, "..."]:
    """Return Euclidean lengths, whose gradient at zero is zero."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(wide(x.dtype))), axis=-1) + 1e-30)
