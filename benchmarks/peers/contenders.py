"""The contenders as processes that are asked for one round at a time.

In:       a name, a workload folder.
Out:      seconds, and the file of a round's change.
Promise:  while one computes the others wait for a line of input; how much of the cores they
          use meanwhile is measured, not assumed.
Not here: what is made of the seconds (`run.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

HERE = Path(__file__).parent
ENVIRONMENTS = Path(".bench")
OURS = "fedlm"


class Contender(NamedTuple):
    """How a contender is started, on which architectures (all, if none are named), and whether it
    takes turns with fedlm alone, because it uses the cores while it waits."""

    environment: str
    script: str
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    restless: bool = False


A_PROCESS_A_CORE = ("--processes", str(len(os.sched_getaffinity(0))))
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(OURS, "fedlm_round.py"),
    "fedjax": Contender("fedjax", "fedjax_round.py"),
    "pfl": Contender("pfl", "pfl_round.py"),
    "flower": Contender("flower", "flower_round.py", restless=True),
    "torch": Contender("torch", "torch_round.py"),
    "torch, a process a core": Contender("torch", "torch_round.py", A_PROCESS_A_CORE),
    "torch, nn.LSTM": Contender("torch", "torch_round.py", ("--library",), ("lstm",)),
    "torch, nn.LSTM, a process a core": Contender(
        "torch", "torch_round.py", ("--library", *A_PROCESS_A_CORE), ("lstm",)
    ),
}


class PeerError(Exception):
    """A contender stopped answering; its own words are in its log."""


def interpreter(environment: str) -> Path:
    """The Python of a contender's environment."""
    if environment == OURS:
        return Path(sys.executable)
    return ENVIRONMENTS / environment / "bin" / "python"


def busy_seconds() -> float:
    """Processor time of everything on the machine, and what the host kept for itself."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(x) for x in first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def surroundings(wait: str) -> dict[str, str]:
    """The environment of a contender.

    OpenMP threads that spin while they wait are quickest on a quiet machine, and come to a
    standstill on a busy one: a barrier then costs a time slice.
    """
    ours = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return ours if wait == "default" else {**ours, "OMP_WAIT_POLICY": wait}


def seconds_used(pid: int) -> float:
    """Processor time of a process and everything it started and that still runs."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, left = 0, [pid]
    while left:
        one = left.pop()
        total += ticks.get(one, 0)
        left += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")


class Worker:
    """A running contender."""

    def __init__(self, name: str, how: Contender, folder: Path, wait: str = "passive") -> None:
        self.name = name
        self.slug = re.sub("[^a-zA-Z0-9]+", "-", name)
        self.log_path = folder / f"{self.slug}.log"
        self.log: IO[str] = self.log_path.open("w", encoding="utf-8")
        command = [interpreter(how.environment), HERE / how.script, folder, *how.options]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=surroundings(wait),
        )
        try:
            self.facts = self._answer()
        except PeerError:
            self.stop()
            raise

    def round(self) -> float:
        """One round; its seconds."""
        return float(self._ask("round")["seconds"])

    def change(self) -> Path:
        """Writes how far the parameters are from their start; the file."""
        path = self.log_path.with_suffix(".npz")
        self._ask(f"delta {path}")
        return path

    def seconds_used(self) -> float:
        return seconds_used(self.process.pid)

    def stop(self) -> None:
        """Ends the process, politely first: the end of its input is the end of its turns."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(timeout=60)
        self.process.stdout.close()
        self.log.close()

    def _ask(self, order: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # a library may print before the turns begin
                return json.loads(line)
        raise self._gone()

    def _gone(self) -> PeerError:
        self.process.wait()
        self.log.flush()
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing printed"
        return PeerError(f"{self.name} stopped: {last} (all of it in {self.log_path})")
