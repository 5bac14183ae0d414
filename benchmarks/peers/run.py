"""Rounds of fedlm and of its peers in turns, numerics first: `make bench-peers`.

In:       names of workloads and contenders.
Out:      `runs/bench/peers.json`, and a table on standard output.
Promise:  same start, data and steps for all; a contender that does not compute the oracle's first
          round is reported and not timed; rounds are taken in turns, after two that warm up. One
          that cannot rest (Flower's daemons) takes its turns later, with fedlm alone.
Not here: workloads (`workload.py`), processes (`contenders.py`), what counts as agreement
          (`agreement.py`), models (`*_round.py`).
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
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers import workload
from benchmarks.peers.agreement import NUDGE, Judge, Truth, read
from benchmarks.peers.contenders import (
    CONTENDERS,
    OURS,
    PeerError,
    Worker,
    busy_seconds,
    interpreter,
)
from fedlm.corpus.store import Store

Facts = dict[str, Any]

ALL = {plan.architecture for plan in workload.PLANS.values()}
AGREE = 1e-4
HEAD = ["contender", "s a round", "clients/s", "its time / fedlm's", "relative difference"]


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


class Terms(NamedTuple):
    """What all contenders of a run are held to."""

    rounds: int
    wait: str


def admit(name: str, folder: Path, judge: Judge, terms: Terms) -> tuple[Worker | None, Facts]:
    """Starts a contender; it stays if its first round agrees.

    A second round is not timed either: what comes out of the first may lie elsewhere in memory
    than the start did, and be compiled for again.
    """
    how = CONTENDERS[name]
    facts: Facts = {"contender": name}
    if not interpreter(how.environment).exists():
        return None, {**facts, "left_out": f"no environment {interpreter(how.environment)}"}
    worker = None
    try:
        worker = Worker(name, how, folder, terms.wait)
        facts.update(worker.facts, warm_up=[worker.round()])
        facts.update(judge.verdict(worker, terms.wait))
        if "left_out" not in facts:
            facts["warm_up"].append(worker.round())
    except PeerError as error:
        facts["left_out"] = str(error)
    if "left_out" in facts and worker is not None:
        worker.stop()
        worker = None
    said = f"left out: {facts['left_out']}" if "left_out" in facts else "agrees"
    say(f"  {name}: {said} ({differences(facts)})")
    return worker, facts


def timed(worker: Worker, others: list[Worker]) -> dict[str, float]:
    """One round, and which share of the cores waiting contenders and strangers used meanwhile."""
    waiting, mine, busy = (
        sum(w.seconds_used() for w in others),
        worker.seconds_used(),
        busy_seconds(),
    )
    seconds = worker.round()
    busy, mine = busy_seconds() - busy, worker.seconds_used() - mine
    waiting = sum(w.seconds_used() for w in others) - waiting
    full = seconds * len(os.sched_getaffinity(0))
    strangers = max(0.0, busy - mine - waiting)
    return {"seconds": seconds, "waiting": waiting / full, "strangers": strangers / full}


def take_turns(workers: list[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """What each contender's rounds took."""
    found: dict[str, dict[str, list[float]]] = {w.name: {} for w in workers}
    for turn in range(rounds if workers else 0):
        # Another order each time: nobody always follows the same neighbour.
        at = turn % len(workers)
        for worker in workers[at:] + workers[:at]:
            for what, value in timed(worker, [w for w in workers if w is not worker]).items():
                found[worker.name].setdefault(what, []).append(value)
        say(f"  turn {turn + 1} of {rounds}")
    return found


def judge_for(plan: workload.Plan, store: Store, folder: Path, agree: float) -> Judge:
    """The oracle's round, and its single step if the round cannot decide."""
    whole, step = Truth.of(folder), None
    if whole.bound(agree) > agree:
        workload.write(plan.one_step(), store, folder / "step")
        step = Truth.of(folder / "step")
    moved = "" if step is None else f", one step a member by {step.doubt:.1e}"
    say(f"  a nudge of the start moves the oracle's round by {whole.doubt:.1e}{moved}")
    return Judge(agree, whole, step)


def compare(folder: Path, names: list[str], judge: Judge, terms: Terms) -> list[Facts]:
    """Everything about one workload: who agrees, and how long their rounds take."""
    calm = [name for name in names if not CONTENDERS[name].restless]
    workers, facts = [], []
    try:
        for name in calm:
            worker, about = admit(name, folder, judge, terms)
            facts.append(about)
            workers += [worker] if worker else []
        note(facts, take_turns(workers, terms.rounds))
        ours = next((w for w in workers if w.name == OURS), None)
        for name in (n for n in names if n not in calm):
            worker, about = admit(name, folder, judge, terms)
            facts.append(about)
            if worker:
                workers.append(worker)
                times = take_turns([worker, ours] if ours else [worker], terms.rounds)
                about["beside"] = times.pop(OURS, {}).get("seconds")
                note(facts, times)
                finish(worker, about)
                workers.remove(worker)
        for worker in workers:
            finish(worker, next(f for f in facts if f["contender"] == worker.name))
    finally:
        for worker in workers:
            worker.stop()
    return facts


