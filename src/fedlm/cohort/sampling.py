"""The laws by which members join a round.

In:       a `Sampling`, the generator of one round, who took part before.
Out:      member numbers in ascending order.
Promise:  drawn by the declared law from that generator and that history alone; never more than
          a few passes over the population, and for a fixed size not even one.
Not here: which clients exist (`corpus/store.py`), who really answered (an engine reports it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedlm.core.errors import require
from fedlm.core.types import History, Members, Sampling

NEVER = -(1 << 30)


def check_cohort(sampling: Sampling) -> None:
    """Refuses a cohort that the population cannot fill."""
    require(sampling.population > 0, "population", sampling.population, "at least one client")
    require(
        1 <= sampling.cohort <= sampling.population,
        "server.cohort",
        sampling.cohort,
        f"between 1 and the {sampling.population} training clients of this store",
        "Lower server.cohort or prepare more clients.",
    )


def no_history(sampling: Sampling) -> History:
    """Return the history before the first round; empty for laws that do not look back."""
    size = sampling.population if LAWS[sampling.law].looks_back else 0
    return History(np.full(size, NEVER, np.int32), np.zeros(size, np.int32))


def joined(history: History, members: Members, round: int) -> History:
    """The history after a round."""
    if len(history.last) == 0:
        return history
    last, times = history.last.copy(), history.times.copy()
    last[members] = round
    times[members] += 1
    return History(last, times)


def draw(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw the members of one round."""
    return LAWS[sampling.law].draw(sampling, rng, round, history)


def _fixed(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Exactly `cohort` clients, without replacement."""
    chosen = rng.choice(sampling.population, sampling.cohort, replace=False, shuffle=False)
    return np.sort(chosen)


def _poisson(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Each client by its own coin; `cohort` of them in expectation."""
    rate = sampling.cohort / sampling.population
    return np.flatnonzero(rng.random(sampling.population) < rate)


def _spaced(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Clients that rested long enough and may come again.

    Where participations are limited those who came least often go first, so that no round has to
    stay short because some clients used up their turns early.
    """
    rested = round - history.last.astype(np.int64) > sampling.min_separation
    if sampling.max_participations:
        rested &= history.times < sampling.max_participations
    free = np.flatnonzero(rested)
    if len(free) <= sampling.cohort:
        return free
    order = rng.random(len(free))
    if sampling.max_participations:
        order += history.times[free]
    return np.sort(free[np.argpartition(order, sampling.cohort - 1)[: sampling.cohort]])


class Law(NamedTuple):
    """How the members of a round are drawn, and whether that depends on who came before."""

    draw: Callable[[Sampling, np.random.Generator, int, History], Members]
    looks_back: bool = False


LAWS: dict[str, Law] = {
    "fixed": Law(_fixed),
    "poisson": Law(_poisson),
    "spaced": Law(_spaced, looks_back=True),
}
