"""Llama's decoder: RMS norm, rotary positions, grouped queries, a gated feed-forward layer.

In:       the sizes of a model.
Out:      a `Decoder`.
Promise:  the wiring of Touvron et al. 2023, also with Qwen2's biases of queries, keys and values.
Not here: attention (`attention.py`), the weights of published models (`interop/`).
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray

from fedlm.models.attention import attention
from fedlm.models.embedding import stem
from fedlm.models.layers import Linear, RmsNorm, Rotary, linear, residual_scale
from fedlm.models.packed_layout import Layout
from fedlm.models.transformer import Block, Decoder, head


class Gated(eqx.Module):
    """Feed-forward layer whose product up is gated by SiLU of another (SwiGLU, Shazeer 2020)."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Array, layout: Layout) -> Array:
        opened = jax.nn.silu(layout.product(self.gate, x))
        return layout.product(self.down, opened * layout.product(self.up, x))


def llama(
    vocab: int,
    embed: int,
    units: int,
    *,
    layers: int,
    heads: int,
    key: PRNGKeyArray,
    key_heads: int | None = None,
    head_size: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: str | None = None,
    norm_epsilon: float = 1e-5,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = True,
    guessing: bool = False,
) -> Decoder:
    """Make a fresh decoder; without `key_heads` every query has keys of its own.

    `guessing` lets one begin at the cost of guessing.
    """
    k_stem, *keys = jr.split(key, 1 + layers)
    rotary = Rotary(head_size or embed // heads, rope_theta, rope_scaling)

    def norm() -> RmsNorm:
        return RmsNorm(jnp.ones(embed), norm_epsilon)

    made, out_scale = [], residual_scale(layers) if guessing else 1.0
    for k_block in keys:
        k_attention, k_gate, k_up, k_down = jr.split(k_block, 4)
        attend = attention(
            k_attention,
            embed,
            heads,
            bias=qkv_bias,
            out_bias=out_bias,
            key_heads=key_heads,
            head_size=head_size,
            rotary=rotary,
            out_scale=out_scale,
        )
        feed = Gated(
            linear(k_gate, embed, units, bias=mlp_bias),
            linear(k_up, embed, units, bias=mlp_bias),
            linear(k_down, units, embed, bias=mlp_bias, scale=out_scale),
        )
        made.append(Block(norm(), attend, norm(), feed))
    first = stem(
        k_stem, vocab, embed, positions="none", length=0, invariant=False, guessing=guessing
    )
    out = head(k_stem, vocab, embed, tied=tied, guessing=guessing)
    return Decoder(first, tuple(made), norm(), out)
