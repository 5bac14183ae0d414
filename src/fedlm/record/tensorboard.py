"""Journal facts as TensorBoard files.

In:       a round's facts.
Out:      event files that TensorBoard reads.
Promise:  every finite number of a round appears as a scalar of the same name.
Not here: anything the journal does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class Board:
    """A writer of scalars; after a resume, later steps of the old file are hidden."""

    def __init__(self, folder: Path, first_round: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_round or None)

    def add(self, round: int, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(f"round/{name}", value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
