"""What a run is doing now, told to its status file beside everybody else.

In:       a run directory and its watcher.
Out:      a watcher that is told the same and also keeps `status.json`.
Promise:  one story: the file says what the watcher is told, and nothing else; however the block
          ends, the file says how.
Not here: the file (`record/status.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedlm.core.errors import FedlmError
from fedlm.core.releasable import Releasable
from fedlm.record.directory import RunDirectory
from fedlm.record.status import StatusFile
from fedlm.training.watcher import Watcher


@contextlib.contextmanager
def in_status(
    directory: RunDirectory,
    watcher: Watcher,
    evaluate_every: int,
    *,
    command: str = "train",
    home: Path | None = None,
) -> Iterator[Watcher]:
    """Yield a watcher that keeps the status file for a block of code; a second one adds nothing."""
    if watcher.status is not None:
        yield watcher
        return
    status = StatusFile(directory.status, command=command, home=home)
    try:
        yield _kept(status, watcher, evaluate_every)
    except (KeyboardInterrupt, GeneratorExit):
        status.tell(state="stopped", doing="", follows="")
        raise
    except FedlmError as error:
        status.tell(state="failed", doing=str(error), follows="")
        raise
    except BaseException as error:
        status.tell(state="failed", doing=f"an error of fedlm: {type(error).__name__}", follows="")
        raise
    else:
        ended = "finished" if directory.summary.is_file() else "stopped"
        status.tell(state=ended, doing="", follows="")


def _kept(status: StatusFile, watcher: Watcher, evaluate_every: int) -> Watcher:
    total = 0

    def say(text: str) -> None:
        status.tell(doing=text)
        watcher.say(text)

    def begin(first: int, rounds: int, perplexity: float | None) -> None:
        nonlocal total
        total = rounds
        status.tell(
            state="compiling",
            doing="the first round takes longest",
            follows=_follows(first, rounds, evaluate_every),
            round=first,
            rounds=rounds,
        )
        watcher.begin(first, rounds, perplexity)

    def on_round(told: Releasable) -> None:
        done = told["round"] + 1
        follows = _follows(done, total, evaluate_every)
        status.tell(state="training", doing="", follows=follows, round=done)
        watcher.round(told)

    def evaluating() -> None:
        status.tell(state="evaluating", doing="on held-out text")
        watcher.evaluating()

    def claimed() -> None:
        status.begin()
        watcher.claimed()

    return replace(
        watcher,
        say=say,
        begin=begin,
        round=on_round,
        evaluating=evaluating,
        claimed=claimed,
        status=status,
    )


def _follows(done: int, rounds: int, every: int) -> str:
    """Say what comes after the rounds that are played.

    >>> _follows(13, 40, 10), _follows(33, 40, 10)
    ('an evaluation after round 20', 'after round 40: evaluation on all held-out text, the report')
    """
    following = (done // every + 1) * every
    if following >= rounds:
        return f"after round {rounds}: evaluation on all held-out text, the report"
    return f"an evaluation after round {following}"
