"""fedlm in Python: the same objects that the command line uses.

In:       text, a model, a cohort; or a recipe.
Out:      a store, a trained run, an epsilon.
Promise:  what Python trains is what the command line trains; under a privacy plan every release is
          on record before it is yielded; nothing is printed unless it is asked for.
Not here: how a run is composed (`recipe/build.py`), the loop (`run.py`).
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from fedlm import lineage
from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, CorpusError, either, require, shown
from fedlm.core.releasable import Releasable
from fedlm.core.types import Params
from fedlm.corpus import tokenizer_file
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.sources import Document
from fedlm.corpus.store import Store, StoreSettings, write
from fedlm.engine.devices import use_devices
from fedlm.evaluate.generate import Speaker
from fedlm.federation.round import Played
from fedlm.inference import load_models, predict, words_after
from fedlm.models.catalog import NAMED, Dimensions, ModelSpec, ModuleSpec
from fedlm.models.partial import TRAINABLE, PartKind
from fedlm.privacy import account
from fedlm.privacy.claim import Claim
from fedlm.privacy.plan import PrivacyPlan
from fedlm.publish.card import CARD, card
from fedlm.publish.finished_run import FinishedRun
from fedlm.publish.formats import FORMATS, write_export
from fedlm.publish.pages import page_of
from fedlm.recipe import parts
from fedlm.recipe.build import OwnParts, build, run_to_look_at
from fedlm.recipe.settings import Privacy, Recipe, load, parse
from fedlm.recipe.vocabulary import vocabulary_of
from fedlm.record.checkpoint import from_bytes
from fedlm.record.directory import RunDirectory
from fedlm.record.export import write_onnx
from fedlm.record.facts import facts_of
from fedlm.run import Run
from fedlm.training import Summary, Watcher, finish, play
from fedlm.training import train as carry_out

STORES = Path(".fedlm/stores")
Text = str | Path | Iterable[tuple[str, str] | tuple[str, str, tuple[str, ...]]]


def prepare(source: Text, out: str | Path | None = None, **settings: Any) -> Store:
    """Turn text into a client store, and open it.

    Args:
      source: a corpus name, a file or a folder, as for `fedlm prepare`; or an iterable of
        `(client, text)` or `(client, text, groups)`.
      out: the folder of the store, which must not exist. By default a folder that is removed at
        exit.
      **settings: the settings of a recipe's `[data]` table that decide a store: `tokenizer`,
        `vocabulary` (entries), `vocabulary_epsilon` (count it with noise), `lowercase`,
        `test_clients` (share of clients held out whole), `validation` (share of each client's text
        held out), `split_seed`, `user_field` (the field that names the person), `text_field`,
        `groups_field`.

    Raises:
      ConfigError: a setting is unknown or out of range.
      CorpusError: the text is not readable or holds no client, or `out` exists.

    >>> store = prepare([("ann", "the cat sat"), ("bob", "the dog ran")] * 3, test_clients=0.0)
    >>> len(store.training_clients)
    2
    """
    data = parse({"data": settings}).data
    decide = [field.name for field in fields(StoreSettings)]
    for name, value in settings.items():
        way_out = f"Give it to Federation as data__{name}, or to a recipe's [data]."
        require(name in decide, name, value, "nothing: it does not decide a store", way_out)
    if isinstance(source, (str, Path)):
        documents = parts.documents_of(data, str(source))
    else:
        for name in ("user_field", "text_field", "groups_field"):
            value = getattr(data, name)
            require(value is None, name, value, "nothing for pairs, which have no fields")
        documents = _given(source)
    given = parts.given_tokenizer(data)
    path = Path(out) if out is not None else _temporary() / "store"
    made = parts.store_settings(data, given)
    return write(documents, path, made, vocabulary=vocabulary_of(data, given))


def _given(pairs: Iterable[Any]) -> Iterator[Document]:
    """Yield the documents of pairs of client and text, perhaps with groups."""
    for number, pair in enumerate(pairs):
        whole = isinstance(pair, (tuple, list)) and len(pair) in (2, 3)
        groups = pair[2] if whole and len(pair) == 3 else ()
        if not whole or not isinstance(pair[1], str) or not isinstance(groups, (tuple, list)):
            raise CorpusError(
                f"item {number} of the text is {shown(pair)}: expected (client, text) or (client, "
                "text, groups), where groups is a tuple of names."
            )
        yield Document(str(pair[0]), tuple(groups), pair[1])


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _temporary() -> Path:
    """Return a new folder that is removed when the process exits."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="fedlm-", ignore_cleanup_errors=True))
    return Path(_KEPT[-1].name)


