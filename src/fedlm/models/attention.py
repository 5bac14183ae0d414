"""Causal self-attention, whole rows or one token at a time.

In:       rows of features.
Out:      rows of features, each made of itself and what came before.
Promise:  `advance` with a cache gives what `__call__` gives; nothing sees the future.
Not here: the blocks around it (`transformer.py`, `conformer.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.models.layers import (
    Linear,
    Rotary,
    alibi_slopes,
    lengths,
    linear,
    relu_weights,
    softmax_weights,
)
from fedlm.models.packed_layout import Layout

# The most attention scores that are held at once, 64 MiB in float32: longer rows go one by one, and
# keep no scores for the backward pass.
MOST_SCORES = 1 << 24


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far, with room for `capacity` tokens."""

    keys: Float[Array, "batch key_heads capacity width"]
    values: Float[Array, "batch key_heads capacity width"]


class Attention(eqx.Module):
    """Causal multi-head self-attention.

    With fewer `key_heads` than `heads`, neighbouring queries share keys and values (grouped
    queries, Ainslie et al. 2023), and the cache is as much smaller.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    heads: int = eqx.field(static=True)
    row_floor: float | None = eqx.field(static=True)  # None: softmax, not invariant
    alibi: bool = eqx.field(static=True)
    key_heads: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)  # None: positions come from elsewhere

    def __call__(self, x: Array, layout: Layout) -> Array:
        q, k, v = (layout.product(part, x) for part in (self.query, self.key, self.value))
        return layout.product(self.out, layout.rows(self._see, q, k, v))

    def _see(self, q: Array, k: Array, v: Array) -> Float[Array, "batch seq embed"]:
        batch, seq = q.shape[:2]
        if batch == 1 or batch * self.heads * seq * seq <= MOST_SCORES:
            return self._see_rows(q, k, v)

        @jax.checkpoint  # the scores of a row are computed again for its gradient
        def see(row: tuple[Array, Array, Array]) -> Array:
            return self._see_rows(*(part[None] for part in row))[0]

        return jax.lax.map(see, (q, k, v))

    def _see_rows(self, q: Array, k: Array, v: Array) -> Float[Array, "batch seq embed"]:
        place = jnp.arange(q.shape[1])
        q, k, v = self._split(q, k, v, place)
        return self._join(self._attend(q, k, v, place, place))

    def weights(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch heads seq seq"]:
        """Return the attention weights of each head, for inspection."""
        place = jnp.arange(x.shape[1])
        q, k, _ = self._split(self.query(x), self.key(x), self.value(x), place)
        return self._weights(q, k, place, place)

    def start(self, batch: int, capacity: int) -> KeyValueCache:
        """Return an empty cache."""
        width = self.key.weight.shape[0] // self.key_heads
        empty = jnp.zeros((batch, self.key_heads, capacity, width))
        return KeyValueCache(empty, empty)

    def advance(
        self, x: Float[Array, "batch embed"], cache: KeyValueCache, at: Int[Array, ""]
    ) -> tuple[Float[Array, "batch embed"], KeyValueCache]:
        """Return the output for one more token per row, at position `at`, and the next cache."""
        q, k, v = (part(x)[:, None] for part in (self.query, self.key, self.value))
        q, k, v = self._split(q, k, v, at[None])
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, k, at, axis=2)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, v, at, axis=2)
        places = jnp.arange(keys.shape[2])
        seen = self._attend(q, keys, values, at[None], places)
        return self.out(self._join(seen)[:, 0]), KeyValueCache(keys, values)

    def _split(self, q: Array, k: Array, v: Array, at: Array) -> tuple[Array, Array, Array]:
        """Split rows into heads, and turn queries and keys by their positions."""
        q = _heads(q, self.heads)
        k, v = (_heads(x, self.key_heads) for x in (k, v))
        return (q, k, v) if self.rotary is None else (self.rotary(q, at), self.rotary(k, at), v)

    def _weights(self, q: Array, k: Array, at_q: Array, at_k: Array) -> Array:
        scores = self._grouped(q, k.swapaxes(2, 3))
        behind = at_q[:, None] - at_k[None, :]
        bias: Any = None
        if self.alibi:
            slopes = jnp.asarray(alibi_slopes(self.heads))
            bias = -slopes[None, :, None, None] * jnp.maximum(behind, 0)[None, None]
        allowed = jnp.broadcast_to(behind >= 0, scores.shape)
        if self.row_floor is None:
            return softmax_weights(scores * q.shape[-1] ** -0.5, allowed, bias)
        largest = lengths(q)[..., :, None] * lengths(self._repeat(k))[..., None, :]
        return relu_weights(scores, allowed, bias, largest=largest, floor=self.row_floor)

    def _attend(self, q: Array, k: Array, v: Array, at_q: Array, at_k: Array) -> Array:
        return self._grouped(self._weights(q, k, at_q, at_k), v)

    def _grouped(self, x: Array, y: Array) -> Array:
        """Return the product of every query head with its keys or values, which are not copied.

        Heads that share them stand one below the other in one product.
        """
        batch, heads, rows, width = x.shape
        tall = x.reshape(batch, self.key_heads, heads // self.key_heads * rows, width)
        return jnp.matmul(tall, y).reshape(batch, heads, rows, y.shape[-1])

    def _repeat(self, x: Array) -> Array:
        """Give every query head its keys or values."""
        return x if self.key_heads == self.heads else jnp.repeat(x, self.heads // self.key_heads, 1)

    def _join(self, x: Array) -> Array:
        batch, heads, seq, width = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, seq, heads * width)


def _heads(x: Array, heads: int) -> Array:
    batch, seq, width = x.shape
    return x.reshape(batch, seq, heads, width // heads).transpose(0, 2, 1, 3)


def attention(
    key: PRNGKeyArray,
    embed: int,
    heads: int,
    *,
    bias: bool,
    row_floor: float | None = None,
    alibi: bool = False,
    out_bias: bool | None = None,
    key_heads: int | None = None,
    head_size: int | None = None,
    rotary: Rotary | None = None,
    out_scale: float = 1.0,
) -> Attention:
    """Make a fresh layer, whose second product begins with weights times `out_scale`.

    An invariant layer has a `row_floor`, and no bias after its second product. `out_bias`
    says whether there is one there, if not as everywhere.
    """
    q, k, v, o = jr.split(key, 4)
    groups, width = key_heads or heads, head_size or embed // heads
    out_bias = bias and row_floor is None if out_bias is None else out_bias
    return Attention(
        linear(q, embed, heads * width, bias=bias),
        linear(k, embed, groups * width, bias=bias),
        linear(v, embed, groups * width, bias=bias),
        linear(o, heads * width, embed, bias=out_bias, scale=out_scale),
        heads,
        row_floor,
        alibi,
        groups,
        rotary,
    )
