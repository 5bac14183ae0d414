"""A run, carried out in its directory.

In:       a `Run`, somebody who watches.
Out:      a trained model in the directory, and a summary of the run.
Promise:  resumed after a kill at any moment, it ends with the same parameters as a run that was
          never interrupted; what happened is in the journal, and what was released under a
          privacy plan is in the ledger before that; no two processes train in one directory;
          whenever a run begins or goes on, its text is compared with its hash.
Not here: the loop (`run.py`), making a run (`recipe`), printing (`cli`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager

from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError, require
from fedlm.core.types import FederationState
from fedlm.engine import multihost
from fedlm.evaluate.progress import listening
from fedlm.federation.round import Played
from fedlm.privacy.release import hides
from fedlm.recipe.settings import dump, with_defaults
from fedlm.record import checkpoint
from fedlm.record.trackers import check_installed
from fedlm.run import Run
from fedlm.training.begin import Begun, begin, check_frozen, unless_stopped
from fedlm.training.close import Summary, close
from fedlm.training.extension import extend_rounds
from fedlm.training.processes import compare_processes
from fedlm.training.rounds import play_rounds
from fedlm.training.status import in_status
from fedlm.training.watcher import Watcher
from fedlm.training.write_ahead import Resumed, WriteAhead


def train(run: Run, *, resume: bool = False, watcher: Watcher = Watcher()) -> Summary | None:  # noqa: B008
    """Train to the end and return the summary; None if the watcher stopped the run."""
    _check_start(run)
    state = None
    with run.record.locked(), _in_status(run, watcher) as told:
        for played in _play(run, resume, told):
            state = played.state
        return finish(run, state, told)


def play(
    run: Run,
    *,
    resume: bool = False,
    watcher: Watcher = Watcher(),  # noqa: B008
) -> Generator[Played, None, None]:
    """Begin or resume a run and yield its rounds, each after it is on record."""
    _check_start(run)
    with run.record.locked(), _in_status(run, watcher) as told:
        yield from _play(run, resume, told)


def _in_status(run: Run, watcher: Watcher) -> AbstractContextManager[Watcher]:
    every, secret = run.cadence.evaluate_every, hides(run.plan)
    return in_status(run.record, watcher, every, command=run.command, secret=secret)


def _check_start(run: Run) -> None:
    check_installed(run.outputs.trackers)
    compare_processes(run)
    patience, keep_best = run.cadence.patience, run.outputs.keep_best
    require(
        not (patience or keep_best) or bool(run.evaluation.splits()),
        "server.patience" if patience else "run.keep_best",
        patience or keep_best,
        "held-out text whose figures may be told, by which models are compared",
        "Under a privacy plan that is text of held-out clients: set data.test_clients.",
    )


def _play(run: Run, resume: bool, watcher: Watcher) -> Iterator[Played]:
    """Yield the rounds of a run whose directory is locked."""
    directory = run.record
    if resume:
        extend_rounds(run, watcher.say)
    goes_on = directory.claim(dump(run.recipe), resume=resume, complete=with_defaults)
    if goes_on and directory.summary.is_file():
        watcher.say(f"{directory.path} is complete; nothing is left to train.")
        multihost.broadcast()
        return
    watcher.claimed()
    with listening(watcher.scored):
        begun = begin(run, goes_on, watcher.say)
    if not multihost.alone():
        multihost.broadcast(checkpoint.to_bytes(begun.state, rounds=begun.rounds))
    yield from play_rounds(run.until(begun.rounds), begun, watcher)


def finish(run: Run, state: FederationState = None, watcher: Watcher = Watcher()) -> Summary | None:  # noqa: B008
    """Close a run after its last round and return its summary; None if rounds are missing.

    If the last `state` is not given, it is read from the newest checkpoint.
    """
    directory = run.record
    if directory.summary.is_file():
        done: Summary = read_json(directory.summary, str(directory.summary), RecordError)
        if not isinstance(done, dict):
            raise RecordError(f"{directory.summary} is damaged: remove it, and repeat.")
        return done
    with directory.locked(), _in_status(run, watcher) as told:
        last = _reload(run, told) if state is None else _played(run, state)
        if last is None or int(last.state.round) < last.rounds:
            return None
        told.claimed()
        told.evaluating()
        return close(run.until(last.rounds), last, told)


def _played(run: Run, state: FederationState) -> Resumed:
    """Return the state of the round just played, and how many rounds the run has."""
    rounds = run.cadence.rounds
    if run.plan is not None:
        rounds = WriteAhead(run).affordable(int(state.round))
    return unless_stopped(run, Resumed(state, rounds))


def _reload(run: Run, watcher: Watcher) -> Resumed | None:
    """Return the newest state on disk, and how many rounds the run has; None without a state."""
    directory, fresh = run.record, run.round.init(run.start())
    saved = checkpoint.load_newest(directory.checkpoints, fresh, watcher.say)
    if saved is None:
        return None
    check_frozen(run, fresh)
    if run.plan is None:
        return unless_stopped(run, Resumed(saved.state, run.cadence.rounds))
    ahead = WriteAhead(run)
    last = ahead.resume(saved, watcher.say)
    if int(saved.state.round) < last.rounds and not last.ended:
        return None  # rounds are missing, and playing them completes the journal
    if ahead.missing(saved) is not None:  # nothing is played: this completes the journal alone
        here = Begun(*last, ahead, ahead.missing(saved))
        for _ in play_rounds(run.until(int(saved.state.round)), here, watcher):
            pass
    return unless_stopped(run, last)
