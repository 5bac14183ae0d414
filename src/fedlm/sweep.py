"""Many runs of one recipe, and one table of them.

In:       a sweep file: a base recipe, axes of settings, perhaps cases and a target.
Out:      a run directory per point, a table with mean and spread over seeds, one report.
Promise:  every point is an ordinary run that `fedlm train` would repeat; a finished point is not
          run again; one that diverged is a result, not an error.
Not here: training (`train.py`).

    recipe = "../irc.toml"              # relative to the sweep file
    target = 120                        # also report rounds to this validation perplexity
    [axes]
    "model.name" = ["si-cifg", "cifg"]  # the product of all axes is run
    "run.seed" = [0, 1, 2]              # seeds are gathered into mean and spread
    [[cases]]                           # each case is combined with every point of the axes
    name = "slow"                       # what the table calls it; else its settings are shown
    "client.learning_rate" = 0.5
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fedlm.core.errors import ConfigError, DivergenceError, nearest
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, dump, load
from fedlm.record import report
from fedlm.record.checkpoint import write_atomically
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import dumps
from fedlm.training import Watcher, train

Point = dict[str, Any]
SEED, NAME = "run.seed", "name"
KEYS = ("recipe", "target", "axes", "cases")


@dataclass(frozen=True)
class Sweep:
    """What to run."""

    recipe: Path
    points: list[Point]
    target: float | None


@dataclass(frozen=True)
class Result:
    """What came of one point."""

    point: Point
    path: Path
    perplexity: float | None  # on held-out clients; None if it diverged
    validation: float | None
    reached: int | None  # rounds to the target
    best: float | None  # the lowest validation perplexity seen on the way
    upload_bytes: float  # by one member in one round, on average
    personal: float | None  # of a tree's leaves after their own steps
    epsilon: float | None  # None without a privacy plan, and where no noise makes it infinite
    diverged: int | None  # the round in which it did


def read_sweep(path: Path) -> Sweep:
    """A sweep file, checked."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"sweep {path} is not readable: {error}.") from None
    for key in tables.keys() - set(KEYS):
        raise ConfigError(f"sweep {path} has no setting {key!r}. {nearest(key, KEYS)}")
    if not isinstance(tables.get("recipe"), str):
        raise ConfigError(f"sweep {path}: expected recipe = a path to the base recipe.")
    target, axes, cases = tables.get("target"), tables.get("axes", {}), tables.get("cases", [{}])
    _check(path, target, axes, cases)
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    points = [_called({**case, **point}, point) for case in cases for point in product]
    return Sweep(Path(path).parent / tables["recipe"], points, target)


def _called(point: Point, axes: Point) -> Point:
    """A point of a case with a name is called by it, and by what the axes add."""
    if NAME not in point:
        return point
    added = [f"{key}={value}" for key, value in axes.items() if key != SEED]
    return {**point, NAME: ",".join([str(point[NAME]), *added])}


def _check(path: Path, target: Any, axes: Any, cases: Any) -> None:
    if target is not None and (type(target) not in (int, float) or not target > 0):
        raise ConfigError(f"sweep {path}: target = {target!r}: expected a perplexity.")
    if not isinstance(axes, dict):
        raise ConfigError(f"sweep {path}: axes = {axes!r}: expected a table of lists.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep {path}: axes.{name} = {values!r}: expected a list of values.")
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise ConfigError(f"sweep {path}: cases = {cases!r}: expected tables [[cases]].")
    twice = sorted({key for case in cases for key in case} & set(axes))
    if twice:
        raise ConfigError(
            f"sweep {path}: {twice[0]} is set by a case and by an axis: expected one of them. "
            "Leave it out of [axes], and give it in every case."
        )


def recipe_of(sweep: Sweep, point: Point) -> Recipe:
    """The recipe of one point."""
    settings = {k: v for k, v in point.items() if k != NAME}
    return load(sweep.recipe, tuple(f"{k}={_literal(v)}" for k, v in settings.items()))


def _literal(value: Any) -> str:
    return "inf" if value == math.inf else json.dumps(value)


def name_of(point: Point) -> str:
    """A directory name that says what is special about a point."""
    told = {k: v for k, v in point.items() if NAME not in point or k == SEED}
    parts = [str(point[NAME])] if NAME in point else []
    parts += [f"{key}={value}" for key, value in told.items()]
    return ",".join(parts).replace("/", "_").replace(" ", "") or "base"


def carry_out(
    sweep: Sweep, out: Path, stores: Path, watcher: Callable[[str], Watcher]
) -> list[Result]:
    """Runs every point that is not finished, in order."""
    for point in sweep.points:  # a mistake in the last point should not cost the first ones
        recipe_of(sweep, point)
    return [_one(sweep, point, out, stores, watcher) for point in sweep.points]


