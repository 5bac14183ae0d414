"""From a recipe to the objects of a run.

In:       a `Recipe`.
Out:      an `Experiment`: store, model, algorithm, engine, evaluation.
Promise:  every setting is used once, here; two builds of one recipe are the same experiment.
Not here: what settings are allowed (`settings.py`), the loop (`run.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedlm.core.errors import ConfigError, CorpusError, require
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import BatchSpec, Engine, Params, Sampling
from fedlm.corpus import sources, tokenizer_file
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import FORMAT, Progress, Store, StoreSettings, write
from fedlm.corpus.tokenizer import FILE, TextTokenizer, kind_of
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.evaluate.clients import client_figures, group_figures
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import Evaluator, Sums, figures
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import NodeState, init_node
from fedlm.models import catalog
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import privacy_plan
from fedlm.recipe.assemble import algorithm_of, pooled_algorithm
from fedlm.recipe.settings import Data, Model, Recipe
from fedlm.record.checkpoint import from_bytes

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
    made = tokenizer_file.load(Path(data.tokenizer), bos, eos)
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
        named.architecture not in catalog.ATTENTIVE or size.embedding_size % size.heads == 0,
        "model.heads",
        size.heads,
        f"a divisor of model.embedding_size, which is {size.embedding_size}",
    )
    return size


@dataclass(frozen=True)
class Experiment:
    """Everything a run is made of."""

    recipe: Recipe
    store: Store
    pooled: bool = False  # all text in one place, for pretraining on public text

    @cached_property
    def training(self) -> np.ndarray:
        """The clients to learn from."""
        return self._of_groups(self.store.training_clients)

    def _of_groups(self, clients: np.ndarray) -> np.ndarray:
        asked = set(self.recipe.data.groups)
        if not asked:
            return clients
        kept = [n for n in clients if asked & set(self.store.groups(int(n)))]
        return np.array(kept, clients.dtype)

    @cached_property
    def size(self) -> catalog.Dimensions:
        return dimensions(self.recipe.model, self.store.vocabulary)

    @property
    def architecture(self) -> str:
        return catalog.NAMED[self.recipe.model.name].architecture

    def checked(self) -> Self:
        """Itself, after everything that can be checked before the first round."""
        require(
            len(self.training) > 0,
            "data.groups",
            list(self.recipe.data.groups),
            "groups of this store that have training clients",
            "fedlm prepare shows the groups of a store.",
        )
        _ = self.algorithm, self.rounds
        return self

    def init_params(self) -> Params:
        """The model before training: another run's, or fresh and the same for the same seed."""
        if self.recipe.model.init_from is not None:
            return self._start_from(Path(self.recipe.model.init_from))
        key = key_for(self.recipe.run.seed, "init")
        return catalog.make(self.architecture, self.size, key)

    def _start_from(self, path: Path) -> Params:
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"model.init_from = {str(path)!r}: expected a model.safetensors, or a run "
                "directory that holds one."
            )
        made = file.parent / "tokenizer.json"
        ours = self.store.path / "tokenizer.json"
        if made.is_file() and made.read_bytes() != ours.read_bytes():
            raise ConfigError(
                f"model.init_from = {str(path)!r}: its tokenizer is not that of the store "
                f"{self.store.path}, so its tokens mean other words."
            )
        like = catalog.shapes(self.architecture, self.size)
        return from_bytes(file.read_bytes(), like, f"model.init_from = {str(path)!r}")

    @property
    def parameters(self) -> int:
        return catalog.count(self.architecture, self.size)

    @cached_property
    def algorithm(self) -> Algorithm:
        if self.pooled:
            return pooled_algorithm(self.recipe, self.sampling)
        like = catalog.shapes(self.architecture, self.size)
        return algorithm_of(self.recipe, self.sampling, self.plan, like)

    @cached_property
    def sampling(self) -> Sampling:
        if self.pooled:
            return Sampling(law="fixed", population=1, cohort=1)
        return privacy_plan.sampling_of(self.recipe, len(self.training))

    @cached_property
    def plan(self) -> PrivacyPlan | None:
        return privacy_plan.plan_of(self.recipe, self.sampling)

    @cached_property
    def rounds(self) -> int:
        """How many rounds will run: those asked for, or as many as the privacy budget holds."""
        return privacy_plan.rounds_of(self.recipe, self.plan)

    def init_node(self, params: Params) -> NodeState:
        """The state before the first round."""
        return init_node(self.algorithm, params, privacy_plan.secret_of(self.recipe.privacy))

    @property
    def shape(self) -> BatchSpec:
        client = self.recipe.client
        return BatchSpec(
            batch_size=client.batch_size,
            sequence_length=self.recipe.data.sequence_length,
            epochs=client.epochs,
            max_examples=client.max_examples,
            max_steps=client.max_steps,
        )

    @cached_property
    def engine(self) -> Engine:
        kind = {"mesh": MeshEngine, "loop": LoopEngine}[self.recipe.run.engine]
        return kind(self.algorithm, self._rows_of, self.shape, self.recipe.run.seed)

    def _rows_of(self, member: int) -> np.ndarray:
        if self.pooled:
            return self._all_rows
        return self.rows.train(member)

    @cached_property
    def _all_rows(self) -> np.ndarray:
        return np.concatenate([self.rows.train(m) for m in range(len(self.training))])

    @cached_property
    def rows(self) -> ClientRows:
        data = self.recipe.data
        return ClientRows(self.store, self.training, data.sequence_length, data.layout)

    # ---- evaluation --------------------------------------------------------------------

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(catalog.score, self.store.special)

    def owners(self, split: str) -> np.ndarray:
        """Clients with held-out text in a split."""
        return self._of_groups(self.store.test_clients) if split == "test" else self.training

    def held_rows(self, split: str, context: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a split, and the client number of each."""
        parts, owners = [], []
        for number in self.owners(split):
            rows = self.rows.held(int(number), context)
            parts.append(rows)
            owners.append(np.full(len(rows), number))
        if not parts:
            return np.zeros((0, self.recipe.data.sequence_length + context), np.int16), np.zeros(
                0, int
            )
        return np.concatenate(parts), np.concatenate(owners)

    @cached_property
    def watched_rows(self) -> np.ndarray:
        """The fixed sample of held-out rows that is scored on the way."""
        # Held-out text of training clients is theirs too: a plan leaves it alone.
        order = ("validation", "test") if self.plan is None else ("test", "validation")
        rows, _ = self.held_rows(order[0])
        if len(rows) == 0:
            rows, _ = self.held_rows(order[1])
        most = self.recipe.server.evaluate_rows
        if most and len(rows) > most:
            rng = generator_for(self.recipe.run.seed, "evaluate")
            rows = rows[np.sort(rng.choice(len(rows), most, replace=False))]
        return rows

    def splits(self) -> list[str]:
        """Where there is held-out text."""
        return [split for split in ("test", "validation") if len(self.held_rows(split)[0])]

    def shape_facts(self) -> dict[str, Any]:
        """What a journal's header says of the shape of the federation; nothing if it is flat."""
        return {}

    def closing_facts(self, rounds: int) -> dict[str, Any]:
        """What a journal's closing line says besides figures; nothing if the federation is flat."""
        return {}

    def models_of(self, state: Any) -> dict[str, Params]:
        """The models of a state by name, that of the whole federation first."""
        return {"": state.params}

    def look(self, state: Any) -> dict[str, Any]:
        """The figures of a state on the way."""
        return self.watch(state.params)

    def judge(self, state: Any, split: str) -> dict[str, Any]:
        """All figures of a state in the end."""
        return self.evaluate(state.params, split)

    def watch(self, params: Params) -> dict[str, float]:
        """The figures of a round."""
        found = figures(self.evaluator(params, self.watched_rows))
        return {"perplexity": found["perplexity"], "accuracy": found["accuracy"]}

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """All figures of a split: together, over clients, per group."""
        rows, owners = self.held_rows(split)
        sums = self.evaluator(params, rows)
        paths = {int(n): self.store.groups(int(n)) for n in np.unique(owners)}
        groups = [paths[int(n)] for n in owners]
        deepest = max((len(p) for p in paths.values()), default=0)
        return {
            **figures(sums),
            **self._bits_per_byte(split, sums),
            "clients": client_figures(sums, owners),
            "groups": [group_figures(sums, groups, depth) for depth in range(deepest)],
        }

    def _bits_per_byte(self, split: str, sums: Sums) -> dict[str, float]:
        """Comparable over tokenizers; only where every byte of the text is in some target."""
        data, all_known = self.recipe.data, np.array_equal(sums.known, sums.tokens)
        if data.tokenizer == "words" or data.layout != "windows" or not all_known:
            return {}
        size = sum(self.store.held_bytes(int(n)) for n in self.owners(split))
        return {"bits_per_byte": float(np.sum(sums.nats)) / math.log(2) / size} if size else {}

    def baselines(self, splits: Iterable[str]) -> dict[str, dict[str, float]]:
        """What counting on the same training tokens reaches on the same targets."""
        if self.store.manifest["train_tokens"] > MOST_COUNTED_TOKENS:
            return {}
        learned = (self.rows.train(m, 2) for m in range(len(self.training)))
        counts = NGrams(learned, self.store.vocabulary, self.store.special)
        return {split: counts.perplexities(self.held_rows(split, 2)[0]) for split in splits}


def build(
    recipe: Recipe, cache: Path, progress: Callable[[str, int], None], *, pooled: bool = False
) -> Experiment:
    """Opens the store and checks everything that can be checked before the first round."""
    store = open_store(recipe.data, cache, progress)
    kind: type[Experiment] = Experiment
    if recipe.federation is not None and not pooled:
        from fedlm.recipe.branches import TreeExperiment  # it is built on this module

        kind = TreeExperiment
    return kind(resolve(recipe, store), store, pooled).checked()
