"""What a round of a tree costs beside its leaves' training, with `federation.resident` and without.

In:       numbers of leaves, sizes of their models, values of `federation.resident`.
Out:      a Markdown table: time and CPU time of a round, of its leaves' steps alone, what the round
          takes beside them, and the memory of both.
Promise:  a round and the same leaves' steps alone take turns in one process, so that what else the
          machine does meets both alike. Each row has a process of its own.
Not here: what trees learn (`branches.py`).

    python -m benchmarks.spilling                                          # 8, 32 and 64 leaves
    python -m benchmarks.spilling --leaves 100 --model 5M --resident 0 2   # 100 leaves of 5M

Every leaf has a little made-up text and a model of its own. *Steps alone* is the engine's work on
all leaves from models in memory. Memory is what the process holds beyond files (`RssAnon`), looked
at every 20 ms, less what it holds before the tree is made, after one that was thrown away so that
programs are compiled. Linux only.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.memory import Peak, held
from fedlm.core.types import Cohort, Start
from fedlm.recipe.build import build
from fedlm.recipe.settings import parse

MODELS = {
    "1M": {"embedding_size": 128, "hidden_size": 512, "layers": 4, "heads": 4},
    "3M": {"embedding_size": 256, "hidden_size": 1024, "layers": 4, "heads": 4},
    "5M": {"embedding_size": 320, "hidden_size": 1280, "layers": 4, "heads": 4},
}
HEAD = ["leaves", "parameters", "resident", "s a round", "s of steps alone", "beside them", "CPU s"]
HEAD += ["CPU s of steps alone", "CPU beside them", "a model, MB", "MB more", "models"]
HEAD += ["MB more, steps alone"]


def text(path: Path, leaves: int) -> None:
    """A line a client, a client a leaf."""
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for leaf in range(leaves):
            words = " ".join(f"w{n}" for n in rng.zipf(1.3, 2400) % 1000)
            line = {"client": f"c{leaf}", "groups": [f"g{leaf}"], "text": words}
            file.write(json.dumps(line) + "\n")


def measure(leaves: int, model: str, resident: int, steps: int, rounds: int) -> dict[str, Any]:
    """Play rounds, and the steps of their leaves alone, in turns."""
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
                "model": {"name": "mpt", **MODELS[model]},
                "client": {"batch_size": 8, "max_steps": steps},
                "server": {"rounds": rounds},
                "federation": {"levels": [0], "resident": resident},
                "run": {"devices": 1},
            }
        )
        made = build(recipe, Path(folder), lambda stage, done: None)
        params, config, engine = made.start(), made.round.config, made.round.engine
        host = jax.device_get(params)
        cohort = np.asarray([config.clients + node for node in config.topology.with_text])

        def alone() -> None:
            starts = [Start(host) for _ in cohort]
            for arrived in engine.updates(starts, Cohort(0, cohort)):
                jax.block_until_ready(arrived.update.delta)

        next(made.round.play(made.round.init(params), range(1)))  # compiles
        alone()
        gc.collect()
        before, spent = held("RssAnon"), []
        with Peak() as peak:
            # The rounds come first: what they leave behind is not the steps' memory.
            playing = made.round.play(made.round.init(params), range(rounds))
            for _ in range(rounds):
                spent.append(_timed(partial(next, playing)) + _timed(alone))
        del playing
        gc.collect()
        begin = held("RssAnon")
        with Peak() as of_steps:
            alone()
        count = sum(x.size for x in jax.tree.leaves(params))
        figures = [statistics.median(column) for column in zip(*spent, strict=True)]
        return {
            "parameters": count,
            "figures": figures,  # wall and CPU seconds of a round, and of steps alone
            "one": 4 * count / 1e6,
            "more": peak.most - before,
            "more_alone": of_steps.most - begin,
        }


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def row(leaves: int, resident: int, told: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    wall, cpu, wall_alone, cpu_alone = told["figures"]
    cells = [str(leaves), f"{told['parameters']:,}", str(resident or "all")]
    cells += [f"{wall:.2f}", f"{wall_alone:.2f}", f"{wall / wall_alone - 1:.1%}"]
    cells += [f"{cpu:.2f}", f"{cpu_alone:.2f}", f"{cpu / cpu_alone - 1:.1%}"]
    cells += [f"{told['one']:.1f}", f"{told['more']:.0f}", f"{told['more'] / told['one']:.1f}"]
    return [*cells, f"{told['more_alone']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--model", default="3M", choices=MODELS)
    parser.add_argument("--resident", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--steps", type=int, default=8, help="of each leaf in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        given = (asked.leaves[0], asked.model, asked.resident[0], asked.steps, asked.rounds)
        print(json.dumps(measure(*given)))
        return
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for leaves in asked.leaves:
        for resident in asked.resident:
            again = [sys.executable, "-m", "benchmarks.spilling", "--one", "--model", asked.model]
            again += ["--leaves", str(leaves), "--resident", str(resident)]
            again += ["--steps", str(asked.steps), "--rounds", str(asked.rounds)]
            told = json.loads(subprocess.check_output(again, text=True).splitlines()[-1])
            print("| " + " | ".join(row(leaves, resident, told)) + " |", flush=True)


if __name__ == "__main__":
    main()
