"""How well every node of a tree predicts every leaf's text.

In:       a `TreeState`, and the held-out rows of the nodes that hold text.
Out:      perplexities by node: of the model as received from the federation, and after a node's
          own steps; a matrix of nodes and leaves in the end.
Promise:  a node is judged on text that no one learned from; all methods on the same rows.
Not here: scoring (`evaluate`), training (`tree_round.py`), which splits may be told
          (`privacy/release.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedlm.core.types import Params, ScoreFn, SpecialTokens
from fedlm.evaluate.perplexity import Evaluator, Sums, figures, perplexity_of, total
from fedlm.federation.tree_round import TreeConfig, TreeState, received, shown

# Rows of each leaf in the matrix of all nodes and all leaves.
MATRIX_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class TreeEvaluation:
    """Evaluation of every node of a tree on the held-out text below it."""

    score: ScoreFn
    special: SpecialTokens
    config: TreeConfig
    split: (
        str | None
    )  # the first in which every leaf has held-out text; None where none may be told
    held: Mapping[int, np.ndarray]  # rows of each node that holds text
    own_models_stay: bool = False  # leaves are scored as others know them, not by their own models
    _seen: dict[int, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.score, self.special)

    def splits(self) -> list[str]:
        """The one split that every leaf has, if its figures may be released."""
        return [] if self.split is None else [self.split]

    def watch(self, state: TreeState) -> dict[str, Any]:
        """Score every node that holds text, on its own text."""
        if self.split is None:
            return {"perplexity": None, "accuracy": None}
        now = int(state.round)
        if now not in self._seen:  # the last state is asked for twice
            self._seen.clear()
            self._seen[now] = self._watch(state)
        return dict(self._seen[now])

    def _watch(self, state: TreeState) -> dict[str, Any]:
        models, topology = self._models(state), self.config.topology
        names, leaves = topology.names, topology.with_text
        came = {n: self._own_text(models[n], n) for n in leaves}
        found: dict[str, Any] = {
            name: _mean([f[name] for f in came.values()]) for name in ("perplexity", "accuracy")
        }
        if self.own_models_stay:
            return {**found, "places": {names[n]: [came[n]["perplexity"], None] for n in leaves}}
        trained = {n: self._own_text(state.nodes[n].params, n) for n in leaves}
        return {
            **found,
            "personal_perplexity": _mean([f["perplexity"] for f in trained.values()]),
            "places": {names[n]: [came[n]["perplexity"], trained[n]["perplexity"]] for n in leaves},
        }

    def _models(self, state: TreeState) -> list[Params]:
        return (shown if self.own_models_stay else received)(self.config, state)

    def _own_text(self, params: Params, node: int) -> dict[str, float]:
        return figures(self.evaluator(params, self.held[node]))

    def final(self, state: TreeState, split: str) -> dict[str, Any]:
        """Return the figures so far, those of every node above the leaves, and the matrix."""
        seen, names = self.watch(state), self.config.topology.names
        models = dict(zip(names, self._models(state), strict=True))
        found = self.of_models(models, split)
        for node in found["nodes"]:
            node["personal"] = seen["places"].get(node["name"], (None, None))[1]
        return {"personal_perplexity": seen.get("personal_perplexity"), **found}

    def of_models(self, models: Mapping[str, Params], split: str) -> dict[str, Any]:
        """Score every node on the text of the leaves below it and on its own."""
        topology, nodes, leaves = self.config.topology, [], []
        for node, name in enumerate(topology.names):
            below = [n for n in topology.with_text if n in topology.below(node)]
            sums = [total(self.evaluator(models[name], self.held[n])) for n in below]
            found = figures(Sums(*([float(np.sum(column))] for column in zip(*sums, strict=True))))
            parent = topology.places[node].parent
            nodes.append({"name": name, "perplexity": found["perplexity"], "parent": parent})
            if node in topology.with_text:
                leaves.append(self._own_text(models[name], node))
        means = {k: _mean([f[k] for f in leaves]) for k in ("perplexity", "accuracy")}
        return {**means, "nodes": nodes, "matrix": self._matrix(models)}

    def _matrix(self, models: Mapping[str, Params]) -> dict[str, Any]:
        """Score each node on a few rows of every leaf."""
        leaves, names = self.config.topology.with_text, self.config.topology.names
        rows = np.concatenate([self.held[n][:MATRIX_ROWS] for n in leaves])
        ends = np.cumsum([min(len(self.held[n]), MATRIX_ROWS) for n in leaves])
        table = []
        for name in names:
            sums = self.evaluator(models[name], rows)
            parts = zip(
                np.split(sums.nats, ends[:-1]), np.split(sums.tokens, ends[:-1]), strict=True
            )
            table.append([perplexity_of(float(n.sum()), float(t.sum())) for n, t in parts])
        return {"nodes": list(names), "places": [names[n] for n in leaves], "perplexity": table}

    def baselines(self, splits: list[str]) -> dict[str, Any]:
        """Return nothing: n-grams over all text would compare only with a centralised model."""
        return {}


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
