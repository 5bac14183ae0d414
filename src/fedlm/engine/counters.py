"""How far the ledgers of nodes had come when they were last heard of.

In:       the counter in each hello and reply of a node.
Out:      the largest one per node, which every request to that node repeats.
Promise:  a number never falls, and survives a restart where there is a file; only the owner can
          read it, because it tells how often a node was asked.
Not here: what a ledger holds (`deploy/node_ledger.py`), what a node does that is behind
          (`deploy/node_worker.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError


class Counters:
    """The largest counter that each node has told.

    >>> counters = Counters()
    >>> counters.hear("north", 3), counters.hear("north", 2)
    (None, None)
    >>> counters.of("north"), counters.of("south")
    (3, 0)
    """

    def __init__(self, file: Path | None = None) -> None:
        """Read the counters of a file, which is written at every change; None keeps no file."""
        self.file = file
        self._largest = {} if file is None else _read(file)

    def of(self, node: str) -> int:
        """Return the largest counter that a node has told; 0 if it never told one."""
        return self._largest.get(node, 0)

    def hear(self, node: str, counter: int) -> None:
        """Record a node's counter if it is larger than before."""
        if counter <= self.of(node):
            return
        self._largest[node] = counter
        if self.file is not None:
            write_atomically(self.file, json.dumps(self._largest).encode(), private=True)


def _read(file: Path) -> dict[str, int]:
    if not file.is_file():
        return {}
    try:
        found = read_json(file, "it", RecordError)
        if not all(type(value) is int and value >= 0 for value in found.values()):
            raise ValueError("a counter is no number")
        return dict(found)
    except (ValueError, AttributeError, RecordError) as error:
        raise RecordError(
            f"{file} is damaged: {error}. It holds how far the ledgers of nodes had come: remove "
            "it only if you know that no node came back with an older ledger."
        ) from None
