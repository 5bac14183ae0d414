"""MimeLite: clients step with the server's optimiser, whose statistics stay fixed in a round.

In:       a loss, the server's optimiser at learning rate one, both learning rates.
Out:      the client half and the server half.
Promise:  the published rule; the gradient that a client sends beside its change is part of what it
          sends, so its bytes are counted.
Not here: a client's optimiser (the server's takes its place).

Karimireddy et al. 2020, "Mime: Mimicking centralized stochastic algorithms in federated learning".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


@by_value
def mimelite_client(
    loss: LossFn,
    base: Optimizer,
    learning_rate: float,
    weigh: train.Weigh = train.WEIGHTS["examples"],
) -> ClientMethod:
    """Take steps of the server's optimiser with its statistics fixed.

    A client gets `{"params", "statistics"}` and sends `{"params", "gradient"}`: its change, and the
    gradient of its whole text at the parameters it was sent. `base` has learning rate one.
    """

    def init(
        shared: Shared, key: PRNGKeyArray, client_state: ClientMemory, rate: Array
    ) -> train.Carry:
        params = shared["params"]
        like = jax.eval_shape(base.init, params)
        frozen = jax.tree.map(lambda x, y: x.astype(y.dtype), shared["statistics"], like)
        return train.begin_carry(params, frozen, extra=tree.zeros_like(params))

    def step(shared: Shared, carry: train.Carry, batch: Batch) -> train.Carry:
        change, nats, count = train.gradient(loss, carry.params, batch)
        full, _, _ = train.gradient(loss, shared["params"], batch)
        moved, _ = base.update(change, carry.memory, carry.params)
        params = tree.add_scaled(carry.params, moved, learning_rate)
        # Batches differ in tokens: what is summed is the gradient of the summed loss.
        seen = tree.add_scaled(carry.extra, full, count)
        return train.went_on(carry, params, carry.memory, nats, count, seen)

    def finish(shared: Shared, carry: train.Carry, examples: train.Scalar) -> Update:
        delta = {
            "params": tree.sub(carry.params, shared["params"]),
            "gradient": tree.scale(carry.extra, 1.0 / jnp.maximum(carry.tokens, 1.0)),
        }
        return train.update_of(carry, delta, weigh(examples, carry.tokens))

    return ClientMethod(train.ALL.shared, init, step, finish, train.ALL.expand)


@by_value
def mimelite_server(base: Optimizer, learning_rate: float) -> ServerMethod:
    """Add the mean change; move the statistics by the mean gradient at the old parameters."""

    def send(params: Params, memory: OptState) -> dict[str, PyTree]:
        return {"params": params, "statistics": _as_float32(memory)}

    def step(params: Params, memory: OptState, change: PyTree) -> tuple[Params, OptState]:
        _, memory = base.update(change["gradient"], memory, params)
        return tree.add_scaled(params, change["params"], learning_rate), memory

    return ServerMethod(base.init, send, step)


def _as_float32(memory: OptState) -> OptState:
    """Convert statistics, counts too, to float32: codecs encode arrays of one type."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), memory)


def build_mimelite(options: MethodOptions) -> Halves:
    """Build both halves from the server's optimiser."""
    half = mimelite_client(options.loss, options.base, options.client_learning_rate, options.weigh)
    return (half,), mimelite_server(options.base, options.server_learning_rate)


METHOD = Method(build=build_mimelite, needs_optimizer="sgd", needs_constant_schedule=True)
