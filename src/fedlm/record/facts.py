"""The facts of a run, from its journal.

In:       the journal of a run directory.
Out:      `Facts`: header, rounds, final figures, and what happened to the run.
Promise:  every number is in the journal or computed from it.
Not here: pages (`report.py`, `comparison.py`), the journal's form (`journal.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlm.core.documents import JsonObject
from fedlm.core.errors import RecordError
from fedlm.record import journal

Entry = dict[str, Any]
# The two kinds of held-out text, never called by one name.
SPLITS = {"test": "held-out clients", "validation": "held-out text of training clients"}
# Names of figures in journals of earlier versions, read once under their new ones.
RENAMED = {
    "perplexity_no_oov": "perplexity_known_words",
    "accuracy_no_oov_eos": "accuracy_known_words",
    "worst_tenth": "mean_of_worst_10_percent",
}
# A start model so many times worse than the first evaluation would press a curve flat: left out.
FAR = 5.0


@dataclass
class Facts:
    """The facts of one run, from its journal."""

    name: str
    header: Entry
    rounds: list[Entry] = field(default_factory=list)
    final: Entry = field(default_factory=dict)
    history: list[Entry] = field(default_factory=list)  # extended or stopped early

    @property
    def recipe(self) -> dict[str, JsonObject]:
        """The settings, by table."""
        return self.header.get("recipe") or {}

    @property
    def rounds_planned(self) -> int | None:
        """How many rounds the run was extended to last; None if it never was."""
        found = [entry["rounds"] for entry in self.history if entry["kind"] == "extended"]
        return found[-1] if found else None

    @property
    def stopped_after(self) -> int | None:
        """After how many rounds the run stopped early; None if it did not."""
        if not self.history or self.history[-1]["kind"] != "stopped":
            return None
        return int(self.history[-1]["round"]) + 1

    @property
    def evaluated(self) -> list[Entry]:
        return [r for r in self.rounds if r.get("perplexity") is not None]

    @property
    def headline(self) -> tuple[str, Entry]:
        """The split that the run is judged by, and its figures at the end; empty before it."""
        for split in SPLITS:
            if self.final.get(split):
                return split, self.final[split]
        return self.watched, {}

    @property
    def watched(self) -> str:
        """The split that was scored in training: text of training clients where it may be told."""
        if self.final.get("test") or self.final.get("validation"):
            return "validation" if self.final.get("validation") else "test"
        plan = self.header.get("privacy")
        hidden = isinstance(plan, dict) and not plan.get("reveal")
        return (
            "test"
            if hidden or not self.recipe.get("data", {}).get("validation", 1)
            else ("validation")
        )

    @property
    def tokens(self) -> int | None:
        """The number of training tokens, or None for a private run, which does not tell it."""
        if any("tokens" not in r for r in self.rounds):
            return None
        return sum(r["tokens"] for r in self.rounds)

    @property
    def seconds(self) -> float:
        return float(sum(r["seconds"] for r in self.rounds))

    @property
    def upload_bytes(self) -> float:
        """The bytes that all members sent."""
        return float(self.rounds[-1].get("upload_bytes", 0)) if self.rounds else 0.0

    @property
    def download_bytes(self) -> float:
        """The bytes that all members received."""
        return float(self.rounds[-1].get("download_bytes", 0)) if self.rounds else 0.0

    @property
    def epsilon(self) -> float | None:
        """Epsilon at the end or so far; None without a plan, or where no finite one holds."""
        claim = self.final.get("privacy")
        if claim:
            return claim.get("epsilon")
        told = [r["epsilon"] for r in self.rounds if r.get("epsilon") is not None]
        return told[-1] if told else None

    @property
    def member_bytes(self) -> list[float]:
        """The mean upload per member in each round, in bytes."""
        totals = [0, *(r["upload_bytes"] for r in self.rounds)]
        came = [max(1, r["members"]) for r in self.rounds]
        return [(b - a) / n for a, b, n in zip(totals, totals[1:], came, strict=False)]

    def over(self, axis: str) -> tuple[list[float], list[float]]:
        """Return an axis and the perplexity over it, at the rounds that were evaluated.

        The axes are those of `AXES`.
        """
        elapsed = list(itertools.accumulate(r["seconds"] for r in self.rounds))
        each = list(itertools.accumulate(self.member_bytes)) if axis == "member_bytes" else []
        x: dict[str, Callable[[int, Entry], Any]] = {
            "round": lambda i, r: r["round"] + 1,
            "seconds": lambda i, r: elapsed[i],
            "upload_bytes": lambda i, r: r["upload_bytes"] / 1e6,
            "member_bytes": lambda i, r: each[i] / 1e6,
            "epsilon": lambda i, r: r.get("epsilon"),
        }
        points = [
            (x[axis](i, r), r["perplexity"])
            for i, r in enumerate(self.rounds)
            if r.get("perplexity") is not None and x[axis](i, r) is not None
        ]
        start = (self.header.get("start") or {}).get("perplexity")
        if axis == "round" and points and start and start < FAR * points[0][1]:
            points = [(0, start), *points]
        return [p[0] for p in points], [p[1] for p in points]


# The axes of a learning curve: what the switch says, and what the axis says.
AXES = {
    "round": ("rounds", "rounds"),
    "upload_bytes": ("bytes", "MB uploaded by all members"),
    "member_bytes": ("bytes of one member", "MB uploaded by a member of every round"),
    "seconds": ("seconds", "seconds of training"),
    "epsilon": ("epsilon", "epsilon spent"),
}


def facts_of(path: Path) -> Facts:
    """Read the journal of a run directory."""
    entries = list(journal.read(Path(path) / "journal.jsonl"))
    if not entries or entries[0]["kind"] != "header":
        raise RecordError(f"{path}: its journal has no header, so there is nothing to report.")
    facts = Facts(Path(path).name, entries[0])
    for entry in entries[1:]:
        if entry["kind"] == "round":
            facts.rounds.append(entry)
        elif entry["kind"] == "final":
            facts.final = _renamed(entry)
        elif entry["kind"] in ("extended", "stopped"):
            facts.history.append(entry)
    return facts


def _renamed(value: Any) -> Any:
    """Return figures, wherever they are in a closing line, under today's names."""
    if isinstance(value, list):
        return [_renamed(part) for part in value]
    if not isinstance(value, dict):
        return value
    figures = "perplexity" in value or "p50" in value  # not a table of groups by their names
    names = RENAMED if figures else {}
    return {names.get(name, name): _renamed(part) for name, part in value.items()}
