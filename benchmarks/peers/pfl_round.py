"""pfl-research's federated averaging on the same workload.

In:       a workload folder.
Out:      turns (`turns.py`).
Promise:  its simulated backend, algorithm, weighting and datasets; the loop is its own, and a
          callback waits between central iterations until the next turn.
Not here: the models (`torch_models.py`).

The first iteration also evaluates every member before and after training (pfl does so whenever
the iteration divides by the frequency, and zero always does): it is the warm-up.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch_models import make, put, take, trained
from turns import Turns, load, versions

MANY = 1_000_000


class TakeTurns(TrainingProcessCallback):
    """Lets an iteration run only when it is asked for."""

    def __init__(self, turns: Turns, names: list[str]) -> None:
        self.turns, self.names = turns, names

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.more = self.turns.begins()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.turns.ends(lambda: take(model.pytorch_model, self.names))
        return not self.turns.begins(), Metrics()


def model_of(said, params, central):  # type: ignore[no-untyped-def]
    """Return pfl's model of a module that begins with `params`; `central` makes its server."""
    module = make(said, library=True)
    put(module, params)
    # pfl asks a module for `metrics` as well as `loss`.
    module.metrics = lambda tokens: {"loss": Weighted(module.loss(tokens).item(), 1)}
    return PyTorchModel(
        model=module,
        local_optimizer_create=lambda _, lr: torch.optim.SGD(trained(module), lr=lr),
        central_optimizer=central(trained(module)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    work = load(parser.parse_args().folder)
    said = work.settings
    model = model_of(said, work.params, lambda params: torch.optim.SGD(params, lr=1.0))
    users = {
        name: PyTorchTensorDataset((torch.from_numpy(rows).long(),), user_id=name)
        for name, rows in zip(said["names"], work.rows, strict=True)
    }
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    turns = Turns(
        work.params,
        {"versions": versions("pfl", "torch"), "threads": torch.get_num_threads()},
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=MANY,
            evaluation_frequency=MANY,
            train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=said["batch"], local_num_epochs=1, local_learning_rate=said["rate"]
        ),
        NNEvalHyperParams(local_batch_size=said["batch"]),
        callbacks=[TakeTurns(turns, list(work.params))],
    )


if __name__ == "__main__":
    main()
