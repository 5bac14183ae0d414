"""What a search found, and its files: `tune.json`, `table.md` and `best.toml`.

In:       a `Search`, how far its points came.
Out:      a table, a recipe with the best settings, one JSON object.
Promise:  a folder belongs to one search; the best recipe says what was tried.
Not here: the runs (`tune.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedlm.core.documents import JsonObject, read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.recipe.settings import Recipe
from fedlm.record.journal import dumps
from fedlm.search.space import Axes
from fedlm.search.sweep import Point, markdown
from fedlm.search.tune_plan import Search

PLAN, RUNS, BEST, TABLE = "tune.json", "runs", "best.toml", "table.md"


@dataclass(frozen=True)
class Trial:
    """How far one point came."""

    point: Point
    rounds: int  # played by every seed and scored
    perplexity: float  # there, on the text that chooses: the geometric mean over seeds
    diverged: int = 0  # seeds whose loss ran away
    paths: tuple[Path, ...] = ()

    @property
    def rank(self) -> tuple[float, ...]:
        """The best is the one that came furthest, and among these the one that scored lowest.

        One that diverged comes after all others, however far it came.
        """
        return (math.isinf(self.perplexity), -self.rounds, self.perplexity)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search."""

    trials: list[Trial]  # the best first
    complete: bool  # whether the last rung was reached
    edges: list[str]  # where the best value is the first or last of those tried
    last: JsonObject | None  # perplexity on the part that chose nothing; None without a model
    chosen_by: str
    spent: str | None  # what all private runs of the search cost together
    seconds: float

    @property
    def best(self) -> Trial:
        return self.trials[0]


def claim_folder(search: Search, out: Path) -> None:
    """Take a folder for this search, or go on with it; refuse the folder of another one."""
    file, facts = out / PLAN, search.facts()
    if file.is_file():
        there = read_json(file, str(file), RecordError)
        known = there if isinstance(there, dict) else {}
        if known != _plain(facts):
            differ = [name for name in facts if _plain(facts[name]) != known.get(name)]
            raise RecordError(
                f"{out} holds another search ({', '.join(differ) or 'damaged'} differs): give "
                "another --out."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} is not the folder of a search: give another --out.")
    write_atomically(file, (dumps(facts) + "\n").encode())


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def write_found(search: Search, found: Found, out: Path) -> None:
    """Write the table of a search and the recipe of its best point."""
    head, rows = trial_table(search, found)
    write_atomically(out / TABLE, markdown(head, rows).encode())
    write_atomically(out / BEST, best_recipe(search, found).encode())


def trial_table(search: Search, found: Found) -> tuple[list[str], list[list[Any]]]:
    """Return the head and the rows of the table, the best first."""
    names = list(search.axes)
    head = [*names, "rounds", "perplexity", "diverged"]
    rows = [
        [
            *(trial.point[name] for name in names),
            trial.rounds,
            "-" if math.isinf(trial.perplexity) else f"{trial.perplexity:.2f}",
            f"{trial.diverged} of {len(search.seeds)}" if trial.diverged else "no",
        ]
        for trial in found.trials
    ]
    return head, rows


def best_recipe(search: Search, found: Found) -> str:
    """Return the recipe with the settings of the best point, with comments on how it was found."""
    best = found.best
    tables = {**json.loads(json.dumps(_tables(search.recipe_of(best.point))))}
    tables.pop("tune", None)
    lines = [
        f"Found by fedlm tune from {search.recipe.name}: the best of {len(found.trials)} points, "
        f"{len(search.seeds)} seed{'s' * (len(search.seeds) > 1)} each.",
        f"Perplexity {best.perplexity:.2f} after {best.rounds} rounds on {found.chosen_by}.",
    ]
    if found.last is not None:
        lines.append(f"On text that chose nothing: {found.last['mean']:.2f}.")
    if not found.complete:
        lines.append("The budget ended before the best points were trained to the end.")
    lines += found.edges
    text = "".join(f"# {line}\n" for line in lines) + tomli_w.dumps(tables)
    return _commented(text, search.axes, best.point)


def _tables(recipe: Recipe) -> JsonObject:
    return recipe.model_dump(mode="json", exclude_none=True, exclude_unset=True)


def _commented(text: str, axes: Axes, best: Point) -> str:
    """Say behind each tuned setting what was tried."""
    out, at = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            at = line.strip("[]")
        name = f"{at}.{line.partition(' = ')[0]}"
        if name in best:
            line += f"  # tried: {', '.join(str(v) for v in axes[name])}"
        out.append(line)
    return "\n".join(out) + "\n"


def as_facts(search: Search, found: Found, out: Path) -> JsonObject:
    """Return the result as one JSON object."""
    head, rows = trial_table(search, found)
    return {
        "search": str(out),
        "recipe": str(out / BEST),
        "best": found.best.point,
        "perplexity": found.best.perplexity,
        "rounds": found.best.rounds,
        "complete": found.complete,
        "chosen_by": found.chosen_by,
        "last": found.last,
        "edges": found.edges,
        "privacy": found.spent,
        "seconds": round(found.seconds, 3),
        "head": head,
        "rows": rows,
    }
