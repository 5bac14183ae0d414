"""Held-out text in two parts: one to choose settings by, and a last one that nothing else sees.

In:       a `Run`.
Out:      the same run, scored on the first part alone; an evaluation on the last part.
Promise:  no row is in both parts; text of test clients is cut between clients, by their names
          alone.
Not here: the split of a store (`corpus/split.py`), what may be told (`privacy/release.py`).

| run | chosen by | last figure on |
|---|---|---|
| flat | held-out text of training clients | test clients |
| flat, where there is none that may be told | one half of the test clients | the other half |
| tree whose leaves have both kinds of text | held-out text of training clients | test clients |
| tree whose leaves have one of them | every second row of each leaf | the other rows |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedlm.core.errors import require
from fedlm.corpus.split import held_out_clients
from fedlm.evaluate.held_out import HeldOutEvaluation, HeldOutText, TextHere
from fedlm.federation.tree_evaluation import TreeEvaluation
from fedlm.run import Evaluation, Run

SPLIT_SEED = 20


def for_choosing(run: Run) -> Run:
    """Return the run with an evaluation that never sees the text of the last figure."""
    return replace(run, evaluation=_parts(run)[0])


def for_the_last_figure(run: Run) -> tuple[Evaluation, str] | None:
    """Return the evaluation on the last part and the name of its split; None if there is none."""
    last = _parts(run)[1]
    splits = [] if last is None else last.splits()
    return None if last is None or not splits else (last, splits[0])


def first_halves(whole: Evaluation) -> Evaluation:
    """Return an evaluation on the first half of every training client's held-out rows.

    `personal/members.py` reports on the other half.
    """
    require(
        isinstance(whole, HeldOutEvaluation) and "validation" in whole.splits(),
        "data.validation",
        0,
        "held-out text of training clients whose figures may be told",
        "Prepare the store with a larger --validation.",
    )
    assert isinstance(whole, HeldOutEvaluation)
    text = whole.text["validation"]

    def rows(context: int) -> tuple[np.ndarray, np.ndarray]:
        found, owners = text.rows(context)
        _, starts, sizes = np.unique(owners, return_index=True, return_counts=True)
        ends = dict(zip(owners[starts].tolist(), starts + -(-sizes // 2), strict=True))
        kept = np.arange(len(owners)) < np.array([ends[n] for n in owners.tolist()], int)
        return found[kept], owners[kept]

    return replace(whole, text={"validation": replace(text, rows=rows, bytes=None)})


def without_last_clients(run: Run) -> Run:
    """Return the run, scored on all held-out text but that of the last clients."""
    kept, _ = _halves_of_test(run)
    return replace(run, evaluation=kept)


def last_clients(run: Run) -> HeldOutEvaluation:
    """Return the evaluation on the half of the test clients that chose nothing."""
    return _halves_of_test(run)[1]


def _halves_of_test(run: Run) -> tuple[HeldOutEvaluation, HeldOutEvaluation]:
    whole = run.evaluation
    assert isinstance(whole, HeldOutEvaluation)  # of flat runs
    text, store = whole.text["test"], run.store
    names = [store.client(int(n)) for n in np.unique(text.rows(1)[1])]
    require(len(names) > 1, "data.test_clients", run.recipe.data.test_clients, "two test clients")
    last = held_out_clients(names, 0.5, SPLIT_SEED)
    first = _only(text, lambda owner: store.client(owner) not in last)
    second = _only(text, lambda owner: store.client(owner) in last)
    return replace(whole, text={**whole.text, "test": first}), replace(whole, text={"test": second})


def said(run: Run) -> str:
    """Say on which text settings are chosen."""
    chosen = _parts(run)[0]
    if isinstance(chosen, TreeEvaluation):
        return f"{chosen.split} text at the leaves"
    kind = next(iter(chosen.splits()), None)
    return {
        "validation": "held-out text of training clients",
        "test": "one half of the test clients",
    }.get(str(kind), "no text")


def _parts(run: Run) -> tuple[Evaluation, Evaluation | None]:
    whole = run.evaluation
    if isinstance(whole, HeldOutEvaluation):
        return _flat(run, whole)
    if isinstance(whole, TreeEvaluation) and isinstance(whole.text, TextHere):
        return _tree(whole, whole.text)
    return whole, None


def _flat(run: Run, whole: HeldOutEvaluation) -> tuple[Evaluation, Evaluation | None]:
    splits = whole.splits()
    if "validation" in splits:
        kept = replace(whole, text={"validation": whole.text["validation"]})
        rest = {"test": whole.text["test"]} if "test" in splits else None
        return kept, None if rest is None else replace(whole, text=rest)
    if "test" not in splits:
        return whole, None
    if len(np.unique(whole.text["test"].rows(1)[1])) < 2:
        return whole, None
    return _halves_of_test(run)


def _only(text: HeldOutText, keep: Callable[[int], bool]) -> HeldOutText:
    """Return the rows of some owners."""

    def rows(context: int) -> tuple[np.ndarray, np.ndarray]:
        found, owners = text.rows(context)
        kept = np.isin(owners, [n for n in np.unique(owners) if keep(int(n))])
        return found[kept], owners[kept]

    owners = (int(n) for n in np.unique(text.rows(1)[1]))
    size = None if text.bytes is None else sum(text.bytes_of(n) for n in owners if keep(n))
    return replace(text, rows=rows, bytes=size)


def _tree(whole: TreeEvaluation, text: TextHere) -> tuple[Evaluation, Evaluation | None]:
    if len(whole.told) > 1 and not whole.own_models_stay and _tells(whole):
        first, last = ("validation",), ("test",)
        return replace(whole, told=first, _seen={}), replace(whole, told=last, _seen={})
    if whole.split is None:
        return whole, None

    def half(first: int) -> TreeEvaluation:
        rows = {
            split: {place: found[first::2] for place, found in of.items()}
            for split, of in text.rows.items()
        }
        return replace(whole, text=replace(text, rows=rows), _seen={})

    return half(0), half(1)


def _tells(whole: TreeEvaluation) -> bool:
    """Return whether figures of training clients may be told: no node has a privacy plan."""
    return all(a is None or a.plan is None for a in whole.config.algorithms)
