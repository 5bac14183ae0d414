"""Adapters on a pretrained model under BLT noise, at several epsilons, over several seeds.

    make demo-llm                        # leaves base and text in runs/demo-llm
    python -m benchmarks.private_adapters --folder runs/demo-llm

In:       a folder with `base` (a Hugging Face folder) and `chitchat.jsonl`; epsilons; seeds.
Out:      a table: held-out perplexity of the base without adapters, with adapters at each epsilon,
          and with adapters without noise; mean and standard deviation over seeds.
Promise:  every sender takes part at most once per run; runs that are done are not repeated, and one
          that was stopped goes on; what rows hold is read from the runs' summaries. What the
          frozen blocks give is computed once for all runs (`run.frozen_folder`).
Not here: the demonstration itself (`examples/pretrained.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

FEDLM = "from fedlm.cli.main import main; main()"


def recipe(asked: Any, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the recipe of one run; an infinite epsilon is no noise."""
    clients = json.loads((asked.out / "store" / "store.json").read_text())["train_clients"]
    cohort = min(asked.cohort, clients // asked.rounds)
    private: dict[str, Any] = {}
    law = {"sampling": "fixed"}
    if math.isfinite(epsilon):
        law = {"sampling": "spaced"}
        private = {
            "mechanism": "blt",
            "epsilon": epsilon,
            "delta": asked.delta,
            "min_separation": asked.rounds - 1,
            "clip_norm": asked.clip_norm,
        }
    base = asked.base or asked.folder / "base"
    return {
        "data": {
            "store": str((asked.out / "store").resolve()),
            "sequence_length": 64,
            "layout": "windows",
        },
        "model": {"init_from": str(base.resolve())},
        "client": {
            "optimizer": "adam",
            "learning_rate": asked.learning_rate,
            "batch_size": 8,
            "max_examples": 8,
            "weight": "uniform",
        },
        "server": {
            "optimizer": "fedavg",
            "learning_rate": 1.0,
            "rounds": asked.rounds,
            "cohort": cohort,
            "evaluate_every": asked.rounds,
            "evaluate_rows": 0,
            **law,
        },
        "privacy": private,
        "wire": {
            "trainable": "lora",
            "rank": asked.rank,
            "alpha": 2.0 * asked.rank,
            "targets": ["*.attention.value"],
            "last_blocks": asked.last_blocks,
        },
        "run": {
            "seed": seed,
            "devices": 1,
            "baselines": False,
            "trackers": [],
            "checkpoint_every": 1,
            "cache_frozen": asked.megabytes,
            "frozen_folder": str((asked.out / "frozen").resolve()),
        },
    }


def prepare(asked: Any) -> None:
    """Make the store of the first messages of every sender, if it is not there."""
    if (asked.out / "store" / "store.json").is_file():
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "text.jsonl"
    with open(file, "w", encoding="utf-8") as out:
        for line in (asked.folder / "chitchat.jsonl").read_text().splitlines():
            sender = json.loads(line)
            sender["text"] = "\n".join(sender["text"].splitlines()[: asked.messages])
            out.write(json.dumps(sender) + "\n")
    tokenizer = (asked.base or asked.folder / "base") / "tokenizer.json"
    fedlm("prepare", str(file), "--tokenizer", str(tokenizer), "--test-clients", "0.06",
          "--validation", "0", "--out", str(asked.out / "store"))  # fmt: skip


def fedlm(*command: str) -> None:
    subprocess.run([sys.executable, "-c", FEDLM, *command], check=True, stdout=subprocess.DEVNULL)


def summary_of(asked: Any, epsilon: float, seed: int) -> dict[str, Any]:
    """Train, go on, or only read; return the summary of a run."""
    name = f"{f'epsilon-{epsilon:g}' if math.isfinite(epsilon) else 'plain'}-{seed}"
    out = asked.out / name
    if not (out / "summary.json").is_file():
        file = asked.out / f"{name}.toml"
        file.write_text(tomli_w.dumps(recipe(asked, epsilon, seed)), encoding="utf-8")
        again = ["--resume"] if (out / "recipe.toml").is_file() else []
        fedlm("train", str(file), "--out", str(out), *again)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    print(f"{name}: {found['start_perplexity']:.2f} -> {found['perplexity']:.2f}, "
          f"{found['seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return found


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, as the other tables of docs/results.md have them."""
    more = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-llm"))
    parser.add_argument("--base", type=Path, help="a Hugging Face folder; default: FOLDER/base")
    parser.add_argument("--out", type=Path, default=Path("runs/private-adapters"))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[4.0, 10.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--plain-seeds", nargs="+", type=int, default=[0], help="without noise")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--last-blocks", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--messages", type=int, default=16, help="of each sender, the first")
    parser.add_argument("--megabytes", type=int, default=4000, help="of features that are kept")
    asked = parser.parse_args()
    prepare(asked)
    head = ["adapters", "epsilon", "seeds", "held-out perplexity", "change"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    before: list[float] = []
    rows = []
    for epsilon in (*asked.epsilons, math.inf):
        # What is without noise comes last: a table that is stopped has its private rows.
        seeds = asked.seeds if math.isfinite(epsilon) else asked.plain_seeds
        found = [summary_of(asked, epsilon, seed) for seed in seeds]
        before += [one["start_perplexity"] for one in found]
        after = [one["perplexity"] for one in found]
        told = f"{found[0]['epsilon']:.2f}" if math.isfinite(epsilon) else "no noise"
        rows.append((told, after))
    base = statistics.mean(before)  # the same rows in every run
    print(f"| none | 0 | - | {base:.2f} | |")
    for told, after in rows:
        change = f"{100 * (statistics.mean(after) / base - 1):+.1f}%"
        print(f"| last {asked.last_blocks} blocks | {told} | {len(after)} | {spread(after)} "
              f"| {change} |")  # fmt: skip


if __name__ == "__main__":
    main()
