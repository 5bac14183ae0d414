"""Plain federated averaging, as most benchmarks run it.

In:       how many clients there are, a client's rate.
Out:      an `Algorithm`: everybody takes part, SGD at the clients, whole frames of float32.
Promise:  nothing is left out that `fedlm train` would do by default, and nothing is added.
Not here: models, text, engines.
"""

from __future__ import annotations

import optax

from fedlm.core.types import Sampling
from fedlm.federation.algorithm import Algorithm
from fedlm.local.train import local_training
from fedlm.methods.fedavg import fedavg_server as server_half
from fedlm.models import catalog
from fedlm.wire.dense import dense


def fedavg(clients: int, rate: float = 0.1) -> Algorithm:
    return Algorithm(
        participation=Sampling(law="fixed", population=clients, cohort=clients),
        local=local_training(catalog.loss, optax.sgd(rate)),
        upload=dense(),
        download=dense(),
        server=server_half(optax.sgd(1.0)),
    )
