"""The plan of a search by successive halving: its points, seeds and rungs.

In:       a recipe, its `[tune]` table, options.
Out:      a `Search`: everything that decides which runs are trained, and for how long.
Promise:  every rung trains one in `keep_one_in` of the points before it, that many times as long;
          a budget of rounds is kept; a mistake in any point is found before the first run.
Not here: the runs (`tune.py`), what is written (`tune_results.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedlm.core.documents import JsonObject
from fedlm.core.errors import require
from fedlm.recipe.settings import Recipe, dump
from fedlm.search.space import Axes, all_points, axes_of, default_axes, draw_points
from fedlm.search.sweep import SEED, Point, Sweep, recipe_of

# Of a trial: what only costs time, or would end it at another round than the others.
TRIAL = {
    "server.patience": 0,
    "run.keep_best": False,
    "run.trackers": [],
    "run.baselines": False,
    "run.prompts": [],
}
MEASURES = ("server.evaluate_rows", "server.evaluate_every")  # what points are compared by


class Rung(NamedTuple):
    """A rung of successive halving: how many points, and the rounds that each is trained to."""

    points: int
    rounds: int


def ladder(points: int, rounds: int, keep_one_in: int) -> list[Rung]:
    """Return the rungs of a search; each has fewer points, which are trained longer.

    >>> ladder(18, 90, 3)
    [Rung(points=18, rounds=10), Rung(points=6, rounds=30), Rung(points=2, rounds=90)]
    >>> ladder(18, 90, 1)  # none is dropped on the way
    [Rung(points=18, rounds=90)]
    """
    steps = 0
    while keep_one_in > 1 and keep_one_in ** (steps + 1) <= min(points, rounds):
        steps += 1
    first = rounds // keep_one_in**steps
    lengths = [*(first * keep_one_in**k for k in range(steps)), rounds]
    return [Rung(-(-points // keep_one_in**k), n) for k, n in enumerate(lengths)]


def cost(rungs: Sequence[Rung]) -> int:
    """Return how many rounds a search plays, for each seed.

    >>> cost(ladder(18, 90, 3))
    420
    """
    before = [0, *(rung.rounds for rung in rungs)]
    pairs = zip(rungs, before, strict=False)
    return sum(rung.points * (rung.rounds - last) for rung, last in pairs)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Everything that decides a search."""

    recipe: Path
    changes: tuple[str, ...]  # of the recipe, for all points
    axes: Axes
    points: tuple[Point, ...]  # of the product of the axes, in its order
    seeds: tuple[int, ...]
    rungs: tuple[Rung, ...]
    keep_one_in: int
    minutes: float | None = None
    epsilon: float | None = None  # of all runs on the store together

    def facts(self) -> JsonObject:
        """Return what must be the same when a search goes on; a budget may grow."""
        base = dump(self.base())
        return {
            "recipe_sha256": hashlib.sha256(base.encode()).hexdigest(),
            "over": {name: list(values) for name, values in self.axes.items()},
            "points": [dict(point) for point in self.points],
            "seeds": list(self.seeds),
            "rungs": [list(rung) for rung in self.rungs],
        }

    def base(self) -> Recipe:
        """Return the recipe before anything is tried."""
        return self.recipe_of({})

    def recipe_of(self, point: Point) -> Recipe:
        """Return the recipe with the settings of a point."""
        return recipe_of(Sweep(self.recipe, [point], None, changes=self.changes), point)

    def trial(self, point: Point, seed: int) -> Recipe:
        """Return the recipe of a run of the search."""
        every = {"server.evaluate_every": self.rungs[0].rounds}
        return self.recipe_of({**point, **TRIAL, **every, SEED: seed})


def plan_search(
    recipe: Path,
    changes: tuple[str, ...] = (),
    *,
    over: Axes | None = None,
    seeds: tuple[int, ...] | None = None,
    points: int | None = None,
    keep_one_in: int | None = None,
    rounds: int | None = None,
    minutes: float | None = None,
    epsilon: float | None = None,
) -> Search:
    """Return the search that a recipe's `[tune]` table and the options say.

    Args:
      recipe: the recipe's file.
      changes: changes of it, as in `fedlm train --set`.
      over: the values of each setting to try; by default those of `[tune]`, or common ones.
      seeds: the seeds of every point.
      points: the most points, drawn at random from the product of all values.
      keep_one_in: of so many points one goes on after a rung; 1: all are played to the end.
      rounds: the most rounds that all runs play together; it decides how many points there are.
      minutes: the most minutes that all runs train together.
      epsilon: the most that all runs on the store may cost a client together.
    """
    base = recipe_of(Sweep(recipe, [{}], None, changes=changes), {})
    table = base.tune
    axes = over or axes_of(table.over if table else ()) or default_axes(base)
    for name in (SEED, "server.rounds", *TRIAL):
        require(name not in axes, "over", name, "settings that a search does not decide itself")
    for name in axes:
        require(
            not name.startswith("data.") and name not in MEASURES,
            "over",
            name,
            "settings that leave the text alone by which points are compared",
            "Search once for each: fedlm tune RECIPE --set NAME=VALUE.",
        )

    def said(name: str, option: Any) -> Any:
        return option if option is not None else getattr(table, name, None)

    one_in = said("keep_one_in", keep_one_in) or 3
    all_seeds = tuple(said("seeds", seeds) or (base.run.seed,))
    require(len(set(all_seeds)) == len(all_seeds), "seeds", list(all_seeds), "seeds that differ")
    grid = all_points(axes)
    most = min(len(grid), said("points", points) or len(grid))
    budget = said("rounds", rounds)
    length = base.server.rounds
    if budget is not None:
        fitting = [n for n in range(1, most + 1) if _cost(n, length, one_in, all_seeds) <= budget]
        require(
            bool(fitting),
            "rounds",
            budget,
            f"at least {length * len(all_seeds)}: one point takes the recipe's server.rounds = "
            f"{length} for each seed",
            "Raise it, or shorten the recipe by --set server.rounds=N.",
        )
        most = fitting[-1]
    search = Search(
        recipe=recipe,
        changes=changes,
        axes=axes,
        points=draw_points(grid, most, base.run.seed),
        seeds=all_seeds,
        rungs=tuple(ladder(most, length, one_in)),
        keep_one_in=one_in,
        minutes=said("minutes", minutes),
        epsilon=said("epsilon", epsilon),
    )
    for point in search.points:  # first, so that a mistake in the last point is found early
        search.trial(point, all_seeds[0])
    return search


def _cost(points: int, rounds: int, keep_one_in: int, seeds: Sequence[int]) -> int:
    return cost(ladder(points, rounds, keep_one_in)) * len(seeds)
