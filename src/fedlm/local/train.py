"""One member's local training.

In:       the shared parameters and the member's batches.
Out:      an `Update`: the change, its weight, and the training loss on the way.
Promise:  equals a plain training loop; a change that is not finite is refused (weight zero,
          change zero) and counted.
Not here: loops over members (`engine`), the choice of optimiser (`federation/algorithms.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedlm.core import tree
from fedlm.core.types import Local, LossFn, OptState, Params, Tokens, Update

Scalar = Float[Array, ""]
Weigh = Callable[[Scalar, Scalar], Scalar]

WEIGHTS: dict[str, Weigh] = {
    "examples": lambda examples, tokens: examples,
    "tokens": lambda examples, tokens: tokens,
    "uniform": lambda examples, tokens: jnp.ones_like(examples),
}


class Carry(NamedTuple):
    """What a member holds while it trains."""

    params: Params
    memory: OptState
    nats: Scalar
    tokens: Scalar
    steps: Scalar


def local_training(
    loss: LossFn, optimizer: optax.GradientTransformation, weigh: Weigh = WEIGHTS["examples"]
) -> Local:
    """Gradient steps on the mean loss of each batch, from a fresh optimiser state."""

    def objective(params: Params, tokens: Tokens) -> tuple[Scalar, tuple[Scalar, Scalar]]:
        nats, count = loss(params, tokens)
        return nats / jnp.maximum(count, 1.0), (nats, count)

    def init(params: Params) -> Carry:
        zero = jnp.zeros(())
        return Carry(params, optimizer.init(params), zero, zero, zero)

    def step(carry: Carry, tokens: Tokens) -> Carry:
        gradient = jax.grad(objective, has_aux=True)
        change, (nats, count) = gradient(carry.params, tokens)
        change, memory = optimizer.update(change, carry.memory, carry.params)
        params = optax.apply_updates(carry.params, change)
        return Carry(params, memory, carry.nats + nats, carry.tokens + count, carry.steps + 1.0)

    def finish(params: Params, carry: Carry, examples: Scalar) -> Update:
        delta = tree.sub(carry.params, params)
        weight = weigh(examples, carry.tokens)
        # A sum of squares is finite only if every entry is, and it overflows for huge ones.
        sound = jnp.isfinite(tree.squared_norm(delta)) & jnp.isfinite(carry.nats)
        return Update(
            delta=tree.where(sound, delta, tree.zeros_like(delta)),
            weight=jnp.where(sound, weight, 0.0),
            nats=jnp.where(sound, carry.nats, 0.0),
            tokens=jnp.where(sound, carry.tokens, 0.0),
            steps=carry.steps,
            refused=jnp.where(sound, 0.0, 1.0),
            inside=jnp.ones(()),
        )

    return Local(init, step, finish)
