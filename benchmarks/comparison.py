"""Sides of a comparison, each tuned with the same budget, then trained to the end with all seeds.

In:       a comparison file; a folder for runs; the results that are kept with the code.
Out:      a search per side (`fedlm tune`), a run per side and seed; a small file for each in
          `benchmarks/results/COMPARISON`; a table and a drawing of those files.
Promise:  all sides have the same budget of rounds for tuning, the same rounds, patience and seeds;
          the last figure is of text that neither tuning nor early stopping saw; killed at any
          moment, the same command goes on where it was; what is kept is not made again, and the
          table needs nothing else.
Not here: what a search does (`search/tune.py`), which text chooses (`search/splits.py`), the files
          (`cells.py`), public text and starts (`public.py`).

    python -m benchmarks.comparison cells-irc                  # all cells that are missing
    python -m benchmarks.comparison cells-irc --only CIFG SI-CIFG --hours 3
    python -m benchmarks.comparison cells-irc --table          # from the kept files alone
    python -m benchmarks.comparison cells-irc --smoke          # all cells, tiny, for two rounds
    python -m benchmarks.comparison --list

Cells train in one lane, so that two commands can make cells side by side; each leaves those alone
that another one is at.

A comparison file:

    question = "Does SI-CIFG train better than CIFG?"
    hours = 12                         # expected on two cores that are free, for all sides
    recipe = "../../recipes/irc.toml"  # relative to the file
    set = ["server.rounds=1000"]       # for all sides
    over = ["client.learning_rate=0.3,1,3"]  # what is tuned; a side may have its own
    tune_rounds = 3000                 # of all points of a side together
    tune_length = 300                  # of the longest point; 0 is as long as the run
    keep_one_in = 1                    # play all points to the end; by default one in three
    seeds = [0, 1, 2]
    patience = 10                      # evaluations without improvement that end a run; 0 is never
    target = 90                        # also tell rounds to this perplexity
    alone = "local"                    # of trees: the side that tells which leaves others hurt
    [public]                           # text that all may read: vocabulary, and a start
    recipe = "../../recipes/irc-pretrain.toml"  # its `data.groups` are public, others private
    set = ["server.rounds=40"]         # its `[model]` is that of each side
    [[sides]]
    name = "SI-CIFG"
    set = ["model.name=si-cifg"]
    public_start = true                # begins with a model trained on public text
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from benchmarks import public
from benchmarks.cells import (
    RESULTS,
    Cells,
    Facts,
    claimed,
    deadline,
    plain_name,
    recipe_digest,
    work_folder,
)
from fedlm.core.documents import read_toml
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, nearest
from fedlm.engine.devices import use_devices
from fedlm.inference import load_params
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.svg import Series, lines, with_names
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.space import axes_of
from fedlm.search.sweep import FAILED, Point, literal, markdown, over_seeds, train_point
from fedlm.search.tune import search_settings
from fedlm.search.tune_plan import Search, plan_search
from fedlm.training import Watcher

STORES = Path(".fedlm/stores")
FILES = Path(__file__).parent / "comparisons"
HEAD = ["side", "seeds", "start", "perplexity, last text", "while training", "rounds"]
HEAD += ["rounds to target"]
HEAD += [
    "MB up per member and round",
    "epsilon",
    "noise to signal",
    "diverged",
    "hurt",
    "core-hours",
    "tuned",
]
TRIED = ["side", "setting", "points that diverged", "best of the others (rounds)"]
ONE_LANE = "run.devices=1"
STRICT = ConfigDict(extra="forbid")
UNKNOWN = "unexpected_keyword_argument"  # as pydantic calls it
HEIGHT = 330
# Of `--smoke`: everything happens, nothing is learned.
SMOKE = (
    *("server.rounds=2", "server.evaluate_every=1", "server.evaluate_rows=16", "server.cohort=4"),
    *("run.checkpoint_every=1", "client.max_steps=2", "model.embedding_size=16", "model.heads=2"),
    *("model.hidden_size=32", "model.layers=2"),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: its changes of the recipe, and what of it is tuned."""

    __pydantic_config__ = STRICT

    name: str
    set: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    public_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Public:
    """Text that all may read: a recipe whose `data.groups` it is, and its changes."""

    __pydantic_config__ = STRICT

    recipe: str
    set: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison file."""

    __pydantic_config__ = STRICT

    path: Path
    question: str
    hours: float
    recipe: str
    sides: tuple[Side, ...]
    set: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    tune_rounds: int = 0  # 0: nothing is tuned
    tune_length: int = 0
    keep_one_in: int | None = None  # of a search's points; None: as `fedlm tune` has it
    seeds: tuple[int, ...] = (0, 1, 2)
    patience: int = 0
    target: float | None = None
    alone: str = ""
    notes: tuple[str, ...] = field(default=())
    public: Public | None = None

    @property
    def base(self) -> Path:
        return self.path.parent / self.recipe

    @property
    def name(self) -> str:
        return self.path.stem

    def changes(self, side: Side) -> tuple[str, ...]:
        """Return what a side changes in the recipe."""
        return (ONE_LANE, *self.set, *side.set)

    def pretraining(self, side: Side, *more: str) -> Recipe | None:
        """Return the recipe of a side's model on public text; None without such text."""
        if self.public is None:
            return None
        changes = (ONE_LANE, *self.public.set, *more)
        recipe = load(self.path.parent / self.public.recipe, changes)
        model = load(self.base, self.changes(side)).model
        return recipe.model_copy(update={"model": model})

    def search(self, side: Side, *paths: str) -> Search | None:
        """Return what is tuned for a side; None if nothing is."""
        if not self.tune_rounds:
            return None
        changes = (*self.changes(side), *paths)
        if self.tune_length:
            changes = (*changes, f"server.rounds={self.tune_length}")
        axes = axes_of(side.over or self.over)
        return plan_search(
            *(self.base, changes),
            over=axes or None,
            rounds=self.tune_rounds,
            keep_one_in=self.keep_one_in,
        )

    def final(self, side: Side, best: Point, seed: int, *paths: str) -> Recipe:
        """Return the recipe of a side's run with a seed, at the settings that were found."""
        last = (f"run.seed={seed}", f"server.patience={self.patience}", *paths)
        return load(self.base, (*self.changes(side), *as_changes(best), *last))


