"""`fedlm new`: a commented recipe for a user's text."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, out, talk
from fedlm.core.documents import JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import require
from fedlm.corpus import sources
from fedlm.corpus.store import Store
from fedlm.recipe.settings import load
from fedlm.recipe.template import template

MOST_COUNTED = 100_000  # clients; a larger text is not read to its end
COHORT, ROUNDS = 20, 200


def new(
    source: Annotated[str, typer.Argument(help="Your text, or a store made by fedlm prepare.")],
    recipe: Annotated[Path, typer.Option("--out", help="The recipe to write.")] = Path(
        "recipe.toml"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a recipe for your text, with every setting and what it means.

    Example: fedlm new letters.jsonl.gz --out letters.toml
    """
    require(not recipe.exists(), "--out", str(recipe), "a file that does not exist yet")
    with talk.status("looking at the text"):
        data, clients = _look(source)
    cohort = max(1, min(COHORT, clients // 2))
    values = {"data": data, "server": {"rounds": ROUNDS, "cohort": cohort}}
    command = shlex.join(["fedlm", "train", str(recipe)])
    title = f"A recipe for {source} ({clients:,} training clients), written by fedlm new."
    write_atomically(recipe, template(values, title, command).encode())
    load(recipe)
    if as_json:
        emit({"recipe": str(recipe), "clients": clients, "cohort": cohort})
        return
    out.print(f"recipe: {recipe}")
    note(f"Read it, change what you like, then:\n  {command}")


def _look(source: str) -> tuple[JsonObject, int]:
    """Return the settings of `[data]` that name a text, and how many training clients it has."""
    if (Path(source) / "store.json").is_file():
        store = Store(Path(source))
        return {"store": str(Path(source).resolve())}, len(store.training_clients)
    seen: set[str] = set()
    for document in sources.read(source, say=note):
        seen.add(document.client)
        if len(seen) >= MOST_COUNTED:
            break
    named = source if source in sources.CORPORA else str(Path(source).resolve())
    return {"source": named}, round(0.9 * len(seen))
