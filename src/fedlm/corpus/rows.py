"""A client's tokens as rows of a fixed width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlm.cohort.packing import Layout, cut
from fedlm.corpus.store import Store


@dataclass(frozen=True, kw_only=True)
class ClientRows:
    """Rows of the clients of a store; members are numbered in the order of `clients`."""

    store: Store
    clients: np.ndarray
    sequence_length: int
    layout: Layout

    def train(self, member: int, context: int = 1) -> np.ndarray:
        """The training rows of a member."""
        return self._cut(self.store.train(int(self.clients[member])), context)

    def held(self, client: int, context: int = 1) -> np.ndarray:
        """The held-out rows of a client, by its number in the store."""
        return self._cut(self.store.held(int(client)), context)

    def _cut(self, tokens: np.ndarray, context: int) -> np.ndarray:
        return cut(tokens, self.sequence_length, self.layout, context)
