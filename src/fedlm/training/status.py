"""What a run is doing now, told to its status file beside everybody else.

In:       a run directory and its watcher.
Out:      a watcher that is told the same and also keeps `status.json`.
Promise:  one story: the file says what the watcher is told, and nothing else; however the block
          ends, the file says how. Everybody may read the file, so that of a run whose plan hides
          who was drawn it has rounds, times and sentences of this module alone: what a run says and
          why it failed may name members, and that stays in its owner's terminal.
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
    secret: bool = False,
) -> Iterator[Watcher]:
    """Yield a watcher that keeps the status file for a block of code; a second one adds nothing.

    `secret`: a privacy plan hides who takes part, so nothing that is said is written as it is.
    """
    if watcher.status is not None:
        yield watcher
        return
    status = StatusFile(directory.status, command=command, home=home)
    try:
        yield _kept(status, watcher, evaluate_every, secret=secret)
    except (KeyboardInterrupt, GeneratorExit):
        status.tell(state="stopped", doing="", follows="")
        raise
    except FedlmError as error:
        status.tell(state="failed", doing=FAILED if secret else str(error), follows="")
        raise
    except BaseException as error:
        status.tell(state="failed", doing=f"an error of fedlm: {type(error).__name__}", follows="")
        raise
    else:
        ended = "finished" if directory.summary.is_file() else "stopped"
        status.tell(state=ended, doing="", follows="")


# Of a run that hides who takes part.
WAITING, WORKING = "waiting for nodes", "at work"
ON_TEXT = "on held-out text"
FAILED = "it ended with an error, which its own terminal or resume.log shows"


def _kept(status: StatusFile, watcher: Watcher, evaluate_every: int, *, secret: bool) -> Watcher:
    total = 0

    def say(text: str) -> None:
        hidden = WAITING if text.startswith("waiting") else WORKING
        status.tell(doing=hidden if secret else text)
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
        status.tell(state="evaluating", doing=ON_TEXT)
        watcher.evaluating()

    def scored(done: int, rows: int) -> None:
        # How much text is held out says something about those who wrote it.
        words = ON_TEXT if secret else f"{ON_TEXT}, {done:,} of {rows:,} rows"
        status.tell(state="evaluating", doing=words)
        watcher.scored(done, rows)

    def claimed() -> None:
        status.begin()
        watcher.claimed()

    return replace(
        watcher,
        say=say,
        begin=begin,
        round=on_round,
        evaluating=evaluating,
        scored=scored,
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
