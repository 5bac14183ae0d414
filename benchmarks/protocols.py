"""Published protocols, played on our text: the model, cohorts, batches and rates that others name.

In:       `shakespeare-roles`, a client per speaking role; a protocol and one of its methods.
Out:      a small file per method and seed in `benchmarks/results/protocols`; a table of them.
Promise:  what a protocol names is played as named, its model included; text and split are ours, so
          figures stand beside each other and not beside published ones; killed at any moment, the
          same command goes on; the table needs nothing but the files.
Not here: the code of other frameworks on one store (`peers/quality.py`).

    python -m benchmarks.protocols                       # what is missing
    python -m benchmarks.protocols --method FedAdam --seed 0
    python -m benchmarks.protocols --table               # from the kept files alone
    python -m benchmarks.protocols --smoke               # every method, tiny, for two rounds

Reddi et al. (2021), Shakespeare: the next character with an LSTM of two layers of 256 units, an
embedding of 8 numbers and a readout of its own; 10 clients per round, one pass in batches of 4 rows
of 80 characters, 1,200 rounds; rates of one for averaging, and FedAdam at 0.01 with an epsilon of
0.001. Figures are of the last tenth of every client's text. Characters are bytes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.nn.initializers import glorot_uniform, orthogonal
from jaxtyping import Array, Float, Int, PRNGKeyArray

import fedlm
from benchmarks.cells import RESULTS, Cells, Facts, claimed, deadline, facts_digest, work_folder
from fedlm.core.keys import key_for
from fedlm.corpus.store import Store
from fedlm.engine.devices import use_devices
from fedlm.search.sweep import markdown, over_seeds

TEXT = Path(__file__).parents[2] / "shared" / "data" / "shakespeare-roles.jsonl.gz"
SEEDS = (0, 1, 2)
HEAD = ["method", "seeds", "accuracy", "perplexity per character", "rounds", "core-hours"]
CLIENT: dict[str, Any] = {"client__learning_rate": 1.0, "client__batch_size": 4}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {**CLIENT, "server__optimizer": "fedavg", "server__learning_rate": 1.0},
    "FedAdam": {
        **CLIENT,
        "server__optimizer": "fedadam",
        "server__learning_rate": 0.01,
        "server__beta2": 0.99,
        "server__adam_epsilon": 1e-3,
    },
}


class Size(NamedTuple):
    """How long and large everything is; `--smoke` makes it small."""

    rounds: int = 1200
    cohort: int = 10
    length: int = 80
    units: int = 256
    embedding: int = 8
    evaluate_every: int = 50


WHOLE = Size()
SMOKE = Size(rounds=2, cohort=2, length=8, units=8, evaluate_every=1)


class CharacterLstm(eqx.Module):
    """Two LSTM layers over embedded characters, with a readout of their own."""

    embedding: Float[Array, "vocabulary embedding"]
    cells: tuple[eqx.nn.LSTMCell, ...]
    readout: eqx.nn.Linear

    def __init__(self, vocabulary: int, size: Size, key: PRNGKeyArray) -> None:
        first, second, third, last = jr.split(key, 4)
        self.embedding = jr.uniform(first, (vocabulary, size.embedding), minval=-0.05, maxval=0.05)
        self.cells = (
            _started(eqx.nn.LSTMCell(size.embedding, size.units, key=second), second),
            _started(eqx.nn.LSTMCell(size.units, size.units, key=third), third),
        )
        readout = eqx.nn.Linear(size.units, vocabulary, key=last)
        started = glorot_uniform(1, 0)(last, readout.weight.shape), jnp.zeros(vocabulary)
        self.readout = eqx.tree_at(lambda r: (r.weight, r.bias), readout, started)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocabulary"]:
        x = self.embedding[tokens].transpose(1, 0, 2)
        for cell in self.cells:
            x = _layer(cell, x)
        logits = x @ self.readout.weight.T + self.readout.bias[None, None]
        return logits.transpose(1, 0, 2)


def _started(cell: eqx.nn.LSTMCell, key: PRNGKeyArray) -> eqx.nn.LSTMCell:
    """Return a cell with the usual start of an LSTM in Keras, which the protocol's authors used."""
    inputs, units = jr.split(key)
    each = cell.weight_hh.shape[1]
    forget = jnp.zeros(4 * each).at[each : 2 * each].set(1.0)  # gates: input, forget, cell, output
    made = (
        glorot_uniform(1, 0)(inputs, cell.weight_ih.shape),
        orthogonal(column_axis=0)(units, cell.weight_hh.shape),
        forget,
    )
    return eqx.tree_at(lambda c: (c.weight_ih, c.weight_hh, c.bias), cell, made)


