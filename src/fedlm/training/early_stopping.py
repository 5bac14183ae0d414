"""When a run stops because it no longer improves, and which model was the best on the way.

In:       the released figures of rounds, in order; a number of evaluations to wait.
Out:      whether a figure is the best so far; whether the run should stop.
Promise:  only released figures are looked at, so that nothing private decides anything; the same
          figures give the same answer, also if a run was resumed between two of them.
Not here: the loop (`run.py`), writing the best model (`rounds.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedlm.core.documents import JsonMapping


class EarlyStopping:
    """The best figure so far, and how many evaluations ago it was.

    >>> watch = EarlyStopping(2)
    >>> [watch.hear({"round": n, "perplexity": p}) for n, p in enumerate([9.0, 7.0, 8.0, 7.5])]
    [True, True, False, False]
    >>> watch.best, watch.exhausted
    ((1, 7.0), True)
    """

    def __init__(self, patience: int, rounds: Iterable[JsonMapping] = ()) -> None:
        """Take the evaluations to wait, 0 for no end, and the rounds that were played before."""
        self.patience = patience
        self.best: tuple[int, float] | None = None  # its round and perplexity
        self._since = 0
        for told in rounds:
            self.hear(told)

    def hear(self, told: JsonMapping) -> bool:
        """Take the facts of a round; return whether its perplexity is the lowest so far.

        One that is beyond all numbers is passed over: a journal cannot tell it from none.
        """
        perplexity = told.get("perplexity")
        if perplexity is None or not math.isfinite(perplexity):
            return False
        if self.best is None or perplexity < self.best[1]:
            self.best, self._since = (told["round"], perplexity), 0
            return True
        self._since += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether the last evaluations brought no improvement."""
        return 0 < self.patience <= self._since
