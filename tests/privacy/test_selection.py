"""Private selection costs what its theorems say, and draws from the law that they are about."""

import math

import dp_accounting
import numpy as np
import pytest

from fedlm.core.errors import ConfigError
from fedlm.privacy import selection, spending
from fedlm.privacy.ledger import begin_entry, selection_entry
from fedlm.privacy.sensitivity import of_released_tree
from tests.privacy.plans import plan

ORDERS = 1 + np.logspace(-2, 3, 20_000)
SPACED = plan("tree", noise_multiplier=6.0)


def published(rho, law, mean, delta):
    """Theorem 2 of Papernot and Steinke for a rho-zCDP run, then the usual conversion."""
    rdp, shape = rho * ORDERS, selection.LAWS[law]
    gamma = 1 / mean if law == "geometric" else selection.gamma_of_logarithmic(mean)
    second = np.min((1 + shape) * ((1 - 1 / ORDERS) * rdp - math.log(gamma) / ORDERS))
    found = rdp + second + math.log(mean) / (ORDERS - 1)
    return float(np.min(found + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)))


def rho_of(chosen):
    """Of what the tree releases, which costs less than its nodes."""
    apart, most = chosen.sampling.min_separation, chosen.sampling.max_participations
    moved = of_released_tree(chosen.rounds, apart, most, restart_every=chosen.restart_every)
    return moved.value / (2 * chosen.noise_multiplier**2)


@pytest.mark.parametrize("law", ["geometric", "logarithmic"])
@pytest.mark.parametrize("mean", [2.0, 10.0])
def test_the_best_of_many_costs_what_was_published(law, mean):
    book = [begin_entry({}), selection_entry(SPACED, SPACED.rounds, law, mean)]
    found = spending.total_spent([book])
    wanted = published(rho_of(SPACED), law, mean, SPACED.delta)
    assert found.epsilon == pytest.approx(wanted, rel=0.02) and found.delta == SPACED.delta
    # The wrong bill: one run alone, or as if every run of the mean were released.
    alone = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    single = alone.compose(dp_accounting.ZCDpEvent(rho_of(SPACED))).get_epsilon(SPACED.delta)
    assert found.epsilon > 1.05 * single


def test_more_runs_cost_more():
    def cost(law, mean):
        return spending.total_spent(
            [[begin_entry({}), selection_entry(SPACED, 8, law, mean)]]
        ).epsilon

    for law in selection.LAWS:
        assert cost(law, 2.0) < cost(law, 20.0) < math.inf


@pytest.mark.sample(1)
@pytest.mark.parametrize("law", selection.LAWS)
def test_the_number_of_runs_has_the_law_that_is_paid_for(law):
    rng, mean = np.random.default_rng(3), 5.0
    drawn = np.array([selection.draw_number_of_runs(law, mean, rng) for _ in range(20_000)])
    error = 4 * drawn.std() / math.sqrt(len(drawn))
    assert abs(drawn.mean() - mean) < error
    none = {"geometric": 0.0, "logarithmic": 0.0, "poisson": math.exp(-mean)}[law]
    gamma = selection.gamma_of_logarithmic(mean)
    once = {
        "geometric": 1 / mean,
        "logarithmic": (1 - gamma) / -math.log(gamma),
        "poisson": mean * math.exp(-mean),
    }
    assert abs((drawn == 0).mean() - none) < 0.005
    assert abs((drawn == 1).mean() - once[law]) < 0.015
    others = [share for name, share in once.items() if name != law]
    assert all(abs((drawn == 1).mean() - share) > 0.03 for share in others), "laws are told apart"


@pytest.mark.parametrize(
    "law, mean", [("binomial", 3), ("geometric", 0.5), ("poisson", "3"), ("logarithmic", 1)]
)
def test_a_law_that_cannot_be(law, mean):
    with pytest.raises(ConfigError, match="selection"):
        selection.check(law, mean)
