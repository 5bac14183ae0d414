"""A recipe, carried out in a run directory.

In:       a recipe, a directory, somebody who watches.
Out:      a trained model in the directory, and a summary of the run.
Promise:  resumed after a kill at any moment, it ends with the same parameters as a run that was
          never interrupted; what happened is in the journal.
Not here: the loop (`run.py`), settings (`recipe`), printing (`cli`).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from fedlm.core import tree
from fedlm.core.errors import ConfigError, EngineError, RecordError, require
from fedlm.core.types import Params
from fedlm.corpus.tokenizer import kind_of
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.engine import multihost
from fedlm.federation.round import NodeState, init_node
from fedlm.inference import predict
from fedlm.models import catalog
from fedlm.privacy import account
from fedlm.recipe.branches import TreeExperiment
from fedlm.recipe.build import Experiment
from fedlm.recipe.settings import dump
from fedlm.record import checkpoint, report, tree_report
from fedlm.record.directory import RunDirectory, difference
from fedlm.record.journal import Journal, dumps
from fedlm.record.tensorboard import Board
from fedlm.run import Cadence, Facts, Hooks, loop, run

Summary = dict[str, Any]
VERSIONS = ("fedlm", "jax", "equinox", "optax", "tokenizers", "numpy")
STORE = ("clients_sha256", "tokenizer_sha256", "special_tokens")  # decide what a run learns from


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Whoever looks on: told of stages and rounds, asked whether to stop."""

    say: Callable[[str], None] = lambda text: None
    begin: Callable[[int, int, float | None], None] = lambda first, rounds, perplexity: None
    round: Callable[[Facts], None] = lambda facts: None
    stop: Callable[[], bool] = lambda: False


def train(
    experiment: Experiment, directory: RunDirectory, *, resume: bool, watcher: Watcher
) -> Summary | None:
    """Trains to the end and returns the summary; None if the watcher stopped it before."""
    _compare(experiment)
    goes_on = directory.claim(dump(experiment.recipe), resume=resume)
    if goes_on and directory.summary.is_file():
        watcher.say(f"{directory.path} is complete; nothing is left to train.")
        multihost.broadcast()
        done: Summary = json.loads(directory.summary.read_text(encoding="utf-8"))
        return done
    state = _state(experiment, directory, goes_on, watcher)
    if not multihost.alone():
        multihost.broadcast(checkpoint.to_bytes(state))
    state = _rounds(experiment, directory, state, watcher)
    if int(state.round) < experiment.rounds:
        return None
    return _close(experiment, directory, state, watcher)


def follow(experiment: Experiment, watcher: Watcher) -> bool:
    """The part of a process that is not the first: it computes its lanes and writes nothing.

    True if the run came to its end, False if it was stopped before.
    """
    _compare(experiment)
    told = multihost.broadcast()
    if not told:
        return True
    shapes = catalog.shapes(experiment.architecture, experiment.size)
    like = jax.eval_shape(lambda params: init_node(experiment.algorithm, params), shapes)
    state = checkpoint.from_bytes(told, like, "the state that process 0 sent")
    hooks = Hooks(
        evaluate=lambda state: {},
        record=lambda facts: None,
        keep=_check_equal,
        stop=lambda: multihost.agree(watcher.stop()),
    )
    state = _run(experiment, state, hooks)
    return int(state.round) == experiment.rounds


def _compare(experiment: Experiment) -> None:
    """Refuses to go on where this process would compute another experiment than process 0."""
    if multihost.alone():
        return
    recipe = experiment.recipe.model_dump(mode="json", exclude_none=True)
    require(recipe["run"]["engine"] == "mesh", "run.engine", "loop", "mesh for several processes")
    require("federation" not in recipe, "processes", "several", "one for a tree ([federation])")
    for table, name in (
        ("data", "source"),
        ("data", "store"),
        ("data", "stores"),
        ("model", "init_from"),
    ):
        recipe[table].pop(name, None)  # paths: hosts may keep the same text in other places
    recipe["data"]["tokenizer"] = kind_of(recipe["data"]["tokenizer"])
    manifest = experiment.store.manifest
    recipe["store"] = {f: manifest[f] for f in STORE}
    recipe["version"] = {name: _version(name) for name in VERSIONS}
    there = json.loads(multihost.broadcast(json.dumps(recipe).encode()))
    if there != recipe:
        raise ConfigError(
            f"this process would train something else than process 0 ({difference(there, recipe)}"
            "; there is process 0): start all processes with the same recipe and text."
        )
    multihost.meet()  # who differs does not come, and has said why


def _check_equal(state: NodeState) -> None:
    """Every process takes the server's step for itself; their states must not drift apart."""
    if not multihost.alone():
        mine = tree.sha256(state.params).encode()
        if multihost.agree(multihost.broadcast(mine) != mine):
            raise EngineError(
                f"after round {int(state.round)} the processes hold different parameters: their "
                "machines do not compute alike. Use machines of one kind."
            )


