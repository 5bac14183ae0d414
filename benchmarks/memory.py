"""What a process holds in memory, as Linux tells it.

In:       the number of a process, or a block of work.
Out:      megabytes.
Promise:  a peak is that of the work alone, not of what came before it; pages of files, which the
          system can take back, are counted only where it is said.
Not here: what is measured.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path


def held(name: str, process: int | str = "self") -> float:
    """A line of a process's status: `VmRSS`, `VmHWM`, `RssAnon` (no file holds it)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    return float(found[1]) * 1024 / 1e6 if found else float("nan")


class Growth:
    """What a process holds at most from now on, files included, beside what it holds now."""

    def __init__(self, process: int | str = "self") -> None:
        self.process = process
        Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")  # forgets its peak
        self.before = held("VmRSS", process)

    def more(self) -> float:
        return held("VmHWM", self.process) - self.before


class Peak:
    """The most that no file holds while a block runs, looked at every 20 ms."""

    def __enter__(self) -> Peak:
        self.most, self._done = held("RssAnon"), threading.Event()
        self._look = threading.Thread(target=self._watch)
        self._look.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.most = max(self.most, held("RssAnon"))

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._look.join()
