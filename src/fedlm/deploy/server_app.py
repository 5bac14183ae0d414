"""A recipe, carried out over a federation's nodes.

In:       a federation's folder, a recipe, a run directory.
Out:      what `fedlm train` leaves: journal, checkpoints, report, model, summary.
Promise:  the same loop, round and record as in simulation, with the nodes in place of the mesh;
          nodes keep their assignments for the whole run, so that members keep their numbers; a run
          that was killed goes on from its checkpoint.
Not here: how such a run is put together (`networked_run.py`), sending (`engine/remote.py`).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fedlm.core.documents import read_text
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError
from fedlm.corpus.store import Store
from fedlm.deploy import history, member_list, registration
from fedlm.deploy.delivery import deliver
from fedlm.deploy.flower.client import open_transport
from fedlm.deploy.local import check_deployable, told_to_nodes
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.workspace import Workspace
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Quorum, RoundStats
from fedlm.engine.messages import RUN_NAME
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import hides, release
from fedlm.recipe import parts
from fedlm.recipe.settings import Recipe, dump, load, with_defaults
from fedlm.record.directory import ASSIGNMENTS, PRIVATE_ROUND_STATS, ROUND_STATS, RunDirectory
from fedlm.record.journal import dumps
from fedlm.run import Run
from fedlm.training import Summary, Watcher
from fedlm.training import train as carry_out
from fedlm.training.status import in_status

RUN_ID = "run.id"
# A node with a larger share of the weight, among at least so many nodes, is named.
HEAVY, LEAST_COMPARED = 0.9, 3


def train(
    workspace: Workspace,
    recipe: Recipe,
    path: Path,
    *,
    resume: bool,
    watcher: Watcher,
    stores: Path,
) -> Summary | None:
    """Train over the nodes and return the summary; None if the watcher stopped the run."""
    settings = workspace.settings
    quorum = Quorum(quorum=settings.quorum, deadline=settings.deadline)
    directory = RunDirectory(path)
    with (
        open_transport(workspace) as transport,
        directory.locked(),
        in_status(
            directory,
            watcher,
            recipe.server.evaluate_every,
            home=workspace.path,
            secret=_has_plan(recipe),  # the plan itself is made when nodes have registered
        ) as watcher,
    ):
        check_deployable(recipe)
        history.note(workspace.history, "train", run=str(path), resume=resume)
        recipe = with_tokenizer(recipe, workspace)
        store = server_store(recipe, stores)
        resolved = parts.resolve(recipe, store)
        goes_on = directory.claim(dump(resolved), resume=resume, complete=with_defaults)
        watcher.claimed()
        counters = Counters(workspace.counters)
        assignments = (
            registration.load_assignments(directory.path / ASSIGNMENTS) if goes_on else None
        )
        if assignments is None:
            tokens = store.tokens_sha256
            same = registration.same_tokenizer(tokens, f"the server's store {store.path}")
            check = registration.heard(counters, same, watcher.say)
            assignments = registration.assign_members(
                transport, sorted(workspace.nodes()), check, watcher.say, quorum
            )
            registration.save_assignments(directory.path / ASSIGNMENTS, assignments)

        def on_stats(stats: RoundStats) -> None:
            record_nodes(directory, stats, run.plan, len(assignments), watcher.say)

        members = member_list.current(workspace).members if resolved.wire.secure_nodes else ()
        run = networked_run(
            resolved,
            store,
            assignments,
            path,
            transport=transport,
            quorum=quorum,
            on_stats=on_stats,
            run_id=run_id(directory),
            counters=counters,
            say=watcher.say,
            secure_members=members,
        )
        registration.keep_told(directory.path, told_to_nodes(resolved, run.algorithm))
        if hides(run.plan):
            watcher.say(
                "Which nodes are asked stays secret under the plan: it is in "
                f"{PRIVATE_ROUND_STATS} of {directory.path}, for you alone, and "
                "fedlm federation status --run shows it."
            )
        summary = carry_out(run, resume=True, watcher=watcher)  # the directory was claimed above
        if summary is not None:
            kept = deliver(
                run,
                assignments,
                transport,
                run_id=run_id(directory),
                counters=counters,
                deadline=settings.deadline,
                say=watcher.say,
            )
            watcher.say(f"nodes that have their models: {', '.join(kept) or 'none'}")
        return summary


def _has_plan(recipe: Recipe) -> bool:
    """Return whether a recipe asks for privacy, of clients or of a tree's leaves."""
    leaves = recipe.federation is not None and recipe.federation.noise_multiplier > 0
    return recipe.privacy.mechanism is not None or leaves


