"""What the origin of a vocabulary means for a privacy claim.

In:       the header of a journal.
Out:      the sentences that stand beside every epsilon.
Promise:  a vocabulary that shows clients' text without noise is never passed over in silence.
Not here: where the origin is recorded (`corpus/vocabulary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_COVERED = "the epsilon does not cover it"


def assumptions(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a claim must say about the vocabulary, from the header of a run's journal."""
    store = header.get("store")
    if not isinstance(store, Mapping):
        return ()
    origin = store.get("tokenizer_from")
    if not isinstance(origin, Mapping):
        return (f"where the vocabulary came from is not recorded: {NOT_COVERED}",)
    if origin.get("kind") == "like":
        of = origin.get("of")
        found = _said(of) if isinstance(of, Mapping) else f"its origin is not known: {NOT_COVERED}"
        return (f"the vocabulary is that of the store {origin.get('store')!r}; there, {found}",)
    return () if origin.get("kind") == "public" else (_said(origin),)


def uncovered(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return those assumptions that say of clients' text that a claim does not cover it."""
    return tuple(said for said in assumptions(header) if said.endswith(f": {NOT_COVERED}"))


def _said(origin: Mapping[str, Any]) -> str:
    kind = origin.get("kind")
    if kind == "public":
        return "the vocabulary was made of nobody's text"
    if kind == "file":
        digest = str(origin.get("sha256"))[:12]
        return (
            f"the vocabulary is that of the file {origin.get('name')!r} (sha256 {digest}...), "
            f"assumed public: if clients' text is in it, {NOT_COVERED}"
        )
    return f"the vocabulary was counted on the clients' text without noise: {NOT_COVERED}"
