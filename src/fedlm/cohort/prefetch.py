"""The next cohort, prepared on a thread while this one runs.

In:       a function from a round to the value that the round needs.
Out:      its values in order.
Promise:  the same values as a plain loop, errors included; at most `depth` values wait
          for their use, and one more is being made or waits for a place.
Not here: randomness (the function derives its own, by round).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")


def prefetch(make: Callable[[int], T], rounds: range, depth: int = 1) -> Generator[T, None, None]:
    """Yield `make(r)` for each round, computed ahead of its use on a thread."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        for r in rounds:
            if stop.is_set():
                return
            try:
                put((make(r), None))
            except BaseException as error:  # handed to the consumer, who raises it
                return put((None, error))

    worker = threading.Thread(target=work, name="fedlm-prefetch", daemon=True)
    worker.start()
    try:
        for _ in rounds:
            value, error = ready.get()
            if error is not None:
                raise error
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        worker.join()
