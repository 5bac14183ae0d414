"""Recipes as TOML: read, changed from the command line, saved.

In:       a TOML file, and changes from the command line.
Out:      a frozen, complete `Recipe`.
Promise:  a closed world: an unknown key is refused with the nearest known one, a value out of
          range with what was wanted; the resolved recipe, saved and read again, is the same.
Not here: which settings there are (`tables.py`), what they do (`build.py`).
"""

from __future__ import annotations

import os
import tomllib
import typing
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedlm.core.documents import JsonObject, read_toml, toml_tables
from fedlm.core.errors import ConfigError, nearest, require, shown
from fedlm.corpus.sources import CORPORA
from fedlm.recipe import shipped
from fedlm.recipe.federation import NodeTable
from fedlm.recipe.tables import Client as Client
from fedlm.recipe.tables import Data as Data
from fedlm.recipe.tables import Model as Model
from fedlm.recipe.tables import Privacy as Privacy
from fedlm.recipe.tables import Recipe as Recipe
from fedlm.recipe.tables import RunTable as RunTable
from fedlm.recipe.tables import Server as Server
from fedlm.recipe.tables import Table as Table
from fedlm.recipe.tables import Tune as Tune
from fedlm.recipe.tables import Wire as Wire

# Settings that had another name before 0.1.0; the error for an old name gives the new one.
RENAMED = {
    "data.length": "sequence_length",
    "model.embed": "embedding_size",
    "model.units": "hidden_size",
    "model.kernel": "kernel_size",
    "client.rate": "learning_rate",
    "client.clip": "gradient_clip_norm",
    "client.batch": "batch_size",
    "server.rate": "learning_rate",
    "server.epsilon": "adam_epsilon",
    "server.warmup": "warmup_rounds",
    "server.end": "final_fraction",
    "privacy.clip": "clip_norm",
    "privacy.noise": "noise_multiplier",
    "wire.train": "trainable",
    "wire.share": "trainable_fraction",
    "federation.key": "personal_layers",
    "federation.pool": "pool_clients",
    "federation.every": "sync_every",
    "federation.warmup": "warmup_steps",
    "federation.rate": "learning_rate",
    "federation.clip": "clip_norm",
    "federation.noise": "noise_multiplier",
    "federation.node.rate": "learning_rate",
    "federation.node.share": "weight",
    "run.tensorboard": "trackers",
}
# The same for values of a setting.
RENAMED_VALUES = {"server.sampling": {"separated": "spaced"}}


