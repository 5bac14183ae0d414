"""A run, carried out in its directory.

In:       a `Run`, somebody who watches.
Out:      a trained model in the directory, and a summary of the run.
Promise:  resumed after a kill at any moment, it ends with the same parameters as a run that was
          never interrupted; what happened is in the journal, and what was released under a
          privacy plan is in the ledger before that; no two processes train in one directory;
          whenever a run begins or goes on, its text is compared with its hash.
Not here: the loop (`run.py`), making a run (`recipe`), printing (`cli`).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shlex
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax

from fedlm import lineage, node_runs, reporting
from fedlm.core import tree
from fedlm.core.documents import read_json
from fedlm.core.errors import ConfigError, EngineError, RecordError, require
from fedlm.core.releasable import Releasable
from fedlm.core.types import Params
from fedlm.corpus.tokenizer import kind_of
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.early_stopping import EarlyStopping
from fedlm.engine import multihost
from fedlm.extension import extend_rounds
from fedlm.federation.round import Metrics, NodeState, Played
from fedlm.inference import predict
from fedlm.models.adapters import merged, without_adapters
from fedlm.models.catalog import ModuleSpec
from fedlm.privacy.claim import ALWAYS, Claim
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import extend, release
from fedlm.recipe.settings import dump
from fedlm.record import checkpoint, tree_report
from fedlm.record.directory import difference
from fedlm.record.facts import Facts, facts_of
from fedlm.record.journal import Journal, dumps
from fedlm.record.trackers import TrackerContext, Trackers, check_installed
from fedlm.run import Hooks, Run, rounds
from fedlm.write_ahead import Resumed, WriteAhead

Summary = dict[str, Any]
VERSIONS = ("fedlm", "jax", "equinox", "optax", "tokenizers", "numpy")
STORE = ("clients_sha256", "tokenizer_sha256", "special_tokens")  # decide what a run learns from
SUMMED = ("upload_bytes", "download_bytes")


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Callbacks of a run: they are told of stages and rounds, and asked whether to stop."""

    say: Callable[[str], None] = lambda text: None
    begin: Callable[[int, int, float | None], None] = lambda first, rounds, perplexity: None
    round: Callable[[Releasable], None] = lambda told: None
    stop: Callable[[], bool] = lambda: False


def train(run: Run, *, resume: bool = False, watcher: Watcher = Watcher()) -> Summary | None:  # noqa: B008
    """Train to the end and return the summary; None if the watcher stopped the run."""
    _check_start(run)
    state = None
    with run.record.locked():
        for played in _play(run, resume, watcher):
            state = played.state
        return finish(run, state, watcher)


def play(
    run: Run,
    *,
    resume: bool = False,
    watcher: Watcher = Watcher(),  # noqa: B008
) -> Generator[Played, None, None]:
    """Begin or resume a run and yield its rounds, each after it is on record."""
    _check_start(run)
    with run.record.locked():
        yield from _play(run, resume, watcher)


def _check_start(run: Run) -> None:
    check_installed(run.recipe.run.trackers)
    compare_processes(run)
    recipe = run.recipe
    require(
        not (recipe.server.patience or recipe.run.keep_best) or bool(run.evaluation.splits()),
        "server.patience" if recipe.server.patience else "run.keep_best",
        recipe.server.patience or recipe.run.keep_best,
        "held-out text whose figures may be told, by which models are compared",
        "Under a privacy plan that is text of held-out clients: set data.test_clients.",
    )


def _play(run: Run, resume: bool, watcher: Watcher) -> Iterator[Played]:
    """Yield the rounds of a run whose directory is locked."""
    directory = run.record
    if resume:
        extend_rounds(run, watcher.say)
    goes_on = directory.claim(dump(run.recipe), resume=resume)
    if goes_on and directory.summary.is_file():
        watcher.say(f"{directory.path} is complete; nothing is left to train.")
        multihost.broadcast()
        return
    begun = _begin(run, goes_on, watcher)
    if not multihost.alone():
        multihost.broadcast(checkpoint.to_bytes(begun.state, rounds=begun.rounds))
    yield from _rounds(_as_far(run, begun.rounds), begun, watcher)


def _as_far(run: Run, rounds: int) -> Run:
    return replace(run, cadence=replace(run.cadence, rounds=rounds))


