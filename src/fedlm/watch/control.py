"""Stop and resume a run from the page.

In:       the name of a run on the board.
Out:      SIGINT to its process, as Ctrl-C gives; or a new process of `fedlm ... --resume`.
Promise:  a signal goes only to a process of this user that holds the lock of that run and began
          when the status file says; a status file chooses no program and no option.
Not here: what a run does when it is asked to stop (`cli/train.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedlm.core.errors import RecordError
from fedlm.record.directory import LOCK, RunDirectory
from fedlm.record.status import LIVE, Status, is_alive, process_start
from fedlm.watch.board import Board

LOG = "resume.log"  # in the run directory: what a resumed run prints
LAST_WORDS = 2_000  # bytes of that file
LONGEST_END = 60.0  # seconds from a run's last word to the end of its process


class Control:
    """The buttons of the page."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._begun: dict[str, subprocess.Popen[bytes]] = {}

    def stop(self, id: str) -> str:
        """Ask the process of a run to stop after its round, as Ctrl-C does."""
        directory, status = self.board.find(id), self.board.status_of(id)
        if status is None or status.state not in LIVE:
            raise RecordError(f"{id} is not being trained: there is nothing to stop.")
        _interrupt(directory, status)
        return f"{id} stops after its round."

    def resume(self, id: str) -> str:
        """Start the command that goes on with a run, in a session of its own."""
        directory, status = self.board.find(id), self.board.status_of(id)
        if directory.summary.is_file():
            raise RecordError(f"{id} is complete: nothing is left to train.")
        running = self._begun.get(id)
        if status is not None and status.state not in LIVE:
            _wait_for_end(status, running)
        if running is not None and running.poll() is None:
            raise RecordError(f"{id} is being resumed already.")
        folder = Path(status.folder) if status is not None else Path.cwd()
        try:
            log = os.open(
                directory.path / LOG,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            with open(log, "wb") as out:
                self._begun[id] = subprocess.Popen(
                    resume_command(directory, status),
                    cwd=folder if folder.is_dir() else None,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C of the page's server is not for it
                )
        except OSError as error:
            raise RecordError(f"{id} could not be resumed: {error.strerror}.") from None
        return f"{id} goes on."

    def failures(self) -> dict[str, str]:
        """Return the last words of runs whose resumption ended at once, by name."""
        found = {}
        for id, process in self._begun.items():
            if process.poll() not in (None, 0, 130):
                with contextlib.suppress(OSError, RecordError):
                    raw = (self.board.find(id).path / LOG).read_bytes()[-LAST_WORDS:]
                    lines = raw.decode("utf-8", "replace").strip().splitlines()
                    found[id] = lines[-1] if lines else "It could not be resumed."
        return found


def _wait_for_end(status: Status, running: subprocess.Popen[bytes] | None) -> None:
    """Wait for a process that has said its last word: it holds the run's lock until it is gone.

    A child of ours may have a dead main thread and others that still end.
    """
    ends = time.monotonic() + LONGEST_END
    while is_alive(status) and time.monotonic() < ends:
        time.sleep(0.05)
    if running is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(max(0.0, ends - time.monotonic()))


def resume_command(directory: RunDirectory, status: Status | None) -> list[str]:
    """Return the command that goes on with a run.

    >>> resume_command(RunDirectory(Path("/r/x")), None)[4:]
    ['train', '/r/x/recipe.toml', '--out', '/r/x', '--resume']
    """
    path = directory.path.resolve()
    words = ["train"]
    if status is not None and status.command == "pretrain":
        words = ["pretrain"]
    elif status is not None and status.command == "federation train" and status.home:
        words = ["federation", "train", str(Path(status.home).resolve())]
    # -P: the folder that the status names holds no modules of ours, whatever files are in it.
    python = [sys.executable, "-P", "-m", "fedlm.cli.main"]
    return [*python, *words, str(path / "recipe.toml"), "--out", str(path), "--resume"]


def _interrupt(directory: RunDirectory, status: Status) -> None:
    """Send SIGINT to the process of a run, after checking that it is that process and ours."""
    try:
        holder = (directory.path / LOCK).read_text(encoding="ascii")[:20].strip()
    except (OSError, UnicodeDecodeError):
        holder = ""
    if holder != str(status.pid) or not _holds(status.pid, directory.path / LOCK):
        raise RecordError(f"{directory.path} is not locked by process {status.pid}: it has ended.")
    try:
        # A handle of the process: its number cannot pass to another one between check and signal.
        handle = os.pidfd_open(status.pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        raise RecordError(f"process {status.pid} has ended.") from None
    try:
        if process_start(status.pid) != status.process or not _ours(status.pid):
            raise RecordError(f"process {status.pid} is another one now: the run has ended.")
        if handle is None:
            os.kill(status.pid, signal.SIGINT)
        else:
            signal.pidfd_send_signal(handle, signal.SIGINT)
    except OSError as error:
        raise RecordError(f"process {status.pid}: {error.strerror}.") from None
    finally:
        if handle is not None:
            os.close(handle)


def _holds(pid: int, path: Path) -> bool:
    """Return whether a process holds the lock of a file.

    What is written in the file, and a lock on it, may be anybody's who writes in its folder.
    """
    files = Path(f"/proc/{pid}/fd")
    try:
        wanted = path.lstat()
        for file in files.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                if os.path.samestat(file.stat(), wanted):
                    told = (files.parent / "fdinfo" / file.name).read_text(encoding="ascii")
                    if re.search(r"^lock:.* FLOCK .* WRITE ", told, re.MULTILINE):
                        return True
    except OSError:
        # Without /proc the system tells nobody who holds a lock.
        return not Path("/proc/self/fd").is_dir() and path.is_file()
    return False


def _ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return True  # no /proc: the system refuses the signal to a process of another user
