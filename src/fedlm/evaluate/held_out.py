"""Figures of one model on held-out text, during training and at its end.

In:       rows of held-out text by split, with the client of each row; a way to score rows.
Out:      figures: together, over clients, per group; what counted n-grams reach on the same rows.
Promise:  the figures on the way are of one fixed sample of rows; only splits that were handed in
          are ever scored.
Not here: which splits may be told (`privacy/release.py`), trees (`federation/tree_evaluation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedlm.core.keys import generator_for
from fedlm.core.types import GroupPath, Params, ScoreFn, SpecialTokens
from fedlm.evaluate.clients import client_figures, group_figures
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import Evaluator, figures


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """The rows of one split, the groups of their owners, and the size of the text in bytes."""

    rows: Callable[[int], tuple[np.ndarray, np.ndarray]]  # number of context tokens -> rows, owners
    groups: Callable[[int], GroupPath]  # the group path of an owner
    bytes: int | None = None  # None if some bytes of the text are in no target


@dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation:
    """Evaluation of the model of a flat federation on held-out text."""

    score: ScoreFn
    special: SpecialTokens
    models: Callable[[Any], Mapping[str, Params]]  # of a state, by name; "" is the federation's
    text: Mapping[str, HeldOutText]  # by split; only splits whose figures may be told
    vocabulary: int
    watch_split: tuple[str, ...]  # splits to watch in training, the preferred first
    watch_rows: int = 2_000  # 0: all rows
    seed: int = 0
    training: Callable[[], Iterable[np.ndarray]] | None = None  # rows to count n-grams on

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.score, self.special)

    def splits(self) -> list[str]:
        """Return the splits that hold text, the headline split first."""
        return [split for split, text in self.text.items() if len(text.rows(1)[0])]

    @cached_property
    def watched(self) -> np.ndarray | None:
        """The fixed sample of held-out rows that is scored during training."""
        found = (self.text[s].rows(1)[0] for s in self.watch_split if s in self.text)
        rows = next((rows for rows in found if len(rows)), None)
        if rows is not None and self.watch_rows and len(rows) > self.watch_rows:
            rng = generator_for(self.seed, "evaluate")
            rows = rows[np.sort(rng.choice(len(rows), self.watch_rows, replace=False))]
        return rows

    def watch(self, state: Any) -> dict[str, Any]:
        """Return perplexity and accuracy on the sample, or None values if no text may be scored."""
        if self.watched is None:
            return {"perplexity": None, "accuracy": None}
        found = figures(self.evaluator(self.models(state)[""], self.watched))
        return {"perplexity": found["perplexity"], "accuracy": found["accuracy"]}

    def final(self, state: Any, split: str) -> dict[str, Any]:
        """Return all figures of a state on one split."""
        return self.of_models(self.models(state), split)

    def of_models(self, models: Mapping[str, Params], split: str) -> dict[str, Any]:
        """Return all figures of the federation's model: overall, over clients, per group."""
        text = self.text[split]
        rows, owners = text.rows(1)
        sums = self.evaluator(models[""], rows)
        paths = {int(n): text.groups(int(n)) for n in np.unique(owners)}
        groups = [paths[int(n)] for n in owners]
        deepest = max((len(p) for p in paths.values()), default=0)
        found: dict[str, Any] = dict(figures(sums))
        # Comparable between tokenizers, unless unknown tokens hide some bytes.
        if text.bytes and np.array_equal(sums.known, sums.tokens):
            found["bits_per_byte"] = float(np.sum(sums.nats)) / math.log(2) / text.bytes
        return {
            **found,
            "clients": client_figures(sums, owners),
            "groups": [group_figures(sums, groups, depth) for depth in range(deepest)],
        }

    def baselines(self, splits: list[str]) -> dict[str, Any]:
        """Return n-gram perplexities on the same targets, counted on the same training tokens."""
        if self.training is None:
            return {}
        counts = NGrams(iter(self.training()), self.vocabulary, self.special)
        return {split: counts.perplexities(self.text[split].rows(2)[0]) for split in splits}
