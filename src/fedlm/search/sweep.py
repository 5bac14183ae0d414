"""Many runs of one recipe, and one table of them.

In:       a sweep file: a base recipe, axes of settings, perhaps cases and a target.
Out:      a run directory per point, a table with mean and spread over seeds, one report; with
          `[selection]`, the best run alone.
Promise:  every point is an ordinary run that `fedlm train` would repeat; a finished point is not
          run again; one that diverged is a result, not an error.
Not here: training (`training`).

    recipe = "../irc.toml"              # relative to the sweep file
    target = 120                        # also report rounds to this validation perplexity
    [axes]
    "model.name" = ["si-cifg", "cifg"]  # the product of all axes is run
    "run.seed" = [0, 1, 2]              # seeds are gathered into mean and spread
    [selection]                         # train random points, release the best one alone
    law = "geometric"                   # of the number of runs: geometric, logarithmic, poisson
    mean = 8                            # of that law
    [[cases]]                           # each case is combined with every point of the axes
    name = "slow"                       # what the table calls it; else its settings are shown
    "client.learning_rate" = 0.5
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fedlm import lineage
from fedlm.core.documents import JsonObject, read_json, read_toml
from fedlm.core.durable import write_atomically
from fedlm.core.errors import (
    ConfigError,
    DivergenceError,
    RecordError,
    nearest,
    require,
    shown,
)
from fedlm.core.keys import generator_for
from fedlm.core.words import count, number
from fedlm.privacy import ledger, selection, spending
from fedlm.privacy.claim import Claim
from fedlm.privacy.ledger import Entry, Ledger, selection_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import shipped
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, dump, load, with_defaults
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import Facts, facts_of
from fedlm.record.journal import dumps
from fedlm.run import Run
from fedlm.training import Watcher, start_sha256, train

Point = dict[str, Any]
SEED, NAME = "run.seed", "name"
FAILED = "diverged.json"  # of a run that ended because its loss ran away
PLANNED = "sweep.json"  # all points, written before the first run
# Laws whose Renyi divergence, by which a selection is accounted, is not at hand.
NO_RENYI = ("fixed", "balls-in-bins")
KEYS = ("recipe", "target", "axes", "cases", "selection")
POINTS_KEPT = 8  # a point's programs take 25 MB and more


@dataclass(frozen=True)
class Selection:
    """The law of the number of runs of which only the best is released."""

    law: str
    mean: float


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep file."""

    recipe: Path
    points: list[Point]
    target: float | None
    selection: Selection | None = None
    changes: tuple[str, ...] = ()  # of the recipe, at every point


