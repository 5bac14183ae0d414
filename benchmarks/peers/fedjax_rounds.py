"""Rounds of FedJAX's own algorithms on the rows that everybody is given.

In:       a folder (`given.py`); `--own-batches`, to let FedJAX shuffle and batch a member's rows.
Out:      parameters after some rounds (`given.py`).
Promise:  FedJAX's `fed_avg`, `fed_prox` and `mime_lite`, with its optimisers and client loop, as
          they are published.
Not here: the models (`fedjax_round.py`), fedlm.

`fed_prox` and `mime_lite` ask for a loss per row and take the mean over rows. A row's loss is its
nats times the rows of its batch over the targets of its batch: the mean is then that over targets,
which all contenders descend. A member's whole gradient in `mime_lite` is of one batch, and so the
mean over all its targets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fedjax_round import Unpadded, make_loss, make_nats
from given import Record, load
from turns import versions

# isort: split
import fedjax  # after `fedjax_round`, which gives back names that it needs
from fedjax.algorithms import fed_avg, fed_prox, mime_lite

Loss = Callable[[Any, Any, jax.Array], jax.Array]


def loss_by_row(said: dict[str, Any]) -> Loss:
    """Return a loss per row whose mean over a batch's rows is the mean over its targets."""
    nats_of = make_nats(said)

    def loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        nats, counts = nats_of(params, batch["tokens"])
        rows = jnp.sum(jnp.any(batch["tokens"] != 0, axis=1))
        return jnp.sum(nats * counts, axis=1) * rows / jnp.maximum(jnp.sum(counts), 1)

    return loss


def server_optimizer(said: dict[str, Any], rate: float) -> fedjax.optimizers.Optimizer:
    """Return FedJAX's optimiser of a name that fedlm uses."""
    made = {
        "fedavg": lambda: fedjax.optimizers.sgd(rate),
        "fedavgm": lambda: fedjax.optimizers.sgd(rate, momentum=said["momentum"]),
        "fedadam": lambda: fedjax.optimizers.adam(
            rate, b1=said["momentum"], b2=said["beta2"], eps=said["adam_epsilon"]
        ),
    }
    return made[said["server_optimizer"]]()


def algorithm_of(said: dict[str, Any]) -> fedjax.FederatedAlgorithm:
    """Return the algorithm that the settings name."""
    rate, server_rate = said["rate"], said["server_rate"]
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=said["batch"], seed=said["seed"])
    if said["method"] == "mimelite":
        return mime_lite.mime_lite(
            loss_by_row(said),
            base_optimizer=server_optimizer(said, rate),
            client_batch_hparams=batches,
            grads_batch_hparams=fedjax.PaddedBatchHParams(batch_size=said["max_examples"]),
            server_learning_rate=server_rate,
        )
    client, server = fedjax.optimizers.sgd(rate), server_optimizer(said, server_rate)
    if said["proximal"]:
        return fed_prox.fed_prox(loss_by_row(said), client, server, batches, said["proximal"])
    return fed_avg.federated_averaging(jax.grad(make_loss(said)), client, server, batches)


def main() -> None:
    """Play all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--own-batches", action="store_true")
    asked = parser.parse_args()
    given = load(asked.folder)
    kind = fedjax.ClientDataset if asked.own_batches else Unpadded
    algorithm = algorithm_of(given.settings)
    state = algorithm.init({name: jnp.asarray(value) for name, value in given.params.items()})
    record, key = Record(given, {"versions": versions("fedjax", "jax")}), jax.random.PRNGKey(0)
    for number, members in enumerate(given.rounds, 1):
        clients = [(name, kind({"tokens": rows}), key) for name, rows in members.items()]
        state, _ = algorithm.apply(state, clients)
        params = state.params
        record.after(number, lambda p=params: {k: np.asarray(v) for k, v in p.items()})
    record.close()


if __name__ == "__main__":
    main()
