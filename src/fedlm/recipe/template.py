"""A recipe to begin with: every setting, explained by its own description.

In:       values for some settings.
Out:      a TOML text in which these are set and all others stand as comments with their defaults.
Promise:  the text is a recipe; a setting that is added to the tables is in it.
Not here: which settings there are (`tables.py`).
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fedlm.core.documents import JsonMapping
from fedlm.recipe.tables import Recipe

COLUMNS = 80
ABOUT = """\
Every setting of a recipe, with what it means. A line that begins with "# " and a name is a
setting at its default: remove the "# " to change it. Train with:
"""


def template(values: Mapping[str, JsonMapping], title: str, command: str) -> str:
    """Return a commented recipe in which `values` are set, as tables by name."""
    head = [*_comment(title), "#", *_comment(ABOUT), f"#   {command}"]
    parts = ["\n".join(head)]
    for name, field in Recipe.model_fields.items():
        parts.append(_table(name, field.description or "", _kind(field), values.get(name)))
    return "\n\n".join(parts) + "\n"


def _kind(field: Any) -> type[BaseModel]:
    """Return the table of a field, also if it may be left out."""
    options = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)]
    found: type[BaseModel] = options[0] if options else field.annotation
    return found


def _table(name: str, about: str, kind: type[BaseModel], given: JsonMapping | None) -> str:
    optional = Recipe.model_fields[name].default is None
    head = f"# [{name}]" if optional and given is None else f"[{name}]"
    lines = [*_comment(about), head]
    for setting, field in kind.model_fields.items():
        lines += ["", *_comment(field.description or "")]
        if given is not None and setting in given:
            lines.append(_line(setting, given[setting]))
        else:
            lines.append(_default(setting, field.default))
    return "\n".join(lines)


def _default(name: str, value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return f"# {name} is not set"
    return "\n".join(f"# {line}" for line in _line(name, value).splitlines())


def _line(name: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):  # on one line, which tomli_w would break
        inner = (_line("", part).removeprefix('"" = ') for part in value)
        return f"{name} = [{', '.join(inner)}]"
    return tomli_w.dumps({name: value}).strip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, COLUMNS - 2)]