def train(
    recipe: str | Path | JsonMapping | Recipe,
    out: str | Path,
    *,
    changes: Iterable[str] = (),
    resume: bool = False,
    progress: bool = False,
) -> TrainedRun | None:
    """Train the federation that a recipe describes, and return the finished run.

    The result is None if the run was stopped before its last round.

    Args:
      recipe: a TOML file, tables as a mapping, or a `Recipe`.
      out: the run directory.
      changes: settings to change, as `table.key=value`, if `recipe` is a file.
      resume: continue from the newest checkpoint in `out`.
      progress: print a line per evaluated round.

    Raises:
      ConfigError: a setting is unknown, out of range, or contradicts another.
      CorpusError: the text or the store cannot be used.
      RecordError: `out` cannot be used, or holds a run of another recipe or text.
      DivergenceError: loss or parameters are no longer finite.

    >>> store = prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> tables = {"data": {"store": str(store.path)}, "server": {"cohort": 2, "rounds": 1},
    ...           "model": {"name": "cifg", "embedding_size": 4, "hidden_size": 4},
    ...           "client": {"batch_size": 4}}
    >>> run = train(tables, store.path.parent / "run")
    >>> run.summary["rounds"]
    1
    """
    changes = tuple(changes)
    if isinstance(recipe, (str, Path)):
        made = load(Path(recipe), changes)
    else:
        wanted = "nothing, unless the recipe is a file"
        require(not changes, "changes", changes, wanted, "Change the tables themselves.")
        made = recipe if isinstance(recipe, Recipe) else parse(dict(recipe))
    _lanes(made.run.devices)
    run = build(made, STORES, out=Path(out))
    done = carry_out(run, resume=resume, watcher=_watcher(progress))
    return None if done is None else TrainedRun(run, done)


def _watcher(progress: bool) -> Watcher:
    def show(told: Releasable) -> None:
        if told.get("perplexity") is not None:
            print(f"round {told['round'] + 1}: perplexity {told['perplexity']:.1f}")

    return Watcher(say=print, round=show) if progress else Watcher()


def load_run(path: str | Path, model: eqx.Module | None = None) -> TrainedRun:
    """Open a finished run, from a recipe or from a `Federation`.

    Args:
      path: the run directory.
      model: the equinox module that was trained, if the run was trained with one: its weights are
        read from the run, its code is not kept there.

    Raises:
      RecordError: the directory is no run, or the run is not finished.
      ConfigError: the run was trained with an equinox module, and `model` is missing.

    >>> store = prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> tables = {"data": {"store": str(store.path)}, "server": {"cohort": 2, "rounds": 1},
    ...           "model": {"name": "cifg", "embedding_size": 4, "hidden_size": 4},
    ...           "client": {"batch_size": 4}}
    >>> run = train(tables, store.path.parent / "run")
    >>> load_run(run.path).path == run.path
    True
    """
    directory = RunDirectory.existing(Path(path)).finished()
    custom = facts_of(directory.path).header.get("custom") or {}
    recipe = load(directory.recipe)
    # If the optimisers were given too, they have done their work: the recipe's serve as well.
    if custom.get("model") == ModuleSpec.__name__:
        wanted = "the equinox module that this run trained"
        require(model is not None, "model", model, wanted)
        run = build(recipe, STORES, out=directory.path, own=_own_parts(ModuleSpec(model)))
    else:
        require(model is None, "model", model, "nothing: the run's recipe names its model")
        run = _looked_at(recipe, directory)
    summary = finish(run)
    assert summary is not None
    return TrainedRun(run, summary)


def _looked_at(recipe: Recipe, directory: RunDirectory) -> Run:
    """Return the run of a directory, also if its text is at nodes."""
    if not parts.names_no_text(recipe.data):
        return build(recipe, STORES, out=directory.path)
    store = parts.tokenizer_store(recipe.data, STORES)
    plan = facts_of(directory.path).header.get("privacy") or {}
    size = plan.get("sampling", {}).get("population", 0)
    return run_to_look_at(parts.resolve(recipe, store), store, size, out=directory.path)