def finish(run: Run, state: Any = None, watcher: Watcher = Watcher()) -> Summary | None:  # noqa: B008
    """Close a run after its last round and return its summary; None if rounds are missing.

    If the last `state` is not given, it is read from the newest checkpoint.
    """
    directory = run.record
    if directory.summary.is_file():
        done: Summary = read_json(directory.summary, str(directory.summary), RecordError)
        if not isinstance(done, dict):
            raise RecordError(f"{directory.summary} is damaged: remove it, and repeat.")
        return done
    with directory.locked():
        last = _reload(run, watcher) if state is None else _played(run, state)
        if last is None or int(last.state.round) < last.rounds:
            return None
        return _close(_as_far(run, last.rounds), last, watcher)


def _played(run: Run, state: Any) -> Resumed:
    """Return the state of the round just played, and how many rounds the run has."""
    rounds = run.cadence.rounds
    if run.plan is not None:
        rounds = WriteAhead(run).affordable(int(state.round))
    return _unless_stopped(run, Resumed(state, rounds))


def _unless_stopped(run: Run, last: Resumed) -> Resumed:
    """Return a state as the last one if the run stopped early after it."""
    round = int(last.state.round)
    if facts_of(run.record.path).stopped_after != round:
        return last
    return last._replace(rounds=round, ended=True)


def _reload(run: Run, watcher: Watcher) -> Resumed | None:
    """Return the newest state on disk, and how many rounds the run has; None without a state."""
    directory, fresh = run.record, run.round.init(run.start())
    saved = checkpoint.load_newest(directory.checkpoints, fresh, watcher.say)
    if saved is None:
        return None
    _check_base(run, fresh)
    if run.plan is None:
        return _unless_stopped(run, Resumed(saved.state, run.cadence.rounds))
    ahead = WriteAhead(run)
    last = ahead.resume(saved, watcher.say)
    if ahead.missing(saved) is not None:  # nothing is played: this completes the journal alone
        here = _Begun(*last, ahead, ahead.missing(saved))
        for _ in _rounds(_as_far(run, int(saved.state.round)), here, watcher):
            pass
    return _unless_stopped(run, last)


# ---- several processes ---------------------------------------------------------------------


def follow(run: Run, watcher: Watcher) -> bool:
    """Compute the lanes of a process that is not the first, and write nothing.

    Return True if the run came to its end, False if it was stopped before.
    """
    compare_processes(run)
    told = multihost.broadcast()
    if not told:
        return True
    run.store.verify()
    like = jax.eval_shape(run.round.init, run.model.shapes())
    state, facts = checkpoint.saved_in(told, like, "the state that process 0 sent")
    run = _as_far(run, facts["rounds"])
    hooks = Hooks(
        commit=lambda state, told: None,
        evaluate=lambda state: {},
        record=lambda told: told,
        keep=_check_equal,
        stop=lambda: multihost.agree(watcher.stop()),
    )
    for played in rounds(run, state, hooks):
        state = played.state
    return int(state.round) == run.cadence.rounds


def compare_processes(run: Run) -> None:
    """Raise `ConfigError` if this process would compute another run than process 0."""
    if multihost.alone():
        return
    recipe = run.recipe.model_dump(mode="json", exclude_none=True)
    require(recipe["run"]["engine"] == "mesh", "run.engine", "loop", "mesh for several processes")
    require("federation" not in recipe, "processes", "several", "one for a tree ([federation])")
    patience = run.recipe.server.patience
    require(patience == 0, "server.patience", patience, "0 for several processes")
    for table, name in (
        ("data", "source"),
        ("data", "store"),
        ("data", "stores"),
        ("model", "init_from"),
    ):
        recipe[table].pop(name, None)  # paths: hosts may keep the same text in other places
    recipe["data"]["tokenizer"] = kind_of(recipe["data"]["tokenizer"])
    recipe["store"] = {f: run.store.manifest[f] for f in STORE}
    recipe["version"] = {name: _version(name) for name in VERSIONS}
    recipe["base"] = tree.sha256(run.algorithm.base)  # never sent, so it must be equal
    there = json.loads(multihost.broadcast(json.dumps(recipe).encode()))
    if there != recipe:
        raise ConfigError(
            f"this process would train something else than process 0 ({difference(there, recipe)}"
            "; there is process 0): start all processes with the same recipe and text."
        )
    multihost.meet()  # a process that differs has raised an error instead


def _check_equal(state: NodeState) -> None:
    """Raise `EngineError` if states of processes differ; each takes the server's step itself."""
    if not multihost.alone():
        mine = tree.sha256(state.params).encode()
        if multihost.agree(multihost.broadcast(mine) != mine):
            raise EngineError(
                f"after round {int(state.round)} the processes hold different parameters: their "
                "machines do not compute alike. Use machines of one kind."
            )


