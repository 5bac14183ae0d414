"""A round: who, what a member does, what the server does with the sum.

In:       an `Algorithm`, a `NodeState`, a seed.
Out:      members; a member's update; the next `NodeState`.
Promise:  the same functions in every engine; what survives a round is in `NodeState`.
Not here: loops over rounds (`run.py`), over members (`engine`), named choices (`algorithms.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from fedlm.cohort.sample import draw, joined, no_history
from fedlm.core import tree
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import (
    Codec,
    History,
    Local,
    Members,
    OptState,
    Params,
    Sampling,
    Total,
    Update,
)
from fedlm.privacy.clip import clip, next_limit
from fedlm.privacy.noise import Noise, silent, standard_normal
from fedlm.privacy.plan import PrivacyPlan
from fedlm.server.aggregate import mean, over
from fedlm.server.step import step

SILENT = silent()
# Sums over members to which a plan adds no noise.
UNRELEASED = ("members", "refused", "steps", "tokens", "loss", "inside")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Everything a round needs to know; engines and the loop read it and add nothing.

    Under a plan, `noise` is in units of the clip, every weight is one and the denominator fixed.
    """

    sampling: Sampling
    local: Local
    upload: Codec
    download: Codec
    server: optax.GradientTransformation
    plan: PrivacyPlan | None = None
    noise: Noise = SILENT
    canaries: int = 0  # the last numbers of the population: they send a direction, for audits


class NodeState(eqx.Module):
    """What a server node carries from round to round; nothing else survives."""

    params: Params
    server_memory: OptState
    noise_memory: Any
    history: History
    limit: Float[Array, ""]  # the longest update that a member may send
    inside: Float[Array, ""]  # the noisy share of updates that were inside it, where released
    secret: UInt32[Array, "4"]  # what private draws are made from
    round: Int[Array, ""]


def init_node(algorithm: Algorithm, params: Params, secret: bytes = bytes(16)) -> NodeState:
    """The state before the first round; a plan needs a secret that nobody can guess."""
    plan = algorithm.plan
    history = no_history(algorithm.sampling)
    return NodeState(
        params,
        algorithm.server.init(params),
        algorithm.noise.init(params),
        History(*(jnp.asarray(part) for part in history)),
        jnp.float32(math.inf if plan is None else plan.clip_norm),
        jnp.float32(math.nan),
        jnp.asarray(np.frombuffer(secret, "<u4").astype(np.uint32)),
        jnp.int32(0),
    )


def private_seed(state: NodeState) -> int:
    """The seed of cohort draws and noise under a plan: never that of the recipe."""
    return int.from_bytes(np.asarray(state.secret).astype("<u4").tobytes(), "little")


class Chooser:
    """The members of each round, in order, drawn by the algorithm's law."""

    def __init__(self, algorithm: Algorithm, seed: int, state: NodeState) -> None:
        self.sampling = algorithm.sampling
        self.seed = seed if algorithm.plan is None else private_seed(state)
        self.history = History(*(np.asarray(part) for part in state.history))

    def __call__(self, round: int) -> Members:
        rng = generator_for(self.seed, "cohort", round=round)
        members = draw(self.sampling, rng, round, self.history)
        self.history = joined(self.history, members, round)
        return members


def with_text(algorithm: Algorithm, members: Members) -> Members:
    """The members that train: all but the canaries."""
    return members[members < algorithm.sampling.population - algorithm.canaries]


def canary(seed: int, number: int, like: Params) -> Params:
    """The direction that a canary sends whenever it takes part."""
    return direction(key_for(seed, "canary", member=number), like)


def direction(key: PRNGKeyArray, like: Params) -> Params:
    """A random direction: all are equally likely, and its length is one."""
    drawn = standard_normal(key, like)
    return tree.scale(drawn, 1.0 / tree.norm(drawn))


def _add_canaries(algorithm: Algorithm, state: NodeState, total: Total, members: Members) -> Total:
    for number in members[len(with_text(algorithm, members)) :]:
        key = key_for(private_seed(state), "canary", member=int(number))
        total = _add_canary(total, state.limit, key)
    return total


@jax.jit
def _add_canary(total: Total, limit: Float[Array, ""], key: PRNGKeyArray) -> Total:
    one, zero = jnp.ones(()), jnp.zeros(())
    sent = Update(tree.scale(direction(key, total.delta), limit), one, zero, zero, zero, zero, one)
    return add_member(total, clip(sent, limit))


