"""A run that several processes compute together.

In:       a `Run` in each process; what process 0 sends.
Out:      whether the run came to its end; an error where processes differ.
Promise:  only process 0 writes; processes that would compute something else than process 0, or hold
          other parameters after a round, stop.
Not here: lanes over processes (`engine/multihost.py`).
"""

from __future__ import annotations

import json

import jax

from fedlm.core import tree
from fedlm.core.errors import ConfigError, EngineError, require
from fedlm.corpus.tokenizer import kind_of
from fedlm.engine import multihost
from fedlm.federation.round import NodeState
from fedlm.record import checkpoint
from fedlm.record.directory import difference
from fedlm.run import Hooks, Run, rounds
from fedlm.training.begin import STORE, VERSIONS, version_of
from fedlm.training.watcher import Watcher


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
    run = run.until(facts["rounds"])
    hooks = Hooks(
        commit=lambda state, told: None,
        evaluate=lambda state: {},
        record=lambda told: told,
        keep=check_equal,
        stop=lambda: multihost.agree(watcher.stop()),
    )
    for played in rounds(run, state, hooks):
        state = played.state
    return int(state.round) == run.cadence.rounds


def compare_processes(run: Run) -> None:
    """Raise `ConfigError` if this process would compute another run than process 0."""
    if multihost.alone():
        return
    alone, patience = run.round.topology is None, run.cadence.patience
    require(alone, "processes", "several", "one for a tree ([federation])")
    require(patience == 0, "server.patience", patience, "0 for several processes")
    recipe = run.recipe.model_dump(mode="json", exclude_none=True)
    for table, name in (
        ("data", "source"),
        ("data", "store"),
        ("data", "stores"),
        ("model", "init_from"),
    ):
        recipe[table].pop(name, None)  # paths: hosts may keep the same text in other places
    recipe["data"]["tokenizer"] = kind_of(recipe["data"]["tokenizer"])
    recipe["store"] = {f: run.store.manifest[f] for f in STORE}
    recipe["version"] = {name: version_of(name) for name in VERSIONS}
    recipe["base"] = tree.sha256(run.algorithm.base)  # never sent, so it must be equal
    there = json.loads(multihost.broadcast(json.dumps(recipe).encode()))
    if there != recipe:
        raise ConfigError(
            f"this process would train something else than process 0 ({difference(there, recipe)}"
            "; there is process 0): start all processes with the same recipe and text."
        )
    multihost.meet()  # a process that differs has raised an error instead


def check_equal(state: NodeState) -> None:
    """Raise `EngineError` if states of processes differ; each takes the server's step itself."""
    if not multihost.alone():
        mine = tree.sha256(state.params).encode()
        if multihost.agree(multihost.broadcast(mine) != mine):
            raise EngineError(
                f"after round {int(state.round)} the processes hold different parameters: their "
                "machines do not compute alike. Use machines of one kind."
            )
