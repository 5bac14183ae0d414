"""`fedlm models`: every named architecture with its parameter count."""

from __future__ import annotations

from fedlm.cli.console import AsJson, emit, show
from fedlm.models.catalog import listing


def models(as_json: AsJson = False) -> None:
    """List the architectures and their sizes.

    Example: fedlm models --json
    """
    rows = listing()
    if as_json:
        emit({"models": rows})
    else:
        show("architectures", list(rows[0]), [row.values() for row in rows])
