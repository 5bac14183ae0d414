"""The parts of a run that flat federations, trees and nodes have alike.

In:       a `Recipe` and a store.
Out:      the store itself, rows, the model before training, an engine, held-out text.
Promise:  every setting is used once, here or in a module beside this one; the same recipe and
          text give the same parts.
Not here: what settings are allowed (`settings.py`), how parts become a run (`build.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from tokenizers.models import WordLevel

from fedlm.core import tree
from fedlm.core.errors import ConfigError, CorpusError, require
from fedlm.core.keys import key_for
from fedlm.core.types import BatchSpec, Engine, FederationState, Params, Rows, Say, ScoreFn
from fedlm.corpus import sources, tokenizer_file
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.population import Population, of_store
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import FORMAT, Progress, Store, StoreSettings, write, write_tokens
from fedlm.corpus.tokenizer import FILE, TextTokenizer, kind_of, token_dtype
from fedlm.corpus.tokenizer_file import load_library
from fedlm.corpus.vocabulary import Vocabulary
from fedlm.engine import multihost
from fedlm.engine.catalog import ENGINES
from fedlm.engine.frozen_features import FrozenFeatures
from fedlm.engine.mesh import MeshEngine
from fedlm.evaluate.held_out import HeldOutEvaluation, HeldOutText
from fedlm.federation.algorithm import Algorithm
from fedlm.models import catalog, interop
from fedlm.models.adapters import Adapters, without_adapters
from fedlm.models.catalog import ModelSpec
from fedlm.models.interop import gguf
from fedlm.models.partial import TRAINABLE
from fedlm.privacy import release
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import privacy_plan
from fedlm.recipe.settings import Data, Model, Recipe, Server
from fedlm.recipe.vocabulary import vocabulary_of
from fedlm.record.checkpoint import from_bytes
from fedlm.record.directory import RunDirectory
from fedlm.run import Cadence, Outputs

# Counting n-grams holds a few numbers per training token in memory; beyond this it is skipped.
MOST_COUNTED_TOKENS = 50_000_000
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # how files of PyTorch are called
MOST_HEAD = 100_000_000  # bytes: the longest head that safetensors reads


def given_tokenizer(
    data: Data, bos: str | None = None, eos: str | None = None
) -> TextTokenizer | None:
    """Read the tokenizer file that `[data]` names; return None if a tokenizer is to be fitted."""
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
    """Return the settings that decide a store's bytes.

    A `given` tokenizer, read from a file, decides vocabulary and case instead of `[data]`.
    """
    return StoreSettings(
        tokenizer=kind_of(data.tokenizer),
        vocabulary=data.vocabulary if given is None else given.vocabulary,
        vocabulary_epsilon=data.vocabulary_epsilon,
        vocabulary_delta=data.vocabulary_delta,
        vocabulary_words=data.vocabulary_words,
        lowercase=data.lowercase if given is None else False,
        test_clients=data.test_clients,
        validation=data.validation,
        split_seed=data.split_seed,
        user_field=data.user_field,
        text_field=data.text_field,
        groups_field=data.groups_field,
    )


def open_store(
    data: Data,
    cache: Path,
    progress: Progress = lambda stage, done: None,
    say: Say = lambda text: None,
) -> Store:
    """Open the store that `[data]` names, or the one prepared from its source, kept in `cache`.

    `say` is told what of the source was left out.
    """
    if sum(map(bool, (data.source, data.store, data.stores))) != 1:
        raise ConfigError(
            f"data.source = {data.source!r}, data.store = {data.store!r}, data.stores = "
            f"{list(data.stores)}: expected one of data.source (text), data.store (made by fedlm "
            "prepare) and data.stores (several of them). Beside a recipe that has another: --set "
            "data.source= leaves it out."
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
        vocabulary = vocabulary_of(data, given, progress)
        documents = documents_of(data, data.source, say)
        return write(documents, path, settings, progress, vocabulary)
    except CorpusError:
        if not path.exists():
            raise
        return Store(path)  # another process made the same store meanwhile


def recipe_to_look_at(recipe: Recipe, clients: int) -> Recipe:
    """Return a recipe for a model that was trained, on the text of `[data]`.

    How it was trained is left out, and with it what would be promised for training.
    """
    server = Server(cohort=max(1, min(Server().cohort, clients)), rounds=recipe.server.rounds)
    model = recipe.model.model_copy(update={"base_dtype": "float32", "init_from": None})
    return Recipe(data=recipe.data, model=model, run=recipe.run, server=server)


def names_no_text(data: Data) -> bool:
    """Return whether `[data]` leaves all text to nodes, and names at most a tokenizer."""
    return not (data.source or data.store or data.stores)


def tokenizer_store(data: Data, cache: Path) -> Store:
    """Return a store that has a tokenizer and no text, for a server whose text is at nodes."""
    given = given_tokenizer(data)
    if given is None:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer!r}: without data.store a server needs the path of "
            "the tokenizer.json that all nodes prepared their text with."
        )
    settings = store_settings(data, given)
    path = cache / f"tokenizer-{_identity('', settings, given)}"
    if not path.exists():
        vocabulary, dtype = vocabulary_of(data, given), token_dtype(given.vocabulary)
        assert isinstance(vocabulary, Vocabulary)
        try:
            return write_tokens((), path, vocabulary, settings, dtype, learns=False)
        except CorpusError:
            if not path.exists():
                raise  # else another process made the same store meanwhile
    return Store(path)


def documents_of(
    data: Data, source: str, say: Say = lambda text: None
) -> Iterator[sources.Document]:
    """Return the documents of a source, with the fields that `[data]` names."""
    fields = {"text_field": data.text_field, "groups_field": data.groups_field}
    return sources.read(source, data.user_field, **fields, say=say)


def _check_store(store: Store, data: Data) -> None:
    """Raise `ConfigError` if a given setting differs from the one the store was made with."""
    for name, made in vars(store.settings).items():
        asked = getattr(data, name)
        if name in data.model_fields_set and asked != made:
            raise ConfigError(
                f"data.{name} = {asked!r}: the store {store.path} was made with {made!r}. Leave "
                "the setting out, or prepare another store."
            )


def _short_name(source: str) -> str:
    return Path(source).name.split(".")[0][:40] or "text"


def _identity(source: str, settings: StoreSettings, given: TextTokenizer | None) -> str:
    """Return a hash of a source's text and settings, so that a changed text is prepared anew."""
    digest = hashlib.sha256(repr((FORMAT, source, settings)).encode())
    if given is not None:
        digest.update(f"{given.library.to_str()}{given.special}".encode())
    path = Path(source)
    # Without a source the path would be the current folder.
    if source and source not in sources.CORPORA and os.path.exists(path):
        files = [file for _, file in sources.text_files(path)] if path.is_dir() else [path]
        for file in files:
            facts = file.stat()
            digest.update(f"{file}|{facts.st_size}|{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def resolve(recipe: Recipe, store: Store) -> Recipe:
    """Return the recipe with all values filled in that its model, store and plan decide."""
    recipe = recipe.model_copy(update={"model": with_base_sizes(recipe.model)})
    size = catalog.dimensions(recipe.model, store.vocabulary)
    sizes = {
        name: getattr(size, name) for name in type(recipe.model).model_fields if hasattr(size, name)
    }
    if size.vocab == store.vocabulary:
        del sizes["vocab"]  # the store decides it
    data, decided = recipe.data, vars(store.settings)
    if data.source is not None or not len(store):
        decided = {**decided, "tokenizer": data.tokenizer}  # a path, where the store says "file"
    data = data.model_copy(update=decided)
    return recipe.model_copy(
        update={
            "data": data,
            "model": recipe.model.model_copy(update=sizes),
            "client": privacy_plan.client_of(recipe),
        }
    )


def with_base_sizes(model: Model) -> Model:
    """Return the model's settings with the sizes of the model made elsewhere that it begins from.

    Settings that are given must agree with it.
    """
    path = Path(model.init_from or "")
    reader = interop.reader_of(path) if model.init_from else None
    if reader is None:
        return model
    base = reader.base(path)
    sizes = {"name": base.architecture, **base.sizes}
    for name, value in sizes.items():
        given = getattr(model, name)
        require(
            name not in model.model_fields_set or given in (None, value),
            f"model.{name}",
            given,
            f"{value!r}, as the model in {path} has it",
            "Leave the setting out.",
        )
    return model.model_copy(update=sizes)


# ---- the parts of a run --------------------------------------------------------------------


def training_clients(recipe: Recipe, store: Store, *, needed: bool = True) -> np.ndarray:
    """Return the clients to train on: all of the store, or the clients of the named groups.

    If not `needed`, the result may be empty: members of a server may live at nodes.
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


class People(NamedTuple):
    """The members of a run, with the text of those that are here."""

    population: Population
    rows: ClientRows
    ledgers: tuple[Path, ...]  # what was released about them by earlier runs on the same store
    elsewhere: bool

    def work(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm; members that live elsewhere keep what they remember there."""
        if self.elsewhere and algorithm.remembers:
            return replace(algorithm, memory_at_nodes=True)
        return algorithm


def people_of(recipe: Recipe, store: Store, elsewhere: Population | None) -> People:
    """Return the store's training clients, or the members that live `elsewhere`."""
    clients = training_clients(recipe, store, needed=elsewhere is None)
    rows = client_rows(recipe, store, clients)
    if elsewhere is not None:
        # Nodes make the same plan, and they do not know this store.
        return People(elsewhere, rows, (), elsewhere=True)
    return People(of_store(store, rows.clients), rows, tuple(store.ledgers), elsewhere=False)


def client_rows(recipe: Recipe, store: Store, clients: np.ndarray) -> ClientRows:
    """Return the text of clients in rows of the recipe's width."""
    data = recipe.data
    return ClientRows(
        store=store, clients=clients, sequence_length=data.sequence_length, layout=data.layout
    )


def pooled_rows(rows: ClientRows) -> Rows:
    """Return the rows of a single member that holds the text of all clients."""

    @cache
    def together() -> np.ndarray:
        return np.concatenate([rows.train(member) for member in range(len(rows.clients))])

    return lambda member: together()


def model_spec(recipe: Recipe, vocabulary: int) -> ModelSpec:
    """Return the architecture, the sizes and the adapters that a recipe names."""
    named = catalog.NAMED[recipe.model.name]
    size = catalog.dimensions(recipe.model, vocabulary)
    learned = catalog.learned_positions(named.architecture, size)
    length = recipe.data.sequence_length
    require(
        learned is None or length <= learned,
        "data.sequence_length",
        length,
        f"at most {learned}, the positions that model.name = {recipe.model.name!r} has learned",
    )
    return ModelSpec(named.architecture, size, recipe.model.name, adapters_of(recipe))


def adapters_of(recipe: Recipe) -> Adapters | None:
    """Return the adapters that a recipe trains; None if it trains a model itself."""
    wire, model = recipe.wire, recipe.model
    adapts = TRAINABLE[wire.trainable].adapts
    require(
        adapts or model.base_dtype == "float32",
        "model.base_dtype",
        model.base_dtype,
        "'float32' unless wire.trainable = 'lora' freezes the model",
    )
    if not adapts:
        return None
    return Adapters(
        rank=wire.rank,
        alpha=wire.alpha,
        targets=wire.targets,
        last_blocks=wire.last_blocks,
        base_dtype=model.base_dtype,
    )


def start_key(recipe: Recipe) -> PRNGKeyArray:
    """Return the random key of a fresh model."""
    return key_for(recipe.run.seed, "init")


def start_model(recipe: Recipe, store: Store, spec: ModelSpec) -> Params:
    """Return the model before training, with fresh adapters if the recipe trains adapters."""
    if recipe.model.init_from is not None:
        _check_tokenizer(Path(recipe.model.init_from), store)
    return spec.adapt(plain_start(recipe, spec), start_key(recipe))


def plain_start(recipe: Recipe, spec: ModelSpec) -> Params:
    """Return the model that training or adapters begin from.

    It is that of `model.init_from`, another run's or one made elsewhere; or a fresh one.
    """
    if recipe.model.init_from is None:
        return catalog.make(spec.architecture, spec.size, start_key(recipe))
    path = Path(recipe.model.init_from)
    reader = interop.reader_of(path)
    if reader is not None:
        return reader.load(path, spec.size)
    file, like = _weights_file(path), spec.plain_shapes()
    _check_weights_file(file, path, 4 * tree.size(like))
    return from_bytes(file.read_bytes(), like, f"model.init_from = {str(path)!r}")


def check_model_path(path: Path, setting: str) -> None:
    """Raise `ConfigError` unless there is a model at the path that a setting names.

    Of a model from elsewhere its settings are read, of no model its weights.
    """
    reader = interop.reader_of(path)
    if reader is None:
        _weights_file(path, setting)
    else:
        reader.base(path)


def _weights_file(path: Path, setting: str = "model.init_from") -> Path:
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{setting} = {str(path)!r}: expected a model.safetensors, a run directory that "
            "holds one, a Hugging Face folder with config.json, or a GGUF file."
        )
    return file


