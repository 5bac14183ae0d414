"""Epsilons of Gaussian noise, as dp_accounting computes them.

In:       a noise multiplier or a rho, how cohorts are drawn, rounds, a delta.
Out:      epsilon.
Promise:  epsilon holds for one client replaced by zero in every round; no rounds cost nothing, and
          without noise the cost is infinite.
Not here: which noise a plan has (`catalog.py`), the noise for a target (`account.py`).

dp_accounting is imported inside functions: it costs over a second, and training does not need it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# More noise than this drowns any sum; a target that needs more cannot be met.
MOST_NOISE = 1e6
# Any order gives a valid epsilon; so fine a grid finds the best one to five digits.
ORDERS = 1 + np.logspace(-1.9, 6, 4000)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Return the minimum over orders a of rho a + log(1 - 1/a) - log(delta a) / (a - 1)."""
    import dp_accounting

    if rho == 0 or math.isinf(rho):
        return rho
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS, relation)
    return float(accountant.compose(dp_accounting.ZCDpEvent(rho)).get_epsilon(delta))


def rho_of(squared_sensitivity: float, noise_multiplier: float) -> float:
    """Convert a squared sensitivity and a noise multiplier to zCDP's rho."""
    if squared_sensitivity == 0:
        return 0.0
    return squared_sensitivity / (2 * noise_multiplier**2) if noise_multiplier else math.inf


def gaussian(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Compute the exact epsilon of a member that joins every round under independent noise."""
    import dp_accounting

    if rounds == 0 or noise_multiplier == 0:
        return math.inf if rounds else 0.0
    return float(dp_accounting.get_epsilon_gaussian(noise_multiplier / math.sqrt(rounds), delta))


def poisson(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """Compute epsilon by composing privacy loss distributions, on a grid that rounds up.

    Every client joins each round by its own coin, with probability `rate`.
    """
    import dp_accounting

    if rounds == 0 or noise_multiplier == 0:
        return math.inf if rounds else 0.0
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.pld.PLDAccountant(relation)
    event = dp_accounting.SelfComposedDpEvent(_sampled(noise_multiplier, rate), rounds)
    return float(accountant.compose(event).get_epsilon(delta))


def poisson_by_rdp(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """Bound the epsilon of `poisson` by Renyi accounting, a quick start for a search."""
    return _rdp(_sampled(noise_multiplier, rate), rounds, delta)


def fixed_size(
    noise_multiplier: float, cohort: int, population: int, rounds: int, delta: float
) -> float:
    """Compute epsilon by Renyi accounting for cohorts drawn without replacement.

    In such a cohort a client that stays out is replaced by another one, so that the sum moves by
    up to twice the clip: the theorem is applied with half the noise multiplier. A second bound
    assumes that the client joins every round. The smaller bound is returned.
    """
    import dp_accounting

    if rounds == 0 or noise_multiplier == 0:
        return math.inf if rounds else 0.0
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(
        population, cohort, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    )
    always = dp_accounting.GaussianDpEvent(noise_multiplier)
    one = dp_accounting.NeighboringRelation.REPLACE_ONE
    return min(_rdp(drawn, rounds, delta, one), _rdp(always, rounds, delta))


def _sampled(noise_multiplier: float, rate: float) -> Any:
    """Return the accounting event of one round: Gaussian noise on a Poisson cohort."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(rate, gaussian)


def _rdp(event: Any, rounds: int, delta: float, relation: Any = None) -> float:
    import dp_accounting

    relation = relation or dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))
