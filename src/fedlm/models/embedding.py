"""From tokens to the first block, and positions on the way.

In:       token numbers, or one token at a position.
Out:      features for the first block.
Promise:  an invariant stem has the degree that its blocks need: embedding, affine norm (degree
          one), linear (degree two).
Not here: blocks.
"""

from __future__ import annotations

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.models.layers import (
    Linear,
    Norm,
    embedding_length,
    last_gain,
    linear,
    norm,
    sinusoids,
    wide,
)

Positions = Literal["learned", "sinusoidal", "alibi", "none"]
Dtype = Literal["float32", "bfloat16"]  # of features in training, and of frozen models


class Stem(eqx.Module):
    """The embedding, the positions, and the norm and linear layer of an invariant model."""

    embedding: Float[Array, "vocab embed"]
    places: Float[Array, "length embed"] | None
    norm: Norm | None
    lift: Linear | None
    positions: Positions = eqx.field(static=True)
    dtype: str = eqx.field(static=True, default="float32")  # the shortest that features may have

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        return self.place(self.embedding[tokens])

    def place(self, found: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Add positions to the looked-up embeddings of whole rows."""
        return self._after(found, self._added(jnp.arange(found.shape[1]), found)[None])

    def place_columns(
        self, found: Float[Array, "columns embed"], time: Int[Array, " columns"], seq: int
    ) -> Float[Array, "columns embed"]:
        """Add positions to looked-up embeddings in any order.

        `time` is the position of each token in its row, and `seq` the length of the rows.
        """
        return self._after(found, self._added(jnp.arange(seq), found)[time])

    def advance(self, token: Int[Array, " batch"], at: Int[Array, ""]) -> Array:
        """Return the features of one token per row, at position `at`."""
        found = self.embedding[token]
        return self._after(found, self._added(at[None], found))

    def _added(self, at: Int[Array, " seq"], like: Array) -> Float[Array, "seq embed"]:
        """Return the vectors that are added to embeddings at these positions."""
        if self.positions == "sinusoidal":
            return sinusoids(at.astype(wide(like.dtype)), like.shape[-1])
        if self.positions == "learned":
            assert self.places is not None
            return self.places[jnp.minimum(at, self.places.shape[0] - 1)]
        return jnp.zeros((at.shape[0], like.shape[-1]), like.dtype)

    def _after(self, x: Array, added: Array) -> Array:
        x = x.astype(jnp.promote_types(x.dtype, self.dtype))  # a frozen embedding may be shorter
        if self.positions == "sinusoidal":
            # Embeddings are at most of unit length, but the squared length of a sinusoid is
            # embed / 2: embeddings are scaled up, as in the original.
            x = x * x.shape[-1] ** 0.5
        if self.positions in ("sinusoidal", "learned"):
            x = x + added.astype(x.dtype)
        if self.norm is not None and self.lift is not None:
            x = self.lift(self.norm(x))
        return x


def guesses_by_features(positions: Positions, invariant: bool) -> bool:
    """Return whether a fresh model that guesses has short features, or else short embeddings."""
    return positions in ("sinusoidal", "learned") and not invariant


def stem(
    key: PRNGKeyArray,
    vocab: int,
    embed: int,
    *,
    positions: Positions,
    length: int,
    invariant: bool,
    guessing: bool = False,
) -> Stem:
    """Make a fresh stem, with embeddings of unit expected length.

    With `guessing` they have mean zero and are so short that a fresh model, whose output matrix
    they are, guesses. Where positions are added they must be heard beside those, and the last norm
    makes features short (`last_norm`); elsewhere the first norm makes them long again, and they
    are short themselves.
    """
    expected = 1.0
    if guessing:
        gain = last_gain(embed) if guesses_by_features(positions, invariant) else 1.0
        expected = embedding_length(embed, gain * embed**0.5)
    k_embed, k_place, k_lift = jr.split(key, 3)
    places = None
    if positions == "learned":
        places = 0.02 * jr.normal(k_place, (length, embed))
    drawn = jr.normal(k_embed, (vocab, embed)) * expected * embed**-0.5
    return Stem(
        drawn - jnp.mean(drawn, axis=1, keepdims=True) if guessing else drawn,
        places,
        norm(embed) if invariant else None,
        linear(k_lift, embed, embed, bias=False) if invariant else None,
        positions,
    )