def empty_total(params: Params) -> Total:
    """The sum over nobody."""
    zero = jnp.zeros(())
    return Total(tree.zeros_like(params), zero, zero, zero, zero, zero, zero, zero)


def add_member(total: Total, update: Update, counts: Bool[Array, ""] | bool = True) -> Total:
    """One more member in the sum; one that does not count yet leaves it as it was."""
    one = jnp.where(counts, 1.0, 0.0)
    return Total(
        delta=tree.add_scaled(total.delta, update.delta, one * update.weight),
        weight=total.weight + one * update.weight,
        nats=total.nats + one * update.nats,
        tokens=total.tokens + one * update.tokens,
        steps=total.steps + one * update.steps,
        refused=total.refused + one * update.refused,
        inside=total.inside + one * update.inside,
        members=total.members + one,
    )


def member_half(
    algorithm: Algorithm, params: Params, carry: Any, examples: Array, limit: Array
) -> Update:
    """What a member makes of its work: an update, and under a plan one within the limit."""
    update = algorithm.local.finish(params, carry, examples)
    return update if algorithm.plan is None else clip(update, limit)


def server_half(
    algorithm: Algorithm, state: NodeState, total: Total, members: Members
) -> NodeState:
    """What the server does with the sum of a cohort."""
    total = _add_canaries(algorithm, state, total, members)
    key = _noise_key(algorithm, state, total)
    history = joined(History(*(np.asarray(h) for h in state.history)), members, int(state.round))
    after = _server_step(algorithm, state, total, key)
    kept = History(*(jnp.asarray(part) for part in history))
    return eqx.tree_at(lambda s: tuple(s.history), after, tuple(kept))


def _noise_key(algorithm: Algorithm, state: NodeState, total: Total) -> PRNGKeyArray:
    """The key of a round's noise, which also names the sum that the noise is for.

    A round that is run again after a crash has the same sum and gets the same noise. Should its
    sum ever differ, the noise does too: the difference of two releases must not cancel it.
    """
    if algorithm.plan is None:
        return key_for(0, "noise")
    sum_is = int(tree.sha256((total.delta, total.inside, total.members))[:15], 16)
    return key_for(private_seed(state), "noise", round=int(state.round), member=sum_is)


@eqx.filter_jit
def _server_step(
    algorithm: Algorithm, state: NodeState, total: Total, key: PRNGKeyArray
) -> NodeState:
    plan, limit, inside, memory = algorithm.plan, state.limit, state.inside, state.noise_memory
    if plan is None:
        change = mean(total)
    else:
        in_clips = eqx.tree_at(lambda t: t.delta, total, tree.scale(total.delta, 1.0 / limit))
        noisy, memory = algorithm.noise.add(in_clips.delta, memory, jr.fold_in(key, 0))
        hidden = eqx.tree_at(lambda t: t.delta, total, tree.scale(noisy, limit))
        change = over(hidden, plan.denominator)
        if plan.clip_quantile:
            limit, inside = next_limit(plan, limit, total, jr.fold_in(key, 1))
    params, server_memory = step(algorithm.server, state.params, state.server_memory, change)
    return NodeState(
        params,
        server_memory,
        memory,
        state.history,
        limit,
        inside,
        state.secret,
        state.round + 1,
    )


def released(
    algorithm: Algorithm, facts: dict[str, Any], before: NodeState, after: NodeState
) -> dict[str, Any]:
    """What a round may tell: under a plan nothing that depends on a member and has no noise."""
    plan = algorithm.plan
    if plan is None:
        return facts
    if not plan.reveal:
        facts = {k: v for k, v in facts.items() if k not in UNRELEASED}
        # How many came is a sum over members too: what is told is how many were expected.
        facts["members"] = plan.sampling.cohort
        turns = plan.sampling.cohort * (facts["round"] + 1)
        facts["upload_bytes"] = turns * algorithm.upload.encoded_bytes(after.params)
        facts["download_bytes"] = turns * algorithm.download.encoded_bytes(after.params)
    facts["clip"] = float(before.limit)
    if plan.clip_quantile:
        facts["inside"] = float(after.inside)
    # The length of a round's noise over that of the longest mean change there can be.
    facts["noise_to_signal"] = plan.noise_to_signal(tree.size(after.params))
    return facts