# ---- the beginning -------------------------------------------------------------------------


class _Begun(NamedTuple):
    """The state that a run begins or goes on from."""

    state: Any
    rounds: int  # to be played in all
    ended: bool = False
    ahead: WriteAhead | None = None  # under a privacy plan
    missing: Releasable | None = None  # the facts of the last round, if the journal lacks them


def _begin(run: Run, goes_on: bool, watcher: Watcher) -> _Begun:
    """Return the state to start from, and make the journal end exactly there."""
    directory = run.record
    ahead = None if run.plan is None else WriteAhead(run)
    if goes_on and ahead is not None:
        ahead.check_whole()
    if goes_on and directory.checkpoints.is_dir():
        check_same(run)
    else:
        run.store.verify()
    fresh = run.round.init(run.start())
    found = checkpoint.load_newest(directory.checkpoints, fresh, watcher.say) if goes_on else None
    if found is None:
        return _begin_anew(run, fresh, ahead, watcher)
    _check_base(run, fresh)
    if run.counted and not run.elsewhere:
        lineage.register_again(directory.path, run.store)
    round = int(found.state.round)
    watcher.say(f"{directory.path}: going on after round {round}.")
    resumed = Resumed(found.state, run.cadence.rounds)
    if ahead is not None:
        resumed = ahead.resume(found, watcher.say)
    Journal(directory.journal).rewind(round)
    resumed = _unless_stopped(run, resumed)
    return _Begun(*resumed, ahead, None if ahead is None else ahead.missing(found))


def _begin_anew(run: Run, fresh: Any, ahead: WriteAhead | None, watcher: Watcher) -> _Begun:
    """Write what a run has before its first round: ledger, journal and the first checkpoint."""
    directory = run.record
    if ahead is not None:
        ahead.begin()
    directory.journal.unlink(missing_ok=True)
    tokenizer = (run.store.path / "tokenizer.json").read_bytes()
    checkpoint.write_atomically(directory.tokenizer, tokenizer)
    named = special_tokens_map(run.store.tokenizer)
    checkpoint.write_atomically(directory.special_tokens, named)
    if run.plan is not None:
        directory.make_salt()
    _begin_lineage(run, ahead)
    rounds = run.cadence.rounds
    if ahead is not None:
        rounds = ahead.affordable(0)
        ahead.check_budget(rounds, watcher.say)
    journal = Journal(directory.journal)
    journal.append(release(run.plan, "header", header_of(run, fresh)))
    journal.sync()
    checkpoint.save(directory.checkpoints, 0, fresh)
    return _Begun(fresh, rounds, ahead=ahead)


def _begin_lineage(run: Run, ahead: WriteAhead | None) -> None:
    """Write down what the run learns from and starts from, and register it in its store."""
    start = run.recipe.model.init_from or ("python" if _given_module(run) else "")
    lineage.begin(
        run.record.path,
        run.store,
        run=lineage.new_run() if ahead is None else ahead.entries[0]["run"],
        private=run.plan is not None,
        start_sha256=start_sha256(run),
        start=start,
        elsewhere=run.elsewhere,
        register=run.counted,
    )


def start_sha256(run: Run) -> str:
    """Return the hash of the model that a run starts from, as the run that made it wrote it.

    Fresh adapters are no part of it: with them no start model would be recognised.
    """
    return tree.sha256(without_adapters(run.start()))


def _given_module(run: Run) -> bool:
    return isinstance(run.model, ModuleSpec)


def check_same(run: Run) -> None:
    """Raise `RecordError` if recipe, privacy plan or text changed since the run began."""
    path = run.record.path
    run.store.verify()
    header = _header_now(run)
    # Written and read as in a journal, because JSON has no infinity.
    recipe = json.loads(dumps(run.recipe.model_dump(mode="json", exclude_none=True)))
    if header["recipe"] != recipe:
        raise RecordError(
            f"{path} was begun with another recipe "
            f"({difference(header['recipe'], recipe)}): undo the change, or begin another run."
        )
    now = json.loads(dumps(promised(run)))
    if any(header.get(name) != now.get(name) for name in ("privacy", "privacy_nodes")):
        raise RecordError(
            f"{path} was begun with another privacy plan than its recipe gives now: go on with the "
            "versions that its journal names."
        )
    told, store = header["store"], store_facts(run, salted="salted_sha256" in header["store"])
    if any(told.get(f, store.get(f)) != store.get(f) for f in (*STORE, "salted_sha256")):
        raise RecordError(
            f"{path} was begun on another text than {run.store.path} holds now: undo the change, "
            "or begin another run."
        )


