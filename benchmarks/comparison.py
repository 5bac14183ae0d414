"""Sides of a comparison, each tuned with the same budget, then trained to the end with all seeds.

In:       a comparison file; a folder for runs.
Out:      a search per side (`fedlm tune`), a run per side and seed, `table.md` and `results.json`.
Promise:  all sides have the same budget of rounds for tuning, the same rounds, patience and seeds;
          the last figure is of text that neither tuning nor early stopping saw; killed at any
          moment, the same command goes on where it was.
Not here: what a search does (`search/tune.py`), which text chooses (`search/splits.py`).

    python -m benchmarks.comparison benchmarks/comparisons/cells.toml --out runs/cells
    python -m benchmarks.comparison benchmarks/comparisons/cells.toml --out runs/cells --only CIFG
    python -m benchmarks.comparison --list

A comparison file:

    question = "Does SI-CIFG train better than CIFG?"
    hours = 12                         # expected on two cores that are free, for all sides
    recipe = "../../recipes/irc.toml"  # relative to the file
    set = ["server.rounds=1000"]       # for all sides
    over = ["client.learning_rate=0.3,1,3"]  # what is tuned; a side may have its own
    tune_rounds = 3000                 # of all points of a side together
    tune_length = 300                  # of the longest point; 0 is as long as the run
    seeds = [0, 1, 2]
    patience = 10                      # evaluations without improvement that end a run; 0 is never
    target = 90                        # also tell rounds to this perplexity
    [[sides]]
    name = "SI-CIFG"
    set = ["model.name=si-cifg"]
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlm.core.documents import read_toml
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, nearest
from fedlm.engine.devices import use_devices
from fedlm.inference import load_params
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.journal import dumps
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.space import axes_of
from fedlm.search.sweep import FAILED, markdown, over_seeds, train_point
from fedlm.search.tune import search_settings
from fedlm.search.tune_plan import Search, plan_search
from fedlm.search.tune_results import BEST
from fedlm.training import Watcher

STORES = Path(".fedlm/stores")
FILES = Path(__file__).parent / "comparisons"
HEAD = ["side", "seeds", "perplexity, last text", "while training", "rounds", "rounds to target"]
HEAD += ["MB up per member and round", "epsilon", "diverged", "hours", "tuned"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: its changes of the recipe, and what of it is tuned."""

    name: str
    set: tuple[str, ...] = ()
    over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison file."""

    path: Path
    question: str
    hours: float
    recipe: str
    sides: tuple[Side, ...]
    set: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    tune_rounds: int = 0  # 0: nothing is tuned
    tune_length: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    patience: int = 0
    target: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def base(self) -> Path:
        return self.path.parent / self.recipe

    def search(self, side: Side) -> Search | None:
        """Return what is tuned for a side; None if nothing is."""
        if not self.tune_rounds:
            return None
        changes = (*self.set, *side.set)
        if self.tune_length:
            changes = (*changes, f"server.rounds={self.tune_length}")
        axes = axes_of(side.over or self.over)
        return plan_search(self.base, changes, over=axes or None, rounds=self.tune_rounds)

    def final(self, side: Side, best: Path | None, seed: int) -> Recipe:
        """Return the recipe of a side's run with a seed, at the settings that were found."""
        changes = (f"run.seed={seed}", f"server.patience={self.patience}")
        if best is None:
            return load(self.base, (*self.set, *side.set, *changes))
        length = load(self.base, (*self.set, *side.set)).server.rounds
        return load(best, (*changes, f"server.rounds={length}"))


def read_comparison(path: Path) -> Comparison:
    """Read and check a comparison file: all searches and runs are made, none is trained."""
    tables = read_toml(path, f"comparison {path}")
    known = Comparison.__dataclass_fields__.keys() - {"path"}
    for key in tables.keys() - known:
        raise ConfigError(f"comparison {path} has no setting {key!r}. {nearest(key, known)}")
    for key in ("question", "hours", "recipe", "sides"):
        if key not in tables:
            raise ConfigError(f"comparison {path}: expected {key}.")
    for side in tables["sides"]:
        for key in side.keys() - Side.__dataclass_fields__.keys():
            fields = Side.__dataclass_fields__
            raise ConfigError(f"comparison {path}: a side has no {key!r}. {nearest(key, fields)}")
    lists = {k: tuple(v) for k, v in tables.items() if isinstance(v, list) and k != "sides"}
    sides = tuple(
        Side(**{k: tuple(v) if isinstance(v, list) else v for k, v in side.items()})
        for side in tables["sides"]
    )
    made = Comparison(**{**tables, **lists, "sides": sides, "path": path})
    for side in sides:
        made.search(side)
        made.final(side, None, made.seeds[0])
    return made


def tuned(comparison: Comparison, side: Side, out: Path) -> Path | None:
    """Tune a side, or go on with it, and return its best recipe; None if nothing is tuned."""
    search = comparison.search(side)
    if search is None:
        return None
    folder = out / _folder(side) / "tune"
    if not (folder / BEST).is_file() or not (folder / "done").is_file():
        search_settings(search, folder, STORES, lambda label: _say(f"{side.name}: {label}"))
        write_atomically(folder / "done", b"")
    return folder / BEST


