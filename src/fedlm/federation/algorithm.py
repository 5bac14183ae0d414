"""The algorithm of a run: every choice that a round needs.

In:       a method, codecs, and either a sampling law or a privacy plan.
Out:      an `Algorithm`; the key, the base and the shapes that server and members derive alike.
Promise:  sampling and noise are derived from the privacy plan, so no combination can be built whose
          noise is not the one that its epsilon claims; engines and the loop add nothing.
Not here: what a member does with it (`member.py`), what the server does (`round.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedlm.core.by_value import by_value
from fedlm.core.keys import key_for
from fedlm.core.types import (
    ClientMethod,
    Codec,
    Message,
    OnBase,
    Params,
    Sampling,
    ServerMethod,
    Shared,
    Update,
)
from fedlm.privacy.catalog import check_plan, noise_for
from fedlm.privacy.noise import Noise, silent
from fedlm.privacy.plan import PrivacyPlan


def own_rate(round: int) -> float:
    """Return one: the optimiser of the members has its own learning rate."""
    return 1.0


@dataclass(frozen=True)
class ClientHalf:
    """What members do: all that their compiled programs depend on, and nothing of the server."""

    local: ClientMethod
    turns: tuple[ClientMethod, ...]
    upload: Codec
    download: Codec
    clips: bool  # an update is cut to a length, which programs take as an argument
    feedback: bool

    @property
    def remembers(self) -> bool:
        """Whether members keep anything between their turns."""
        return self.feedback or self.local.init_memory is not None


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """What the server does with a sum: all that its compiled step depends on, nothing of members.

    The base and the seed are no part of it: the step takes what it needs of them as arguments, and
    a program that is kept keeps no frozen model in memory.
    """

    server: ServerMethod
    expand: Callable[[Params, PRNGKeyArray, Any], Params]  # from a sum to the whole model's change
    expands_first: bool
    noise: Noise
    denominator: float | None  # of a sum under a plan; None: the mean is over those who came
    adaptive: PrivacyPlan | None  # the plan, if its clip norm moves


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Every choice that a round needs; engines and the loop read it and add nothing.

    `participation` is a privacy plan, which holds its own sampling law, or a sampling law alone.
    Under a plan every weight is one, the denominator is fixed and noise is in units of the clip.
    """

    participation: Sampling | PrivacyPlan
    local: ClientMethod
    upload: Codec
    download: Codec
    server: ServerMethod
    canaries: int = 0  # the last numbers of the population: they send a direction, for audits
    turns: tuple[ClientMethod, ...] = ()  # instead of `local` where rounds train different parts
    feedback: bool = False  # members add to an update what the codec left out of their last one
    # What members remember stays with them; the server knows in which round they last counted.
    memory_at_nodes: bool = False
    # The members' learning rate by round, for methods whose optimiser has rate one; one where an
    # optimiser has its own. Other methods do not read it. Not compared: programs take it as data.
    rate_of: Callable[[int], float] = field(default=own_rate, compare=False, repr=False)
    seed: int = 0  # of the choices that both sides derive
    # Gives the same arrays whenever it is called. Not compared: programs take a base as an
    # argument, so that algorithms which differ in it alone share them.
    make_base: Callable[[], Params] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.plan is not None:
            check_plan(self.plan)

    @property
    def plan(self) -> PrivacyPlan | None:
        """The privacy plan, or None where nothing is promised."""
        return self.participation if isinstance(self.participation, PrivacyPlan) else None

    @property
    def plans(self) -> dict[str, PrivacyPlan]:
        """The plan under the empty name, as that of a flat federation; empty without one."""
        return {} if self.plan is None else {"": self.plan}

    @property
    def sampling(self) -> Sampling:
        """The law by which members join a round; under a plan, the plan's own."""
        joins = self.participation
        return joins.sampling if isinstance(joins, PrivacyPlan) else joins

    @cached_property
    def noise(self) -> Noise:
        """The plan's noise, in units of the clip norm; silent without a plan."""
        with jax.ensure_compile_time_eval():  # numbers, also if a trace is the first to ask
            return silent() if self.plan is None else noise_for(self.plan)

    @cached_property
    def base(self) -> Params | None:
        """The frozen leaves of the model, None in place of trained ones; None if all are trained.

        Made when it is first asked for: a node checks a recipe before it makes a model of its size.
        """
        if self.make_base is None:
            return None
        with jax.ensure_compile_time_eval():  # arrays, also if a trace is the first to ask
            return self.make_base()

    @cached_property
    def client_half(self) -> ClientHalf:
        """The part that members carry out.

        Algorithms with equal client halves share training programs, whatever their servers do.
        """
        clips = self.plan is not None
        return ClientHalf(self.local, self.turns, self.upload, self.download, clips, self.feedback)

    def server_half(self, round: int) -> ServerHalf:
        """Return the part that the server carries out in a round.

        Algorithms with equal server halves share the server's program, whatever members do.
        """
        plan = self.plan
        return ServerHalf(
            server=self.server,
            expand=self.local_of(round).expand,
            expands_first=self.expands_first,
            noise=self.noise,
            denominator=None if plan is None else plan.denominator,
            adaptive=plan if plan is not None and plan.clip_quantile else None,
        )

    def local_of(self, round: int) -> ClientMethod:
        """Return the client method of a round."""
        return self.turns[round % len(self.turns)] if self.turns else self.local

    @property
    def remembers(self) -> bool:
        """Whether members keep anything between their turns."""
        return self.client_half.remembers

    @property
    def expands_first(self) -> bool:
        """Whether noise covers the whole model because rounds or members train different parts."""
        return bool(self.turns) or self.local.draw is not None