def epsilon(
    of: PrivacyPlan | Store | str | Path, rounds: int | None = None
) -> account.Spent | Claim | lineage.StoreSpending:
    """Compute the epsilon of a plan or of a run, or of all runs on a store together.

    Args:
      of: a plan, a run directory, or a store.
      rounds: the number of rounds of the plan to count; by default all. A run always counts the
        releases in its ledger.

    Raises:
      ConfigError: the numbers of the plan do not go together.
      RecordError: the directory is no run, or the run has no privacy plan.

    >>> from fedlm.core.types import Sampling
    >>> everyone = Sampling(law="poisson", population=1000, cohort=10)
    >>> plan = PrivacyPlan(mechanism="gaussian", sampling=everyone, rounds=100, clip_norm=0.5,
    ...                    noise_multiplier=1.0, delta=1e-5)
    >>> round(epsilon(plan).epsilon, 2)
    0.72
    """
    if isinstance(of, PrivacyPlan):
        return account.spent(of, of.rounds if rounds is None else rounds)
    if isinstance(of, Store):
        return lineage.spent_on(of)
    facts = facts_of(RunDirectory.existing(Path(of)).path)
    return lineage.claim_of_run(Path(of), facts.header)


# ---- a run that is over ----------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: figures, predictions, report, export.

    Attributes:
      run: the parts of the run.
      summary: the figures that `fedlm train` prints, by name.

    >>> from fedlm.models import cifg
    >>> store = prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> model = cifg(store, embedding_size=4, hidden_size=4)
    >>> fed = Federation(store, model, cohort=2, rounds=1, client__batch_size=4)
    >>> numbers = [told.number for told in fed.rounds()]
    >>> trained = fed.finish()
    >>> trained.evaluate("validation")["perplexity"] > 1
    True
    >>> len(trained.predict("the cat", top=2))
    2
    >>> trained.report().name
    'report.html'
    >>> trained.export("safetensors", trained.path / "export").name
    'model.safetensors'
    """

    run: Run
    summary: Summary

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.run.record.path

    def evaluate(self, split: str = "test") -> JsonObject:
        """Score the trained model on a split of the held-out text.

        Args:
          split: `test` (clients held out whole) or `validation` (held-out text of training
            clients).

        Returns:
          Figures by name, such as `perplexity` (per token) and `accuracy`.

        Raises:
          ConfigError: the run has no such split, or its privacy plan forbids it.
        """
        part = facts_of(self.run.record.path).header.get("part_of") or {}
        require(
            not part.get("private"),
            "split",
            split,
            f"nothing: this is a model of the private run {part.get('run')}, whose report tells "
            "its figures",
        )
        told = self.run.evaluation.splits()
        require(split in told, "split", split, f"one of {', '.join(told) or 'none'}")
        return self.run.evaluation.of_models(self._models(), split)

    def predict(self, text: str, top: int = 5) -> list[JsonObject]:
        """Return the likeliest next words after a text, with their probabilities.

        Args:
          text: the prompt; an equinox module reads its last `data.sequence_length` tokens.
          top: the number of words.

        Returns:
          A mapping with `word` and `probability` (between 0 and 1) per word, the likeliest first.
        """
        params, tokenizer = self._models()[""], self.run.store.tokenizer
        if not isinstance(self.run.model, ModuleSpec):
            return predict(params, tokenizer, text, top)
        module, length = self._module(params), self.run.recipe.data.sequence_length
        return words_after(lambda capacity: _row_speaker(module, length), tokenizer, text, top)

    def report(self) -> Path:
        """Draw the HTML report again, and return its path."""
        page = page_of([self.path])
        write_atomically(self.run.record.report, page.encode())
        return self.run.record.report

    def export(self, kind: str, folder: str | Path) -> Path:
        """Write the model and its tokenizer into a folder, and return the model's path.

        Args:
          kind: `safetensors`, `onnx`, `onnx-int8`, `huggingface`, `peft` (adapters alone), `web`,
            `web-int8`.
          folder: the folder, which is made if it is missing.

        Raises:
          ConfigError: `kind` is unknown, or the model cannot be written so.
        """
        require(kind in FORMATS, "kind", kind, either(FORMATS))
        target, record = Path(folder), self.run.record
        if not isinstance(self.run.model, ModuleSpec):
            return write_export(record, kind, target)
        require(kind in ("safetensors", "onnx"), "kind", kind, "safetensors or onnx for a module")
        target.mkdir(parents=True, exist_ok=True)
        file = target / f"model.{kind}"
        if kind == "safetensors":
            write_atomically(file, record.weights.read_bytes())
        else:
            length = self.run.recipe.data.sequence_length
            write_onnx(self._module(self._models()[""]), length, file)
        write_atomically(target / "tokenizer.json", record.tokenizer.read_bytes())
        made = card(FinishedRun(record), kind, "module of one's own")
        write_atomically(target / CARD, made.encode())
        return file

    def _module(self, params: Params) -> Any:
        """Return the equinox module that was trained, with trained weights."""
        assert isinstance(self.run.model, ModuleSpec)
        return eqx.combine(params, self.run.model.module)

    def _models(self) -> JsonObject:
        record, model = self.run.record, self.run.recipe.model
        size = tokenizer_file.load_tokenizer(record.tokenizer).vocabulary
        if isinstance(self.run.model, ModuleSpec):
            like = self.run.model.shapes()
            return {"": from_bytes(record.weights.read_bytes(), like, str(record.weights))}
        return load_models(model, size, record, self.run.round.names)


def _row_speaker(module: Any, length: int) -> Speaker:
    """Return a module as a predictor of the next token, which reads rows of `length` tokens."""

    @eqx.filter_jit
    def logits(module: Any, row: Array, last: Array) -> Array:
        return module(row)[0, last]

    def advance(before: tuple[int, ...], token: int) -> tuple[tuple[int, ...], Array]:
        tokens = (*before, token)[-length:]
        row = jnp.zeros((1, length), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
        return tokens, logits(module, row, jnp.asarray(len(tokens) - 1))

    return Speaker(tuple, advance)


# ---- a federation, round by round ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Federated averaging with optax optimisers at clients and server; `fedavg` makes one.

    Attributes:
      client: the optimiser of a client.
      server: the optimiser that the server applies to the mean change.
      weight: the weight of a client in the mean: `examples`, `tokens` or `uniform`.
      proximal: FedProx's mu; 0 is plain federated averaging.

    >>> Averaging(client=optax.sgd(0.5), server=optax.sgd(1.0)).proximal
    0.0
    """

    client: optax.GradientTransformation
    server: optax.GradientTransformation
    weight: str = "examples"
    proximal: float = 0.0


