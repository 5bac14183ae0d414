"""Large models under a small bandwidth, at their published sizes: perplexity by real bytes.

In:       chat of `irc-ubuntu`; its years up to 2008 are public, the later ones private.
Out:      a small file per pretrained model and per side in `benchmarks/results/bandwidth`; a table
          and a drawing of those files.
Promise:  the vocabulary and the start of every side come from public years alone; all models are
          pretrained for as many steps on the same batches, all sides try the same server rates for
          as many rounds and then have as many; the last figure is of clients that neither saw;
          killed at any moment, the same command goes on; the table needs nothing but the files.
Not here: public text and starts (`public.py`), codecs and partial training (`wire`,
          docs/traffic.md), the same at 1.1M parameters (`recipes/sweeps/traffic.toml`).

    python -m benchmarks.bandwidth                   # what is missing
    python -m benchmarks.bandwidth --only "small LSTM, full" "large Transformer, combined"
    python -m benchmarks.bandwidth --table           # from the kept files alone
    python -m benchmarks.bandwidth --smoke           # everything, tiny, for two rounds

Clients train with SGD at the rate and clip that Ro et al. (2022) give for each size (for the
Conformer those of the large Transformer); the server's FedAdam has the rate that was best of
`RATES` on held-out text of training clients.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import public, sizes
from benchmarks.cells import RESULTS, Cells, Facts, claimed, deadline, recipe_digest, work_folder
from benchmarks.comparison import figures_of, last_figures, say
from fedlm.core.durable import write_atomically
from fedlm.engine.devices import use_devices
from fedlm.models import catalog
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.facts import facts_of
from fedlm.record.svg import Series, lines, with_names
from fedlm.search import splits
from fedlm.search.sweep import FAILED, markdown, train_point

STORES = Path(".fedlm/stores")
RECIPES = Path(__file__).parents[1] / "recipes"
PUBLIC, PRIVATE = RECIPES / "irc-pretrain.toml", RECIPES / "irc-traffic.toml"
RATES = (0.001, 0.003)  # of the server
SEED = 0
HEIGHT = 330
HEAD = ["side", "parameters", "MB up per member and round", "MB up, all members and rounds"]
HEAD += ["start", "last text", "best while training", "rounds", "server rate", "core-hours"]
# Adam's rate while pretraining, by size and family; none was tuned.
PRETRAIN_RATES = {"small-lstm": 0.002, "large-lstm": 0.001}
PRETRAIN_RATE = 0.0005


@dataclass(frozen=True)
class Side:
    """A published size, and what of its updates travels."""

    name: str
    model: str
    wire: tuple[str, ...] = ()


COMBINED = ("wire.trainable=member", "wire.trainable_fraction=0.4")
# Those that come first are worth most.
SIDES = (
    Side("small LSTM, full", "small-lstm"),
    Side("large Transformer, combined", "large-transformer", (*COMBINED, "wire.upload=uniform-8")),
    Side("large Transformer, full", "large-transformer"),
    Side("large Conformer, combined", "large-conformer", (*COMBINED, "wire.upload=uniform-8")),
    Side("large LSTM, full", "large-lstm"),
    Side("large Transformer, DRIVE", "large-transformer", ("wire.upload=drive",)),
    Side(
        "large Transformer, combined, deflated",
        "large-transformer",
        (*COMBINED, "wire.upload=uniform-8+zlib"),
    ),
)


class Size(NamedTuple):
    """How long everything is; `--smoke` makes it short, and models small."""

    steps: int = 600  # of pretraining
    tried: int = 20  # rounds of each server rate
    rounds: int = 100
    more: tuple[str, ...] = ()


WHOLE = Size()
SMOKE = Size(
    2,
    1,
    2,
    (
        *("model.embedding_size=16", "model.hidden_size=32", "model.layers=1", "model.heads=2"),
        *("client.max_steps=2", "server.evaluate_rows=16", "server.cohort=4"),
    ),
)


def model_settings(name: str, size: Size) -> tuple[str, ...]:
    """Return a published size as settings."""
    shape = catalog.NAMED[name].size
    names = ("embedding_size", "hidden_size", "layers", "heads")
    own = tuple(f"model.{each}={getattr(shape, each)}" for each in names)
    return (f"model.name={name}", f"data.vocabulary={shape.vocab}", *own, *size.more)


def pretraining(model: str, size: Size, source: Path) -> Recipe:
    """Return the recipe of a size on public text."""
    per_round = min(50, size.steps)
    rate = PRETRAIN_RATES.get(model, PRETRAIN_RATE)
    changes = (
        *(f"data.source={source.resolve()}", "data.groups=[]", f"run.seed={SEED}"),
        *(f"client.learning_rate={rate}", "server.evaluate_rows=500", "run.devices=1"),
        *("client.gradient_clip_norm=1.0", "run.checkpoint_every=2", "run.keep_checkpoints=1"),
        *model_settings(model, size),
        *(f"client.max_steps={per_round}", f"server.rounds={size.steps // per_round}"),
        *("server.warmup_rounds=1", "server.evaluate_every=4"),
    )
    return load(PUBLIC, changes)


def federated(side: Side, rate: float, rounds: int, size: Size, paths: Sequence[str]) -> Recipe:
    """Return the recipe of a side on private text; `paths` name its vocabulary and its start."""
    published = next(cell for cell in sizes.CELLS if cell.name == side.model)
    changes = (
        *(f"client.learning_rate={published.learning_rate}", "client.max_examples=64"),
        *(f"client.gradient_clip_norm={published.clip}", f"server.learning_rate={rate}"),
        *("server.beta2=0.999", "server.adam_epsilon=1e-8", "server.cohort=10"),
        *("server.evaluate_rows=1000", f"server.evaluate_every={min(10, rounds)}"),
        *("run.devices=1", "run.checkpoint_every=5", "run.keep_checkpoints=1", f"run.seed={SEED}"),
        *model_settings(side.model, size),
        *(*side.wire, f"server.rounds={rounds}", *paths),
    )
    return load(PRIVATE, changes)


def digest_of(side: Side, size: Size) -> str:
    """Return the digest of all that decides the figures of a side, wherever its files lie."""
    start = recipe_digest(pretraining(side.model, size, Path("public.jsonl")))
    years = sorted(load(PUBLIC).data.groups)
    asked = {"public": start, "years": years, "rates": list(RATES), "tried": size.tried}
    return recipe_digest(federated(side, RATES[0], size.rounds, size, ()), **asked)


@dataclass(frozen=True)
class Work:
    """Where results are kept and runs are, and how long everything is."""

    cells: Cells
    out: Path
    size: Size = WHOLE

    def kept(self, side: Side) -> Facts | None:
        """Return the figures of a side, if they are kept."""
        return self.cells.read(side.name, digest_of(side, self.size))

    def start(self, model: str) -> Path:
        """Return the run of a size on public text, after making it or what is missing of it."""
        text, _ = public.divide(load(PUBLIC), self.out)
        recipe = pretraining(model, self.size, text)
        digest, name = recipe_digest(recipe), f"public {model}"
        path = work_folder(self.out, name, digest) / "run"
        public.train(recipe, path, STORES, lambda: say(name))
        if self.cells.read(name, digest) is None:
            self.cells.write(name, digest, {"model": model, **figures_of(path)})
        return path

    def make(self, side: Side) -> None:
        """Pretrain a side's model, try server rates, play all rounds, and keep the figures."""
        _, private = public.divide(load(PUBLIC), self.out)
        paths = public.begun_from(self.start(side.model), private)
        folder = work_folder(self.out, side.name, digest_of(side, self.size))

        def played(rate: float, rounds: int) -> tuple[Recipe, Path]:
            recipe = federated(side, rate, rounds, self.size, paths)
            path = folder / f"{rate:g}-{rounds}"
            run = splits.for_choosing(build(recipe, STORES, out=path))
            if not (run.record.summary.is_file() or (path / FAILED).is_file()):
                train_point(run, say(f"{side.name}, server rate {rate:g}, {rounds} rounds"))
            return recipe, path

        tried = {rate: figures_of(played(rate, self.size.tried)[1])["best"] for rate in RATES}
        rate = min(tried, key=lambda each: math.inf if tried[each] is None else tried[each])
        recipe, path = played(rate, self.size.rounds)
        facts = {
            "side": side.name,
            "model": side.model,
            "settings": [*side.wire, f"server.learning_rate={rate}"],
            "tried": [[each, found] for each, found in tried.items()],
            "rate": rate,
            "start": facts_of(path).header["start"]["perplexity"],
            **figures_of(path),
            **last_figures(build(recipe, STORES, out=path)),
        }
        self.cells.write(side.name, digest_of(side, self.size), facts)

    def make_all(self, only: Sequence[str], over: Callable[[], bool] = lambda: False) -> None:
        """Make the missing sides one after the other; leave those that others are at."""
        for side in SIDES:
            if (only and side.name not in only) or over():
                continue
            with claimed(self.out / digest_of(side, self.size)) as mine:
                if mine and self.kept(side) is None:
                    self.make(side)


