"""Time to the first round: import, building, compiling; cold, and from kept programs.

    python -m benchmarks.startup [--repeats 3] [--only large-transformer]

Each start is a new process; the first has an empty cache folder of its own, the second finds the
programs that the first one compiled. The store is prepared before: its time is not in the figures.
The last three columns are the parts of building and of the first round in which JAX traces Python,
lowers what it traced, and compiles it or loads it from the cache folder. *All cores* are the
seconds that they computed together until the first round was done. Rows are windows, as in
`recipes/sotu.toml`, or lines of any length, for which more sizes are compiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.probe import machine

CODE = """
import time, sys
from collections import defaultdict
began = time.perf_counter()
from fedlm.engine.devices import use_devices
from fedlm.core.types import Start
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.federation.round import CohortSampler
import jax
imported = time.perf_counter()
spent = defaultdict(list)
def listen(event, seconds, **_):
    spent[event.rsplit("/", 1)[-1]].append((time.perf_counter() - seconds, time.perf_counter()))
jax.monitoring.register_event_duration_secs_listener(listen)
def union(times):  # programs are traced within programs
    length, until = 0.0, 0.0
    for begin, end in sorted(times):
        length, until = length + max(0.0, end - max(begin, until)), max(until, end)
    return length
recipe = load(sys.argv[1], tuple(sys.argv[3:]))
use_devices(0)
from pathlib import Path
run = build(recipe, Path(sys.argv[2]), lambda stage, done: None)
state = run.round.init(run.start())
built = time.perf_counter()
members = CohortSampler(run.algorithm, 0, state)(0)
start = Start(state.params)
total = run.engine.total(start, run.engine.prepare(0, members)).total
jax.block_until_ready(total)
first, computed = time.perf_counter(), time.process_time()
parts = [union(spent[f"{part}_duration"]) for part in
         ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")]
jax.block_until_ready(run.engine.total(start, run.engine.prepare(0, members)).total)
second = time.perf_counter()
print(imported - began, built - imported, first - built, second - first, computed, *parts)
"""
PREPARE = """
import sys
from pathlib import Path
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
build(load(sys.argv[1], tuple(sys.argv[3:])), Path(sys.argv[2]), lambda stage, done: None)
"""
WORDS = "data.vocabulary=10000"
LARGE = (
    "model.embedding_size=512",
    "model.hidden_size=2048",
    "model.heads=8",
)
MODELS = {
    "si-cifg": (WORDS, "model.name=si-cifg", "model.hidden_size=670"),
    "transformer": (WORDS, "model.name=transformer", "model.hidden_size=384", "model.layers=3"),
    "si-cifg, lines": (
        *(WORDS, "model.name=si-cifg", "model.hidden_size=670"),
        *("data.layout=lines", "data.sequence_length=20"),
    ),
    "transformer, lines": (
        *(WORDS, "model.name=transformer", "model.hidden_size=384", "model.layers=3"),
        *("data.layout=lines", "data.sequence_length=20"),
    ),
    "large-transformer": ("model.name=large-transformer", *LARGE),
    "large-conformer": ("model.name=large-conformer", *LARGE),
}


def start(folder: Path, stores: Path, changes: tuple[str, ...], code: str = CODE) -> list[float]:
    """Seconds of import, building, two rounds, all cores, tracing, lowering and compiling."""
    recipe = Path("recipes/sotu.toml").absolute()
    told = subprocess.run(
        [sys.executable, "-c", code, str(recipe), str(stores), *changes],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(part) for part in told.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args()
    print(machine() + "; medians in seconds\n")
    print(
        "| model | start | import | build | first round | a later round "
        "| all cores | trace | lower | compile or load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as stores:
        for label in asked.only:
            changes = MODELS[label]
            start(Path(stores), Path(stores), changes, PREPARE)
            seen: dict[str, list[list[float]]] = {"cold": [], "kept programs": []}
            for _ in range(asked.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    for kind in seen:
                        seen[kind].append(start(Path(folder), Path(stores), changes))
            for kind, runs in seen.items():
                cells = [f"{statistics.median(part):.2f}" for part in zip(*runs, strict=True)]
                print(f"| {label} | {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