def _one(
    sweep: Sweep, point: Point, out: Path, stores: Path, watcher: Callable[[str], Watcher]
) -> Result:
    directory = RunDirectory(out / name_of(point))
    failed = directory.path / "diverged.json"
    run = build(recipe_of(sweep, point), stores, out=directory.path)
    if failed.is_file() or directory.summary.is_file():
        directory.claim(dump(run.recipe), resume=True)  # finished, but for this recipe?
        return _result(sweep, point, directory.path)
    try:
        if train(run, resume=True, watcher=watcher(name_of(point))) is None:
            raise KeyboardInterrupt
    except DivergenceError as error:
        write_atomically(failed, (dumps({"error": str(error)}) + "\n").encode())
    jax.clear_caches()  # programs of finished points would only fill memory
    return _result(sweep, point, directory.path)


def _result(sweep: Sweep, point: Point, path: Path) -> Result:
    facts = report.facts_of(path)
    seen = [(r["round"] + 1, r["perplexity"]) for r in facts.evaluated]
    reached = next((n for n, p in seen if sweep.target and p <= sweep.target), None)
    failed = (path / "diverged.json").is_file()
    return Result(
        point=point,
        path=path,
        perplexity=(facts.final.get("test") or {}).get("perplexity"),
        validation=(facts.final.get("validation") or {}).get("perplexity"),
        reached=reached,
        best=min((p for _, p in seen), default=None),
        upload_bytes=statistics.fmean(facts.member_bytes or [0.0]),
        personal=_personal(facts),
        epsilon=(facts.final.get("privacy") or {}).get("epsilon"),
        diverged=len(facts.rounds) if failed else None,
    )


def _personal(facts: report.Facts) -> float | None:
    last: dict[str, Any] = facts.final.get("test") or facts.final.get("validation") or {}
    return last.get("personal_perplexity")


def sweep_table(sweep: Sweep, results: list[Result]) -> tuple[list[str], list[list[Any]]]:
    """Head and rows: one row for points that differ in nothing but the seed.

    What is the same in all points, and the seed, has no column.
    """
    names = [
        name
        for name in dict.fromkeys(k for p in sweep.points for k in p)
        if name != SEED and len({json.dumps(p.get(name)) for p in sweep.points}) > 1
    ]
    names = [NAME] if NAME in names else names
    groups: dict[str, list[Result]] = {}
    for result in results:
        label = json.dumps([result.point.get(n) for n in names])
        groups.setdefault(label, []).append(result)
    head = [*names, "seeds", "test perplexity", "validation", "best on the way"]
    head += [f"rounds to {sweep.target:g}"] if sweep.target else []
    private = any(r.epsilon is not None for r in results)
    head += ["epsilon"] if private else []
    sizes = {round(r.upload_bytes) for r in results if r.upload_bytes}
    moved = len(sizes) > 1
    head += ["kB up a member and round", "of the most"] if moved else []
    most = max(sizes) if moved else 0
    grown = any(r.personal is not None for r in results)
    head += ["after own steps"] if grown else []
    rows = [
        _row(names, group, target=bool(sweep.target), private=private, most=most, grown=grown)
        for group in groups.values()
    ]
    return [*head, "diverged"], rows


def _row(
    names: list[str],
    group: list[Result],
    *,
    target: bool,
    private: bool,
    most: int,
    grown: bool,
) -> list[Any]:
    row = [group[0].point.get(n) for n in names] + [len(group)]
    row += [
        mean_and_spread([getattr(r, f) for r in group])
        for f in ("perplexity", "validation", "best")
    ]
    if target:
        row.append(mean_and_spread([r.reached for r in group], digits=0))
    if private:
        row.append("-" if group[0].epsilon is None else f"{group[0].epsilon:.3g}")
    if most:
        each = statistics.fmean(r.upload_bytes for r in group)
        row += [f"{each / 1e3:.1f}", f"1/{most / each:.1f}" if each else "-"]
    if grown:
        row.append(mean_and_spread([r.personal for r in group]))
    failed = [r.diverged for r in group if r.diverged is not None]
    return [*row, f"{len(failed)} of {len(group)}" if failed else "no"]


def mean_and_spread(values: list[Any], digits: int = 1) -> str:
    """Mean and standard deviation over seeds; a dash where a seed has no value."""
    if any(v is None or not math.isfinite(v) for v in values):
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """The table for a document."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(v) for v in line) + " |\n" for line in lines)
