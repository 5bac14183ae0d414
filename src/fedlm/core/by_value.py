"""Functions that are the same object if they are made of the same values.

In:       a maker of functions, or of records of functions, whose arguments can be hashed.
Out:      a maker that returns for equal arguments the object that it made before.
Promise:  arguments that differ in value or type never share a result; what was not asked for
          lately is let go.
Not here: compiled programs (`engine/mesh.py`, `evaluate/perplexity.py`).

JAX looks a compiled program up by the functions it was traced from, and two closures are never
equal. With optimisers, methods and codecs made by value, the second run of a process finds the
programs of the first: about a second per run on one core, for a model of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

# A sweep has so many settings at the most; what a maker keeps is a few closures.
MOST_KEPT = 256


def by_value(make: Callable[P, T]) -> Callable[P, T]:
    """Let a maker return the same object for equal arguments.

    >>> adder = by_value(lambda n: lambda x: x + n)
    >>> adder(2) is adder(2), adder(2) is adder(2.0), adder(2) is adder(3)
    (True, False, False)
    """
    return cast("Callable[P, T]", lru_cache(maxsize=MOST_KEPT, typed=True)(make))
