"""Language models: a function per architecture, made for the vocabulary of a store.

Sizes are named as in a recipe's `[model]` table, which describes them all; sizes left out are those
that `fedlm models` lists. The most common are `embedding_size` (numbers per token), `hidden_size`
(units of a recurrent layer, or inside a feed-forward layer), `layers` and `heads` (of attention).

>>> spec = si_cifg(10_000, hidden_size=670)
>>> spec.parameters
1412250
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fedlm.core.errors import nearest, require
from fedlm.models.catalog import NAMED, Dimensions
from fedlm.models.catalog import ModelSpec as ModelSpec

__all__ = [
    "cifg",
    "conformer",
    "lstm",
    "ModelSpec",
    "mpt",
    "named",
    "si_cifg",
    "si_transformer",
    "transformer",
]


def named(name: str, vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return the model of a name that `fedlm models` lists, at the given sizes.

    Args:
      name: an architecture, as `llama`, or a published size, as `mpt-125m`.
      vocabulary: a store, or a number of tokens.
      **sizes: sizes that are not those of the name.

    Raises:
      ConfigError: there is no model of that name, or it has no such size.

    >>> named("transformer", 2_000, layers=2).size.layers
    2
    >>> named("transformers", 2_000)
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: name = 'transformers': expected ... Did you mean 'transformer'?
    """
    require(
        name in NAMED, "name", name, "a model that fedlm models lists", nearest(str(name), NAMED)
    )
    known = [field.name for field in fields(Dimensions) if field.name != "vocab"]
    for size, value in sizes.items():
        require(size in known, size, value, "a size of a model", nearest(size, known))
    count = int(getattr(vocabulary, "vocabulary", vocabulary))
    entry = NAMED[name]
    return ModelSpec(entry.architecture, replace(entry.size, vocab=count, **sizes), name)


def lstm(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return a recurrent model of LSTM cells with a projection.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `cell_layer_norm`.

    Raises:
      ConfigError: there is no such size.

    >>> lstm(10_000, embedding_size=96, hidden_size=670).parameters
    1541560
    """
    return named("lstm", vocabulary, **sizes)


def cifg(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return a recurrent model with coupled input and forget gates.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `cell_layer_norm`.

    Raises:
      ConfigError: there is no such size.

    >>> cifg(10_000, embedding_size=96, hidden_size=670).parameters
    1412250
    """
    return named("cifg", vocabulary, **sizes)


def si_cifg(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return the scale-invariant recurrent model.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `cell_layer_norm`, and those that begin
        with `si_`.

    Raises:
      ConfigError: there is no such size.

    >>> si_cifg(10_000, hidden_size=256).size.hidden_size
    256
    """
    return named("si-cifg", vocabulary, **sizes)


def transformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return a decoder-only Transformer.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `heads` (a divisor of `embedding_size`),
        `positions`, `length` (learned positions, in tokens), `activation`.

    Raises:
      ConfigError: there is no such size.

    >>> transformer(4_000, embedding_size=128, hidden_size=2048, layers=6, heads=8).parameters
    4070400
    """
    return named("transformer", vocabulary, **sizes)


def si_transformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return the scale-invariant Transformer.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `heads` (a divisor of `embedding_size`),
        `positions`, `length` (learned positions, in tokens), `si_row_floor`.

    Raises:
      ConfigError: there is no such size.

    >>> si_transformer(2_000, layers=2).size.layers
    2
    """
    return named("si-transformer", vocabulary, **sizes)


def conformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return a causal Conformer: attention and convolution.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: those of a Transformer without `activation`, and `kernel_size` (taps of the
        convolution, in tokens).

    Raises:
      ConfigError: there is no such size.

    >>> conformer(2_000, kernel_size=15).size.kernel_size
    15
    """
    return named("conformer", vocabulary, **sizes)


def mpt(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Return a Transformer in the style of MPT: ALiBi positions, no biases.

    Args:
      vocabulary: a store, or a number of tokens.
      **sizes: `embedding_size`, `hidden_size`, `layers`, `heads` (a divisor of `embedding_size`),
        `activation`, `norm_epsilon`.

    Raises:
      ConfigError: there is no such size.

    >>> mpt(50_368, embedding_size=768, hidden_size=3072, layers=12, heads=12).parameters
    123636480
    """
    return named("mpt", vocabulary, **sizes)
