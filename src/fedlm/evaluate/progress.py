"""How far the scoring of held-out rows has come, told to whoever carries out a run.

In:       somebody who listens while a block of code runs.
Out:      numbers of rows, scored and to score, as evaluators score them.
Promise:  a listener changes no figure, and hears of the rows of its own thread alone; without one
          nothing is counted.
Not here: scoring (`perplexity.py`), what is shown of it (`training/status.py`, `cli`).

Many parts of a run score rows: flat and tree evaluations, noisy figures, searches. They share no
caller but the one who listens, so the listener is a variable of the context, not an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[int, int], None]


class _Count:
    """The rows of a block of code, over all its evaluators."""

    def __init__(self, tell: Listener) -> None:
        self.tell, self.done, self.all, self.foreseen = tell, 0, 0, False


_COUNT: ContextVar[_Count | None] = ContextVar("scored rows", default=None)


@contextlib.contextmanager
def listening(tell: Listener) -> Iterator[None]:
    """Tell `tell(scored, to_score)` of the rows that are scored in a block of code.

    >>> heard = []
    >>> with listening(lambda *rows: heard.append(rows)):
    ...     Scored(10).add(4)
    >>> heard
    [(4, 10)]
    """
    before = _COUNT.set(_Count(tell))
    try:
        yield
    finally:
        _COUNT.reset(before)


@contextlib.contextmanager
def foreseen(rows: int) -> Iterator[None]:
    """Say how many rows a block of code scores by several calls.

    >>> heard = []
    >>> with listening(lambda *rows: heard.append(rows)), foreseen(10):
    ...     Scored(4).add(4)
    ...     Scored(6).add(6)
    >>> heard
    [(4, 10), (10, 10)]
    """
    count = _COUNT.get()
    if count is None or count.foreseen:
        yield
        return
    count.all, count.foreseen = count.all + rows, True
    try:
        yield
    finally:
        count.foreseen = False


class Scored:
    """The rows of one call of an evaluator."""

    def __init__(self, rows: int) -> None:
        """Take how many rows will be scored."""
        self._count = _COUNT.get()
        if self._count is not None and not self._count.foreseen:
            self._count.all += rows

    def add(self, rows: int) -> None:
        """Say that rows were scored."""
        if self._count is not None:
            self._count.done += rows
            self._count.tell(self._count.done, self._count.all)
