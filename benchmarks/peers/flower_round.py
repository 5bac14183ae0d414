"""Flower's simulation (Ray actors) on the same workload.

In:       a workload folder.
Out:      turns (`turns.py`).
Promise:  its FedAvg strategy, its client and server apps and its simulation runtime, an actor a
          core; the strategy waits between rounds until the next turn. The clock runs from the
          choice of nodes to the averaged parameters.
Not here: the client (`flower_app.py`), the models (`torch_models.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - or actors yield to all others

from flower_app import FOLDER, app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_models import make, put, take
from turns import Turns, load, versions

MANY = 1_000_000


class Enough(Exception):
    """No more turns: the only way out of a strategy's loop before its last round."""


class TakingTurns(FedAvg):
    """FedAvg that starts a round when it is asked to."""

    def __init__(self, turns: Turns, take_arrays: Any, **options: Any) -> None:
        super().__init__(**options)
        self.turns, self.take_arrays = turns, take_arrays

    def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
        if not self.turns.begins():
            raise Enough
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            raise RuntimeError("no client answered")
        self.turns.ends(lambda: self.take_arrays(arrays))
        return arrays, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    os.environ[FOLDER] = str(folder)
    work = load(folder)
    members, cores = len(work.rows), len(os.sched_getaffinity(0))
    module = make(work.settings, library=True)
    put(module, work.params)

    def take_arrays(arrays: ArrayRecord) -> Any:
        module.load_state_dict(arrays.to_torch_state_dict())
        return take(module, work.params)

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        facts = {"versions": versions("flwr", "ray", "torch"), "actors": cores}
        turns = Turns(work.params, facts)
        strategy = TakingTurns(
            turns,
            take_arrays,
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=members,
            min_available_nodes=members,
        )
        try:
            strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=MANY)
        except Enough:
            print("no more turns", file=sys.stderr)

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=members,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