def fedavg(
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    *,
    weight: str = "examples",
    proximal: float = 0.0,
) -> Averaging:
    """Return federated averaging with any optax optimisers, for `Federation(method=...)`.

    Args:
      client: the optimiser of a client, as `optax.sgd(0.5)`.
      server: the optimiser that the server applies to the mean change, as `optax.adam(0.01)`;
        `optax.sgd(1.0)` is plain averaging.
      weight: the weight of a client in the mean: `examples`, `tokens` or `uniform`; always uniform
        under a privacy plan.
      proximal: FedProx's mu; 0 is plain federated averaging.

    >>> fedavg(optax.sgd(0.5), optax.adam(0.01)).weight
    'examples'
    """
    return Averaging(client=client, server=server, weight=weight, proximal=proximal)


class RoundReport(NamedTuple):
    """The figures of one round that may be published; figures that it does not have are None.

    Attributes:
      number: the number of the round, from one.
      perplexity: per token, on held-out text.
      loss: of the round's members in training, in nats per token; None under a privacy plan.
      epsilon: the privacy spent so far; None without a privacy plan.
      told: all figures of the round by name.

    >>> RoundReport(number=1, perplexity=80.0, loss=None, epsilon=None, told={}).perplexity
    80.0
    """

    number: int
    perplexity: float | None
    loss: float | None
    epsilon: float | None
    told: Releasable


