"""Whose model is made: clients of a flat run or leaves of a tree, with their text in parts.

In:       a `Run`, and which members are asked for.
Out:      `OwnText`s: rows to learn from, rows to choose by, rows for the report.
Promise:  the three share no row; a member of a private run is one that took no part in it.
Not here: what is done with the rows (`ways.py`).

| member | learns from | chooses by | reports on |
|---|---|---|---|
| training client | its training text | the first half of its held-out text | the second half |
| test client | the first three fifths of its text | the next fifth | the last fifth |
| leaf of a tree | the training text of its clients | every second held-out row | the others |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedlm.core.errors import ConfigError, nearest, require
from fedlm.core.keys import generator_for
from fedlm.corpus.rows import ClientRows
from fedlm.evaluate.held_out import TextHere
from fedlm.federation.tree_evaluation import TreeEvaluation
from fedlm.personal.model import Rows
from fedlm.privacy import release
from fedlm.recipe import parts
from fedlm.run import Run

PRIVATE = (
    "under a privacy plan no figure of a training client may be told without noise; take test "
    "clients (--split test)"
)


@dataclass(frozen=True, eq=False)
class OwnText:
    """One member and its text in three parts."""

    name: str
    number: int  # among all members
    own: Rows
    choose: Rows
    report: Rows
    node: str = ""  # whose model it starts from; empty: the federation's

    @property
    def enough(self) -> bool:
        """Whether there is text in every part."""
        return min(len(self.own), len(self.choose), len(self.report)) > 0


def members_of(run: Run, split: str = "validation", most: int | None = None) -> Iterator[OwnText]:
    """Yield the members of a run, or so many of them, drawn at random.

    Args:
      run: the run whose model is made personal.
      split: `validation` for the members that trained, `test` for clients that took no part.
      most: how many; None is all.
    """
    names = member_names(run, split)
    chosen = list(range(len(names)))
    if most is not None and most < len(names):
        drawn = generator_for(run.recipe.run.seed, "evaluate", round=1)
        chosen = sorted(int(n) for n in drawn.choice(len(names), most, replace=False))
    for number in chosen:
        yield _member(run, split, number, names[number])


def member_called(run: Run, name: str) -> OwnText:
    """Return the member of a name: one that trained, or a test client; or raise `ConfigError`."""
    known: list[str] = []
    for split in ("validation", "test"):
        hidden = split == "validation" and release.hides(run.plan)
        if _is_tree(run) and split == "test":
            continue
        names = [] if hidden else member_names(run, split)
        if name in names:
            found = _member(run, split, names.index(name), name)
            require(
                found.enough,
                "--client",
                name,
                "a member with text to learn from and at least two held-out rows",
                "Raise data.validation, or choose another.",
            )
            return found
        known += names
    why = f" ({PRIVATE})" if release.hides(run.plan) else ""
    raise ConfigError(
        f"--client {name}: {run.record.path} has no such member{why}. {nearest(name, known[:50])}"
    )


def member_names(run: Run, split: str) -> list[str]:
    """Return the names of all members of a split; refuse a split whose figures a plan hides."""
    require(split in ("validation", "test"), "--split", split, "'validation' or 'test'")
    if _is_tree(run):
        require(split == "validation", "--split", split, "'validation' in a tree, for its leaves")
        require(run.plan is None, "--all", str(run.record.path), f"a run without a plan: {PRIVATE}")
        assert isinstance(run.evaluation, TreeEvaluation)
        topology = run.evaluation.config.topology
        return [topology.names[node] for node in topology.with_text]
    if split == "validation":
        require(not release.hides(run.plan), "--split", split, f"'test': {PRIVATE}")
    return [run.store.client(int(n)) for n in _clients(run, split)]


def _is_tree(run: Run) -> bool:
    return run.recipe.federation is not None


def _clients(run: Run, split: str) -> np.ndarray:
    trained = parts.training_clients(run.recipe, run.store)
    owners = parts.owners_of(run.recipe, run.store, trained)
    return owners[split]


def _rows(run: Run) -> ClientRows:
    clients = parts.training_clients(run.recipe, run.store)
    return parts.client_rows(run.recipe, run.store, clients)


def _member(run: Run, split: str, number: int, name: str) -> OwnText:
    if _is_tree(run):
        return _leaf(run, number, name)
    rows = _rows(run)
    client = int(_clients(run, split)[number])
    held = rows.held(client)
    if split == "test":
        first, second = _cuts(len(held), 0.6, 0.8)
        return OwnText(name, number, held[:first], held[first:second], held[second:])
    half = -(-len(held) // 2)
    return OwnText(name, number, rows.train(number), held[:half], held[half:])


def _cuts(count: int, *shares: float) -> list[int]:
    return [round(share * count) for share in shares]


def _leaf(run: Run, number: int, name: str) -> OwnText:
    whole = run.evaluation
    assert isinstance(whole, TreeEvaluation)
    require(
        isinstance(whole.text, TextHere) and whole.split is not None,
        "--client",
        name,
        "a leaf whose held-out text is here",
    )
    assert isinstance(whole.text, TextHere) and whole.split is not None
    topology, rows = whole.config.topology, _rows(run)
    node = topology.with_text[number]
    own = np.concatenate([rows.train(client) for client in topology.clients[node]])
    held = whole.text.rows[whole.split][node]
    return OwnText(name, number, own, held[0::2], held[1::2], node=name)
