"""What flows between rooms.

In:       nothing.
Out:      the words that stations share, so that they need not import each other.
Promise:  types only; no function here computes.
Not here: settings (`recipe/settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

# Token numbers that every tokenizer keeps; PAD is zero so that padding is zero-filled memory.
PAD, BOS, EOS, OOV = 0, 1, 2, 3
SPECIALS = ("<pad>", "<bos>", "<eos>", "<oov>")

Params = Any
"""A model: an `eqx.Module` whose leaves are float arrays."""

Tokens = Int[Array, "batch seq_plus_one"]
"""Rows of tokens; column t predicts column t + 1, and a target of PAD does not count."""

OptState = Any


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law by which members join a round, over clients numbered from zero."""

    law: Literal["fixed", "poisson", "separated"]
    population: int
    cohort: int  # exactly (fixed, separated) or in expectation (poisson)
    min_separation: int = 0  # separated: rounds strictly between two participations of a client
    max_participations: int = 0  # separated: in the whole run; 0 is what the separation allows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How one member's rows become batches."""

    batch: int
    length: int
    epochs: int = 1
    max_examples: int | None = None
    max_steps: int | None = None


class Loss(NamedTuple):
    """A sum over target tokens and how many there were: the mean is `nats / tokens`."""

    nats: Float[Array, ""]
    tokens: Float[Array, ""]


LossFn = Callable[[Params, Tokens], Loss]


class Update(eqx.Module):
    """What a member sends: how it changed the model, and how much it counts."""

    delta: Params
    weight: Float[Array, ""]
    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    steps: Float[Array, ""]
    refused: Float[Array, ""]
    inside: Float[Array, ""]  # one, unless a privacy clip made it shorter


class Total(eqx.Module):
    """The sum of a cohort's updates; `delta` is weighted by each member's `weight`."""

    delta: Params
    weight: Float[Array, ""]
    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    steps: Float[Array, ""]
    refused: Float[Array, ""]
    inside: Float[Array, ""]
    members: Float[Array, ""]


class History(NamedTuple):
    """When each client last took part, and how often; empty where no law asks for it."""

    last: Any  # int32, population
    times: Any  # int32, population


class Local(NamedTuple):
    """One member's work as three pure functions that any engine can run.

    `init(params)` gives what a member carries, `step(carry, tokens)` takes one batch, and
    `finish(params, carry, examples)` turns the carry into an `Update`.
    """

    init: Callable[[Params], Any]
    step: Callable[[Any, Tokens], Any]
    finish: Callable[[Params, Any, Float[Array, ""]], Update]


class Codec(NamedTuple):
    """An update to bytes and back, and the same thing inside a compiled program.

    `decode(encode(x), like)` equals `apply(x)`; `encoded_bytes(like)` is `len(encode(x))`, or the
    most that can be where `fixed_size` is false; `norm_gain` bounds how much longer `apply(x)` can
    be than `x` (`math.inf`: no bound holds for every shape, so clip again what arrived).
    """

    name: str
    encode: Callable[[Params, PRNGKeyArray], bytes]
    decode: Callable[[bytes, Params], Params]
    apply: Callable[[Params, PRNGKeyArray], Params]
    encoded_bytes: Callable[[Params], int]
    norm_gain: float
    fixed_size: bool = True


class Rows(Protocol):
    """Where a member's examples come from: client number to rows of tokens."""

    def __call__(self, client: int, /) -> Integer[np.ndarray, "rows seq_plus_one"]: ...


Members = Integer[np.ndarray, " members"]


class Prepared(NamedTuple):
    """A cohort whose examples are ready; what `batches` holds is the engine's own affair."""

    round: int
    members: Members
    batches: Any


class Engine(Protocol):
    """A way to compute the sum of a cohort's updates, none of them longer than `limit`."""

    upload_bytes: int
    download_bytes: int

    def prepare(self, round: int, members: Members) -> Prepared: ...

    def gather(self, params: Params, cohort: Prepared, limit: float = ...) -> Total: ...

    def collect(
        self, params: Params, cohort: Prepared, limit: float = ...
    ) -> Iterable[tuple[int, Update]]: ...
