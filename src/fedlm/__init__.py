"""fedlm trains language models on text that may not leave where it was written.

>>> import fedlm
>>> fedlm.parse({"server": {"rounds": 3}}).server.rounds
3
"""

from fedlm.core.errors import ConfigError as ConfigError
from fedlm.core.errors import CorpusError as CorpusError
from fedlm.core.errors import DivergenceError as DivergenceError
from fedlm.core.errors import FedlmError as FedlmError
from fedlm.core.errors import RecordError as RecordError
from fedlm.core.errors import WireError as WireError
from fedlm.core.types import BatchSpec as BatchSpec
from fedlm.core.types import Codec as Codec
from fedlm.core.types import Engine as Engine
from fedlm.core.types import Sampling as Sampling
from fedlm.core.types import Total as Total
from fedlm.core.types import Update as Update
from fedlm.corpus.store import Store as Store
from fedlm.engine.loop import LoopEngine as LoopEngine
from fedlm.engine.mesh import MeshEngine as MeshEngine
from fedlm.federation.algorithm import Algorithm as Algorithm
from fedlm.federation.round import NodeState as NodeState
from fedlm.recipe.build import build as build
from fedlm.recipe.settings import Recipe as Recipe
from fedlm.recipe.settings import load as load
from fedlm.recipe.settings import parse as parse

__all__ = [
    "Algorithm",
    "BatchSpec",
    "build",
    "Codec",
    "ConfigError",
    "CorpusError",
    "DivergenceError",
    "Engine",
    "FedlmError",
    "load",
    "LoopEngine",
    "MeshEngine",
    "NodeState",
    "parse",
    "Recipe",
    "RecordError",
    "Sampling",
    "Store",
    "Total",
    "Update",
    "WireError",
]
