"""The published sizes at the published rates: do they train, how fast, in how much memory?

In:       a recipe that names text (by default `recipes/irc.toml`), and a folder for runs.
Out:      a run directory per size; a small file per finished size in `benchmarks/results/sizes`;
          a table in Markdown: loss on held-out text at the start and after 10, 20 and 50 rounds,
          seconds per round, peak memory.
Promise:  one size at a time, each `fedlm train` in a process of its own; killed, the same command
          goes on where it was; a size that is kept is not trained again, and `--table` needs
          nothing but what is kept.
Not here: tuning (`fedlm tune`).

    python -m benchmarks.sizes --out runs/sizes
    python -m benchmarks.sizes --out runs/sizes --only large-transformer --rounds 20

Client SGD and FedAdam at 0.001 (0.9, 0.999, 1e-8), as published for the first four (Ro et al.
2022); for the Conformer, of which none are known, the rates of the large Transformer. The MPT sizes
play one round of AdamW in clients and plain averaging, at the rates of their authors' public
configurations (without warm-up), and are scored on a hundredth of the text.
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

from benchmarks.cells import RESULTS, Cells, Facts, deadline, facts_digest, work_folder
from fedlm.models import catalog
from fedlm.record.facts import facts_of
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
    more: tuple[tuple[str, object], ...] = ()  # changes of the recipe


ADAMW = (
    *(("client.optimizer", "adamw"), ("server.optimizer", "fedavg"), ("server.learning_rate", 1.0)),
    *(("data.validation", 0.01), ("data.test_clients", 0.005)),
)
CELLS = (
    Cell("small-lstm", 1.0, 16.0),
    Cell("small-transformer", 0.1, 0.0),
    Cell("large-lstm", 1.0, 16.0),
    Cell("large-transformer", 0.5, 0.0),
    Cell("large-conformer", 0.5, 0.0),
    Cell("mpt-75m", 4e-4, 1.0, 1, 8, ADAMW),
    Cell("mpt-125m", 6e-4, 1.0, 1, 8, ADAMW),
)


def settings(cell: Cell, asked: argparse.Namespace) -> list[str]:
    """Return the changes of the recipe for one size."""
    rounds = cell.rounds or asked.rounds
    changes = {
        "model.name": cell.name,
        "client.optimizer": "sgd",
        "client.learning_rate": cell.learning_rate,
        "client.gradient_clip_norm": cell.clip,
        "client.max_examples": asked.examples,
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
        **dict(cell.more),
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
    run = work_folder(asked.out, cell.name, digest(cell, asked))
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


def keep(cell: Cell, asked: argparse.Namespace, cells: Cells) -> Facts | None:
    """Keep the figures of a run that ended, and return them; of one that goes on, return them."""
    run = work_folder(asked.out, cell.name, digest(cell, asked))
    if not (run / "journal.jsonl").is_file():
        return None
    told = facts_of(run)
    facts = {
        "settings": settings(cell, asked),
        "vocabulary": catalog.NAMED[cell.name].size.vocab,
        "start": told.header["start"]["perplexity"],
        "curve": [[each["round"] + 1, each["perplexity"]] for each in told.evaluated],
        "seconds": [round(each["seconds"], 2) for each in told.rounds],
        "peak_bytes": _peak(run),
    }
    if (run / "summary.json").is_file():
        cells.write(cell.name, digest(cell, asked), facts)
    return facts


def digest(cell: Cell, asked: argparse.Namespace) -> str:
    """Return the digest of all that decides a size's figures."""
    return facts_digest({"recipe": asked.recipe.name, "settings": settings(cell, asked)})


def row(cell: Cell, facts: Facts | None) -> list[str]:
    """Return the line of a size in the table."""
    entry = catalog.NAMED[cell.name]
    count = f"{catalog.count(entry.architecture, entry.size) / 1e6:.1f}M"
    if facts is None:
        return [cell.name, count, *["-"] * (len(HEAD) - 2)]
    seen = {number: found for number, found in facts["curve"]}
    last, peak = max(seen, default=None), facts["peak_bytes"]
    later = facts["seconds"][1:] or facts["seconds"]  # the first round compiles
    return [
        cell.name,
        count,
        f"{math.log(facts['vocabulary']):.2f}",
        _nats(facts["start"]),
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
    parser.add_argument("--results", type=Path, default=RESULTS / "sizes")
    parser.add_argument("--hours", type=float, help="begin no size after so many hours")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    asked = parser.parse_args()
    chosen = [cell for cell in CELLS if not asked.only or cell.name in asked.only]
    cells, over, found = Cells(asked.results), deadline(asked.hours), {}
    for cell in chosen:
        found[cell.name] = cells.read(cell.name, digest(cell, asked))
        if found[cell.name] is None and not asked.table and not over():
            print(f"{cell.name} ...", file=sys.stderr, flush=True)
            train(cell, asked)
            found[cell.name] = keep(cell, asked, cells)
            print(markdown(HEAD, [row(cell, found[cell.name])]), file=sys.stderr, flush=True)
    print(markdown(HEAD, [row(cell, found[cell.name]) for cell in chosen]))


HEAD = ["model", "parameters", "guessing", "start", *(f"after {mark}" for mark in MARKS)]
HEAD += ["last (round)", "seconds a round", "peak GB"]


if __name__ == "__main__":
    main()
