"""The laws by which members join a round.

In:       a `Sampling`, the generator of one round, the history of participations.
Out:      member numbers in ascending order.
Promise:  drawn by the declared law from that generator and that history alone; never more than
          a few passes over the population, and for a fixed size not even one.
Not here: which clients exist (`corpus/store.py`), which members answered (an engine reports it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedlm.core.keys import generator_for
from fedlm.core.types import History, Members, Sampling

NEVER = -(1 << 30)


def no_history(sampling: Sampling) -> History:
    """Return the history before the first round; empty for laws that do not look back."""
    size = sampling.population if LAWS[sampling.law].looks_back else 0
    return History(np.full(size, NEVER, np.int32), np.zeros(size, np.int32))


def joined(history: History, members: Members, round: int) -> History:
    """Return the history after a round."""
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
    """Draw exactly `cohort` clients without replacement."""
    chosen = rng.choice(sampling.population, sampling.cohort, replace=False, shuffle=False)
    return np.sort(chosen)


def _poisson(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw each client independently, `cohort` clients in expectation."""
    rate = sampling.cohort / sampling.population
    return np.flatnonzero(rng.random(sampling.population) < rate)


def _spaced(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw among the clients that rested long enough and have participations left.

    If participations are limited, the clients that took part least often go first, so that no
    round stays short because some clients used up their turns early.
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


def _cyclic_poisson(
    sampling: Sampling, rng: np.random.Generator, round: int, history: History
) -> Members:
    """Draw each client of the group whose turn it is independently, `cohort` in expectation.

    Clients are dealt into min_separation + 1 groups that take turns, so a client rests at least
    `min_separation` rounds whatever its coins say. The deal is public: privacy rests on coins.
    """
    groups = sampling.min_separation + 1
    group = _dealt(sampling.population)[round % groups :: groups]
    rate = sampling.cohort * groups / sampling.population
    return np.sort(group[rng.random(len(group)) < rate]).astype(np.int64)


@functools.lru_cache(maxsize=8)
def _dealt(population: int) -> np.ndarray:
    """Return the clients in the order in which they are dealt, the same in every round and run."""
    return generator_for(0, "deal", member=population).permutation(population).astype(np.int32)


def _balls_in_bins(
    sampling: Sampling, rng: np.random.Generator, round: int, history: History
) -> Members:
    """Draw the clients of one bin: by chance in its first round, and the same ones ever after.

    A client falls into each of the min_separation + 1 bins with chance cohort / population. Round
    by round: of those who are in no earlier bin, each is in this one with that chance over what is
    left.
    """
    bins, rate = sampling.min_separation + 1, sampling.cohort / sampling.population
    if round >= bins:
        return np.flatnonzero(history.last == round - bins)
    free = np.flatnonzero(history.times == 0)
    return free[rng.random(len(free)) * (1 - round * rate) < rate]


class Law(NamedTuple):
    """A law of sampling: its draw, and what the draw depends on."""

    draw: Callable[[Sampling, np.random.Generator, int, History], Members]
    looks_back: bool = False  # whether it depends on past participations
    keeps_rests: bool = False  # whether it enforces `min_separation`, which is a plan's
    by_chance: bool = True  # whether a client may stay out by chance, which an account counts on


LAWS: dict[str, Law] = {
    "fixed": Law(_fixed),
    "poisson": Law(_poisson),
    "spaced": Law(_spaced, looks_back=True, keeps_rests=True, by_chance=False),
    "cyclic-poisson": Law(_cyclic_poisson, keeps_rests=True),
    "balls-in-bins": Law(_balls_in_bins, looks_back=True, keeps_rests=True),
}
