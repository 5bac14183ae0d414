"""The best settings of a recipe, by successive halving.

In:       a recipe, the settings to try, a budget in rounds or minutes.
Out:      a run directory per point and seed, a table, `best.toml`, the figure of the best on a part
          of the held-out text that chose nothing.
Promise:  all points have the same seeds, rounds and text; a point that stays goes on in its run,
          and a schedule over rounds is that of the whole length from the first round; stopped at
          any moment, the search goes on where it was; private runs are counted together, and a
          search that would exceed a budget of the store is refused before its first run.
Not here: a grid that is run to its end (`sweep.py`), the two parts of held-out text (`splits.py`).

Successive halving (Jamieson & Talwalkar 2016): all points are trained for a short while, one in
`keep_one_in` goes on for that many times as long, and so on until the last few reach the end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedlm import lineage
from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.core.keys import generator_for
from fedlm.inference import load_params
from fedlm.privacy.ledger import (
    NAME,
    UNKNOWN,
    Entry,
    Ledger,
    begin_entry,
    round_entry,
    rounds_of,
)
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, dump, parse_value
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import dumps
from fedlm.record.report import facts_of
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.sweep import (
    SEED,
    Point,
    Sweep,
    markdown,
    name_of,
    recipe_of,
    result_of,
    total_of,
    train_point,
)
from fedlm.training import Watcher

PLAN, RUNS, BEST, TABLE = "tune.json", "runs", "best.toml", "table.md"
RANGE = ".."  # between the ends of a range, whose values are evenly spaced in their logarithm
RANGE_VALUES, MOST_VALUES, MOST_POINTS = 5, 100, 10_000

# What is tried if nothing is said: around the published rates of each optimiser.
CLIENT_RATES: dict[str, tuple[float, ...]] = {
    "sgd": (0.1, 0.3, 1.0),
    "momentum": (0.01, 0.03, 0.1),
    "adam": (0.0003, 0.001, 0.003),
    "adamw": (0.0003, 0.001, 0.003),
}
SERVER_RATES: dict[str, tuple[float, ...]] = {
    "fedavg": (0.3, 1.0),
    "fedavgm": (0.1, 0.3, 1.0),
    "nesterov": (0.1, 0.3, 1.0),
    "fedadam": (0.003, 0.01, 0.03),
    "fedyogi": (0.003, 0.01, 0.03),
    "fedadagrad": (0.01, 0.03, 0.1),
}
CLIPS = (0.0, 1.0)
# Of a trial: what only costs time, or would end it at another round than the others.
TRIAL = {
    "server.patience": 0,
    "run.keep_best": False,
    "run.trackers": [],
    "run.baselines": False,
    "run.prompts": [],
}


# ---- what is tried ---------------------------------------------------------------------------


def axis_of(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read `table.key=value,value` or `table.key=low..high:count`.

    >>> axis_of("client.learning_rate=0.1,1")
    ('client.learning_rate', (0.1, 1))
    >>> axis_of("client.learning_rate=0.01..1:3")
    ('client.learning_rate', (0.01, 0.1, 1.0))
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    require(
        bool(equals) and "." in name and bool(values.strip()),
        "--over",
        text,
        "table.key=value,value or table.key=low..high, as in client.learning_rate=0.1,0.3,1",
    )
    return name, values_of(name, values)


def values_of(name: str, given: Any) -> tuple[Any, ...]:
    """Return the values of a setting to try: a list, or the text of a list or of a range."""
    what = f"over {name}"
    if isinstance(given, str) and RANGE in given:
        return _spaced(what, given)
    if isinstance(given, str):
        given = [parse_value(part.strip(), what) for part in given.split(",") if part.strip()]
    values = tuple(dict.fromkeys(given))
    require(
        0 < len(values) <= MOST_VALUES, what, list(given), f"one to {MOST_VALUES} different values"
    )
    return values


def _spaced(what: str, text: str) -> tuple[float, ...]:
    """Return numbers evenly spaced in their logarithm, of two digits where they still differ."""
    ends, colon, many = text.partition(":")
    low_text, _, high_text = ends.partition(RANGE)
    try:
        low, high, count = float(low_text), float(high_text), int(many) if colon else RANGE_VALUES
    except ValueError:
        low = high = count = 0
    require(
        0 < low < high < math.inf and 2 <= count <= MOST_VALUES,
        what,
        text,
        f"two positive numbers, the lower first, and perhaps 2 to {MOST_VALUES} values: 0.01..1:5",
    )
    exact = [low * (high / low) ** (n / (count - 1)) for n in range(count)]
    rounded = tuple(float(f"{x:.2g}") for x in exact)
    return rounded if len(set(rounded)) == count else tuple(exact)


def default_axes(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """Return the settings to try if nothing is said, by the recipe's optimisers."""
    axes: dict[str, tuple[Any, ...]] = {
        "client.learning_rate": CLIENT_RATES[recipe.client.optimizer]
    }
    if recipe.federation is None:
        axes["server.learning_rate"] = SERVER_RATES[recipe.server.optimizer]
    if recipe.privacy.mechanism is not None:
        axes["privacy.clip_norm"] = (0.1, 0.3, 1.0)
    else:
        axes["client.gradient_clip_norm"] = CLIPS
    return axes


