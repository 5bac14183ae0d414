"""Every architecture by name, and how large it is.

In:       a name and its dimensions.
Out:      a model, or its parameter count.
Promise:  a count is the number of values in the model that the same arguments make, found
          without allocating one; a named size has the count that was published for it; one line
          in `ARCHITECTURES` adds an architecture or a recurrent cell.
Not here: the architectures (one file per family).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.errors import require
from fedlm.core.types import PAD, Batch, Loss, LossFn, Params, Precomputed, PyTree, ScoreFn
from fedlm.models.adapters import Adapters, adapt
from fedlm.models.cells import Cell, Cifg, Lstm, SiCifg
from fedlm.models.conformer import conformer
from fedlm.models.embedding import Dtype, Positions
from fedlm.models.llama import llama
from fedlm.models.loss import scores
from fedlm.models.recurrent import recurrent
from fedlm.models.transformer import Activation, transformer


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes and options of a model; each architecture reads the fields that it uses."""

    vocab: int = 10_000
    embedding_size: int = 96
    hidden_size: int = 670  # width of a recurrent layer, or inside a feed-forward layer
    layers: int = 1
    heads: int = 8
    kernel_size: int = 31  # taps of a convolution
    positions: Positions = "sinusoidal"
    length: int = 1024  # number of learned positions, if positions are learned
    cell_layer_norm: bool = False
    si_measure: str = "max"  # a name in `MEASURES`
    si_floor: float = 1e-6
    si_candidate: bool = True
    si_state: bool = True
    si_rectifier: str = "relu"  # a name in `RECTIFIERS`
    si_scaled_floor: float = 0.0
    si_row_floor: float = 0.1
    activation: Activation = "gelu"  # of a feed-forward layer that is not gated
    norm_epsilon: float = 1e-5
    key_heads: int | None = None  # None: as many as heads
    head_size: int | None = None  # None: the embedding's size over the number of heads
    rope_theta: float = 10_000.0
    rotary_fraction: float = 0.25  # the part of a head that rotary positions turn, in GPT-NeoX
    parallel: bool = True  # attention and feed-forward read the same input, in GPT-NeoX
    rope_scaling: str | None = None  # "linear F" or "llama3 F LOW HIGH LENGTH", as `Rotary` has it
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's second product, in Llama
    mlp_bias: bool = False
    tied: bool = True  # the embedding is the output matrix
    guessing: bool = False  # a fresh decoder begins at the cost of guessing; others always do
    remat: bool = False  # a decoder computes its blocks again for their gradients
    dtype: Dtype = "float32"  # of features and products in training; parameters are float32


Maker = Callable[[Dimensions, PRNGKeyArray], Params]


@dataclass(frozen=True)
class Architecture:
    """A maker of models, and the default sizes of a recipe."""

    make: Maker
    size: Dimensions = Dimensions()
    attends: bool = False  # it has heads, whose number must divide the embedding


def from_cell(cell: Callable[[Dimensions], Cell]) -> Architecture:
    """Return the architecture whose recurrent layers all use this cell."""

    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        made = recurrent(
            cell(size),
            size.vocab,
            size.embedding_size,
            size.hidden_size,
            layers=size.layers,
            key=key,
        )
        return replace(made, dtype=size.dtype)

    return Architecture(make)


def _si_cifg(size: Dimensions) -> Cell:
    return SiCifg(
        layer_norm=size.cell_layer_norm,
        measure=size.si_measure,
        floor=size.si_floor,
        candidate=size.si_candidate,
        state=size.si_state,
        rectifier=size.si_rectifier,
        scaled_floor=size.si_scaled_floor,
    )


def decoder(family: Callable[..., Params], *options: str, **fixed: Any) -> Architecture:
    """Return the architecture of a decoder family.

    `options` names the fields of `Dimensions` that the family takes; `fixed` are arguments that
    every model of the architecture has.
    """

    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        read = {name: getattr(size, name) for name in ("layers", "heads", "guessing", *options)}
        made = family(
            size.vocab, size.embedding_size, size.hidden_size, **{**read, **fixed}, key=key
        )
        return replace(made, remat=size.remat, dtype=size.dtype)

    return Architecture(make, SMALL_DECODER, attends=True)


def invariant(family: Callable[..., Params], *options: str) -> Architecture:
    """Return the architecture of a decoder family in its scale-invariant wiring."""

    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        wired = decoder(family, *options, invariant=True, row_floor=size.si_row_floor)
        return wired.make(size, key)

    return Architecture(make, SMALL_DECODER, attends=True)


