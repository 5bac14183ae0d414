"""Conformer decoders: half a feed-forward, attention, convolution, half a feed-forward.

In:       rows of tokens.
Out:      features of every position, of the width of the embedding.
Promise:  causal: the convolution is padded on the left only, and layer norm stands where the
          original has batch norm; the invariant wiring is that of `transformer.py`.
Not here: attention (`attention.py`), the decoder around the blocks (`transformer.Decoder`).

Degrees of the invariant convolution: product (1), gate MaxN(ReLU) (0), depthwise (2), norm with
gain and shift (1), product (2), as much as every other sub-block adds.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from fedlm.core.types import PyTree
from fedlm.models.attention import Attention, attention
from fedlm.models.embedding import Positions, guesses_by_features, stem
from fedlm.models.layers import (
    INVARIANT_FLOOR,
    Linear,
    Norm,
    bare_norm,
    last_norm,
    linear,
    norm,
    residual_scale,
)
from fedlm.models.packed_layout import Layout, Whole
from fedlm.models.transformer import Decoder, Feedforward, feedforward


class Convolution(eqx.Module):
    """A gate, a causal depthwise convolution over `kernel` tokens, a norm, and a product."""

    enter: Linear
    taps: Float[Array, "kernel embed"]
    shift: Float[Array, " embed"] | None
    norm: Norm
    leave: Linear
    invariant: bool = eqx.field(static=True)

    def __call__(self, x: Array, layout: Layout) -> Array:
        mixed = layout.rows(self._mix, layout.product(self.enter, x))
        return layout.product(self.leave, self._bend(mixed))

    def _mix(self, entered: Float[Array, "batch seq twice"]) -> Float[Array, "batch seq embed"]:
        gated = self._gate(entered)
        kernel, seq = self.taps.shape[0], gated.shape[1]
        padded = jnp.pad(gated, ((0, 0), (kernel - 1, 0), (0, 0)))
        # Only the taps that reach into the row: older taps would only meet padding.
        reach = range(max(0, kernel - seq), kernel)
        return jnp.asarray(sum(padded[:, t : t + seq] * self._tap(t, gated) for t in reach))

    def start(self, batch: int) -> Array:
        """Return zeros as the gated inputs of the last `kernel - 1` tokens."""
        return jnp.zeros((batch, self.taps.shape[0] - 1, self.taps.shape[1]))

    def advance(self, x: Float[Array, "batch embed"], past: Array) -> tuple[Array, Array]:
        """Return the output for one more token per row, and the next state."""
        window = jnp.concatenate([past, self._gate(self.enter(x[:, None]))], axis=1)
        mixed = jnp.einsum("bke,ke->be", window, self.taps)
        return self.leave(self._bend(mixed)), window[:, 1:]

    def _gate(self, entered: Array) -> Array:
        value, gate = jnp.split(entered, 2, axis=-1)
        if not self.invariant:
            return value * jax.nn.sigmoid(gate)
        gate = jax.nn.relu(gate)
        top = jnp.max(gate, axis=-1, keepdims=True)
        return value * gate / jnp.where(top > 0, top, 1.0)

    def _tap(self, t: int, like: Array) -> Array:
        return jnp.broadcast_to(self.taps[t], like.shape)

    def _bend(self, mixed: Array) -> Array:
        if self.shift is not None:
            mixed = mixed + jnp.broadcast_to(self.shift, mixed.shape)
        mixed = self.norm(mixed)
        return jax.nn.relu(mixed) if self.invariant else jax.nn.silu(mixed)


class ConformerBlock(eqx.Module):
    """Two half feed-forward layers with attention and convolution between them."""

    norms: tuple[Norm, Norm, Norm, Norm]
    before: Feedforward
    attention: Attention
    convolution: Convolution
    after: Feedforward
    last: Norm | None

    def __call__(self, x: Array, layout: Layout) -> Array:
        x = layout.add(x, 0.5 * self.before(self.norms[0](x), layout))
        x = layout.add(x, self.attention(self.norms[1](x), layout))
        x = layout.add(x, self.convolution(self.norms[2](x), layout))
        x = layout.add(x, 0.5 * self.after(self.norms[3](x), layout))
        return x if self.last is None else self.last(x)

    def start(self, batch: int, capacity: int) -> PyTree:
        return self.attention.start(batch, capacity), self.convolution.start(batch)

    def advance(
        self, x: Float[Array, "batch embed"], state: PyTree, at: Array
    ) -> tuple[Array, PyTree]:
        cache, past = state
        x = x + 0.5 * self.before(self.norms[0](x), Whole())
        seen, cache = self.attention.advance(self.norms[1](x), cache, at)
        x = x + seen
        mixed, past = self.convolution.advance(self.norms[2](x), past)
        x = x + mixed
        x = x + 0.5 * self.after(self.norms[3](x), Whole())
        return (x if self.last is None else self.last(x)), (cache, past)


def convolution(
    key: PRNGKeyArray, embed: int, kernel_size: int, *, invariant: bool, out_scale: float
) -> Convolution:
    """Make a fresh convolution module, whose last product begins with weights times `out_scale`."""
    k_enter, k_taps, k_leave = jr.split(key, 3)
    spread = (3.0 / kernel_size) ** 0.5
    inner = norm(embed)
    return Convolution(
        linear(k_enter, embed, 2 * embed),
        jr.uniform(k_taps, (kernel_size, embed), minval=-spread, maxval=spread),
        None if invariant else jnp.zeros(embed),
        Norm(inner.gain, inner.shift, INVARIANT_FLOOR) if invariant else inner,
        linear(k_leave, embed, embed, bias=not invariant, scale=out_scale),
        invariant,
    )


def conformer(
    vocab: int,
    embed: int,
    units: int,
    *,
    layers: int,
    heads: int,
    kernel_size: int,
    key: PRNGKeyArray,
    positions: Positions = "sinusoidal",
    length: int = 1024,
    invariant: bool = False,
    row_floor: float = 0.1,
    guessing: bool = False,
) -> Decoder:
    """Make a fresh decoder; `guessing` lets one begin at the cost of guessing.

    Every block of a plain model ends in a norm; an invariant model has a single norm, at its end.
    """
    k_stem, *keys = jr.split(key, 1 + layers)
    made, out_scale = [], residual_scale(layers) if guessing else 1.0
    for number, k_block in enumerate(keys):
        k_before, k_attention, k_convolution, k_after = jr.split(k_block, 4)
        feeds = [
            feedforward(
                k,
                embed,
                units,
                bias=True,
                invariant=invariant,
                activation="gelu",
                out_scale=out_scale,
            )
            for k in (k_before, k_after)
        ]
        floor = row_floor if invariant else None
        attend = attention(
            k_attention,
            embed,
            heads,
            bias=True,
            row_floor=floor,
            alibi=positions == "alibi",
            out_scale=out_scale,
        )
        mix = convolution(
            k_convolution, embed, kernel_size, invariant=invariant, out_scale=out_scale
        )
        n0, n1, n2, n3 = (bare_norm() if invariant else norm(embed) for _ in range(4))
        short = guessing and guesses_by_features(positions, invariant) and number + 1 == layers
        last = last_norm(embed) if short else norm(embed)
        end = None if invariant else last
        made.append(ConformerBlock((n0, n1, n2, n3), feeds[0], attend, mix, feeds[1], end))
    first = stem(
        k_stem,
        vocab,
        embed,
        positions=positions,
        length=length,
        invariant=invariant,
        guessing=guessing,
    )
    return Decoder(first, tuple(made), bare_norm() if invariant else None)