def played(comparison: Comparison, side: Side, best: Path | None, seed: int, out: Path) -> Path:
    """Train a side with a seed to its end, or go on with it, and return its run directory."""
    path = out / _folder(side) / f"seed-{seed}"
    run = splits.for_choosing(build(comparison.final(side, best, seed), STORES, out=path))
    if not (RunDirectory(path).summary.is_file() or (path / FAILED).is_file()):
        train_point(run, _say(f"{side.name}, seed {seed}"))
    return path


def last_figure(
    comparison: Comparison, side: Side, best: Path | None, seed: int, path: Path
) -> Any:
    """Return the perplexity on the text that nothing else saw; None if there is none."""
    whole: Run = build(comparison.final(side, best, seed), STORES, out=path)
    part, directory = splits.for_the_last_figure(whole), RunDirectory(path)
    if part is None or not directory.summary.is_file():
        return None
    names = whole.round.names
    weights = {
        name: directory.best
        if len(names) == 1 and directory.best.is_file()
        else directory.weights_of(name)
        for name in names
    }
    models = {
        name: load_params(whole.recipe.model, whole.store.vocabulary, file)
        for name, file in weights.items()
    }
    evaluation, split = part
    return float(evaluation.of_models(models, split)["perplexity"])


def result(comparison: Comparison, side: Side, out: Path) -> dict[str, Any]:
    """Carry out a side, and return its figures."""
    best = tuned(comparison, side, out)
    runs = []
    for seed in comparison.seeds:
        path = played(comparison, side, best, seed, out)
        facts = facts_of(path)
        seen = [(told["round"] + 1, told["perplexity"]) for told in facts.evaluated]
        goal = comparison.target or 0.0
        runs.append(
            {
                "seed": seed,
                "last": last_figure(comparison, side, best, seed, path),
                "best": min((p for _, p in seen), default=None),
                "rounds": len(facts.rounds),
                "reached": next((n for n, p in seen if p <= goal), None),
                "curve": seen,
                "member_bytes": statistics.fmean(facts.member_bytes or [0.0]),
                "epsilon": (facts.final.get("privacy") or {}).get("epsilon"),
                "diverged": (path / FAILED).is_file(),
                "seconds": float(sum(told["seconds"] for told in facts.rounds)),
            }
        )
    settings = [] if best is None else _tuned_settings(comparison, side, best)
    return {"side": side.name, "tuned": settings, "runs": runs}


def _tuned_settings(comparison: Comparison, side: Side, best: Path) -> list[str]:
    tables = load(best).model_dump()
    names = axes_of(side.over or comparison.over)
    found = [(name, tables[name.split(".")[0]][name.split(".")[1]]) for name in names]
    return [f"{name} = {value}" for name, value in found]


def row(found: dict[str, Any]) -> list[str]:
    """Return the line of a side in the table."""
    runs = found["runs"]

    def column(name: str, digits: int = 1) -> str:
        return over_seeds([run[name] for run in runs], digits)

    epsilons = [run["epsilon"] for run in runs if run["epsilon"] is not None]
    return [
        found["side"],
        str(len(runs)),
        column("last"),
        column("best"),
        column("rounds", 0),
        column("reached", 0),
        f"{statistics.fmean(run['member_bytes'] for run in runs) / 1e6:.3f}",
        f"{max(epsilons):.2f}" if epsilons else "-",
        f"{sum(run['diverged'] for run in runs)} of {len(runs)}",
        f"{sum(run['seconds'] for run in runs) / 3600:.1f}",
        ", ".join(found["tuned"]) or "-",
    ]


def _folder(side: Side) -> str:
    return side.name.lower().replace(" ", "-").replace("/", "-")


def _say(label: str) -> Watcher:
    print(label, flush=True)

    def on_round(told: Any) -> None:
        found = told.get("perplexity")
        if found is not None and math.isfinite(found):
            print(f"  round {told['round'] + 1}, perplexity {found:.1f}", flush=True)

    return Watcher(round=on_round)


def main() -> None:
    """Carry out a comparison, and print its table after every side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="one side, by its name")
    parser.add_argument("--list", action="store_true", help="comparisons and their hours")
    asked = parser.parse_args()
    if asked.list or asked.file is None:
        for file in sorted(FILES.glob("*.toml")):
            made = read_comparison(file)
            print(f"{file.stem:20} {made.hours:5.1f} h  {made.question}")
        return
    made = read_comparison(asked.file)
    out = asked.out or Path("runs") / asked.file.stem
    use_devices(0)
    found = []
    for side in made.sides:
        if asked.only in (None, side.name):
            found.append(result(made, side, out))
            told = {"question": made.question, "sides": found}
            write_atomically(out / "results.json", (dumps(told) + "\n").encode())
            write_atomically(
                out / "table.md", markdown(HEAD, [row(each) for each in found]).encode()
            )
    print(markdown(HEAD, [row(each) for each in found]))


if __name__ == "__main__":
    main()
