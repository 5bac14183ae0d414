"""What flows between rooms.

In:       nothing.
Out:      the words that stations share, so that they need not import each other.
Promise:  types only; no function here computes.
Not here: settings (`recipe/settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

# A place of a row that holds no token. It is no number of any vocabulary, so that every entry of a
# vocabulary can be a target; an array looked up at it gives its last entry, which nothing may use.
PAD = -1

Params = Any
"""A model: an `eqx.Module` whose leaves are float arrays."""

Tokens = Int[Array, "batch seq_plus_one"]
"""Rows of tokens; column t predicts column t + 1, and a target of PAD does not count."""

OptState = Any


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens of a vocabulary that stand for something else than text."""

    bos: int  # before the first token of a text
    eos: int  # after the last token of a line
    oov: (
        int | None
    )  # in place of what the vocabulary has no token for; None if it has no such token
    reserved: tuple[int, ...]  # never offered as a word: those above, and all others like them


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law by which members join a round, over clients numbered from zero."""

    law: str  # a name in `cohort.sampling.LAWS`
    population: int
    cohort: int  # exactly (fixed, spaced) or in expectation (poisson)
    min_separation: int = 0  # spaced: rounds strictly between two participations of a client
    max_participations: int = 0  # spaced: in the whole run; 0 is what the separation allows


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """How one member's rows become batches."""

    batch_size: int
    sequence_length: int
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
    unclipped: Float[Array, ""]  # one, unless a privacy clip made it shorter
    mask: Any = None  # one or zero a leaf, where each member trains leaves of its own
    client_state: Any = None  # what the member remembers until its next turn, where it does


class Total(eqx.Module):
    """The sum of a cohort's updates; `delta` is weighted by each member's `weight`."""

    delta: Params
    weight: Float[Array, ""]
    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    steps: Float[Array, ""]
    refused: Float[Array, ""]
    unclipped: Float[Array, ""]
    members: Float[Array, ""]
    shares: Any = None  # the weight that each leaf got, where members train leaves of their own
    client_state: Any = None  # what each member remembers, in the order of the cohort


class History(NamedTuple):
    """When each client last took part, and how often; empty where no law asks for it."""

    last: Any  # int32, population
    times: Any  # int32, population


class OnBase(NamedTuple):
    """What the members of a round share where most of a model is held still.

    Every function of a `ClientMethod` but `shared` and `expand` gets it in place of what `shared`
    made, if the algorithm has a base.
    """

    base: Params  # what nobody trains, None where a leaf is trained; the same in every round
    rest: Any  # what `shared` made of this round's message


class TrainablePart(NamedTuple):
    """Which numbers of a model a member trains: all, some leaves, or factors of them.

    `shared(params, key)` is what all members of a round hold still, `init(shared)` what they
    train, `merge(shared, trained)` the whole model of the two, and `expand(params, key, delta)` the
    change of the whole model that a change of the trained part stands for (it is linear).
    `draw(params, key)`, where there is one, gives the leaves of one member as ones and zeros.
    """

    shared: Callable[[Params, PRNGKeyArray], Any] = lambda params, key: params
    init: Callable[[Any], Params] = lambda shared: shared
    merge: Callable[[Any, Params], Params] = lambda shared, trained: trained
    expand: Callable[[Params, PRNGKeyArray, Params], Params] = lambda params, key, delta: delta
    draw: Callable[[Params, PRNGKeyArray], Any] | None = None


class ClientMethod(NamedTuple):
    """One member's work as pure functions that any engine can run.

    `shared(sent, key)` is what the members of a round share, made of what the server sent and the
    round's key. `init(shared, key, client_state)` gives what a member carries, `step(shared, carry,
    tokens)` takes one batch, and `finish(shared, carry, examples)` turns the carry into an
    `Update`. `expand(params, key, delta)` is the change of the model that a sum of updates stands
    for. `init_memory(shared)`, if given, is what a member remembers before its first turn.
    """

    shared: Callable[[Any, PRNGKeyArray], Any]
    init: Callable[[Any, PRNGKeyArray, Any], Any]
    step: Callable[[Any, Any, Tokens], Any]
    finish: Callable[[Any, Any, Float[Array, ""]], Update]
    expand: Callable[[Params, PRNGKeyArray, Any], Any]
    init_memory: Callable[[Any], Any] | None = None
    draw: Callable[[Params, PRNGKeyArray], Any] | None = None


class ServerMethod(NamedTuple):
    """What the server remembers, what it sends, and what it does with a mean change."""

    init: Callable[[Params], OptState]
    send: Callable[[Params, OptState], Any]
    step: Callable[[Params, OptState, Any], tuple[Params, OptState]]


class Codec(NamedTuple):
    """An update to bytes and back, and the same thing inside a compiled program.

    `decode(encode(x), like)` equals `apply(x)`; `encoded_bytes(like)` is `len(encode(x))`, or the
    most that can be where `fixed_size` is false; `norm_gain` bounds how much longer `apply(x)` can
    be than `x` (`math.inf`: no bound holds for every shape, so clip again what arrived).
    `encode(x, key, keep)` sends only the leaves that `keep` names, with the draws of the whole;
    `decode` then wants a `like` whose other leaves are empty. A codec that is not `by_leaf` mixes
    leaves and cannot leave any out.
    """

    name: str
    encode: Callable[..., bytes]
    decode: Callable[[bytes, Params], Params]
    apply: Callable[[Params, PRNGKeyArray], Params]
    encoded_bytes: Callable[[Params], int]
    norm_gain: float
    fixed_size: bool = True
    by_leaf: bool = True


class Rows(Protocol):
    """Where a member's examples come from: client number to rows of tokens."""

    def __call__(self, client: int, /) -> Integer[np.ndarray, "rows seq_plus_one"]: ...


Members = Integer[np.ndarray, " members"]


class Cohort(NamedTuple):
    """The members of a round, with their batches if an engine's `prepare` packed them ahead."""

    round: int
    members: Members
    batches: Any = None  # as the engine lays them out; None: it packs them while it trains


@dataclass(frozen=True)
class Start:
    """What members begin a round from."""

    model: Any  # what the server sends
    clip_norm: float = math.inf  # the longest update a member may send; infinite without a plan
    client_state: Any = None  # what is remembered; of a shared start, one row per member


Starts = Start | Sequence[Start]
"""One start that all members of a cohort share, or one per member, in the cohort's order."""


class Gathered(NamedTuple):
    """The sum of a cohort's updates, and the bytes of all frames that crossed the wire for it."""

    total: Total
    upload_bytes: int
    download_bytes: int


class Arrived(NamedTuple):
    """One member's update, and the sizes of its frame and of the one it began from."""

    member: int
    update: Update
    upload_bytes: int
    download_bytes: int


class Engine(Protocol):
    """A way to train a cohort: the sum of its updates, or each of them.

    `prepare` packs batches ahead of their use, perhaps on another thread, and may be skipped: both
    verbs also take a plain `Cohort(round, members)`. `updates` leaves out a member that did not
    answer; the others come in the cohort's order.
    """

    def prepare(self, round: int, members: Members) -> Cohort: ...

    def total(self, starts: Starts, cohort: Cohort) -> Gathered: ...

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]: ...