# ---- how long --------------------------------------------------------------------------------


class Rung(NamedTuple):
    """So many points are trained up to so many rounds."""

    points: int
    rounds: int


def ladder(points: int, rounds: int, keep_one_in: int) -> list[Rung]:
    """Return the rungs of a search; each has fewer points, which are trained longer.

    >>> ladder(18, 90, 3)
    [Rung(points=18, rounds=10), Rung(points=6, rounds=30), Rung(points=2, rounds=90)]
    """
    steps = 0
    while keep_one_in ** (steps + 1) <= min(points, rounds):
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
    axes: Mapping[str, tuple[Any, ...]]
    points: tuple[Point, ...]  # of the product of the axes, in its order
    seeds: tuple[int, ...]
    rungs: tuple[Rung, ...]
    keep_one_in: int
    minutes: float | None = None
    epsilon: float | None = None  # of all runs on the store together

    def facts(self) -> dict[str, Any]:
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
    over: Mapping[str, tuple[Any, ...]] | None = None,
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
      keep_one_in: how many points go on after a rung.
      rounds: the most rounds that all runs play together; it decides how many points there are.
      minutes: the most minutes that all runs train together.
      epsilon: the most that all runs on the store may cost a client together.
    """
    base = recipe_of(Sweep(recipe, [{}], None, changes=changes), {})
    table = base.tune
    given = over or {n: values_of(n, v) for n, v in ((table and table.over) or {}).items()}
    axes = given or default_axes(base)
    for name in (SEED, "server.rounds", *TRIAL):
        require(name not in axes, "over", name, "settings that a search does not decide itself")

    def said(name: str, option: Any) -> Any:
        return option if option is not None else getattr(table, name, None)

    one_in = said("keep_one_in", keep_one_in) or 3
    all_seeds = tuple(said("seeds", seeds) or (base.run.seed,))
    require(len(set(all_seeds)) == len(all_seeds), "seeds", list(all_seeds), "seeds that differ")
    product = _product(axes)
    most = min(len(product), said("points", points) or len(product))
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
        points=_drawn(product, most, base.run.seed),
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


def _product(axes: Mapping[str, tuple[Any, ...]]) -> list[Point]:
    count = math.prod(map(len, axes.values()))
    require(
        count <= MOST_POINTS, "over", count, f"at most {MOST_POINTS:,} points: name fewer values"
    )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _drawn(product: list[Point], most: int, seed: int) -> tuple[Point, ...]:
    """Return so many points, drawn at random, in the order of the product."""
    if most >= len(product):
        return tuple(product)
    chosen = generator_for(seed, "tune").choice(len(product), most, replace=False)
    return tuple(product[n] for n in sorted(chosen))


# ---- the search ------------------------------------------------------------------------------


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
        """The best is the one that came furthest, and among these the one that scored lowest."""
        return (-self.rounds, self.perplexity)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search."""

    trials: list[Trial]  # the best first
    complete: bool  # whether the last rung was reached
    edges: list[str]  # where the best value is the first or last of those tried
    last: dict[str, Any] | None  # perplexity on the part that chose nothing; None without a model
    chosen_by: str
    spent: str | None  # what all private runs of the search cost together
    seconds: float

    @property
    def best(self) -> Trial:
        return self.trials[0]


