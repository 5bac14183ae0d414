"""How fast text becomes a store: `python -m benchmarks.preparing SOURCE [--megabytes 10 100]`.

In:       a source of real text with clients.
Out:      a Markdown table on stdout and in a file: CPU seconds and MB/s of text per core, for each
          kind of tokenizer, size of text and number of processes.
Promise:  each row is `fedlm prepare` as a process of its own, without its imports, which the last
          line of the table's foot tells; CPU seconds are those of all its processes, so they
          hardly know what else the machine does. Stores of the same text are the same, byte for
          byte, whatever the number of processes: the benchmark stops if they are not.
Not here: rounds on the store (`population.py`).

A size beyond that of the source repeats it: the lines of each client of a copy stand in another
order, and every copy of a client has a name of its own. The *marginal* rate is that of the text by
which a size is larger than the smallest one: start-up, and what the first pieces and merges cost,
are not in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlm.corpus.sources import Document, read

HEAD = ["tokenizer", "MB", "clients", "processes", "CPU s", "wall s", "MB per CPU s"]
HEAD += ["marginal, MB per CPU s", "peak MB"]
STAGES = {
    "reading": "read",
    "text of client": "cut",
    "vocabulary": "vocabulary",
    "tokens": "tokens",
}


def grown(source: str, megabytes: float) -> Iterator[Document]:
    """Yield a source again and again until there is enough text, with new names and orders."""
    clients, left, copy = list(read(source)), megabytes * 1e6, 0
    while True:
        for client, groups, text in clients:
            if left <= 0:
                return
            lines = text.split("\n")
            if copy:
                random.Random(f"{copy} {client}").shuffle(lines)
            shuffled = "\n".join(lines)
            left -= len(shuffled.encode())
            yield Document(f"{client}#{copy}", groups, shuffled)
        copy += 1


def write_text(source: str, megabytes: float, file: Path) -> tuple[float, int]:
    """Write a source of a size as JSON lines; return its megabytes of text, and its clients."""
    size = clients = 0
    with open(file, "w", encoding="utf-8") as out:
        for client, groups, text in grown(source, megabytes):
            told = {"client": client, "groups": list(groups), "text": text}
            out.write(json.dumps(told, ensure_ascii=False) + "\n")
            size, clients = size + len(text.encode()), clients + 1
    return size / 1e6, clients


def prepare(text: Path, out: Path, kind: str, vocabulary: int, workers: int) -> dict[str, Any]:
    """Prepare a store in a process of its own; return what it cost."""
    asked = json.dumps([str(text), str(out), kind, vocabulary, workers])
    command = [sys.executable, "-m", "benchmarks.preparing", "--one", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one(text: str, out: str, kind: str, vocabulary: int, workers: int) -> dict[str, Any]:
    """Prepare a store in this process; return what it cost without imports."""
    from fedlm.corpus import store as stores

    imports, stages = _cpu(), dict.fromkeys(STAGES.values(), 0.0)
    began, last, stage = time.perf_counter(), imports, STAGES["reading"]

    def progress(now: str, done: int) -> None:
        nonlocal last, stage
        if STAGES[now] != stage:
            here = _cpu()
            stages[stage] += here - last
            last, stage = here, STAGES[now]

    settings = stores.StoreSettings(tokenizer=kind, vocabulary=vocabulary)
    made = stores.write(read(text), Path(out), settings, progress, workers=workers)
    stages[stage] += _cpu() - last
    return {
        "cpu": _cpu() - imports,
        "wall": time.perf_counter() - began,
        "imports": imports,
        "peak": _peak(),
        "stages": stages,
        "digests": [made.manifest["clients_sha256"], made.manifest["tokenizer_sha256"]],
    }


def _cpu() -> float:
    """CPU seconds of this process, and of those that it began and that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _peak() -> float:
    """The largest resident memory of this process and of its largest child together, in MB."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_maxrss for used in both) / 1024


def table(asked: argparse.Namespace) -> str:
    """Prepare stores of all sizes; return the table and, below it, what each stage costs."""
    rows, notes, seen = [HEAD, ["---"] * len(HEAD)], [], {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        texts = [Path(folder) / f"{size:g}.jsonl" for size in sorted(asked.megabytes)]
        sizes = [write_text(asked.source, float(text.stem), text) for text in texts]
        for kind, workers in itertools.product(asked.tokenizer, asked.workers):
            least = None
            for text, (size, clients) in zip(texts, sizes, strict=True):
                out = Path(folder) / f"store-{kind}-{workers}-{text.stem}"
                told = prepare(text, out, kind, asked.vocabulary, workers)
                if seen.setdefault((kind, text), told["digests"]) != told["digests"]:
                    sys.exit(f"{kind}, {size:.0f} MB: {workers} processes made another store.")
                least = least or (size, told["cpu"])
                rows.append([kind, f"{size:.1f}", f"{clients:,}", str(workers)])
                rows[-1] += _figures(size, told, *least)
                notes.append(
                    f"* {', '.join(rows[-1][:2])} MB, processes: {workers}. {_spent(size, told)}"
                )
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", *notes])


def _figures(size: float, told: dict[str, Any], least: float, least_cpu: float) -> list[str]:
    cpu, more = told["cpu"], "-"
    if size > least:
        more = f"{(size - least) / (cpu - least_cpu):.1f}"
    return [f"{cpu:.2f}", f"{told['wall']:.2f}", f"{size / cpu:.1f}", more, f"{told['peak']:.0f}"]


def _spent(size: float, told: dict[str, Any]) -> str:
    each = (f"{name} {1e3 * seconds / size:.1f}" for name, seconds in told["stages"].items())
    return f"CPU ms per MB: {', '.join(each)}; imports before it: {told['imports']:.1f} s in all."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?")
    parser.add_argument("--tokenizer", nargs="+", default=["words", "bpe"])
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--megabytes", nargs="+", type=float, default=[10, 100])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where texts and stores are made and removed")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/preparing.md"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*json.loads(asked.one))))
        return
    found = table(asked)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(found + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