def note(facts: list[Facts], times: dict[str, dict[str, list[float]]]) -> None:
    for about in facts:
        about.update(times.get(about["contender"], {}))


def finish(worker: Worker, about: Facts) -> None:
    """Ends a contender; parameters that are no longer numbers would have made its rounds cheap."""
    last = read(worker.change())
    about["finite"] = all(bool(np.all(np.isfinite(v))) for v in last.values())
    worker.stop()


# ---- the table --------------------------------------------------------------------------------


def differences(about: Facts) -> str:
    """How far a contender was from the oracle, over a round and if need be over a step."""
    if "relative_difference" not in about:
        return "-"
    step = f" (one step {about['step_difference']:.0e})" if "step_difference" in about else ""
    return f"{about['relative_difference']:.0e}{step}"


def table(facts: list[Facts], members: int) -> list[list[str]]:
    """A row a contender; ratios are taken turn by turn."""
    ours = next((f["seconds"] for f in facts if f["contender"] == OURS and "seconds" in f), None)
    rows = []
    for about in facts:
        shown = differences(about)
        if not about.get("finite", True):
            shown += ", not finite in the end"
        if "seconds" not in about:
            rows.append([about["contender"], about["left_out"], "-", "-", shown])
            continue
        seconds = about["seconds"]
        # A contender that ran beside fedlm alone is compared with fedlm's rounds of that time.
        base = about.get("beside") or ours
        ratio = [b / a for a, b in zip(base, seconds, strict=True)] if base else None
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


def weather(results: dict[str, Any]) -> str:
    """How much of the cores was used by what should not have used them."""
    worst = {
        who: max(
            (
                share
                for found in results["workloads"].values()
                for about in found["contenders"]
                for share in about.get(who, [])
            ),
            default=0.0,
        )
        for who in ("waiting", "strangers")
    }
    calm = "" if worst["strangers"] < 0.05 else " The machine was not quiet: measure again."
    return (
        f"At most {worst['waiting']:.1%} of the cores went to contenders that waited, "
        f"{worst['strangers']:.1%} to other processes.{calm}"
    )


def page(results: dict[str, Any]) -> str:
    """All tables, with what they need to be understood."""
    seen = results["machine"]
    parts = [
        f"`{results['command']}`: {seen['processor']}, {seen['cores']} cores; medians "
        f"(lowest-highest) of {results['rounds']} rounds each, in turns, after two to warm up. "
        f"{weather(results)}"
    ]
    used = {
        f"{package} {version}"
        for found in results["workloads"].values()
        for about in found["contenders"]
        for package, version in about.get("versions", {}).items()
    }
    parts.append(f"Versions: {', '.join(sorted(used))}.")
    for name, found in results["workloads"].items():
        work = found["work"]
        parts.append(
            f"{name}: {work['parameters']:,} parameters, {work['members']} clients, "
            f"{work['examples']:,} rows, {work['steps']:,} steps, {work['tokens']:,} targets a "
            f"round; a nudge of the start by {NUDGE:.0e} moves the oracle's change by "
            f"{found['doubt']:.0e}"
        )
        parts.append(markdown([HEAD, *table(found["contenders"], work["members"])]))
    return "\n\n".join(parts) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a corpus, as in data.source")
    parser.add_argument("--workloads", nargs="+", choices=workload.PLANS, default=[*workload.PLANS])
    parser.add_argument("--peers", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agree", type=float, default=AGREE)
    parser.add_argument("--wait", choices=("passive", "default"), default="passive")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/peers.json"))
    parser.add_argument("--go-on", action="store_true", help="keep the workloads that OUT holds")
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
    if asked.go_on and asked.out.exists():
        results["workloads"] = json.loads(asked.out.read_text(encoding="utf-8"))["workloads"]
    for name in (n for n in asked.workloads if n not in results["workloads"]):
        plan = replace(workload.PLANS[name], members=asked.members)
        store = workload.store_for(plan, asked.source, Path(".fedlm/stores"))
        folder = (asked.out.parent / asked.out.stem / name).resolve()
        work = workload.write(plan, store, folder)
        say(f"{name}: {work}")
        judge = judge_for(plan, store, folder, asked.agree)
        peers = [n for n in asked.peers if plan.architecture in (CONTENDERS[n].only or ALL)]
        found = compare(folder, peers, judge, Terms(asked.rounds, asked.wait))
        doubt = judge.round.doubt
        results["workloads"][name] = {"work": work, "doubt": doubt, "contenders": found}
        asked.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
