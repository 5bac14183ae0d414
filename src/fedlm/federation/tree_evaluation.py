"""How well every node of a tree predicts every leaf's text.

In:       a `TreeState`, and the held-out text of the nodes that hold some, here or elsewhere.
Out:      perplexities by node: of the model as received from the federation, and after a node's
          own steps; a matrix of nodes and leaves in the end.
Promise:  a node is judged on text that no one learned from; all methods on the same rows.
Not here: scoring (`evaluate`, or nodes), training (`tree_round.py`), which splits may be told
          (`privacy/release.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedlm.core import tree
from fedlm.core.types import Figures, Params
from fedlm.evaluate.held_out import Ask, TextByPlace
from fedlm.evaluate.perplexity import Sums, bits_per_byte, figures, perplexity_of
from fedlm.federation.tree_round import TreeConfig, TreeState, received, shown_models

# Rows of each leaf in the matrix of all nodes and all leaves.
MATRIX_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class TreeEvaluation:
    """Evaluation of every node of a tree on the held-out text below it."""

    config: TreeConfig
    # Those in which every leaf has held-out text and whose figures may be told. The first is the
    # headline; the last is watched in training, so that nothing is chosen by the headline's text
    # where there is other text.
    told: tuple[str, ...]
    text: TextByPlace  # of each node that holds text, by its number in the topology
    own_models_stay: bool = False  # leaves are scored as others know them, not by their own models
    base: Callable[[], Params | None] = lambda: None  # what `text` wants in models beside their own
    _seen: dict[int, Figures] = field(default_factory=dict)

    @property
    def split(self) -> str | None:
        """The headline split; None where no figures may be told."""
        return next(iter(self.told), None)

    def splits(self) -> list[str]:
        """Return the splits that every leaf has and whose figures may be released."""
        return list(self.told)

    def watch(self, state: TreeState) -> Figures:
        """Score every node that holds text, on its own text."""
        if not self.told:
            return {"perplexity": None, "accuracy": None}
        now = int(state.round)
        if now not in self._seen:  # a state may be asked for twice
            self._seen.clear()
            self._seen[now] = self._watch(state, self.told[-1])
        return dict(self._seen[now])

    def _watch(self, state: TreeState, split: str) -> Figures:
        topology, came = self.config.topology, self._models(state)
        names, leaves = topology.names, topology.with_text
        models = [came[n] for n in leaves] + self._own(state)
        asks = [Ask(leaves[i % len(leaves)], i) for i in range(len(models))]
        scores = self.text.scores(int(state.round), "watch", split, models, asks)
        found = [figures(_column([sums])) for sums in scores]
        first, second = found[: len(leaves)], found[len(leaves) :]
        means: Figures = {
            name: _mean([f[name] for f in first]) for name in ("perplexity", "accuracy")
        }
        if second:
            means["personal_perplexity"] = _mean([f["perplexity"] for f in second])
        nothing: list[Any] = [{"perplexity": None}] * len(leaves)
        own = second or nothing
        pairs = zip(leaves, first, own, strict=True)
        places = {names[n]: [_some(a["perplexity"]), _some(b["perplexity"])] for n, a, b in pairs}
        return {**means, "places": places}

    def _own(self, state: TreeState) -> list[Params]:
        """Return the own model of every node that holds text; none if they stay there."""
        if self.own_models_stay:
            return []
        return self._whole([state.nodes[n].params for n in self.config.topology.with_text])

    def _models(self, state: TreeState) -> list[Params]:
        view = shown_models if self.own_models_stay else received
        return self._whole(view(self.config, state))

    def _whole(self, models: Sequence[Params]) -> list[Params]:
        base = self.base()
        return [tree.join(model, base) for model in models]

    def final(self, state: TreeState, split: str) -> Figures:
        """Return the figures of every node, those of leaves' own models, and the matrix."""
        return self._of_models(self._models(state), split, int(state.round), self._own(state))

    def of_models(self, models: Mapping[str, Params], split: str) -> Figures:
        """Score every node on the text of the leaves below it and on its own."""
        return self._of_models([models[n] for n in self.config.topology.names], split, 0)

    def _of_models(
        self, models: Sequence[Params], split: str, round: int, own: Sequence[Params] | None = None
    ) -> Figures:
        """Return the figures of all nodes' models, and where they are given of leaves' own."""
        topology, leaves = self.config.topology, self.config.topology.with_text
        below = [[n for n in leaves if n in topology.below(node)] for node in range(len(topology))]
        on_text = [Ask(n, node) for node, own in enumerate(below) for n in own]
        in_matrix = [Ask(n, node, MATRIX_ROWS) for node in range(len(topology)) for n in leaves]
        of_own = [Ask(n, len(models) + i) for i, n in enumerate(leaves[: len(own or ())])]
        asks = [*on_text, *in_matrix, *of_own]
        found = self.text.scores(round, "final", split, [*models, *(own or ())], asks)
        scores = dict(zip(asks, found, strict=True))
        personal = {ask.place: figures(_column([scores[ask]]))["perplexity"] for ask in of_own}
        nodes = [
            {
                "name": topology.names[node],
                **self._figures(split, node, below[node], scores),
                "parent": topology.places[node].parent,
                **({} if own is None else {"personal": _some(personal.get(node))}),
            }
            for node in range(len(topology))
        ]
        at_leaves = [figures(_column([scores[Ask(n, n)]])) for n in leaves]
        means: Figures = {k: _mean([f[k] for f in at_leaves]) for k in ("perplexity", "accuracy")}
        bits = [self._figures(split, n, [n], scores).get("bits_per_byte") for n in leaves]
        if all(value is not None for value in bits):
            means["bits_per_byte"] = _mean(bits)
        if own is not None:
            means["personal_perplexity"] = _mean(list(personal.values()))
        return {**means, "nodes": nodes, "matrix": self._matrix(scores)}

    def _figures(
        self, split: str, node: int, leaves: Sequence[int], scores: Mapping[Ask, Sums]
    ) -> Figures:
        """Return perplexity and bits per byte of a node on the text of some leaves."""
        sums = _column([scores[Ask(n, node)] for n in leaves])
        held = [self.text.survey[split][n] for n in leaves]
        found: Figures = {"perplexity": _some(figures(sums)["perplexity"])}
        if all(text.bytes for text in held):
            tokens, size = sum(text.tokens for text in held), sum(text.bytes for text in held)
            found |= bits_per_byte(sums, tokens, size)
        return found

    def _matrix(self, scores: Mapping[Ask, Sums]) -> Figures:
        """Return the perplexity of each node on a few rows of every leaf."""
        leaves, names = self.config.topology.with_text, self.config.topology.names

        def one(node: int, leaf: int) -> float | None:
            sums = scores[Ask(leaf, node, MATRIX_ROWS)]
            return _some(perplexity_of(sums.nats, sums.tokens))

        table = [[one(node, leaf) for leaf in leaves] for node in range(len(names))]
        return {"nodes": list(names), "places": [names[n] for n in leaves], "perplexity": table}

    def rows(self, split: str | None = None) -> None:
        """Return nothing: every node has rows of its own."""

    def baselines(self, splits: list[str]) -> Figures:
        """Return nothing: n-grams over all text would compare only with a centralised model."""
        return {}


def _column(parts: Sequence[Sums]) -> Sums:
    """Return the sums over several texts, as columns of one row."""
    return Sums(*([float(np.sum(column))] for column in zip(*parts, strict=True)))


def _some(value: float | None) -> float | None:
    """Return None for the figure of a place that nobody scored."""
    return None if value is None or np.isnan(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and not np.isnan(value)]
    return float(np.mean(known)) if known else None
