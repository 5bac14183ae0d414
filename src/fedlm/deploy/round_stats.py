"""Who answered in the rounds of a run, on disk.

In:       a run directory.
Out:      a `RoundStats` per round, as it was recorded.
Promise:  a round that was played again after a kill counts once, as it was played last; under a
          privacy plan only the owner of a run can read who was asked.
Not here: writing (`server_app.py`), tables for people (`status.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedlm.core.documents import json_value
from fedlm.core.errors import SURPRISES, RecordError
from fedlm.record.directory import PRIVATE_ROUND_STATS, ROUND_STATS


def earlier_rounds(run: Path) -> list[dict[str, Any]]:
    """Return who answered in the rounds of a run so far; nothing if none was played."""
    try:
        return rounds_of(run)
    except RecordError:
        return []


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """Read who answered in a run; under a privacy plan only the owner of the run can."""
    private = run / PRIVATE_ROUND_STATS
    if os.path.isfile(private):  # others may not even look
        return read_rounds(private)
    rounds = read_rounds(run / ROUND_STATS)
    if any("answered" not in entry for entry in rounds):
        raise RecordError(
            f"{run}: who answered is a secret of its owner under the run's privacy plan, in "
            f"{PRIVATE_ROUND_STATS}, which is not here."
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