def deliver_again(
    workspace: Workspace, path: Path, *, only: str, stores: Path, say: Callable[[str], None]
) -> list[str]:
    """Send the models of a finished run to its nodes once more; return who keeps them."""
    directory = RunDirectory.existing(path).finished()
    assignments = registration.load_assignments(directory.path / ASSIGNMENTS)
    if assignments is None:
        raise ConfigError(f"{path} has no {ASSIGNMENTS}: it is no run over a federation's nodes.")
    run = again(load(directory.recipe), directory, stores)
    with open_transport(workspace) as transport:
        return deliver(
            run,
            assignments,
            transport,
            run_id=run_id(directory),
            counters=Counters(workspace.counters),
            deadline=workspace.settings.deadline,
            only=only,
            say=say,
        )


def again(recipe: Recipe, directory: RunDirectory, stores: Path) -> Run:
    """Return the run of a directory for inspection, without contacting nodes."""
    store = server_store(recipe, stores)
    assignments = registration.load_assignments(directory.path / ASSIGNMENTS) or ()
    return networked_run(parts.resolve(recipe, store), store, assignments, directory.path)


def with_tokenizer(recipe: Recipe, workspace: Workspace) -> Recipe:
    """Return a recipe that names neither text nor tokenizer with the federation's tokenizer."""
    data = recipe.data
    named = not parts.names_no_text(data) or "tokenizer" in data.model_fields_set
    if named or not workspace.tokenizer.is_file():
        return recipe
    said = {name: value for name, value in data if name in data.model_fields_set}
    told = type(data)(**{**said, "tokenizer": str(workspace.tokenizer.resolve())})
    return recipe.model_copy(update={"data": told})


def server_store(recipe: Recipe, stores: Path) -> Store:
    """Return the server's store: the one its recipe names, or one of a tokenizer without text."""
    data = recipe.data
    opened = parts.tokenizer_store if parts.names_no_text(data) else parts.open_store
    return opened(data, stores)


def run_id(directory: RunDirectory) -> str:
    """Return the name of a run to its nodes, drawn when the run began and kept with it."""
    file = directory.path / RUN_ID
    if file.is_file():
        name = read_text(file, str(file), RecordError).strip()
        if not RUN_NAME.fullmatch(name):
            raise RecordError(f"{file} is damaged: it is not the name of a run.")
        return name
    drawn = secrets.token_hex(16)
    write_atomically(file, drawn.encode())
    return drawn


def record_nodes(
    directory: RunDirectory,
    stats: RoundStats,
    plan: PrivacyPlan | None,
    nodes: int,
    say: Callable[[str], None],
) -> None:
    """Append a line on which nodes answered a round, and report the nodes that did not.

    The file lies beside the journal, which is about the model only. Under a plan names go to a file
    that only its owner can see, and nothing is said: what is told is fixed before the run.
    """
    told = release(plan, "nodes", asdict(stats), lambda: {"nodes": nodes})
    with open(directory.path / ROUND_STATS, "a", encoding="utf-8") as file:
        file.write(dumps(dict(told)) + "\n")
    if hides(plan):
        path = directory.path / PRIVATE_ROUND_STATS
        path.parent.mkdir(mode=0o700, exist_ok=True)
        private = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(private, "a", encoding="utf-8") as file:
            os.fchmod(private, 0o600)
            file.write(json.dumps(asdict(stats)) + "\n")
        return
    for name, reason in {**stats.refused, **stats.garbage}.items():
        say(f"round {stats.round}: {name}: {reason}")
    missing = [*stats.away, *stats.late, *stats.aside]
    if missing:
        say(f"round {stats.round}: without {', '.join(missing)}")
    for name, until in stats.put_aside.items():
        say(
            f"{name} is put aside until round {until}: in several rounds in a row it was late, or "
            "what it sent could not be used"
        )
    heaviest = max(stats.weights, key=stats.weights.__getitem__, default="")
    share = stats.weights.get(heaviest, 0.0) / (sum(stats.weights.values()) or 1.0)
    if len(stats.weights) >= LEAST_COMPARED and share > HEAVY:
        say(
            f"round {stats.round}: {heaviest} says that it has {share:.1%} of all weight: it moves "
            "the model nearly alone. client.weight = 'uniform' or client.max_examples bounds it."
        )
