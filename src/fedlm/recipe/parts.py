"""The parts of a run that flat federations, trees and nodes have alike.

In:       a `Recipe` and a store.
Out:      the store itself, rows, the model before training, an engine, held-out text.
Promise:  every setting is used once, here or in a module beside this one; the same recipe and
          text give the same parts.
Not here: what settings are allowed (`settings.py`), how parts become a run (`build.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core.errors import ConfigError, CorpusError, require
from fedlm.core.keys import key_for
from fedlm.core.types import BatchSpec, Engine, Params, Rows
from fedlm.corpus import sources, tokenizer_file
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import FORMAT, Progress, Store, StoreSettings, write
from fedlm.corpus.tokenizer import FILE, TextTokenizer, kind_of
from fedlm.engine.catalog import ENGINES
from fedlm.evaluate.held_out import HeldOutEvaluation, HeldOutText
from fedlm.federation.algorithm import Algorithm
from fedlm.models import catalog
from fedlm.models.catalog import ModelSpec, ScoreFn
from fedlm.privacy import release
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import privacy_plan
from fedlm.recipe.settings import Data, Model, Recipe
from fedlm.record.checkpoint import from_bytes
from fedlm.record.directory import RunDirectory
from fedlm.run import Cadence

# Counting n-grams holds a few numbers per training token in memory; beyond this it is skipped.
MOST_COUNTED_TOKENS = 50_000_000


def given_tokenizer(
    data: Data, bos: str | None = None, eos: str | None = None
) -> TextTokenizer | None:
    """Read the tokenizer file that `[data]` names; None if a tokenizer is to be fitted."""
    if kind_of(data.tokenizer) != FILE:
        return None
    require(
        data.tokenizer != FILE,
        "data.tokenizer",
        data.tokenizer,
        "'words', 'bpe', 'bytes' or 'PATH/tokenizer.json' for text",
    )
    made = tokenizer_file.load_tokenizer(Path(data.tokenizer), bos, eos)
    for name, value in (("vocabulary", made.vocabulary), ("lowercase", False)):
        asked = getattr(data, name)
        require(
            name not in data.model_fields_set or asked == value,
            f"data.{name}",
            asked,
            f"nothing beside data.tokenizer = {data.tokenizer!r}, which decides it: {value}",
            "Leave the setting out.",
        )
    return made


def store_settings(data: Data, given: TextTokenizer | None = None) -> StoreSettings:
    """The part of `[data]` that decides a store's bytes; of a tokenizer file, what it decides."""
    return StoreSettings(
        tokenizer=kind_of(data.tokenizer),
        vocabulary=data.vocabulary if given is None else given.vocabulary,
        lowercase=data.lowercase if given is None else False,
        test_clients=data.test_clients,
        validation=data.validation,
        split_seed=data.split_seed,
    )


def open_store(data: Data, cache: Path, progress: Progress = lambda stage, done: None) -> Store:
    """The recipe's store: the one it names, or one prepared from its source and kept."""
    if sum(map(bool, (data.source, data.store, data.stores))) != 1:
        raise ConfigError(
            f"data.source = {data.source!r}, data.store = {data.store!r}, data.stores = "
            f"{list(data.stores)}: expected one of data.source (text), data.store (made by fedlm "
            "prepare) and data.stores (several of them)."
        )
    if data.source is None:
        paths = [Path(path) for path in data.stores or (data.store,) if path]
        store = Store(paths[0]) if data.store else JoinedStore(paths)
        _check_store(store, data)
        return store
    given = given_tokenizer(data)
    settings = store_settings(data, given)
    path = cache / f"{_short_name(data.source)}-{_identity(data.source, settings, given)}"
    if path.exists():
        return Store(path)
    try:
        return write(sources.read(data.source), path, settings, progress, given)
    except CorpusError:
        if not path.exists():
            raise
        return Store(path)  # another process made the same one meanwhile


def _check_store(store: Store, data: Data) -> None:
    """A store decides its own tokens: settings that were given must agree with it."""
    for name, made in vars(store.settings).items():
        asked = getattr(data, name)
        if name in data.model_fields_set and asked != made:
            raise ConfigError(
                f"data.{name} = {asked!r}: the store {store.path} was made with {made!r}. Leave "
                "the setting out, or prepare another store."
            )


