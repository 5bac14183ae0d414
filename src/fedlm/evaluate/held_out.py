"""Figures of one model on held-out text, during training and at its end.

In:       rows of held-out text by split, with the client of each row; a way to score rows.
Out:      figures: together, over clients, per group; what counted n-grams reach on the same rows;
          sums per place, where models differ from place to place.
Promise:  the figures on the way are of one fixed sample of rows; only splits that were handed in
          are ever scored.
Not here: which splits may be told (`privacy/release.py`), trees (`federation/tree_evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np

from fedlm.core.keys import generator_for
from fedlm.core.types import (
    PAD,
    FederationState,
    Figures,
    GroupPath,
    Params,
    ScoreFn,
    SpecialTokens,
)
from fedlm.evaluate.clients import client_figures, group_figures
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import (
    Evaluator,
    Sums,
    bits_per_byte,
    figures,
    total_sums,
)
from fedlm.evaluate.progress import foreseen

Phase = Literal["survey", "watch", "final", "keep", "noisy"]
NO_MODEL = -1


class Held(NamedTuple):
    """How much held-out text somebody has."""

    rows: int
    tokens: int  # targets
    bytes: int  # 0 if some bytes of the text are in no target
    clients: int


class Ask(NamedTuple):
    """One model on the text of one place."""

    place: int
    model: int = NO_MODEL  # by its place among the models of a question; NO_MODEL: a survey
    rows: int = 0  # only so many of the first rows; 0: all


class TextByPlace(Protocol):
    """Held-out text that belongs to places, here or elsewhere."""

    @property
    def survey(self) -> Mapping[str, Mapping[int, Held]]:
        """How much text each place has, by split."""

    def scores(
        self, round: int, phase: Phase, split: str, models: Sequence[Params], asks: Sequence[Ask]
    ) -> list[Sums]:
        """Return the sums of models on the text of places; zeros where nobody answered."""


@dataclass(frozen=True, kw_only=True)
class TextHere:
    """The held-out text of places, in this process."""

    evaluator: Callable[[], Evaluator]
    rows: Mapping[str, Mapping[int, np.ndarray]]  # by split and place
    survey: Mapping[str, Mapping[int, Held]]

    def scores(
        self, round: int, phase: Phase, split: str, models: Sequence[Params], asks: Sequence[Ask]
    ) -> list[Sums]:
        """Score the rows of each ask."""
        held, score = self.rows[split], self.evaluator()
        parts = [(models[model], held[place][: most or None]) for place, model, most in asks]
        with foreseen(sum(len(rows) for _, rows in parts)):
            return [total_sums(score(params, rows)) for params, rows in parts]


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """The rows of one split, the groups of their owners, and the size of the text in bytes."""

    rows: Callable[[int], tuple[np.ndarray, np.ndarray]]  # number of context tokens -> rows, owners
    groups: Callable[[int], GroupPath]  # the group path of an owner
    bytes: int | None = None  # None if some bytes of the text are in no target
    bytes_of: Callable[[int], int] = lambda owner: 0  # the share of an owner

    @cached_property
    def size(self) -> Held:
        """How much text it is."""
        rows, owners = self.rows(1)
        tokens = int(np.count_nonzero(rows[:, 1:] != PAD))
        return Held(len(rows), tokens, self.bytes or 0, len(np.unique(owners)))


@dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation:
    """Evaluation of the model of a flat federation on held-out text."""

    score: ScoreFn
    special: SpecialTokens
    models: Callable[
        [FederationState], Mapping[str, Params]
    ]  # of a state, by name; "" is the federation's
    text: Mapping[str, HeldOutText]  # by split; only splits whose figures may be told
    vocabulary: int
    watch_split: tuple[str, ...]  # splits to watch in training, the preferred first
    watch_rows: int = 2_000  # 0: all rows
    seed: int = 0
    training: Callable[[], Iterable[np.ndarray]] | None = None  # rows to count n-grams on
    features: Callable[[np.ndarray], np.ndarray] | None = None  # what frozen blocks give for rows
    any_width: bool = False  # `score` takes rows that are cut where they end

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.score, self.special, features=self.features, any_width=self.any_width)

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

    def rows(self, split: str | None = None) -> np.ndarray | None:
        """Return the rows of a split, or without one the watched sample; None without any."""
        if split is None:
            return self.watched
        return self.text[split].rows(1)[0] if split in self.text else None

    def watch(self, state: FederationState) -> Figures:
        """Return perplexity and accuracy on the sample, or None values if no text may be scored."""
        if self.watched is None:
            return {"perplexity": None, "accuracy": None}
        found = figures(self.evaluator(self.models(state)[""], self.watched))
        return {"perplexity": found["perplexity"], "accuracy": found["accuracy"]}

    def final(self, state: FederationState, split: str) -> Figures:
        """Return all figures of a state on one split."""
        return self.of_models(self.models(state), split)

    def of_models(self, models: Mapping[str, Params], split: str) -> Figures:
        """Return all figures of the federation's model: overall, over clients, per group."""
        text = self.text[split]
        rows, owners = text.rows(1)
        sums = self.evaluator(models[""], rows)
        paths = {int(n): text.groups(int(n)) for n in np.unique(owners)}
        groups = [paths[int(n)] for n in owners]
        deepest = max((len(p) for p in paths.values()), default=0)
        found: Figures = dict(figures(sums))
        found |= bits_per_byte(sums, found["tokens"], text.bytes or 0)
        return {
            **found,
            "clients": client_figures(sums, owners),
            "groups": [
                self._with_bits(group_figures(sums, groups, depth), text, sums, owners, depth)
                for depth in range(deepest)
            ],
        }

    def _with_bits(
        self,
        found: dict[str, dict[str, float]],
        text: HeldOutText,
        sums: Sums,
        owners: np.ndarray,
        depth: int,
    ) -> dict[str, dict[str, float]]:
        """Add bits per byte, comparable between languages, to the figures of groups."""
        if not text.bytes:
            return found
        kinds = {int(n): _at(text.groups(int(n)), depth) for n in np.unique(owners)}
        names = np.array([kinds[int(n)] for n in owners])
        for name, figure in found.items():
            size = sum(text.bytes_of(owner) for owner, kind in kinds.items() if kind == name)
            own = Sums(*(column[names == name] for column in sums))
            figure |= bits_per_byte(own, figure["tokens"], size)
        return found

    def baselines(self, splits: list[str]) -> Figures:
        """Return n-gram perplexities on the same targets, counted on the same training tokens."""
        if self.training is None:
            return {}
        counts = NGrams(iter(self.training()), self.vocabulary, self.special)
        return {split: counts.perplexities(self.text[split].rows(2)[0]) for split in splits}


def _at(path: GroupPath, depth: int) -> str:
    return path[depth] if len(path) > depth else "(none)"
