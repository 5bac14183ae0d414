"""What the models of a tree take in memory, with `federation.resident` and without.

    python -m benchmarks.spilling [--leaves 8 32 64]

Three rounds of a tree with so many leaves, each with a little made-up text and a model of its own.
Memory is what the process holds beyond files (`RssAnon`), looked at every 20 ms, less what it holds
before the tree is made, after one that was thrown away so that programs are compiled. Each setting
has a process of its own. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.memory import Peak, held
from fedlm.recipe.build import build
from fedlm.recipe.settings import parse

MODEL = {"name": "mpt", "embedding_size": 256, "hidden_size": 1024, "layers": 4, "heads": 4}
ROUNDS = 3


def text(path: Path, leaves: int) -> None:
    """A line a client, a client a leaf."""
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for leaf in range(leaves):
            words = " ".join(f"w{n}" for n in rng.zipf(1.3, 600) % 1000)
            line = {"client": f"c{leaf}", "groups": [f"g{leaf}"], "text": words}
            file.write(json.dumps(line) + "\n")


def measure(leaves: int, resident: int) -> dict[str, float]:
    """Megabytes at most beyond the start, a model's own, seconds of the last rounds."""
    with tempfile.TemporaryDirectory() as folder:
        text(Path(folder) / "text.jsonl", leaves)
        recipe = parse(
            {
                "data": {
                    "source": str(Path(folder) / "text.jsonl"),
                    "vocabulary": 1000,
                    "layout": "windows",
                    "sequence_length": 32,
                    "test_clients": 0.0,
                },
                "model": MODEL,
                "client": {"batch_size": 4, "max_steps": 2},
                "server": {"rounds": ROUNDS},
                "federation": {"levels": [0], "resident": resident},
                "run": {"devices": 1},
            }
        )
        made = build(recipe, Path(folder), lambda stage, done: None)
        params = made.start()
        next(made.round.play(made.round.init(params), range(1)))  # compiles
        gc.collect()
        before, seconds = held("RssAnon"), []
        with Peak() as peak:
            state, began = made.round.init(params), time.perf_counter()
            for _ in made.round.play(state, range(ROUNDS)):
                seconds.append(time.perf_counter() - began)
                began = time.perf_counter()
        one = 4 * sum(x.size for x in jax.tree.leaves(params)) / 1e6
        return {"more": peak.most - before, "one": one, "seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(*asked.one)))
        return
    head = ["leaves", "resident", "a model, MB", "MB more", "models", "s a round"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for leaves in asked.leaves:
        for resident in (0, 2):
            again = [sys.executable, "-m", "benchmarks.spilling", "--one"]
            said = subprocess.check_output([*again, str(leaves), str(resident)], text=True)
            found = json.loads(said.splitlines()[-1])
            row = [leaves, resident or "all", f"{found['one']:.1f}", f"{found['more']:.0f}"]
            row += [f"{found['more'] / found['one']:.1f}", f"{found['seconds']:.2f}"]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
