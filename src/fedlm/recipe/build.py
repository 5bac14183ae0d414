"""From a recipe to the objects of a run.

In:       a `Recipe`.
Out:      an `Experiment`: store, model, algorithm, engine, evaluation.
Promise:  every setting is used once, here; two builds of one recipe are the same experiment.
Not here: what settings are allowed (`settings.py`), the loop (`run.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.cohort.pack import cut
from fedlm.cohort.sample import check
from fedlm.core.errors import ConfigError
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import Engine, Params, Sampling, Shape
from fedlm.corpus import sources
from fedlm.corpus.store import Progress, Store, StoreSettings, write
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.evaluate.clients import client_figures, group_figures
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import Evaluator, figures
from fedlm.federation.algorithms import client_optimizer, schedule, server_optimizer
from fedlm.federation.round import Algorithm
from fedlm.local.train import WEIGHTS, local_training
from fedlm.models import catalog
from fedlm.recipe.settings import Data, Recipe
from fedlm.wire.dense import dense

# Counting n-grams holds a few numbers per training token in memory; beyond this it is skipped.
MOST_COUNTED_TOKENS = 50_000_000


def store_settings(data: Data) -> StoreSettings:
    """The part of `[data]` that decides a store's bytes."""
    return StoreSettings(
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        lowercase=data.lowercase,
        test_clients=data.test_clients,
        validation=data.validation,
        split_seed=data.split_seed,
    )


def open_store(data: Data, cache: Path, progress: Progress = lambda stage, done: None) -> Store:
    """The recipe's store: the one it names, or one prepared from its source and kept."""
    if (data.store is None) == (data.source is None):
        raise ConfigError(
            f"data.source = {data.source!r}, data.store = {data.store!r}: expected either "
            "data.source (text) or data.store (made by fedlm prepare), and not both."
        )
    if data.store is not None:
        store = Store(Path(data.store))
        _check_store(store, data)
        return store
    assert data.source is not None
    settings = store_settings(data)
    path = cache / f"{_short_name(data.source)}-{_identity(data.source, settings)}"
    if path.exists():
        return Store(path)
    return write(sources.read(data.source), path, settings, progress)


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


def _identity(source: str, settings: StoreSettings) -> str:
    """Names a prepared store by its text and settings, so that a changed text is prepared anew."""
    digest = hashlib.sha256(repr((source, settings)).encode())
    path = Path(source)
    if source not in sources.CORPORA and path.exists():
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            facts = file.stat()
            digest.update(f"{file}|{facts.st_size}|{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def resolve(recipe: Recipe, store: Store) -> Recipe:
    """The recipe with what its store decides filled in: complete, and equal on every read."""
    if recipe.data.store is None:
        return recipe
    data = recipe.data.model_copy(update=vars(store.settings))
    return recipe.model_copy(update={"data": data})


@dataclass(frozen=True)
class Experiment:
    """Everything a run is made of."""

    recipe: Recipe
    store: Store

    @cached_property
    def size(self) -> catalog.Dimensions:
        model = self.recipe.model
        return catalog.Dimensions(
            vocab=self.store.vocabulary, embed=model.embed, units=model.units, layers=model.layers
        )

    def init_params(self) -> Params:
        """The model before training; the same for the same seed."""
        key = key_for(self.recipe.run.seed, "init")
        return catalog.make(self.recipe.model.name, self.size, key)

    @property
    def parameters(self) -> int:
        return catalog.count(self.recipe.model.name, self.size)

    @cached_property
    def algorithm(self) -> Algorithm:
        client, server = self.recipe.client, self.recipe.server
        sampling = Sampling(
            law=server.sampling,
            population=len(self.store.training_clients),
            cohort=server.cohort,
        )
        check(sampling)
        inner = client_optimizer(
            client.optimizer,
            client.rate,
            momentum=client.momentum,
            weight_decay=client.weight_decay,
            clip=client.clip,
        )
        rate = schedule(
            server.schedule, server.rate, rounds=server.rounds, warmup=server.warmup, end=server.end
        )
        outer = server_optimizer(
            server.optimizer,
            rate,
            momentum=server.momentum,
            beta2=server.beta2,
            epsilon=server.epsilon,
        )
        return Algorithm(
            sampling=sampling,
            local=local_training(catalog.loss, inner, WEIGHTS[client.weight]),
            upload=dense(),
            download=dense(),
            server=outer,
        )

    @property
    def shape(self) -> Shape:
        client = self.recipe.client
        return Shape(
            batch=client.batch,
            length=self.recipe.data.length,
            epochs=client.epochs,
            max_examples=client.max_examples,
            max_steps=client.max_steps,
        )

    @cached_property
    def engine(self) -> Engine:
        kind = {"mesh": MeshEngine, "loop": LoopEngine}[self.recipe.run.engine]
        return kind(self.algorithm, self._rows_of, self.shape, self.recipe.run.seed)

    def _rows_of(self, member: int) -> np.ndarray:
        number = int(self.store.training_clients[member])
        return self._cut(self.store.train(number))

    def _cut(self, tokens: np.ndarray, context: int = 1) -> np.ndarray:
        return cut(tokens, self.recipe.data.length, self.recipe.data.layout, context)

    # ---- evaluation --------------------------------------------------------------------

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(catalog.score)

    def owners(self, split: str) -> np.ndarray:
        """Clients with held-out text in a split."""
        return self.store.test_clients if split == "test" else self.store.training_clients

    def held_rows(self, split: str, context: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a split, and the client number of each."""
        parts, owners = [], []
        for number in self.owners(split):
            rows = self._cut(self.store.held(int(number)), context)
            parts.append(rows)
            owners.append(np.full(len(rows), number))
        if not parts:
            return np.zeros((0, self.recipe.data.length + context), np.uint16), np.zeros(0, int)
        return np.concatenate(parts), np.concatenate(owners)

    @cached_property
    def watched_rows(self) -> np.ndarray:
        """The fixed sample of held-out rows that is scored on the way."""
        rows, _ = self.held_rows("validation")
        if len(rows) == 0:
            rows, _ = self.held_rows("test")
        most = self.recipe.server.evaluate_rows
        if most and len(rows) > most:
            rng = generator_for(self.recipe.run.seed, "evaluate")
            rows = rows[np.sort(rng.choice(len(rows), most, replace=False))]
        return rows

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
            "clients": client_figures(sums, owners),
            "groups": [group_figures(sums, groups, depth) for depth in range(deepest)],
        }

    def baselines(self, split: str) -> dict[str, float]:
        """What counting on the same training tokens reaches on the same targets."""
        if self.store.manifest["train_tokens"] > MOST_COUNTED_TOKENS:
            return {}
        rows, _ = self.held_rows(split, context=2)
        if len(rows) == 0:
            return {}
        learned = (self._cut(self.store.train(int(n)), 2) for n in self.store.training_clients)
        return NGrams(learned, self.store.vocabulary).perplexities(rows)


def build(recipe: Recipe, cache: Path, progress: Callable[[str, int], None]) -> Experiment:
    """Opens the store and checks everything that can be checked before the first round."""
    store = open_store(recipe.data, cache, progress)
    experiment = Experiment(resolve(recipe, store), store)
    _ = experiment.algorithm
    return experiment
