"""What would a larger crowd give under the same epsilon? A law, fitted and checked by simulation.

In:       chat of 4,669 users (`recipes/irc.toml`), a model of 0.1M parameters, BLT noise.
Out:      a small file per point in `benchmarks/results/crowds`; tables and a drawing of those
          files.
Promise:  every point gets the same rates to choose from, by one half of the test clients, and its
          figure is of the other half; each client joins at most once; no point of the check takes
          part in the fit.
Not here: epsilon at one size of crowd (`comparisons/private-irc.toml`).

    python -m benchmarks.crowds --model cifg          # the points that are missing
    python -m benchmarks.crowds --table               # from the kept files alone

The noise multiplier z follows from epsilon, delta, rounds and separation, not from the crowd (all
points have the delta of 4,669 clients; what larger crowds would give is told at theirs). The mean
of a cohort of m has noise of z / m clips in every entry. So a crowd of k times as many clients,
whose cohorts are k times as large, has a k-th of the noise. Simulation can only have the clients
that there are; what it can do is to divide the noise:

    small crowds      cohorts of 10, 20, 40 and 75 clients, each with its own whole noise z
    stand-ins         cohorts of 75 with noise 75 z / m, for the same m: the noise of the smaller
                      crowd, with the clients of the larger
    larger crowds     cohorts of 75 with noise 75 z / m for m beyond 75

Small crowds beside their stand-ins tell how far a stand-in can be believed. The law is

    ln perplexity = floor + weight * (z / m)^power

fitted to stand-ins alone. It leaves out what larger cohorts gain beside less noise, and what a
larger crowd could do with more rounds: it is a bound from above, as far as the check allows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.cells import RESULTS, Cells, Facts, claimed, deadline, recipe_digest, work_folder
from benchmarks.comparison import figures_of, last_figures
from fedlm.core.durable import write_atomically
from fedlm.core.types import Sampling
from fedlm.engine.devices import use_devices
from fedlm.privacy.account import calibrate
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.svg import Series, lines, with_names
from fedlm.search import splits
from fedlm.search.sweep import FAILED, markdown, over_seeds, train_point
from fedlm.training import Watcher

STORES = Path(".fedlm/stores")
RECIPE = Path(__file__).parents[1] / "recipes" / "irc.toml"
MODELS = ("cifg", "si-cifg", "transformer", "si-transformer")
CLIENTS, ROUNDS, COHORT = 4669, 62, 75  # nearly all join, each once
DELTA, EPSILON, EPSILONS = 0.0000921, 8.0, (4.0, 8.0, 16.0)
SMALLER, LARGER = (10, 20, 40), (150, 300, 1500, 15000)
CROWDS = (CLIENTS, 100_000, 1_000_000)
RATES = ((1.0, 3.0), (1.0, 8.0), (1.0, 20.0), (1.0, 60.0))  # of client and server
SEEDS = (0, 1, 2)
HEIGHT = 360
BASE = (
    *("data.vocabulary=1500", "model.embedding_size=48", "client.max_examples=256"),
    *("server.optimizer=fedavgm", f"server.rounds={ROUNDS}", "server.sampling=spaced"),
    *(f"server.evaluate_every={ROUNDS // 2}", "privacy.mechanism=blt", f"privacy.delta={DELTA}"),
    *("privacy.clip_norm=0.1", f"privacy.min_separation={ROUNDS - 1}", "run.devices=1"),
    *("run.checkpoint_every=20", "run.keep_checkpoints=1", "run.trackers=[]"),
    "run.baselines=false",
)
SHAPES = {
    "cifg": ("model.hidden_size=96",),
    "si-cifg": ("model.hidden_size=96",),
    "transformer": ("model.hidden_size=96", "model.layers=1", "model.heads=4"),
    "si-transformer": ("model.hidden_size=96", "model.layers=1", "model.heads=4"),
}


@dataclass(frozen=True)
class Point:
    """A model at a cohort, with the noise of a crowd whose cohorts have `stands_for` clients."""

    model: str
    cohort: int
    stands_for: int  # 0: without noise

    @property
    def name(self) -> str:
        return f"{self.model} cohort {self.cohort} noise of {self.stands_for}"


def points(model: str) -> list[Point]:
    """Return the points of a model, those of the check first."""
    crowd = [Point(model, m, m) for m in (*SMALLER, COHORT)]
    return [*crowd, *(Point(model, COHORT, m) for m in (*SMALLER, *LARGER, 0))]


@cache
def multiplier(epsilon: float, delta: float = DELTA) -> float:
    """Return the noise multiplier of an epsilon and a delta, the same in crowds of any size."""
    sampling = Sampling(law="spaced", population=CLIENTS, cohort=COHORT, min_separation=ROUNDS - 1)
    plan = PrivacyPlan(
        mechanism="blt",
        sampling=sampling,
        rounds=ROUNDS,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=delta,
    )
    return float(f"{calibrate(plan, epsilon):.4g}")


def recipe_of(point: Point, noise: float, rates: tuple[float, float], seed: int) -> Recipe:
    """Return the recipe of a point; `noise` is the multiplier of a crowd of its own size."""
    here = noise * point.cohort / point.stands_for if point.stands_for else 0.0
    changes = (
        *(*BASE, f"model.name={point.model}", *SHAPES[point.model], f"run.seed={seed}"),
        *(f"client.learning_rate={rates[0]}", f"server.learning_rate={rates[1]}"),
        *(f"server.cohort={point.cohort}", f"privacy.noise_multiplier={here:.6g}"),
    )
    return load(RECIPE, changes)


def digest_of(point: Point, noise: float) -> str:
    """Return the digest of all that decides a point."""
    return recipe_digest(recipe_of(point, noise, RATES[0], 0), rates=RATES, seeds=SEEDS)


def train(point: Point, noise: float, rates: tuple[float, float], seed: int, out: Path) -> Facts:
    """Train one run of a point, or read what it left: what it is chosen by, and its last figure."""
    recipe = recipe_of(point, noise, rates, seed)
    name = f"{point.name} {rates[0]} {rates[1]} seed {seed}"
    path = work_folder(out, name, recipe_digest(recipe))
    run = splits.for_choosing(build(recipe, STORES, out=path))
    if not (run.record.summary.is_file() or (path / FAILED).is_file()):
        train_point(run, Watcher())
    told = figures_of(path)
    if told["diverged"]:
        return {"choose": math.inf, "last": math.inf}
    last = last_figures(build(recipe, STORES, out=path))["last"]
    return {"choose": told["curve"][-1][2], "last": last, **{k: told[k] for k in KEPT}}


KEPT = ("noise_to_signal", "seconds", "parameters")


def make(point: Point, noise: float, cells: Cells, out: Path) -> None:
    """Make one point and keep it: one seed of all rates, the others of the best."""
    print(point.name, flush=True)
    tried = {rates: train(point, noise, rates, SEEDS[0], out) for rates in RATES}
    best = min(tried, key=lambda rates: tried[rates]["choose"])
    runs = [tried[best], *(train(point, noise, best, seed, out) for seed in SEEDS[1:])]
    print(f"  rates {best}, perplexity {over_seeds([run['last'] for run in runs])}", flush=True)
    facts: Facts = {
        "model": point.model,
        "cohort": point.cohort,
        "stands_for": point.stands_for,
        "noise_multiplier": noise,  # of a crowd of its own size
        "rates": best,
        "tried": [[*rates, run["choose"]] for rates, run in tried.items()],
        "last": [run["last"] for run in runs],
        "noise_to_signal": [run.get("noise_to_signal") for run in runs],
        "parameters": runs[0].get("parameters"),
        "seconds": sum(run.get("seconds", 0.0) for run in (*tried.values(), *runs[1:])),
    }
    cells.write(point.name, digest_of(point, noise), facts)


# ---- the law -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """ln perplexity = floor + weight * noise^power, with the noise of a mean in clips."""

    floor: float
    weight: float
    power: float

    def __call__(self, noise: float) -> float:
        """Return the perplexity that the law expects."""
        return math.exp(self.floor + self.weight * noise**self.power)


def fitted(noise: Sequence[float], perplexity: Sequence[float]) -> Law:
    """Return the law of least squares in the logarithm of perplexity.

    >>> law = fitted([0.0, 0.1, 0.2, 0.4], [math.exp(4 + 3 * s**1.5) for s in (0, 0.1, 0.2, 0.4)])
    >>> round(law.floor, 3), round(law.weight, 3), law.power
    (4.0, 3.0, 1.5)
    """
    logs = np.log(np.asarray(perplexity))
    best: tuple[float, Law] | None = None
    for power in np.arange(0.3, 3.01, 0.05):
        design = np.stack([np.ones(len(noise)), np.asarray(noise) ** power], axis=1)
        found, *_ = np.linalg.lstsq(design, logs, rcond=None)
        left = float(np.sum((design @ found - logs) ** 2))
        if best is None or left < best[0] - 1e-12:
            best = left, Law(float(found[0]), float(found[1]), round(float(power), 2))
    assert best is not None
    return best[1]


def noise_of(facts: Facts) -> float:
    """Return the standard deviation of the noise of a cohort's mean, in clips."""
    return facts["noise_multiplier"] / facts["stands_for"] if facts["stands_for"] else 0.0