@dataclass(frozen=True)
class Result:
    """The result of one point of a sweep."""

    point: Point
    path: Path
    perplexity: float | None  # on held-out clients; None if it diverged
    validation: float | None
    reached: int | None  # rounds to the target
    best: float | None  # the lowest validation perplexity seen on the way
    upload_bytes: float  # by one member in one round, on average
    personal: float | None  # of a tree's leaves after their own steps
    epsilon: float | None  # None without a privacy plan, and where no noise makes it infinite
    diverged: int | None  # the round in which the run diverged, if it did


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file."""
    path = shipped.find(Path(path))
    tables = read_toml(path, f"sweep {path}")
    for key in tables.keys() - set(KEYS):
        raise ConfigError(f"sweep {path} has no setting {key!r}. {nearest(key, KEYS)}")
    if not isinstance(tables.get("recipe"), str):
        raise ConfigError(f"sweep {path}: expected recipe = a path to the base recipe.")
    target, axes, cases = tables.get("target"), tables.get("axes", {}), tables.get("cases", [{}])
    _check(path, target, axes, cases)
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    points = [_called({**case, **point}, point) for case in cases for point in product]
    chosen = _selection(path, tables["selection"]) if "selection" in tables else None
    return Sweep(Path(path).parent / tables["recipe"], points, target, chosen)


def _selection(path: Path, table: Any) -> Selection:
    if not isinstance(table, dict) or table.keys() != {"law", "mean"}:
        raise ConfigError(
            f"sweep {path}: selection = {shown(table)}: expected law and mean, no more."
        )
    selection.check(table["law"], table["mean"])
    return Selection(table["law"], float(table["mean"]))


def _called(point: Point, axes: Point) -> Point:
    """Return a point named after its case and its values on the axes, if its case has a name."""
    if NAME not in point:
        return point
    added = [f"{key}={value}" for key, value in axes.items() if key != SEED]
    return {**point, NAME: ",".join([str(point[NAME]), *added])}


def _check(path: Path, target: Any, axes: Any, cases: Any) -> None:
    if target is not None and (type(target) not in (int, float) or not target > 0):
        raise ConfigError(f"sweep {path}: target = {shown(target)}: expected a perplexity.")
    if not isinstance(axes, dict):
        raise ConfigError(f"sweep {path}: axes = {shown(axes)}: expected a table of lists.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"sweep {path}: axes.{name} = {shown(values)}: expected a list of values."
            )
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise ConfigError(f"sweep {path}: cases = {shown(cases)}: expected tables [[cases]].")
    twice = sorted({key for case in cases for key in case} & set(axes))
    if twice:
        raise ConfigError(
            f"sweep {path}: {twice[0]} is set by a case and by an axis: expected one of them. "
            "Leave it out of [axes], and give it in every case."
        )


def recipe_of(sweep: Sweep, point: Point) -> Recipe:
    """Return the recipe of one point."""
    changes = (f"{k}={literal(v)}" for k, v in _settings(point).items())
    return load(sweep.recipe, (*sweep.changes, *changes))


def _settings(point: Point) -> Point:
    return {k: v for k, v in point.items() if k != NAME}


def literal(value: Any) -> str:
    """Return a value as it stands in a change of a recipe."""
    try:
        return "inf" if value == math.inf else json.dumps(value)
    except TypeError:
        raise ConfigError(
            f"{value}: expected text, a number, true or false, or a list of these as the value of "
            "a setting."
        ) from None


def name_of(point: Point) -> str:
    """Return a directory name made of the settings of a point."""
    told = {k: v for k, v in point.items() if NAME not in point or k == SEED}
    parts = [str(point[NAME])] if NAME in point else []
    parts += [f"{key}={value}" for key, value in told.items()]
    return ",".join(parts).replace("/", "_").replace(" ", "") or "base"


def carry_out(
    sweep: Sweep, out: Path, stores: Path, watcher: Callable[[str], Watcher]
) -> list[Result]:
    """Run every point that is not finished, in order, and return the results of all points."""
    for point in sweep.points:  # first, so that a mistake in the last point is found early
        recipe_of(sweep, point)
    planned = [{"name": name_of(p), "settings": _settings(p)} for p in sweep.points]
    write_atomically(out / PLANNED, (dumps({"points": planned}) + "\n").encode())
    found, total = [], len(sweep.points)
    for place, point in enumerate(sweep.points, start=1):
        label = f"point {place} of {total}: {name_of(point)}"
        found.append(_one(sweep, point, out, stores, functools.partial(watcher, label)))
    return found


def _one(
    sweep: Sweep, point: Point, out: Path, stores: Path, watcher: Callable[[], Watcher]
) -> Result:
    directory = RunDirectory(out / name_of(point))
    run = build(recipe_of(sweep, point), stores, out=directory.path)
    if (directory.path / FAILED).is_file() or directory.summary.is_file():
        # Raises if the recipe differs.
        directory.claim(dump(run.recipe), resume=True, complete=with_defaults)
    elif not train_point(run, watcher()):
        raise KeyboardInterrupt
    return result_of(sweep, point, directory.path)


def train_point(run: Run, watcher: Watcher) -> bool:
    """Begin or go on with the run of a point; return False if it was stopped before its end.

    That a run diverged is written down beside it: it is a result.
    """
    try:
        return train(run, resume=True, watcher=watcher) is not None
    except DivergenceError as error:
        told = (dumps({"error": str(error)}) + "\n").encode()
        write_atomically(run.record.path / FAILED, told)
        return True
    finally:
        _let_go()


_finished = itertools.count(1)  # points of this process


def _let_go() -> None:
    """Free the compiled programs of finished points after every few points.

    Points that differ in the server alone share programs; those of a long search would fill the
    memory.
    """
    if next(_finished) % POINTS_KEPT == 0:
        jax.clear_caches()


# ---- private selection -----------------------------------------------------------------------

HIDDEN, DRAWN = ".candidates", "draw.json"
BEST, CLAIM, ENDED = "best", "claim.json", "ended.json"


@dataclass(frozen=True)
class Best:
    """The one run that a private selection releases."""

    point: Point
    path: Path
    perplexity: float  # on held-out clients
    claim: Claim


def select(sweep: Sweep, out: Path, stores: Path, stop: Callable[[], bool]) -> Best | None:
    """Train a random number of random points and release the best; None if the law drew none.

    What is not the best, and how many runs there were, is kept in a folder that only its owner can
    read, and is removed in the end. The store counts the selection before its first run. A folder
    has one selection: a draw that released nothing is over, too, and another one counts again.
    """
    assert sweep.selection is not None
    law, hidden = sweep.selection, out / HIDDEN
    if (out / ENDED).is_file() or (out / BEST / CLAIM).is_file():
        shutil.rmtree(hidden, ignore_errors=True)
        raise RecordError(f"{out} holds a selection that has ended: give another --out.")
    runs = [build(recipe_of(sweep, point), stores, out=hidden) for point in sweep.points]
    plan = _one_plan(runs)
    first = runs[0]
    rounds, start = first.cadence.rounds, first.recipe.model.init_from or ""
    _check_budget(selection_entry(plan, rounds, law.law, law.mean), first)
    lineage.begin_selection(
        out,
        first.store,
        selection_entry(plan, rounds, law.law, law.mean),
        start_sha256=start_sha256(first),
        start=start,
    )
    scores = {}
    for place, index in enumerate(_drawn(sweep, hidden)):
        scores[place] = _score(sweep, sweep.points[index], hidden / str(place), stores, stop)
    found = {place: score for place, score in scores.items() if math.isfinite(score[1])}
    best = None
    if found:
        place = min(found, key=lambda n: found[n][1])
        best = _release(out, hidden / str(place), *found[place], first)
    write_atomically(out / ENDED, (dumps({"released": best is not None}) + "\n").encode())
    shutil.rmtree(hidden, ignore_errors=True)
    return best


def _one_plan(runs: list[Run]) -> PrivacyPlan:
    """Return the plan that all points share; refuse what the cost of a selection does not cover."""
    plan = runs[0].plan
    require(
        plan is not None and all(run.plan == plan for run in runs),
        "selection",
        "points of this sweep",
        "one privacy plan for all of them: sweep other settings than [privacy] and server.cohort",
    )
    assert plan is not None
    require(
        plan.sampling.law not in NO_RENYI and not plan.reveal and plan.unit == "client",
        "selection",
        plan.sampling.law,
        "server.sampling = 'poisson', 'cyclic-poisson' or 'spaced', no privacy.reveal and no noise "
        "at leaves",
    )
    require(
        all("test" in run.evaluation.splits() for run in runs),
        "data.test_clients",
        runs[0].recipe.data.test_clients,
        "held-out clients beside a selection: the best run is chosen by their text",
    )
    require(
        all(run.private_evaluation is None for run in runs),
        "selection",
        "points of this sweep",
        "no noisy figures of training clients: the cost of a selection is that of rounds alone",
    )
    stores = {run.store.path for run in runs}
    require(
        len(stores) == 1,
        "selection",
        "points of this sweep",
        "one store for all of them: what another vocabulary cost would not be counted",
    )
    require(
        not any(run.recipe.run.trackers for run in runs),
        "run.trackers",
        [name for run in runs for name in run.recipe.run.trackers],
        "none beside a selection: a tracker would show runs that stay secret",
        "Set run.trackers = [].",
    )
    starts = {run.recipe.model.init_from for run in runs}
    require(len(starts) == 1, "model.init_from", starts, "one start for all points of a selection")
    cadences = {run.cadence.rounds for run in runs}
    require(len(cadences) == 1, "server.rounds", cadences, "as many rounds at every point")
    return plan


def _check_budget(entry: Entry, run: Run) -> None:
    """Refuse a selection that costs more than `privacy.epsilon`, which bounds one run alone."""
    if run.cadence.budget is None:
        return
    spent = spending.total_spent([[ledger.begin_entry({}), entry]])
    require(
        spent.epsilon <= run.cadence.budget,
        "privacy.epsilon",
        run.cadence.budget,
        f"at least {spent.epsilon:.4g}, which the best of a random number of runs costs",
        "Set privacy.noise_multiplier for the runs, and leave privacy.epsilon out or raise it.",
    )


def _drawn(sweep: Sweep, hidden: Path) -> list[int]:
    """Return which points are run; a selection that goes on has drawn them already."""
    assert sweep.selection is not None
    file = hidden / DRAWN
    if not file.is_file():
        seed = int.from_bytes(os.urandom(16), "little")
        rng = generator_for(seed, "selection")
        runs = selection.draw_number_of_runs(sweep.selection.law, sweep.selection.mean, rng)
        hidden.mkdir(mode=0o700, parents=True, exist_ok=True)
        points = [int(rng.integers(len(sweep.points))) for _ in range(runs)]
        write_atomically(file, json.dumps(points).encode(), private=True)
    hidden.chmod(0o700)
    found: list[int] = read_json(file, str(file), RecordError)
    most = len(sweep.points)
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < most for n in found):
        raise RecordError(f"{file} is damaged, or of another sweep: give another --out.")
    return found


def _score(
    sweep: Sweep, point: Point, path: Path, stores: Path, stop: Callable[[], bool]
) -> tuple[Point, float]:
    """Train a candidate out of sight, and return its perplexity on held-out clients."""
    run = dataclasses.replace(build(recipe_of(sweep, point), stores, out=path), counted=False)
    try:
        done = train(run, resume=True, watcher=Watcher(stop=stop))
        if done is None:
            raise KeyboardInterrupt
    except DivergenceError:
        return point, math.inf
    finally:
        _let_go()
    told = done["perplexity"]  # JSON has no infinity
    return point, math.inf if told is None else float(told)


def _release(out: Path, path: Path, point: Point, perplexity: float, run: Run) -> Best:
    """Copy the best model out of the candidates, with the claim of the selection."""
    facts = facts_of(path)
    claim = lineage.claim_of_selection(out, facts.header)
    target = out / BEST
    target.mkdir(exist_ok=True)
    made = RunDirectory(path)
    lineage.add_models(out, run.store, lineage.read_lineage(path / lineage.FILE).models)
    for file in (made.recipe, made.weights, made.tokenizer, made.special_tokens):
        write_atomically(target / file.name, file.read_bytes())
    told = {"point": point, "perplexity": perplexity, "privacy": claim.facts}
    write_atomically(target / CLAIM, (dumps(told) + "\n").encode())
    return Best(point, target, perplexity, claim)


def privacy_sentence(runs: Sequence[Path]) -> str | None:
    """Say what all private runs of a sweep cost one client together; None without any."""
    spent = lineage.spent_together(runs)
    if spent is None:
        return None
    private = sum(Ledger(path / ledger.NAME).exists() for path in runs)
    open_runs = len(runs) - private
    verb = "has" if open_runs == 1 else "have"
    also = f" {count(open_runs, 'further run')} {verb} no privacy plan." if open_runs else ""
    if math.isinf(spent.epsilon):
        return f"No finite epsilon holds for {count(private, 'private run')} together.{also}"
    return (
        f"Together, {count(private, 'private run')} of this sweep cost one client epsilon "
        f"{number(spent.epsilon)} at delta {spent.delta:g} ({spent.accountant}); choosing the "
        f"best of them by their figures costs no less.{also}"
    )


def result_of(sweep: Sweep, point: Point, path: Path) -> Result:
    """Return the figures of a point's run, also if it has not come to its end."""
    facts = facts_of(path)
    seen = [(r["round"] + 1, r["perplexity"]) for r in facts.evaluated]
    reached = next((n for n, p in seen if sweep.target and p <= sweep.target), None)
    failed = (path / FAILED).is_file()
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


