"""fedlm trains language models on text that may not leave where it was written.

>>> import fedlm
>>> store = fedlm.prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
>>> model = fedlm.models.cifg(store, embedding_size=4, hidden_size=4)
>>> fed = fedlm.Federation(store, model, cohort=2, rounds=2, client__batch_size=4)
>>> for told in fed.rounds():
...     print(told.number, told.perplexity > 1)
1 True
2 True
>>> fed.finish().summary["rounds"]
2
"""

from fedlm import models as models
from fedlm.api import Averaging as Averaging
from fedlm.api import Federation as Federation
from fedlm.api import RoundReport as RoundReport
from fedlm.api import TrainedRun as TrainedRun
from fedlm.api import epsilon as epsilon
from fedlm.api import fedavg as fedavg
from fedlm.api import load_run as load_run
from fedlm.api import prepare as prepare
from fedlm.api import train as train
from fedlm.core.errors import ConfigError as ConfigError
from fedlm.core.errors import CorpusError as CorpusError
from fedlm.core.errors import DivergenceError as DivergenceError
from fedlm.core.errors import EngineError as EngineError
from fedlm.core.errors import FedlmError as FedlmError
from fedlm.core.errors import RecordError as RecordError
from fedlm.core.errors import WireError as WireError
from fedlm.core.types import Sampling as Sampling
from fedlm.corpus.store import Store as Store
from fedlm.engine.devices import use_devices as use_devices
from fedlm.privacy.plan import PrivacyPlan as PrivacyPlan
from fedlm.recipe.settings import Privacy as Privacy
from fedlm.recipe.settings import Recipe as Recipe
from fedlm.run import Run as Run

__all__ = [
    "Averaging",
    "ConfigError",
    "CorpusError",
    "DivergenceError",
    "EngineError",
    "epsilon",
    "fedavg",
    "Federation",
    "FedlmError",
    "load_run",
    "models",
    "prepare",
    "Privacy",
    "PrivacyPlan",
    "Recipe",
    "RecordError",
    "RoundReport",
    "Run",
    "Sampling",
    "Store",
    "train",
    "TrainedRun",
    "use_devices",
    "WireError",
]
