"""More rounds for a run that has ended.

In:       a run built with a larger `server.rounds` than its directory was begun with.
Out:      the directory, made ready to go on; a line in its journal.
Promise:  an extended run ends with the parameters of a run that had all rounds from its start; what
          cannot keep that promise, or a privacy plan whose account does not cover more rounds, is
          refused with the reason before anything changes.
Not here: playing the rounds (`rounds.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError, require
from fedlm.core.types import FederationState
from fedlm.privacy.catalog import may_grow
from fedlm.privacy.release import release
from fedlm.recipe.settings import dump, with_defaults
from fedlm.record import checkpoint
from fedlm.record.journal import Journal
from fedlm.run import Run


def extend_rounds(run: Run, say: Callable[[str], None]) -> None:
    """Make a directory go on to more rounds if its recipe has fewer and differs in nothing else."""
    directory = run.record
    if not directory.recipe.is_file():
        return
    here, there = tomllib.loads(dump(run.recipe)), with_defaults(directory.read_recipe())
    before, rounds = _rounds(there), _rounds(here)
    if before == rounds or _without_rounds(there) != _without_rounds(here):
        return
    _check(run, before, rounds)
    # The journal first: whoever reads the new recipe finds out why it has other rounds.
    told = release(run.plan, "extended", {"before": before, "rounds": rounds})
    journal = Journal(directory.journal)
    journal.append(told)
    journal.sync()
    directory.summary.unlink(missing_ok=True)
    write_atomically(directory.recipe, dump(run.recipe).encode())
    say(f"{directory.path}: extended from {before} to {rounds} rounds.")


def _rounds(tables: JsonMapping) -> Any:
    server = tables.get("server")
    return server.get("rounds") if isinstance(server, dict) else None


def _without_rounds(tables: JsonMapping) -> JsonObject:
    server = tables.get("server")
    kept = {k: v for k, v in server.items() if k != "rounds"} if isinstance(server, dict) else None
    return {**tables, "server": kept}


def _check(run: Run, before: FederationState, rounds: int) -> None:
    path, cadence = run.record.path, run.cadence
    require(
        type(before) is int and rounds > before,
        "server.rounds",
        rounds,
        f"more than the {before} rounds with which {path} was begun",
        "Its rounds cannot be taken back: begin another run.",
    )
    for setting, law in cadence.schedules.items():
        require(
            law == "constant",
            setting,
            law,
            f"'constant' to extend {path}: the learning rate of its rounds was made for {before}",
            "Begin another run with model.init_from.",
        )
    require(
        not cadence.patience,
        "server.patience",
        cadence.patience,
        f"0 to extend {path}: when it stops depends on figures of rounds that a longer run has not",
        "Begin another run with model.init_from.",
    )
    require(
        not run.elsewhere,
        "server.rounds",
        rounds,
        f"{before}, because the nodes of {path} agreed to so many",
        "Begin another run with model.init_from.",
    )
    for plan in run.plans.values():
        require(
            may_grow(plan) and not cadence.calibrated,
            "server.rounds",
            rounds,
            f"{before}: the privacy plan of {path} ({plan.mechanism} noise, "
            f"{plan.sampling.law} sampling) was made for so many rounds, and its account covers no "
            "more",
            "Independent noise of a given privacy.noise_multiplier with poisson or fixed sampling "
            "can be extended.",
        )
    if not checkpoint.newest_first(run.record.checkpoints):
        raise RecordError(f"{path} has no checkpoint to go on from: begin another run.")
