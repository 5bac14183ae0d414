"""Engines by name: those that train on text that is here.

In:       a name, as `run.engine` has it.
Out:      what makes an engine of an algorithm, rows, a shape of batches and a seed.
Promise:  every engine returns what the loop engine returns; one line adds an engine.
Not here: the engine whose members are elsewhere (`remote.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from fedlm.core.types import Engine
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine

ENGINES: dict[str, Callable[..., Engine]] = {"mesh": MeshEngine, "loop": LoopEngine}
