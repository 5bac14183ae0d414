"""A year of daily rounds with ten million clients: `python -m benchmarks.year`.

A process per population and sampling law opens a made-up store (kept in `.bench/stores`), and plays
365 rounds without training: it draws a cohort, keeps who took part, reads the cohort's tokens, and
writes the round into a privacy ledger that is synced to disk. Then it computes epsilon of the year
from that ledger. Memory is what no file holds, from the start of Python on; *resident* has the
pages of libraries and of the store that were looked at too, which the system can take back.

Clients of the store have a few words each, and blocks of 4,096 of them have the same ones: what is
measured does not depend on the words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.memory import Peak, held
from fedlm.cohort.sampling import draw, joined, no_history
from fedlm.core.keys import generator_for
from fedlm.core.types import Sampling
from fedlm.corpus.store import CLIENTS_A_BATCH, Store, StoreSettings, _file_sha256, _schema
from fedlm.corpus.synthetic import population, write_synthetic
from fedlm.privacy.ledger import Ledger, begin_entry, round_entry, spent_of
from fedlm.privacy.plan import PrivacyPlan

STORES, DAYS = Path(".bench/stores"), 365
POPULATIONS = (342_477, 10_000_000)
LAWS = {
    "spaced": {"min_separation": 30},
    "spaced, 4 turns": {"law": "spaced", "min_separation": 30, "max_participations": 4},
    "balls-in-bins": {"min_separation": 30},
    "cyclic-poisson": {"min_separation": 30},
    "poisson": {},
    "fixed": {},
}
HEAD = ["clients", "law", "open, ms", "draw, ms", "history, ms", "read tokens, ms", "ledger, ms"]
HEAD += ["CPU ms a round", "year, s", "history, MB", "epsilon, ms", "peak MB", "resident MB"]


def store_of(clients: int) -> Path:
    """A store of made-up clients, written once, block by block."""
    path = STORES / f"year-{clients}"
    if path.exists():
        return path
    print(f"making {path}", file=sys.stderr, flush=True)
    laws = replace(
        population("synthetic:stackoverflow", CLIENTS_A_BATCH), median=1.5, spread=0.5, most=8
    )
    with tempfile.TemporaryDirectory(dir=_made(STORES), prefix=".year-") as folder:
        work = Path(folder) / "store"
        block = write_synthetic(laws, work, StoreSettings())._batches[0]
        totals = _write_blocks(work / "clients.arrow", block, clients)
        manifest = json.loads((work / "store.json").read_text(encoding="utf-8"))
        manifest |= totals | {"clients_sha256": _file_sha256(work / "clients.arrow")}
        (work / "store.json").write_text(json.dumps(manifest), encoding="utf-8")
        work.rename(path)
    return path


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_blocks(path: Path, block: pa.RecordBatch, clients: int) -> dict[str, int]:
    """Write a block again and again under new names; return the totals of its manifest."""
    block = pa.record_batch([pa.concat_arrays([column]) for column in block.columns], block.schema)
    schema = _schema(block.column("train").type.value_type.to_pandas_dtype())
    sizes = {name: np.diff(_ends(block, name)) for name in ("train", "held")}
    tested = np.array(block.column("test").to_pylist())
    totals = dict.fromkeys(
        ("clients", "train_clients", "test_clients", "train_tokens", "held_tokens"), 0
    )
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for first in range(0, clients, CLIENTS_A_BATCH):
            n = min(CLIENTS_A_BATCH, clients - first)
            names = pa.array([f"client-{first + i:08d}" for i in range(n)])
            part = pa.record_batch([pa.concat_arrays([c[:n]]) for c in block.columns], schema)
            writer.write_batch(part.set_column(0, "client", names))
            totals["clients"] += n
            totals["train_clients"] += int(np.count_nonzero(sizes["train"][:n]))
            totals["test_clients"] += int(np.count_nonzero(tested[:n]))
            totals["train_tokens"] += int(sizes["train"][:n].sum())
            totals["held_tokens"] += int(sizes["held"][:n].sum())
    return totals


def _ends(block: pa.RecordBatch, name: str) -> np.ndarray:
    return np.frombuffer(block.column(name).buffers()[1], np.int32, block.num_rows + 1)


def plan_of(law: str, clients: int, cohort: int) -> PrivacyPlan:
    """A plan whose mechanism allows the law; its noise is of no interest here."""
    sampling = Sampling(**{"law": law, "population": clients, "cohort": cohort, **LAWS[law]})
    mechanism = "banded" if LAWS[law] else "gaussian"
    matrix = (1.0, *(0.5 / k for k in range(1, 31))) if LAWS[law] else ()
    return PrivacyPlan(
        mechanism=mechanism,
        sampling=sampling,
        rounds=DAYS,
        clip_norm=1.0,
        noise_multiplier=5.0,
        delta=1e-8,
        matrix=matrix,
    )


def year(path: Path, law: str, cohort: int, days: int) -> dict[str, Any]:
    """Play a year in this process; seconds of each part in each round, and memory."""
    parts: dict[str, list[float]] = {name: [] for name in ("draw", "history", "read", "ledger")}
    with Peak() as peak, tempfile.TemporaryDirectory(dir=STORES) as folder:
        began = time.perf_counter()
        store = Store(path)
        clients = store.training_clients
        opened = time.perf_counter() - began
        plan = plan_of(law, len(clients), cohort)
        book = Ledger(Path(folder) / "ledger.jsonl")
        book.begin({k: v for k, v in begin_entry({"": plan}).items() if k != "kind"})
        history, tokens = no_history(plan.sampling), 0
        began, cpu = time.perf_counter(), time.process_time()
        for day in range(days):
            marks = [time.perf_counter()]
            rng = generator_for(0, "cohort", round=day)
            members = draw(plan.sampling, rng, day, history)
            marks.append(time.perf_counter())
            history = joined(history, members, day)
            marks.append(time.perf_counter())
            tokens += sum(len(store.train(int(clients[member]))) for member in members)
            marks.append(time.perf_counter())
            book.append(round_entry(day, "0" * 64))
            marks.append(time.perf_counter())
            for name, seconds in zip(parts, np.diff(marks), strict=True):
                parts[name].append(float(seconds))
        whole, busy = time.perf_counter() - began, time.process_time() - cpu
        # Epsilon may need libraries of its own: their memory is not that of the rounds.
        most, resident = max(peak.most, held("RssAnon")), held("VmHWM")
        began = time.perf_counter()
        epsilon = _epsilon(book)
        spent = time.perf_counter() - began
    kept = sum(part.nbytes for part in history if part is not None)
    return {
        "parts": parts,
        "open": opened,
        "whole": whole,
        "busy": busy / days,
        "history": kept / 1e6,
        "epsilon": epsilon,
        "spent": spent,
        "tokens": tokens,
        "peaks": [most, resident],
    }


def _epsilon(book: Ledger) -> float:
    return float(spent_of(book.entries()).epsilon)


def row_of(clients: int, law: str, found: dict[str, Any]) -> list[str]:
    def span(name: str) -> str:
        values = [1000 * v for v in found["parts"][name]]
        return f"{statistics.median(values):.2f} (most {max(values):.1f})"

    return [
        f"{clients:,}",
        law,
        f"{1000 * found['open']:.0f}",
        *(span(name) for name in ("draw", "history", "read", "ledger")),
        f"{1000 * found['busy']:.2f}",
        f"{found['whole']:.1f}",
        f"{found['history']:.1f}",
        f"{1000 * found['spent']:.0f}",
        *(f"{value:.0f}" for value in found["peaks"]),
    ]


def rows(asked: argparse.Namespace) -> Iterator[list[str]]:
    for clients in asked.clients:
        path = store_of(clients)
        for law in asked.laws:
            again = [sys.executable, "-m", "benchmarks.year", "--one", str(path), "--laws", law]
            again += ["--cohort", str(asked.cohort), "--days", str(asked.days)]
            found = json.loads(subprocess.check_output(again, text=True))
            yield row_of(clients, law, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=list(POPULATIONS))
    parser.add_argument("--laws", nargs="+", default=list(LAWS), choices=list(LAWS))
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/year.md"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(year(asked.one, asked.laws[0], asked.cohort, asked.days)))
        return
    made = []
    for row in rows(asked):
        made.append(row)
        print(" | ".join(row), file=sys.stderr, flush=True)
    table = "\n".join("| " + " | ".join(r) + " |" for r in [HEAD, ["---"] * len(HEAD), *made])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(table + "\n", encoding="utf-8")
    print(f"cohorts of {asked.cohort:,}, {asked.days} rounds\n\n{table}")


if __name__ == "__main__":
    main()