def _header_now(run: Run) -> Metrics:
    """Return a run's header with the rounds to which it was extended since."""
    facts = facts_of(run.record.path)
    if facts.rounds_planned is None:
        return facts.header
    rounds, header = {"rounds": facts.rounds_planned}, facts.header
    recipe = {**header["recipe"], "server": {**header["recipe"]["server"], **rounds}}
    plans = {"privacy": {**header["privacy"], **rounds}} if header.get("privacy") else {}
    if header.get("privacy_nodes"):
        plans["privacy_nodes"] = {k: {**p, **rounds} for k, p in header["privacy_nodes"].items()}
    return {**header, **plans, "recipe": recipe}


def _check_base(run: Run, fresh: Any) -> None:
    """Raise `RecordError` if the frozen part, which no checkpoint holds, has changed."""
    if run.algorithm.base is None:
        return
    begun = facts_of(run.record.path).header["start_sha256"]
    if tree.sha256(run.round.params(fresh)) != begun:
        raise RecordError(
            f"{run.record.path} began with another model than its recipe makes now, and its "
            "checkpoints hold the trained part alone: bring back the file of model.init_from, or "
            "begin another run."
        )


def header_of(run: Run, fresh: Any) -> Metrics:
    """Return the facts fixed before the first round: recipe, plan, text, model, versions."""
    return {
        "command": shlex.join(["fedlm", run.command, str(run.record.recipe)]),
        "recipe": run.recipe.model_dump(mode="json", exclude_none=True),
        "store": store_facts(run, salted=run.plan is not None),
        "parameters": run.model.parameters,
        **promised(run),
        **({"custom": dict(run.custom)} if run.custom else {}),
        **run.round.header(),
        "start": run.evaluation.watch(fresh),
        "start_sha256": tree.sha256(run.round.params(fresh)),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in VERSIONS},
            "machine": f"{platform.machine()}, {jax.device_count()} {jax.default_backend()} lanes",
        },
    }


def store_facts(run: Run, *, salted: bool) -> Metrics:
    """Return the manifest of the store without its settings, perhaps with a salted hash."""
    facts = {k: v for k, v in run.store.manifest.items() if k != "settings"}
    if run.store.settings.user_field is not None:
        facts["user_field"] = run.store.settings.user_field
    if salted:
        facts["salted_sha256"] = run.record.salted(facts["clients_sha256"])
    return facts


def promised(run: Run) -> Metrics:
    """Return the privacy plan of every federation of clients, from which the claim follows."""
    if run.plan is None:
        return {}
    privacy, tree = run.recipe.privacy, run.recipe.federation
    seed = tree.noise_seed if run.plan.unit == "leaf" else privacy.seed
    return {
        "privacy": asdict(run.plan),
        **({} if "" in run.plans else {"privacy_nodes": _by_node(run, asdict)}),
        "privacy_budget": privacy.epsilon,
        "canaries": privacy.canaries,
        "unsafe_seed": seed is not None,
    }


