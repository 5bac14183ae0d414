"""A federation over TLS for hours, one of its processes killed every minute.

    python -m benchmarks.soak --minutes 120 --rounds 1000 --out soak
    python -m benchmarks.soak --minutes 2 --rounds 12 --run-rounds 6 --out soak     a short one

In:       how long, how many rounds at least, an empty folder.
Out:      progress on the terminal; `OUT/soak.jsonl`, a line per sample, kill, recovery and run; at
          the end tables and a verdict (exit code 1 if anything failed).
Promise:  every check of the verdict can fail (`tests/benchmarks/test_soak.py`); nothing is repaired
          by hand: a killed process is started again by its documented command, as systemd would.
Not here: the federation (`fedlm federation serve`, `fedlm node join`, `fedlm federation train`).

Four nodes hold the State of the Union addresses, the server a tokenizer and no text. Runs follow
each other, plain and private in turn, until time and rounds are reached. `west` is never killed, so
that one process shows its memory over the whole time. Checked: each run's journal has every round
once; a private run's ledger too; a node that counted in a round has it in its own ledger, and under
a plan with one question; a plain run's model is, to the bit, that of its simulation, in which
nobody was killed; parameters are finite and the perplexity of plain runs falls; memory and disk of
the last third are those of the first; no process ended that was not killed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedlm.corpus.shard import deal
from fedlm.corpus.tokenizer_file import write_tokenizer
from fedlm.deploy import workspace
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.server_app import RUN_ID
from fedlm.recipe.build import build
from fedlm.recipe.parts import open_store
from fedlm.recipe.settings import parse
from fedlm.record import journal
from fedlm.record.directory import RunDirectory
from fedlm.training import train as simulate

NODES = ("east", "north", "south", "west")
WITNESS = "west"  # never killed
KILL_SECONDS, SAMPLE_SECONDS = 60.0, 30.0
RESTART_SECONDS = 2.0  # that a supervisor waits
STUCK_SECONDS = 900.0  # without a new round: the soak gives up
WARM_SECONDS = 45.0  # before a process counts in the comparison of memory
GROWTH = 1.15  # the last third may hold so many times what the first did,
SPARE_MB = {"memory": 16.0, "disk": 2.0}  # and so much more
RECORDS = ("journal.jsonl", "nodes.jsonl", "ledger.jsonl", "history.jsonl")  # grow by design
Facts = dict[str, Any]


# ---- checks: each returns sentences about what is wrong ----------------------------------------


def round_faults(entries: Iterable[Mapping[str, Any]], rounds: int, what: str) -> list[str]:
    """Compare the rounds of a journal or ledger with 0, 1, ..., each exactly once, in order."""
    found = [int(entry["round"]) for entry in entries if entry["kind"] == "round"]
    counts = Counter(found)
    gaps = sorted(set(range(rounds)) - counts.keys())
    double = sorted(number for number, count in counts.items() if count > 1)
    beyond = sorted(number for number in counts if not 0 <= number < rounds)
    faults = [
        f"{what}: {name} {some[:5]}"
        for name, some in (("missing", gaps), ("twice", double), ("beyond the end", beyond))
        if some
    ]
    if not faults and found != sorted(found):
        faults.append(f"{what}: rounds are out of order")
    return faults


def answer_faults(
    rounds: Iterable[Mapping[str, Any]],
    ledgers: Mapping[str, Iterable[Mapping[str, Any]]],
    run: str,
    *,
    private: bool,
) -> list[str]:
    """Compare who counted in each round with what the nodes' own ledgers say they answered."""
    asked: dict[str, dict[int, set[str]]] = {name: {} for name in ledgers}
    for name, entries in ledgers.items():
        for entry in entries:
            if entry["kind"] == "answer" and entry["run"] == run:
                asked[name].setdefault(entry["round"], set()).add(entry["question"])
    faults = [
        f"round {stats['round']}: {name} counted, and its ledger has no answer"
        for stats in rounds
        for name in stats["answered"]
        if stats["round"] not in asked[name]
    ]
    for name, rounds in asked.items() if private else ():
        several = [number for number, questions in rounds.items() if len(questions) > 1]
        faults += [f"{name} answered private rounds {several[:5]} twice"] if several else []
    return faults


