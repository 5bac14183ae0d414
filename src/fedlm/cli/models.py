"""`fedlm models`: every named architecture with its parameter count."""

from __future__ import annotations

from fedlm.cli.console import AsJson, emit, show
from fedlm.core.documents import JsonObject
from fedlm.core.words import number
from fedlm.models.catalog import listing

SIZE = "embedding / hidden size / layers / words"


def models(as_json: AsJson = False) -> None:
    """List the architectures and their sizes.

    Example: fedlm models --json
    """
    rows = listing()
    if as_json:
        emit({"models": rows})
        return
    head = ["name", "architecture", "parameters", SIZE]
    show("architectures", head, [[*(row[k] for k in head[:-1]), _size(row)] for row in rows])


def _size(row: JsonObject) -> str:
    """Return the dimensions of a model in one cell: eight columns would be cut off."""
    return " / ".join(number(row[k]) for k in ("embedding", "hidden_size", "layers", "vocabulary"))
