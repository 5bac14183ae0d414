"""The laws by which members join a round.

In:       a `Sampling`, the generator of one round, the history of participations.
Out:      member numbers in ascending order.
Promise:  drawn by the declared law from that generator and that history alone. Of a population of
          more than `MANY` clients a draw reads none but those who took part before: time and memory
          grow with the cohort and with past cohorts.
Not here: which clients exist (`corpus/store.py`), which members answered (an engine reports it).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from fedlm.core.keys import generator_for
from fedlm.core.types import History, Members, Sampling

NEVER = -(1 << 30)
# Of more clients a history holds only those who took part, and a draw is by rank. Of fewer, a pass
# over all takes milliseconds, and what a seed draws is what it has always drawn.
MANY = 1 << 20


def no_history(sampling: Sampling) -> History:
    """Return the history before the first round; empty for laws that do not look back."""
    looks_back, many = LAWS[sampling.law].looks_back, sampling.population > MANY
    size = sampling.population if looks_back and not many else 0
    members = np.zeros(0, np.int32) if looks_back and many else None
    return History(np.full(size, NEVER, np.int32), np.zeros(size, np.int32), members)


def joined(history: History, members: Members, round: int) -> History:
    """Return the history after a round."""
    if history.members is not None:
        return _joined_sparse(history, np.asarray(members, np.int32), round)
    if len(history.last) == 0:
        return history
    last, times = history.last.copy(), history.times.copy()
    last[members] = round
    times[members] += 1
    return History(last, times)


def _joined_sparse(history: History, members: Members, round: int) -> History:
    known = np.asarray(history.members)
    new = np.setdiff1d(members, known, assume_unique=True)
    at = np.searchsorted(known, new)
    known = np.insert(known, at, new)
    last, times = (np.insert(np.asarray(part), at, 0) for part in history[:2])
    here = np.searchsorted(known, members)
    last[here] = round
    times[here] += 1
    return History(last, times, known)


def _others(
    population: int, out: Members, count: int, rng: np.random.Generator
) -> Integer[np.ndarray, " members"]:
    """Draw up to `count` clients uniformly from those not in the sorted array `out`.

    The client of rank r among the others is r plus the number of those in `out` before it.

    >>> _others(6, np.array([0, 3]), 4, generator_for(0, "cohort")).tolist()
    [1, 2, 4, 5]
    """
    left = population - len(out)
    if count >= left:
        ranks = np.arange(left)
    else:
        ranks = np.sort(rng.choice(left, count, replace=False, shuffle=False))
    return ranks + np.searchsorted(out - np.arange(len(out)), ranks, side="right")


def draw(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw the members of one round."""
    return LAWS[sampling.law].draw(sampling, rng, round, history)


def _fixed(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw exactly `cohort` clients without replacement."""
    chosen = rng.choice(sampling.population, sampling.cohort, replace=False, shuffle=False)
    return np.sort(chosen)


def _poisson(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw each client independently, `cohort` clients in expectation."""
    size, rate = sampling.population, sampling.cohort / sampling.population
    if size > MANY:  # the same law: how many they are, and then who
        return _others(size, np.zeros(0, int), int(rng.binomial(size, rate)), rng)
    return np.flatnonzero(rng.random(size) < rate)


def _spaced(sampling: Sampling, rng: np.random.Generator, round: int, history: History) -> Members:
    """Draw among the clients that rested long enough and have participations left.

    If participations are limited, the clients that took part least often go first, so that no
    round stays short because some clients used up their turns early.
    """
    rested = round - history.last.astype(np.int64) > sampling.min_separation
    if sampling.max_participations:
        rested &= history.times < sampling.max_participations
    if history.members is not None:
        return _spaced_of_many(sampling, rng, history, np.asarray(rested))
    free = np.flatnonzero(rested)
    if len(free) <= sampling.cohort:
        return free
    order = rng.random(len(free))
    if sampling.max_participations:
        order += history.times[free]
    return np.sort(free[np.argpartition(order, sampling.cohort - 1)[: sampling.cohort]])


def _spaced_of_many(
    sampling: Sampling, rng: np.random.Generator, history: History, rested: np.ndarray
) -> Members:
    """Draw by the law of `_spaced` from a history of those who took part."""
    known, size, cohort = np.asarray(history.members), sampling.population, sampling.cohort
    if not sampling.max_participations:
        return _others(size, known[~rested], cohort, rng)
    new = _others(size, known, cohort, rng)  # they took part least often
    if len(new) == cohort:
        return new
    free = np.flatnonzero(rested)
    order = rng.random(len(free)) + history.times[free]
    again = known[free[np.argsort(order)[: cohort - len(new)]]]
    return np.sort(np.concatenate([new, again]))


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
    order = np.arange(
        population, dtype=np.int32
    )  # half the memory of `permutation`, the same order
    generator_for(0, "deal", member=population).shuffle(order)
    return order


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
        again = np.flatnonzero(history.last == round - bins)
        return again if history.members is None else np.asarray(history.members)[again]
    if history.members is not None:
        left = sampling.population - len(history.members)
        count = int(rng.binomial(left, min(1.0, rate / (1 - round * rate))))
        return _others(sampling.population, np.asarray(history.members), count, rng)
    free = np.flatnonzero(history.times == 0)
    return free[rng.random(len(free)) * (1 - round * rate) < rate]


def most_members(sampling: Sampling, rounds: int) -> int:
    """Return a size that no cohort of a run exceeds, but for a chance of 2^-40.

    A cohort of chance size is a sum of independent coins, whose upper tail Chernoff's bound for
    Poisson variables of the same mean holds: P(X > k) <= exp(k - m) (m / k)^k for k above m.

    >>> most_members(Sampling(law="fixed", population=1000, cohort=20), 100)
    20
    >>> most_members(Sampling(law="poisson", population=1000, cohort=20), 100)
    66
    """
    law, most, mean = LAWS[sampling.law], sampling.population, float(sampling.cohort)
    if not law.chance_size:
        return min(sampling.cohort, most)
    if sampling.law == "cyclic-poisson":  # the group whose turn it is, dealt to a whole number
        groups = sampling.min_separation + 1
        most = -(-sampling.population // groups)
        mean *= most * groups / sampling.population
    wanted, k = 40 * math.log(2) + math.log(max(rounds, 1)), math.ceil(mean)
    while k < most and k * math.log(k / mean) - k + mean < wanted:
        k += 1
    return min(k, most)


class Law(NamedTuple):
    """A law of sampling: its draw, and what the draw depends on."""

    draw: Callable[[Sampling, np.random.Generator, int, History], Members]
    looks_back: bool = False  # whether it depends on past participations
    keeps_rests: bool = False  # whether it enforces `min_separation`, which is a plan's
    by_chance: bool = True  # whether a client may stay out by chance, which an account counts on
    chance_size: bool = False  # whether a cohort may have more members than `cohort`


LAWS: dict[str, Law] = {
    "fixed": Law(_fixed),
    "poisson": Law(_poisson, chance_size=True),
    "spaced": Law(_spaced, looks_back=True, keeps_rests=True, by_chance=False),
    "cyclic-poisson": Law(_cyclic_poisson, keeps_rests=True, chance_size=True),
    "balls-in-bins": Law(_balls_in_bins, looks_back=True, keeps_rests=True, chance_size=True),
}
