"""The mesh engine beside the loop engine, on one cohort: `make bench`.

The cohort has the shape of the Stack Overflow benchmark: vocabulary 10,000, rows of 20 tokens,
batches of 16, lognormal client sizes up to 256 rows. Results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_num_cpu_devices", 2)

from benchmarks.probe import in_turns, machine, matmul_gflops, spread  # noqa: E402
from fedlm.core import tree  # noqa: E402
from fedlm.core.keys import key_for  # noqa: E402
from fedlm.core.types import Sampling, Shape  # noqa: E402
from fedlm.engine.loop import LoopEngine  # noqa: E402
from fedlm.engine.mesh import MeshEngine  # noqa: E402
from fedlm.federation.round import Algorithm  # noqa: E402
from fedlm.local.train import local_training  # noqa: E402
from fedlm.models import catalog  # noqa: E402
from fedlm.wire.dense import dense  # noqa: E402

WORKLOADS = {
    "benchmark size": catalog.Dimensions(vocab=10_000, embed=96, units=670),
    "small": catalog.Dimensions(vocab=2_000, embed=64, units=256),
}


def cohort_rows(vocab: int, clients: int) -> list[np.ndarray]:
    """Lognormal client sizes, uniform tokens: the worst case for caches, the same for all."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(256, rng.lognormal(4.2, 0.9, clients)).astype(int) + 1
    return [rng.integers(4, vocab, (n, 21)).astype(np.uint16) for n in sizes]


def matmul_flops(params: object) -> int:
    """Floating-point operations a token: two a weight forward, four backward."""
    return 6 * tree.size(params)


def compare(name: str, cell: str, clients: int, repeats: int) -> list[str]:
    """One row of the table."""
    size = WORKLOADS[name]
    rows = cohort_rows(size.vocab, clients)
    algorithm = Algorithm(
        sampling=Sampling(law="fixed", population=clients, cohort=clients),
        local=local_training(catalog.loss, optax.sgd(0.1)),
        upload=dense(),
        download=dense(),
        server=optax.sgd(1.0),
    )
    params = catalog.make(cell, size, key_for(0, "init"))
    shape, members = Shape(batch=16, length=20), np.arange(clients)
    engines = [E(algorithm, rows.__getitem__, shape, 0) for E in (LoopEngine, MeshEngine)]
    cohorts = [engine.prepare(0, members) for engine in engines]
    slow, fast = (e.gather(params, c) for e, c in zip(engines, cohorts, strict=True))
    apart = float(tree.norm(tree.sub(slow.delta, fast.delta)) / tree.norm(slow.delta))
    runs = {
        type(e).__name__: lambda e=e, c=c: e.gather(params, c)
        for e, c in zip(engines, cohorts, strict=True)
    }
    times, rates = in_turns(runs, repeats)
    loop, mesh = (times[type(e).__name__] for e in engines)
    work = matmul_flops(params) * float(jnp.asarray(fast.tokens)) / 1e9
    share = [work / m / r for m, r in zip(mesh, rates, strict=True)]
    ratio = [a / b for a, b in zip(loop, mesh, strict=True)]
    return [
        f"{cell}, {name}",
        spread([clients / m for m in mesh]),
        spread([clients / s for s in loop]),
        spread(ratio),
        f"{statistics.median(work / m for m in mesh):.0f}",
        f"{statistics.median(share):.0%}",
        f"{apart:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engines.md"))
    asked = parser.parse_args()
    head = ["workload", "mesh clients/s", "loop clients/s", "loop/mesh time", "mesh GFLOP/s"]
    head += ["of matmul", "relative difference"]
    rows = [
        compare(name, cell, asked.clients, asked.repeats)
        for name in WORKLOADS
        for cell in ("cifg", "si-cifg", "lstm")
    ]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    facts = f"{machine()}; matrix product {matmul_gflops():.0f} GFLOP/s; median (lowest-highest)"
    text = f"{facts}\n\n{table}\n"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
