"""JSON and TOML that anybody may have written.

In:       the path of a file or a text, what it is called in an error, and the class of the error.
Out:      plain values: objects and tables as dictionaries, integers of at most 64 bits.
Promise:  whatever the file holds (broken text, brackets a million deep, numbers of any length), the
          caller gets values or one error that names the file; never another exception.
Not here: which fields a document should have (each reader).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fedlm.core.errors import ConfigError, FedlmError

JsonObject: TypeAlias = dict[str, Any]
"""An object as JSON holds it: text, numbers, truth values, null, lists and objects by name."""

JsonMapping: TypeAlias = Mapping[str, Any]
"""The same, to read only."""

MOST_BYTES = 64 << 20  # of one document
MOST_DEPTH = 100
MOST_DIGITS = 19  # of an integer, without its sign: 2**63 has as many
LARGEST = (1 << 63) - 1


def json_value(raw: str | bytes, what: str, error: type[FedlmError]) -> Any:
    """Parse JSON, or raise `error` with a sentence that begins with `what`.

    >>> json_value('{"a": 1e9}', "x.json", ConfigError)
    {'a': 1000000000.0}
    >>> json_value("[" * 9999, "x.json", ConfigError)
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: x.json is not valid JSON: nested more than 100 deep.
    """
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = json.loads(text, parse_int=_integer)
        _check(value)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not valid JSON: {_reason(problem)}.") from None
    return value


def toml_tables(text: str, what: str, error: type[FedlmError] = ConfigError) -> JsonObject:
    """Parse TOML, or raise `error` with a sentence that begins with `what`."""
    try:
        tables = tomllib.loads(text)
        _check(tables)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not valid TOML: {_reason(problem)}.") from None
    return tables


def read_text(path: Path, what: str, error: type[FedlmError]) -> str:
    """Return the text of a small file, or raise `error` with a sentence that begins with `what`."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise error(f"{what} is not readable: {problem.strerror}.") from None
    except ValueError:  # a null byte in the name
        raise error(f"{what} is not readable: no file can have this name.") from None
    if len(raw) > MOST_BYTES:
        raise error(f"{what} has more than {MOST_BYTES >> 20} MiB: it is something else.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{what} is not valid UTF-8.") from None


def read_json(path: Path, what: str, error: type[FedlmError]) -> Any:
    """Read and parse a JSON file, or raise `error` with a sentence that begins with `what`."""
    return json_value(read_text(path, what, error), what, error)


def read_toml(path: Path, what: str, error: type[FedlmError] = ConfigError) -> JsonObject:
    """Read and parse a TOML file, or raise `error` with a sentence that begins with `what`."""
    return toml_tables(read_text(path, what, error), what, error)


def _integer(text: str) -> int:
    # Before `int`, whose time is quadratic in the digits.
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(text.lstrip('-'))} digits")
    return int(text)


def _check(value: object, depth: int = 0) -> None:
    """Raise `ValueError` for an integer beyond 64 bits, and for what is nested too deep."""
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    if isinstance(value, dict):
        for part in value.values():
            _check(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check(part, depth + 1)
    elif isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError("an integer beyond 64 bits")


def _reason(problem: BaseException) -> str:
    if isinstance(problem, RecursionError):
        return f"nested more than {MOST_DEPTH} deep"
    if "integer string conversion" in str(problem):
        return "an integer beyond 64 bits"
    return str(problem)[:200].rstrip(".") or "empty"
