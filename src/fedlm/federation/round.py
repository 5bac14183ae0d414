"""A round: who, what a member does, what the server does with the sum.

In:       an `Algorithm`, a `NodeState`, a seed.
Out:      members; a member's update; the next `NodeState`.
Promise:  the same functions in every engine; what survives a round is in `NodeState`.
Not here: loops over rounds (`run.py`), over members (`engine`), named choices (`algorithms.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from fedlm.cohort.sample import draw
from fedlm.core import tree
from fedlm.core.keys import generator_for
from fedlm.core.types import Codec, Local, Members, OptState, Params, Sampling, Total, Update
from fedlm.server.aggregate import mean
from fedlm.server.step import step


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Everything a round needs to know; engines and the loop read it and add nothing."""

    sampling: Sampling
    local: Local
    upload: Codec
    download: Codec
    server: optax.GradientTransformation


class NodeState(eqx.Module):
    """What a server node carries from round to round; nothing else survives."""

    params: Params
    server_memory: OptState
    round: Int[Array, ""]


def init_node(algorithm: Algorithm, params: Params) -> NodeState:
    """The state before the first round."""
    return NodeState(params, algorithm.server.init(params), jnp.int32(0))


def choose(algorithm: Algorithm, seed: int, round: int) -> Members:
    """The members of one round, drawn by the algorithm's law."""
    return draw(algorithm.sampling, generator_for(seed, "cohort", round=round))


def empty_total(params: Params) -> Total:
    """The sum over nobody."""
    zero = jnp.zeros(())
    return Total(tree.zeros_like(params), zero, zero, zero, zero, zero, zero)


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
        members=total.members + one,
    )


@eqx.filter_jit
def server_half(algorithm: Algorithm, state: NodeState, total: Total) -> NodeState:
    """What the server does with the sum of a cohort."""
    params, memory = step(algorithm.server, state.params, state.server_memory, mean(total))
    return NodeState(params, memory, state.round + 1)
