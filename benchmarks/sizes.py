"""The published sizes at the published rates: do they train, how fast, in how much memory?

In:       a recipe that names text (by default `recipes/irc.toml`), and a folder for runs.
Out:      a run directory per size, and a table in Markdown: loss on held-out text at the start and
          after 10, 20 and 50 rounds, seconds per round, peak memory.
Promise:  one size at a time, each `fedlm train` in a process of its own; killed, the same command
          goes on where it was; figures are read from journals.
Not here: tuning (`fedlm tune`).

    python -m benchmarks.sizes --out runs/sizes
    python -m benchmarks.sizes --out runs/sizes --only large-transformer --rounds 20

Client SGD and FedAdam at 0.001 (0.9, 0.999, 1e-8), as published for the first four (Ro et al.
2022); for the Conformer, of which none are known, the rates of the large Transformer. The MPT sizes
play one round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fedlm.models import catalog
from fedlm.record.report import facts_of
from fedlm.search.sweep import markdown

MARKS = (10, 20, 50)
MEMORY = "memory.json"


@dataclass(frozen=True)
class Cell:
    """A named size and how its clients train."""

    name: str
    learning_rate: float
    clip: float
    rounds: int | None = None  # None: as asked
    cohort: int | None = None
    examples: int | None = None


CELLS = (
    Cell("small-lstm", 1.0, 16.0),
    Cell("small-transformer", 0.1, 0.0),
    Cell("large-lstm", 1.0, 16.0),
    Cell("large-transformer", 0.5, 0.0),
    Cell("large-conformer", 0.5, 0.0),
    Cell("mpt-75m", 0.1, 0.0, 1, 2, 16),
    Cell("mpt-125m", 0.1, 0.0, 1, 2, 16),
)


def settings(cell: Cell, asked: argparse.Namespace) -> list[str]:
    """Return the changes of the recipe for one size."""
    rounds = cell.rounds or asked.rounds
    changes = {
        "model.name": cell.name,
        "client.optimizer": "sgd",
        "client.learning_rate": cell.learning_rate,
        "client.gradient_clip_norm": cell.clip,
        "client.max_examples": cell.examples or asked.examples,
        "server.optimizer": "fedadam",
        "server.learning_rate": 0.001,
        "server.beta2": 0.999,
        "server.adam_epsilon": 1e-8,
        "server.rounds": rounds,
        "server.cohort": cell.cohort or asked.cohort,
        "server.evaluate_every": min(10, rounds),
        "server.evaluate_rows": asked.rows,
        "run.checkpoint_every": min(5, rounds),
        "run.keep_checkpoints": 1,
        "run.trackers": "[]",
        "run.baselines": "false",
    }
    size = catalog.NAMED[cell.name].size
    if cell.name.startswith("mpt"):
        changes["model.vocab"] = size.vocab  # the whole embedding, whatever the text's vocabulary
    else:
        changes["data.vocabulary"] = size.vocab
    own = [f"model.{name}={getattr(size, name)}" for name in ("embedding_size", "hidden_size")]
    own += [f"model.layers={size.layers}", f"model.heads={size.heads}"]
    return [*(f"{name}={value}" for name, value in changes.items()), *own]


def train(cell: Cell, asked: argparse.Namespace) -> None:
    """Begin or go on with the run of a size; write down the most memory that it took."""
    run = asked.out / cell.name
    if (run / "summary.json").is_file():
        return
    command = [sys.executable, "-c", "from fedlm.cli.main import main; main()"]
    command += ["train", str(asked.recipe), "--out", str(run), "--resume", "--json"]
    for change in settings(cell, asked):
        command += ["--set", change]
    asked.out.mkdir(parents=True, exist_ok=True)
    with open(asked.out / f"{cell.name}.log", "ab") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if run.is_dir():
        peak = max(_peak(run) or 0, used.ru_maxrss * 1024)
        (run / MEMORY).write_text(json.dumps({"peak_bytes": peak}))
    if child.returncode:
        print(f"{cell.name} ended with {child.returncode}: see {asked.out / cell.name}.log")


def _peak(run: Path) -> int | None:
    file = run / MEMORY
    return int(json.loads(file.read_text())["peak_bytes"]) if file.is_file() else None


def row(cell: Cell, out: Path) -> list[str]:
    """Return the line of a size in the table, from its journal."""
    entry = catalog.NAMED[cell.name]
    count = f"{catalog.count(entry.architecture, entry.size) / 1e6:.1f}M"
    run = out / cell.name
    if not (run / "journal.jsonl").is_file():
        return [cell.name, count, *["-"] * (len(HEAD) - 2)]
    facts = facts_of(run)
    seen = {told["round"] + 1: told["perplexity"] for told in facts.evaluated}
    last = max(seen, default=None)
    start = facts.header["start"]["perplexity"]
    guess = math.log(facts.header["store"]["vocabulary"])
    seconds = [told["seconds"] for told in facts.rounds]
    later = seconds[1:] or seconds  # the first round compiles
    peak = _peak(run)
    return [
        cell.name,
        count,
        f"{guess:.2f}",
        _nats(start),
        *(_nats(seen.get(mark)) for mark in MARKS),
        "-" if last is None else f"{_nats(seen[last])} ({last})",
        f"{sum(later) / len(later):.1f}" if later else "-",
        "-" if peak is None else f"{peak / 1e9:.1f}",
    ]


def _nats(perplexity: float | None) -> str:
    return "-" if perplexity is None else f"{math.log(perplexity):.2f}"


def main() -> None:
    """Train the sizes that are not finished, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/sizes"))
    parser.add_argument("--recipe", type=Path, default=Path("recipes/irc.toml"))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--examples", type=int, default=64, help="rows of a client in a round")
    parser.add_argument("--rows", type=int, default=500, help="held-out rows that are scored")
    parser.add_argument("--only", action="append", choices=[cell.name for cell in CELLS])
    parser.add_argument("--table", action="store_true", help="print the table, and train nothing")
    asked = parser.parse_args()
    chosen = [cell for cell in CELLS if not asked.only or cell.name in asked.only]
    for cell in chosen:
        if not asked.table:
            print(f"{cell.name} ...", file=sys.stderr, flush=True)
            train(cell, asked)
            print(markdown(HEAD, [row(cell, asked.out)]), file=sys.stderr, flush=True)
    print(markdown(HEAD, [row(cell, asked.out) for cell in chosen]))


HEAD = ["model", "parameters", "guessing", "start", *(f"after {mark}" for mark in MARKS)]
HEAD += ["last (round)", "seconds a round", "peak GB"]


if __name__ == "__main__":
    main()
