"""Types of the values that packages exchange.

In:       nothing.
Out:      the types that packages share, so that they need not import each other.
Promise:  types only; nothing here computes more than whether a value makes sense.
Not here: settings (`recipe/settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from fedlm.core.errors import require

# Fills the places of a row that hold no token. PAD is in no vocabulary, so that every entry of a
# vocabulary can be a target; an array indexed with PAD gives its last entry, which no code may use.
PAD = -1

Scalar = Float[Array, ""]

Vector = Float[np.ndarray, " n"]
"""Numbers on the host."""

PyTree: TypeAlias = Any
"""Containers within containers whose leaves are arrays; JAX takes and returns them whole."""

Params = PyTree
"""A model: an `eqx.Module` whose leaves are float arrays."""

Tokens = Int[Array, "batch seq_plus_one"]
"""Rows of tokens; column t predicts column t + 1, and a target that is PAD does not count."""

OptState = PyTree
"""The state of an optimiser, or what else a server method remembers between rounds."""

FederationState: TypeAlias = PyTree
"""What a federation has come to between two rounds: a node's state, or the states of a tree."""

Message = PyTree
"""What a server sends to the members of a round: a model, and for some methods more beside it."""

Shared = PyTree
"""The input that all members of a round share, made from the server's message."""

ClientMemory = PyTree
"""What a method's client keeps until its next turn; None where the method keeps nothing."""

TokenRows = Integer[np.ndarray, "rows width"]
"""Rows of tokens on the host."""

ScoreFn = Callable[[Params, "Batch"], tuple[Array, Array]]
"""Gives each target's nats, and whether the likeliest token was right."""

Figures: TypeAlias = dict[str, Any]
"""What an evaluation tells by name, as perplexity; per group or node where there are any."""

GroupPath = tuple[str, ...]
"""The names of a client's groups, the widest first."""

Say = Callable[[str], None]
"""Prints one line for the user."""


class Precomputed(NamedTuple):
    """Rows of tokens with the features that the frozen blocks of a model gave them before."""

    tokens: Tokens
    features: Float[Array, "batch seq embed"]


Batch = Tokens | Precomputed
"""What a member takes one step on."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens of a vocabulary that do not stand for text.

    Attributes:
      bos: the token before the first token of a text.
      eos: the token after the last token of a line.
      oov: the token for text that the vocabulary has no token for; None if there is no such token.
      reserved: all special tokens, which are never offered as a word.

    >>> import fedlm
    >>> store = fedlm.prepare([("ann", "the cat sat")], test_clients=0.0)
    >>> store.special.eos in store.special.reserved
    True
    """

    bos: int
    eos: int
    oov: int | None
    reserved: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law by which members join a round, over clients numbered from zero.

    Attributes:
      law: `fixed`, `poisson`, `spaced`, `cyclic-poisson` or `balls-in-bins`, as `server.sampling`
        of a recipe.
      population: the number of clients that may be drawn.
      cohort: the number of clients per round: exactly with `fixed` and `spaced`, in expectation
        with the other laws.
      min_separation: the number of rounds strictly between two turns of a client, with `spaced`,
        `cyclic-poisson` and `balls-in-bins`.
      max_participations: the most turns of a client in the whole run, with `spaced`; 0 is as many
        as the separation allows.

    The numbers are checked when a plan or a run is made from them, which raises `ConfigError`.

    >>> Sampling(law="poisson", population=1000, cohort=10).min_separation
    0
    >>> Sampling(law="fixed", population=5, cohort=10).check()
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: server.cohort = 10: expected between 1 and the 5 ...
    """

    law: str
    population: int
    cohort: int
    min_separation: int = 0
    max_participations: int = 0

    def check(self) -> None:
        """Raise `ConfigError` if the population cannot fill the cohort."""
        require(self.population > 0, "population", self.population, "at least one client")
        require(
            1 <= self.cohort <= self.population,
            "server.cohort",
            self.cohort,
            f"between 1 and the {self.population} training clients",
            "Lower server.cohort or prepare more clients.",
        )


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The settings that turn one member's rows into batches."""

    batch_size: int
    sequence_length: int
    epochs: int = 1
    max_examples: int | None = None
    max_steps: int | None = None


