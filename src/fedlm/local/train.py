"""One member's local training.

In:       what the server sent and the member's batches.
Out:      an `Update`: the change, its weight, and the training loss on the way.
Promise:  equals a plain training loop; a change that is not finite is refused (weight zero,
          change zero) and counted.
Not here: loops over members (`engine`), optimisers and methods by name (`methods`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.types import (
    Batch,
    ClientMemory,
    ClientMethod,
    LossFn,
    OptState,
    Params,
    PyTree,
    Scalar,
    Shared,
    TrainablePart,
    Update,
)

Weigh = Callable[[Scalar, Scalar], Scalar]

WEIGHTS: dict[str, Weigh] = {
    "examples": lambda examples, tokens: examples,
    "tokens": lambda examples, tokens: tokens,
    "uniform": lambda examples, tokens: jnp.ones_like(examples),
}

ALL = TrainablePart()


class Carry(NamedTuple):
    """The state of a member during its training."""

    params: Params  # the parameters that the member trains
    memory: OptState
    nats: Scalar
    tokens: Scalar
    steps: Scalar
    mask: PyTree = None  # one number per leaf, if the member trains its own leaves
    extra: PyTree = None  # state that a method adds
    rate: Scalar | None = None  # what steps are multiplied by; None: the method has its own rate


@by_value
def local_training(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    weigh: Weigh = WEIGHTS["examples"],
    *,
    part: TrainablePart = ALL,
    proximal: float = 0.0,
    remember: bool = False,
) -> ClientMethod:
    """Return the client method that takes one gradient step per batch, on its mean loss.

    `part` says which numbers are trained. `proximal` is the strength of the pull back to the start
    (FedProx). `remember` keeps the optimiser's state from one turn of a member to the next;
    otherwise every turn begins with a fresh state. All steps of a turn are multiplied by the rate
    that the round gives: with an optimiser of rate one it is the learning rate, since every
    optimiser's step is proportional to its rate, and runs that differ in it share their programs.
    """

    def init(shared: Shared, key: PRNGKeyArray, client_state: ClientMemory, rate: Array) -> Carry:
        start = part.init(shared)
        mask = part.draw(start, jr.fold_in(key, 1)) if part.draw else None
        carry = begin_carry(start, client_state if remember else optimizer.init(start), mask)
        return carry._replace(rate=rate)

    def step(shared: Shared, carry: Carry, batch: Batch) -> Carry:
        def merge(trained: Params) -> Params:
            return part.merge(shared, trained)

        change, nats, count = gradient(loss, carry.params, batch, merge)
        if proximal:
            away = tree.sub(carry.params, part.init(shared))
            change = tree.add_scaled(change, away, proximal)
        change, memory = optimizer.update(change, carry.memory, carry.params)
        if carry.rate is not None:
            change = tree.scale(change, carry.rate)
        moved = optax.apply_updates(carry.params, masked(change, carry.mask))
        return went_on(carry, moved, memory, nats, count)

    def finish(shared: Shared, carry: Carry, examples: Scalar) -> Update:
        delta = tree.sub(carry.params, part.init(shared))
        client_state = carry.memory if remember else None
        return update_of(carry, delta, weigh(examples, carry.tokens), client_state)

    def init_memory(shared: Shared) -> OptState:
        return optimizer.init(part.init(shared))

    return ClientMethod(
        part.shared,
        init,
        step,
        finish,
        part.expand,
        init_memory if remember else None,
        part.draw,
        part.lift,
    )


def begin_carry(
    start: Params, memory: OptState, mask: PyTree = None, extra: PyTree = None
) -> Carry:
    """Return the state of a member before its first batch."""
    zero = jnp.zeros(())
    return Carry(start, memory, zero, zero, zero, mask, extra)


def gradient(
    loss: LossFn,
    params: Params,
    batch: Batch,
    merge: Callable[[Params], Params] = lambda trained: trained,
) -> tuple[Params, Scalar, Scalar]:
    """Return the gradient of a batch's mean loss, the summed loss, and the number of tokens.

    `merge(trained)` returns the whole model, if `params` are only a part of it.
    """

    def objective(trained: Params) -> tuple[Scalar, tuple[Scalar, Scalar]]:
        nats, count = loss(merge(trained), batch)
        return nats / jnp.maximum(count, 1.0), (nats, count)

    change, (nats, count) = jax.grad(objective, has_aux=True)(params)
    return change, nats, count


def went_on(
    carry: Carry,
    params: Params,
    memory: OptState,
    nats: Scalar,
    count: Scalar,
    extra: PyTree = None,
) -> Carry:
    """Return the state of a member after one more batch."""
    return Carry(
        params,
        memory,
        carry.nats + nats,
        carry.tokens + count,
        carry.steps + 1.0,
        carry.mask,
        extra,
        carry.rate,
    )


def masked(change: Params, mask: PyTree) -> Params:
    """Set the change of frozen leaves to zero; without a mask, return the change as it is."""
    if mask is None:
        return change
    leaves, structure = jax.tree.flatten(change)
    held = [jnp.where(mask[i] > 0, leaf, 0.0) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, held)


def update_of(
    carry: Carry, delta: PyTree, weight: Scalar, client_state: ClientMemory = None
) -> Update:
    """Return the update that a member sends.

    A change that is not finite is replaced by zero, with weight zero, and counted as refused.
    """
    # A sum of squares is finite only if every entry is, and it overflows for huge ones.
    sound = jnp.isfinite(tree.squared_norm(delta)) & jnp.isfinite(carry.nats)
    return Update(
        delta=tree.where(sound, delta, tree.zeros_like(delta)),
        weight=jnp.where(sound, weight, 0.0),
        nats=jnp.where(sound, carry.nats, 0.0),
        tokens=jnp.where(sound, carry.tokens, 0.0),
        steps=carry.steps,
        refused=jnp.where(sound, 0.0, 1.0),
        unclipped=jnp.ones(()),
        mask=carry.mask,
        client_state=client_state,
    )
