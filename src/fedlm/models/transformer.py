"""Pre-norm Transformer decoders, plain and scale-invariant, and the MPT style.

In:       rows of tokens.
Out:      features of every position, of the width of the embedding.
Promise:  causal; the invariant wiring does not change when query or key weights of a head, or
          all weights between embedding and readout together, are multiplied by a positive number.
Not here: attention itself (`attention.py`), the loss (`loss.py`).

Scale-invariant wiring (Li et al. 2022): norms inside blocks have no weights, ReLU in place of
GELU, biases only after the first product of a sub-block; every block adds degree two to a stream
of degree two, and a last norm without weights takes the degree away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.models.attention import Attention, attention
from fedlm.models.embedding import Positions, Stem, stem
from fedlm.models.layers import Linear, Norm, Predictors, bare_norm, linear, norm, tied
from fedlm.models.packed_layout import Layout, Packed, Whole
from fedlm.models.packing import FEWEST_COLUMNS, gather, pack

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


class Feedforward(eqx.Module):
    """Feed-forward layer: product up, activation, product down."""

    up: Linear
    down: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: Array, layout: Layout) -> Array:
        raised = ACTIVATIONS[self.activation](layout.product(self.up, x))
        return layout.product(self.down, raised)


def feedforward(
    key: PRNGKeyArray, embed: int, units: int, *, bias: bool, invariant: bool, activation: str
) -> Feedforward:
    """Make a fresh layer; an invariant layer has no bias after its second product."""
    k_up, k_down = jr.split(key)
    return Feedforward(
        linear(k_up, embed, units, bias=bias),
        linear(k_down, units, embed, bias=bias and not invariant),
        "relu" if invariant else activation,
    )


class Block(eqx.Module):
    """Attention and feed-forward, each added to the residual stream."""

    norm_attention: Norm
    attention: Attention
    norm_feedforward: Norm
    feedforward: Feedforward

    def __call__(self, x: Array, layout: Layout) -> Array:
        x = x + self.attention(self.norm_attention(x), layout)
        return x + self.feedforward(self.norm_feedforward(x), layout)

    def start(self, batch: int, capacity: int) -> Any:
        return self.attention.start(batch, capacity)

    def advance(self, x: Float[Array, "batch embed"], cache: Any, at: Array) -> tuple[Array, Any]:
        seen, cache = self.attention.advance(self.norm_attention(x), cache, at)
        x = x + seen
        return x + self.feedforward(self.norm_feedforward(x), Whole()), cache


class Decoder(eqx.Module):
    """A stem, blocks, a last norm, and the same embedding as output matrix."""

    stem: Stem
    blocks: tuple[Any, ...]
    last: Norm | None

    def features(self, inputs: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Return the features of each position; their product with the embedding gives logits."""
        return self._through(self.stem(inputs), Whole())

    def _through(self, x: Array, layout: Layout) -> Array:
        for block in self.blocks:
            x = block(x, layout)
        return x if self.last is None else self.last(x)

    def predictors(
        self, inputs: Int[Array, "batch seq"], targets: Int[Array, "batch seq"]
    ) -> Predictors:
        """Return features and targets for the loss, without the gaps of short rows."""
        batch, seq = targets.shape
        if batch * seq < FEWEST_COLUMNS:
            found, readout = tied(self.stem.embedding, inputs)
            features = self._through(self.stem.place(found), Whole())
            return Predictors(features.reshape(batch * seq, -1), readout, targets.reshape(-1))
        packing = pack(targets)
        found, readout = tied(self.stem.embedding, gather(packing, inputs))
        x = self.stem.place_columns(found, packing.time, seq)
        features = self._through(x, Packed(packing, batch, seq))
        return Predictors(features, readout, gather(packing, targets))

    def start(self, batch: int, capacity: int = 256) -> tuple[Array, tuple[Any, ...]]:
        """Return the state before the first token, with room for `capacity` tokens."""
        return jnp.int32(0), tuple(block.start(batch, capacity) for block in self.blocks)

    def advance(self, state: Any, token: Int[Array, " batch"]) -> tuple[Any, Array]:
        """Return the state and the features after one more token per row."""
        at, caches = state
        x, after = self.stem.advance(token, at), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.advance(x, cache, at)
            after.append(cache)
        return (at + 1, tuple(after)), x if self.last is None else self.last(x)

    @property
    def readout(self) -> Float[Array, "vocab embed"]:
        return self.stem.embedding


def transformer(
    vocab: int,
    embed: int,
    units: int,
    *,
    layers: int,
    heads: int,
    key: PRNGKeyArray,
    positions: Positions = "sinusoidal",
    length: int = 1024,
    invariant: bool = False,
    row_floor: float = 0.1,
    bias: bool = True,
    activation: str = "gelu",
) -> Decoder:
    """Make a fresh decoder; `bias=False` with ALiBi is the MPT style."""
    k_stem, *keys = jr.split(key, 1 + 2 * layers)
    made = []
    for k_attention, k_feedforward in zip(keys[0::2], keys[1::2], strict=True):
        floor = row_floor if invariant else None
        attend = attention(
            k_attention, embed, heads, bias=bias, row_floor=floor, alibi=positions == "alibi"
        )
        feed = feedforward(
            k_feedforward, embed, units, bias=bias, invariant=invariant, activation=activation
        )
        fresh = [bare_norm() if invariant else norm(embed, shift=bias) for _ in range(2)]
        made.append(Block(fresh[0], attend, fresh[1], feed))
    first = stem(k_stem, vocab, embed, positions=positions, length=length, invariant=invariant)
    return Decoder(first, tuple(made), bare_norm() if invariant else norm(embed, shift=bias))
