"""Rounds of fedlm and of its peers in turns, numerics first: `make bench-peers`.

In:       names of workloads and contenders.
Out:      `runs/bench/peers.json`, and a table on standard output.
Promise:  same start, data and steps for all; a contender whose change of the first round differs
          from the oracle's by more than `--agree` is reported and not timed; rounds are taken in
          turns, the first of each is a warm-up.
Not here: workloads (`workload.py`), processes (`contenders.py`), models (`*_round.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import workload
from benchmarks.peers.contenders import (
    CONTENDERS,
    ORACLE,
    OURS,
    Contender,
    PeerError,
    Worker,
    interpreter,
)

AGREE = 1e-4
HEAD = ["contender", "s a round", "clients/s", "its time / fedlm's", "relative difference"]


def relative_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The length of the difference of two changes over the length of the first.

    >>> relative_difference({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 4.5])})
    0.1
    """
    apart = size = 0.0
    for name, value in ours.items():
        a, b = value.astype(np.float64), theirs[name].astype(np.float64)
        apart += float(np.sum(np.square(a - b)))
        size += float(np.sum(np.square(a)))
    return (apart / size) ** 0.5


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def spread(values: list[float]) -> str:
    """Median, lowest and highest.

    >>> spread([3.0, 1.0, 2.0])
    '2 (1-3)'
    """
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """The facts that a number means nothing without."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


# ---- one workload -----------------------------------------------------------------------------


def oracle(folder: Path) -> dict[str, np.ndarray]:
    """The change of one round by the loop engine, a member and a batch at a time."""
    worker = Worker("oracle", ORACLE, folder, folder / "oracle.log")
    try:
        worker.round()
        return read(worker.change(folder / "oracle.npz"))
    finally:
        worker.stop()


def admit(
    name: str, how: Contender, folder: Path, truth: dict[str, np.ndarray], agree: float
) -> tuple[Worker | None, dict[str, Any]]:
    """Starts a contender and lets it take its warm-up round; it stays if it agrees."""
    slug = name.replace(", ", "-").replace(" ", "-")
    facts: dict[str, Any] = {"contender": name}
    if not interpreter(how.environment).exists():
        return None, {**facts, "left_out": f"no environment {interpreter(how.environment)}"}
    worker = None
    try:
        worker = Worker(name, how, folder, folder / f"{slug}.log")
        facts.update(worker.facts, warm_up=worker.round())
        change = read(worker.change(folder / f"{slug}.npz"))
        facts["relative_difference"] = relative_difference(truth, change)
    except PeerError as error:
        facts["left_out"] = str(error)
    if "left_out" not in facts and not facts["relative_difference"] <= agree:
        facts["left_out"] = f"differs by {facts['relative_difference']:.1e}, more than {agree:.0e}"
    if "left_out" in facts and worker is not None:
        worker.stop()
        worker = None
    said = f"left out: {facts['left_out']}" if "left_out" in facts else "agrees"
    say(f"  {name}: {said} ({facts.get('relative_difference', float('nan')):.1e})")
    return worker, facts


def take_turns(workers: list[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each contender's rounds, and the processor time of all others meanwhile."""
    found: dict[str, dict[str, list[float]]] = {
        w.name: {"seconds": [], "others_used": []} for w in workers
    }
    for turn in range(rounds):
        # Another order each time: nobody always follows the same neighbour.
        for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
            others = [w for w in workers if w is not worker]
            before = sum(w.seconds_used() for w in others)
            seconds = worker.round()
            used = sum(w.seconds_used() for w in others) - before
            found[worker.name]["seconds"].append(seconds)
            found[worker.name]["others_used"].append(used)
        say(f"  turn {turn + 1} of {rounds}")
    return found


def compare(folder: Path, names: list[str], rounds: int, agree: float) -> list[dict[str, Any]]:
    """Everything about one workload: who agrees, and how long their rounds take."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    truth = oracle(folder)
    workers, facts = [], []
    try:
        for name in names:
            how = CONTENDERS[name]
            if how.only and settings["architecture"] not in how.only:
                continue
            worker, about = admit(name, how, folder, truth, agree)
            facts.append(about)
            workers += [worker] if worker else []
        times = take_turns(workers, rounds)
        for worker in workers:
            last = read(worker.change(folder / "last.npz"))
            about = next(f for f in facts if f["contender"] == worker.name)
            about.update(times[worker.name])
            about["finite"] = all(bool(np.all(np.isfinite(v))) for v in last.values())
    finally:
        for worker in workers:
            worker.stop()
    return facts


# ---- the table --------------------------------------------------------------------------------


def table(facts: list[dict[str, Any]], members: int) -> list[list[str]]:
    """A row a contender; ratios are taken turn by turn."""
    ours = next((f["seconds"] for f in facts if f["contender"] == OURS and "seconds" in f), None)
    rows = []
    for about in facts:
        apart = about.get("relative_difference")
        shown = "-" if apart is None else f"{apart:.0e}"
        if "seconds" not in about:
            rows.append([about["contender"], about["left_out"], "-", "-", shown])
            continue
        seconds = about["seconds"]
        ratio = [b / a for a, b in zip(ours, seconds, strict=True)] if ours else None
        rows.append(
            [
                about["contender"],
                spread(seconds),
                spread([members / s for s in seconds]),
                spread(ratio) if ratio else "-",
                shown,
            ]
        )
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Lines of a table.

    >>> print(markdown([["a", "b"], ["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def page(results: dict[str, Any]) -> str:
    """All tables, with what they need to be understood."""
    seen = results["machine"]
    parts = [
        f"`{results['command']}`: {seen['processor']}, {seen['cores']} cores; medians "
        f"(lowest-highest) of {results['rounds']} rounds each, taken in turns after a warm-up."
    ]
    used: dict[str, str] = {}
    for found in results["workloads"].values():
        for about in found["contenders"]:
            used.update(about.get("versions", {}))
    parts.append("Versions: " + ", ".join(f"{k} {v}" for k, v in sorted(used.items())) + ".")
    for name, found in results["workloads"].items():
        work = found["work"]
        parts.append(
            f"{name}: {work['parameters']:,} parameters, {work['members']} clients, "
            f"{work['examples']:,} rows, {work['steps']:,} steps, {work['tokens']:,} targets a "
            "round"
        )
        parts.append(markdown([HEAD, *table(found["contenders"], work["members"])]))
    return "\n\n".join(parts) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="clients as JSON lines")
    parser.add_argument("--workloads", nargs="+", choices=workload.PLANS, default=[*workload.PLANS])
    parser.add_argument("--peers", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agree", type=float, default=AGREE)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/peers.json"))
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    said = shlex.join(sys.argv[1:])
    results: dict[str, Any] = {
        "command": f"python -m benchmarks.peers.run {said}".strip(),
        "machine": machine(),
        "began": time.strftime("%Y-%m-%d %H:%M"),
        "rounds": asked.rounds,
        "workloads": {},
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for name in asked.workloads:
        plan = replace(workload.PLANS[name], members=asked.members)
        store = workload.store_for(plan, asked.source, Path(".fedlm/stores"))
        folder = (asked.out.parent / asked.out.stem / name).resolve()
        work = workload.write(plan, store, folder)
        say(f"{name}: {work}")
        found = compare(folder, asked.peers, asked.rounds, asked.agree)
        results["workloads"][name] = {"work": work, "contenders": found}
        asked.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
