"""What evaluation costs: `python -m benchmarks.evaluation [--source TEXT] [--set KEY=VALUE]`.

Two tables. The first trains a recipe to its end and says where the time of the run went: rounds,
figures on the way, all held-out text at the end, counted n-grams, and the rest (start, report). The
second scores the held-out text of a source, cut into lines, in two ways in turns: *plain* takes
rows as they come in batches of 32, at full width, with the logits of every place; *packed* is what
runs do. Their figures are compared. *Silence* is the longest time in which nothing is told of rows
that were scored: at first, while programs are compiled or loaded, and later. CPU seconds hardly
know what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

from benchmarks import baseline  # noqa: E402
from benchmarks.probe import machine  # noqa: E402
from fedlm.core.types import PAD, FederationState, Params  # noqa: E402
from fedlm.engine.devices import use_devices  # noqa: E402
from fedlm.evaluate.held_out import HeldOutEvaluation  # noqa: E402
from fedlm.evaluate.perplexity import Evaluator, figures  # noqa: E402
from fedlm.evaluate.progress import listening  # noqa: E402
from fedlm.federation.round import Metrics  # noqa: E402
from fedlm.models import catalog  # noqa: E402
from fedlm.recipe.build import build  # noqa: E402
from fedlm.recipe.settings import load, parse  # noqa: E402
from fedlm.run import Evaluation  # noqa: E402
from fedlm.training import Watcher, train  # noqa: E402

STORES = Path(".bench/stores")
STAGES = {
    "rounds": "rounds",
    "watch": "figures on the way",
    "final": "all held-out text, at the end",
    "baselines": "n-grams, counted and scored",
    "rest": "the rest: start, checkpoints, report",
}


@dataclass
class Timed:
    """An evaluation whose calls are timed."""

    of: Evaluation
    clock: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    busy: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            return work()
        finally:
            self.clock[name].append(time.perf_counter() - began)
            self.busy[name].append(time.process_time() - cpu)

    def splits(self) -> list[str]:
        return self.of.splits()

    def watch(self, state: FederationState) -> Metrics:
        return self.timed("watch", lambda: self.of.watch(state))  # type: ignore[no-any-return]

    def final(self, state: FederationState, split: str) -> Metrics:
        return self.timed("final", lambda: self.of.final(state, split))  # type: ignore[no-any-return]

    def of_models(self, models: Mapping[str, Params], split: str) -> Metrics:
        return self.of.of_models(models, split)

    def baselines(self, splits: list[str]) -> Metrics:
        return self.timed("baselines", lambda: self.of.baselines(splits))  # type: ignore[no-any-return]


def whole_run(recipe: Path, changes: tuple[str, ...]) -> list[list[str]]:
    """Train a recipe, and return a row per stage: how often, seconds, CPU seconds, share."""
    loaded = load(recipe, changes)
    with tempfile.TemporaryDirectory(prefix="fedlm-evaluation-") as folder:
        run = build(loaded, STORES, out=Path(folder) / "run")
        timed = Timed(run.evaluation)
        began, cpu = time.perf_counter(), time.process_time()
        rounds: list[float] = []
        summary = train(
            replace(run, evaluation=timed),
            watcher=Watcher(round=lambda told: rounds.append(told["seconds"])),
        )
        whole, busy = time.perf_counter() - began, time.process_time() - cpu
    assert summary is not None
    clock = {name: sum(timed.clock[name]) for name in STAGES} | {"rounds": sum(rounds)}
    clock["rest"] = whole - sum(clock.values())
    often = {name: len(timed.clock[name]) for name in STAGES} | {"rounds": len(rounds), "rest": 1}
    rows = []
    for name, words in STAGES.items():
        known = bool(timed.busy[name])
        spent = f"{sum(timed.busy[name]):.1f}" if known else "-"
        share = f"{clock[name] / whole:.1%}"
        rows.append([words, str(often[name]), f"{clock[name]:.1f}", spent, share])
    return [*rows, ["in all", "", f"{whole:.1f}", f"{busy:.1f}", "100%"]]


def plain_score(model: Params, rows: Any) -> tuple[Any, Any]:
    """Score every place of every row, also where there is no target."""
    logits = catalog.logits(model, rows[:, :-1])
    at_target = jnp.take_along_axis(logits, rows[:, 1:, None], axis=2)[..., 0]
    return jax.nn.logsumexp(logits, axis=2) - at_target, at_target >= jnp.max(logits, axis=2)


def silences(work: Callable[[], object]) -> list[float]:
    """The seconds before each time that something is told of the rows that are being scored."""
    told = [time.perf_counter()]
    with listening(lambda scored, to_score: told.append(time.perf_counter())):
        work()
    return np.diff(told).tolist()


def plain_and_packed(
    source: str, model: dict[str, Any], repeats: int, most: int
) -> tuple[list[str], float]:
    """Score the held-out text of a source both ways; return a row, and plain time over packed."""
    data = {"source": source, "layout": "lines", "sequence_length": 20, "vocabulary": 10_000}
    with tempfile.TemporaryDirectory(prefix="fedlm-evaluation-") as folder:
        run = build(parse({"data": data, "model": model}), STORES, out=Path(folder) / "run")
    judged = run.evaluation
    assert isinstance(judged, HeldOutEvaluation)
    rows = judged.text[judged.splits()[0]].rows(1)[0]
    rows = rows[np.sort(np.random.default_rng(0).permutation(len(rows))[:most])]
    params = run.start()
    ways = {
        "plain": Evaluator(plain_score, judged.special, batch=32),
        "packed": judged.evaluator,
    }
    first, *_ = silences(lambda: judged.evaluator(params, rows))  # and compile
    _, *later = silences(lambda: judged.evaluator(params, rows))
    found = {name: figures(score(params, rows)) for name, score in ways.items()}
    apart = abs(found["packed"]["perplexity"] / found["plain"]["perplexity"] - 1)
    clock: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, score in ways.items():
            began, cpu = time.perf_counter(), time.process_time()
            score(params, rows)
            clock[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - cpu)
    middle = {name: statistics.median(values) for name, values in clock.items()}
    spent = {name: statistics.median(values) for name, values in busy.items()}
    targets = int(np.count_nonzero(rows[:, 1:] != PAD))
    cells = [
        f"{model['name']}, {run.model.parameters:,}",
        f"{len(rows):,}",
        f"{targets / rows[:, 1:].size:.0%}",
        *(f"{targets / middle[name]:,.0f}" for name in ways),
        f"{middle['plain'] / middle['packed']:.2f}",
        f"{spent['plain'] / spent['packed']:.2f}",
        f"{apart:.0e}",
        f"{first:.1f}, {max(later, default=0.0):.1f}",
    ]
    return cells, middle["plain"] / middle["packed"]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows])


MODELS: dict[str, dict[str, Any]] = {
    "si-cifg": {},
    "transformer": {"embedding_size": 96, "hidden_size": 384, "layers": 3, "heads": 8},
    "large-transformer": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/sotu.toml"))
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument(
        "--source", help="text of chat for the second table, as irc-ubuntu.jsonl.gz"
    )
    parser.add_argument("--rows", type=int, default=20_000, help="at most so many of its rows")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["si-cifg", "transformer"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["run", "rows"])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/evaluation.md"))
    asked = parser.parse_args()
    use_devices(2)
    parts = [machine()]
    if asked.only != "rows":
        rows = whole_run(asked.recipe, tuple(asked.changes))
        parts.append(table(["part of the run", "times", "seconds", "CPU s", "share"], rows))
        print(parts[-1], file=sys.stderr, flush=True)
    if asked.source and asked.only != "run":
        head = ["model, parameters", "rows", "places with a target", "plain, targets/s"]
        head += ["packed, targets/s", "plain time / packed", "CPU", "relative difference"]
        head += ["silence at first, then at most, s"]
        made = [
            plain_and_packed(
                asked.source, {"name": name, **MODELS[name]}, asked.repeats, asked.rows
            )
            for name in asked.models
        ]
        parts.append(table(head, [cells for cells, _ in made]))
        names = [f"{name}, plain time / packed time" for name in asked.models]
        baseline.keep("evaluation", machine(), dict(zip(names, (r for _, r in made), strict=True)))
    text = "\n\n".join(parts) + "\n"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