def as_changes(point: Point) -> list[str]:
    """Return the settings of a point as changes of a recipe."""
    return [f"{k}={v if isinstance(v, str) else literal(v)}" for k, v in point.items()]


def read_comparison(path: Path) -> Comparison:
    """Read and check a comparison file: all searches and runs are made, none is trained."""
    tables = read_toml(path, f"comparison {path}")
    try:
        made = TypeAdapter(Comparison).validate_python({**tables, "path": tables.get("path", path)})
    except ValidationError as error:
        raise ConfigError(f"comparison {path}: {_said(error)}") from None

    def wanted(ok: object, said: str) -> None:
        if not ok:
            raise ConfigError(f"comparison {path}: {said}")

    names = [side.name for side in made.sides]
    wanted("path" not in tables, "no setting 'path'.")
    wanted(made.sides, "expected at least one of [[sides]].")
    wanted(made.seeds, "seeds = []: expected at least one.")
    wanted(
        len(set(made.seeds)) == len(made.seeds), f"seeds = {list(made.seeds)}: one stands twice."
    )
    for side in made.sides:
        files = [name for name in names if plain_name(name) == plain_name(side.name)]
        wanted(len(files) == 1, f"sides {files} would be kept in one file. Name them otherwise.")
        wanted(
            made.public or not side.public_start,
            f"side {side.name!r} has public_start = true, which needs a table [public] with the "
            "recipe of that text.",
        )
        opened = made.pretraining(side)
        wanted(
            opened is None or opened.data.groups,
            "public.recipe: expected data.groups, the groups that are public.",
        )
        made.search(side)
        for seed in made.seeds:
            made.final(side, {}, seed)
    wanted(
        not made.alone or made.alone in names,
        f"alone = {made.alone!r} is no side. {nearest(made.alone, names)}",
    )
    return made


def _said(error: ValidationError) -> str:
    """Return the first thing that is wrong with a file, as a sentence."""
    found = error.errors()
    first = next((each for each in found if each["type"] == UNKNOWN), found[0])
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"expected {place}."
    if first["type"] == UNKNOWN:
        kind = {"sides": Side, "public": Public}.get(str(first["loc"][0]), Comparison)
        known = kind.__dataclass_fields__.keys() - {"path"}
        return f"no setting {place!r}. {nearest(str(first['loc'][-1]), known)}"
    return f"{place} = {first['input']!r}: {first['msg']}."


