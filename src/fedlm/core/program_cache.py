"""Compiled programs that a process keeps for whoever asks for the same ones again.

In:       a maker of programs whose arguments can be hashed.
Out:      a maker that returns for equal arguments what it made before.
Promise:  each maker keeps the latest programs alone, as many as the process was told; what somebody
          still holds goes on to work, and is made again only for who asks anew.
Not here: the programs (`engine/mesh.py`, `evaluate/perplexity.py`), compiled programs on disk
          (`engine/programs.py`).

A search in one process comes back to its settings, so many are kept. A node is asked for one run
after the other for months: each recipe that it has ever met would cost it about 25 MB.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
MOST_KEPT = 32  # of each maker; processes seldom have more algorithms than this


class kept_programs(Generic[P, T]):
    """Let a maker of programs return the same ones for equal arguments.

    >>> made = kept_programs(lambda n: [n])
    >>> made(2) is made(2), made(2) is made(3)
    (True, False)
    """

    def __init__(self, make: Callable[P, T]) -> None:
        self._make, self.__doc__ = make, make.__doc__
        self._kept: OrderedDict[Any, T] = OrderedDict()
        self._lock = threading.RLock()
        _MAKERS.add(self)

    def __call__(self, *args: P.args, **named: P.kwargs) -> T:
        key = (args, tuple(named.items()))
        with self._lock:
            found = self._kept.pop(key, None) or self._make(*args, **named)
            self._kept[key] = found  # it is the latest
        self.let_go()
        return found

    def let_go(self) -> None:
        """Forget the programs that nobody has asked for lately."""
        with self._lock:
            while len(self._kept) > max(1, _most):
                self._kept.popitem(last=False)

    def cache_clear(self) -> None:
        """Forget all programs."""
        self._kept.clear()


_MAKERS: weakref.WeakSet[kept_programs[Any, Any]] = weakref.WeakSet()
_most = MOST_KEPT


def keep_programs(most: int) -> int:
    """Keep at most so many programs per maker from now on; return how many it was before."""
    global _most
    before, _most = _most, most
    for maker in list(_MAKERS):
        maker.let_go()
    return before
