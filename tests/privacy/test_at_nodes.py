"""Noise at nodes as a mechanism: its cost, against whom it holds, and what is refused."""

import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedlm.core.errors import ConfigError, EngineError
from fedlm.core.types import Cohort, Start
from fedlm.deploy.lifetime import RunTurns, epsilon_of
from fedlm.engine.secure import Nodes, SecureEngine
from fedlm.engine.secure_local import LocalNodeSums
from fedlm.federation.round import FlatRound
from fedlm.privacy import account
from fedlm.privacy.at_nodes import LEAST_VARIANCE, round_rho
from fedlm.privacy.catalog import check_plan, noise_for
from fedlm.privacy.cost import epsilon_of_rho, epsilon_of_shift
from fedlm.privacy.distributed import shares_for
from fedlm.recipe.secure_sums import UpdateIntegers, _shares
from fedlm.wire.fixed_point import FixedPoint
from tests.engine.test_secure import Given, algorithm, update
from tests.privacy.plans import APART, AT_NODES, FIXED, POISSON, ROUNDS, plan

LIKE = {"w": jnp.zeros(400)}
GRID = FixedPoint(bits=18, clip=0.5, members=40)


@pytest.mark.parametrize("name", AT_NODES)
def test_plans_that_are_sound_leave_the_server_nothing_to_add(name):
    check_plan(AT_NODES[name])
    assert noise_for(AT_NODES[name]).stddev == 0


@pytest.mark.parametrize("name, turns", [("distributed", 8), ("distributed, spaced", 3)])
def test_a_round_costs_its_rho_and_no_chance_is_counted(name, turns):
    found = account.spent(AT_NODES[name], ROUNDS)
    assert found.rho == pytest.approx(turns / (2 * 2.0**2), rel=1e-8)
    assert found.epsilon == pytest.approx(epsilon_of_rho(turns / 8, 1e-5), rel=1e-6)
    assert found.epsilon > epsilon_of_shift(math.sqrt(turns) / 2, 1e-5)  # no less than normal noise
    more = dataclasses.replace(AT_NODES[name].sampling, population=10**6)
    assert account.spent(dataclasses.replace(AT_NODES[name], sampling=more), 8)[0] == found.epsilon
    said = " ".join(found.assumptions)
    assert "against the server together with all nodes but 3" in said
    assert "whoever sees updates or sums before noise" not in said


def test_noise_is_found_for_a_target():
    noise = account.calibrate(AT_NODES["distributed"], 2.0)
    found = dataclasses.replace(AT_NODES["distributed"], noise_multiplier=noise)
    assert 1.99 < account.spent(found, ROUNDS).epsilon <= 2.0