def _personal(facts: Facts) -> float | None:
    last: JsonObject = facts.final.get("test") or facts.final.get("validation") or {}
    return last.get("personal_perplexity")


def sweep_table(sweep: Sweep, results: list[Result]) -> tuple[list[str], list[list[Any]]]:
    """Return the head and the rows of the table, with one row for points that differ only in seed.

    The seed, and settings that are the same in all points, have no column.
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
    head += ["kB up per member and round", "share of the largest upload"] if moved else []
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
        over_seeds([getattr(r, f) for r in group]) for f in ("perplexity", "validation", "best")
    ]
    if target:
        row.append(over_seeds([r.reached for r in group], digits=0))
    if private:
        spent = [r.epsilon for r in group if r.epsilon is not None]
        row.append(number(max(spent), 3) if spent else "-")  # of the seed that cost most
    if most:
        each = statistics.fmean(r.upload_bytes for r in group)
        row += [f"{each / 1e3:.1f}", f"{each / most:.0%}"]
    if grown:
        row.append(over_seeds([r.personal for r in group]))
    failed = [r.diverged for r in group if r.diverged is not None]
    return [*row, f"{len(failed)} of {len(group)}" if failed else "no"]


def over_seeds(values: list[Any], digits: int = 1) -> str:
    """Return mean and standard deviation over seeds as text; a dash if a seed has no value."""
    if any(v is None or not math.isfinite(v) for v in values):
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """Return the table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(v) for v in line) + " |\n" for line in lines)
