"""Recipes and sweeps that come with fedlm.

In:       a path or a name that a user gave.
Out:      the path of a file.
Promise:  a file that is there is taken as it is; otherwise a shipped one of that name, from the
          wheel or from the clone that is installed.
Not here: reading them (`settings.py`, `sweep.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# In a wheel beside the code; in a clone at its top.
FOLDERS = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")


def recipes_folder() -> Path | None:
    """Return the folder of shipped recipes; None if only the code was copied."""
    return next((path for path in FOLDERS if (path / "sotu.toml").is_file()), None)


def recipe_names() -> list[str]:
    """Return the names of shipped recipes and sweeps, as `fedlm train` takes them."""
    root = recipes_folder()
    if root is None:
        return []
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.toml")
    )


def find(path: Path) -> Path:
    """Return a path, or that of the shipped recipe of this name if there is nothing at the path.

    `sotu`, `sotu.toml` and `recipes/sotu.toml` name the same shipped recipe.
    """
    root = recipes_folder()
    if os.path.lexists(path) or root is None or path.is_absolute():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
    name = "/".join(parts).removesuffix(".toml")
    return root / f"{name}.toml" if name in recipe_names() else path
