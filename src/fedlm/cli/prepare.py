"""`fedlm prepare`: text to a client store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.say import AsJson, emit, note, show, talk
from fedlm.corpus import sources
from fedlm.corpus.store import write
from fedlm.recipe.build import store_settings
from fedlm.recipe.settings import parse


def prepare(
    source: Annotated[str, typer.Argument(help="A corpus name, a file or a folder.")],
    out: Annotated[Path, typer.Option("--out", help="Where the store goes; must not exist.")],
    tokenizer: Annotated[str, typer.Option(help="words, bpe or bytes.")] = "words",
    vocabulary: Annotated[int, typer.Option(help="Entries, specials included.")] = 10_000,
    lowercase: Annotated[bool, typer.Option(help="Fold case.")] = True,
    test_clients: Annotated[float, typer.Option(help="Share of clients held out whole.")] = 0.1,
    validation: Annotated[float, typer.Option(help="Share of each client's text held out.")] = 0.1,
    split_seed: Annotated[int, typer.Option(help="Which clients are held out.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Turn text into a client store.

    Example: fedlm prepare letters.jsonl.gz --out stores/letters --vocabulary 4000
    """
    asked = {
        "tokenizer": tokenizer,
        "vocabulary": vocabulary,
        "lowercase": lowercase,
        "test_clients": test_clients,
        "validation": validation,
        "split_seed": split_seed,
    }
    settings = store_settings(parse({"data": asked}).data)
    with talk.status("reading") as status:
        store = write(
            sources.read(source),
            out,
            settings,
            lambda stage, done: status.update(f"{stage} {done or ''}"),
        )
    facts = {"store": str(out), **store.manifest}
    if as_json:
        emit(facts)
        return
    shown = (
        "clients",
        "train_clients",
        "test_clients",
        "train_tokens",
        "held_tokens",
        "vocabulary",
    )
    show(f"store {out}", ["", "count"], [[name, facts[name]] for name in shown])
    note(f"Train on it with data.store = {str(out)!r}.")