def round_key(algorithm: Algorithm, round: int) -> PRNGKeyArray:
    """Return the key from which the server and all members of a round derive the same choices."""
    return key_for(algorithm.seed, "partial", round=round)


def update_like(algorithm: Algorithm, sent: Message, round: int = 0) -> Update:
    """Return the shapes of a member's update, without training one."""
    local, base = algorithm.local_of(round), algorithm.base
    return _update_like(local, *_shapes(sent), *_shapes(base))[0]


def summed_like(algorithm: Algorithm, sent: Message, round: int = 0) -> Update:
    """Return the shapes of a member's update as it goes into a sum."""
    local, base = algorithm.local_of(round), algorithm.base
    return _update_like(local, *_shapes(sent), *_shapes(base))[1]


Shapes = tuple[jax.ShapeDtypeStruct, ...]


def _shapes(values: Any) -> tuple[Shapes, Any]:
    """Return the shapes of a tree's leaves, and its structure."""
    leaves, structure = jax.tree.flatten(values)
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), structure


@by_value  # a round asks several times, and tracing a member takes 30 ms
def _update_like(
    local: ClientMethod, sent: Shapes, structure: Any, base: Shapes, base_structure: Any
) -> tuple[Update, Update]:
    """Return the shapes of a member's update, as it is sent and as it goes into a sum."""

    def work(sent: Message, base: Params | None) -> tuple[Update, Update]:
        key = key_for(0, "partial")  # only shapes count
        shared = on_base(base, local.shared(sent, key))
        client_state = None if local.init_memory is None else local.init_memory(shared)
        carry = local.init(shared, key, client_state, jnp.float32(1))
        update = local.finish(shared, carry, jnp.zeros(()))
        return update, lifted(local, shared, update)

    whole = jax.tree.unflatten(structure, sent), jax.tree.unflatten(base_structure, base)
    made: tuple[Update, Update] = jax.eval_shape(work, *whole)
    return made


def lifted(local: ClientMethod, shared: Shared, update: Update) -> Update:
    """Return an update as it goes into a sum."""
    if local.lift is None:
        return update
    delta = local.lift(shared, update.delta)
    return eqx.tree_at(lambda u: u.delta, update, delta)


def on_base(base: Params | None, shared: Shared) -> Shared:
    """Attach the base, if there is one, to the model that members share."""
    return shared if base is None else OnBase(base, shared)