def called(given: Path) -> Path:
    """Return a comparison file by its path, or by its name among those that are shipped."""
    if given.suffix != ".toml" and (FILES / f"{given.name}.toml").is_file():
        return FILES / f"{given.name}.toml"
    return given


# ---- cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A comparison at work: where its results are kept, and where its runs are."""

    comparison: Comparison
    cells: Cells
    out: Path

    def tuning_name(self, side: Side) -> str:
        return f"{side.name} tuning"

    def run_name(self, side: Side, seed: int) -> str:
        return f"{side.name} seed {seed}"

    def start_of(self, side: Side) -> Facts:
        """Return what of public text decides a side's figures, for digests."""
        recipe = self.comparison.pretraining(side)
        if recipe is None:
            return {}
        return {"public": recipe_digest(recipe), "public_start": side.public_start}

    def search_digest(self, side: Side) -> str:
        """Return the digest of all that decides what tuning a side finds."""
        search = self.comparison.search(side)
        assert search is not None
        facts = {k: v for k, v in search.facts().items() if k != "recipe_sha256"}
        return recipe_digest(search.base(), search=facts, **self.start_of(side))

    def run_digest(self, side: Side, best: Point, seed: int) -> str:
        """Return the digest of all that decides the figures of a side's run."""
        return recipe_digest(self.comparison.final(side, best, seed), **self.start_of(side))

    def paths(self, side: Side) -> tuple[str, ...]:
        """Return the settings of private text and public start, after making what is missing."""
        asked = self.comparison.pretraining(side)
        if asked is None:
            return ()
        text, private = public.divide(asked, self.out)
        made = self.comparison.pretraining(side, f"data.source={text.resolve()}", "data.groups=[]")
        assert made is not None
        name = f"public {made.model.name}"
        path = work_folder(self.out, name, recipe_digest(asked)) / "run"
        public.train(made, path, STORES, lambda: say(name))
        return public.begun_from(path, private, weights=side.public_start)

    def kept_tuning(self, side: Side) -> Facts | None:
        """Return what tuning a side found, if it is kept; of a side that needs none, nothing."""
        if self.comparison.search(side) is None:
            return {"best": {}}
        return self.cells.read(self.tuning_name(side), self.search_digest(side))

    def kept_run(self, side: Side, seed: int) -> Facts | None:
        """Return a side's figures with a seed, if they are kept."""
        found = self.kept_tuning(side)
        if found is None:
            return None
        return self.cells.read(
            self.run_name(side, seed), self.run_digest(side, found["best"], seed)
        )

    def folder(self, name: str) -> Path:
        """Return what a process claims that makes a cell; its runs are below."""
        return self.out / plain_name(name)

    def tune(self, side: Side) -> None:
        """Tune a side, or go on with it, and keep what was found."""
        digest, name = self.search_digest(side), self.tuning_name(side)
        search = self.comparison.search(side, *self.paths(side))
        assert search is not None
        folder = work_folder(self.out, name, digest)
        found = search_settings(
            search, folder / "search", STORES, lambda label: say(f"{side.name}: {label}")
        )
        facts = {
            "best": {k: "inf" if v == math.inf else v for k, v in found.best.point.items()},
            "perplexity": found.best.perplexity,
            "rounds": found.best.rounds,
            "edges": found.edges,
            "chosen_by": found.chosen_by,
            "privacy": found.spent,
            "seconds": found.seconds,
            "trials": [[t.point, t.rounds, t.perplexity, t.diverged] for t in found.trials],
        }
        self.cells.write(name, digest, facts)

    def play(self, side: Side, seed: int) -> None:
        """Train a side with a seed to its end, or go on with it, and keep its figures."""
        found, name = self.kept_tuning(side), self.run_name(side, seed)
        assert found is not None
        digest = self.run_digest(side, found["best"], seed)
        recipe = self.comparison.final(side, found["best"], seed, *self.paths(side))
        path = work_folder(self.out, name, digest) / "run"
        run = splits.for_choosing(build(recipe, STORES, out=path))
        if not (RunDirectory(path).summary.is_file() or (path / FAILED).is_file()):
            train_point(run, say(name))
        facts = {
            "settings": [*side.set, *as_changes(found["best"])],
            "seed": seed,
            **figures_of(path),
            **last_figures(build(recipe, STORES, out=path)),
        }
        self.cells.write(name, digest, facts)

    def missing(self, only: Sequence[str]) -> list[tuple[str, Side, int | None]]:
        """Return the cells that are not kept, those of the first seed first; no seed is tuning."""
        sides = [side for side in self.comparison.sides if not only or side.name in only]
        found: list[tuple[str, Side, int | None]] = []
        for side in sides:
            if self.kept_tuning(side) is None:
                found.append((self.tuning_name(side), side, None))
        for seed in self.comparison.seeds:
            for side in sides:
                if self.kept_run(side, seed) is None:
                    found.append((self.run_name(side, seed), side, seed))
        return found

    def make_all(self, only: Sequence[str], over: Callable[[], bool]) -> None:
        """Make the missing cells one after the other until the time is over."""
        passed: set[str] = set()  # another process is at these
        while not over():
            ready = [
                (name, side, seed)
                for name, side, seed in self.missing(only)
                if name not in passed and (seed is None or self.kept_tuning(side) is not None)
            ]
            if not ready:
                return
            name, side, seed = min(ready, key=lambda cell: cell[2] if cell[2] is not None else -1)
            with claimed(self.folder(name)) as mine:
                if not mine:
                    passed.add(name)
                elif seed is None:
                    self.tune(side)
                else:
                    self.play(side, seed)


