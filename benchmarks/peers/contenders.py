"""The contenders as processes that are asked for one round at a time.

In:       a name, a workload folder.
Out:      seconds, and the file of a round's change.
Promise:  while one computes the others wait for a line of input; how much of the cores they
          use meanwhile is measured, not assumed.
Not here: what is made of the seconds (`run.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

HERE = Path(__file__).parent
ENVIRONMENTS = Path(".bench")
OURS = "fedlm"


class Contender(NamedTuple):
    """How a contender is started, and on which architectures (all, if none are named)."""

    environment: str
    script: str
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


CONTENDERS: dict[str, Contender] = {
    OURS: Contender(OURS, "fedlm_round.py"),
    "fedjax": Contender("fedjax", "fedjax_round.py"),
    "fedjax, pmap": Contender("fedjax", "fedjax_round.py", ("--backend", "pmap")),
    "pfl": Contender("pfl", "pfl_round.py"),
    "flower": Contender("flower", "flower_round.py"),
    "torch": Contender("torch", "torch_round.py"),
    "torch, a process a core": Contender(
        "torch", "torch_round.py", ("--processes", str(len(os.sched_getaffinity(0))))
    ),
    "torch, nn.LSTM": Contender("torch", "torch_round.py", ("--library",), ("lstm",)),
    "torch, nn.LSTM, a process a core": Contender(
        "torch",
        "torch_round.py",
        ("--library", "--processes", str(len(os.sched_getaffinity(0)))),
        ("lstm",),
    ),
}
ORACLE = Contender(OURS, "fedlm_round.py", ("--engine", "loop"))


class PeerError(Exception):
    """A contender stopped answering; its own words are in its log."""


def interpreter(environment: str) -> Path:
    """The Python of a contender's environment."""
    if environment == OURS:
        return Path(sys.executable)
    return ENVIRONMENTS / environment / "bin" / "python"


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

    def __init__(self, name: str, how: Contender, folder: Path, log: Path) -> None:
        self.name = name
        self.log: IO[str] = log.open("w", encoding="utf-8")
        self.log_path = log
        command = [interpreter(how.environment), HERE / how.script, folder, *how.options]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.facts = self._answer()

    def round(self) -> float:
        """One round; its seconds."""
        return float(self._ask("round")["seconds"])

    def change(self, path: Path) -> Path:
        """Writes how far the parameters are from their start."""
        self._ask(f"delta {path}")
        return path

    def seconds_used(self) -> float:
        return seconds_used(self.process.pid)

    def stop(self) -> None:
        """Ends the process, politely first."""
        if self.process.poll() is None and self.process.stdin:
            try:
                self.process.stdin.write("stop\n")
                self.process.stdin.close()
                self.process.wait(timeout=60)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self.process.terminate()
                self.process.wait(timeout=60)
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
        line = self.process.stdout.readline()
        if not line:
            raise self._gone()
        return json.loads(line)

    def _gone(self) -> PeerError:
        self.process.wait()
        self.log.flush()
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing printed"
        return PeerError(f"{self.name} stopped: {last} (all of it in {self.log_path})")