def mean(facts: Facts) -> float:
    """Return the mean of the last figures over seeds; infinite if one diverged."""
    return statistics.fmean(math.inf if last is None else last for last in facts["last"])


def law_of(found: Sequence[Facts]) -> Law | None:
    """Return the law of a model's stand-ins at the largest cohort, if there are enough."""
    used = [f for f in found if f["cohort"] == COHORT and math.isfinite(mean(f))]
    return fitted([noise_of(f) for f in used], [mean(f) for f in used]) if len(used) > 4 else None


# ---- tables --------------------------------------------------------------------------------------


def delta_of(crowd: int) -> float:
    """Return the delta of a crowd, 1 / n^1.1, rounded down."""
    return float(f"{0.9995 * crowd**-1.1:.3g}")


def clients(cohort: int) -> int:
    """Return how many clients there are where cohorts are that large: each joins once."""
    return cohort * CLIENTS // COHORT


def kept(cells: Cells, model: str) -> list[Facts]:
    """Return the points of a model that are there."""
    found = []
    for point in points(model):
        file = cells.file(point.name)
        if file.is_file():
            noise = json.loads(file.read_text())["noise_multiplier"]
            facts = cells.read(point.name, digest_of(point, noise))
            assert facts is not None
            found.append(facts)
    return found