class Federation:
    """A federation that is trained round by round, from Python.

    With a model of `fedlm.models` and without `method` it trains what `fedlm train` trains on the
    recipe that it saves in `out`.

    Args:
      store: a client store, from `prepare`.
      model: the result of a `fedlm.models` function, or an equinox module that maps tokens of shape
        (batch, seq) to logits of shape (batch, seq, vocabulary).
      cohort: the number of clients per round.
      rounds: the number of planned rounds, on which a privacy plan and a schedule depend.
      method: `fedavg(...)` with optax optimisers, which decide the settings of optimisers and
        weights; by default those of a recipe: SGD with `client__learning_rate` 0.5 and FedAdam with
        `server__learning_rate` 0.01.
      privacy: the settings of a recipe's `[privacy]` table, as a `Privacy` or a mapping; or a
        `PrivacyPlan` with the training clients, `cohort` and `rounds` of this federation.
      upload: the codec of updates by name, as `uniform-8`.
      download: the codec of models by name.
      out: the run directory. A privacy plan requires it, because every release is on record before
        it is yielded; otherwise the default is a folder that is removed at exit.
      seed: the seed of the model, the samples and the shuffles.
      **settings: further settings of a recipe as `table__key=value`, as `client__batch_size=8`.
        Tables of a tree (`federation__levels=(0,)`) need a model of `fedlm.models` and no `method`.

    Raises:
      ConfigError: a setting is unknown, out of range, contradicts another, or is decided by another
        argument.
      CorpusError: the store cannot be used.

    >>> store = prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> from fedlm.models import cifg
    >>> model = cifg(store, embedding_size=4, hidden_size=4)
    >>> fed = Federation(store, model, cohort=2, rounds=2, client__batch_size=4)
    >>> len(list(fed.rounds()))
    2
    """

    def __init__(
        self,
        store: Store,
        model: ModelSpec | eqx.Module,
        *,
        cohort: int,
        rounds: int,
        method: Averaging | None = None,
        privacy: Privacy | PrivacyPlan | JsonMapping | None = None,
        upload: str = "float32",
        download: str = "float32",
        out: str | Path | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        require(
            isinstance(model, ModelSpec | eqx.Module),
            "model",
            model,
            "a model of fedlm.models, as fedlm.models.cifg(store), or an equinox module",
        )
        require(
            method is None or isinstance(method, Averaging),
            "method",
            method,
            "fedlm.fedavg(...) or None",
            "client__method names a method of a recipe, as 'scaffold'.",
        )
        spec = model if isinstance(model, ModelSpec) else ModuleSpec(model)
        given: dict[str, JsonObject] = {
            "data": _text_settings(store),
            "model": _model_settings(spec, store),
            "server": {"cohort": cohort, "rounds": rounds},
            "wire": {"upload": upload, "download": download},
            "run": {"seed": seed},
        }
        _add_privacy(given, privacy)
        further = _by_table(settings)
        _check_further(further, given, spec, method)
        tables: dict[str, JsonObject] = {
            name: {**DEFAULTS.get(name, {}), **given.get(name, {}), **further.get(name, {})}
            for name in {**DEFAULTS, **given, **further}
        }
        if method is not None:
            private = tables.get("privacy", {}).get("mechanism") is not None
            weight = "uniform" if private else method.weight
            tables["client"] |= {"weight": weight, "proximal": method.proximal}
        recipe = parse(tables)
        noisy_leaves = recipe.federation is not None and recipe.federation.noise_multiplier > 0
        require(
            out is not None or not (recipe.privacy.mechanism or noisy_leaves),
            "out",
            out,
            "a run directory under a privacy plan: a release is on record before it is yielded",
        )
        path = Path(out) if out is not None else _temporary() / "run"
        _lanes(recipe.run.devices)
        self.run = build(recipe, STORES, out=path, own=_own_parts(spec, method))
        if isinstance(privacy, PrivacyPlan):
            _check_same_plan(privacy, self.run.plan)
        self._begun = False
        self._playing: Generator[Played, None, None] | None = None

    def rounds(self, count: int | None = None, *, resume: bool = False) -> Iterator[RoundReport]:
        """Train `count` further rounds, or all planned rounds, and yield a report of each.

        The loop may be left at any round; a second call continues from there.

        Args:
          count: the number of rounds to train; by default all that are left.
          resume: continue a run directory that another process began.

        Raises:
          ConfigError: `count` is below one.
          RecordError: the run directory cannot be used, or holds another run.
          DivergenceError: loss or parameters are no longer finite.
        """
        require(count is None or count >= 1, "count", count, "at least 1 round, or None for all")
        resume = resume or self._begun
        if self._playing is not None:
            self._playing.close()  # a loop that was left holds the directory no longer
        self._playing = play(self.run, resume=resume)
        # Left by `break`, it sets the directory free at once.
        with contextlib.closing(self._playing) as playing:
            for done, played in enumerate(playing, start=1):
                self._begun = True  # not before: a directory that was refused is not gone on with
                told = played.told
                yield RoundReport(
                    number=told["round"] + 1,
                    perplexity=told.get("perplexity"),
                    loss=told.get("loss"),
                    epsilon=told.get("epsilon"),
                    told=told,
                )
                if done == count:
                    return

    def finish(self) -> TrainedRun:
        """Write weights, final figures and report after the last round; return the finished run.

        Raises:
          ConfigError: rounds are missing.
        """
        summary = finish(self.run)
        if summary is None:
            raise ConfigError(
                f"{self.run.record.path}: rounds are missing. Play them with rounds(resume=True)."
            )
        return TrainedRun(self.run, summary)


# Where the defaults of a Federation are not those of a recipe. With a checkpoint after every round
# a loop can be left and resumed anywhere.
DEFAULTS: dict[str, JsonObject] = {
    "client": {},
    "server": {"evaluate_every": 1},
    "run": {"baselines": False, "trackers": (), "checkpoint_every": 1},
}
# What the optimisers of `fedavg(...)` decide.
BY_METHOD = {
    "client": (
        "optimizer",
        "learning_rate",
        "momentum",
        "weight_decay",
        "schedule",
        "warmup_rounds",
        "final_fraction",
        "gradient_clip_norm",
        "weight",
        "method",
        "proximal",
    ),
    "server": (
        "optimizer",
        "learning_rate",
        "momentum",
        "beta2",
        "adam_epsilon",
        "schedule",
        "warmup_rounds",
        "final_fraction",
    ),
}


def _text_settings(store: Store) -> JsonObject:
    """Return the settings that name a store."""
    if isinstance(store, JoinedStore):
        return {"stores": tuple(str(part.path) for part in store.parts)}
    return {"store": str(store.path)}


def _model_settings(spec: ModelSpec | ModuleSpec, store: Store) -> JsonObject:
    """Return the `[model]` table of a model; that of a module is empty."""
    if isinstance(spec, ModuleSpec):
        return {}
    size, named = spec.size, NAMED[spec.name or spec.architecture].size
    found = dict(spec.settings())
    if size.vocab != store.vocabulary:
        found["vocab"] = size.vocab
    if size.length != named.length:
        found["length"] = size.length
    return found


def _add_privacy(given: dict[str, JsonObject], privacy: object) -> None:
    """Add the settings of a privacy argument to the tables; a plan also says how to sample."""
    require(
        privacy is None or isinstance(privacy, (Privacy, PrivacyPlan, Mapping)),
        "privacy",
        privacy,
        "a Privacy, a mapping of its settings, a PrivacyPlan or None",
    )
    if isinstance(privacy, PrivacyPlan):
        numbers = _numbers_of(privacy)
        given["server"]["sampling"] = privacy.sampling.law
        given["privacy"] = {k: v for k, v in numbers.items() if k in Privacy.model_fields}
    elif isinstance(privacy, (Privacy, Mapping)):
        given["privacy"] = {k: v for k, v in dict(privacy).items() if v is not None}


def _numbers_of(plan: PrivacyPlan) -> JsonObject:
    """Return the numbers of a plan and of its sampling law by name."""
    return {**vars(plan.sampling), **{k: v for k, v in vars(plan).items() if k != "sampling"}}


def _check_same_plan(given: PrivacyPlan, made: PrivacyPlan | None) -> None:
    """Refuse a plan that is not the one which the settings of its federation make."""
    found = {} if made is None else _numbers_of(made)
    for name, value in _numbers_of(given).items():
        require(
            found.get(name) == value or (name == "matrix" and not value),  # found when a run begins
            f"privacy.{name}",
            value,
            f"{shown(found.get(name))}, as this federation has it",
            "Make the plan with that, or give a Privacy.",
        )


def _by_table(settings: Mapping[str, Any]) -> dict[str, JsonObject]:
    """Return settings that are given as `table__key=value`, by table."""
    found: dict[str, JsonObject] = {}
    for name, value in settings.items():
        table, _, key = name.partition("__")
        require(
            bool(table and key),
            name,
            value,
            "an argument of Federation, or a setting of a recipe as table__key=value",
            "An example is client__batch_size=8.",
        )
        found.setdefault(table, {})[key] = value
    return found


def _check_further(
    further: Mapping[str, JsonObject],
    given: Mapping[str, JsonObject],
    spec: ModelSpec | ModuleSpec,
    method: Averaging | None,
) -> None:
    """Refuse further settings that an argument of `Federation` decides, or cannot go with."""
    for table, values in further.items():
        for key, value in values.items():
            argument = "privacy" if table == "privacy" or key == "sampling" else key
            wanted = (
                f"nothing beside the argument {argument}"
                if key in given.get(table, {})
                else _unless_decided(table, key)
                or _unless_own_method(table, key, value, method)
                or _unless_module(table, key, value, spec)
            )
            if (table, key) == ("run", "checkpoint_every") and value != 1:
                wanted = "1: a loop that was left goes on from the last state that was saved"
            require(wanted is None, f"{table}__{key}", value, wanted or "", "Leave it out.")


def _unless_decided(table: str, key: str) -> str | None:
    """Return what is wanted in place of a setting that the store or the model decides."""
    if table == "data" and key in ("source", "store", "stores"):
        return "nothing beside the argument store"
    if table == "model" and key in ("name", *(field.name for field in fields(Dimensions))):
        return "nothing beside the argument model, which decides it"
    return "nothing: only fedlm tune reads it" if table == "tune" else None


def _unless_own_method(table: str, key: str, value: Any, method: Averaging | None) -> str | None:
    """Return what is wanted in place of a setting that a user's own method does not go with."""
    if method is None:
        return None
    if key in BY_METHOD.get(table, ()):
        return "nothing beside method=, which decides it"
    if (table, key) == ("wire", "trainable") and _part(value).exact_mean:
        return "another part beside method=: the server must step to the mean itself"
    return "nothing beside method=, whose federation is flat" if table == "federation" else None


def _unless_module(table: str, key: str, value: Any, spec: ModelSpec | ModuleSpec) -> str | None:
    """Return what is wanted in place of a setting that a user's own module cannot have."""
    if isinstance(spec, ModelSpec):
        return None
    if table == "model":
        return "nothing beside an equinox module, which decides its weights and sizes"
    if (table, key) == ("wire", "trainable") and _part(value).adapts:
        return "another part beside an equinox module, whose layers fedlm does not know"
    if (table, key) == ("run", "prompts"):
        return "nothing beside an equinox module, which the finished run's predict() asks"
    if table == "federation":
        return "nothing beside an equinox module, whose federation is flat"
    return None


def _part(trainable: object) -> PartKind:
    """Return what a choice of `wire.trainable` trains; of an unknown one, which is refused, all."""
    return TRAINABLE.get(str(trainable), TRAINABLE["all"])


def _own_parts(spec: ModelSpec | ModuleSpec, method: Averaging | None = None) -> OwnParts:
    """Return the parts that no recipe can name; none if there is neither a method nor a module."""
    options: JsonObject = {}
    names: dict[str, str] = {}
    if method is not None:
        options |= {"inner": method.client, "outer": method.server, "base": method.server}
        names["method"] = type(method).__name__
    if isinstance(spec, ModelSpec):
        return OwnParts(None, options, names)
    return OwnParts(spec, {**options, "loss": spec.loss}, {**names, "model": type(spec).__name__})


def _lanes(count: int) -> None:
    """Set the number of lanes; if JAX already runs, as in a notebook, warn instead."""
    try:
        use_devices(count)
    except ConfigError:
        if count or jax.device_count() == 1:
            warnings.warn(
                f"JAX already runs with {jax.device_count()} device(s) in this process. Call "
                "fedlm.use_devices() before JAX is first used, to train in a lane per core "
                "(in a notebook: restart the kernel).",
                stacklevel=3,
            )