def figures_of(path: Path) -> Facts:
    """Return what a run's journal says, as it is kept."""
    facts = facts_of(path)
    tokens, curve = 0, []
    for told in facts.rounds:
        tokens += told.get("tokens") or 0
        if told.get("perplexity") is not None:
            point = [told["round"] + 1, tokens, told["perplexity"]]
            own = told.get("personal_perplexity")
            curve.append(point if own is None else [*point, own])
    last = facts.rounds[-1] if facts.rounds else {}
    return {
        "best": min((point[2] for point in curve), default=None),
        "rounds": len(facts.rounds),
        "tokens": tokens,
        "parameters": facts.header.get("parameters"),
        "member_bytes": statistics.fmean(facts.member_bytes or [0.0]),
        "upload_bytes": last.get("upload_bytes"),
        "download_bytes": last.get("download_bytes"),
        "epsilon": (facts.final.get("privacy") or {}).get("epsilon"),
        "noise_to_signal": last.get("noise_to_signal"),
        "diverged": (path / FAILED).is_file(),
        "seconds": float(sum(told["seconds"] for told in facts.rounds)),
        "curve": curve,
    }


def last_figures(whole: Run) -> Facts:
    """Return the figures on the text that nothing else saw: of the best models, where kept."""
    part, directory = splits.for_the_last_figure(whole), whole.record
    if part is None or not directory.summary.is_file():
        return {"last": None}
    models = {
        name: load_params(whole.recipe.model, whole.store.vocabulary, best_weights(directory, name))
        for name in whole.round.names
    }
    evaluation, split = part
    found = evaluation.of_models(models, split)
    told: Facts = {"last": found["perplexity"], "bits_per_byte": found.get("bits_per_byte")}
    if tuple(whole.round.names) == ("",):
        told["start"] = evaluation.of_models({"": whole.start()}, split)["perplexity"]
    if "matrix" in found:
        leaves = found["matrix"]["places"]
        told["leaves"] = {n["name"]: n["perplexity"] for n in found["nodes"] if n["name"] in leaves}
    return told


def best_weights(directory: RunDirectory, node: str) -> Path:
    """Return the best model of a node or of the whole run if one is kept, else the last."""
    best = directory.node(node).best if node else directory.best
    return best if best.is_file() else directory.weights_of(node)


# ---- the table -----------------------------------------------------------------------------------


def results(work: Work, only: Sequence[str] = ()) -> list[Facts]:
    """Return the kept figures of all sides that have any."""
    found = []
    for side in work.comparison.sides:
        if only and side.name not in only:
            continue
        cells = [work.kept_run(side, seed) for seed in work.comparison.seeds]
        runs = [{**run, **_reached(work.comparison, run)} for run in cells if run is not None]
        if runs:
            best = (work.kept_tuning(side) or {}).get("best", {})
            tuned = [f"{name} = {value}" for name, value in best.items()]
            found.append({"side": side.name, "tuned": tuned, "runs": runs})
    alone = next((each for each in found if each["side"] == work.comparison.alone), None)
    return [{**each, "hurt": hurt(each, alone)} for each in found]


