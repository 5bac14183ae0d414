"""How well every node of a tree predicts every leaf's text.

In:       a `TreeState`, and the held-out text of the places that hold text.
Out:      perplexities by node: of the model as received from the federation, and after a node's
          own steps; a matrix of nodes and places in the end.
Promise:  a node is judged on text that no one learned from; all methods on the same rows.
Not here: scoring (`evaluate`), training (`branches.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.errors import ConfigError
from fedlm.core.keys import generator_for
from fedlm.core.types import Params
from fedlm.evaluate.perplexity import Sums, figures, perplexity_of, total
from fedlm.federation.topology import Topology, feed
from fedlm.federation.tree import TreeConfig, TreeState, received
from fedlm.recipe.build import Experiment
from fedlm.recipe.federation import Federation, topology_of

# Rows of each place in the matrix of all nodes and all places.
MATRIX_ROWS = 16


@dataclass(frozen=True)
class Census(Experiment):
    """The part of a tree experiment that looks at its nodes."""

    @property
    def settings(self) -> Federation:
        assert self.recipe.federation is not None
        return self.recipe.federation

    @property
    def population(self) -> int:
        """How many clients there are to learn from."""
        return len(self.training)

    @cached_property
    def topology(self) -> Topology:
        groups = [self.store.groups(int(n)) for n in self.training]
        return topology_of(self.settings, groups)

    @cached_property
    def rules(self) -> TreeConfig:
        raise NotImplementedError  # branches.py

    @cached_property
    def _by_split(self) -> dict[str, dict[int, np.ndarray]]:
        """Of each split, the rows of each place."""
        found: dict[str, dict[int, np.ndarray]] = {}
        most = self.recipe.server.evaluate_rows
        for split in ("test", "validation"):
            owners = self.owners(split)
            groups = [self.store.groups(int(n)) for n in owners]
            held = feed(self.topology.places, groups)
            found[split] = {}
            for node in self.topology.with_text:
                parts = [self.rows.held(int(owners[c])) for c in held[node]]
                rows = np.concatenate(parts) if parts else np.zeros((0, 1), np.int16)
                if most and len(rows) > most:
                    rng = generator_for(0, "evaluate", member=node)
                    rows = rows[np.sort(rng.choice(len(rows), most, replace=False))]
                if len(rows):
                    found[split][node] = rows
        return found

    def splits(self) -> list[str]:
        """The first split in which every place has text."""
        wanted = set(self.topology.with_text)
        whole = [s for s, rows in self._by_split.items() if set(rows) == wanted]
        if not whole:
            raise ConfigError(
                "data.validation: expected held-out text at every place of the tree; raise it, or "
                "data.test_clients."
            )
        return whole[:1]

    @cached_property
    def held(self) -> dict[int, np.ndarray]:
        return self._by_split[self.splits()[0]]

    def shape_facts(self) -> dict[str, Any]:
        """The tree, for the header of a journal."""
        topology = self.topology
        layers = [layer for layer in self.rules.layers if layer is not None]
        return {
            "tree": {
                "names": list(topology.names),
                "parents": list(topology.parents),
                "clients": [len(held) for held in topology.clients],
                "left_out": self.population - sum(len(held) for held in topology.clients),
                "key_layers": list(dict.fromkeys(layers)),
                "key_leaves": len(layers),
            }
        }

    def models_of(self, state: TreeState) -> dict[str, Params]:
        """Every node's model as it begins the next round; that of the root has no name."""
        models = [jax.tree.map(jnp.asarray, model) for model in received(self.rules, state)]
        return {"": models[0], **dict(zip(self.topology.names, models, strict=True))}

    @cached_property
    def _looked(self) -> dict[int, dict[str, Any]]:
        return {}

    def look(self, state: TreeState) -> dict[str, Any]:
        """Every place that holds text, on its own text."""
        now = int(state.round)
        if now not in self._looked:  # the last state is looked at twice
            self._looked.clear()
            self._looked[now] = self._look(state)
        return dict(self._looked[now])

    def _look(self, state: TreeState) -> dict[str, Any]:
        models = received(self.rules, state)
        names, places = self.topology.names, self.topology.with_text
        came = {n: self._own_place(models[n], n) for n in places}
        trained = {n: self._own_place(state.nodes[n].params, n) for n in places}
        return {
            "perplexity": _mean([f["perplexity"] for f in came.values()]),
            "accuracy": _mean([f["accuracy"] for f in came.values()]),
            "personal_perplexity": _mean([f["perplexity"] for f in trained.values()]),
            "places": {names[n]: [came[n]["perplexity"], trained[n]["perplexity"]] for n in places},
        }

    def _own_place(self, params: Params, node: int) -> dict[str, float]:
        return figures(self.evaluator(params, self.held[node]))

    def judge(self, state: TreeState, split: str) -> dict[str, Any]:
        """What `look` tells, every node above the places, and the matrix."""
        seen = self.look(state)
        found = self.judge_models(received(self.rules, state))
        for node in found["nodes"]:
            node["personal"] = seen["places"].get(node["name"], (None, None))[1]
        return {"personal_perplexity": seen["personal_perplexity"], **found}

    def judge_models(self, models: list[Params]) -> dict[str, Any]:
        """Every node on its own text, which is that of the places below it, its own included."""
        topology, nodes, leaves = self.topology, [], []
        for node, name in enumerate(topology.names):
            below = [n for n in topology.with_text if n in topology.below(node)]
            sums = [total(self.evaluator(models[node], self.held[n])) for n in below]
            found = figures(Sums(*([float(np.sum(column))] for column in zip(*sums, strict=True))))
            parent = topology.places[node].parent
            nodes.append({"name": name, "perplexity": found["perplexity"], "parent": parent})
            if node in topology.with_text:
                leaves.append(figures(self.evaluator(models[node], self.held[node])))
        means = {k: _mean([f[k] for f in leaves]) for k in ("perplexity", "accuracy")}
        return {**means, "nodes": nodes, "matrix": self._matrix(models)}

    def _matrix(self, models: list[Params]) -> dict[str, Any]:
        """Each node on a few rows of every place."""
        places, names = self.topology.with_text, self.topology.names
        rows = np.concatenate([self.held[n][:MATRIX_ROWS] for n in places])
        ends = np.cumsum([min(len(self.held[n]), MATRIX_ROWS) for n in places])
        table = []
        for params in models:
            sums = self.evaluator(params, rows)
            parts = zip(
                np.split(sums.nats, ends[:-1]), np.split(sums.tokens, ends[:-1]), strict=True
            )
            table.append([perplexity_of(float(n.sum()), float(t.sum())) for n, t in parts])
        return {"nodes": list(names), "places": [names[n] for n in places], "perplexity": table}

    def baselines(self, splits: Any) -> dict[str, dict[str, float]]:
        """Counting on all text would be a rival of the centralised model alone."""
        return {}


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