def _layer(
    cell: eqx.nn.LSTMCell, inputs: Float[Array, "seq batch size"]
) -> Float[Array, "seq batch units"]:
    """Run rows through one layer; the inputs of all steps are multiplied at once."""
    assert cell.bias is not None
    ahead = inputs @ cell.weight_ih.T + cell.bias[None, None]

    def step(carry, x):  # type: ignore[no-untyped-def]
        h, c = carry
        i, f, g, o = jnp.split(x + h @ cell.weight_hh.T, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    empty = jnp.zeros((inputs.shape[1], cell.hidden_size), inputs.dtype)
    return jax.lax.scan(step, (empty, empty), ahead)[1]


@dataclass(frozen=True)
class Work:
    """Where results are kept and runs are, and how long everything is."""

    cells: Cells
    out: Path
    text: Path = TEXT
    size: Size = WHOLE

    def digest(self, method: str, seed: int) -> str:
        """Return the digest of all that decides a cell."""
        asked = {"size": self.size._asdict(), "method": METHODS[method], "seed": seed}
        return facts_digest({**asked, "text": self.text.name})

    def kept(self, method: str, seed: int) -> Facts | None:
        """Return a cell, if it is kept."""
        return self.cells.read(f"{method} seed {seed}", self.digest(method, seed))

    def store(self) -> Store:
        """Return the client store, after making it if it is not there."""
        path = self.out / "store"
        with claimed(self.out, wait=True):
            if path.exists():
                return Store(path)
            return fedlm.prepare(
                *(self.text, path),
                tokenizer="bytes",
                lowercase=False,
                test_clients=0.0,
                validation=0.1,
            )

    def make(self, method: str, seed: int) -> None:
        """Play all rounds of a method, or those that are missing, and keep its figures."""
        store, size, digest = self.store(), self.size, self.digest(method, seed)
        path = work_folder(self.out, f"{method} seed {seed}", digest)
        fed = fedlm.Federation(
            store,
            CharacterLstm(store.vocabulary, size, key_for(seed, "init")),
            cohort=size.cohort,
            rounds=size.rounds,
            out=path,
            seed=seed,
            data__layout="windows",
            data__sequence_length=size.length,
            server__evaluate_every=size.evaluate_every,
            server__evaluate_rows=1000,
            run__devices=1,
            run__checkpoint_every=25,
            run__keep_checkpoints=1,
            **METHODS[method],
        )
        curve = []
        for told in fed.rounds(resume=path.exists()):
            if told.perplexity is not None:
                curve.append([told.number, told.perplexity])
                print(f"  round {told.number}, perplexity {told.perplexity:.2f}", flush=True)
        run = fed.finish()
        found = run.evaluate("validation")
        facts = {
            "method": method,
            "seed": seed,
            "accuracy": found["accuracy"],
            "perplexity": found["perplexity"],
            "rounds": size.rounds,
            "clients": len(store.training_clients),
            "parameters": run.summary["params"],
            "seconds": run.summary["seconds"],
            "curve": curve,
        }
        self.cells.write(f"{method} seed {seed}", digest, facts)


def tell(work: Work) -> str:
    """Return the table of what is kept."""
    rows = []
    for method in METHODS:
        found = [f for seed in SEEDS if (f := work.kept(method, seed)) is not None]
        if found:
            rows.append(
                [
                    method,
                    str(len(found)),
                    over_seeds([100 * f["accuracy"] for f in found]) + "%",
                    over_seeds([f["perplexity"] for f in found], 2),
                    str(found[0]["rounds"]),
                    f"{math.fsum(f['seconds'] for f in found) / 3600:.2f}",
                ]
            )
    return markdown(HEAD, rows) if rows else f"No cell is kept yet in {work.cells.folder}.\n"


def main() -> None:
    """Make the cells that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--seed", type=int, choices=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/protocols"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "protocols")
    parser.add_argument("--hours", type=float, help="begin no cell after so many hours")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    parser.add_argument("--smoke", action="store_true", help="two rounds of a tiny model")
    asked = parser.parse_args()
    over = deadline(asked.hours)
    temporary = Path(tempfile.mkdtemp(prefix="fedlm-smoke-")) if asked.smoke else None
    work = Work(Cells(asked.results), asked.out)
    if temporary is not None:
        work = Work(Cells(temporary / "results"), temporary, size=SMOKE)
    try:
        if not asked.table:
            use_devices(1)
            for seed in SEEDS if asked.seed is None else (asked.seed,):
                for method in METHODS if asked.method is None else (asked.method,):
                    if over():
                        break
                    with claimed(work.out / f"{method}-{seed}") as mine:
                        if mine and work.kept(method, seed) is None:
                            print(f"{method}, seed {seed}", flush=True)
                            work.make(method, seed)
        print(tell(work), end="")
    finally:
        if temporary is not None:
            shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
