"""The settings of a model made elsewhere, each read once and none overlooked.

In:       the settings of a `config.json` or of a GGUF file.
Out:      values, or one sentence that names the setting which is missing or not supported.
Promise:  `finish` refuses every setting that nobody asked for, so that none is ignored silently.
Not here: which settings a family has (`huggingface.py`, `gguf.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from fedlm.core.errors import ConfigError, either, shown

MOST = 1e30  # far inside float32
_MISSING: Any = object()


class Settings:
    """Settings by name; what is read is ticked off."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values, self.seen = where, dict(values), set[str]()

    def value(self, name: str, default: Any = _MISSING) -> Any:
        """Return a setting, or its default if it is absent or null."""
        self.seen.add(name)
        found = self.values.get(name)
        if found is not None:
            return found
        if default is _MISSING:
            raise ConfigError(f"{self.where} has no {name!r}, which the model needs.")
        return default

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Return a setting that is a positive number."""
        found = self.value(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < MOST:
            told = shown(found)
            raise ConfigError(f"{self.where}: {name} = {told}: expected a positive number.")
        return float(found)

    def count(self, name: str, default: Any = _MISSING) -> int:
        """Return a setting that is a positive integer."""
        found = self.number(name, default)
        if found != int(found) or found > 1 << 31:
            raise ConfigError(
                f"{self.where}: {name} = {shown(found)}: expected a positive integer."
            )
        return int(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.where}: {name} = {shown(found)}: expected true or false.")
        return found

    def choice(self, name: str, known: Mapping[Any, Any], default: Any = _MISSING) -> Any:
        """Return what `known` has for a setting, which must be one of its keys."""
        found = self.value(name, default)
        if not isinstance(found, str | int | float) or found not in known:
            wanted = either(map(repr, known))
            raise ConfigError(
                f"{self.where}: {name} = {shown(found)} is not supported: expected {wanted}."
            )
        return known[found]

    def expect(self, **only: Any) -> None:
        """Refuse settings that are present, not null, and have another value than this one."""
        for name, wanted in only.items():
            found = self.values.get(name)
            self.seen.add(name)
            if found is not None and (
                found != wanted or isinstance(found, bool) != _is_bool(wanted)
            ):
                raise ConfigError(
                    f"{self.where}: {name} = {shown(found)} is not supported: expected {wanted!r}."
                )

    def ignore(self, names: Iterable[str]) -> None:
        """Tick off settings that do not change what the model computes."""
        self.seen.update(names)

    def finish(self, also: Container[str] = ()) -> None:
        """Refuse every setting that nobody asked for."""
        for name, found in self.values.items():
            if name not in self.seen and name not in also and found is not None:
                raise ConfigError(
                    f"{self.where}: {name} = {str(found)[:60]!r}: fedlm does not know this "
                    "setting, and will not ignore what may change the model. Remove it if it does "
                    "not."
                )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)
