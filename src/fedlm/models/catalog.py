"""Every architecture by name, and how large it is.

In:       a name and its dimensions.
Out:      a model, or its parameter count.
Promise:  a count is the number of values in the model that the same arguments make, found
          without allocating one; a named size has the count that was published for it; one line
          in `ARCHITECTURES` adds an architecture or a recurrent cell.
Not here: the architectures (one file a family).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.types import PAD, Loss, LossFn, Params, Tokens
from fedlm.models.cells import Cell, Cifg, Lstm, Measure, SiCifg
from fedlm.models.conformer import conformer
from fedlm.models.embedding import Positions
from fedlm.models.loss import scores, token_loss
from fedlm.models.recurrent import recurrent
from fedlm.models.transformer import transformer


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes and options that decide a model; an architecture reads those it has."""

    vocab: int = 10_000
    embedding_size: int = 96
    hidden_size: int = 670  # of a recurrent layer, or inside a feed-forward
    layers: int = 1
    heads: int = 8
    kernel_size: int = 31  # taps of a convolution
    positions: Positions = "sinusoidal"
    length: int = 1024  # how many positions are learned, where they are
    cell_layer_norm: bool = False
    si_measure: Measure = "max"
    si_floor: float = 1e-6
    si_candidate: bool = True
    si_state: bool = True
    si_row_floor: float = 0.1


ScoreFn = Callable[[Params, Tokens], tuple[Array, Array]]
Maker = Callable[[Dimensions, PRNGKeyArray], Params]


@dataclass(frozen=True)
class Architecture:
    """How a model is made, and its sizes where a recipe leaves them out."""

    make: Maker
    size: Dimensions = Dimensions()
    attends: bool = False  # with heads, whose number must divide the embedding


def from_cell(cell: Callable[[Dimensions], Cell]) -> Architecture:
    """Make the architecture whose layers repeat a recurrent cell."""

    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        return recurrent(
            cell(size),
            size.vocab,
            size.embedding_size,
            size.hidden_size,
            layers=size.layers,
            key=key,
        )

    return Architecture(make)


def _si_cifg(size: Dimensions) -> Cell:
    return SiCifg(
        layer_norm=size.cell_layer_norm,
        measure=size.si_measure,
        floor=size.si_floor,
        candidate=size.si_candidate,
        state=size.si_state,
    )


def decoder(family: Callable[..., Params], *options: str, **fixed: Any) -> Architecture:
    """Make the architecture of a decoder that reads `options` of the sizes and has `fixed` ones."""

    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        read = {name: getattr(size, name) for name in ("layers", "heads", *options)}
        read["row_floor"] = size.si_row_floor
        return family(
            size.vocab, size.embedding_size, size.hidden_size, **{**read, **fixed}, key=key
        )

    return Architecture(make, SMALL_DECODER, attends=True)


SMALL_DECODER = Dimensions(embedding_size=96, hidden_size=384, layers=3, heads=8)
_PLACED = ("positions", "length")
ARCHITECTURES: dict[str, Architecture] = {
    "lstm": from_cell(lambda size: Lstm(size.cell_layer_norm)),
    "cifg": from_cell(lambda size: Cifg(size.cell_layer_norm)),
    "si-cifg": from_cell(_si_cifg),
    "transformer": decoder(transformer, *_PLACED),
    "si-transformer": decoder(transformer, *_PLACED, invariant=True),
    "conformer": decoder(conformer, *_PLACED, "kernel_size"),
    "si-conformer": decoder(conformer, *_PLACED, "kernel_size", invariant=True),
    "mpt": decoder(transformer, positions="alibi", bias=False),
}


@dataclass(frozen=True)
class Named:
    """A size that somebody published."""

    architecture: str
    size: Dimensions
    published: str | None = None


def _named(architecture: str, published: Any = None, **size: Any) -> Named:
    return Named(architecture, Dimensions(**size), published)


_GBOARD = {"embedding_size": 96, "hidden_size": 670}
_MPT75 = {"embedding_size": 896, "hidden_size": 3584, "layers": 3, "heads": 16}
PUBLISHED: dict[str, Named] = {
    "gboard-cifg-10k": _named("cifg", "1.4M", vocab=10_000, **_GBOARD),
    "gboard-cifg-20k": _named("cifg", "2.4M", vocab=20_000, **_GBOARD),
    "gboard-cifg-30k": _named("cifg", "3.3M", vocab=30_000, **_GBOARD),
    "small-lstm": _named("cifg", "4.7M", vocab=4000, embedding_size=256, hidden_size=2048),
    "small-transformer": _named(
        "transformer", "4.1M", vocab=4000, embedding_size=128, hidden_size=2048, layers=6, heads=8
    ),
    "large-lstm": _named("cifg", "18.8M", vocab=4000, embedding_size=1024, hidden_size=2048),
    "large-transformer": _named(
        "transformer", "21.0M", vocab=4000, embedding_size=512, hidden_size=2048, layers=6, heads=8
    ),
    "large-conformer": _named(
        "conformer", "20.2M", vocab=4000, embedding_size=512, hidden_size=2048, layers=3, heads=8
    ),
    "mpt-75m": _named("mpt", "75M", vocab=50_368, **_MPT75),
    "mpt-125m": _named(
        "mpt", "125M", vocab=50_368, embedding_size=768, hidden_size=3072, layers=12, heads=12
    ),
    "mpt-250m": _named("mpt", "250M", vocab=250_112, **_MPT75),
    "mpt-400m": _named(
        "mpt", "400M", vocab=50_368, embedding_size=1536, hidden_size=6144, layers=12, heads=12
    ),
}


