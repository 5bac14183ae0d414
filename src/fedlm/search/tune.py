"""The best settings of a recipe, by successive halving.

In:       a recipe, the settings to try, a budget in rounds or minutes.
Out:      a run directory per point and seed, a table, `best.toml`, the figure of the best on a part
          of the held-out text that chose nothing.
Promise:  all points have the same seeds, rounds and text; a point that stays goes on in its run,
          and a schedule over rounds is that of the whole length from the first round; stopped at
          any moment, the search goes on where it was; private runs are counted together, and a
          search that would exceed a budget of the store is refused before its first run.
Not here: what is tried (`space.py`), for how long (`tune_plan.py`), what is written
          (`tune_results.py`), a grid that is run to its end (`sweep.py`), the two parts of held-out
          text (`splits.py`).

Successive halving (Jamieson & Talwalkar 2016): all points are trained for a short while, one in
`keep_one_in` goes on for that many times as long, and so on until the last few reach the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlm import lineage
from fedlm.core.documents import JsonObject
from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.inference import load_models
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
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.space import edges
from fedlm.search.sweep import FAILED, SEED, Point, name_of, privacy_sentence, train_point
from fedlm.search.tune_plan import Search
from fedlm.search.tune_results import RUNS, Found, Trial, claim_folder, write_found
from fedlm.training import Watcher


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
    claim_folder(search, out)
    _check_epsilon(search, out, stores, first)
    clock = _Clock(search, out, stop)
    alive, done = list(search.points), dict[str, Trial]()
    for number, rung in enumerate(search.rungs):
        alive = alive[: rung.points]
        for place, point in enumerate(alive):
            said = f"{rung.rounds} rounds, point {place + 1} of {len(alive)}: {name_of(point)}"
            trial = _advance(search, point, rung.rounds, out, stores, watcher(said), clock)
            if trial is None:
                break
            done[name_of(point)] = trial
        if trial is None:
            break
        scored = {name_of(point): done[name_of(point)].perplexity for point in alive}
        alive.sort(key=lambda point: scored[name_of(point)])
        last = number + 1 == len(search.rungs)
        left = [trial.perplexity for trial in done.values()] if last else scored.values()
        if all(map(math.isinf, left)):
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
    """Train a point with all seeds up to a round; None if the minutes were over before.

    What earlier calls have trained counts, however many minutes are left.
    """
    nats, failed, paths = [], 0, []
    for seed in search.seeds:
        path = out / RUNS / name_of({**point, SEED: seed})
        scored = _scored(path, rounds)
        if scored is None and not clock.over():  # raises if a stop was asked for
            run = splits.for_choosing(build(search.trial(point, seed), stores, out=path))
            train_point(run, _until(rounds, watcher, clock))
            scored = _scored(path, rounds)
        if scored is None and clock.over():
            return None
        if scored is None:
            why = " its privacy.epsilon is too small for one." if run.plan is not None else ""
            raise RecordError(f"{path} ended before a round that could be scored:{why or '.'}")
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
    """Return a run's perplexity after so many rounds; infinity if it diverged, None if not yet.

    What happened in later rounds changes nothing: a search that goes on decides as it did.
    """
    failed = math.inf if (path / FAILED).is_file() else None
    if not (path / "journal.jsonl").is_file():
        return failed
    rows = facts_of(path).rounds
    found = [r["perplexity"] for r in rows if r["round"] < rounds and "perplexity" in r]
    if not found or not (len(rows) >= rounds or (path / "summary.json").is_file()):
        return failed
    return math.inf if found[-1] is None else float(found[-1])  # JSON has no infinity


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
            kept = Ledger(out / RUNS / name_of({**point, SEED: seed}) / NAME)
            found.append(kept.entries() if kept.exists() else [begin_entry(dict(run.plans))])
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
    last = search.rungs[-1]
    complete = sum(trial.rounds == last.rounds for trial in trials) >= last.points
    begun = sorted(p for p in out.glob(f"{RUNS}/*") if RunDirectory(p).journal.is_file())
    found = Found(
        trials=ranked,
        complete=complete,
        edges=edges(search.axes, best.point),
        last=_last_figure(search, best, stores) if complete else None,
        chosen_by=splits.said(run),
        spent=privacy_sentence(begun),  # also those that the minutes stopped
        seconds=clock.seconds,
    )
    write_found(search, found, out)
    return found


def _last_figure(search: Search, best: Trial, stores: Path) -> JsonObject | None:
    """Return the best point's perplexity on text that nothing was chosen by, over its seeds."""
    found = []
    for path, seed in zip(best.paths, search.seeds, strict=True):
        directory = RunDirectory(path)
        run = build(search.trial(best.point, seed), stores, out=path)
        part = splits.for_the_last_figure(run)
        if part is None or not directory.weights.is_file():
            return None
        evaluation, split = part
        settings, size = run.recipe.model, run.store.vocabulary
        models = load_models(settings, size, directory, run.round.names)
        found.append(float(evaluation.of_models(models, split)["perplexity"]))
    return {"perplexity": found, "mean": statistics.fmean(found), "split": split}
