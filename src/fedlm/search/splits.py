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
    text, store = whole.text["test"], run.store
    names = [store.client(int(n)) for n in np.unique(text.rows(1)[1])]
    last = held_out_clients(names, 0.5, SPLIT_SEED) if len(names) > 1 else frozenset()
    first = _only(text, lambda owner: store.client(owner) not in last)
    second = _only(text, lambda owner: store.client(owner) in last)
    kept = replace(whole, text={"test": first})
    return kept, replace(whole, text={"test": second}) if last else None


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
    places = set(whole.config.topology.with_text)
    both = all(places <= set(text.rows.get(s, {})) for s in ("test", "validation"))
    if whole.split == "test" and both and not whole.own_models_stay and _tells(whole):
        return replace(whole, split="validation", _seen={}), replace(whole, _seen={})
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
