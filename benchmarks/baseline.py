"""Ratios of a benchmark beside those of a committed file: `python -m benchmarks.baseline`.

In:       `runs/bench/ratios.json`, which benchmarks write; `benchmarks/baseline.json`.
Out:      a table; exit code 1 if a ratio fell by more than the tolerance that the baseline states.
Promise:  only ratios that were taken in turns in one run are compared, never seconds: another
          machine, or a busy one, moves both sides of a ratio. In every ratio more is better.
Not here: what is measured (`engines.py`, `evaluation.py`).

`--write` makes the measured ratios the baseline: on a quiet machine, as a change to be reviewed.
Ratios that were not measured again stay as they were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RATIOS, BASELINE = Path("runs/bench/ratios.json"), Path(__file__).with_name("baseline.json")
TOLERANCE = 0.15
HEAD = ["ratio", "baseline", "now", "change", ""]


class Compared(NamedTuple):
    """One ratio, as it was and as it is."""

    name: str
    before: float | None  # None: it is new
    now: float | None  # None: it was not measured

    @property
    def change(self) -> float | None:
        """By which part it grew."""
        return None if self.before is None or self.now is None else self.now / self.before - 1


def keep(benchmark: str, facts: str, found: Mapping[str, float], path: Path = RATIOS) -> None:
    """Write the ratios of a benchmark beside those of others, in place of its earlier ones."""
    known = _read(path)["ratios"] if path.is_file() else {}
    mine = {f"{benchmark}: {name}": round(float(value), 4) for name, value in found.items()}
    others = {k: v for k, v in known.items() if not k.startswith(f"{benchmark}: ")}
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"measured": {"on": facts, "commit": _commit()}, "ratios": {**others, **mine}}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def compare(baseline: Mapping[str, float], found: Mapping[str, float]) -> list[Compared]:
    """Put the ratios of both sides beside each other, in the order of the baseline.

    >>> compare({"a": 2.0, "b": 1.0}, {"a": 1.0, "c": 3.0})[0].change
    -0.5
    """
    names = [*baseline, *(name for name in found if name not in baseline)]
    return [Compared(name, baseline.get(name), found.get(name)) for name in names]


def fallen(compared: list[Compared], tolerance: float) -> list[Compared]:
    """Return the ratios that fell by more than the tolerance."""
    return [one for one in compared if one.change is not None and one.change < -tolerance]


def table(compared: list[Compared], tolerance: float) -> str:
    """Return the comparison as a table."""
    worse = set(fallen(compared, tolerance))
    rows = [HEAD, ["---"] * len(HEAD)]
    for one in compared:
        change = "-" if one.change is None else f"{one.change:+.0%}"
        said = "fell" if one in worse else "new" if one.before is None else ""
        said = "not measured" if one.now is None else said
        cells = ["-" if value is None else f"{value:.3g}" for value in (one.before, one.now)]
        rows.append([one.name, *cells, change, said])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _read(path: Path) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(v, int | float) and v > 0 for v in made["ratios"].values()):
            raise ValueError("a ratio is no positive number")
        return made
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path} cannot be read ({error}): run make bench, or remove it."
        ) from None


def _commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return said.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", type=Path, default=RATIOS, help="what was measured")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--write", action="store_true", help="take what was measured as baseline")
    asked = parser.parse_args()
    found, known = _read(asked.ratios), _read(asked.baseline)
    tolerance = float(known.get("tolerance", TOLERANCE))
    compared = compare(known["ratios"], found["ratios"])
    print(f"{found['measured']['on']}; {found['measured']['commit']}\n")
    print(table(compared, tolerance))
    if asked.write:
        ratios = {**known["ratios"], **found["ratios"]}
        made = {"tolerance": tolerance, "measured": found["measured"], "ratios": ratios}
        asked.baseline.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return
    worse = fallen(compared, tolerance)
    for one in worse:
        print(
            f"{one.name} fell from {one.before:.3g} to {one.now:.3g}: more than {tolerance:.0%}. "
            "Measure again on a quiet machine; if it stays, find the change that did it.",
            file=sys.stderr,
        )
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
