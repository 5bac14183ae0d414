"""Every architecture by name, and how large it is.

In:       a name and its dimensions.
Out:      a model, or its parameter count.
Promise:  a count is the number of values in the model that the same arguments make, found
          without allocating one.
Not here: the architectures (one file a family).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.types import Loss, Params, Tokens
from fedlm.models.loss import scores, token_loss
from fedlm.models.recurrent import recurrent


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes that decide a model's shape."""

    vocab: int = 10_000
    embed: int = 96
    units: int = 670
    layers: int = 1


Maker = Callable[[Dimensions, PRNGKeyArray], Params]


def _recurrent(cell: str) -> Maker:
    def make(size: Dimensions, key: PRNGKeyArray) -> Params:
        return recurrent(cell, size.vocab, size.embed, size.units, layers=size.layers, key=key)

    return make


ARCHITECTURES: dict[str, Maker] = {name: _recurrent(name) for name in ("cifg", "lstm", "si-cifg")}


def make(name: str, size: Dimensions, key: PRNGKeyArray) -> Params:
    """A fresh model."""
    return ARCHITECTURES[name](size, key)


def shapes(name: str, size: Dimensions) -> Params:
    """The model with shapes in place of values."""
    return eqx.filter_eval_shape(lambda: make(name, size, jr.key(0)))


def count(name: str, size: Dimensions) -> int:
    """How many parameters the model has.

    >>> count("si-cifg", Dimensions(vocab=10_000, embed=96, units=670))
    1412250
    """
    return tree.size(shapes(name, size))


def listing(size: Dimensions | None = None) -> list[dict[str, Any]]:
    """One row an architecture, at its default dimensions."""
    size = size or Dimensions()
    return [
        {
            "name": name,
            "parameters": count(name, size),
            "embedding": size.embed,
            "units": size.units,
            "layers": size.layers,
            "vocabulary": size.vocab,
        }
        for name in sorted(ARCHITECTURES)
    ]


# ---- what stations ask of a model ------------------------------------------------------


def loss(model: Params, tokens: Tokens) -> Loss:
    """Next-token loss of a batch of rows."""
    return token_loss(model.features(tokens[:, :-1]), model.readout, tokens[:, 1:])


def score(model: Params, tokens: Tokens) -> tuple[Float[Array, "b t"], Int[Array, "b t"]]:
    """Nats of each target, and the most likely token in its place."""
    features = model.features(tokens[:, :-1])
    targets = tokens[:, 1:]
    nats, likely = scores(
        features.reshape(-1, features.shape[-1]), model.readout, targets.reshape(-1)
    )
    return nats.reshape(targets.shape), likely.reshape(targets.shape)


def advance(model: Params, state: Any, token: Int[Array, " batch"]) -> tuple[Any, Array]:
    """One token further: the next state, and logits for what follows."""
    state, features = model.advance(state, token)
    return state, jnp.matmul(features, model.readout.T)