def _short_name(source: str) -> str:
    return Path(source).name.split(".")[0] or "text"


def _identity(source: str, settings: StoreSettings, given: TextTokenizer | None) -> str:
    """Names a prepared store by its text and settings, so that a changed text is prepared anew."""
    digest = hashlib.sha256(repr((FORMAT, source, settings)).encode())
    if given is not None:
        digest.update(f"{given.library.to_str()}{given.special}".encode())
    path = Path(source)
    if source not in sources.CORPORA and path.exists():
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            facts = file.stat()
            digest.update(f"{file}|{facts.st_size}|{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def resolve(recipe: Recipe, store: Store) -> Recipe:
    """The recipe with what its names decide filled in: complete, and equal on every read."""
    size = dimensions(recipe.model, store.vocabulary)
    sizes = {
        name: getattr(size, name) for name in type(recipe.model).model_fields if hasattr(size, name)
    }
    data, decided = recipe.data, vars(store.settings)
    if data.source is not None:
        decided = {**decided, "tokenizer": data.tokenizer}  # the path of a file, not that it is one
    data = data.model_copy(update=decided)
    return recipe.model_copy(
        update={
            "data": data,
            "model": recipe.model.model_copy(update=sizes),
            "client": privacy_plan.client_of(recipe),
        }
    )


def dimensions(model: Model, vocab: int) -> catalog.Dimensions:
    """The model's sizes: those of its name, changed where the recipe says so."""
    said = {k: v for k, v in model if v is not None and k not in ("name", "init_from")}
    named = catalog.NAMED[model.name]
    size = replace(named.size, vocab=vocab, **said)
    require(
        not catalog.ARCHITECTURES[named.architecture].attends
        or size.embedding_size % size.heads == 0,
        "model.heads",
        size.heads,
        f"a divisor of model.embedding_size, which is {size.embedding_size}",
    )
    return size


# ---- the parts of a run --------------------------------------------------------------------


def training_clients(recipe: Recipe, store: Store, *, needed: bool = True) -> np.ndarray:
    """The clients to learn from: all of the store, or those of the groups that are named.

    A server whose members live at nodes needs none here.
    """
    found = _of_groups(recipe, store, store.training_clients)
    require(
        len(found) > 0 or not needed,
        "data.groups",
        list(recipe.data.groups),
        "groups of this store that have training clients",
        "fedlm prepare shows the groups of a store.",
    )
    return found


def _of_groups(recipe: Recipe, store: Store, clients: np.ndarray) -> np.ndarray:
    asked = set(recipe.data.groups)
    if not asked:
        return clients
    kept = [n for n in clients if asked & set(store.groups(int(n)))]
    return np.array(kept, clients.dtype)


def client_rows(recipe: Recipe, store: Store, clients: np.ndarray) -> ClientRows:
    """The text of clients, in rows of the recipe's width."""
    data = recipe.data
    return ClientRows(
        store=store, clients=clients, sequence_length=data.sequence_length, layout=data.layout
    )


def pooled_rows(rows: ClientRows) -> Rows:
    """All rows of all clients, whoever is asked for: one member that holds all text."""

    @cache
    def together() -> np.ndarray:
        return np.concatenate([rows.train(member) for member in range(len(rows.clients))])

    return lambda member: together()


def model_spec(recipe: Recipe, vocabulary: int) -> ModelSpec:
    """The architecture and the sizes that a recipe names."""
    named = catalog.NAMED[recipe.model.name]
    size = dimensions(recipe.model, vocabulary)
    return ModelSpec(named.architecture, size, recipe.model.name)


def start_key(recipe: Recipe) -> PRNGKeyArray:
    """The key of a fresh model."""
    return key_for(recipe.run.seed, "init")


def start_model(recipe: Recipe, store: Store, spec: ModelSpec) -> Params:
    """The model before training: another run's, or fresh and the same for the same seed."""
    if recipe.model.init_from is None:
        return spec.init(start_key(recipe))
    path = Path(recipe.model.init_from)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"model.init_from = {str(path)!r}: expected a model.safetensors, or a run directory "
            "that holds one."
        )
    made, ours = file.parent / "tokenizer.json", store.path / "tokenizer.json"
    if made.is_file() and made.read_bytes() != ours.read_bytes():
        raise ConfigError(
            f"model.init_from = {str(path)!r}: its tokenizer is not that of the store "
            f"{store.path}, so its tokens mean other words."
        )
    return from_bytes(file.read_bytes(), spec.shapes(), f"model.init_from = {str(path)!r}")