class _Names(Mapping[str, Named]):
    """Every name of a model: the architectures, then the published sizes."""

    def __getitem__(self, name: str) -> Named:
        if name in ARCHITECTURES:
            return Named(name, ARCHITECTURES[name].size)
        return PUBLISHED[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**ARCHITECTURES, **PUBLISHED})

    def __len__(self) -> int:
        return len({**ARCHITECTURES, **PUBLISHED})


NAMED = _Names()


def make(architecture: str, size: Dimensions, key: PRNGKeyArray) -> Params:
    """A fresh model."""
    return ARCHITECTURES[architecture].make(size, key)


def shapes(architecture: str, size: Dimensions) -> Params:
    """The model with shapes in place of values."""
    return eqx.filter_eval_shape(lambda: make(architecture, size, jr.key(0)))


def count(architecture: str, size: Dimensions) -> int:
    """How many parameters the model has.

    >>> count("si-cifg", Dimensions(vocab=10_000, embedding_size=96, hidden_size=670))
    1412250
    """
    return tree.size(shapes(architecture, size))


@dataclass(frozen=True)
class ModelSpec:
    """An architecture at a size: enough to make a model, or to know its shapes without one."""

    architecture: str
    size: Dimensions
    name: str = ""  # as the recipe's `model.name`; empty: the architecture's

    def init(self, key: PRNGKeyArray) -> Params:
        """Returns a fresh model."""
        return make(self.architecture, self.size, key)

    def shapes(self) -> Params:
        """Returns the model with shapes in place of values."""
        return shapes(self.architecture, self.size)

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return count(self.architecture, self.size)

    @property
    def loss(self) -> LossFn:
        """The next-token loss of a batch."""
        return loss

    @property
    def score(self) -> ScoreFn:
        """Nats of each target, and whether it was the likeliest token in its place."""
        return score

    def settings(self) -> dict[str, Any]:
        """Returns the recipe's `[model]` table."""
        named = NAMED[self.name or self.architecture].size
        sizes = {f: v for f, v in vars(self.size).items() if v != getattr(named, f)}
        return {"name": self.name or self.architecture, **_known(sizes)}


def _known(sizes: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what a store decides."""
    return {name: value for name, value in sizes.items() if name not in ("vocab", "length")}


@dataclass(frozen=True)
class ModuleSpec:
    """A user's own equinox module as a model: `module(tokens[batch, seq]) -> logits`.

    All of its floating-point arrays are trained; whatever else it holds stays as it is.
    """

    module: Any

    def _split(self) -> tuple[Params, Any]:
        return eqx.partition(self.module, eqx.is_inexact_array)

    def init(self, key: PRNGKeyArray) -> Params:
        """Returns the arrays of the module; it was initialised by its maker."""
        return self._split()[0]

    def shapes(self) -> Params:
        """Returns the arrays with shapes in place of values."""
        return eqx.filter_eval_shape(lambda: self._split()[0])

    @property
    def parameters(self) -> int:
        """How many parameters the module has."""
        return tree.size(self._split()[0])

    def _logits(self, params: Params, tokens: Int[Array, "batch seq"]) -> Array:
        return eqx.combine(params, self._split()[1])(tokens)

    @property
    def loss(self) -> LossFn:
        """The next-token loss of a batch."""

        def of(params: Params, tokens: Tokens) -> Loss:
            nats, _ = self.score(params, tokens)
            count = jnp.sum(tokens[:, 1:] != PAD).astype(nats.dtype)
            return Loss(jnp.sum(nats), count)

        return of

    @property
    def score(self) -> ScoreFn:
        """Nats of each target, and whether it was the likeliest token in its place."""

        def of(params: Params, tokens: Tokens) -> tuple[Array, Array]:
            targets = tokens[:, 1:]
            logits = self._logits(params, jnp.maximum(tokens[:, :-1], 0))
            logs = jax.nn.log_softmax(logits)
            taken = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
            right = jnp.argmax(logits, -1) == targets
            return jnp.where(targets != PAD, -taken, 0.0), right

        return of

    def settings(self) -> dict[str, Any]:
        """Returns nothing: a recipe cannot name a module."""
        return {}


def listing() -> list[dict[str, Any]]:
    """One row a name."""
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


def loss(model: Params, tokens: Tokens) -> Loss:
    """Next-token loss of a batch of rows."""
    return token_loss(*model.predictors(tokens[:, :-1], tokens[:, 1:]))


def score(model: Params, tokens: Tokens) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """Nats of each target, and whether it was the most likely token in its place."""
    features = model.features(tokens[:, :-1])
    targets = tokens[:, 1:]
    nats, right = scores(
        features.reshape(-1, features.shape[-1]), model.readout, targets.reshape(-1)
    )
    return nats.reshape(targets.shape), right.reshape(targets.shape)


def logits(model: Params, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
    """What may follow each token."""
    return model.features(tokens) @ model.readout.T


def advance(model: Params, state: Any, token: Int[Array, " batch"]) -> tuple[Any, Array]:
    """One token further: the next state, and logits for what follows."""
    state, features = model.advance(state, token)
    return state, jnp.matmul(features, model.readout.T)
