"""`fedlm prepare`: text to a client store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, show, talk
from fedlm.core.documents import JsonObject
from fedlm.core.errors import require
from fedlm.corpus.store import LEDGER, Store, ledger_copier, vocabulary_like, write
from fedlm.corpus.synthetic import PREFIX, population, write_synthetic
from fedlm.corpus.tokenizer import FILE, kind_of
from fedlm.corpus.vocabulary import Counting, Vocabulary
from fedlm.privacy import vocabulary as vocabularies
from fedlm.recipe.parts import documents_of, given_tokenizer, store_settings
from fedlm.recipe.settings import Data, parse
from fedlm.recipe.vocabulary import vocabulary_of

DATA = Data()  # the defaults
SHOWN_EVERY = 0.1  # seconds between two looks at the progress


def prepare(
    source: Annotated[
        str, typer.Argument(help="A corpus name, a file, a folder, or synthetic:NAME.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the store goes; must not exist.")],
    *,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="words (the default), bpe or bytes; or the path of a tokenizer.json."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help=f"Entries, specials included; {DATA.vocabulary} by default.")
    ] = None,
    vocabulary_epsilon: Annotated[
        float | None,
        typer.Option(help="Count the vocabulary with noise: only words that many clients share."),
    ] = None,
    vocabulary_delta: Annotated[
        float | None, typer.Option(help="The delta of --vocabulary-epsilon; 1e-7 by default.")
    ] = None,
    vocabulary_words: Annotated[
        int | None,
        typer.Option(
            help=f"Distinct words of a client that are counted; {DATA.vocabulary_words} by default."
        ),
    ] = None,
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--no-lowercase", help="Fold case; by default it is.")
    ] = None,
    bos: Annotated[
        str | None, typer.Option(help="The token of a tokenizer.json that begins a text.")
    ] = None,
    eos: Annotated[
        str | None, typer.Option(help="The token of a tokenizer.json that ends a line.")
    ] = None,
    test_clients: Annotated[float, typer.Option(help="Share of clients held out whole.")] = (
        DATA.test_clients
    ),
    validation: Annotated[float, typer.Option(help="Share of each client's text held out.")] = (
        DATA.validation
    ),
    split_seed: Annotated[int, typer.Option(help="Which clients are held out.")] = DATA.split_seed,
    user_field: Annotated[
        str | None,
        typer.Option(help="The field that names the person: all devices become one client."),
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(help="The field or column with the text; text by default.")
    ] = None,
    groups_field: Annotated[
        str | None, typer.Option(help="The field or column with groups; groups by default.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many, of a synthetic source.")] = None,
    groups: Annotated[str, typer.Option(help="Groups per level of a synthetic source: 8,50.")] = "",
    like: Annotated[
        Path | None,
        typer.Option(
            help="A store or a tokenizer.json: its tokenizer is used, so that tokens mean the same."
        ),
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(
            help="The folder that fedlm node words made of this text: what it cost is the store's."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that cut the text; one per core by default. The store is the same.",
            min=1,
            max=1024,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into a client store.

    Example: fedlm prepare letters.jsonl.gz --out stores/letters --vocabulary 4000

    With a private vocabulary: fedlm prepare letters/ --out store --vocabulary-epsilon 1

    With a tokenizer made elsewhere: fedlm prepare letters/ --out store --like tokenizer.json

    For tests of scale: fedlm prepare synthetic:stackoverflow --out stores/many --clients 10000
    """
    noisy = {
        "vocabulary_epsilon": vocabulary_epsilon,
        "vocabulary_delta": vocabulary_delta,
        "vocabulary_words": vocabulary_words,
    }
    if like is not None or source.startswith(PREFIX):
        _no_counting(noisy, "--like" if like is not None else source)
    asked = {
        "tokenizer": tokenizer,
        "vocabulary": vocabulary,
        **noisy,
        "lowercase": lowercase,
        "test_clients": test_clients,
        "validation": validation,
        "split_seed": split_seed,
        "user_field": user_field,
        "text_field": text_field,
        "groups_field": groups_field,
    }
    taken = None
    if like is not None and kind_of(str(like)) == FILE:
        require(tokenizer is None, "--tokenizer", tokenizer, "nothing beside --like")
        asked["tokenizer"] = tokenizer = str(like)
    elif like is not None:
        taken = _vocabulary_of(like, asked)
    fitted = {"--vocabulary": vocabulary, "--lowercase": lowercase}
    _only_file(tokenizer or DATA.tokenizer, fitted, bos, eos)
    data = parse({"data": {k: v for k, v in asked.items() if v is not None}}).data
    given = given_tokenizer(data, bos, eos) if taken is None else None
    settings = store_settings(data, given)
    with talk.status("reading") as status:
        shown_at = 0.0

        def progress(stage: str, done: int) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if not done or now - shown_at > SHOWN_EVERY:
                shown_at = now
                status.update(f"{stage} {done or ''}")

        if source.startswith(PREFIX):
            wanted = "nothing for a synthetic source, which has no fields"
            for name in ("user_field", "text_field", "groups_field"):
                require(asked[name] is None, f"--{name.replace('_', '-')}", asked[name], wanted)
            store = write_synthetic(population(source, clients, groups), out, settings, progress)
        else:
            _only_synthetic(clients, groups)
            made = _with_cost(taken or vocabulary_of(data, given, progress), words)
            documents = documents_of(data, source, note)
            store = write(documents, out, settings, progress, made, note, workers)
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
    for said in vocabularies.assumptions({"store": {**facts, "user_field": data.user_field}}):
        note(f"{said[:1].upper()}{said[1:]}.")
    passed = facts["tokenizer_from"].get("words_passed")
    if passed is not None:
        note(f"{passed:,} words passed the threshold; another preparation costs as much again.")
    note(f"Train on it with data.store = {str(out)!r}.")