def _check_weights_file(file: Path, path: Path, size: int) -> None:
    """Raise `ConfigError` unless a file can hold a model of so many bytes that fedlm wrote."""
    setting = f"model.init_from = {str(path)!r}"
    if file.suffix in PICKLES:
        raise ConfigError(
            f"{setting}: this may be a pickle, which can run any program when it is read: expected "
            "the folder of a model with config.json and safetensors. Save it again with "
            "save_pretrained."
        )
    found, most = file.stat().st_size, size + MOST_HEAD
    if found > most:
        raise ConfigError(
            f"{setting}: {file.name} has {found:,} bytes, and the model of this recipe at most "
            f"{most:,}: give [model] the sizes that it was trained with."
        )
    with open(file, "rb") as opened:
        head = opened.read(min(int.from_bytes(opened.read(8), "little"), MOST_HEAD))
    if found > 8 and b'"fedlm"' not in head:
        raise ConfigError(
            f"{setting}: {file.name} was not written by fedlm, and a model from elsewhere needs "
            "its settings: expected a folder with config.json beside the weights, or a GGUF file."
        )


def _check_tokenizer(path: Path, store: Store) -> None:
    """Raise `ConfigError` if the model at a path has another tokenizer than the store."""
    ours = store.tokenizer.library
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json"
    if path.suffix == gguf.SUFFIX:
        size = store.vocabulary
        same = [ours.id_to_token(n) for n in range(size)] == gguf.tokens_of(path)[:size]
    elif interop.reader_of(path) is None:
        _weights_file(path)
        theirs = (store.path / "tokenizer.json").read_bytes()
        same = not file.is_file() or file.read_bytes() == theirs
    else:
        # By meaning: the store keeps the file as the library writes it.
        same = not file.is_file() or load_library(file).to_str() == ours.to_str()
    if not same:
        raise ConfigError(
            f"model.init_from = {str(path)!r}: its tokenizer is not that of the store "
            f"{store.path}, so its tokens mean other words. Prepare the text with fedlm prepare "
            "--tokenizer and the model's tokenizer.json."
        )