class Loss(NamedTuple):
    """The summed loss of target tokens and their number: the mean loss is `nats / tokens`."""

    nats: Float[Array, ""]
    tokens: Float[Array, ""]


LossFn = Callable[[Params, Batch], Loss]


class Update(eqx.Module):
    """A member's update: its change of the model, its weight, and its counts."""

    delta: Params
    weight: Float[Array, ""]
    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    steps: Float[Array, ""]
    refused: Float[Array, ""]
    unclipped: Float[Array, ""]  # one, unless a privacy clip shortened the update
    mask: PyTree = None  # one or zero per leaf, if each member trains leaves of its own
    client_state: PyTree = (
        None  # the state a member keeps until its next turn, if its method has any
    )


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
    shares: PyTree = None  # the weight per leaf, if members train leaves of their own
    client_state: PyTree = None  # the state of each member, in the order of the cohort


class History(NamedTuple):
    """The last round and the participations of each client; empty if the law does not need it.

    In a large population it has only the clients that took part, whose numbers are `members`.
    """

    last: Integer[np.ndarray | Array, " clients"]
    times: Integer[np.ndarray | Array, " clients"]
    members: Integer[np.ndarray | Array, " clients"] | None = None  # rising; None: everybody


class OnBase(NamedTuple):
    """The input that the members of a round share when most of a model is frozen.

    If the algorithm has a base, every function of a `ClientMethod` except `shared` and `expand`
    gets an `OnBase` in place of the value that `shared` returned.
    """

    base: Params  # the frozen leaves, None where a leaf is trained; the same in every round
    rest: Shared  # the value that `shared` made of this round's message


class TrainablePart(NamedTuple):
    """The part of a model that a member trains: all leaves, some of them, or factors of them.

    `shared(params, key)` returns the part that all members of a round hold still, `init(shared)`
    the part that they train, and `merge(shared, trained)` the whole model. `expand(params, key,
    delta)` turns a change of the trained part into the change of the whole model (it is linear).
    `draw(params, key)`, if given, marks the leaves that one member trains with ones and zeros.
    `lift(shared, delta)`, if given, turns one member's change, as it arrives, into what is summed:
    for sums that are not linear in what members send.
    """

    shared: Callable[[Params, PRNGKeyArray], Shared] = lambda params, key: params
    init: Callable[[Shared], Params] = lambda shared: shared
    merge: Callable[[Shared, Params], Params] = lambda shared, trained: trained
    expand: Callable[[Params, PRNGKeyArray, Params], Params] = lambda params, key, delta: delta
    draw: Callable[[Params, PRNGKeyArray], PyTree] | None = None
    lift: Callable[[Shared, Params], Params] | None = None


class ClientMethod(NamedTuple):
    """One member's work as pure functions that any engine can run.

    `shared(sent, key)` turns the server's message and the round's key into the input that all
    members of the round share. `init(shared, key, client_state, rate)` returns its first carry,
    with the factor of all its steps; `step(shared, carry, tokens)` trains on one batch, and
    `finish(shared, carry, examples)` turns the last carry into an `Update`. `expand(params, key,
    delta)` turns a sum of updates into the change of the whole model. `init_memory(shared)`, if
    given, returns the state of a member before its first turn. `lift(shared, delta)`, if given,
    turns a member's change, as it arrives, into what is summed.
    """

    shared: Callable[[Message, PRNGKeyArray], Shared]
    init: Callable[[Shared, PRNGKeyArray, ClientMemory, Float[Array, ""]], PyTree]
    step: Callable[[Shared, PyTree, Batch], PyTree]
    finish: Callable[[Shared, PyTree, Float[Array, ""]], Update]
    expand: Callable[[Params, PRNGKeyArray, PyTree], PyTree]
    init_memory: Callable[[Shared], ClientMemory] | None = None
    draw: Callable[[Params, PRNGKeyArray], PyTree] | None = None
    lift: Callable[[Shared, PyTree], PyTree] | None = None


