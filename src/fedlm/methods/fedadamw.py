"""FedAdamW: clients take AdamW steps, and the server averages their second moments by block.

In:       a loss, the clients' learning rate and weight decay, the server's optimiser.
Out:      the client half and the server half.
Promise:  the published rule; block means and the number of steps are part of what a client sends,
          so their bytes are counted.
Not here: AdamW whose state stays with a member (`federation.keep_optimizer`).

    v_0 = the server's mean of block means;  m_0 = 0;  t = steps of all rounds before
    m <- b1 m + (1 - b1) g;                  v <- b2 v + (1 - b2) g g
    x <- x - rate (m / (1 - b1^k) / (sqrt(v / (1 - b2^(t + k))) + eps) + alpha D + decay x)

D is what the mean client moved by per step in the round before, over the rate. A block is a row of
a matrix (a neuron, or a token of the embedding) or a whole vector; the paper's blocks of queries
and keys are heads, which are several rows.

Liu et al. 2025, "FedAdamW: A communication-efficient optimizer with convergence and generalization
guarantees for federated large models", arXiv 2510.27486.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
    ServerMethod,
    Shared,
    Update,
)
from fedlm.local import train
from fedlm.methods.method import Halves, Method, MethodOptions
from fedlm.methods.optimizers import Optimizer

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def block_means(values: PyTree) -> PyTree:
    """Return the mean of each row of matrices, and of each vector."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=-1, keepdims=True), values)


@by_value
def fedadamw_client(
    loss: LossFn,
    learning_rate: float,
    weigh: train.Weigh = train.WEIGHTS["examples"],
    *,
    weight_decay: float = 0.0,
    alpha: float = 0.0,
    clip: float = 0.0,
) -> ClientMethod:
    """Take AdamW steps from the server's second moments, with a share of the last global step.

    A client gets `{"params", "second", "direction", "steps"}` and sends `{"params", "second",
    "steps"}`: its change, its block means, and how many steps it took.
    """
    bound = optax.clip_by_global_norm(clip) if clip > 0 else optax.identity()

    def init(
        shared: Shared, key: PRNGKeyArray, client_state: ClientMemory, rate: Array
    ) -> train.Carry:
        params = shared["params"]
        second = jax.tree.map(lambda v, x: jnp.broadcast_to(v, x.shape), shared["second"], params)
        return train.begin_carry(params, (tree.zeros_like(params), second))

    def step(shared: Shared, carry: train.Carry, batch: Batch) -> train.Carry:
        change, nats, count = train.gradient(loss, carry.params, batch)
        change, _ = bound.update(change, bound.init(carry.params))
        first, second = carry.memory
        k = carry.steps + 1.0
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, change)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, change)
        by_first = 1.0 / (1.0 - BETA1**k)
        by_second = 1.0 / (1.0 - BETA2 ** (jnp.sum(shared["steps"]) + k))

        def move(x: Array, m: Array, v: Array, d: Array) -> Array:
            own = by_first * m / (jnp.sqrt(by_second * v) + EPSILON)
            return x - learning_rate * (own + alpha * d + weight_decay * x)

        params = jax.tree.map(move, carry.params, first, second, shared["direction"])
        return train.went_on(carry, params, (first, second), nats, count)

    def finish(shared: Shared, carry: train.Carry, examples: train.Scalar) -> Update:
        delta = {
            "params": tree.sub(carry.params, shared["params"]),
            "second": block_means(carry.memory[1]),
            "steps": carry.steps[None],
        }
        return train.update_of(carry, delta, weigh(examples, carry.tokens))

    return ClientMethod(train.ALL.shared, init, step, finish, train.ALL.expand)


@by_value
def fedadamw_server(optimizer: Optimizer, learning_rate: float) -> ServerMethod:
    """Step along the mean change; keep the mean second moments and the mean step.

    `learning_rate` is that of the clients.
    """

    def init(params: Params) -> dict[str, PyTree]:
        return {
            "outer": optimizer.init(params),
            "second": tree.zeros_like(block_means(params)),
            "direction": tree.zeros_like(params),
            "steps": jnp.zeros(1),
        }

    def send(params: Params, memory: OptState) -> dict[str, PyTree]:
        kept = {name: memory[name] for name in ("second", "direction", "steps")}
        return {"params": params, **kept}

    def step(params: Params, memory: OptState, change: PyTree) -> tuple[Params, OptState]:
        against = tree.scale(change["params"], -1.0)
        moved, outer = optimizer.update(against, memory["outer"], params)
        steps = change["steps"]
        found = {
            "second": jax.tree.map(lambda v: jnp.maximum(v, 0.0), change["second"]),
            "direction": tree.scale(against, 1.0 / (learning_rate * jnp.maximum(steps[0], 1.0))),
        }
        # A round in which nobody took a step says nothing about moments.
        kept = {name: memory[name] for name in found}
        found = jax.tree.map(lambda new, old: jnp.where(steps[0] > 0, new, old), found, kept)
        after = {"outer": outer, **found, "steps": memory["steps"] + steps}
        return optax.apply_updates(params, moved), after

    return ServerMethod(init, send, step)


def build_fedadamw(options: MethodOptions) -> Halves:
    """Build both halves."""
    half = fedadamw_client(
        options.loss,
        options.client_learning_rate,
        options.weigh,
        weight_decay=options.weight_decay,
        alpha=options.proximal,
        clip=options.gradient_clip_norm,
    )
    return (half,), fedadamw_server(options.outer, options.client_learning_rate)


METHOD = Method(build=build_fedadamw, proximal="FedAdamW's alpha", needs_optimizer="adamw")
