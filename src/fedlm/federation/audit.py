"""The traces that canaries left in a model.

In:       an algorithm with canaries, the model before and after, the run's secret.
Out:      how often each canary took part; its cosine with the model's change; the cosines of
          directions that nobody sent.
Promise:  the cohorts and directions are those of the run, drawn again from its secret.
Not here: what the cosines mean (`privacy/audit.py`), how canaries take part (`round.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedlm.cohort.sampling import LAWS
from fedlm.core import tree
from fedlm.core.chacha import CipherKey
from fedlm.core.keys import cipher_key_for
from fedlm.core.types import Params
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import (
    CohortSampler,
    NodeState,
    direction,
    init_node,
    private_seed,
)

# Directions that nobody sent: a thousand, or fewer of a large model. They only serve to count.
STRANGERS, LEAST_STRANGERS, MOST_NUMBERS = 1000, 100, 2_000_000_000


class Seen(NamedTuple):
    """How strongly a run's model shows its canaries."""

    turns: np.ndarray  # rounds in which each canary took part
    scores: np.ndarray  # cosines of those canaries that count
    strangers: np.ndarray  # cosines of directions that nobody sent
    dimensions: int


def look(
    algorithm: Algorithm,
    before: Params,
    after: Params,
    *,
    secret: bytes,
    rounds: int,
    strangers: int = STRANGERS,
) -> Seen:
    """Measure a run's change along its canaries, and along directions that nobody sent."""
    state = init_node(algorithm, before, secret)
    turns = canary_turns(algorithm, state, rounds)
    population = algorithm.sampling.population
    numbers = np.arange(population - algorithm.canaries, population)
    if not LAWS[algorithm.sampling.law].by_chance:
        # The account of such a law assumes that every client joins. Other laws account for the
        # chance of staying out, so canaries that stayed out count there too.
        numbers = numbers[turns > 0]
    change = tree.sub(after, before)
    seed = private_seed(state)
    size = tree.size(before)
    others = population + np.arange(min(strangers, max(LEAST_STRANGERS, MOST_NUMBERS // size)))
    return Seen(turns, cosines(change, seed, numbers), cosines(change, seed, others), size)


def canary_turns(algorithm: Algorithm, state: NodeState, rounds: int) -> np.ndarray:
    """Count the first rounds that each canary joined, by drawing their cohorts again."""
    choose = CohortSampler(algorithm, 0, state)
    first = algorithm.sampling.population - algorithm.canaries
    turns = np.zeros(algorithm.canaries, int)
    for r in range(rounds):
        members = choose(r)
        turns[members[members >= first] - first] += 1
    return turns


def cosines(change: Params, seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the cosines of a change with the directions of canaries, real or hypothetical."""
    length = float(tree.norm(change))
    keys = (cipher_key_for(seed, "canary", member=int(number)) for number in numbers)
    found = [float(_along(change, key)) for key in keys]
    return np.array(found) / (length if length > 0 else 1.0)


@jax.jit
def _along(change: Params, key: CipherKey) -> Float[Array, ""]:
    parts = jax.tree.map(lambda x, y: jnp.sum(x * y), change, direction(key, change))
    return jnp.sum(jnp.stack(jax.tree.leaves(parts)))