SMALL_DECODER = Dimensions(embedding_size=96, hidden_size=384, layers=3, heads=8)
_PLACED = ("positions", "length")
_ROTARY = ("rope_theta", "rope_scaling", "tied", "norm_epsilon")
ARCHITECTURES: dict[str, Architecture] = {
    "lstm": from_cell(lambda size: Lstm(size.cell_layer_norm)),
    "cifg": from_cell(lambda size: Cifg(size.cell_layer_norm)),
    "si-cifg": from_cell(_si_cifg),
    "transformer": decoder(transformer, *_PLACED, "activation"),
    "si-transformer": invariant(transformer, *_PLACED),
    "conformer": decoder(conformer, *_PLACED, "kernel_size"),
    "si-conformer": invariant(conformer, *_PLACED, "kernel_size"),
    "mpt": decoder(transformer, "activation", "norm_epsilon", positions="alibi", bias=False),
    "gpt2": decoder(transformer, "length", "activation", "norm_epsilon", positions="learned"),
    "gpt-neox": decoder(
        transformer, "activation", "rotary_fraction", "parallel", *_ROTARY, positions="none"
    ),
    "llama": decoder(llama, "key_heads", "head_size", "qkv_bias", "out_bias", "mlp_bias", *_ROTARY),
}


@dataclass(frozen=True)
class Named:
    """An architecture at a published size."""

    architecture: str
    size: Dimensions
    published: str | None = None


def _named(architecture: str, published: Any = None, **size: Any) -> Named:
    return Named(architecture, Dimensions(**size), published)


_GBOARD = {"embedding_size": 96, "hidden_size": 670}
_DECODER = {"vocab": 4000, "hidden_size": 2048, "heads": 8, "guessing": True}
_MPT75 = {"embedding_size": 896, "hidden_size": 3584, "layers": 3, "heads": 16, "guessing": True}
_MPT12 = {"vocab": 50_368, "layers": 12, "heads": 12, "guessing": True}
PUBLISHED: dict[str, Named] = {
    "gboard-cifg-10k": _named("cifg", "1.4M", vocab=10_000, **_GBOARD),
    "gboard-cifg-20k": _named("cifg", "2.4M", vocab=20_000, **_GBOARD),
    "gboard-cifg-30k": _named("cifg", "3.3M", vocab=30_000, **_GBOARD),
    "small-lstm": _named("cifg", "4.7M", vocab=4000, embedding_size=256, hidden_size=2048),
    "small-transformer": _named("transformer", "4.1M", embedding_size=128, layers=6, **_DECODER),
    "large-lstm": _named("cifg", "18.8M", vocab=4000, embedding_size=1024, hidden_size=2048),
    "large-transformer": _named("transformer", "21.0M", embedding_size=512, layers=6, **_DECODER),
    "large-conformer": _named("conformer", "20.2M", embedding_size=512, layers=3, **_DECODER),
    "mpt-75m": _named("mpt", "75M", vocab=50_368, **_MPT75),
    "mpt-125m": _named("mpt", "125M", embedding_size=768, hidden_size=3072, **_MPT12),
    "mpt-250m": _named("mpt", "250M", vocab=250_112, **_MPT75),
    "mpt-400m": _named("mpt", "400M", embedding_size=1536, hidden_size=6144, **_MPT12),
}


class _Names(Mapping[str, Named]):
    """All model names: the architectures, then the published sizes."""

    def __getitem__(self, name: str) -> Named:
        if name in ARCHITECTURES:
            return Named(name, ARCHITECTURES[name].size)
        return PUBLISHED[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**ARCHITECTURES, **PUBLISHED})

    def __len__(self) -> int:
        return len({**ARCHITECTURES, **PUBLISHED})


NAMED = _Names()


def dimensions(settings: Iterable[tuple[str, Any]], vocab: int) -> Dimensions:
    """Return the sizes of a named model, changed where settings say so.

    Args:
      settings: the names and values of `[model]`; a value of None leaves a size as it is.
      vocab: the number of the tokenizer's entries.

    Raises:
      ConfigError: the sizes do not fit each other.

    >>> dimensions([("name", "gpt2"), ("heads", 4), ("layers", None)], 500).heads
    4
    """
    said = {name: value for name, value in settings if value is not None}
    name, named = said["name"], NAMED[said["name"]]
    sizes = {k: v for k, v in said.items() if k in Dimensions.__dataclass_fields__}
    size = replace(named.size, **{"vocab": vocab, **sizes})
    require(
        size.vocab >= vocab,
        "model.vocab",
        size.vocab,
        f"at least {vocab}, the vocabulary of the tokenizer",
        "Prepare the text with the model's own tokenizer: fedlm prepare --tokenizer tokenizer.json."
        if said.get("init_from")
        else "",
    )
    attends = ARCHITECTURES[named.architecture].attends
    require(
        not size.guessing or attends,
        "model.guessing",
        size.guessing,
        f"nothing with model.name = {name!r}: a fresh recurrent model always begins so",
    )
    if attends:
        _check_heads(size)
    return size


