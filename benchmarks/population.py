"""What a round costs as the population grows: `python -m benchmarks.population`.

Made-up stores of 10,000, 100,000 and 342,477 clients (kept in `.bench/stores`) are opened; cohorts
are selected and packed as `fedlm train` does it, and trained on with a small CIFG. Packing is timed
after one cohort was packed; training after one was trained. Memory is what no file holds: pages of
the store that were looked at come on top, and the system can take them back. Each population has a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)

from benchmarks.memory import Peak  # noqa: E402
from benchmarks.probe import machine  # noqa: E402
from fedlm.core.types import Start  # noqa: E402
from fedlm.corpus.store import Store, StoreSettings  # noqa: E402
from fedlm.corpus.synthetic import population, write_synthetic  # noqa: E402
from fedlm.federation.round import CohortSampler, init_node, server_half  # noqa: E402
from fedlm.recipe.build import build  # noqa: E402
from fedlm.recipe.settings import parse  # noqa: E402
from fedlm.run import Run  # noqa: E402

STORES = Path(".bench/stores")
POPULATIONS, COHORTS = (10_000, 100_000, 342_477), (50, 200, 800)
MODEL = {"name": "cifg", "embedding_size": 64, "hidden_size": 256}
HEAD = ["clients", "open, ms", "cohort", "select and pack, ms", "CPU ms", "round, s", "clients/s"]
HEAD += ["packing / round", "peak MB, packing", "peak MB, training"]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def store_of(clients: int) -> Path:
    """A made-up store, made once."""
    path = STORES / f"stackoverflow-{clients}"
    if not path.exists():
        print(f"making {path}", file=sys.stderr, flush=True)
        write_synthetic(population("synthetic:stackoverflow", clients), path, StoreSettings())
    return path


def run_of(path: Path, cohort: int) -> Run:
    tables = {"data": {"store": str(path)}, "model": MODEL, "server": {"cohort": cohort}}
    return build(parse(tables), STORES, lambda stage, done: None)


def packing(made: Run, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds to select and pack each of so many cohorts: by the clock, and of the processor.

    The second hardly knows what else the machine does, so it is the one to compare populations by.
    """

    choose = CohortSampler(made.algorithm, 0, init_node(made.algorithm, made.start()))

    def prepare(r: int) -> object:
        return made.engine.prepare(r, choose(r)).members

    prepare(repeats)
    clock, processor = [], []
    for r in range(repeats):
        began = time.process_time()
        clock.append(timed(lambda r=r: prepare(r)))  # type: ignore[misc]
        processor.append(time.process_time() - began)
    return clock, processor


def rounds(made: Run, repeats: int) -> Iterator[float]:
    """Seconds of rounds whose cohorts are packed."""
    state = init_node(made.algorithm, made.start())
    choose = CohortSampler(made.algorithm, 0, state)
    for r in range(-1, repeats):  # the first, of one member, compiles
        chosen = choose(max(r, 0))
        cohort = made.engine.prepare(max(r, 0), chosen if r >= 0 else chosen[:1])

        def one(c=cohort) -> object:  # type: ignore[no-untyped-def]
            total = made.engine.total(Start(state.params), c).total
            return server_half(made.algorithm, state, total, c.members)

        seconds = timed(one)
        if r >= 0:
            yield seconds


def measure(path: Path, repeats: int, longest: int) -> dict[str, object]:
    """The figures of one population, in this process."""
    opened = [timed(lambda: Store(path).training_clients) for _ in range(5)]
    experiments = [run_of(path, cohort) for cohort in COHORTS]
    with Peak() as before:
        packed = [packing(made, max(repeats, 7)) for made in experiments]
    # Long rounds need no repetition to be told from packing.
    times = [repeats if c == COHORTS[0] else int(c <= longest) for c in COHORTS]
    with Peak() as during:
        trained = [list(rounds(e, n)) if n else [] for e, n in zip(experiments, times, strict=True)]
    peaks = [before.most, during.most]
    return {"open": opened, "pack": packed, "round": trained, "peaks": peaks}


def span(values: list[float], unit: float, digits: int) -> str:
    """Median, lowest and highest; one value alone if it was measured once."""
    low, middle, high = (f"{f(values) * unit:.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})" if len(values) > 1 else middle


def lines(clients: int, found: dict) -> Iterator[list[str]]:
    """The rows of one population."""
    for cohort, (pack, busy), seconds in zip(COHORTS, found["pack"], found["round"], strict=True):
        cost, whole = statistics.median(pack), statistics.median(seconds or [math.nan])
        yield [
            f"{clients:,}",
            span(found["open"], 1000, 0),
            str(cohort),
            span(pack, 1000, 0),
            span(busy, 1000, 1),
            span(seconds, 1, 2) if seconds else "-",
            f"{cohort / whole:.1f}" if seconds else "-",
            f"{cost / whole:.2%}" if seconds else "-",
            *(f"{value:.0f}" for value in found["peaks"]),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=list(POPULATIONS))
    parser.add_argument("--longest", type=int, default=COHORTS[-1], help="cohort to train")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/population.md"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.one, asked.repeats, asked.longest)))
        return
    rows = []
    for clients in asked.clients:
        again = [sys.executable, "-m", "benchmarks.population", "--one", str(store_of(clients))]
        again += ["--repeats", str(asked.repeats), "--longest", str(asked.longest)]
        said = subprocess.check_output(again, text=True)
        rows += list(lines(clients, json.loads(said)))
        print("\n".join(" | ".join(row) for row in rows[-len(COHORTS) :]), file=sys.stderr)
    table = "\n".join("| " + " | ".join(r) + " |" for r in [HEAD, ["---"] * len(HEAD), *rows])
    taken = f"medians (lowest-highest) of {asked.repeats} rounds, but one of each larger cohort"
    facts = f"{machine()}; {taken}; {MODEL}"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(f"{facts}\n\n{table}\n", encoding="utf-8")
    print(f"{facts}\n\n{table}")


if __name__ == "__main__":
    main()
