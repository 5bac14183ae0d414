"""A small plan of every mechanism, and the law of its noise by definition, independent of `src`."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedlm.core.types import Sampling
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.plan import PrivacyPlan

ROUNDS = 8
APART = Sampling(law="spaced", population=60, cohort=10, min_separation=2)
POISSON = Sampling(law="poisson", population=1000, cohort=10)
FIXED = dataclasses.replace(POISSON, law="fixed")


def plan(mechanism="tree", sampling=None, **changes):
    """A plan of eight rounds."""
    drawn = sampling or (POISSON if mechanism == "gaussian" else APART)
    settings = {"rounds": ROUNDS, "clip_norm": 0.5, "noise_multiplier": 2.0, "delta": 1e-5}
    return PrivacyPlan(mechanism=mechanism, sampling=drawn, **(settings | changes))


# What the optimisers find for these eight rounds; a plan that has them needs no search.
BLT = (0.466262, 0.466038, 0.23315, 0.233)
COLUMN = (0.854311, 0.431221, 0.290171)

# A new mechanism joins every test of its kind by one line here.
CORRELATED = {
    "tree": plan("tree"),
    "tree of 3": plan("tree", restart_every=3),
    "banded": plan("banded", matrix=COLUMN),
    "toeplitz": plan("toeplitz"),
    "toeplitz, wide": plan("toeplitz", bands=6),
    "blt": plan("blt", buffers=2, matrix=BLT),
    "blt of 3": plan("blt", buffers=2, matrix=BLT, restart_every=3),
    "banded of 5": plan("banded", restart_every=5, matrix=COLUMN),
}
CYCLIC = Sampling(law="cyclic-poisson", population=600, cohort=10, min_separation=2)
BINS = Sampling(law="balls-in-bins", population=60, cohort=10, min_separation=5)
PLANS: dict[str, PrivacyPlan] = {
    "gaussian": plan("gaussian"),
    "gaussian, fixed": plan("gaussian", FIXED),
    "gaussian, bins": plan("gaussian", BINS),
    "banded, bins": plan("banded", BINS, bands=3, matrix=COLUMN),
    "banded, cyclic": plan("banded", CYCLIC, matrix=COLUMN),
    **CORRELATED,
}
# Noise of which each node of a secure sum adds a share: the server adds none.
AT_NODES: dict[str, PrivacyPlan] = {
    "distributed": plan("distributed", FIXED, honest_nodes=3),
    "distributed, spaced": plan("distributed", APART, honest_nodes=3),
}


def tree_nodes(rounds, restart_every=0):
    """Every complete node of the trees over `rounds` rounds, as (first, after last)."""
    length = restart_every or rounds
    for start in range(0, rounds, length):
        here = min(length, rounds - start)
        for height in range(here.bit_length()):
            for number in range(here >> height):
                yield start + (number << height), start + ((number + 1) << height)


def tree_strategy(rounds, restart_every=0):
    """Which rounds a node sums."""
    nodes = list(tree_nodes(rounds, restart_every))
    matrix = np.zeros((len(nodes), rounds))
    for row, (first, after) in zip(matrix, nodes, strict=True):
        row[first:after] = 1
    return matrix


def tree_factor(rounds, restart_every=0):
    """Increments of the running sum's noise, as combinations of the nodes' fresh noise.

    The running sum is estimated by least squares from the nodes inside each of its blocks.
    """
    nodes, strategy = list(tree_nodes(rounds, restart_every)), tree_strategy(rounds, restart_every)
    length = restart_every or rounds
    running = np.zeros((rounds + 1, len(nodes)))
    for t in range(1, rounds + 1):
        begun = (t - 1) // length * length
        running[t] = running[begun]
        first, left = begun, t - begun
        while left:
            after = first + (1 << (left.bit_length() - 1))
            unclipped = [i for i, (a, b) in enumerate(nodes) if first <= a and b <= after]
            known = strategy[np.ix_(unclipped, range(first, after))]
            running[t, unclipped] += np.ones(after - first) @ np.linalg.pinv(known)
            first, left = after, t - after
    return np.diff(running, axis=0)


def strategy_of(chosen):
    """The matrix of a plan's noise, as few numbers."""
    return MECHANISMS[chosen.mechanism].strategy(chosen)


def factor(chosen):
    """The noise of all rounds is this matrix times independent standard normals."""
    if chosen.mechanism == "gaussian":
        return np.eye(chosen.rounds)
    if chosen.mechanism == "tree":
        return tree_factor(chosen.rounds, chosen.restart_every)
    return np.linalg.inv(strategy(chosen))


def strategy(chosen):
    """What is released, up to noise of the same size everywhere."""
    if chosen.mechanism == "tree":
        return tree_strategy(chosen.rounds, chosen.restart_every)
    return restarted(strategy_of(chosen).matrix(), chosen.rounds)


def restarted(matrix, rounds):
    """A matrix that begins anew after its own rounds, cut after `rounds`."""
    times = -(-rounds // len(matrix))
    return np.kron(np.eye(times), matrix)[:rounds, :rounds]
