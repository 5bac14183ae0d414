"""How a round's cost grows with cohort, model and lanes, and what that makes of large runs.

    python -m benchmarks.growth [--repeats 3] [--cohorts 10 200] [--units 256]

Rounds on made-up rows (Stack Overflow's shape: 20 tokens, batches of 16, lognormal client sizes up
to 256 rows), each setting in a process of its own, because a peak of memory never falls and the
number of lanes is fixed at the start. The estimates at the end are arithmetic on these figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

SMALL = {
    "name": "cifg",
    "vocab": 2_000,
    "embedding_size": 64,
    "hidden_size": 256,
    "layers": 1,
    "heads": 4,
}
LARGE = {
    "name": "cifg",
    "vocab": 10_000,
    "embedding_size": 96,
    "hidden_size": 670,
    "layers": 1,
    "heads": 8,
}
COHORTS = (10, 25, 50, 100, 200)
UNITS = (128, 256, 512, 1024)
# Stack Overflow: rounds and cohort of the usual benchmark; examples a client after the cap of 256
# are those of the made-up sizes here, and 13.3 words a sentence plus its end are published.
ROUNDS, COHORT, WORDS = 1500, 50, 14.3
NODES_TOKENS = 1e9  # of one leaf of a tree of federations
ACCELERATOR = 312e12 * 0.4  # a data-centre GPU's bfloat16 rate, and a usual share of it


def measure(asked: dict[str, Any]) -> dict[str, float]:
    """Seconds of a round and the peak of memory, in this process."""
    import jax
    import numpy as np

    from benchmarks.engines import Workload, flops
    from benchmarks.fedavg import fedavg
    from benchmarks.memory import held
    from fedlm.core.keys import key_for
    from fedlm.core.types import BatchSpec, Start
    from fedlm.engine.mesh import MeshEngine
    from fedlm.models import catalog

    jax.config.update("jax_num_cpu_devices", asked["lanes"])  # `engines` has set another
    model = dict(asked["model"])
    name = model.pop("name")
    size = catalog.Dimensions(**model)
    rows = Workload(name, "growth", size.vocab, {}).rows(asked["cohort"])
    algorithm = fedavg(len(rows))
    params = catalog.make(name, size, key_for(0, "init"))
    engine = MeshEngine(
        algorithm, rows.__getitem__, BatchSpec(batch_size=16, sequence_length=20), 0
    )
    members, start = np.arange(len(rows)), Start(params)
    total = jax.block_until_ready(engine.total(start, engine.prepare(0, members[:2])).total)
    taken = []
    for _ in range(asked["repeats"]):
        began = time.perf_counter()
        total = jax.block_until_ready(engine.total(start, engine.prepare(0, members)).total)
        taken.append(time.perf_counter() - began)
    tokens = float(total.tokens)
    return {
        "seconds": statistics.median(taken),
        "tokens": tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "gflops": flops(params, size, 20) * tokens / statistics.median(taken) / 1e9,
        "peak": held("VmHWM"),
    }


def ask(repeats: int, model: dict[str, Any], cohort: int, lanes: int) -> dict[str, float]:
    """The same, in a process of its own."""
    asked = {"model": model, "cohort": cohort, "lanes": lanes, "repeats": repeats}
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", "--one", json.dumps(asked)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(told.stdout)
    return found


def show(head: list[str], rows: list[list[object]]) -> None:
    lines = [head, ["---"] * len(head), *rows]
    print("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n", flush=True)


def row(first: int, found: dict[str, float], *shown: str) -> list[object]:
    """The figures of one setting that a table shows."""
    seconds, tokens = found["seconds"], found["tokens"]
    figures = {
        "seconds": f"{seconds:.2f}",
        "each": f"{1e3 * seconds / first:.1f}",
        "tokens": f"{tokens / seconds:,.0f}",
        "parameters": f"{found['parameters']:,.0f}",
        "gflops": f"{found['gflops']:.0f}",
        "peak": f"{found['peak']:.0f}",
    }
    return [first, *(figures[name] for name in shown)]


def tables(repeats: int, cohorts: list[int], units: list[int]) -> dict[str, float]:
    """Prints what was measured; returns the figures of the Stack Overflow shape on two lanes."""
    shown = ("seconds", "each", "tokens", "peak")
    rows = [row(c, ask(repeats, SMALL, c, 2), *shown) for c in cohorts]
    show(["cohort", "s a round", "ms a client", "tokens/s", "peak MB"], rows)
    shown = ("parameters", "seconds", "gflops", "peak")
    rows = [row(u, ask(repeats, {**SMALL, "hidden_size": u}, 25, 2), *shown) for u in units]
    show(["hidden_size", "parameters", "s a round of 25", "GFLOP/s", "peak MB"], rows)
    shown = ("seconds", "tokens", "gflops", "peak")
    found = [ask(repeats, LARGE, 25, lanes) for lanes in (1, 2)]
    rows = [row(n + 1, f, *shown) for n, f in enumerate(found)]
    show(["lanes", "s a round of 25, large", "tokens/s", "GFLOP/s", "peak MB"], rows)
    return found[-1]


def estimates(large: dict[str, float]) -> None:
    """What these figures make of two published runs."""
    rate = large["tokens"] / large["seconds"]
    rows = large["tokens"] / 20 / 25  # rows a client here; in the text they have other lengths
    tokens = ROUNDS * COHORT * rows * WORDS
    moved = ROUNDS * COHORT * 4 * large["parameters"] / 1e9
    print(
        f"Stack Overflow: {ROUNDS} rounds of {COHORT} clients with {rows:.0f} sentences of {WORDS} "
        f"targets are {tokens / 1e6:,.0f} million tokens: {tokens / rate / 3600:.1f} hours at the "
        f"{rate:,.0f} tokens a second of two lanes. Which {COHORT} of 342,477 clients a round "
        f"draws costs milliseconds (benchmarks.population); traffic is {moved:,.0f} GB each way as "
        "float32."
    )
    from fedlm.models import catalog

    named = catalog.NAMED["mpt-400m"]
    weights = catalog.count(named.architecture, named.size)
    work = 6.0 * weights * NODES_TOKENS
    years = work / (large["gflops"] * 1e9) / 86400 / 365
    print(
        f"\nWorldLM at 400M ({weights:,} parameters): a token takes {6 * weights / 1e9:.1f} GFLOP, "
        f"a leaf of a billion tokens {work / 1e18:.1f} EFLOP: {years:.1f} years on these two "
        f"lanes, {work / ACCELERATOR / 3600:.1f} hours on one accelerator at "
        f"{ACCELERATOR / 1e12:.0f} TFLOP/s. A lane holds the model, what members start from, a "
        f"gradient and a sum: {4 * 4 * weights / 1e9:.1f} GB without activations. A node sends "
        f"{4 * weights / 1e9:.2f} GB a round as float32, {weights / 1e9:.2f} GB with uniform-8."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cohorts", type=int, nargs="*", default=list(COHORTS))
    parser.add_argument("--units", type=int, nargs="*", default=list(UNITS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(json.loads(asked.one))))
        return
    from benchmarks.probe import machine

    print(f"{machine()}; medians of {asked.repeats}\n", flush=True)
    estimates(tables(asked.repeats, asked.cohorts, asked.units))


if __name__ == "__main__":
    main()