def _check_heads(size: Dimensions) -> None:
    require(
        size.head_size is not None or size.embedding_size % size.heads == 0,
        "model.heads",
        size.heads,
        f"a divisor of model.embedding_size, which is {size.embedding_size}",
    )
    require(
        size.heads % (size.key_heads or 1) == 0,
        "model.key_heads",
        size.key_heads,
        f"a divisor of model.heads, which is {size.heads}",
    )
    width = size.head_size or size.embedding_size // size.heads
    require(
        size.head_size is None or width % 2 == 0,
        "model.head_size",
        size.head_size,
        "an even number: rotary positions turn pairs",
    )


def make(architecture: str, size: Dimensions, key: PRNGKeyArray) -> Params:
    """Make a fresh model."""
    return ARCHITECTURES[architecture].make(size, key)


def shapes(architecture: str, size: Dimensions) -> Params:
    """Return the model with shapes in place of values."""
    return _shapes(ARCHITECTURES[architecture].make, size)


@by_value
def _shapes(make: Maker, size: Dimensions) -> Params:
    return eqx.filter_eval_shape(lambda: make(size, jr.key(0)))


def learned_positions(architecture: str, size: Dimensions) -> int | None:
    """Return how many positions a model learns; None if it takes rows of any length.

    >>> learned_positions("gpt2", Dimensions(vocab=9, embedding_size=8, length=32))
    32
    """
    places = tree.named_leaves(shapes(architecture, size)).get("stem.places")
    return None if places is None else int(places.shape[0])


def count(architecture: str, size: Dimensions) -> int:
    """Return the number of parameters of the model.

    >>> count("si-cifg", Dimensions(vocab=10_000, embedding_size=96, hidden_size=670))
    1412250
    """
    return tree.size(shapes(architecture, size))


@dataclass(frozen=True)
class ModelSpec:
    """An architecture and its size, from which a model or only its shapes can be made.

    The functions of `fedlm.models` return one, for `Federation`.

    Attributes:
      architecture: the name of the architecture.
      size: the sizes by name.
      name: the recipe's `model.name`; if empty, the name of the architecture.
      adapters: the adapters that are trained on the frozen model; None if the model is trained.

    >>> import fedlm
    >>> spec = fedlm.models.cifg(10_000, embedding_size=96, hidden_size=670)
    >>> spec.architecture, spec.size.vocab, spec.parameters
    ('cifg', 10000, 1412250)
    """

    architecture: str
    size: Dimensions
    name: str = ""  # the recipe's `model.name`; if empty, the name of the architecture
    adapters: Adapters | None = None  # what is trained on the frozen model; None: the model itself

    origin = ""  # its values are drawn

    def init(self, key: PRNGKeyArray) -> Params:
        """Return a fresh model, with adapters if it has any."""
        return self.adapt(make(self.architecture, self.size, key), key)

    def adapt(self, model: Params, key: PRNGKeyArray) -> Params:
        """Return a model with fresh adapters, whose A follows from the key."""
        return model if self.adapters is None else adapt(model, self.adapters, jr.fold_in(key, 7))

    def shapes(self) -> Params:
        """Return the model with shapes in place of values, with adapters if it has any."""
        return eqx.filter_eval_shape(lambda: self.init(jr.key(0)))

    def plain_shapes(self) -> Params:
        """Return the model without adapters, with shapes in place of values."""
        return shapes(self.architecture, self.size)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model, without adapters."""
        return count(self.architecture, self.size)

    @property
    def loss(self) -> LossFn:
        """The function that gives the next-token loss of a batch."""
        return loss

    @property
    def score(self) -> ScoreFn:
        """The function that gives each target's nats and whether it was the likeliest token."""
        return score

    def settings(self) -> dict[str, Any]:
        """Return the recipe's `[model]` table."""
        named = NAMED[self.name or self.architecture].size
        sizes = {f: v for f, v in vars(self.size).items() if v != getattr(named, f)}
        return {"name": self.name or self.architecture, **_known(sizes)}


