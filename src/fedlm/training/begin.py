"""The beginning of a run in its directory, or where it goes on.

In:       a `Run`, and whether its directory was begun before.
Out:      the state to play from; the first lines of journal and ledger, the first checkpoint.
Promise:  a run goes on only with the recipe, plan, text and frozen weights that it was begun with;
          afterwards its journal ends exactly at the state it goes on from.
Not here: claiming a directory (`record/directory.py`), what a crash of a private run left
          (`write_ahead.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import jax

from fedlm import lineage
from fedlm.core import tree
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.releasable import Releasable
from fedlm.core.types import FederationState, Say
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.federation.round import Metrics
from fedlm.models.adapters import without_adapters
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import release
from fedlm.recipe.settings import with_defaults
from fedlm.record import checkpoint
from fedlm.record.directory import difference
from fedlm.record.facts import facts_of
from fedlm.record.journal import Journal, dumps
from fedlm.run import Run
from fedlm.training.write_ahead import Resumed, WriteAhead

VERSIONS = ("fedlm", "jax", "equinox", "optax", "tokenizers", "numpy")
STORE = ("clients_sha256", "tokenizer_sha256", "special_tokens")  # decide what a run learns from


class Begun(NamedTuple):
    """The state that a run begins or goes on from."""

    state: FederationState
    rounds: int  # to be played in all
    ended: bool = False
    ahead: WriteAhead | None = None  # under a privacy plan
    missing: Releasable | None = None  # the facts of the last round, if the journal lacks them


def begin(run: Run, goes_on: bool, say: Say) -> Begun:
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
    found = checkpoint.load_newest(directory.checkpoints, fresh, say) if goes_on else None
    if found is None:
        return _begin_anew(run, fresh, ahead, say)
    check_frozen(run, fresh)
    if run.counted and not run.elsewhere:
        lineage.register_again(directory.path, run.store)
    round = int(found.state.round)
    say(f"{directory.path}: going on after round {round}.")
    resumed = Resumed(found.state, run.cadence.rounds)
    if ahead is not None:
        resumed = ahead.resume(found, say)
    Journal(directory.journal).rewind(round)
    resumed = unless_stopped(run, resumed)
    return Begun(*resumed, ahead, None if ahead is None else ahead.missing(found))


def _begin_anew(run: Run, fresh: FederationState, ahead: WriteAhead | None, say: Say) -> Begun:
    """Write what a run has before its first round: ledger, journal and the first checkpoint."""
    directory = run.record
    if ahead is not None:
        ahead.begin()
    directory.journal.unlink(missing_ok=True)
    tokenizer = (run.store.path / "tokenizer.json").read_bytes()
    write_atomically(directory.tokenizer, tokenizer)
    named = special_tokens_map(run.store.tokenizer)
    write_atomically(directory.special_tokens, named)
    if run.plan is not None:
        directory.make_salt()
    _begin_lineage(run, ahead)
    rounds = run.cadence.rounds
    if ahead is not None:
        rounds = ahead.affordable(0)
        ahead.check_budget(rounds, say)
    journal = Journal(directory.journal)
    journal.append(release(run.plan, "header", header_of(run, fresh)))
    journal.sync()
    checkpoint.save(directory.checkpoints, 0, fresh)
    return Begun(fresh, rounds, ahead=ahead)


def unless_stopped(run: Run, last: Resumed) -> Resumed:
    """Return a state as the last one if the run stopped early after it."""
    round = int(last.state.round)
    if facts_of(run.record.path).stopped_after != round:
        return last
    return last._replace(rounds=round, ended=True)


def _begin_lineage(run: Run, ahead: WriteAhead | None) -> None:
    """Write down what the run learns from and starts from, and register it in its store."""
    start = run.recipe.model.init_from or run.model.origin
    lineage.begin_lineage(
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
    return tree.sha256(without_adapters((run.unrounded or run.start)()))


def check_same(run: Run) -> None:
    """Raise `RecordError` if recipe, privacy plan or text changed since the run began."""
    path = run.record.path
    run.store.verify()
    header = _header_now(run)
    # Written and read as in a journal, because JSON has no infinity.
    recipe = json.loads(dumps(run.recipe.model_dump(mode="json", exclude_none=True)))
    before, here = with_defaults(header["recipe"]), with_defaults(recipe)
    if before != here:
        raise RecordError(
            f"{path} was begun with another recipe "
            f"({difference(before, here)}): undo the change, or begin another run."
        )
    now = json.loads(dumps(promised(run)))
    if any(header.get(name) != now.get(name) for name in ("privacy", "privacy_nodes")):
        raise RecordError(
            f"{path} was begun with another privacy plan than its recipe gives now: go on with the "
            "versions that its journal names."
        )
    there, now = header.get("custom", {}), dict(run.custom)
    if there != now:
        raise RecordError(
            f"{path} was begun with other parts than a recipe can name ({there or 'none'}, here "
            f"{now or 'none'}): go on from the program that began it, or begin another run."
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


def check_frozen(run: Run, fresh: FederationState) -> None:
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


def header_of(run: Run, fresh: FederationState) -> Metrics:
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
            **{name: version_of(name) for name in VERSIONS},
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


def version_of(name: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
