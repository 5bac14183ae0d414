"""Hostile members against robust centres: what each rule keeps of a model, in perplexity.

In:       State of the Union addresses, a share of hostile members, what these send, a rule.
Out:      a table: perplexity on held-out speakers, mean and spread over seeds, a row per rule and a
          column per attack and share.
Promise:  cells differ in the attack and the rule alone; of every cohort exactly the stated share is
          hostile, drawn from the seed; what is known is not measured again: the same command goes
          on where it was stopped.
Not here: the rules (`server/robust.py`), nodes over a network (`benchmarks/hostile_nodes.py`).

    python -m benchmarks.poisoning
    python -m benchmarks.poisoning --seeds 1 --rules mean median --shares 0.3

A hostile member trains as all others do, and then sends -100 times its update, its update with the
sign changed, or a normal vector of ten times its length. The model and the members' training are
compiled once per seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np

from benchmarks.hostile_nodes import HUGE
from fedlm.core.errors import DivergenceError
from fedlm.core.types import Arrived, Cohort, Engine, Starts
from fedlm.corpus.store import Store
from fedlm.engine.robust import RobustEngine, flattened, like_model
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import open_store, resolve
from fedlm.recipe.settings import parse
from fedlm.search.sweep import markdown
from fedlm.server.robust import RULES, bounded

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"source": "sotu", "tokenizer": "words", "vocabulary": 500, "sequence_length": 16},
    "model": {"name": "cifg", "embedding_size": 16, "hidden_size": 32},
    "client": {"batch_size": 8, "max_examples": 16, "learning_rate": 1.0, "weight": "uniform"},
    "server": {"optimizer": "fedadam", "learning_rate": 0.05, "cohort": 10, "evaluate_rows": 500},
    "run": {"devices": 1, "trackers": (), "baselines": False},
}
Attack = Callable[[np.ndarray, np.random.Generator], np.ndarray]
ATTACKS: dict[str, Attack] = {
    f"{HUGE:g} times": lambda sent, rng: HUGE * sent,
    "other sign": lambda sent, rng: -sent,
    "noise, 10 times as long": lambda sent, rng: _noise(sent, rng),
}
NORM = 0.5  # of `server.update_norm`
TRIM = 0.3  # cut on each side: as many as the largest share that is hostile
SHOWN = {
    "mean": "`mean`",
    "update_norm": f"`update_norm = {NORM:g}`",
    "median": "`median`",
    "trimmed-mean": f"`trimmed-mean`, `trim = {TRIM:g}`",
    "geometric-median": "`geometric-median`",
}


def _noise(sent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.normal(size=sent.shape)
    return drawn * (10 * np.linalg.norm(sent) / np.linalg.norm(drawn))


class Poisoned:
    """An engine in which a share of every cohort sends something else than it trained."""

    adds_noise = False

    def __init__(self, inner: Engine, attack: Attack, share: float, seed: int) -> None:
        self.inner, self.attack, self.share, self.seed = inner, attack, share, seed

    def prepare(self, round: int, members: Any) -> Cohort:
        return self.inner.prepare(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        rng = np.random.default_rng([self.seed, cohort.round])
        many = round(self.share * len(cohort.members))
        hostile = set(rng.choice(len(cohort.members), many, replace=False).tolist())
        for place, arrived in enumerate(self.inner.updates(starts, cohort)):
            if place not in hostile:
                yield arrived
                continue
            delta = arrived.update.delta
            sent = like_model(self.attack(flattened(delta), rng), delta)
            yield arrived._replace(update=eqx.tree_at(lambda u: u.delta, arrived.update, sent))

    def total(self, starts: Starts, cohort: Cohort) -> Any:
        raise NotImplementedError("a rule looks at single updates.")


def perplexity(run: Any, rule: str, attack: str, share: float, seed: int, rounds: int) -> float:
    """Return the perplexity after so many rounds; infinite where the model was lost."""
    bad = Poisoned(run.engine, ATTACKS[attack], share, seed)
    norm = NORM if rule == "update_norm" else math.inf
    centre = RULES["mean" if rule == "update_norm" else rule]
    engine = RobustEngine(
        bad,
        run.algorithm,
        functools.partial(_centre, centre),
        functools.partial(bounded, norm=norm),
    )
    played = replace(run.round, engine=engine)
    state = played.init(run.start())
    try:
        for one in played.play(state, range(rounds)):
            state = one.state
            if not math.isfinite(float(one.metrics["loss"])):
                return math.inf
    except DivergenceError:
        return math.inf
    found = run.evaluation.watch(state)["perplexity"]
    return found if math.isfinite(found) else math.inf


def _centre(rule: Callable[[np.ndarray, float], np.ndarray], updates: np.ndarray) -> np.ndarray:
    return rule(updates, TRIM)


def made(store: Store, seed: int, rounds: int) -> Any:
    """Return a run without an adversary, whose engine trains the members of all."""
    tables = {**RECIPE, "data": {"store": str(store.path), "sequence_length": 16}}
    tables["server"] = {**RECIPE["server"], "rounds": rounds, "evaluate_every": rounds}
    tables["run"] = {**RECIPE["run"], "seed": seed}
    return flat_run(resolve(parse(tables), store), store, out=Path())


def unigram(store: Store) -> float:
    """Return the perplexity of word frequencies of the training text, on held-out speakers."""
    tables = {**RECIPE, "data": {"store": str(store.path), "sequence_length": 16}}
    tables["run"] = {**RECIPE["run"], "baselines": True}
    run = flat_run(resolve(parse(tables), store), store, out=Path())
    return float(run.evaluation.baselines(["test"])["test"]["unigram"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--rules", nargs="+", choices=list(SHOWN), default=list(SHOWN))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--out", type=Path, default=Path("runs/poisoning"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    began, store = time.monotonic(), open_store(parse(RECIPE).data, asked.out / "text")
    cells = [(attack, share) for attack in asked.attacks for share in asked.shares]
    cells.insert(0, (asked.attacks[0], 0.0))
    found: dict[tuple[str, str, float], list[float]] = {}
    for seed in range(asked.seeds):
        run = made(store, seed, asked.rounds)
        for attack, share in cells:
            for rule in asked.rules:
                value = known(asked, run, rule, attack, share, seed)
                found.setdefault((rule, attack, share), []).append(value)
    head = ["rule", "nobody", *(f"{attack}, {share:.0%}" for attack, share in cells[1:])]
    rows = [[SHOWN[rule], *(told(found[rule, *cell]) for cell in cells)] for rule in asked.rules]
    print(
        f"{asked.rounds} rounds of 10 members, {asked.seeds} seeds; unigrams {unigram(store):.0f}"
    )
    print(markdown(head, rows))
    print(f"{time.monotonic() - began:.0f} s in this process")


def known(
    asked: argparse.Namespace, run: Any, rule: str, attack: str, share: float, seed: int
) -> float:
    """Return a cell of one seed, measured now or before."""
    name = "-".join(f"{rule} {attack} {share:g} {seed} {asked.rounds}".replace(",", "").split())
    file = asked.out / f"{name}.json"
    if not file.is_file():
        began = time.monotonic()
        value = perplexity(run, rule, attack, share, seed, asked.rounds)
        file.write_text(json.dumps({"perplexity": value}))
        print(f"  {name}: {value:.1f}, {time.monotonic() - began:.0f} s", flush=True)
    return float(json.loads(file.read_text())["perplexity"])


def told(values: list[float]) -> str:
    """Return mean and standard deviation, or how many of the runs were lost."""
    lost = sum(1 for value in values if not value < 1e6)
    if lost:
        return "lost" if lost == len(values) else f"lost {lost} of {len(values)}"
    spread = f" ± {statistics.stdev(values):.0f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.0f}{spread}"


if __name__ == "__main__":
    main()
