"""How long members take to answer, in a simulation.

In:       a law by name, its mean and shape, a seed.
Out:      the seconds from asking a member to its answer.
Promise:  drawn from (seed, round, member) alone, so that a resumed or reordered run sees the same
          delays; every law has the stated mean.
Not here: what a late answer is worth (`federation/buffered_round.py`), real clocks (`engine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedlm.core.keys import generator_for
from fedlm.core.types import Members


class DelayLaw(NamedTuple):
    """A law of delays with mean one, and the least shape that it takes (None: it has no shape)."""

    draw: Callable[[np.random.Generator, float], float]
    above: float | None = None


DELAYS: dict[str, DelayLaw] = {
    "none": DelayLaw(lambda rng, shape: 0.0),
    "exponential": DelayLaw(lambda rng, shape: float(rng.exponential())),
    "lognormal": DelayLaw(
        lambda rng, shape: math.exp(shape * float(rng.standard_normal()) - shape * shape / 2), 0.0
    ),
    # The chance of a delay above x falls like x to the power of -shape; below 1 it has no mean.
    "pareto": DelayLaw(
        lambda rng, shape: (1 + float(rng.pareto(shape))) * (shape - 1) / shape, 1.0
    ),
}


@dataclass(frozen=True, kw_only=True)
class Delays:
    """The delays of a run's members.

    >>> Delays(law="pareto", seconds=2.0, shape=1.5).of(3, np.arange(2)).shape
    (2,)
    """

    law: str = "none"  # a name in `DELAYS`
    seconds: float = 1.0  # the mean
    shape: float = 1.5
    by_client: bool = False  # drawn once per client, not anew for each of its turns
    seed: int = 0

    def of(self, round: int, members: Members) -> np.ndarray:
        """Return the seconds that members take who are asked in a round, as float32."""
        return np.array([self._one(round, int(m)) for m in members], np.float32)

    def _one(self, round: int, member: int) -> float:
        at = 0 if self.by_client else round
        rng = generator_for(self.seed, "delay", round=at, member=member)
        return self.seconds * DELAYS[self.law].draw(rng, self.shape)
