"""Pre-norm Transformer decoders: plain, scale-invariant, GPT-2's, GPT-NeoX's and MPT's wiring.

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

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.core.types import Loss, PyTree
from fedlm.models.attention import Attention, attention
from fedlm.models.embedding import Positions, Stem, guesses_by_features, stem
from fedlm.models.layers import (
    FIRST_LOGITS,
    PLAIN_FLOOR,
    Linear,
    Norm,
    RmsNorm,
    Rotary,
    bare_norm,
    has_adapters,
    in_dtype,
    last_norm,
    linear,
    norm,
    residual_scale,
    tied,
)
from fedlm.models.loss import LOSSES, count_targets, cross_entropy, token_loss
from fedlm.models.packed_layout import Layout, Packed, Whole, sizes_of
from fedlm.models.packing import (
    FEWEST_COLUMNS,
    FULL_ROW_LOSSES,
    FULL_ROW_PRODUCTS,
    Packing,
    choices,
    gather,
    nats_of_enough,
    pack,
)

Activation = Literal["relu", "gelu", "gelu-exact"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # by the hyperbolic tangent
    "gelu-exact": partial(jax.nn.gelu, approximate=False),
}


class Feedforward(eqx.Module):
    """Feed-forward layer: product up, activation, product down."""

    up: Linear
    down: Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: Array, layout: Layout) -> Array:
        raised = ACTIVATIONS[self.activation](layout.product(self.up, x))
        return layout.product(self.down, raised)


def feedforward(
    key: PRNGKeyArray,
    embed: int,
    units: int,
    *,
    bias: bool,
    invariant: bool,
    activation: str,
    out_scale: float,
) -> Feedforward:
    """Make a fresh layer, whose second product begins with weights times `out_scale`.

    An invariant layer has no bias after that product.
    """
    k_up, k_down = jr.split(key)
    return Feedforward(
        linear(k_up, embed, units, bias=bias),
        linear(k_down, units, embed, bias=bias and not invariant, scale=out_scale),
        "relu" if invariant else activation,
    )


class Block(eqx.Module):
    """Attention and feed-forward, each added to the residual stream.

    In a `parallel` block both read what came into the block.
    """

    norm_attention: Norm | RmsNorm
    attention: Attention
    norm_feedforward: Norm | RmsNorm
    feedforward: Any  # (features, layout) -> features
    parallel: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Array, layout: Layout) -> Array:
        return self._add(x, self.attention(self.norm_attention(x), layout), layout)

    def _add(self, x: Array, seen: Array, layout: Layout) -> Array:
        out = x + seen if self.parallel else layout.add(x, seen)
        fed = x if self.parallel else out
        return layout.add(out, self.feedforward(self.norm_feedforward(fed), layout))

    def start(self, batch: int, capacity: int) -> PyTree:
        return self.attention.start(batch, capacity)

    def advance(
        self, x: Float[Array, "batch embed"], cache: PyTree, at: Array
    ) -> tuple[Array, PyTree]:
        seen, cache = self.attention.advance(self.norm_attention(x), cache, at)
        return self._add(x, seen, Whole()), cache


# So many blocks of one shape are one compiled loop. Fewer run one by one: thirty of SmolLM2's are
# then 9% faster and need 858 MB of scratch memory in place of 1,399, because their weights are not
# stacked, but compile in 52 s in place of 13 (docs/log.md). With `remat` two blocks are a loop:
# outside of one XLA finds that a block is computed twice, and keeps the first result after all.
FEWEST_SCANNED, FEWEST_RECOMPUTED = 33, 2


class Decoder(eqx.Module):
    """A stem, blocks, a last norm, and an output matrix: a head of its own, or the embedding."""

    stem: Stem
    blocks: tuple[Any, ...]
    last: Norm | RmsNorm | None
    head: Float[Array, "vocab embed"] | None = None
    remat: bool = eqx.field(static=True, default=False)  # compute a block again for its gradient
    dtype: str = eqx.field(static=True, default="float32")  # of products, where it is trained

    def features(self, inputs: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Return the features of each position; their product with the embedding gives logits."""
        return self._through(self.stem(inputs), Whole())

    @property
    def in_training(self) -> Decoder:
        """The model as it is trained, with products of its `dtype`."""
        if self.dtype == "float32":
            return self
        short = in_dtype(self, self.dtype)
        return replace(short, stem=replace(short.stem, dtype=self.dtype))

    @property
    def frozen_depth(self) -> int:
        """The number of blocks before the first adapter; none where no block has one."""
        adapted = [i for i, block in enumerate(self.blocks) if has_adapters(block)]
        return adapted[0] if adapted else 0

    @property
    def frozen(self) -> Decoder:
        """The stem and the blocks before the first adapter; what they give never changes."""
        return Decoder(self.stem, self.blocks[: self.frozen_depth], None)

    def _through(self, x: Array, layout: Layout) -> Array:
        def run(block: Any, x: Array) -> Array:
            return block(x, layout)

        step = jax.checkpoint(run) if self.remat else run
        fewest = FEWEST_RECOMPUTED if self.remat else FEWEST_SCANNED
        for _, alike in itertools.groupby(self.blocks, _shape):
            x = _through_blocks(step, list(alike), x, fewest)
        return x if self.last is None else self.last(x)

    def loss(
        self,
        inputs: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        full_rows: bool = False,
    ) -> Loss:
        """Return the next-token loss of a batch, without the gaps of short rows."""
        if targets.size < FEWEST_COLUMNS:
            found, readout = self._found(inputs)
            return self._loss_of_rows(self.stem.place(found), readout, targets)
        seq = targets.shape[1]

        def enter(model: Decoder, packing: Packing, tokens: Array) -> tuple[Array, Array]:
            found, readout = model._found(tokens)
            return model.stem.place_columns(found, packing.time, seq), readout

        return self._loss_of_columns(enter, lambda p: gather(p, inputs), targets, full_rows)

    def loss_above(
        self,
        features: Float[Array, "batch seq embed"],
        targets: Int[Array, "batch seq"],
        full_rows: bool = False,
    ) -> Loss:
        """Return the loss of a batch from what the `frozen` blocks gave."""
        features = features.astype(self.stem.dtype)
        above = self._above
        if targets.size < FEWEST_COLUMNS:
            return above._loss_of_rows(features, self.readout, targets)

        def enter(model: Decoder, _: Packing, features: Array) -> tuple[Array, Array]:
            return features, model.readout

        return above._loss_of_columns(enter, lambda p: features[p.row, p.time], targets, full_rows)

    def _loss_of_rows(self, x: Array, readout: Array, targets: Int[Array, "batch seq"]) -> Loss:
        features = self._through(x, Whole(targets[0, 0]))
        return token_loss(features.reshape(targets.size, -1), readout, targets.reshape(-1))

    def _loss_of_columns(
        self,
        enter: Callable[[Decoder, Packing, Array], tuple[Array, Array]],
        given: Callable[[Packing], Array],
        targets: Int[Array, "batch seq"],
        full_rows: bool,
    ) -> Loss:
        """Return the loss of packed columns; `enter` makes features of what is `given` of each."""
        packing = pack(targets, full_rows=full_rows)
        sizes = FULL_ROW_PRODUCTS if full_rows else sizes_of(len(self.blocks))
        choice = choices(targets.size, sizes)
        losses = choices(targets.size, FULL_ROW_LOSSES if full_rows else LOSSES)

        def nats(n: int, model: Decoder, batch: tuple[Packing, Array, Array]) -> Array:
            packing, given, wanted = batch
            packing, given, wanted = packing.leading(n), given[:n], wanted[:n]
            x, readout = enter(model, packing, given)
            features = model._through(x, Packed(packing, *targets.shape))
            fewer = max((m for m in choice if m < n), default=0)
            of = tuple(m for m in losses if fewer < m < n)
            return cross_entropy(features, readout, wanted, (*of, n))

        batch = (packing, given(packing), gather(packing, targets))
        found = nats_of_enough(nats, choice, packing.size, self, batch)
        return Loss(found, count_targets(targets, self.readout.dtype))

    def features_above(
        self, features: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Return the features of each position, from what the `frozen` blocks gave."""
        return self._above._through(features, Whole())

    @property
    def _above(self) -> Decoder:
        """The blocks from the first adapter on."""
        return replace(self, blocks=self.blocks[self.frozen_depth :])

    def _found(self, tokens: Int[Array, "..."]) -> tuple[Array, Array]:
        """Return the embeddings of tokens, and the output matrix."""
        if self.head is None:
            return tied(self.stem.embedding, tokens)
        return self.stem.embedding[tokens], self.head

    def start(self, batch: int, capacity: int = 256) -> tuple[Array, tuple[PyTree, ...]]:
        """Return the state before the first token, with room for `capacity` tokens."""
        return jnp.int32(0), tuple(block.start(batch, capacity) for block in self.blocks)

    def advance(self, state: PyTree, token: Int[Array, " batch"]) -> tuple[PyTree, Array]:
        """Return the state and the features after one more token per row."""
        at, caches = state
        x, after = self.stem.advance(token, at), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.advance(x, cache, at)
            after.append(cache)
        return (at + 1, tuple(after)), x if self.last is None else self.last(x)

    @property
    def readout(self) -> Float[Array, "vocab embed"]:
        return self.stem.embedding if self.head is None else self.head


def _shape(block: Any) -> Any:
    """Return what two blocks have in common that one compiled loop can run."""
    leaves, structure = jax.tree.flatten(block)
    return structure, [(x.shape, x.dtype) for x in leaves]


def _through_blocks(
    step: Callable[[Any, Array], Array], blocks: list[Any], x: Array, fewest: int
) -> Array:
    """Apply blocks of one shape, as a loop if there are at least `fewest`.

    They are stacked inside the compiled program alone: a model's leaves are those of single blocks.
    Frozen blocks below the first adapter have another shape than those above, so they make a loop
    of their own, which needs no backward pass.
    """
    if len(blocks) < fewest:
        for block in blocks:
            x = step(block, x)
        return x
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)
    return jax.lax.scan(lambda x, block: (step(block, x), None), x, stacked)[0]


def head(key: PRNGKeyArray, vocab: int, embed: int, *, tied: bool, guessing: bool) -> Array | None:
    """Make an output matrix whose first logits are near zero, or None for a tied one.

    With `guessing` they stay so in wide models too.
    """
    scale = min(0.02, FIRST_LOGITS * embed**-0.5) if guessing else 0.02
    return None if tied else scale * jr.normal(jr.fold_in(key, 1), (vocab, embed))


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
    norm_epsilon: float = PLAIN_FLOOR,
    parallel: bool = False,
    rotary_fraction: float = 0.0,
    rope_theta: float = 10_000.0,
    rope_scaling: str | None = None,
    tied: bool = True,
    guessing: bool = False,
) -> Decoder:
    """Make a fresh decoder; `guessing` lets one begin at the cost of guessing.

    `bias=False` with ALiBi is the MPT style, learned positions are GPT-2's. GPT-NeoX turns a
    fraction of each head by rotary positions, in parallel blocks.
    """
    k_stem, *keys = jr.split(key, 1 + 2 * layers)
    width = int(rotary_fraction * (embed // heads)) // 2 * 2  # pairs are turned
    made, out_scale = [], residual_scale(layers) if guessing else 1.0
    for k_attention, k_feedforward in zip(keys[0::2], keys[1::2], strict=True):
        attend = attention(
            k_attention,
            embed,
            heads,
            bias=bias,
            row_floor=row_floor if invariant else None,
            alibi=positions == "alibi",
            rotary=Rotary(width, rope_theta, rope_scaling) if width else None,
            out_scale=out_scale,
        )
        feed = feedforward(
            k_feedforward,
            embed,
            units,
            bias=bias,
            invariant=invariant,
            activation=activation,
            out_scale=out_scale,
        )
        norms = [_norm(embed, bias, norm_epsilon, invariant) for _ in range(2)]
        made.append(Block(norms[0], attend, norms[1], feed, parallel))
    first = stem(
        k_stem,
        vocab,
        embed,
        positions=positions,
        length=length,
        invariant=invariant,
        guessing=guessing,
    )
    last = _norm(embed, bias, norm_epsilon, invariant)
    if guessing and guesses_by_features(positions, invariant):
        last = last_norm(embed, shift=bias, floor=norm_epsilon)
    out = head(k_stem, vocab, embed, tied=tied, guessing=guessing)
    return Decoder(first, tuple(made), last, out)


def _norm(embed: int, shift: bool, floor: float, invariant: bool) -> Norm:
    return bare_norm() if invariant else norm(embed, shift=shift, floor=floor)