def _vocabulary_of(like: Path, asked: JsonObject) -> Vocabulary:
    """Return the vocabulary of a store, and replace the settings in `asked` by the store's.

    Options that contradict the store are refused: its tokenizer decides them.
    """
    store = Store(like)
    for name in ("tokenizer", "vocabulary", "lowercase"):
        made, given = getattr(store.settings, name), asked[name]
        require(
            given is None or given == made,
            f"--{name}" if given is not False else f"--no-{name}",
            given,
            f"{made!r} or nothing beside --like {like}, whose tokenizer has it",
            "Leave the option out.",
        )
        asked[name] = made
    return vocabulary_like(store)


def _with_cost(
    vocabulary: Vocabulary | Counting | None, words: Path | None
) -> Vocabulary | Counting | None:
    """Return the vocabulary with the ledger of the word counts to which this text contributed."""
    if words is None:
        return vocabulary
    require(
        isinstance(vocabulary, Vocabulary) and (words / LEDGER).is_file(),
        "--words",
        str(words),
        "a folder that fedlm node words made, beside --like TOKENIZER",
    )
    assert isinstance(vocabulary, Vocabulary)
    return vocabulary._replace(write_ledger=ledger_copier(words))


def _only_file(
    tokenizer: str, fitted: Mapping[str, object], bos: str | None, eos: str | None
) -> None:
    """Refuse options of fitted tokenizers beside a file, and options of files without one."""
    if kind_of(tokenizer) == FILE:
        for name, value in fitted.items():
            wanted = f"nothing beside --tokenizer {tokenizer}, which decides it"
            require(value is None, name, value, wanted, "Leave the option out.")
        return
    for name, value in (("--bos", bos), ("--eos", eos)):
        wanted = "nothing without --tokenizer PATH/tokenizer.json: other tokenizers have their own"
        require(value is None, name, value, wanted)


def _no_counting(noisy: Mapping[str, object], why: str) -> None:
    """Refuse options of private counting where no vocabulary is counted."""
    for name, value in noisy.items():
        option = f"--{name.replace('_', '-')}"
        require(value is None, option, value, f"nothing beside {why}, which counts no vocabulary")


def _only_synthetic(clients: int | None, groups: str) -> None:
    """Refuse options of synthetic sources: other text has its own clients and groups."""
    way_out = f"It is for sources that begin with {PREFIX!r}."
    require(clients is None, "--clients", clients, "nothing for this source", way_out)
    require(not groups, "--groups", groups, "nothing for this source", way_out)