def tell(work: Work) -> str:
    """Return the table of what is kept, and draw perplexity over bytes beside the files."""
    found = {side: facts for side in SIDES if (facts := work.kept(side)) is not None}
    if not found:
        return f"No side is kept yet in {work.cells.folder}.\n"
    rows, series = [], []
    for number, (side, facts) in enumerate(found.items()):
        sent = facts["member_bytes"] / 1e6
        last = "diverged" if facts["last"] is None else f"{facts['last']:.1f}"
        rows.append(
            [
                side.name,
                f"{facts['parameters'] / 1e6:.1f}M",
                f"{sent:.2f}",
                f"{facts['upload_bytes'] / 1e6:,.0f}",
                f"{facts['start']:.1f}",
                last,
                "-" if facts["best"] is None else f"{facts['best']:.1f}",
                str(facts["rounds"]),
                f"{facts['rate']:g}",
                f"{facts['seconds'] / 3600:.2f}",
            ]
        )
        points = [(point[0] * sent, point[2]) for point in facts["curve"]]
        series.append(Series(side.name, [a for a, _ in points], [b for _, b in points], number))
    chart = lines(series, x="MB up per member", y="perplexity", log_x=True, height=HEIGHT)
    drawn = with_names(chart, [(one.name, one.colour) for one in series], HEIGHT)
    write_atomically(work.cells.folder / "bytes.svg", drawn.encode())
    return markdown(HEAD, rows)


def main() -> None:
    """Make the sides that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=[side.name for side in SIDES])
    parser.add_argument("--out", type=Path, default=Path("runs/bandwidth"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "bandwidth")
    parser.add_argument("--hours", type=float, help="begin no side after so many hours")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    parser.add_argument("--smoke", action="store_true", help="everything, tiny; nothing is kept")
    asked = parser.parse_args()
    if asked.smoke:
        use_devices(1)
        folder = Path(tempfile.mkdtemp(prefix="fedlm-smoke-"))
        work = Work(Cells(folder / "results"), folder / "runs", SMOKE)
        try:
            work.make_all(asked.only)
            print(tell(work), end="")
        finally:
            shutil.rmtree(folder)
        return
    work = Work(Cells(asked.results), asked.out)
    if not asked.table:
        use_devices(1)
        work.make_all(asked.only, deadline(asked.hours))
    print(tell(work), end="")


if __name__ == "__main__":
    main()
