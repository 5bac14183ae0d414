"""FedDyn: a dynamic regulariser on every client's loss makes the clients' optima agree.

In:       a loss, the clients' optimiser, alpha.
Out:      the client half and the server half.
Promise:  the published rule; a client whose update was refused remembers what it had.
Not here: a server optimiser (the method defines the server's step).

Acar et al. 2021, "Federated learning based on dynamic regularization".
"""

from __future__ import annotations

from dataclasses import replace

import optax
from jaxtyping import Array, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.types import (
    Batch,
    ClientMemory,
    ClientMethod,
    LossFn,
    Params,
    ServerMethod,
    Shared,
    Update,
)
from fedlm.local import train
from fedlm.methods.fedavg import send_params
from fedlm.methods.method import Halves, Method, MethodOptions
from fedlm.methods.optimizers import Optimizer


@by_value
def feddyn_client(
    loss: LossFn, optimizer: Optimizer, alpha: float, weigh: train.Weigh = train.WEIGHTS["examples"]
) -> ClientMethod:
    """Descend on the loss less <g, w> plus alpha / 2 |w - w_server|^2.

    A client sends its change and remembers g, which moves against the change.
    """

    def init(
        shared: Shared, key: PRNGKeyArray, client_state: ClientMemory, rate: Array
    ) -> train.Carry:
        return train.begin_carry(shared, optimizer.init(shared), extra=client_state)

    def step(shared: Shared, carry: train.Carry, batch: Batch) -> train.Carry:
        change, nats, count = train.gradient(loss, carry.params, batch)
        change = tree.add_scaled(change, tree.sub(carry.params, shared), alpha)
        change, memory = optimizer.update(tree.sub(change, carry.extra), carry.memory, carry.params)
        params = optax.apply_updates(carry.params, change)
        return train.went_on(carry, params, memory, nats, count, carry.extra)

    def finish(shared: Shared, carry: train.Carry, examples: train.Scalar) -> Update:
        moved = tree.sub(carry.params, shared)
        sent = train.update_of(carry, moved, weigh(examples, carry.tokens))
        return replace(sent, client_state=tree.add_scaled(carry.extra, sent.delta, -alpha))

    return ClientMethod(train.ALL.shared, init, step, finish, train.ALL.expand, tree.zeros_like)


@by_value
def feddyn_server(alpha: float, participation: float) -> ServerMethod:
    """Take the mean model, moved on by the drift that clients have shown so far."""

    def step(params: Params, memory: Params, change: Params) -> tuple[Params, Params]:
        memory = tree.add_scaled(memory, change, -alpha * participation)
        return tree.add_scaled(tree.add(params, change), memory, -1.0 / alpha), memory

    return ServerMethod(tree.zeros_like, send_params, step)


def build_feddyn(options: MethodOptions) -> Halves:
    """Build both halves."""
    half = feddyn_client(options.loss, options.inner, options.proximal, options.weigh)
    return (half,), feddyn_server(options.proximal, options.participation)


METHOD = Method(
    build=build_feddyn,
    proximal="FedDyn's alpha",
    needs_proximal=True,
    needs_constant_schedule=True,
    one_change=True,
    keeps_client_state=True,
)
