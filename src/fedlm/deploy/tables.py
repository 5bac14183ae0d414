"""Small settings files, read strictly.

In:       a TOML file and the kind of table it should hold.
Out:      the table.
Promise:  an unknown line or a wrong value is one sentence that names the file.
Not here: recipes (`recipe/settings.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import tomli_w
from pydantic import ValidationError

from fedlm.core.documents import read_toml
from fedlm.core.errors import ConfigError, nearest, shown
from fedlm.recipe.settings import Table

T = TypeVar("T", bound=Table)


def read_table(path: Path, kind: type[T]) -> T:
    """Read a small TOML file; raise `ConfigError` for an unknown key or a wrong value."""
    return check_table(kind, read_toml(path, str(path)), str(path))


def check_table(kind: type[T], tables: dict[str, object], where: str) -> T:
    """Convert values to settings, or raise one sentence about the first wrong value."""
    floats = {
        k: float(v) if type(v) is int and _is_float(kind, k) else v for k, v in tables.items()
    }
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in floats.items()}
    try:
        return kind.model_validate(lists)
    except ValidationError as error:
        # A mistyped name gives two errors, unknown and missing: the unknown name is reported.
        first = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0]
        place = ".".join(str(part) for part in first["loc"])
        wanted = first["msg"].removeprefix("Input should be ")
        if first["type"] == "missing":
            raise ConfigError(f"{where}: the setting {place!r} is missing.") from None
        if first["type"] == "extra_forbidden":
            hint = nearest(place, kind.model_fields)
            raise ConfigError(f"{where}: there is no setting {place!r}. {hint}") from None
        told = shown(first["input"])
        raise ConfigError(f"{where}: {place} = {told}: expected {wanted}.") from None


def _is_float(kind: type[Table], name: str) -> bool:
    field = kind.model_fields.get(name)
    return field is not None and field.annotation in (float, float | None)


def write_table(path: Path, settings: Table) -> None:
    text = tomli_w.dumps(settings.model_dump(exclude_none=True))
    path.write_text(text, encoding="utf-8")
