"""Totals by secure sums and by robust centres: the bits of a plain sum of the same integers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core.errors import ConfigError, EngineError
from fedlm.core.types import Arrived, ClientMethod, Cohort, Sampling, Start, Update
from fedlm.engine.robust import RobustEngine
from fedlm.engine.secure import Nodes, SecureEngine
from fedlm.engine.secure_local import LocalNodeSums
from fedlm.federation.algorithm import Algorithm
from fedlm.recipe.secure_sums import UpdateIntegers, norm_before_rounding
from fedlm.server.aggregate import mean
from fedlm.server.robust import RULES, bounded
from fedlm.wire.dense import dense
from fedlm.wire.fixed_point import FixedPoint

LIKE = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(5)}
GRID = FixedPoint(bits=20, clip=1.0, members=12)
MEMBERS = np.array([0, 3, 4, 7, 9, 10, 11, 12])


def update(delta, weight=1.0):
    one = jnp.float32
    return Update(delta, one(weight), one(2.5), one(40), one(3), one(weight == 0), one(1))


def sent(member, size=0.2):
    rng = np.random.default_rng(member)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, size, x.shape), x.dtype), LIKE)


class Given:
    """An engine whose members' updates are given."""

    adds_noise = False

    def __init__(self, updates):
        self.given = updates

    def prepare(self, round, members):
        return Cohort(round, members)

    def updates(self, starts, cohort):
        for member in cohort.members:
            yield Arrived(int(member), self.given[int(member)], 100, 7)


def algorithm():
    """As much of an algorithm as totals need: the shapes of an update."""
    nothing = functools.partial(lambda *_: None)
    method = ClientMethod(
        shared=lambda sent, key: sent,
        init=lambda shared, key, state, round: shared,
        step=nothing,
        finish=lambda shared, carry, examples: update(carry),
        expand=lambda params, key, delta: delta,
    )
    return Algorithm(
        participation=Sampling(law="fixed", population=13, cohort=8),
        local=method,
        upload=dense(),
        download=dense(),
        server=None,
    )


def engine(nodes=6, relays=0, private=False, updates=None, rotate=False):
    given = updates or {int(m): update(sent(m)) for m in MEMBERS}
    here = Nodes(count=nodes, threshold=nodes // 2 + 1)
    return SecureEngine(
        algorithm(),
        LocalNodeSums(Given(given), here, seed=5, relays=relays),
        UpdateIntegers(GRID, 5, private, rotate),
    )


def totals(made, clip_norm=np.inf):
    return made.total(Start(LIKE, clip_norm), Cohort(2, MEMBERS))


def bits(total):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(total.delta)]


def test_a_secure_total_is_the_sum_of_the_rounded_updates_to_the_bit():
    found = totals(engine())
    codes = [UpdateIntegers(GRID, 5, False).rounded(sent(m), np.inf, 2, m) for m in MEMBERS]
    wanted = GRID.values(GRID.wrapped(sum(codes)), LIKE)
    for name in LIKE:
        np.testing.assert_array_equal(found.total.delta[name], wanted[name])
        exact = sum(np.asarray(sent(m)[name], np.float64) for m in MEMBERS)
        assert np.abs(found.total.delta[name] - exact).max() < len(MEMBERS) * GRID.step
    assert float(found.total.members) == 8 and float(found.total.nats) == 20.0
    assert float(found.total.tokens) == 320 and float(found.total.weight) == 8
    assert found.download_bytes == 56 and found.upload_bytes > 6 * 17 * 20 / 8


def test_flat_and_relayed_nodes_and_any_number_of_nodes_agree_to_the_bit():
    flat = totals(engine())
    others = [engine(nodes=3), engine(nodes=9, relays=3)]
    for other in others:
        assert bits(totals(other).total) == bits(flat.total)