def test_a_node_counts_turns_by_zcdp_and_not_as_normal_noise():
    chosen = AT_NODES["distributed"]
    found = epsilon_of((RunTurns(chosen, 2),), 1e-5)
    assert found >= epsilon_of_rho(2 * round_rho(chosen), 1e-5) * 0.999
    assert found < epsilon_of((RunTurns(chosen, None),), 1e-5)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"honest_nodes": 0}, "privacy.honest_nodes = 0: expected at least 1"),
        ({"reveal": True}, "nobody sees sums without noise"),
        ({"noise_multiplier": 0.0}, "privacy.noise_multiplier = 0.0: expected more than 0"),
        ({"clip_quantile": 0.5}, "privacy.clip_quantile"),
        ({"sampling": POISSON}, "when server.sampling = 'poisson', because the range"),
        ({"restart_every": 3}, "privacy.restart_every = 3"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_plan(dataclasses.replace(AT_NODES["distributed"], **changes))


@pytest.mark.parametrize("mechanism", ["tree", "gaussian"])
def test_noise_of_a_server_has_no_honest_nodes(mechanism):
    sampling = APART if mechanism == "tree" else FIXED
    with pytest.raises(ConfigError, match=r"privacy.honest_nodes = 3: .*'distributed'"):
        check_plan(plan(mechanism, sampling, honest_nodes=3))


# ---- the shares of a run -------------------------------------------------------------------------


def integers(grid=GRID):
    return UpdateIntegers(grid, 5, True)


def test_the_bound_of_the_real_shares_is_within_the_cost_of_the_plan():
    for noise in (0.3, 1.0, 4.0):
        chosen = plan("distributed", FIXED, honest_nodes=3, noise_multiplier=noise)
        made = _shares(chosen, integers(), 4, LIKE)
        assert made.rho <= round_rho(chosen) and made.variance >= LEAST_VARIANCE
        assert made.rho == pytest.approx(round_rho(chosen), rel=0.1)


def test_no_question_makes_an_update_longer_than_the_noise_is_made_for():
    chosen = plan("distributed", FIXED, honest_nodes=3)
    made = _shares(chosen, integers(), 4, LIKE)
    long = {"w": jnp.full(400, 0.02, jnp.float32)}
    lengths = []
    for asked in (float(np.nextafter(np.float32(0.5), np.float32(1))), 3.0):
        own = UpdateIntegers(GRID, 5, True, bound=chosen.clip_norm)
        codes = [own.rounded({"w": 5 * long["w"]}, asked, 0, member) for member in range(20)]
        lengths += [int(np.dot(c, c)) for c in codes]
    assert 0.95 * made.squared_bound < max(lengths) <= made.squared_bound
    free = UpdateIntegers(GRID, 5, True).rounded({"w": 5 * long["w"]}, 3.0, 0, 0)
    assert int(np.dot(free, free)) > made.squared_bound


@pytest.mark.parametrize(
    "grid, said",
    [
        (FixedPoint(bits=16, clip=0.5, members=10), "room for the noise of 4 nodes"),
        (FixedPoint(bits=32, clip=0.5, members=40), "noise variance"),
        (FixedPoint(bits=10, clip=0.5, members=40), "a finer one: rounding 400 values"),
    ],
)
def test_a_grid_that_does_not_fit_the_noise_is_refused(grid, said):
    with pytest.raises(ConfigError, match=said):
        _shares(plan("distributed", FIXED, honest_nodes=3), integers(grid), 4, LIKE)


def engine(members=8, nodes=4):
    chosen = plan("distributed", FIXED, honest_nodes=3)
    zero = {m: update({"w": jnp.zeros(400)}) for m in range(members)}
    return SecureEngine(
        algorithm(),
        LocalNodeSums(Given(zero), Nodes(count=nodes, threshold=3), seed=5),
        integers(),
        shares=lambda like: _shares(chosen, integers(), nodes, LIKE),
    )


def noise_in(secret, nodes=4, round=0):
    start = Start(LIKE, 0.5, None, secret)
    found = engine(nodes=nodes).total(start, Cohort(round, np.arange(8)))
    return np.asarray(found.total.delta["w"]), found


def test_a_sum_holds_the_noise_of_all_nodes_and_no_count():
    """Four shares where three are enough: the variance is 4/3 of the plan's, and it is told."""
    drawn = np.concatenate([noise_in(bytes([i]) * 32)[0] for i in range(10)])
    wanted = 2.0 * 0.5 * math.sqrt(4 / 3)
    # Rounding leaves less than the clip to an update, and the noise is in units of what is left.
    assert 0.9 * wanted < drawn.std() < 1.05 * wanted
    assert stats.kstest(drawn / drawn.std(), "norm").pvalue > 1e-3
    found = noise_in(b"x" * 32)[1]
    assert found.noise_excess == pytest.approx(4 / 3)
    told = found.total
    assert not any(float(x) for x in (told.weight, told.tokens, told.nats, told.unclipped))


def test_the_same_secret_gives_the_same_noise_and_another_one_another():
    one, again, other = (noise_in(secret * 32)[0] for secret in (b"a", b"a", b"b"))
    assert (one == again).all() and (one != other).mean() > 0.9
    assert (one != noise_in(b"a" * 32, nodes=5)[0]).mean() > 0.9


def test_an_engine_without_nodes_is_refused():
    base = dataclasses.replace(algorithm(), participation=AT_NODES["distributed"])
    flat = FlatRound(algorithm=base, engine=Given({}), seed=0)
    with pytest.raises(EngineError, match="the sums would have none"):
        next(flat.play(None, range(1)))


def test_shares_need_a_whole_variance():
    with pytest.raises(ConfigError, match="noise variance"):
        shares_for(clip=1e6, size=400, noise_multiplier=2.0, honest=3)