class ServerMethod(NamedTuple):
    """The server's work as pure functions: initial state, message to members, and model step."""

    init: Callable[[Params], OptState]
    send: Callable[[Params, OptState], Message]
    step: Callable[[Params, OptState, PyTree], tuple[Params, OptState]]


class Codec(NamedTuple):
    """A codec of updates: to bytes and back, and the same result inside a compiled program.

    `decode(encode(x), like)` equals `apply(x)`; `encoded_bytes(like)` is `len(encode(x))`, or its
    upper bound if `fixed_size` is false. `norm_gain` bounds the ratio of the norms of `apply(x)`
    and `x` (`math.inf`: no bound holds for every shape, so clip decoded updates again).
    `encode(x, key, keep)` sends only the leaves that `keep` marks, with the same random draws as
    for the whole tree; `decode` then needs a `like` whose other leaves are empty. A codec that is
    not `by_leaf` mixes leaves and cannot leave any out. The frames of a codec that is `additive`
    hold integers that add up modulo a power of two, as sums under masks need.
    """

    name: str
    encode: Callable[..., bytes]
    decode: Callable[[bytes, Params], Params]
    apply: Callable[[Params, PRNGKeyArray], Params]
    encoded_bytes: Callable[[Params], int]
    norm_gain: float
    fixed_size: bool = True
    by_leaf: bool = True
    additive: bool = False


class Rows(Protocol):
    """A function from a client's number to its rows of tokens."""

    def __call__(self, client: int, /) -> Integer[np.ndarray, "rows seq_plus_one"]: ...


Members = Integer[np.ndarray, " members"]


class Cohort(NamedTuple):
    """The members of a round, and their batches if an engine's `prepare` has packed them."""

    round: int
    members: Members
    batches: Any = None  # in the engine's own layout; None: it packs them while it trains


@dataclass(frozen=True)
class Start:
    """The state from which members begin a round."""

    model: Message  # the server's message
    clip_norm: float = math.inf  # the longest update a member may send; infinite without a plan
    client_state: PyTree = None  # the members' own state; in a shared start, one row per member
    noise_secret: bytes = b""  # from which simulated nodes draw their noise, if nodes add it
    from_above: Any = None  # all that a leaf of a tree is sent that keeps its own model


Starts = Start | Sequence[Start]
"""One start that all members of a cohort share, or one start per member, in the cohort's order."""


class Gathered(NamedTuple):
    """The sum of a cohort's updates, and the bytes of all frames that crossed the wire for it."""

    total: Total
    upload_bytes: int
    download_bytes: int
    # Under noise at nodes: the variance in the sum, over the one that its epsilon counts.
    noise_excess: float | None = None


class Arrived(NamedTuple):
    """One member's update, and the bytes of the frames that it sent and received."""

    member: int
    update: Update
    upload_bytes: int
    download_bytes: int


class Engine(Protocol):
    """A way to train a cohort that returns the sum of its updates, or each update.

    `prepare` packs batches ahead of their use, perhaps on another thread. It may be skipped:
    `total` and `updates` also take a plain `Cohort(round, members)`. `updates` yields in the
    cohort's order and leaves out members that did not answer. `adds_noise` tells whether a total
    carries the noise of a privacy plan already.
    """

    @property
    def adds_noise(self) -> bool: ...

    def prepare(self, round: int, members: Members) -> Cohort: ...

    def total(self, starts: Starts, cohort: Cohort) -> Gathered: ...

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]: ...
