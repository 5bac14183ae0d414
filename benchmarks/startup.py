"""Time to the first round: import, building, compiling; cold, and from kept programs.

    python -m benchmarks.startup [--repeats 3]

Each start is a new process; the first has an empty cache folder of its own, the second finds the
programs that the first one compiled. The store is prepared before: its time is not in the figures.
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
began = time.perf_counter()
from fedlm.engine.devices import use_devices
from fedlm.core.types import Start
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.federation.round import CohortSampler
import jax
imported = time.perf_counter()
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
first = time.perf_counter()
jax.block_until_ready(run.engine.total(start, run.engine.prepare(0, members)).total)
second = time.perf_counter()
print(imported - began, built - imported, first - built, second - first)
"""
MODELS = {
    "si-cifg, 670 units": ("model.name=si-cifg", "model.hidden_size=670"),
    "transformer, 3 layers": ("model.name=transformer",),
}


def start(folder: Path, stores: Path, changes: tuple[str, ...]) -> list[float]:
    """Seconds of import, building, the first round and the second."""
    recipe = Path("recipes/sotu.toml").absolute()
    told = subprocess.run(
        [sys.executable, "-c", CODE, str(recipe), str(stores), *changes],
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
    asked = parser.parse_args()
    print(machine() + "; medians in seconds\n")
    print("| model | start | import | build | first round | a later round |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as stores:
        for label, changes in MODELS.items():
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