def lines_of(ledger: Path) -> list[Facts]:
    """Return the whole lines of a ledger, without those that a kill cut short."""
    lines = ledger.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if not line.endswith(b"#cut")]


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last third of values in order of time."""
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


def growth_fault(what: str, name: str, values: Sequence[float]) -> list[str]:
    """Say if megabytes of `memory` or `disk` grew between the first and the last third."""
    first, last = thirds(values)
    if last <= GROWTH * first + SPARE_MB[what]:
        return []
    return [f"{what} of {name} grew from {first:.1f} to {last:.1f} MB"]


def growth_with_age(samples: Iterable[Mapping[str, Any]], role: str) -> float:
    """Return the megabytes per hour by which a process grows, over all its lives."""
    lives: dict[float, list[tuple[float, float]]] = {}
    for sample in samples:
        if role in sample["memory"]:
            born = round(sample["seconds"] - sample["age"][role])
            life = next((b for b in lives if abs(b - born) < SAMPLE_SECONDS / 2), born)
            lives.setdefault(life, []).append((sample["age"][role], sample["memory"][role]))
    above = below = 0.0
    for points in lives.values():
        ages, sizes = np.array(points).T
        above += float(np.dot(ages - ages.mean(), sizes - sizes.mean()))
        below += float(np.dot(ages - ages.mean(), ages - ages.mean()))
    return 3600 * above / below if below else math.nan


def record_fault(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say if records take more bytes per round at the end than at the beginning."""
    points = [(s["rounds"], s["disk"]["records"]) for s in samples if s["rounds"]]
    third = len(points) // 3
    if third < 2:
        return []
    slopes = []
    for part in (points[:third], points[-third:]):
        rounds = part[-1][0] - part[0][0]
        if rounds < 1:
            return ["records: a third of the time passed without a round"]
        slopes.append((part[-1][1] - part[0][1]) / rounds)
    if slopes[1] <= 1.5 * slopes[0] + 0.002:
        return []
    return [f"records grew from {slopes[0] * 1e3:.1f} to {slopes[1] * 1e3:.1f} kB per round"]


def model_faults(
    weights: Mapping[str, np.ndarray], first: float, last: float, *, private: bool = False
) -> list[str]:
    """Say if parameters are not finite or perplexity did not fall.

    A private run of so few clients learns nothing: there it only must be a number.
    """
    bad = [name for name, value in weights.items() if not np.isfinite(value).all()]
    faults = [f"parameters are not finite: {bad[:3]}"] if bad else []
    first = math.inf if private else first
    if not (math.isfinite(last) and last < 0.9 * first):
        faults.append(f"perplexity went from {first:.1f} to {last:.1f}")
    return faults


# ---- the federation ----------------------------------------------------------------------------


