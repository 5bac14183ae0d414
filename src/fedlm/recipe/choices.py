"""Settings that name an entry of a registry.

In:       a registry: anything that holds names.
Out:      `one_of(registry)`, which goes into a setting's type.
Promise:  the registry is read when a recipe is, so that whatever was added before may be chosen; a
          wrong name is refused like any other wrong choice.
Not here: what the names stand for (one registry each).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from fedlm.core.documents import JsonObject
from fedlm.core.errors import either


@dataclass(frozen=True, eq=False)
class OneOf:
    """A type annotation that allows the names in a registry at the time of the check."""

    registry: Collection[str]

    def check(self, value: Any) -> Any:
        """Return a known name, or raise the error that pydantic raises for a `Literal`."""
        if isinstance(value, str) and value in self.registry:
            return value
        raise PydanticKnownError("literal_error", {"expected": either(map(repr, self.registry))})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonObject:
        return {"type": "string", "enum": list(self.registry)}


def one_of(registry: Collection[str]) -> OneOf:
    """Return a type annotation for names in a registry: `Annotated[str, one_of(NAMES)]`."""
    return OneOf(registry)
