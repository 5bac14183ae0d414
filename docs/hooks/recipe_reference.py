"""Fills the page settings.md with one table per table of a recipe.

A line `<!-- settings: data -->` becomes the settings of `[data]`: type, default, range and
description, as the pydantic model `fedlm.recipe.tables.Recipe` declares them. Tables inside
a table, such as `[[federation.node]]`, follow below it. A table of the recipe that the page does
not show is a warning, which stops a strict build; so is a line that names no table.

`python docs/hooks/recipe_reference.py` prints all tables.
"""

import logging
import math
import re

log = logging.getLogger("mkdocs.hooks.recipe_reference")
PAGE = "settings.md"
MARKER = re.compile(r"^<!-- settings: (?P<table>\w+) -->$", re.MULTILINE)
TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "true or false"}
HEAD = "| setting | type | default | range | what |\n|---|---|---|---|---|\n"


def on_page_markdown(markdown, *, page, config, files):
    """Replace the markers of the settings page."""
    if page.file.src_uri != PAGE:
        return markdown
    schema = recipe_schema()
    shown = [marker["table"] for marker in MARKER.finditer(markdown)]
    for table in schema["properties"]:
        if table not in shown:
            log.warning("%s does not show the table [%s]", PAGE, table)

    def replace(marker):
        if marker["table"] not in schema["properties"]:
            log.warning("%s shows [%s], which no recipe has", PAGE, marker["table"])
            return ""
        return reference(schema, marker["table"])

    return MARKER.sub(replace, markdown)


def recipe_schema():
    """The JSON Schema of a recipe, made by pydantic."""
    from fedlm.recipe.tables import Recipe

    return Recipe.model_json_schema()


def reference(schema, table):
    """Markdown for one table of a recipe and for the tables inside it."""
    return _markdown(schema, _model(schema, schema["properties"][table]), table)


def _markdown(schema, model, name):
    """What the table is for, its settings, then the tables inside it."""
    required = model.get("required", ())
    rows, inner = [], []
    for key, field in model.get("properties", {}).items():
        rows.append(_row(schema, key, field, key in required))
        if (nested := _model(schema, field)) is not None:
            inner.append((key, nested, _is_list(schema, field)))
    parts = [model.get("description", "").strip(), HEAD + "\n".join(rows)]
    for key, nested, many in inner:
        path = f"{name}.{key}"
        parts.append(f"### {f'[[{path}]]' if many else f'[{path}]'}")
        parts.append(_markdown(schema, nested, path))
    return "\n\n".join(part for part in parts if part)


def _row(schema, key, field, required):
    default = "required" if required else _value(field.get("default"))
    cells = (
        f"`{key}`",
        _type(schema, field),
        default,
        _range(schema, field),
        field.get("description", ""),
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text):
    """Text for a cell: one line, in which a bar does not end the cell."""
    return " ".join(text.split()).replace("|", r"\|")


def _options(schema, field):
    """What a field may be, without null, with references followed."""
    if "$ref" in field:
        return _options(schema, schema["$defs"][field["$ref"].rpartition("/")[2]])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            return [option for part in field[key] for option in _options(schema, part)]
    return [] if field.get("type") == "null" else [field]


def _model(schema, field):
    """The table that a field holds (one, or a list of them), or None for a plain setting."""
    for option in _options(schema, field):
        if "properties" in option:
            return option
        if "items" in option and (inner := _model(schema, option["items"])) is not None:
            return inner
    return None


def _is_list(schema, field):
    return any(option.get("type") == "array" for option in _options(schema, field))


def _type(schema, field):
    """The type in words, or the choices."""
    names = [_type_name(schema, option) for option in _options(schema, field)]
    return " or ".join(dict.fromkeys(names))


def _type_name(schema, option):
    if "enum" in option:
        return ", ".join(_value(choice) for choice in option["enum"])
    if "const" in option:
        return _value(option["const"])
    if option.get("type") == "array":
        items = option.get("items")
        return f"list of {_plural(_type(schema, items))}" if items else "list"
    if "properties" in option:
        return "table"
    return TYPES.get(option.get("type", ""), option.get("type", ""))


def _plural(name):
    return f"{name}s" if name in ("string", "integer", "number", "table") else name


def _range(schema, field):
    """The bounds; of a list those of its entries."""
    texts = []
    for option in _options(schema, field):
        if option.get("type") == "array":
            texts += _length(option)
            if entries := _range(schema, option.get("items", {})):
                texts.append(f"each {entries}")
        else:
            texts += _bounds(option)
    return ", ".join(dict.fromkeys(texts))


def _length(option):
    """How many entries a list may have."""
    least, most = option.get("minItems", 0), option.get("maxItems")
    if least == most:
        return [f"{least} entries"]
    texts = [f"at most {most} entries"] if most is not None else []
    return (["not empty"] if least == 1 else [f"at least {least} entries"] if least else []) + texts


def _bounds(option):
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return [f"{sign} {_number(option[key])}" for key, sign in signs.items() if key in option]


def _value(value):
    """A value as a recipe writes it; nothing for a setting that is not set."""
    if value is None:
        return ""
    return f"`{_toml(value)}`"


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return f'"{value}"'


def _number(value):
    """A number in short: 2^63 for that power of two, 1e-6 for 1e-06."""
    if isinstance(value, int):
        power = value.bit_length() - 1
        return f"2^{power}" if power >= 32 and value == 1 << power else str(value)
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return re.sub(r"e([+-])0+", r"e\1", repr(value)).replace("e+", "e")


if __name__ == "__main__":
    recipe = recipe_schema()
    for table_name in recipe["properties"]:
        print(f"## [{table_name}]\n\n{reference(recipe, table_name)}\n")
