"""Who is there, and who answered.

In:       a federation's workspace, and perhaps a run directory.
Out:      one line per node.
Promise:  what the server knows now and what the run recorded; nothing is guessed.
Not here: printing (`cli`).
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from fedlm.core.documents import json_value
from fedlm.core.errors import SURPRISES, RecordError
from fedlm.deploy.flower.client import SuperLinkClient
from fedlm.deploy.workspace import Workspace
from fedlm.record.directory import PRIVATE_TALLIES, TALLIES

COUNTED = ("answered", "late", "away", "refused", "garbage", "aside")


def nodes_of(workspace: Workspace, run: Path | None) -> list[dict[str, Any]]:
    """Return a row per registered node: its presence, and its part in a run if one is given."""
    with closing(SuperLinkClient(workspace, timeout=2.0)) as client:
        there = client.nodes()
    rounds = [] if run is None else rounds_of(run)
    lines = []
    for name in sorted(workspace.nodes()):
        seen = there.get(name)
        counts = {
            what: sum(name in stats.get(what, ()) for stats in rounds) if rounds else None
            for what in COUNTED
        }
        lines.append(
            {
                "name": name,
                "there": "yes" if seen and seen.online else "no",
                "since": seen.since[:19] if seen and seen.since else None,
                **counts,
                "last": _last_words(name, rounds),
            }
        )
    return lines


def _last_words(name: str, rounds: list[dict[str, Any]]) -> str | None:
    """Return the reason why a node's latest reply could not be used."""
    for stats in reversed(rounds):
        if name in stats["answered"]:
            return None
        said = {**stats["refused"], **stats["garbage"]}
        if name in said:
            return f"round {stats['round']}: {said[name]}"
    return None


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """Read who answered in a run; under a privacy plan only the owner of the run can."""
    private = run / PRIVATE_TALLIES
    if os.path.isfile(private):  # others may not even look
        return read_rounds(private)
    rounds = read_rounds(run / TALLIES)
    if any("answered" not in entry for entry in rounds):
        raise RecordError(
            f"{run}: who answered is a secret of its owner under the run's privacy plan, in "
            f"{PRIVATE_TALLIES}, which is not here."
        )
    return rounds


def read_rounds(file: Path) -> list[dict[str, Any]]:
    """Read a run's `RoundStats` in order of rounds; a repeated round counts once, the latest."""
    if not file.is_file():
        raise RecordError(f"{file.parent} is not a run over a network: it has no {file.name}.")
    rounds: dict[int, dict[str, Any]] = {}
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{file} is not readable: {error.strerror}.") from None
    for line in lines:
        try:
            entry = json_value(line, "", RecordError)
            rounds[int(entry["round"])] = entry
        except (RecordError, *SURPRISES):
            continue  # an unfinished line of a killed process
    return [rounds[number] for number in sorted(rounds)]
