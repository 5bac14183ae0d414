"""Somebody who watches a run.

In:       functions of whoever carries out a run: the command line, a notebook, a test.
Out:      `Watcher`.
Promise:  a record only; a watcher sees what may be told and nothing else.
Not here: printing (`cli`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedlm.core.releasable import Releasable
from fedlm.record.status import StatusFile


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Callbacks of a run: they are told of stages and rounds, and asked whether to stop."""

    say: Callable[[str], None] = lambda text: None
    begin: Callable[[int, int, float | None], None] = lambda first, rounds, perplexity: None
    round: Callable[[Releasable], None] = lambda told: None
    stop: Callable[[], bool] = lambda: False
    claimed: Callable[[], None] = lambda: None  # the directory is this run's
    evaluating: Callable[[], None] = lambda: None  # a model is being scored
    # Rows of held-out text: how many were scored, and how many are to score.
    scored: Callable[[int, int], None] = lambda done, rows: None
    status: StatusFile | None = None  # which is told everything, where one is kept
