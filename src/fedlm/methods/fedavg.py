"""FedAvg: clients train, the server steps along their mean change; with FedProx's term.

In:       a loss, the clients' optimiser, the server's optimiser.
Out:      the client half and the server half.
Promise:  server SGD of learning rate 1 gives exactly `params + change`; a proximal term of zero is
          FedAvg to the byte.
Not here: a client's steps (`local/train.py`), which optimisers there are (`optimizers.py`).

McMahan et al. 2017; adaptive server optimisers, Reddi et al. 2021; FedProx, Li et al. 2020.
"""

from __future__ import annotations

import optax

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.types import OptState, Params, ServerMethod
from fedlm.local.train import local_training
from fedlm.methods.method import Halves, Method, MethodOptions
from fedlm.methods.optimizers import Optimizer

client = local_training


@by_value
def fedavg_server(optimizer: Optimizer) -> ServerMethod:
    """Descend along the negated mean change, the pseudo-gradient."""

    def step(params: Params, memory: OptState, change: Params) -> tuple[Params, OptState]:
        moved, memory = optimizer.update(tree.scale(change, -1.0), memory, params)
        return optax.apply_updates(params, moved), memory

    return ServerMethod(optimizer.init, send_params, step)


def send_params(params: Params, memory: OptState) -> Params:
    """Send the model and nothing else."""
    return params


def build_fedavg(options: MethodOptions) -> Halves:
    """Build both halves, one client half per trainable part."""
    clients = (
        client(
            options.loss,
            options.inner,
            options.weigh,
            part=part,
            proximal=options.proximal,
        )
        for part in options.parts
    )
    return tuple(clients), fedavg_server(options.outer)


METHOD = Method(
    build=build_fedavg,
    proximal="FedProx's mu",
    trains_parts=True,
    one_change=True,
    takes_rate=True,
)