def _state(
    experiment: Experiment, directory: RunDirectory, goes_on: bool, watcher: Watcher
) -> NodeState:
    """The state to start from, with a journal that ends exactly there."""
    if goes_on and directory.checkpoints.is_dir():
        check_same(experiment, directory)
    fresh = experiment.init_node(experiment.init_params())
    journal = Journal(directory.journal)
    found = checkpoint.load_newest(directory.checkpoints, fresh, watcher.say) if goes_on else None
    if found is None:
        directory.journal.unlink(missing_ok=True)
        tokenizer = (experiment.store.path / "tokenizer.json").read_bytes()
        checkpoint.write_atomically(directory.tokenizer, tokenizer)
        named = special_tokens_map(experiment.store.tokenizer)
        checkpoint.write_atomically(directory.special_tokens, named)
        journal.append("header", **_header(experiment, directory, fresh))
        journal.sync()
        checkpoint.save(directory.checkpoints, 0, fresh)
        return fresh
    journal.rewind(int(found.round))
    watcher.say(f"{directory.path}: going on after round {int(found.round)}.")
    state: NodeState = found
    return state


def check_same(experiment: Experiment, directory: RunDirectory) -> None:
    """Refuses a recipe that was edited in the run, and a text that has changed since."""
    header = report.facts_of(directory.path).header
    # As a journal writes it: infinity has no place in JSON.
    recipe = json.loads(dumps(experiment.recipe.model_dump(mode="json", exclude_none=True)))
    if header["recipe"] != recipe:
        raise RecordError(
            f"{directory.path} was begun with another recipe "
            f"({difference(header['recipe'], recipe)}): undo the change, or begin another run."
        )
    if header.get("privacy") != json.loads(dumps(_promised(experiment))).get("privacy"):
        raise RecordError(
            f"{directory.path} was begun with another privacy plan than its recipe gives now: go "
            "on with the versions that its journal names."
        )
    store = experiment.store.manifest
    if any(header["store"].get(f, store[f]) != store[f] for f in STORE):
        raise RecordError(
            f"{directory.path} was begun on another text than {experiment.store.path} holds now: "
            "undo the change, or begin another run."
        )


def _header(experiment: Experiment, directory: RunDirectory, fresh: NodeState) -> Facts:
    recipe = experiment.recipe.model_dump(mode="json", exclude_none=True)
    return {
        "command": shlex.join(
            ["fedlm", "pretrain" if experiment.pooled else "train", str(directory.recipe)]
        ),
        "recipe": recipe,
        "store": {k: v for k, v in experiment.store.manifest.items() if k != "settings"},
        "parameters": experiment.parameters,
        **_promised(experiment),
        **experiment.shape_facts(),
        "start": experiment.look(fresh),
        "start_sha256": tree.sha256(fresh.params),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in VERSIONS},
            "machine": f"{platform.machine()}, {jax.device_count()} {jax.default_backend()} lanes",
        },
    }