def load(path: Path, changes: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply changes of the form `table.key=value`.

    Without a value a setting is left out, as if the recipe did not have it.
    """
    path = shipped.find(Path(path))
    tables = read_toml(path, f"recipe {path}")
    for change in changes:
        _apply(tables, change)
    recipe = parse(tables)
    return _relative_to(recipe, path.parent)


def _apply(tables: JsonObject, change: str) -> None:
    name, equals, value = change.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key and table):
        raise ConfigError(
            f"--set {shown(change)}: expected table.key=value, as in server.rounds=50."
        )
    held = tables.setdefault(table, {})
    if not isinstance(held, dict):
        raise ConfigError(f"--set {shown(change)}: {shown(table)} is not a table of this recipe.")
    if not value.strip() and table in Recipe.model_fields and key in _fields(table):
        held.pop(key, None)
        return
    held[key] = parse_value(value.strip(), f"--set {shown(name.strip())}")


def parse_value(text: str, what: str) -> Any:
    """Parse a TOML value; any other text is a string, so that quotes are not needed."""
    try:
        tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        require(_is_text(text), what, text, "text in UTF-8")
        return text
    except (ValueError, RecursionError):
        pass  # TOML, but beyond its bounds: said below
    return toml_tables(f"x = {text}", what)["x"]


def _is_text(text: str) -> bool:
    # Bytes of the command line that are not UTF-8 come as halves of surrogate pairs.
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def parse(tables: JsonObject) -> Recipe:
    """Convert tables to a recipe, or raise `ConfigError` about the first mistake."""
    try:
        return Recipe.model_validate({name: _tuples(table) for name, table in tables.items()})
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0])) from None


def _tuples(table: Any) -> Any:
    """Convert the lists of a table to tuples, which settings are: a recipe is frozen."""
    if not isinstance(table, dict):
        return table
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def _fields(table: str) -> JsonObject:
    """Return the settings of a table by name, also if the table is optional."""
    kind = Recipe.model_fields[table].annotation
    options = [k for k in typing.get_args(kind) if k is not type(None)]
    return dict((options[0] if options else kind).model_fields)  # type: ignore[union-attr]


def _sentence(error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        if len(place) == 1 or place[0] not in Recipe.model_fields:
            return f"there is no table [{place[0]}]. {nearest(place[0], Recipe.model_fields)}"
        if place[:2] == ["federation", "node"] and len(place) > 2:
            known: Any = NodeTable.model_fields
        else:
            known = _fields(place[0])
        at = ".".join(p for p in place[:-1] if not p.isdigit())
        if f"{at}.{place[-1]}" in RENAMED:
            return f"[{at}] {place[-1]} is now called {RENAMED[f'{at}.{place[-1]}']!r}."
        return f"[{at}] has no setting {place[-1]!r}. {nearest(place[-1], known)}"
    wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    wanted = "a list" if error["type"] == "tuple_type" else wanted
    value = error["input"]
    hint = ""
    setting = ".".join(place[:2])
    if error["type"] == "literal_error" and isinstance(value, str):
        if value in RENAMED_VALUES.get(setting, {}):
            return f"{setting} = {value!r} is now called {RENAMED_VALUES[setting][value]!r}."
        options = [o.strip(" '") for o in wanted.replace(" or ", ", ").split(",")]
        near = nearest(value, options)
        hint = f" {near}" if near.startswith("Did") else ""
    wanted = "a table" if error["type"] == "model_type" else wanted
    if error["type"] == "string_too_short":
        wanted, hint = "text that is not empty", " Leave the setting out to have none."
    if error["type"] == "string_pattern_mismatch":
        wanted = f"text of the form {error['ctx']['pattern']}"
    return f"{setting} = {shown(value)}: expected {wanted}.{hint}"


def _relative_to(recipe: Recipe, folder: Path) -> Recipe:
    """Make the paths of a recipe absolute.

    A path is looked up in the recipe's folder first, then in the current directory.
    """
    data = recipe.data
    changed: JsonObject = {
        name: _absolute(f"data.{name}", value, folder)
        for name, value in (("source", data.source), ("store", data.store))
        if value is not None and not (name == "source" and value in CORPORA)
    }
    if data.tokenizer.endswith(".json"):
        changed["tokenizer"] = _absolute("data.tokenizer", data.tokenizer, folder)
    if data.stores:
        changed["stores"] = tuple(_absolute("data.stores", path, folder) for path in data.stores)
    # Built from the given settings only, so that `model_fields_set` stays correct.
    given = {k: v for k, v in data if k in data.model_fields_set}
    tables: dict[str, Table] = {"data": Data(**{**given, **changed})}
    if recipe.model.init_from is not None:
        start = _absolute("model.init_from", recipe.model.init_from, folder)
        tables["model"] = recipe.model.model_copy(update={"init_from": start})
    if recipe.run.frozen_folder is not None:
        kept = _absolute("run.frozen_folder", recipe.run.frozen_folder, folder)
        tables["run"] = recipe.run.model_copy(update={"frozen_folder": kept})
    return recipe.model_copy(update=tables)


def _absolute(setting: str, path: str, folder: Path) -> str:
    """Return a path as an absolute one: beside the recipe if it is there, else from here."""
    # An empty path would be the recipe's own folder.
    require(bool(path), setting, path, "a path or a name", "Leave the setting out to have none.")
    beside = folder / path
    # Not `Path.exists`, which raises if a name is too long or holds a null byte.
    return os.path.abspath(beside if os.path.exists(beside) else path)


def dump(recipe: Recipe) -> str:
    """Return the recipe as TOML, without settings that are None: TOML has no null."""
    tables = recipe.model_dump(mode="python", exclude_none=True)
    return tomli_w.dumps({k: {n: _toml(v) for n, v in t.items()} for k, t in tables.items()})


def with_defaults(tables: JsonObject) -> JsonObject:
    """Return the tables of a saved recipe with every setting, also those that came after it.

    A setting that a run did not know is as it is where nobody sets it: a run goes on after an
    upgrade. Tables that are no recipe come back as they are.
    """
    try:
        return tomllib.loads(dump(parse(tables)))
    except ConfigError:
        return tables


def _toml(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _toml(part) for name, part in value.items()}
    return [_toml(part) for part in value] if isinstance(value, tuple) else value
