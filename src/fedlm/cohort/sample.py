"""The laws by which members join a round.

In:       a `Sampling` and the generator of one round.
Out:      member numbers in ascending order.
Promise:  drawn by the declared law from that generator alone; the cost does not need more
          than one pass over the population, and for a fixed size not even that.
Not here: which clients exist (`corpus/store.py`), who really answered (an engine reports it).
"""

from __future__ import annotations

import numpy as np

from fedlm.core.errors import require
from fedlm.core.types import Members, Sampling


def check(sampling: Sampling) -> None:
    """Refuses a cohort that the population cannot fill."""
    require(sampling.population > 0, "population", sampling.population, "at least one client")
    require(
        1 <= sampling.cohort <= sampling.population,
        "server.cohort",
        sampling.cohort,
        f"between 1 and the {sampling.population} training clients of this store",
        "Lower server.cohort or prepare more clients.",
    )


def draw(sampling: Sampling, rng: np.random.Generator) -> Members:
    """The members of one round."""
    if sampling.law == "poisson":
        rate = sampling.cohort / sampling.population
        return np.flatnonzero(rng.random(sampling.population) < rate)
    chosen = rng.choice(sampling.population, sampling.cohort, replace=False, shuffle=False)
    return np.sort(chosen)
