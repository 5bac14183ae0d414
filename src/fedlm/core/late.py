"""Libraries that are loaded when they are first used, because loading them costs.

In:       the name of a module.
Out:      an object with the module's attributes.
Promise:  nothing is loaded before an attribute is asked for; then it is the module itself that
          answers, and a module that is not installed raises what importing it raises.
Not here: which libraries cost that much (each line that calls `late` says it).
"""

from __future__ import annotations

import importlib
from typing import Any


class _Late:
    """A module that is not loaded yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by doctest, inspect and pickle of any object
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def late(name: str) -> Any:
    """Return a module that is loaded when one of its attributes is first asked for.

    >>> fractions = late("fractions")
    >>> fractions.Fraction(2, 4)
    Fraction(1, 2)
    """
    return _Late(name)
