"""fedlm's round, through the engine and the server step that `fedlm train` uses.

In:       a workload folder; `--engine mesh` (a lane a core) or `loop` (the oracle); `--nudge`, a
          relative size of noise on the start.
Out:      turns (`turns.py`).
Promise:  the clock covers batching, training, the sum and the server step; nothing is prepared
          ahead, although a run prepares the next cohort beside the current one.
Not here: other frameworks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from turns import Arrays, Turns, load, versions

from fedlm.core import tree
from fedlm.core.types import BatchSpec, Sampling, Start
from fedlm.engine.devices import use_devices
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import init_node, server_half
from fedlm.local.train import local_training
from fedlm.methods import fedavg
from fedlm.models import catalog
from fedlm.wire.dense import dense


def nudged(params: Arrays, size: float) -> Arrays:
    """Every number multiplied by one plus a little noise."""
    rng = np.random.default_rng(0)
    return {
        name: (value * (1.0 + size * rng.standard_normal(value.shape))).astype(value.dtype)
        for name, value in params.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=("mesh", "loop"), default="mesh")
    parser.add_argument("--nudge", type=float, default=0.0)
    asked = parser.parse_args()
    use_devices(0 if asked.engine == "mesh" else 1)
    work = load(asked.folder)
    said = work.settings
    start = nudged(work.params, asked.nudge)
    names = [int(name) for name in said["names"]]
    with np.load(asked.folder / "rows.npz", allow_pickle=False) as file:
        rows = {int(name): file[name] for name in file.files}
    algorithm = Algorithm(
        participation=Sampling(law="fixed", population=max(names) + 1, cohort=len(names)),
        local=local_training(catalog.loss, optax.sgd(said["rate"])),
        upload=dense(),
        download=dense(),
        server=fedavg.fedavg_server(optax.sgd(1.0)),
    )
    shape = BatchSpec(
        batch_size=said["batch"], sequence_length=said["length"], max_examples=said["max_examples"]
    )
    kind = {"mesh": MeshEngine, "loop": LoopEngine}[asked.engine]
    engine = kind(algorithm, rows.__getitem__, shape, said["seed"])
    sizes = ("vocab", "embedding_size", "hidden_size", "layers", "heads")
    like = catalog.shapes(
        said["architecture"], catalog.Dimensions(**{name: said[name] for name in sizes})
    )
    state = init_node(algorithm, jax.device_put(tree.with_leaves(like, start)))
    turns = Turns(
        start,
        {"versions": versions("fedlm", "jax"), "devices": jax.device_count()},
    )
    while turns.begins():
        # Round zero each time: the shuffle is part of the address, and all see the same batches.
        prepared = engine.prepare(0, np.array(names))
        total = engine.total(Start(state.params), prepared).total
        state = server_half(algorithm, state, total, prepared.members)
        jax.block_until_ready(state)
        params = state.params
        turns.ends(lambda p=params: {k: np.asarray(v) for k, v in tree.named_leaves(p).items()})


if __name__ == "__main__":
    main()
