"""Work that may take only so many seconds.

In:       work to be done.
Out:      its result, or a `Refusal`.
Promise:  work that takes longer than it may is stopped, and the caller goes on; nothing else is
          begun while work that could not be stopped yet is still going on.
Not here: how much is allowed (`policy.py`), what a question costs in steps and memory
          (`recipe/memory.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from fedlm.deploy.policy import Refusal

T = TypeVar("T")
GRACE = 5.0  # seconds in which stopped work may end


class _Stopped(BaseException):
    """Raised inside work that took too long; not an `Exception`, so that nothing swallows it."""


class _Work(threading.Thread):
    """A call in a thread of its own, which can be stopped between two lines of Python."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # it is raised again where the result is waited for
            self.error = error

    def stop(self) -> None:
        assert self.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped)
        )


_lock = threading.Lock()
_busy: list[_Work] = []  # work that was stopped and has not ended yet


def within(seconds: float, call: Callable[[], T], *, grace: float = GRACE) -> T:
    """Return the result of a call, or raise `Refusal` if it takes longer than `seconds`.

    The call is stopped then, as soon as it is back from any library; it must write no files that
    others rely on. Until it has ended, further calls are refused.
    """
    with _lock:
        _busy[:] = [work for work in _busy if work.is_alive()]
        if _busy:
            raise Refusal("this node is still busy with a question that took too long.")
    work = _Work(call)
    work.start()
    work.join(seconds)
    if work.is_alive():
        with _lock:
            _busy.append(work)
        work.stop()
        work.join(grace)
        raise Refusal(
            f"this takes longer than {seconds:g} seconds: this node allows no more "
            "(longest_seconds in its policy)."
        )
    if work.error is not None:
        raise work.error
    return work.result  # type: ignore[return-value]