def search_settings(
    search: Search,
    out: Path,
    stores: Path,
    watcher: Callable[[str], Watcher],
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """Carry out a search, or go on with it, and write its table and its best recipe.

    Raises:
      KeyboardInterrupt: `stop` asked for it; the search can go on later.
      ConfigError: the runs would cost clients more than the budget.
      RecordError: `out` holds another search.
    """
    first = build(search.trial(search.points[0], search.seeds[0]), stores, out=out / "none")
    _check(search, first)
    _claim(search, out)
    _check_epsilon(search, out, stores, first)
    clock = _Clock(search, out, stop)
    alive, done = list(search.points), dict[str, Trial]()
    for number, rung in enumerate(search.rungs):
        alive = alive[: rung.points]
        for place, point in enumerate(alive):
            if clock.over():
                break
            said = f"{rung.rounds} rounds, point {place + 1} of {len(alive)}: {name_of(point)}"
            trial = _advance(search, point, rung.rounds, out, stores, watcher(said), clock)
            if trial is None:
                break
            done[name_of(point)] = trial
        if clock.over():
            break
        scored = {name_of(point): done[name_of(point)].perplexity for point in alive}
        alive.sort(key=lambda point: scored[name_of(point)])
        if number + 1 < len(search.rungs) and all(map(math.isinf, scored.values())):
            raise ConfigError(
                f"over {', '.join(search.axes)}: every point diverged within {rung.rounds} rounds; "
                "name lower rates, or a client.gradient_clip_norm."
            )
    if not done:
        raise ConfigError(
            f"minutes = {search.minutes:g}: expected enough for one point; nothing was scored yet."
        )
    return _finish(search, list(done.values()), first, out, stores, clock)


class _Clock:
    """Whether a search must pause: somebody asked, or its minutes are over."""

    def __init__(self, search: Search, out: Path, asked: Callable[[], bool]) -> None:
        self.most = None if search.minutes is None else 60 * search.minutes
        self.asked = asked
        self.seconds = sum(_seconds(path.parent) for path in out.glob(f"{RUNS}/*/journal.jsonl"))

    def over(self) -> bool:
        """Return whether the minutes are over; raise `KeyboardInterrupt` if a stop was asked."""
        if self.asked():
            raise KeyboardInterrupt
        return self.most is not None and self.seconds >= self.most


def _seconds(path: Path) -> float:
    return float(sum(told["seconds"] for told in facts_of(path).rounds))


def _advance(
    search: Search,
    point: Point,
    rounds: int,
    out: Path,
    stores: Path,
    watcher: Watcher,
    clock: _Clock,
) -> Trial | None:
    """Train a point with all seeds up to a round; None if the minutes were over before."""
    nats, failed, paths = [], 0, []
    for seed in search.seeds:
        path = out / RUNS / name_of({**point, SEED: seed})
        scored = _scored(path, rounds)
        if scored is None:
            run = splits.for_choosing(build(search.trial(point, seed), stores, out=path))
            train_point(run, _until(rounds, watcher, clock))
            scored = _scored(path, rounds)
        if scored is None and clock.over():  # raises if a stop was asked for
            return None
        if scored is None:
            raise RecordError(
                f"{path} ended before a round that could be scored: its privacy.epsilon is too "
                "small for one."
            )
        nats.append(math.log(scored))
        failed += math.isinf(scored)
        paths.append(path)
    mean = statistics.fmean(nats)
    perplexity = math.exp(mean) if math.isfinite(mean) else math.inf
    return Trial(point, rounds, perplexity, failed, tuple(paths))


def _until(rounds: int, watcher: Watcher, clock: _Clock) -> Watcher:
    """Return a watcher that stops a run after so many rounds, or when the search must pause."""
    played = [0]

    def hear(told: Any) -> None:
        played[0] = told["round"] + 1
        clock.seconds += told["seconds"]
        watcher.round(told)

    def stop() -> bool:
        late = clock.most is not None and clock.seconds >= clock.most
        return played[0] >= rounds or late or clock.asked()

    return replace(watcher, round=hear, stop=stop)


def _scored(path: Path, rounds: int) -> float | None:
    """Return a run's perplexity after so many rounds; infinity if it diverged, None if not yet."""
    if (path / "diverged.json").is_file():
        return math.inf
    if not (path / "journal.jsonl").is_file():
        return None
    facts = facts_of(path)
    found = [told["perplexity"] for told in facts.evaluated if told["round"] < rounds]
    there = len(facts.rounds) >= rounds or (path / "summary.json").is_file()
    return float(found[-1]) if found and there else None


# ---- before the first run --------------------------------------------------------------------


def _check(search: Search, run: Run) -> None:
    splits_of = splits.for_choosing(run).evaluation.splits()
    require(
        bool(splits_of),
        "data.test_clients",
        run.recipe.data.test_clients,
        "held-out text by which settings are compared, whose figures may be told",
        "Set data.test_clients; without a privacy plan data.validation serves too.",
    )


def _claim(search: Search, out: Path) -> None:
    """Take a folder for this search, or go on with it; refuse the folder of another one."""
    file, facts = out / PLAN, search.facts()
    if file.is_file():
        there = read_json(file, str(file), RecordError)
        if not isinstance(there, dict) or there != json.loads(json.dumps(facts)):
            differ = [name for name in facts if _plain(facts[name]) != dict(there or {}).get(name)]
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


def _check_epsilon(search: Search, out: Path, stores: Path, first: Run) -> None:
    """Refuse a search whose runs, with all others on the store, would cost too much."""
    if search.epsilon is None:
        return
    require(
        first.plan is not None, "epsilon", search.epsilon, "no budget for runs without [privacy]"
    )
    require(
        first.private_evaluation is None,
        "privacy.evaluation_noise",
        first.recipe.privacy.evaluation_noise,
        "no noisy figures beside a budget of tune: only the cost of rounds is foreseen",
    )
    spent = lineage.spent_on(first.store, further=_forecast(search, out, stores))
    known = spent.private_runs + spent.other_runs
    require(
        spent.epsilon <= search.epsilon,
        "epsilon",
        search.epsilon,
        f"at least {spent.epsilon:.4g}: what this search and the {known} runs that "
        f"{first.store.path} has seen would cost a client together",
        "Name fewer points, more noise, or fewer rounds."
        if math.isfinite(spent.epsilon)
        else "Runs without a privacy plan have no finite cost: prepare a store of other clients.",
    )


def _forecast(search: Search, out: Path, stores: Path) -> list[list[Entry]]:
    """Return a ledger per run, as it would be at the end of the search.

    Those that were begun go on. Which points go far is not known before: the longest are taken to
    go on, and where plans differ, all of them to the end.
    """
    found: list[list[Entry]] = []
    for point in search.points:
        run = build(search.trial(point, search.seeds[0]), stores, out=out / "none")
        for seed in search.seeds:
            book = Ledger(out / RUNS / name_of({**point, SEED: seed}) / NAME)
            found.append(book.entries() if book.exists() else [begin_entry(dict(run.plans))])
    found.sort(key=len, reverse=True)
    alike = all(book[0]["plans"] == found[0][0]["plans"] for book in found)
    for place, book in enumerate(found):
        point_number = place // len(search.seeds)
        rounds = max(r.rounds for r in search.rungs if point_number < r.points or not alike)
        played = len(rounds_of(book))
        book += [round_entry(number, UNKNOWN) for number in range(played, rounds)]
    return found


# ---- the end ---------------------------------------------------------------------------------


def _finish(
    search: Search, trials: list[Trial], run: Run, out: Path, stores: Path, clock: _Clock
) -> Found:
    ranked = sorted(trials, key=lambda trial: trial.rank)
    best = ranked[0]
    complete = best.rounds == search.rungs[-1].rounds
    sweep = Sweep(search.recipe, list(search.points), None, changes=search.changes)
    results = [result_of(sweep, t.point, path) for t in ranked for path in t.paths]
    found = Found(
        trials=ranked,
        complete=complete,
        edges=edges(search.axes, best.point),
        last=_last_figure(search, best, stores) if complete else None,
        chosen_by=splits.said(run),
        spent=total_of(results),
        seconds=clock.seconds,
    )
    head, rows = table(search, found)
    write_atomically(out / TABLE, markdown(head, rows).encode())
    write_atomically(out / BEST, best_recipe(search, found).encode())
    return found


def _last_figure(search: Search, best: Trial, stores: Path) -> dict[str, Any] | None:
    """Return the best point's perplexity on text that nothing was chosen by, over its seeds."""
    found = []
    for path, seed in zip(best.paths, search.seeds, strict=True):
        directory = RunDirectory(path)
        run = build(search.trial(best.point, seed), stores, out=path)
        part = splits.for_the_last_figure(run)
        if part is None or not directory.weights.is_file():
            return None
        evaluation, split = part
        models = {
            name: load_params(run.recipe.model, run.store.vocabulary, directory.weights_of(name))
            for name in run.round.names
        }
        found.append(float(evaluation.of_models(models, split)["perplexity"]))
    return {"perplexity": found, "mean": statistics.fmean(found), "split": split}


def edges(axes: Mapping[str, tuple[Any, ...]], best: Point) -> list[str]:
    """Say for which settings the best value is the least or largest of those tried.

    >>> edges({"client.learning_rate": (0.1, 0.3, 1.0)}, {"client.learning_rate": 1.0})
    ['client.learning_rate = 1.0 is the largest value tried: the best may lie beyond it.']
    """
    told = []
    for name, values in axes.items():
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) < 2 or len(numbers) < len(values):
            continue
        # Nothing lies beyond a least value of zero, which turns a setting off.
        ends = {max(numbers): "largest"} | ({} if min(numbers) == 0 else {min(numbers): "least"})
        if best[name] in ends:
            told.append(
                f"{name} = {best[name]} is the {ends[best[name]]} value tried: the best may lie "
                "beyond it."
            )
    return told


def table(search: Search, found: Found) -> tuple[list[str], list[list[Any]]]:
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
        f"Found by fedlm tune from {search.recipe.name}: the best of {len(search.points)} points, "
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


def _tables(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_none=True, exclude_unset=True)


def _commented(text: str, axes: Mapping[str, tuple[Any, ...]], best: Point) -> str:
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


def as_facts(search: Search, found: Found, out: Path) -> dict[str, Any]:
    """Return the result as one JSON object."""
    head, rows = table(search, found)
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
