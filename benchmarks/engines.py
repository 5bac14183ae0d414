"""The mesh engine beside the loop engine, on one cohort: `make bench`.

The cohort has the shape of the Stack Overflow benchmark: full rows of 20 tokens, batches of 16,
lognormal client sizes up to 256 rows; `large` has a vocabulary of 10,000, `small` of 2,000. `leaf`
is a leaf of a tree of federations: few members, long rows, many steps; `published` is a published
size of 19 to 75 million parameters with few members. Results are compared before they are timed;
the loop engine, which is slow, trains `--loop` members only. *Doubt* is how far the
loop engine's own result moves when every weight is one unit in its last place larger: engines can
agree no better than that. Ratios go to `runs/bench/ratios.json`, for `baseline.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

from benchmarks import baseline  # noqa: E402
from benchmarks.fedavg import fedavg  # noqa: E402
from benchmarks.probe import in_turns, machine, spread  # noqa: E402
from fedlm.core import tree  # noqa: E402
from fedlm.core.keys import key_for  # noqa: E402
from fedlm.core.types import BatchSpec, Start  # noqa: E402
from fedlm.engine.loop import LoopEngine  # noqa: E402
from fedlm.engine.mesh import MeshEngine  # noqa: E402
from fedlm.models import catalog  # noqa: E402

NUDGE = np.float32(1) + np.finfo(np.float32).eps
RECURRENT = {"embedding_size": 96, "hidden_size": 670}
DECODER = {"embedding_size": 96, "hidden_size": 384, "layers": 3, "heads": 8}
SMALL = {"embedding_size": 64, "hidden_size": 256, "layers": 2, "heads": 4}
LEAF = {"embedding_size": 256, "hidden_size": 1024, "layers": 4, "heads": 8}


class Workload(NamedTuple):
    """A model, and the members that train it."""

    name: str
    label: str
    vocab: int
    sizes: dict[str, Any]
    shape: BatchSpec = BatchSpec(batch_size=16, sequence_length=20)

    def rows(self, clients: int) -> list[np.ndarray]:
        """Return uniform tokens, the worst case for caches.

        Client sizes are lognormal; leaves and published sizes have few members of equal size.
        """
        rng = np.random.default_rng(0)
        sizes = np.minimum(256, rng.lognormal(4.2, 0.9, clients)).astype(int) + 1
        if self.label == "leaf":
            sizes = np.full(2, 4 * self.shape.batch_size)
        if self.label == "published":
            sizes = np.full(4, 3 * self.shape.batch_size)
        width = self.shape.sequence_length + 1
        return [rng.integers(4, self.vocab, (n, width)).astype(np.int32) for n in sizes]


def _published(name: str) -> Workload:
    known = catalog.NAMED[name]
    sizes = {each.name: getattr(known.size, each.name) for each in fields(known.size)}
    return Workload(name, "published", sizes.pop("vocab"), sizes)


WORKLOADS = [
    *(Workload(name, "large", 10_000, RECURRENT) for name in ("cifg", "si-cifg", "lstm")),
    *(
        Workload(name, "large", 10_000, DECODER)
        for name, known in sorted(catalog.ARCHITECTURES.items())
        if known.attends
    ),
    *(
        Workload(name, "small", 2_000, {**SMALL, "layers": 1})
        for name in ("cifg", "si-cifg", "lstm")
    ),
    *(Workload(name, "small", 2_000, SMALL) for name in ("transformer", "si-transformer")),
    Workload("mpt", "leaf", 4_000, LEAF, BatchSpec(batch_size=8, sequence_length=128)),
    *(_published(name) for name in ("large-lstm", "large-transformer", "large-conformer")),
    _published("mpt-75m"),
]


def flops(params: object, size: catalog.Dimensions, length: int) -> float:
    """Floating-point operations of a token in products: two a weight forward, four backward.

    The tied embedding counts once (as the output matrix; a look-up is no product), and attention
    adds its two products over the row.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim >= 2)
    attention = 4 * length * size.embedding_size * size.layers if hasattr(params, "blocks") else 0
    return 6.0 * weights + 3.0 * attention


class Compared(NamedTuple):
    """A row of the table, and its two ratios for the baseline."""

    cells: list[str]
    loop_over_mesh: float
    share: float


def compare(workload: Workload, clients: int, repeats: int, loop_clients: int) -> Compared:
    """Measure a workload; the loop engine runs on the first few members."""
    name, label, vocab, sizes, shape = workload
    size = catalog.Dimensions(vocab=vocab, **sizes)
    rows = workload.rows(clients)
    clients = len(rows)
    algorithm = fedavg(clients)
    params = catalog.make(catalog.NAMED[name].architecture, size, key_for(0, "init"))
    loop, mesh = (E(algorithm, rows.__getitem__, shape, 0) for E in (LoopEngine, MeshEngine))
    few, all_of_them = np.arange(min(loop_clients, clients)), np.arange(clients)
    cohorts = {
        "loop": (loop, loop.prepare(0, few)),
        "few": (mesh, mesh.prepare(0, few)),
        "mesh": (mesh, mesh.prepare(0, all_of_them)),
    }
    slow, fast = (e.total(Start(params), c).total for e, c in (cohorts["loop"], cohorts["few"]))
    other = Start(jax.tree.map(lambda x: x * NUDGE, params))
    nudged = loop.total(other, cohorts["loop"][1]).total
    apart, doubt = (
        float(tree.norm(tree.sub(slow.delta, other.delta)) / tree.norm(slow.delta))
        for other in (fast, nudged)
    )
    runs = {k: lambda e=e, c=c: e.total(Start(params), c) for k, (e, c) in cohorts.items()}
    times, rates = in_turns(runs, repeats)
    tokens = float(jnp.asarray(mesh.total(Start(params), cohorts["mesh"][1]).total.tokens))
    work = flops(params, size, shape.sequence_length) * tokens / 1e9
    share = [work / m / r for m, r in zip(times["mesh"], rates, strict=True)]
    ratio = [a / b for a, b in zip(times["loop"], times["few"], strict=True)]
    cells = [
        f"{name}, {label}",
        f"{tree.size(params):,}",
        spread([clients / m for m in times["mesh"]]),
        spread(ratio),
        f"{statistics.median(work / m for m in times['mesh']):.0f}",
        f"{statistics.median(rates):.0f}",
        f"{statistics.median(share):.0%}",
        f"{apart:.0e}",
        f"{doubt:.0e}",
    ]
    return Compared(cells, statistics.median(ratio), statistics.median(share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--loop", type=int, default=4, help="members of the loop engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="such as cifg-large")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engines.md"))
    asked = parser.parse_args()
    head = ["architecture", "parameters", "mesh clients/s", "loop time / mesh time"]
    head += ["mesh GFLOP/s", "matmul GFLOP/s", "share", "relative difference", "doubt"]
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for workload in (w for w in WORKLOADS if not asked.only or f"{w.name}-{w.label}" in asked.only):
        found = compare(workload, asked.clients, asked.repeats, asked.loop)
        rows.append(found.cells)
        name = f"{workload.name}, {workload.label}"
        ratios |= {f"{name}, loop time / mesh time": found.loop_over_mesh}
        ratios |= {f"{name}, share of the probe": found.share}
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        jax.clear_caches()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    facts = f"{machine()}; medians (lowest-highest) of {asked.repeats} turns"
    baseline.keep("engines", facts, ratios)
    text = f"{facts}\n\n{table}\n"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