CHECK = ["model", "clients", "cohort", "noise of the mean, clips", "noise to signal", "perplexity"]
CHECK += ["its stand-in of 75", "the law"]
EXPECTED = ["model", "clients", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS), "no noise"]


def checked(found: Sequence[Facts], law: Law | None) -> list[list[str]]:
    """Return a line per crowd: what it gives, what its stand-in gives, and what the law expects."""
    by_point = {(f["cohort"], f["stands_for"]): f for f in found}
    made = []
    for m in sorted({f["stands_for"] for f in found} - {0}):
        crowd, stand_in = by_point.get((m, m)), by_point.get((COHORT, m))
        facts = crowd or stand_in
        assert facts is not None
        ratio = [r for r in facts["noise_to_signal"] if r is not None]
        made.append(
            [
                facts["model"],
                f"{clients(m):,}",
                str(m),
                f"{noise_of(facts):.5f}",
                f"{statistics.fmean(ratio):.2f}" if ratio else "-",
                over_seeds(crowd["last"]) if crowd else "-",
                over_seeds(stand_in["last"]) if stand_in and m != COHORT else "-",
                f"{law(noise_of(facts)):.1f}" if law and m != COHORT else "-",
            ]
        )
    return made


def expected(model: str, law: Law) -> list[list[str]]:
    """Return what the law expects of crowds of several sizes under several epsilons.

    Delta is that of the crowd: a larger one needs a smaller delta, and so more noise.
    """

    def at(crowd: int, epsilon: float) -> str:
        noise = multiplier(epsilon, delta_of(crowd))
        return f"{law(noise * CLIENTS / (COHORT * crowd)):.1f}"

    return [
        [model, f"{crowd:,}", *(at(crowd, epsilon) for epsilon in EPSILONS), f"{law(0.0):.1f}"]
        for crowd in CROWDS
    ]


def drawn(found: Sequence[Facts], laws: dict[str, Law]) -> str:
    """Draw perplexity over the clients of a crowd: what crowds gave, and the law."""
    series = []
    for model, law in laws.items():
        here = [f for f in found if f["model"] == model and f["stands_for"]]
        whole = [10 * 2**i for i in range(12)]
        x = [clients(m) for m in whole]
        y = [law(multiplier(EPSILON, delta_of(n)) / m) for n, m in zip(x, whole, strict=True)]
        series.append(Series(f"{model}, the law", x, y, len(series)))
        real = sorted(
            (clients(f["cohort"]), mean(f)) for f in here if f["cohort"] == f["stands_for"]
        )
        series.append(
            Series(f"{model}, crowds", [a for a, _ in real], [b for _, b in real], len(series))
        )
    chart = lines(series, x="clients", y="perplexity", log_x=True, log_y=True, height=HEIGHT)
    return with_names(chart, [(one.name, one.colour) for one in series], HEIGHT)


def tell(cells: Cells) -> str:
    """Return the tables of what is kept, and draw them beside the files."""
    found = {model: kept(cells, model) for model in MODELS}
    laws = {model: law for model, facts in found.items() if (law := law_of(facts))}
    check = [line for model, facts in found.items() for line in checked(facts, laws.get(model))]
    if not check:
        return f"No point is kept yet in {cells.folder}.\n"
    said = f"Epsilon {EPSILON:g} at delta {DELTA:g}.\n\n{markdown(CHECK, check)}\n"
    if laws:
        every = [facts for model in laws for facts in found[model]]
        write_atomically(cells.folder / "crowds.svg", drawn(every, laws).encode())
        said += "".join(
            f"{model}: ln perplexity = {law.floor:.3f} + {law.weight:.3g} (z / m)^{law.power:g}\n"
            for model, law in laws.items()
        )
        said += "\n" + markdown(
            EXPECTED, [line for m, law in laws.items() for line in expected(m, law)]
        )
    return said


def main() -> None:
    """Make the points that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="all, if left out")
    parser.add_argument("--out", type=Path, default=Path("runs/crowds"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "crowds")
    parser.add_argument("--hours", type=float, help="begin no point after so many hours")
    parser.add_argument("--table", action="store_true", help="only the tables, from kept results")
    asked = parser.parse_args()
    cells, over = Cells(asked.results), deadline(asked.hours)
    if not asked.table:
        use_devices(1)
        noise = multiplier(EPSILON)
        for point in (point for model in asked.model or MODELS for point in points(model)):
            if over():
                break
            with claimed(work_folder(asked.out, point.name, digest_of(point, noise))) as mine:
                if mine and cells.read(point.name, digest_of(point, noise)) is None:
                    make(point, noise, cells, asked.out)
    print(tell(cells), end="")


if __name__ == "__main__":
    main()
