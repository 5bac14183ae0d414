"""Several stores, read as one.

In:       the paths of stores.
Out:      a `Store` of all their clients, in the order of the paths.
Promise:  every client belongs to the group of its store's name, before its own groups; tokens mean
          the same words in all of them; nothing is copied.
Not here: reading a store (`store.py`), the node of a tree that a group belongs to (`federation`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedlm.core.errors import CorpusError
from fedlm.corpus.store import Store
from fedlm.corpus.vocabulary import weakest

COUNTS = ("clients", "train_clients", "test_clients", "train_tokens", "held_tokens")


class JoinedStore(Store):
    """Several stores read as one, with the tokenizer and the settings of the first."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.parts = tuple(Store(path) for path in paths)
        first = self.parts[0]
        self.path = first.path
        self.names = tuple(part.path.name for part in self.parts)
        for name, part in zip(self.names, self.parts, strict=True):
            if self.names.count(name) > 1:
                raise CorpusError(
                    f"two stores are called {name!r}: a store is known by the name of its folder. "
                    "Rename one."
                )
            if part.tokens_sha256 != first.tokens_sha256:
                raise CorpusError(
                    f"store {part.path} has another tokenizer than {first.path}: its tokens mean "
                    "other words. Prepare it again, with fedlm prepare --like."
                )
        whole = hashlib.sha256("|".join(p.manifest["clients_sha256"] for p in self.parts).encode())
        self.manifest = {
            **first.manifest,
            **{name: sum(part.manifest[name] for part in self.parts) for name in COUNTS},
            "tokenizer_from": weakest([part.manifest["tokenizer_from"] for part in self.parts]),
            "clients_sha256": whole.hexdigest(),
        }
        self._files = [file for part in self.parts for file in part._files]
        self._batches = [batch for part in self.parts for batch in part._batches]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()
        self._ends = np.cumsum([len(part) for part in self.parts]).tolist()

    @property
    def ledgers(self) -> tuple[Path, ...]:
        """The ledgers of all parts; parts that share a vocabulary have copies of one ledger."""
        return tuple(file for part in self.parts for file in part.ledgers)

    def groups(self, number: int) -> tuple[str, ...]:
        """Return the name of the client's store, then the client's own groups."""
        name = self.names[bisect.bisect_right(self._ends, number)]
        return (name, *super().groups(number))

    def verify(self) -> None:
        """Compare every part with its hash."""
        for part in self.parts:
            part.verify()