def start_maker(recipe: Recipe, store: Store) -> Callable[[], Params]:
    """Return a function that makes the model before training.

    If a part of the model is never trained, the model is made only once.
    """
    spec = model_spec(recipe, store.vocabulary)

    def start() -> Params:
        return start_model(recipe, store, spec)

    # The base of a run and its first state then share their arrays in memory.
    return cache(start) if TRAINABLE[recipe.wire.trainable].leaves is not None else start


def base_sha256(algorithm: Algorithm) -> str:
    """Return the digest of the frozen part of a model, without what adapters add to it."""
    return tree.sha256(without_adapters(algorithm.base))


def check_base(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raise `ConfigError` if the frozen model is not the one whose digest the recipe names."""
    wanted = recipe.model.base_sha256
    if wanted is None:
        return
    require(
        algorithm.make_base is not None,
        "model.base_sha256",
        wanted,
        "nothing, unless wire.trainable = 'lora' or 'fixed' freezes a part of the model",
    )
    found = base_sha256(algorithm)
    require(
        found == wanted,
        "model.base_sha256",
        wanted,
        f"{found}, the digest of the frozen model that is here",
        "Bring the model that the adapters belong to.",
    )


def batch_spec(recipe: Recipe) -> BatchSpec:
    """Return how a member's rows become batches."""
    client = recipe.client
    return BatchSpec(
        batch_size=client.batch_size,
        sequence_length=recipe.data.sequence_length,
        epochs=client.epochs,
        max_examples=client.max_examples,
        max_steps=client.max_steps,
    )


def engine_of(
    recipe: Recipe, algorithm: Algorithm, rows_of: Rows, frozen: FrozenFeatures | None = None
) -> Engine:
    """Return the engine that trains members on the text of this process.

    `frozen` is where it keeps what the frozen blocks of a model give.
    """
    _check_frozen(recipe, frozen is not None)
    kind, shard = ENGINES[recipe.run.engine], recipe.run.shard
    require(shard == 1 or kind is MeshEngine, "run.shard", shard, "1, unless run.engine = 'mesh'")
    several = "mesh for several processes"
    require(kind is MeshEngine or multihost.alone(), "run.engine", recipe.run.engine, several)
    options: dict[str, Any] = {} if shard == 1 else {"shard": shard}
    return kind(algorithm, rows_of, batch_spec(recipe), recipe.run.seed, frozen=frozen, **options)


def _check_frozen(recipe: Recipe, kept: bool) -> None:
    """Refuse to keep features of frozen blocks where nobody would use them."""
    megabytes, folder = recipe.run.cache_frozen, recipe.run.frozen_folder
    require(
        kept or not megabytes,
        "run.cache_frozen",
        megabytes,
        "0, unless wire.trainable = 'lora' with wire.last_blocks leaves blocks without adapters, "
        "in a flat federation in one place",
    )
    require(
        bool(megabytes) or folder is None,
        "run.frozen_folder",
        folder,
        "no folder, unless run.cache_frozen says how many megabytes may be kept in it",
    )


def frozen_features(
    recipe: Recipe, algorithm: Algorithm, rows_of: Rows, folder: Path
) -> FrozenFeatures | None:
    """Return where the features of frozen blocks are kept; None if they are not.

    It is `folder`, which is of this run alone, or the one that the recipe names.
    """
    megabytes, shared = recipe.run.cache_frozen, recipe.run.frozen_folder
    adapts = TRAINABLE[recipe.wire.trainable].adapts
    shapes = model_spec(recipe, recipe.data.vocabulary).shapes() if adapts else None
    kept = bool(megabytes) and getattr(shapes, "frozen_depth", 0) > 0
    _check_frozen(recipe, kept)
    if not kept:
        return None
    place = Path(shared) if shared else folder
    own = place / str(jax.process_index())  # processes do not write each other's files
    embed = catalog.dimensions(recipe.model, recipe.data.vocabulary).embedding_size
    return FrozenFeatures(
        lambda: algorithm.base.frozen,  # type: ignore[union-attr]
        embed,
        rows_of,
        own,
        megabytes << 20,
        shared=shared is not None,
    )


def held_out_text(recipe: Recipe, rows: ClientRows, owners: np.ndarray) -> HeldOutText:
    """Return the held-out rows of clients.

    Bytes are counted only where windows cover the whole text, so that every byte is in a target.
    """
    store, data = rows.store, recipe.data

    @cache
    def cut(context: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [rows.held(int(number), context) for number in owners]
        if not parts:
            return np.zeros((0, data.sequence_length + context), np.int16), np.zeros(0, int)
        sizes = [len(part) for part in parts]
        return np.concatenate(parts), np.repeat(owners, sizes)

    whole = not isinstance(store.tokenizer.library.model, WordLevel) and data.layout == "windows"
    return HeldOutText(
        rows=cut,
        groups=lambda owner: store.groups(owner),
        bytes_of=store.held_bytes,
        bytes=sum(store.held_bytes(int(n)) for n in owners) if whole else None,
    )


def owners_of(recipe: Recipe, store: Store, clients: np.ndarray) -> dict[str, np.ndarray]:
    """Return the clients with held-out text, by split."""
    return {"test": _of_groups(recipe, store, store.test_clients), "validation": clients}


def evaluation_of(
    recipe: Recipe,
    rows: ClientRows,
    plan: PrivacyPlan | None,
    models: Callable[[FederationState], Mapping[str, Params]],
    *,
    count: bool,
    score: ScoreFn = catalog.score,
    frozen: FrozenFeatures | None = None,
) -> HeldOutEvaluation:
    """Return the evaluation on the held-out text of this process.

    It covers the splits that the plan allows to report. `models` maps a state to its models by
    name. With `count`, n-grams are counted on the training text. `frozen` is where features of
    frozen blocks are kept.
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
        features=None if frozen is None else frozen.of,
        any_width=score is catalog.score,  # a module of a user may know one length alone
    )


def shared_parts(recipe: Recipe, store: Store, plans: Mapping[str, PrivacyPlan], out: Path) -> Any:
    """Return the parts that flat runs and trees have in common, by name."""
    server, run, privacy = recipe.server, recipe.run, recipe.privacy
    spec = model_spec(recipe, store.vocabulary)
    rounded = recipe.model.base_dtype != "float32"
    return {
        "model": spec,
        "unrounded": partial(plain_start, recipe, spec) if rounded else None,
        "store": store,
        "record": RunDirectory(out),
        "recipe": recipe,
        "plans": plans,
        "cadence": Cadence(
            rounds=privacy_plan.planned_rounds(recipe, plans.values()),
            asked_rounds=server.rounds,
            evaluate_every=server.evaluate_every,
            checkpoint_every=run.checkpoint_every,
            patience=server.patience,
            budget=privacy.epsilon,
            calibrated=privacy.mechanism is not None and privacy.noise_multiplier is None,
            schedules={
                "server.schedule": server.schedule,
                "client.schedule": recipe.client.schedule,
            },
        ),
        "outputs": Outputs(
            trackers=run.trackers,
            keep_checkpoints=run.keep_checkpoints,
            keep_best=run.keep_best,
            adapters=not TRAINABLE[recipe.wire.trainable].exact_mean,
            baselines=run.baselines,
            prompts=run.prompts,
        ),
    }
