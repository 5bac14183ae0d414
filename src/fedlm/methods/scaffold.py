"""SCAFFOLD: SGD corrected by control variates, the client's own and the server's.

In:       a loss, the client's learning rate, the server's optimiser.
Out:      the client half and the server half.
Promise:  the published rule, with the cheaper of its two ways to renew a client's control; the
          control that travels is part of what is sent, so its bytes are counted; a client whose
          update was refused keeps the control it had.
Not here: a client's optimiser (the method defines the step).

Karimireddy et al. 2020, "SCAFFOLD: Stochastic controlled averaging for federated learning".
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.types import (
    Batch,
    ClientMemory,
    ClientMethod,
    LossFn,
    Params,
    PyTree,
    ServerMethod,
    Shared,
    Update,
)
from fedlm.local import train
from fedlm.methods import fedavg
from fedlm.methods.method import Halves, Method, MethodOptions
from fedlm.methods.optimizers import Optimizer


@by_value
def scaffold_client(
    loss: LossFn, learning_rate: float, weigh: train.Weigh = train.WEIGHTS["examples"]
) -> ClientMethod:
    """Take SGD steps corrected by the server's control less the client's own.

    A client gets and sends `{"params", "control"}`, and remembers its own control.
    """

    def init(
        shared: Shared, key: PRNGKeyArray, client_state: ClientMemory, rate: Array
    ) -> train.Carry:
        return train.begin_carry(shared["params"], (), extra=client_state)

    def step(shared: Shared, carry: train.Carry, batch: Batch) -> train.Carry:
        change, nats, count = train.gradient(loss, carry.params, batch)
        straight = tree.add(change, tree.sub(shared["control"], carry.extra))
        params = tree.add_scaled(carry.params, straight, -learning_rate)
        return train.went_on(carry, params, (), nats, count, carry.extra)

    def finish(shared: Shared, carry: train.Carry, examples: train.Scalar) -> Update:
        moved = tree.sub(carry.params, shared["params"])
        pace = -1.0 / (learning_rate * jnp.maximum(carry.steps, 1.0))
        turn = tree.add_scaled(tree.scale(shared["control"], -1.0), moved, pace)
        sent = train.update_of(
            carry, {"params": moved, "control": turn}, weigh(examples, carry.tokens)
        )
        # The turn is zero where the update was refused.
        return replace(sent, client_state=tree.add(carry.extra, sent.delta["control"]))

    def init_memory(shared: Shared) -> Params:
        return tree.zeros_like(shared["params"])

    return ClientMethod(train.ALL.shared, init, step, finish, train.ALL.expand, init_memory)


@by_value
def scaffold_server(optimizer: Optimizer, participation: float) -> ServerMethod:
    """Take FedAvg's step; move the control by the mean turn, times the share that took part."""
    outer = fedavg.fedavg_server(optimizer)

    def init(params: Params) -> dict[str, PyTree]:
        return {"outer": outer.init(params), "control": tree.zeros_like(params)}

    def send(params: Params, memory: dict[str, PyTree]) -> dict[str, PyTree]:
        return {"params": params, "control": memory["control"]}

    def step(
        params: Params, memory: dict[str, PyTree], change: PyTree
    ) -> tuple[Params, dict[str, PyTree]]:
        params, kept = outer.step(params, memory["outer"], change["params"])
        control = tree.add_scaled(memory["control"], change["control"], participation)
        return params, {"outer": kept, "control": control}

    return ServerMethod(init, send, step)


def build_scaffold(options: MethodOptions) -> Halves:
    """Build both halves."""
    half = scaffold_client(options.loss, options.client_learning_rate, options.weigh)
    return (half,), scaffold_server(options.outer, options.participation)


METHOD = Method(build=build_scaffold, needs_optimizer="sgd", keeps_client_state=True)