def _reached(comparison: Comparison, run: Facts) -> Facts:
    goal = comparison.target or 0.0
    return {"reached": next((point[0] for point in run["curve"] if point[2] <= goal), None)}


def hurt(side: Facts, alone: Facts | None) -> float | None:
    """Return the share of leaves, over seeds, that score worse than alone; None where unknown."""
    if alone is None or side is alone:
        return None
    by_seed = {run["seed"]: run.get("leaves") for run in alone["runs"]}
    pairs = [
        (found, by_seed[run["seed"]][leaf])
        for run in side["runs"]
        if by_seed.get(run["seed"])
        for leaf, found in (run.get("leaves") or {}).items()
    ]
    return statistics.fmean(a > b for a, b in pairs) if pairs else None


def row(found: Facts) -> list[str]:
    """Return the line of a side in the table."""
    runs = found["runs"]

    def column(name: str, digits: int = 1) -> str:
        return over_seeds([run[name] for run in runs], digits)

    epsilons = [run["epsilon"] for run in runs if run["epsilon"] is not None]
    noise = [x for x in (run.get("noise_to_signal") for run in runs) if x is not None]
    return [
        found["side"],
        str(len(runs)),
        column("start") if all("start" in run for run in runs) else "-",
        column("last"),
        column("best"),
        column("rounds", 0),
        column("reached", 0),
        f"{statistics.fmean(run['member_bytes'] for run in runs) / 1e6:.3f}",
        f"{max(epsilons):.2f}" if epsilons else "-",
        f"{statistics.fmean(noise):.2f}" if noise else "-",
        f"{sum(run['diverged'] for run in runs)} of {len(runs)}",
        "-" if found.get("hurt") is None else f"{found['hurt']:.0%}",
        f"{sum(run['seconds'] for run in runs) / 3600:.2f}",
        ", ".join(found["tuned"]) or "-",
    ]


def curves(found: Sequence[Facts]) -> str:
    """Draw perplexity over rounds while training, the mean of the seeds of each side."""
    series = []
    for number, side in enumerate(found):
        by_round: dict[int, list[float]] = {}
        for run in side["runs"]:
            for point in run["curve"]:
                by_round.setdefault(point[0], []).append(point[2])
        whole = {n: v for n, v in by_round.items() if len(v) == len(side["runs"])}
        means = {n: statistics.fmean(v) for n, v in sorted(whole.items())}
        series.append(Series(side["side"], list(means), list(means.values()), number))
    chart = lines(series, x="rounds", y="perplexity", log_y=True, height=HEIGHT)
    return with_names(chart, [(one.name, one.colour) for one in series], HEIGHT)


def epsilons(found: Sequence[Facts]) -> str | None:
    """Draw perplexity over epsilon with its spread; None where no model has two epsilons.

    Sides are of one model if their names agree up to a first ", epsilon" and after its number.
    """
    by_model: dict[str, list[tuple[float, float, float]]] = {}
    for side in found:
        spent = [run["epsilon"] for run in side["runs"] if run["epsilon"] is not None]
        last = [run["last"] for run in side["runs"] if run["last"] is not None]
        model = re.sub(r", epsilon [0-9.]+", "", side["side"])
        if spent and len(last) == len(side["runs"]):
            spread = statistics.stdev(last) if len(last) > 1 else 0.0
            by_model.setdefault(model, []).append((max(spent), statistics.fmean(last), spread))
    several = {model: sorted(points) for model, points in by_model.items() if len(points) > 1}
    if not several:
        return None
    series = [
        Series(
            *(model, [x for x, _, _ in points], [y for _, y, _ in points], number),
            low=[y - spread for _, y, spread in points],
            high=[y + spread for _, y, spread in points],
        )
        for number, (model, points) in enumerate(several.items())
    ]
    chart = lines(series, x="epsilon", y="perplexity", log_x=True, height=HEIGHT)
    return with_names(chart, [(one.name, one.colour) for one in series], HEIGHT)


