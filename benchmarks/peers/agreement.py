"""Whether a contender computes what fedlm's oracle computes.

In:       a workload folder; the file of a contender's change.
Out:      the oracle's change, how far rounding alone can move it, and differences from it.
Promise:  the bound is the one asked for, unless the oracle itself moves further when its start
          is nudged by the last bit of a float32; then both the whole round and one step a member
          must stay within a few times the oracle's own movement.
Not here: time.

A round of the scale-invariant cell at full size is such a case: it divides by a maximum, which
jumps from unit to unit, and a nudge of 1e-7 moves the change of a round by a tenth, of one step
by less than a thousandth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.contenders import CONTENDERS, OURS, Contender, Worker

Arrays = dict[str, np.ndarray]

NUDGE = 1e-7  # about half the distance between two neighbouring float32 numbers
MARGIN = 3.0  # a round rounds more than once
LOOP = ("--engine", "loop")


def relative_difference(ours: Arrays, theirs: Arrays) -> float:
    """The length of the difference of two changes over the length of the first.

    >>> relative_difference({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 4.5])})
    0.1
    """
    apart = size = 0.0
    for name, value in ours.items():
        if theirs[name].shape != value.shape:  # or broadcasting would hide it
            return float("inf")
        a, b = value.astype(np.float64), theirs[name].astype(np.float64)
        apart += float(np.sum(np.square(a - b)))
        size += float(np.sum(np.square(a)))
    return (apart / size) ** 0.5


def read(path: Path) -> Arrays:
    """A file of arrays."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def first_change(name: str, how: Contender, folder: Path, wait: str = "passive") -> Arrays:
    """The change of one round by a contender that is started for it and stopped after it."""
    worker = Worker(name, how, folder, wait)
    try:
        worker.round()
        return read(worker.change())
    finally:
        worker.stop()


@dataclass(frozen=True)
class Truth:
    """The oracle's change of a round, and how far a nudge of the start moves it."""

    folder: Path
    change: Arrays
    doubt: float

    @classmethod
    def of(cls, folder: Path) -> Truth:
        plain = Contender(OURS, "fedlm_round.py", LOOP)
        nudged = plain._replace(options=(*LOOP, "--nudge", str(NUDGE)))
        change = first_change("oracle", plain, folder)
        moved = first_change("oracle, nudged", nudged, folder)
        return cls(folder, change, relative_difference(change, moved))

    def bound(self, agree: float) -> float:
        """How far a contender's round may be from the oracle's."""
        return max(agree, MARGIN * self.doubt)


@dataclass(frozen=True)
class Judge:
    """What a contender is held to on one workload."""

    agree: float
    round: Truth
    step: Truth | None  # one step a member; only where a whole round cannot decide

    def verdict(self, worker: Worker, wait: str) -> dict[str, Any]:
        """Differences, and why the contender is left out if it is."""
        apart = relative_difference(self.round.change, read(worker.change()))
        found: dict[str, Any] = {"relative_difference": apart}
        bound = self.round.bound(self.agree)
        if not apart <= bound:
            found["left_out"] = f"differs by {apart:.1e}, more than {bound:.0e}"
        elif self.step is not None:
            how = CONTENDERS[worker.name]
            change = first_change(worker.name, how, self.step.folder, wait)
            step = relative_difference(self.step.change, change)
            found["step_difference"] = step
            bound = self.step.bound(self.agree)
            if not step <= bound:
                found["left_out"] = f"differs by {step:.1e} in one step, more than {bound:.0e}"
        return found
