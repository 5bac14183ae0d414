"""The mesh engine beside the loop engine, on one cohort: `make bench`.

The cohort has the shape of the Stack Overflow benchmark: rows of 20 tokens, batches of 16,
lognormal client sizes up to 256 rows; `large` has a vocabulary of 10,000, `small` of 2,000.
Results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_num_cpu_devices", 2)

from benchmarks.probe import in_turns, machine, spread  # noqa: E402
from fedlm.core import tree  # noqa: E402
from fedlm.core.keys import key_for  # noqa: E402
from fedlm.core.types import Sampling, Shape  # noqa: E402
from fedlm.engine.loop import LoopEngine  # noqa: E402
from fedlm.engine.mesh import MeshEngine  # noqa: E402
from fedlm.federation.round import Algorithm  # noqa: E402
from fedlm.local.train import local_training  # noqa: E402
from fedlm.models import catalog  # noqa: E402
from fedlm.wire.dense import dense  # noqa: E402

RECURRENT = {"embed": 96, "units": 670}
DECODER = {"embed": 96, "units": 384, "layers": 3, "heads": 8}
SMALL = {"embed": 64, "units": 256, "layers": 2, "heads": 4}
WORKLOADS = [
    *((name, "large", 10_000, RECURRENT) for name in ("cifg", "si-cifg", "lstm")),
    *((name, "large", 10_000, DECODER) for name in sorted(catalog.ATTENTIVE)),
    *((name, "small", 2_000, {**SMALL, "layers": 1}) for name in ("cifg", "si-cifg", "lstm")),
    *((name, "small", 2_000, SMALL) for name in ("transformer", "si-transformer")),
]


def cohort_rows(vocab: int, clients: int) -> list[np.ndarray]:
    """Lognormal client sizes, uniform tokens: the worst case for caches, the same for all."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(256, rng.lognormal(4.2, 0.9, clients)).astype(int) + 1
    return [rng.integers(4, vocab, (n, 21)).astype(np.uint16) for n in sizes]


def flops(params: object, size: catalog.Dimensions, length: int) -> float:
    """Floating-point operations of a token in products: two a weight forward, four backward.

    The tied embedding counts once (as the output matrix; a look-up is no product), and attention
    adds its two products over the row.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim >= 2)
    attention = 4 * length * size.embed * size.layers if hasattr(params, "blocks") else 0
    return 6.0 * weights + 3.0 * attention


def compare(
    workload: tuple[str, str, int, dict[str, int]], clients: int, repeats: int
) -> list[str]:
    """One row of the table."""
    name, label, vocab, sizes = workload
    size = catalog.Dimensions(vocab=vocab, **sizes)
    rows = cohort_rows(vocab, clients)
    algorithm = Algorithm(
        sampling=Sampling(law="fixed", population=clients, cohort=clients),
        local=local_training(catalog.loss, optax.sgd(0.1)),
        upload=dense(),
        download=dense(),
        server=optax.sgd(1.0),
    )
    params = catalog.make(name, size, key_for(0, "init"))
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
    work = flops(params, size, shape.length) * float(jnp.asarray(fast.tokens)) / 1e9
    share = [work / m / r for m, r in zip(mesh, rates, strict=True)]
    return [
        f"{name}, {label}",
        f"{tree.size(params):,}",
        spread([clients / m for m in mesh]),
        spread([a / b for a, b in zip(loop, mesh, strict=True)]),
        f"{statistics.median(work / m for m in mesh):.0f}",
        f"{statistics.median(rates):.0f}",
        f"{statistics.median(share):.0%}",
        f"{apart:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engines.md"))
    asked = parser.parse_args()
    head = ["architecture", "parameters", "mesh clients/s", "loop time / mesh time"]
    head += ["mesh GFLOP/s", "matmul GFLOP/s", "share", "relative difference"]
    rows = []
    for workload in WORKLOADS:
        rows.append(compare(workload, asked.clients, asked.repeats))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        jax.clear_caches()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    facts = f"{machine()}; medians (lowest-highest) of {asked.repeats} turns"
    text = f"{facts}\n\n{table}\n"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
