"""Processes that cut text into pieces.

In:       tasks, in their order; the open file that holds the text; a number of processes.
Out:      their blocks, in the same order.
Promise:  the text of the blocks does not depend on the number of processes; a few of them are in
          memory at a time; no process outlives the loop over its blocks.
Not here: what is done with a task (`pieces.py`).

A process is begun anew and imports no JAX: a fork of a process whose threads hold locks may hang.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from fedlm.core.errors import CorpusError
from fedlm.corpus.pieces import PieceBlock, PieceCutter, PieceTask

PACKAGE = Path(__file__).parents[1]
# The package without its `__init__`, which imports all of fedlm.
BEGIN = """
import sys, types
for name, folder in (("fedlm", sys.argv[1]), ("fedlm.corpus", sys.argv[1] + "/corpus")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from fedlm.corpus.piece_worker import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""
BYTES_A_WORKER = 1 << 25  # a process that has less text to cut does not pay for its start
AHEAD = 2  # blocks per process that are asked for before the first one is there


def worker_count(text_bytes: int, asked: int | None = None) -> int:
    """Return how many processes cut a text of a size: one per core, and fewer for short texts."""
    if asked is not None:
        return asked
    return max(1, min(len(os.sched_getaffinity(0)), text_bytes // BYTES_A_WORKER))


def cut_blocks(tasks: Iterable[PieceTask], file: int, workers: int) -> Iterator[PieceBlock]:
    """Yield the block of each task, made by so many processes; one is this process itself."""
    if workers <= 1:
        yield from map(PieceCutter(file).cut, tasks)
        return
    idle: SimpleQueue[PieceWorker] = SimpleQueue()
    begun = [PieceWorker(file, number) for number in range(workers)]
    for worker in begun:
        idle.put(worker)

    def work(task: PieceTask) -> PieceBlock:
        worker = idle.get()
        try:
            return worker.cut(task)
        finally:
            idle.put(worker)

    waiting: deque[Future[PieceBlock]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for worker in begun:
            worker.kill()
        pool.shutdown()
        for worker in begun:
            worker.close()


class PieceWorker:
    """A process that cuts blocks, one after another."""

    def __init__(self, file: int, number: int) -> None:
        command = [sys.executable, "-P", "-c", BEGIN, str(PACKAGE), str(file), str(number)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=(file,))

    def cut(self, task: PieceTask) -> PieceBlock:
        """Return the block of a task."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()
            made: PieceBlock = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise CorpusError(
                f"a process that cuts text died at client {task.first + 1:,}: there may be too "
                "little memory. Prepare it with --workers 1."
            ) from None
        return made

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes of a process that was killed."""
        self._process.communicate()
