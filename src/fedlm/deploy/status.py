"""Who is there, and who answered.

In:       a federation's workspace, and perhaps a run directory.
Out:      one line per node.
Promise:  what the server knows now and what the run recorded; nothing is guessed.
Not here: printing (`cli`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from fedlm.deploy.flower.client import SuperLinkClient
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.workspace import Workspace

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
