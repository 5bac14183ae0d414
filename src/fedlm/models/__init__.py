"""Language models: a function per architecture, made for the vocabulary of a store.

>>> spec = si_cifg(10_000, hidden_size=670)
>>> spec.parameters
1412250
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedlm.models.catalog import NAMED, ModelSpec


def named(name: str, vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns the model with a name that `fedlm models` lists, at the sizes given.

    `vocabulary` is a store or its number of tokens; sizes have the names of the recipe's `[model]`
    table.

    >>> named("transformer", 2_000, layers=2).size.layers
    2
    """
    entry = NAMED[name]
    count = int(getattr(vocabulary, "vocabulary", vocabulary))
    return ModelSpec(entry.architecture, replace(entry.size, vocab=count, **sizes), name)


def lstm(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns a recurrent model of LSTM cells with a projection."""
    return named("lstm", vocabulary, **sizes)


def cifg(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns a recurrent model with coupled input and forget gates."""
    return named("cifg", vocabulary, **sizes)


def si_cifg(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns the scale-invariant recurrent model."""
    return named("si-cifg", vocabulary, **sizes)


def transformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns a decoder-only Transformer."""
    return named("transformer", vocabulary, **sizes)


def si_transformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns the scale-invariant Transformer."""
    return named("si-transformer", vocabulary, **sizes)


def conformer(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns a causal Conformer: attention and convolution."""
    return named("conformer", vocabulary, **sizes)


def mpt(vocabulary: Any, **sizes: Any) -> ModelSpec:
    """Returns a Transformer in the style of MPT: ALiBi positions, no biases."""
    return named("mpt", vocabulary, **sizes)