def test_a_rotation_spreads_an_update_and_a_tight_grid_then_loses_nothing():
    """A grid up to one cuts a value of three, unless it is spread over all 32 values first."""
    spike = {"a": jnp.zeros((3, 4)).at[1, 1].set(3.0), "b": jnp.zeros(5)}
    errors = []
    for rotate in (False, True):
        made = UpdateIntegers(GRID, 5, False, rotate)
        codes = made.rounded(spike, np.inf, 2, 0)
        back = made.values(GRID.wrapped(codes), LIKE, 2)
        errors.append(float(jnp.linalg.norm(back["a"] - spike["a"])))
    assert errors[0] == pytest.approx(2.0, abs=0.01) and errors[1] < 0.01
    assert np.abs(codes).max() * GRID.step < 1.0


def test_rotated_flat_and_relayed_sums_agree_to_the_bit_and_with_the_plain_sum():
    turned = engine(rotate=True), engine(nodes=9, relays=3, rotate=True)
    one, other = (totals(made).total for made in turned)
    assert bits(one) == bits(other)
    plain = totals(engine()).total
    np.testing.assert_allclose(one.delta["a"], plain.delta["a"], atol=16 * GRID.step)


def test_under_a_plan_an_update_is_no_longer_than_the_clip_after_rounding():
    integers = UpdateIntegers(GRID, 5, True)
    lengths = []
    for member in range(40):
        codes = integers.rounded(sent(member), 0.5, 0, member)  # its norm is about 0.8
        lengths.append(np.linalg.norm(codes * GRID.step))
    assert 0.49 < max(lengths) <= 0.5
    assert bits(totals(engine(private=True), 0.5).total) == bits(
        totals(engine(nodes=9, relays=3, private=True), 0.5).total
    )


def test_a_grid_that_is_too_coarse_for_a_plan_is_refused():
    assert norm_before_rounding(1.0, 2.0**-12, 1000) > 4000
    with pytest.raises(ConfigError, match="rounding 1000000 values would take more than half"):
        norm_before_rounding(1.0, 2.0**-8, 1_000_000)


def test_a_refused_member_counts_for_nothing_and_other_weights_are_refused():
    given = {int(m): update(sent(m)) for m in MEMBERS}
    given[3] = update(sent(3), weight=0.0)
    found = totals(engine(updates=given)).total
    assert float(found.weight) == 7 and float(found.refused) == 1
    codes = [UpdateIntegers(GRID, 5, False).rounded(sent(m), np.inf, 2, m) for m in MEMBERS]
    wanted = GRID.values(GRID.wrapped(sum(codes) - codes[1]), LIKE)
    np.testing.assert_array_equal(found.delta["b"], wanted["b"])
    with pytest.raises(EngineError, match="weight 4: under secure sums all count alike"):
        totals(engine(updates=given | {3: update(sent(3), weight=4.0)}))


def test_single_updates_are_not_shown_and_too_many_members_are_refused():
    with pytest.raises(EngineError, match="nobody sees them"):
        engine().updates(Start(LIKE), Cohort(0, MEMBERS))
    with pytest.raises(EngineError, match="round 0 drew more members than the 12 "):
        engine().total(Start(LIKE), Cohort(0, np.arange(13)))


@pytest.mark.parametrize("rule", RULES)
def test_a_robust_total_has_the_centre_as_its_mean(rule):
    given = {int(m): update(sent(m)) for m in MEMBERS}
    liars = {m: update(jax.tree.map(lambda x: x + 1e6, LIKE)) for m in (9, 12)}
    made = RobustEngine(
        Given(given | liars),
        algorithm(),
        lambda rows: RULES[rule](rows, 0.25),
        lambda flat: flat,
    )
    change = mean(totals(made).total)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(change))
    assert largest > 1e5 if rule == "mean" else largest < 0.5


def test_a_bound_on_norms_holds_liars_to_their_share():
    given = {int(m): update(sent(m)) for m in MEMBERS}
    given[9] = update(jax.tree.map(lambda x: x + 1e6, LIKE))
    made = RobustEngine(
        Given(given), algorithm(), lambda rows: RULES["mean"](rows, 0), lambda x: bounded(x, 2.0)
    )
    change = mean(totals(made).total)
    assert np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(change))) < 1.0
