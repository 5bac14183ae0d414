"""Private selection: the best of a random number of private runs, and what it costs.

In:       a law of the number of runs and its mean; what one run releases.
Out:      a draw of that number; the event of releasing the best run alone.
Promise:  the cost is that of Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential
          Privacy" (2021), theorems 2 and 6, for the law that was drawn from. It holds only if the
          number of runs, and everything of every run but the best, stays secret.
Not here: training the runs (`sweep.py`).

A run of a setting that was itself drawn at random is a mixture; its Renyi divergence is at most
that of the setting with the largest, so settings with one privacy plan cost as one of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedlm.core.errors import require
from fedlm.core.late import late
from fedlm.privacy.cost import DpEvent

dp_accounting = late("dp_accounting")  # over a second

# By name: the shape of the truncated negative binomial law, infinite for the law of Poisson.
LAWS = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


def check(law: Any, mean: Any) -> None:
    """Refuse a law that is not known, or a mean below one run."""
    require(law in LAWS, "selection.law", law, f"one of {', '.join(LAWS)}")
    good = type(mean) in (int, float) and 1 <= mean < math.inf
    least = " above 1" if law == "logarithmic" else ", at least 1"
    require(
        good and (law != "logarithmic" or mean > 1),
        "selection.mean",
        mean,
        f"a mean number of runs{least}",
    )


def draw_number_of_runs(law: str, mean: float, rng: np.random.Generator) -> int:
    """Draw the number of runs; the law of Poisson may give none."""
    if law == "geometric":
        return int(rng.geometric(1 / mean))
    if law == "poisson":
        return int(rng.poisson(mean))
    return int(rng.logseries(1 - gamma_of_logarithmic(mean)))


def gamma_of_logarithmic(mean: float) -> float:
    """Return gamma of the logarithmic law with a mean: (1 / gamma - 1) / log(1 / gamma) = mean."""
    low, high = -745.0, -1e-12  # of log(gamma)
    for _ in range(200):
        middle = (low + high) / 2
        if math.expm1(-middle) / -middle > mean:
            low = middle
        else:
            high = middle
    return math.exp(high)


def event_of_best(event: DpEvent, law: str, mean: float) -> DpEvent:
    """Return the event of releasing the best of the runs, each of which is `event`."""
    return dp_accounting.dp_event.RepeatAndSelectDpEvent(event, mean, LAWS[law])