def _promised(experiment: Experiment) -> Facts:
    """The plan, whole, so that the journal alone tells what a run may claim."""
    plan = experiment.plan
    if plan is None:
        return {}
    return {
        "privacy": asdict(plan),
        "privacy_budget": experiment.recipe.privacy.epsilon,
        "canaries": experiment.recipe.privacy.canaries,
        "unsafe_seed": experiment.recipe.privacy.seed is not None,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _rounds(
    experiment: Experiment, directory: RunDirectory, state: NodeState, watcher: Watcher
) -> NodeState:
    recipe, first = experiment.recipe, int(state.round)
    entries = report.facts_of(directory.path)
    if entries.rounds:
        experiment.engine.upload_bytes = entries.rounds[-1]["upload_bytes"]
        experiment.engine.download_bytes = entries.rounds[-1]["download_bytes"]
    journal = Journal(directory.journal)
    board = Board(directory.tensorboard, first) if recipe.run.tensorboard else None

    def record(facts: Facts) -> None:
        if experiment.plan is not None and "perplexity" in facts:
            facts["epsilon"] = account.spent(experiment.plan, facts["round"] + 1).epsilon
        journal.append("round", **facts)
        if board is not None:
            board.add(facts["round"], facts)
        watcher.round(facts)

    def keep(state: NodeState) -> None:
        _check_equal(state)
        journal.sync()  # a checkpoint counts on the rounds before it being told
        checkpoint.save(directory.checkpoints, int(state.round), state, recipe.run.keep_checkpoints)

    watcher.begin(first, experiment.rounds, entries.header["start"]["perplexity"])
    hooks = Hooks(
        evaluate=experiment.look,
        record=record,
        keep=keep,
        stop=lambda: multihost.agree(watcher.stop()),
    )
    try:
        return _run(experiment, state, hooks)
    finally:
        if board is not None:
            board.close()


def _run(experiment: Experiment, state: NodeState, hooks: Hooks) -> NodeState:
    recipe = experiment.recipe
    cadence = Cadence(
        rounds=experiment.rounds,
        evaluate_every=recipe.server.evaluate_every,
        checkpoint_every=recipe.run.checkpoint_every,
    )
    vocabulary = experiment.store.vocabulary
    if isinstance(experiment, TreeExperiment):
        branches: NodeState = loop(
            experiment.turn, state, cadence=cadence, hooks=hooks, vocabulary=vocabulary
        )
        return branches
    return run(
        experiment.algorithm,
        experiment.engine,
        state,
        seed=recipe.run.seed,
        cadence=cadence,
        hooks=hooks,
        vocabulary=vocabulary,
    )


def _close(
    experiment: Experiment, directory: RunDirectory, state: NodeState, watcher: Watcher
) -> Summary:
    """Weights, final figures, report and summary; all of it can be made again from a checkpoint."""
    watcher.say("evaluating on all held-out text")
    told = experiment.splits()
    # All other text belongs to training clients: under a plan it gives no figure without noise.
    private = experiment.plan is not None and not experiment.plan.reveal
    told = told[:1] if private else told
    splits = {split: experiment.judge(state, split) for split in told}
    baselines: dict[str, Any] = {}
    if experiment.recipe.run.baselines and not private:
        watcher.say("counting n-grams on the training tokens")
        baselines = experiment.baselines(splits)
    if experiment.rounds < experiment.recipe.server.rounds:
        watcher.say(
            f"The privacy budget ends here: round {experiment.rounds + 1} of "
            f"{experiment.recipe.server.rounds} would pass epsilon "
            f"{experiment.recipe.privacy.epsilon:g}. The model is kept."
        )
    journal = Journal(directory.journal)
    journal.rewind(int(state.round))
    models = experiment.models_of(state)
    first = next(iter(models.values()))
    predictions = [
        {"prompt": prompt, "next": predict(first, experiment.store.tokenizer, prompt)}
        for prompt in experiment.recipe.run.prompts
    ]
    claim = _claim(experiment, int(state.round))
    found = {**splits, **experiment.closing_facts(int(state.round))}
    journal.append("final", **found, baselines=baselines, predictions=predictions, privacy=claim)
    journal.sync()
    for name, params in models.items():
        save_weights(directory.weights_of(name), params, experiment)
    facts = report.facts_of(directory.path)
    for warning in tree_report.warnings(facts.header, facts.rounds):
        watcher.say(f"Warning: {warning}")
    checkpoint.write_atomically(directory.report, report.page([facts]).encode())
    summary = _summary(experiment, directory, state.params, facts)
    checkpoint.write_atomically(directory.summary, (dumps(summary) + "\n").encode())
    return summary


def _claim(experiment: Experiment, rounds: int) -> Facts | None:
    """What the run may claim, in numbers and words."""
    if experiment.plan is None:
        return None
    return account.spent(experiment.plan, rounds)._asdict()


def save_weights(path: Path, params: Params, experiment: Experiment) -> None:
    """The trained model for others: safetensors by leaf name, settings in the metadata."""
    model = experiment.recipe.model.model_dump_json()
    data = checkpoint.to_bytes(params, model=model, vocabulary=experiment.store.vocabulary)
    checkpoint.write_atomically(path, data)


def _summary(
    experiment: Experiment, directory: RunDirectory, params: Params, facts: report.Facts
) -> Summary:
    headline = facts.final.get("test") or facts.final.get("validation") or {}
    seconds = sum(r["seconds"] for r in facts.rounds)
    last = facts.rounds[-1] if facts.rounds else {}
    return {
        "run": str(directory.path),
        "rounds": len(facts.rounds),
        "perplexity": headline.get("perplexity"),
        "accuracy": headline.get("accuracy"),
        "tokens": facts.tokens,
        "upload_bytes": last.get("upload_bytes", 0),
        "download_bytes": last.get("download_bytes", 0),
        **_spent(facts),
        "params": experiment.parameters,
        "params_sha256": tree.sha256(params),
        "seconds": round(seconds, 3),
        "clients_per_second": sum(r["members"] for r in facts.rounds) / seconds
        if seconds
        else None,
        "start_perplexity": facts.header["start"]["perplexity"],
        "validation_perplexity": (facts.final.get("validation") or {}).get("perplexity"),
        "baselines": (facts.final.get("baselines") or {}).get("test")
        or (facts.final.get("baselines") or {}).get("validation"),
        "predictions": facts.final.get("predictions"),
        "report": str(directory.report),
        **({"nodes": headline["nodes"]} if "nodes" in headline else {}),
    }


def _spent(facts: report.Facts) -> Facts:
    if facts.header.get("privacy") is None:
        return {"epsilon": None, "delta": None}
    spent = account.from_journal(facts.header, facts.rounds)
    return {"epsilon": spent.epsilon, "delta": spent.delta}