def tuning(work: Work, only: Sequence[str] = ()) -> list[list[str]]:
    """Return a line per value of each setting that was tuned: how many points diverged there."""
    lines = []
    for side in work.comparison.sides:
        kept = None if only and side.name not in only else work.kept_tuning(side)
        trials = (kept or {}).get("trials", [])
        for name in trials[0][0] if trials else []:
            for value in dict.fromkeys(sorted(point[name] for point, *_ in trials)):
                here = [t for t in trials if t[0][name] == value]
                best = min(((t[2], t[1]) for t in here if t[2] is not None), default=None)
                lost = sum(bool(t[3]) for t in here)
                lines.append([side.name, f"{name} = {value}", f"{lost} of {len(here)}"])
                lines[-1].append("-" if best is None else f"{best[0]:.1f} ({best[1]})")
    return lines


def tell(work: Work, only: Sequence[str] = ()) -> str:
    """Return the tables of what is kept, and draw its curves beside the files."""
    found, tried = results(work, only), tuning(work, only)
    tuned = f"\nWhile tuning:\n\n{markdown(TRIED, tried)}" if tried else ""
    if not found and tried:
        return f"{work.comparison.question}\n{tuned}"
    if not found:
        return f"No cell of {work.comparison.name} is kept yet in {work.cells.folder}.\n"
    if not only:
        write_atomically(work.cells.folder / "curves.svg", curves(found).encode())
        if (drawn := epsilons(found)) is not None:
            write_atomically(work.cells.folder / "epsilons.svg", drawn.encode())
    left = len(work.missing(only))
    said = f"\n{left} cells are missing.\n" if left else ""
    table = markdown(HEAD, [row(each) for each in found])
    return f"{work.comparison.question}\n\n{table}{said}{tuned}"


def say(label: str) -> Watcher:
    """Print a label; return a watcher that prints the perplexity of rounds below it."""
    print(label, flush=True)

    def on_round(told: Any) -> None:
        found = told.get("perplexity")
        if found is not None and math.isfinite(found):
            print(f"  round {told['round'] + 1}, perplexity {found:.1f}", flush=True)

    return Watcher(round=on_round)


def smoke(made: Comparison) -> Comparison:
    """Return a comparison in which everything happens: tiny models, two rounds, one point and seed.

    So nothing that the files say fails after hours.
    """

    def first(over: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis.split(",")[0] for axis in over)

    sides = tuple(
        replace(side, set=(*side.set, *SMOKE), over=first(side.over)) for side in made.sides
    )
    start = made.public and replace(made.public, set=(*made.public.set, *SMOKE))
    return replace(
        made,
        public=start,
        sides=sides,
        over=first(made.over),
        tune_length=2,
        tune_rounds=2 if made.tune_rounds else 0,
        seeds=made.seeds[:1],
    )


def main() -> None:
    """Make the cells of a comparison that are missing, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="a comparison file, or its name")
    parser.add_argument("--out", type=Path, help="where runs are; may be removed in the end")
    parser.add_argument("--results", type=Path, help="where results are kept")
    parser.add_argument("--only", nargs="+", default=[], help="sides, by their names")
    parser.add_argument("--hours", type=float, help="begin no cell after so many hours")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    parser.add_argument(
        "--smoke", action="store_true", help="all cells, tiny, for two rounds; none is kept"
    )
    parser.add_argument("--list", action="store_true", help="comparisons and their hours")
    asked = parser.parse_args()
    if asked.list or asked.file is None:
        for file in sorted(FILES.glob("*.toml")):
            made = read_comparison(file)
            print(f"{file.stem:20} {made.hours:5.1f} h  {made.question}")
        return
    made = read_comparison(called(asked.file))
    sides = [side.name for side in made.sides]
    for name in asked.only:
        if name not in sides:
            raise SystemExit(f"{made.name} has no side {name!r}. {nearest(name, sides)}")
    if asked.smoke:
        use_devices(1)
        folder = Path(tempfile.mkdtemp(prefix="fedlm-smoke-"))
        work = Work(smoke(made), Cells(folder / "results"), folder / "runs")
        try:
            work.make_all(asked.only, deadline(None))
            print(tell(work))
        finally:
            shutil.rmtree(folder)
        return
    kept = Cells(asked.results or RESULTS / made.name)
    work = Work(made, kept, asked.out or Path("runs") / made.name)
    if not asked.table:
        use_devices(1)
        work.make_all(asked.only, deadline(asked.hours))
    print(tell(work, asked.only), end="")


if __name__ == "__main__":
    main()