def _by_node(run: Run, of: Callable[[PrivacyPlan], Metrics]) -> Metrics:
    return {node: of(plan) for node, plan in run.plans.items()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# ---- rounds --------------------------------------------------------------------------------


def _rounds(run: Run, begun: _Begun, watcher: Watcher) -> Iterator[Played]:
    state, ahead, missing = begun.state, begun.ahead, begun.missing
    directory, first = run.record, int(state.round)
    entries = facts_of(directory.path)
    # Bytes in the journal are sums over rounds: a resumed run continues from the last line.
    so_far = dict.fromkeys(SUMMED, 0)
    if entries.rounds:
        so_far = {name: entries.rounds[-1][name] for name in SUMMED}
    journal = Journal(directory.journal)
    context = _tracker_context(run, first, entries.rounds)
    trackers = Trackers(run.recipe.run.trackers, context, watcher.say)
    watch = EarlyStopping(run.recipe.server.patience, entries.rounds)
    keeps_best = len(run.round.names) == 1 and (run.recipe.run.keep_best or watch.patience > 0)
    scored: dict[str, Any] = {}  # the state that was evaluated last
    heard = [first]  # rounds on record

    def record(told: Releasable) -> Releasable:
        more: Metrics = {name: so_far[name] + told[name] for name in SUMMED}
        so_far.update(more)
        if ahead is not None:
            more |= ahead.releases()
            if "perplexity" in told:
                claim = lineage.claim_of_run(directory.path, entries.header, [])
                more["epsilon"] = claim.epsilon if math.isfinite(claim.epsilon) else None
        told = extend(run.plan, told, more)
        if watch.hear(told) and keeps_best:  # before the journal: it promises the model
            _save_best(run, scored["state"])
        journal.append(told)
        heard[0] = told["round"] + 1
        trackers.log(told["round"], told)
        watcher.round(told)
        return told

    def evaluate(state: Any) -> Metrics:
        scored["state"] = state
        found, noisy = dict(run.evaluation.watch(state)), run.private_evaluation
        if noisy is not None and noisy.due(int(state.round), run.cadence.rounds):
            assert ahead is not None
            figures = noisy.figures(state)
            ahead.pay("evaluation", noisy.noise_multiplier)
            found["private_validation"] = figures
        return found

    def commit(state: Any, told: Releasable) -> None:
        assert ahead is not None
        journal.sync()  # rounds before a checkpoint must be in the journal
        ahead.commit(state, told)

    def keep(state: Any) -> None:
        _check_equal(state)
        journal.sync()
        if ahead is None:  # otherwise every round is saved before it is recorded
            most = run.recipe.run.keep_checkpoints
            checkpoint.save(directory.checkpoints, int(state.round), state, most)

    def stops(round: int) -> bool:
        """Write down that the run stops early after a round, if it does."""
        if not watch.exhausted or round == run.cadence.rounds:
            return False
        assert watch.best is not None
        best, patience = watch.best[0], watch.patience
        facts = {"round": round - 1, "patience": patience, "best_round": best}
        journal.append(release(run.plan, "stopped", facts))
        watcher.say(
            f"Stopping early after round {round}: no lower perplexity in {patience} evaluations; "
            f"the best was after round {best + 1}."
        )
        return True

    watcher.begin(first, run.cadence.rounds, entries.header["start"]["perplexity"])
    hooks = Hooks(
        commit=commit,
        evaluate=evaluate,
        record=record,
        keep=keep,
        stop=lambda: multihost.agree(stops(heard[0]) or watcher.stop()),
    )
    try:
        if missing is not None:
            due = run.cadence.evaluates(missing["round"])
            record(extend(run.plan, missing, evaluate(state)) if due else missing)
            if due and stops(first):
                return
        yield from rounds(run, state, hooks)
    finally:
        trackers.close()


def _save_best(run: Run, state: Any) -> None:
    """Write the model of a state as the best so far, and remember whose it is."""
    params = run.round.models(state)[""]
    node_runs.write_weights(run.record.best, params, run.recipe, run.store.vocabulary)
    lineage.add_models(run.record.path, run.store, [tree.sha256(merged(params))])


def _tracker_context(run: Run, first: int, earlier: list[Metrics]) -> TrackerContext:
    # Written and read as in a journal, because JSON has no infinity.
    recipe = json.loads(dumps(run.recipe.model_dump(mode="json", exclude_none=True)))
    return TrackerContext(
        directory=run.record.path,
        name=run.record.path.resolve().name,
        first_round=first,
        recipe=recipe,
        earlier=earlier,
    )


# ---- the end -------------------------------------------------------------------------------


def _close(run: Run, last: Resumed, watcher: Watcher) -> Summary:
    """Write weights, final figures, report and summary; all can be remade from a checkpoint."""
    directory, recipe, state = run.record, run.recipe, last.state
    watcher.say("evaluating on all held-out text")
    splits = {split: run.evaluation.final(state, split) for split in run.evaluation.splits()}
    counted: Metrics = {}
    if recipe.run.baselines:
        watcher.say("counting n-grams on the training tokens")
        counted = run.evaluation.baselines(list(splits))
    if run.cadence.rounds < recipe.server.rounds and not last.ended:
        watcher.say(
            f"The privacy budget ends here: round {run.cadence.rounds + 1} of "
            f"{recipe.server.rounds} would pass epsilon {recipe.privacy.epsilon:g}. The model is "
            "kept."
        )
    journal = Journal(directory.journal)
    journal.rewind(int(state.round))
    models = run.round.models(state)
    claim = _claim(run)
    if claim is not None:
        for said in (each for each in claim.not_covered if each not in ALWAYS):
            watcher.say(f"Not covered by the privacy claim: {said}.")
    final = {
        **splits,
        "baselines": counted,
        "predictions": _predictions(run, models[""]),
        "privacy": None if claim is None else {**claim.facts, **WriteAhead(run).releases()},
    }
    journal.append(release(run.plan, "final", final))
    journal.sync()
    own = run.round.own_models(state)
    # Of what `write_weights` writes.
    hashes = ([tree.sha256(merged(m)) for m in of.values()] for of in (models, own))
    lineage.add_models(directory.path, run.store, *hashes)
    node_runs.write_weights(directory.weights, models.pop(""), recipe, run.store.vocabulary)
    for name, params in models.items():
        _write_node(run, name, params, state, splits)
    for name, params in own.items():
        path = directory.own_weights_of(name)
        node_runs.write_weights(path, params, recipe, run.store.vocabulary, private=True)
    facts = facts_of(directory.path)
    for warning in tree_report.warnings(facts.header, facts.rounds):
        watcher.say(f"Warning: {warning}")
    checkpoint.write_atomically(directory.report, reporting.page_of([directory.path]).encode())
    summary = summary_of(run, run.round.params(state), facts)
    checkpoint.write_atomically(directory.summary, (dumps(summary) + "\n").encode())
    directory.forget_frozen()
    return summary


def _write_node(run: Run, name: str, params: Params, state: Any, splits: Metrics) -> None:
    """Write the model of a node of a tree, with its figures, as a run of its own."""
    figures = {
        split: next(node for node in found["nodes"] if node["name"] == name)
        for split, found in splits.items()
    }
    directory = run.record.node(name)
    node_runs.write_run(
        directory,
        params,
        run.node_recipes[name],
        run.store,
        rounds=int(state.round),
        final=figures,
        part_of={
            "run": run.record.path.resolve().name,
            "node": name,
            "private": run.plan is not None,
        },
        plan=run.plan,
    )


def _predictions(run: Run, params: Params) -> list[Metrics]:
    """Return the likeliest next words after the prompts of the recipe."""
    return [
        {"prompt": prompt, "next": predict(params, run.store.tokenizer, prompt)}
        for prompt in run.recipe.run.prompts
    ]


def _claim(run: Run) -> Claim | None:
    """Return the privacy claim of the run in numbers and words; None without a plan."""
    if run.plan is None:
        return None
    facts = facts_of(run.record.path)
    return lineage.claim_of_run(run.record.path, facts.header, facts.rounds)


def summary_of(run: Run, params: Params, facts: Facts) -> Summary:
    """Return the figures of a finished run, by the names that the command line prints."""
    headline = facts.final.get("test") or facts.final.get("validation") or {}
    seconds = sum(r["seconds"] for r in facts.rounds)
    last = facts.rounds[-1] if facts.rounds else {}
    counted = facts.final.get("baselines") or {}
    return {
        "run": str(run.record.path),
        "rounds": len(facts.rounds),
        "perplexity": headline.get("perplexity"),
        "accuracy": headline.get("accuracy"),
        "bits_per_byte": headline.get("bits_per_byte"),
        "tokens": facts.tokens,
        "upload_bytes": last.get("upload_bytes", 0),
        "download_bytes": last.get("download_bytes", 0),
        **_spent(facts),
        "params": run.model.parameters,
        "params_sha256": tree.sha256(params),
        "seconds": round(seconds, 3),
        "clients_per_second": sum(r["members"] for r in facts.rounds) / seconds
        if seconds
        else None,
        "start_perplexity": facts.header["start"]["perplexity"],
        **_best(facts, run),
        "validation_perplexity": (facts.final.get("validation") or {}).get("perplexity"),
        "baselines": counted.get("test") or counted.get("validation"),
        "predictions": facts.final.get("predictions"),
        "report": str(run.record.report),
        **({"nodes": headline["nodes"]} if "nodes" in headline else {}),
    }


def _best(facts: Facts, run: Run) -> Metrics:
    """Return when a run stopped early, and the figures of the best model if it keeps one."""
    found: Metrics = {}
    if facts.stopped_after is not None:
        found["stopped_early"] = facts.stopped_after
    best = EarlyStopping(0, facts.rounds).best
    if best is not None and run.record.best.is_file():
        found["best"] = {"round": best[0] + 1, "perplexity": best[1]}
    return found


def _spent(facts: Facts) -> Metrics:
    claim = facts.final.get("privacy") or {}
    return {"epsilon": claim.get("epsilon"), "delta": claim.get("delta")} | (
        {"privacy": claim["sentence"]} if claim else {}
    )
