"""Rounds of pfl-research's own algorithms on the rows that everybody is given.

In:       a folder (`given.py`).
Out:      parameters after some rounds (`given.py`).
Promise:  pfl's `FederatedAveraging` and `FedProx` on its simulated backend, weighted by rows, with
          PyTorch's optimisers; the loop over rounds is its own.
Not here: the models (`torch_models.py`), MimeLite, which pfl 0.6.0 does not have.

A member of a round is a user of its own, since its rows differ from round to round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from given import Record, load
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl_round import model_of
from torch_models import take
from turns import versions


class Watch(TrainingProcessCallback):
    """Writes the parameters after those rounds that are asked for."""

    def __init__(self, record: Record) -> None:
        self.record, self.names, self.played = record, list(record.given.params), 0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.played += 1
        self.record.after(self.played, lambda: take(model.pytorch_model, self.names))
        return False, Metrics()


def server_optimizer(said: dict[str, Any], params: list[torch.nn.Parameter]) -> Any:
    """Return PyTorch's optimiser of a name that fedlm uses."""
    made = {
        "fedavg": lambda: torch.optim.SGD(params, lr=said["server_rate"]),
        "fedadam": lambda: torch.optim.Adam(
            params,
            lr=said["server_rate"],
            betas=(said["momentum"], said["beta2"]),
            eps=said["adam_epsilon"],
        ),
    }
    return made[said["server_optimizer"]]()


def main() -> None:
    """Play all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    given = load(parser.parse_args().folder)
    said = given.settings
    model = model_of(said, given.params, lambda params: server_optimizer(said, params))
    users = [
        PyTorchTensorDataset((torch.from_numpy(rows).long(),), user_id=f"{number}.{name}")
        for number, members in enumerate(given.rounds)
        for name, rows in members.items()
    ]
    turns = iter(range(len(users)))
    data = FederatedDataset(users.__getitem__, lambda: next(turns))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    terms: dict[str, Any] = {
        "central_num_iterations": len(given.rounds),
        "evaluation_frequency": len(given.rounds) + 1,
        "train_cohort_size": len(given.rounds[0]),
        "val_cohort_size": 0,
    }
    prox = said["proximal"]
    record = Record(given, {"versions": versions("pfl", "torch")})
    (FedProx() if prox else FederatedAveraging()).run(
        FedProxParams(**terms, mu=prox) if prox else NNAlgorithmParams(**terms),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=said["batch"], local_num_epochs=1, local_learning_rate=said["rate"]
        ),
        NNEvalHyperParams(local_batch_size=said["batch"]),
        callbacks=[Watch(record)],
    )
    record.close()


if __name__ == "__main__":
    main()
