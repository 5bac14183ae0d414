"""Engines by name: those that train on text that is here.

In:       a name, as `run.engine` has it.
Out:      the class of an engine.
Promise:  every engine returns what the loop engine returns; one line adds an engine.
Not here: the engine whose members are elsewhere (`remote.py`).
"""

from __future__ import annotations

from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine

ENGINES: dict[str, type[LoopEngine] | type[MeshEngine]] = {"mesh": MeshEngine, "loop": LoopEngine}
