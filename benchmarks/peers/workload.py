"""Workloads that every contender can read: real text, one cohort, one start.

In:       a corpus of clients and a named shape.
Out:      a folder: `settings.json`, `params.npz`, `batches.npz`, `rows.npz`.
Promise:  the batches are those that fedlm's own engine makes of the rows in round zero.
Not here: training.

`params.npz`   the start, one array a leaf, named as in fedlm (README.md has the shapes).
`batches.npz`  one array a member: steps x batch x (length + 1), int32. Column t predicts column
               t + 1; a target of 0 does not count, and rows of zeros fill up the last batch.
`rows.npz`     the same members before shuffling, for fedlm's engines, which pad with -1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fedlm.cohort.packing import batch_order, batches_of
from fedlm.cohort.sampling import draw, no_history
from fedlm.core import tree
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import BatchSpec, Sampling
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import Store
from fedlm.models import catalog
from fedlm.recipe.build import open_store
from fedlm.recipe.settings import Data

SEED = 0
LARGE = {"vocab": 10_000, "embedding_size": 96, "hidden_size": 670}
SMALL = {"vocab": 2_000, "embedding_size": 96, "hidden_size": 256}
DECODER = {"hidden_size": 384, "layers": 3, "heads": 4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model on one shape of work."""

    architecture: str
    vocab: int
    embedding_size: int
    hidden_size: int
    layers: int = 1
    heads: int = 1
    members: int = 50
    batch: int = 16
    length: int = 20
    max_examples: int = 256
    rate: float = 0.5
    seed: int = SEED

    def one_step(self) -> Plan:
        """The same members with one batch each."""
        return replace(self, max_examples=self.batch)

    @property
    def size(self) -> catalog.Dimensions:
        names = ("vocab", "embedding_size", "hidden_size", "layers", "heads")
        return catalog.Dimensions(**{name: getattr(self, name) for name in names})

    @property
    def shape(self) -> BatchSpec:
        return BatchSpec(
            batch_size=self.batch, sequence_length=self.length, max_examples=self.max_examples
        )


PLANS: dict[str, Plan] = {
    **{f"{cell}-large": Plan(architecture=cell, **LARGE) for cell in ("lstm", "cifg", "si-cifg")},
    "transformer-large": Plan(architecture="transformer", **{**LARGE, **DECODER}, rate=0.1),
    **{f"{cell}-small": Plan(architecture=cell, **SMALL) for cell in ("lstm", "cifg", "si-cifg")},
    "transformer-small": Plan(architecture="transformer", **{**SMALL, **DECODER}, rate=0.1),
}


def store_for(plan: Plan, source: str, cache: Path) -> Store:
    """The corpus as a store with the plan's vocabulary, prepared once."""
    return open_store(Data(source=source, tokenizer="words", vocabulary=plan.vocab), cache)


def cohort(plan: Plan, store: Store) -> Iterator[tuple[int, np.ndarray]]:
    """The members of a round and their rows: a line a row, as in the Stack Overflow task."""
    law = Sampling(law="fixed", population=len(store.training_clients), cohort=plan.members)
    clients = store.training_clients
    rows = ClientRows(store=store, clients=clients, sequence_length=plan.length, layout="lines")
    for member in draw(law, generator_for(plan.seed, "cohort"), 0, no_history(law)):
        yield int(member), rows.train(int(member))


def batched(plan: Plan, member: int, rows: np.ndarray) -> np.ndarray:
    """A member's batches in round zero."""
    rng = generator_for(plan.seed, "shuffle", round=0, member=member)
    return batches_of(rows, batch_order(len(rows), plan.shape, rng)).astype(np.int32)


def write(plan: Plan, store: Store, folder: Path) -> dict[str, int]:
    """Writes the folder, and says how much work it holds."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {f"{member:08d}": found for member, found in cohort(plan, store)}
    batches = {}
    for name, found in rows.items():
        # Zero, which no text has, where fedlm has -1: contenders look up every number.
        batches[name] = np.maximum(batched(plan, int(name), found), 0)
    params = catalog.make(plan.architecture, plan.size, key_for(plan.seed, "init"))
    leaves = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params).items()}
    work = {
        "members": len(batches),
        "steps": sum(len(b) for b in batches.values()),
        "examples": sum(int(np.sum(np.any(b != 0, axis=-1))) for b in batches.values()),
        "tokens": sum(int(np.sum(b[..., 1:] != 0)) for b in batches.values()),
        "parameters": tree.size(params),
    }
    settings = {**asdict(plan), "names": list(rows), "work": work}
    np.savez(folder / "params.npz", **leaves)
    np.savez(folder / "batches.npz", **batches)
    np.savez(folder / "rows.npz", **rows)
    (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return work
