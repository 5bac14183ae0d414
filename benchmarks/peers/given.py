"""What every contender of a comparison of quality shares: the rounds it is given, what it leaves.

In:       a folder that `quality.py` wrote: `settings.json`, `params.npz`, `rounds.npz`.
Out:      `after-N.npz` beside them: the parameters after round N, for every N that is asked for;
          `facts.json`: versions, seconds.
Promise:  all contenders read the same start and, round by round, the same rows of the same members.
Not here: any framework. NumPy and the standard library only: this file runs in every environment.

`rounds.npz` has one array per member of a round, `ROUND.MEMBER`: rows x (length + 1) tokens in the
order of its batches. Column t predicts column t + 1; a target of 0 does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Members = dict[str, np.ndarray]  # rows by name
FACTS = "facts.json"


class Given(NamedTuple):
    """The same start, settings and rounds for everybody."""

    folder: Path
    settings: dict[str, Any]
    params: Arrays
    rounds: list[Members]


def write(folder: Path, settings: dict[str, Any], params: Arrays, rounds: list[Members]) -> None:
    """Write the folder of a comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"{number}.{member}": rows
        for number, members in enumerate(rounds)
        for member, rows in members.items()
    }
    np.savez(folder / "params.npz", **params)
    np.savez(folder / "rounds.npz", **named)
    (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def load(folder: Path) -> Given:
    """Read a folder that `write` made."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    rounds: dict[int, Members] = {}
    with np.load(folder / "rounds.npz", allow_pickle=False) as file:
        for name in file.files:
            number, _, member = name.partition(".")
            rounds.setdefault(int(number), {})[member] = file[name]
    ordered = [rounds[number] for number in range(len(rounds))]
    return Given(folder, settings, arrays(folder / "params.npz"), ordered)


def arrays(path: Path) -> Arrays:
    """Read a file of arrays."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def file_after(folder: Path, number: int) -> Path:
    """Return where the parameters after so many rounds are."""
    return folder / f"after-{number}.npz"


class Record:
    """What a contender leaves."""

    def __init__(self, given: Given, facts: dict[str, Any]) -> None:
        self.given, self.facts, self.began = given, facts, time.perf_counter()

    def after(self, number: int, params: Callable[[], Arrays]) -> None:
        """Write the parameters after so many rounds, if they are asked for."""
        if number in self.given.settings["marks"]:
            np.savez(file_after(self.given.folder, number), **params())

    def close(self) -> None:
        """Write the facts: all rounds were played."""
        told = {**self.facts, "seconds": round(time.perf_counter() - self.began, 1)}
        (self.given.folder / FACTS).write_text(json.dumps(told), encoding="utf-8")
