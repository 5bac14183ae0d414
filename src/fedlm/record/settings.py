"""Settings beside their defaults, and beside those of other runs.

In:       the recipes in journals, and the defaults.
Out:      rows for tables.
Promise:  a setting that is left out is one that has its default value, or the same value in all
          runs.
Not here: what settings mean and which defaults they have (`recipe/tables.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlm.core.documents import JsonObject
from fedlm.core.words import NOTHING

Tables = Mapping[str, Mapping[str, Any]]
SEED = "run.seed"
LONGEST = 120  # letters of a value


def flat(recipe: Tables) -> JsonObject:
    """Return the settings of a recipe by `table.key`."""
    return {
        f"{table}.{key}": value
        for table, settings in recipe.items()
        if isinstance(settings, Mapping)
        for key, value in settings.items()
    }


def changed_rows(recipe: Tables, defaults: Tables) -> tuple[list[list[str]], list[list[str]]]:
    """Return rows of the settings that differ from their defaults, and rows of the others."""
    usual, changed, others = flat(defaults), [], []
    for name, value in flat(recipe).items():
        default = usual.get(name)
        if name in usual and _same(value, default):
            others.append([name, shown_setting(value)])
        else:
            changed.append(
                [name, shown_setting(value), "" if default is None else shown_setting(default)]
            )
    return changed, others


def _same(a: Any, b: Any) -> bool:
    # A journal has lists where a recipe has tuples, and no infinity.
    listed = [list(v) if isinstance(v, tuple) else v for v in (a, b)]
    return listed[0] == listed[1]


def shown_setting(value: object) -> str:
    """Return a value of a setting as text.

    >>> shown_setting([1, 2]), shown_setting(True), shown_setting("x"), shown_setting(None)
    ('1, 2', 'yes', 'x', '-')
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        said = ", ".join(shown_setting(part) for part in value) if value else "none"
        return shown_setting(said)
    said = str(value)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def differing(recipes: Sequence[Tables], *, seeds: bool = False) -> list[str]:
    """Return the names of the settings in which recipes differ, the seed only if asked for."""
    every = [flat(recipe) for recipe in recipes]
    names = sorted(set().union(*every)) if every else []
    return [
        name
        for name in names
        if (seeds or name != SEED) and len({str(each.get(name)) for each in every}) > 1
    ]
