"""Processes of a federation on one machine, for demonstrations and tests.

In:       a command of fedlm.
Out:      a running process whose output is in a file.
Promise:  whatever happens to the process that started them, they end: when the block is left, by
          its process group, and when their parent is killed, by themselves.
Not here: what the commands do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedlm.core.errors import EngineError

PARENT = "FEDLM_PARENT"
START_SECONDS = 90.0


class Child:
    """A command of fedlm in a process group of its own."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        cwd: Path | None = None,
        module: str = "fedlm.cli.main",
        before: tuple[str, ...] = (),
    ) -> None:
        """Start a command; `before` are words that start it, as `ip netns exec NAME`."""
        self.arguments, self.log = arguments, log
        # -P: the folder that a command runs in holds no modules of ours, whatever files are in it.
        apart = ["-P"] if module.partition(".")[0] == "fedlm" else []
        environment = {**os.environ, PARENT: str(os.getpid())}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [*before, sys.executable, *apart, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self, seconds: float = 5.0) -> None:
        """Ask the process to end, and kill it if it has not ended after `seconds`."""
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def tail(self) -> str:
        """Return the last line of the process's output."""
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return said[-1] if said else "nothing"


@contextlib.contextmanager
def children() -> Iterator[list[Child]]:
    """Yield a list for processes, and end all of them at the end of the block."""
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in started:
            if child.alive:
                child.process.terminate()
        for child in started:
            child.end()


def follow_parent() -> None:
    """End this process when its parent is gone; for processes that `Child` starts."""
    parent = os.environ.pop(PARENT, "")
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, child: Child, seconds: float = START_SECONDS) -> None:
    """Wait until a port of the loopback address is open; raise if the process ends first."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not child.alive:
            raise EngineError(f"the server ended before it listened: {child.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise EngineError(f"the server did not listen within {seconds:.0f} s: {child.tail()}")
