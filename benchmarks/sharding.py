"""How much memory a device needs for a model that several devices share.

    python -m benchmarks.sharding [--model mpt-400m] [--shards 1 2 4 8] [--dtypes float32 bfloat16]

In:       the name of a model, how many devices share it, the shape of a client's batches.
Out:      a table in Markdown: bytes per device of the program that trains a cohort in one lane.
Promise:  compiled from shapes, and never run: no parameter is allocated. The figures are the
          compiler's own (`compiled.memory_analysis()`), of one device.
Not here: speed, and what a server holds between rounds beside the state of its lanes.

Each row is compiled in a process of its own, for simulated CPU devices. An accelerator's compiler
orders the same operations in another way, so its scratch memory differs; state does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

# Code of the best quality is not wanted here: it is never run. Buffers are assigned before.
CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def measure(asked: dict[str, Any]) -> dict[str, float]:
    """Compile the program of one lane, in this process, and return the bytes of a device."""
    import jax

    jax.config.update("jax_num_cpu_devices", asked["shards"])

    from fedlm.core import tree
    from fedlm.models import catalog

    named = catalog.NAMED[asked["model"]]
    size = replace(named.size, dtype=asked["dtype"], remat=asked["remat"])
    like = catalog.shapes(named.architecture, size)
    began = time.process_time()
    batch = asked["batch_size"], asked["sequence_length"]
    found = lane_program(like, asked["optimizer"], batch, asked["shards"]).memory_analysis()
    return {
        "parameters": tree.size(like),
        "seconds": time.process_time() - began,
        **bytes_of(found),
    }


def bytes_of(found: Any) -> dict[str, float]:
    """Return what the compiler says that a program needs: in, changed in place, scratch, all."""
    kept = found.alias_size_in_bytes
    given = found.argument_size_in_bytes - kept
    made = found.output_size_in_bytes - kept
    scratch = found.temp_size_in_bytes
    return {"given": given, "state": kept, "scratch": scratch, "all": given + kept + made + scratch}


def lane_program(like: Any, optimizer: str, batch: tuple[int, int], shards: int) -> Any:
    """Return the compiled program of one lane, whose members begin from a model like this."""
    import jax
    import jax.numpy as jnp
    import optax

    from fedlm.core.types import Sampling
    from fedlm.engine.mesh import LaneInput, Programs
    from fedlm.federation.algorithm import Algorithm
    from fedlm.local.train import WEIGHTS, local_training
    from fedlm.methods import fedavg
    from fedlm.methods.optimizers import client_optimizer
    from fedlm.models import catalog
    from fedlm.wire.dense import dense

    local = local_training(catalog.loss, client_optimizer(optimizer, 0.1), WEIGHTS["examples"])
    half = Algorithm(
        participation=Sampling(law="fixed", population=1, cohort=1),
        local=local,
        upload=dense(),
        download=dense(),
        server=fedavg.fedavg_server(optax.sgd(1.0)),
    ).client_half
    programs = Programs(half, tuple(jax.devices()[:shards]), shards)
    places = programs.places

    def placed(values: Any, where: Any) -> Any:
        leaves, structure = jax.tree.flatten(values)
        same = isinstance(where, jax.sharding.Sharding)
        each = [where] * len(leaves) if same else jax.tree.leaves(where)
        made = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(leaves, each, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    state = jax.eval_shape(lambda model: programs._start_lanes(local, model, None), like)
    stream = jax.eval_shape(lambda: _stream(*batch))
    given = LaneInput(
        (placed(like, places.of_all(like)), jax.ShapeDtypeStruct((), jnp.float32)),
        None,
        placed(stream, places.per_lane),
    )
    state = placed(state, places.of_lanes(state))
    return programs.chunk.lower(local, False, state, given).compile()


def _stream(batch_size: int, sequence_length: int) -> Any:
    """Return one chunk of one lane, as the engine fills it."""
    import jax.numpy as jnp

    from fedlm.engine.mesh import Stream

    full = (1, 256)
    numbers, flags = jnp.zeros(full, jnp.int32), jnp.zeros(full, bool)
    return Stream(
        tokens=jnp.zeros((*full, batch_size, sequence_length + 1), jnp.int32),
        starts=numbers,
        stops=numbers,
        opens=flags,
        closes=flags,
        examples=jnp.zeros(full),
        keys=jnp.zeros((*full, 2), jnp.uint32),
        places=numbers,
        segments=jnp.zeros(1, jnp.int32),
        rate=jnp.ones(1),
    )


def ask(**asked: Any) -> dict[str, float]:
    """Return the same, from a process of its own."""
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.sharding", "--one", json.dumps(asked)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {CHEAP}"},
    )
    found: dict[str, float] = json.loads(told.stdout)
    return found


def main() -> None:
    """Print a row per number of devices and type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mpt-400m")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(json.loads(asked.one))))
        return
    shared = {
        "model": asked.model,
        "optimizer": asked.optimizer,
        "batch_size": asked.batch_size,
        "sequence_length": asked.sequence_length,
        "remat": asked.remat,
    }
    head = "dtype", "devices", "start, GB", "state, GB", "scratch, GB", "all, GB", "of one"
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|", flush=True)
    for dtype in asked.dtypes:
        first = None
        for shards in asked.shards:
            found = ask(shards=shards, dtype=dtype, **shared)
            first = first or found["all"]
            sizes = (found[name] / 1e9 for name in ("given", "state", "scratch", "all"))
            cells = [dtype, shards, *(f"{size:.2f}" for size in sizes)]
            share = f"{100 * found['all'] / first:.0f}%"
            print("| " + " | ".join(map(str, [*cells, share])) + " |", flush=True)
            print(f"compiled in {found['seconds']:.0f} CPU seconds", file=sys.stderr, flush=True)
    print(f"\n{found['parameters']:,.0f} parameters: {4 * found['parameters'] / 1e9:.2f} GB once.")


if __name__ == "__main__":
    main()