def _known(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes without those that the store decides."""
    return {name: value for name, value in sizes.items() if name not in ("vocab", "length")}


@dataclass(frozen=True)
class ModuleSpec:
    """A user's own equinox module as a model: `module(tokens[batch, seq]) -> logits`.

    All floating-point arrays of the module are trained; its other fields stay as they are.
    """

    module: Any

    origin = "python"  # its values are those that its maker gave it

    def _split(self) -> tuple[Params, Any]:
        return eqx.partition(self.module, eqx.is_inexact_array)

    def init(self, key: PRNGKeyArray) -> Params:
        """Return the arrays of the module, which its maker has initialised."""
        return self._split()[0]

    def shapes(self) -> Params:
        """Return the arrays with shapes in place of values."""
        return eqx.filter_eval_shape(lambda: self._split()[0])

    @property
    def parameters(self) -> int:
        """The number of parameters of the module."""
        return tree.size(self._split()[0])

    @property
    def loss(self) -> LossFn:
        """The function that gives the next-token loss of a batch."""
        score = self.score

        def of(params: Params, batch: Batch) -> Loss:
            assert not isinstance(batch, Precomputed)  # a module has no adapters
            tokens = batch
            nats, _ = score(params, tokens)
            count = jnp.sum(tokens[:, 1:] != PAD).astype(nats.dtype)
            return Loss(jnp.sum(nats), count)

        return of

    @property
    def score(self) -> ScoreFn:
        """The function that gives each target's nats and whether it was the likeliest token."""
        rest = self._split()[1]  # without the arrays, which programs that are kept must not hold

        def of(params: Params, batch: Batch) -> tuple[Array, Array]:
            assert not isinstance(batch, Precomputed)  # a module has no adapters
            tokens = batch
            targets = tokens[:, 1:]
            logits = eqx.combine(params, rest)(jnp.maximum(tokens[:, :-1], 0))
            logs = jax.nn.log_softmax(logits)
            taken = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
            right = jnp.argmax(logits, -1) == targets
            return jnp.where(targets != PAD, -taken, 0.0), right

        return of

    def settings(self) -> dict[str, Any]:
        """Return an empty table: a recipe cannot name a module."""
        return {}


def listing() -> list[dict[str, Any]]:
    """Return one row per model name."""
    return [
        {
            "name": name,
            "architecture": entry.architecture,
            "parameters": count(entry.architecture, entry.size),
            "published": entry.published,
            "embedding": entry.size.embedding_size,
            "hidden_size": entry.size.hidden_size,
            "layers": entry.size.layers,
            "vocabulary": entry.size.vocab,
        }
        for name, entry in NAMED.items()
    ]


# ---- what stations ask of a model ------------------------------------------------------


def loss(model: Params, batch: Batch, full_rows: bool = False) -> Loss:
    """Return the next-token loss of a batch of rows, with products of the model's `dtype`."""
    model = model.in_training
    if isinstance(batch, Precomputed):
        made: Loss = model.loss_above(batch.features, batch.tokens[:, 1:], full_rows)
    else:
        made = model.loss(batch[:, :-1], batch[:, 1:], full_rows)
    return made


def loss_of_full_rows(model: Params, batch: Batch) -> Loss:
    """Return the same loss; its program is smaller, and made for rows that are full.

    It is right for rows of any length, and slower than `loss` where many of them are short.
    """
    return loss(model, batch, full_rows=True)


def score(model: Params, batch: Batch) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """Return the nats of each target, and whether it was the most likely token in its place."""
    if isinstance(batch, Precomputed):
        tokens, features = batch.tokens, model.features_above(batch.features)
    else:
        tokens, features = batch, model.features(batch[:, :-1])
    targets = tokens[:, 1:]
    nats, right = scores(
        features.reshape(-1, features.shape[-1]), model.readout, targets.reshape(-1)
    )
    return nats.reshape(targets.shape), right.reshape(targets.shape)


def logits(model: Params, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
    """Return the logits of the token after each position."""
    return model.features(tokens) @ model.readout.T


def advance(model: Params, state: PyTree, token: Int[Array, " batch"]) -> tuple[PyTree, Array]:
    """Feed one token per row, and return the next state and the logits of the token after it."""
    state, features = model.advance(state, token)
    return state, jnp.matmul(features, model.readout.T)