def tables_of(rounds: int, number: int) -> dict[str, dict[str, Any]]:
    """Return the recipe of a run, plain with an even number, else private, as tables."""
    tables: dict[str, dict[str, Any]] = {
        "data": {"source": "sotu", "tokenizer": "words", "vocabulary": 500, "sequence_length": 16},
        "model": {"name": "cifg", "embedding_size": 8, "hidden_size": 16},
        "client": {"batch_size": 8, "max_examples": 16, "learning_rate": 0.5},
        "server": {
            "rounds": rounds,
            "cohort": 2,
            "learning_rate": 0.02,
            "evaluate_every": max(1, rounds // 5),
            "evaluate_rows": 200,
        },
        "wire": {"upload": "uniform-8"},  # frames by member: the simulation to the bit
        "run": {
            "engine": "loop",
            "seed": number,
            "devices": 1,
            "trackers": (),
            "baselines": False,
            "checkpoint_every": 5,
        },
    }
    if number % 2:
        tables["server"] |= {"sampling": "poisson", "optimizer": "fedavgm", "learning_rate": 0.01}
        tables["privacy"] = {"mechanism": "gaussian", "clip_norm": 1.0, "noise_multiplier": 0.5}
    return tables


def server_recipe(rounds: int, number: int, tokenizer: Path) -> str:
    """Return the recipe of a server that has a tokenizer and no text, as TOML."""
    tables = tables_of(rounds, number)
    tables["data"] = {"tokenizer": str(tokenizer), "sequence_length": 16}
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


class Federation:
    """Server, nodes and the process of a run, each started by its command and started again."""

    def __init__(self, folder: Path, started: list[Child], log: Log, restart: float) -> None:
        self.folder, self.started, self.log, self.restart = folder, started, log, restart
        self.roles: dict[str, Child] = {}
        self.since: dict[str, float] = {}
        self.due: dict[str, float] = {}  # when a killed process is started again
        self.unplanned: list[str] = []
        whole = open_store(parse(tables_of(1, 0)).data, folder / "text")
        self.store = whole.path
        deal(whole, NODES, folder / "stores", held=None)
        write_tokenizer(whole.tokenizer, folder / "tokenizer")
        # Nobody is passed over, so that a run is its simulation to the bit.
        options: Facts = {"bind": "127.0.0.1", "quorum": 1.0}
        self.port = free_port()
        self.fed = workspace.init(
            folder / "fed", "soak", ["127.0.0.1"], self.port, NODES, **options
        )
        for role in ("server", *NODES):
            self.start(role)
            if role == "server":
                wait_for_port(self.port, self.roles[role])
        self.run, self.rounds_before = -1, 0

    def next_run(self, rounds: int) -> None:
        """Begin another run."""
        self.run += 1
        tokenizer = self.folder / "tokenizer" / "tokenizer.json"
        text = server_recipe(rounds, self.run, tokenizer)
        self.recipe.write_text(text, encoding="utf-8")
        self.start("train")

    @property
    def recipe(self) -> Path:
        return self.folder / f"run-{self.run}.toml"

    @property
    def out(self) -> Path:
        return self.folder / "runs" / str(self.run)

    def start(self, role: str) -> None:
        """Start a role by its documented command."""
        fed = str(self.fed.path)
        if role == "server":
            words = ["federation", "serve", fed]
        elif role == "train":
            words = ["federation", "train", fed, str(self.recipe), "--out", str(self.out)]
            words += ["--resume"]
        else:
            kit, store = self.fed.kit(role).path, self.folder / "stores" / role
            words = ["node", "join", str(kit), "--store", str(store), "--devices", "1"]
        self.roles[role] = Child(words, self.folder / f"{role}.log", self.folder)
        self.since[role] = time.monotonic()
        self.started.append(self.roles[role])
        self.due.pop(role, None)

    def kill(self, role: str) -> None:
        """Kill a role with everything that it started."""
        self.roles[role].kill()
        self.started.remove(self.roles[role])
        self.due[role] = time.monotonic() + self.restart

    def supervise(self) -> bool:
        """Start again what ended; return whether the run has come to its end."""
        for role, child in list(self.roles.items()):
            if role in self.due:
                if time.monotonic() >= self.due[role]:
                    self.start(role)
            elif not child.alive:
                if role == "train" and child.process.returncode == 0:
                    del self.roles[role]
                    return True
                said = f"{role} ended by itself ({child.process.returncode}): {child.tail()}"
                self.unplanned.append(said)
                self.log.add("unplanned", role=role, said=child.tail())
                self.log.say(said)
                self.due[role] = time.monotonic() + self.restart
        return False

    def rounds(self) -> int:
        """Return how many rounds the present run has on record."""
        file = RunDirectory(self.out).journal
        return file.read_bytes().count(b'"kind": "round"') if file.is_file() else 0

    # ---- what it takes -----------------------------------------------------------------

    def memory(self) -> dict[str, float]:
        """Return the megabytes of each process that has been there for a while."""
        groups: Counter[int] = Counter()
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it has ended
            groups[int(fields[2])] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        warm = [role for role, age in self.ages().items() if age > WARM_SECONDS]
        return {role: groups[self.roles[role].process.pid] / 1e6 for role in warm}

    def ages(self) -> dict[str, float]:
        """Return for how many seconds each process has been there."""
        now, down = time.monotonic(), self.due.keys()
        there = [role for role, child in self.roles.items() if child.alive and role not in down]
        return {role: round(now - self.since[role], 1) for role in there}

    def disk(self) -> dict[str, float]:
        """Return megabytes: the server's database, kits, records, models at nodes, runs, logs."""
        kinds = dict.fromkeys(("server", "kits", "records", "models", "runs", "logs"), 0)
        for path in self.folder.rglob("*"):
            parts = path.relative_to(self.folder).parts
            try:
                if not path.is_file():
                    continue
                seen = path.stat()
                size = seen.st_size if path.name in RECORDS else seen.st_blocks * 512
            except OSError:
                continue  # it was moved or removed
            if path.name in RECORDS:
                kind = "records"
            elif path.suffix == ".log":
                kind = "logs"
            elif parts[0] == "runs":
                kind = "runs"
            elif parts[0] == "fed" and "models" in parts:
                kind = "models"
            elif parts[0] == "fed":
                kind = "kits" if parts[1] == "nodes" else "server"
            else:
                continue
            kinds[kind] += size
        return {kind: size / 1e6 for kind, size in kinds.items()}


class Log:
    """Lines of results on disk as they come, and progress on the terminal."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, time.monotonic()
        self.entries: list[Facts] = []

    def add(self, kind: str, **facts: Any) -> Facts:
        """Append a line."""
        entry = {"kind": kind, "seconds": round(time.monotonic() - self.began, 1), **facts}
        self.entries.append(entry)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def of(self, kind: str) -> list[Facts]:
        return [entry for entry in self.entries if entry["kind"] == kind]

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        now = time.strftime("%H:%M:%S", time.gmtime())
        print(f"{now} [{minutes:3d}:{seconds:02d}] {text}", flush=True)


class Killer:
    """Kills by a seeded plan, once a minute, and measures how long recovery takes."""

    def __init__(self, federation: Federation, log: Log, seed: int) -> None:
        self.federation, self.log, self.drawn = federation, log, random.Random(seed)
        self.left: list[str] = []
        self.next = time.monotonic() + KILL_SECONDS
        self.open: dict[str, tuple[float, int, int]] = {}  # when it was killed, run, round

    def step(self, *, kills: bool) -> None:
        """Kill if it is time; note who has recovered."""
        self._recovered()
        if not kills or time.monotonic() < self.next:
            return
        self.next += KILL_SECONDS
        if not self.left:  # everybody once, then everybody again
            self.left = sorted({"server", "train", *NODES} - {WITNESS})
            self.drawn.shuffle(self.left)
        federation = self.federation
        there = [r for r in self.left if r in federation.roles and r not in federation.due]
        if not there:
            return
        role = there[-1]
        self.left.remove(role)
        at = federation.run, federation.rounds()
        federation.kill(role)
        self.open[role] = (time.monotonic(), *at)
        self.log.add("kill", role=role, run=at[0], round=at[1])
        self.log.say(f"killed {role} in round {at[1]} of run {at[0]}")

    def _recovered(self) -> None:
        for role, (since, run, number) in list(self.open.items()):
            federation = self.federation
            if role in federation.due:
                continue
            if role in NODES and federation.run == run:
                done = any(
                    role in stats["answered"] and stats["round"] > number
                    for stats in _round_stats(federation.out)[-3:]
                )
            else:
                done = federation.run != run or federation.rounds() > number
            if done:
                del self.open[role]
                took = time.monotonic() - since
                self.log.add("recovered", role=role, after=took)
                self.log.say(f"{role} is back after {took:.0f} s")


def _round_stats(run: Path) -> list[Facts]:
    try:
        return rounds_of(run)
    except Exception:  # the run has not begun
        return []


# ---- the whole ---------------------------------------------------------------------------------


def soak(
    folder: Path, *, minutes: float, rounds: int, run_rounds: int, seed: int, longest: float
) -> bool:
    """Run a federation under kills; return whether everything held."""
    folder.mkdir(parents=True)
    log = Log(folder / "soak.jsonl")
    load = os.getloadavg()
    log.add("begin", minutes=minutes, rounds=rounds, run_rounds=run_rounds, seed=seed, load=load)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    faults: list[str] = []
    with children() as started:
        federation = Federation(folder, started, log, RESTART_SECONDS)
        federation.next_run(run_rounds)
        log.say("server, nodes and the first run are started")
        killer = Killer(federation, log, seed)
        fault = _live(federation, log, killer, minutes, rounds, run_rounds, longest)
        faults += [fault] if fault else []
        faults += federation.unplanned
        log.add("sample", **_sample(federation))
    faults += _verdict(federation, log, run_rounds)
    return report(log, faults)


def _live(
    federation: Federation,
    log: Log,
    killer: Killer,
    minutes: float,
    rounds: int,
    run_rounds: int,
    longest: float,
) -> str:
    """Kill, start again and sample until time and rounds are reached; say why if it gave up."""
    began = time.monotonic()
    ends, sampled, grew, before = began + 60 * minutes, began, began, 0
    while True:
        killer.step(kills=time.monotonic() < ends)
        over = federation.supervise()
        total = federation.rounds_before + federation.rounds()
        if total != before:
            grew, before = time.monotonic(), total
        if over:
            federation.rounds_before += federation.rounds()
            log.add("run", number=federation.run, rounds=federation.rounds(), whole=True)
            log.say(f"run {federation.run} is complete; {federation.rounds_before} rounds in all")
            if time.monotonic() >= ends and federation.rounds_before >= rounds:
                return ""
            federation.next_run(run_rounds)
        if time.monotonic() - sampled >= SAMPLE_SECONDS:
            sampled = time.monotonic()
            taken = log.add("sample", **_sample(federation))
            memory = " ".join(f"{role} {size:.0f}" for role, size in taken["memory"].items())
            disk = " ".join(f"{kind} {size:.1f}" for kind, size in taken["disk"].items())
            log.say(f"{taken['rounds']} rounds; memory MB: {memory}; disk MB: {disk}")
        if time.monotonic() - grew > STUCK_SECONDS:
            return f"no new round for {STUCK_SECONDS:.0f} s"
        if time.monotonic() - began > 60 * longest:
            federation.roles["train"].end(seconds=60.0)
            log.add("run", number=federation.run, rounds=federation.rounds(), whole=False)
            return f"{total} of {rounds} rounds after {longest:.0f} minutes"
        time.sleep(0.5)


def _sample(federation: Federation) -> Facts:
    present = federation.rounds() if "train" in federation.roles else 0
    return {
        "run": federation.run,
        "rounds": federation.rounds_before + present,
        "memory": federation.memory(),
        "age": federation.ages(),
        "disk": federation.disk(),
        "load": os.getloadavg()[0],
    }


def _verdict(federation: Federation, log: Log, rounds: int) -> list[str]:
    """Check all runs, and memory and disk over time."""
    faults = []
    ledgers = {name: lines_of(federation.fed.kit(name).ledger) for name in NODES}
    for entry in log.of("run"):
        number = entry["number"]
        found = run_faults(federation, number, rounds, ledgers, entry)
        log.add("checked", number=number, faults=found)
        faults += [f"run {number}: {fault}" for fault in found]
        log.say(f"run {number}: {'as it should be' if not found else '; '.join(found)}")
    samples = log.of("sample")
    for role in ("server", "train", *NODES):
        for private in (0, 1):  # a private run needs more than a plain one
            like = [s for s in samples if s["run"] % 2 == private]
            values = [s["memory"][role] for s in like if role in s["memory"]]
            faults += growth_fault("memory", role, values) if values else []
    for kind in ("server", "kits"):
        faults += growth_fault("disk", kind, [s["disk"][kind] for s in samples])
    return faults + record_fault(samples)


def run_faults(
    federation: Federation,
    number: int,
    rounds: int,
    ledgers: Mapping[str, list[Facts]],
    entry: Mapping[str, Any],
) -> list[str]:
    """Return what is wrong with a run; one that was stopped has no model to be compared."""
    whole = entry["whole"]
    planned, rounds = rounds, rounds if whole else entry["rounds"]
    directory, private = RunDirectory(federation.folder / "runs" / str(number)), bool(number % 2)
    entries = list(journal.read(directory.journal))
    faults = round_faults(entries, rounds, "journal")
    if private:
        faults += round_faults(lines_of(directory.ledger), rounds, "ledger")
    run = (directory.path / RUN_ID).read_text(encoding="ascii").strip()
    stats = [t for t in rounds_of(directory.path) if t["round"] < rounds]
    faults += round_faults([{**t, "kind": "round"} for t in stats], rounds, "nodes")
    faults += answer_faults(stats, ledgers, run, private=private)
    if not whole:
        return faults
    figures = [e["perplexity"] for e in entries if e["kind"] == "round" and "perplexity" in e]
    start = next(e["start"]["perplexity"] for e in entries if "start" in e)
    faults += model_faults(load_file(directory.weights), start, figures[-1], private=private)
    if not private:
        summary = json.loads(directory.summary.read_text(encoding="utf-8"))
        calm = parse(tables_of(planned, number))
        out = federation.folder / "simulated" / str(number)
        same = simulate(build(calm, federation.folder / "text", out=out))
        if same is None or same["params_sha256"] != summary["params_sha256"]:
            faults.append("the model is not that of the simulation")
    return faults


def report(log: Log, faults: Sequence[str]) -> bool:
    """Print tables and the verdict."""
    samples, recovered = log.of("sample"), log.of("recovered")
    kills = Counter(entry["role"] for entry in log.of("kill"))
    print("\n| process | kills | s to recovery | longest | MB, first third | last | MB per hour |")
    print("|---|---|---|---|---|---|---|")
    for role in ("server", "train", *NODES):
        took = sorted(e["after"] for e in recovered if e["role"] == role)
        values = [s["memory"][role] for s in samples if role in s["memory"]]
        first, last = thirds(values) if values else (math.nan, math.nan)
        middle, longest = (statistics.median(took), took[-1]) if took else (math.nan, math.nan)
        print(
            f"| {role} | {kills[role]} | {middle:.0f} | {longest:.0f} | {first:.0f} | {last:.0f} | "
            f"{growth_with_age(samples, role):.1f} |"
        )
    print("\n| disk | MB, first third | last third | at the end |")
    print("|---|---|---|---|")
    for kind in samples[-1]["disk"]:
        values = [s["disk"][kind] for s in samples]
        first, last = thirds(values)
        print(f"| {kind} | {first:.1f} | {last:.1f} | {values[-1]:.1f} |")
    minutes, runs = samples[-1]["seconds"] / 60, log.of("run")
    load = statistics.median(s["load"] for s in samples)
    total = sum(run["rounds"] for run in runs)
    print(
        f"\n{minutes:.0f} minutes, {len(runs)} runs, {total} rounds, {kills.total()} kills, "
        f"{len(recovered)} recoveries; median load {load:.1f}"
    )
    for fault in faults:
        print(f"FAULT: {fault}")
    print("everything held" if not faults else f"{len(faults)} faults", flush=True)
    log.add("verdict", faults=list(faults), rounds=total, kills=kills.total())
    return not faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=1000, help="in all, at least")
    parser.add_argument("--run-rounds", type=int, default=250, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the plan of kills")
    parser.add_argument("--longest", type=float, help="minutes after which it gives up")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    held = soak(
        asked.out.resolve(),
        minutes=asked.minutes,
        rounds=asked.rounds,
        run_rounds=asked.run_rounds,
        seed=asked.seed,
        longest=asked.longest or 2 * asked.minutes,
    )
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
