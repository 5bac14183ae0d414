"""The members that may take part, as far as sampling and a tree need to know them.

In:       a store and the numbers of its training clients; or how many members live elsewhere.
Out:      a `Population`: how many members there are, the group path and the tokens of each.
Promise:  no text passes here: rows belong to the engines and evaluations that hold text.
Not here: rows (`rows.py`), the sampling laws (`cohort/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedlm.corpus.store import Store


@dataclass(frozen=True, kw_only=True)
class Population:
    """Members numbered from zero, described without their text."""

    size: int
    groups: Callable[[int], tuple[str, ...]]  # the group path of a member
    tokens: Callable[[int], int] | None = None  # how many tokens a member trains on; None: unknown

    def group_paths(self) -> list[tuple[str, ...]]:
        """Return the group path of every member, in order."""
        return [self.groups(member) for member in range(self.size)]


def of_store(store: Store, clients: np.ndarray) -> Population:
    """Return the clients of a store as members, in the order of `clients`."""
    return Population(
        size=len(clients),
        groups=lambda member: store.groups(int(clients[member])),
        tokens=lambda member: len(store.train(int(clients[member]))),
    )


def pooled() -> Population:
    """Return a population of one member that holds all text, for central training."""
    return Population(size=1, groups=lambda member: ())


def of_paths(paths: Sequence[tuple[str, ...]]) -> Population:
    """Return one member per group path, for text that is held elsewhere."""
    return Population(size=len(paths), groups=lambda member: paths[member])