def start_maker(recipe: Recipe, store: Store) -> Callable[[], Params]:
    """Return how to make the model before training; it is made once where a part is held still."""
    spec = model_spec(recipe, store.vocabulary)

    def start() -> Params:
        return start_model(recipe, store, spec)

    # The base of a run and its first state are then the same arrays, in memory once.
    return cache(start) if recipe.wire.trainable == "fixed" else start


def batch_spec(recipe: Recipe) -> BatchSpec:
    """How a member's rows become batches."""
    client = recipe.client
    return BatchSpec(
        batch_size=client.batch_size,
        sequence_length=recipe.data.sequence_length,
        epochs=client.epochs,
        max_examples=client.max_examples,
        max_steps=client.max_steps,
    )


def engine_of(recipe: Recipe, algorithm: Algorithm, rows_of: Rows) -> Engine:
    """The engine that trains members on the text that is here."""
    kind = ENGINES[recipe.run.engine]
    return kind(algorithm, rows_of, batch_spec(recipe), recipe.run.seed)


def held_out_text(recipe: Recipe, rows: ClientRows, owners: np.ndarray) -> HeldOutText:
    """The held-out rows of clients; every byte is in some target where windows cover the text."""
    store, data = rows.store, recipe.data

    @cache
    def cut(context: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [rows.held(int(number), context) for number in owners]
        if not parts:
            return np.zeros((0, data.sequence_length + context), np.int16), np.zeros(0, int)
        sizes = [len(part) for part in parts]
        return np.concatenate(parts), np.repeat(owners, sizes)

    whole = data.tokenizer != "words" and data.layout == "windows"
    return HeldOutText(
        rows=cut,
        groups=lambda owner: store.groups(owner),
        bytes=sum(store.held_bytes(int(n)) for n in owners) if whole else None,
    )


def owners_of(recipe: Recipe, store: Store, clients: np.ndarray) -> dict[str, np.ndarray]:
    """The clients with held-out text, by split."""
    return {"test": _of_groups(recipe, store, store.test_clients), "validation": clients}


def evaluation_of(
    recipe: Recipe,
    rows: ClientRows,
    plan: PrivacyPlan | None,
    models: Callable[[Any], Mapping[str, Params]],
    *,
    count: bool,
    score: ScoreFn = catalog.score,
) -> HeldOutEvaluation:
    """Held-out text here, of splits that may be told, for the `models` of a state.

    With `count`, n-grams are counted on the training text.
    """
    store = rows.store
    owners = owners_of(recipe, store, rows.clients)
    told = release.splits(plan, list(owners))
    few = store.manifest["train_tokens"] <= MOST_COUNTED_TOKENS

    def training() -> Iterator[np.ndarray]:
        return (rows.train(member, 2) for member in range(len(rows.clients)))

    return HeldOutEvaluation(
        score=score,
        special=store.special,
        models=models,
        text={split: held_out_text(recipe, rows, owners[split]) for split in told},
        vocabulary=store.vocabulary,
        watch_split=("validation", "test"),
        watch_rows=recipe.server.evaluate_rows,
        seed=recipe.run.seed,
        training=training if count and few and release.baselines(plan) else None,
    )


def shared_parts(recipe: Recipe, store: Store, plan: PrivacyPlan | None, out: Path) -> Any:
    """The parts that flat runs and trees have alike, by name."""
    server = recipe.server
    return {
        "model": model_spec(recipe, store.vocabulary),
        "store": store,
        "record": RunDirectory(out),
        "recipe": recipe,
        "cadence": Cadence(
            rounds=privacy_plan.rounds_of(recipe, plan),
            evaluate_every=server.evaluate_every,
            checkpoint_every=recipe.run.checkpoint_every,
        ),
    }
