"""What every contender of a comparison shares: the workload it reads and the turns it takes.

In:       a workload folder; lines on standard input: `round`, `delta PATH`; their end is the end.
Out:      one JSON line on standard output for each of them.
Promise:  a contender computes only between `round` and its answer; what libraries print goes to
          standard error, so that answers stay readable.
Not here: any framework. NumPy and the standard library only: this file runs in every environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Workload(NamedTuple):
    """The same start, data and settings for everybody."""

    settings: dict[str, Any]
    params: Arrays
    rows: list[np.ndarray]  # a member's rows in the order of its batches, without padding rows


def real_rows(batches: np.ndarray) -> np.ndarray:
    """The rows of a member's batches, without those that only fill up the last batch.

    >>> real_rows(np.array([[[1, 5], [1, 6]], [[1, 7], [0, 0]]])).tolist()
    [[1, 5], [1, 6], [1, 7]]
    """
    rows = batches.reshape(-1, batches.shape[-1])
    return rows[np.any(rows != 0, axis=1)]


def load(folder: Path) -> Workload:
    """Reads a folder that `workload.py` wrote."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    with np.load(folder / "params.npz", allow_pickle=False) as file:
        params = {name: file[name] for name in file.files}
    with np.load(folder / "batches.npz", allow_pickle=False) as file:
        rows = [real_rows(file[name]) for name in sorted(file.files)]
    return Workload(settings, params, rows)


def share(sizes: list[int], lanes: int) -> list[list[int]]:
    """Members for each of several processes, longest first to the least loaded.

    >>> share([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    lists: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for member in sorted(range(len(sizes)), key=lambda m: (-sizes[m], m)):
        lane = loads.index(min(loads))
        lists[lane].append(member)
        loads[lane] += sizes[member]
    return lists


def versions(*packages: str) -> dict[str, str]:
    """The versions of what ran."""
    found = {"python": platform.python_version()}
    return {**found, **{name: importlib.metadata.version(name) for name in packages}}


class Turns:
    """A contender's end of the conversation."""

    def __init__(self, initial: Arrays, facts: dict[str, Any]) -> None:
        self._initial = initial
        self._current: Callable[[], Arrays] = lambda: initial
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever prints from here on prints to standard error
        self._say({"ready": True, **facts})

    def begins(self) -> bool:
        """Waits for the next round and starts its clock; false if there is none."""
        for line in sys.stdin:
            order, _, path = line.strip().partition(" ")
            if order == "round":
                self._began = time.perf_counter()
                return True
            if order != "delta":
                raise ValueError(f"unknown order {order!r}")
            self._write(Path(path))
        return False

    def ends(self, current: Callable[[], Arrays]) -> None:
        """Stops the clock; `current` gives the parameters if they are asked for."""
        seconds = time.perf_counter() - self._began
        self._current = current
        self._say({"seconds": seconds})

    def _write(self, path: Path) -> None:
        """How far the parameters are from where they began."""
        now = self._current()
        np.savez(path, **{name: now[name] - start for name, start in self._initial.items()})
        self._say({"written": str(path)})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
