"""No update leaves longer than the clip_norm, or counts more than once, whatever it was."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.keys import cipher_key_for
from fedlm.core.types import Total, Update
from fedlm.privacy.catalog import MECHANISMS, check_plan
from fedlm.privacy.clip import LARGEST, LONGEST, SHORTEST, ClipState, clip, next_clip_state
from fedlm.privacy.sensitivity import of_tree
from tests.oracle import sensitivity_of_matrix
from tests.privacy.plans import APART, BLT, plan, strategy, tree_strategy

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
LIMITS = st.sampled_from([1e-12, 1e-6, 0.3, 1.0, 1e12])


def update(values, weight=1.0):
    zero = jnp.zeros(())
    half = len(values) // 2
    delta = {"a": jnp.asarray(values[:half], jnp.float32), "b": jnp.asarray(values[half:])}
    return Update(delta, jnp.float32(weight), zero, zero, zero, zero, jnp.ones(()))


clipped = jax.jit(clip)


def flat(delta):
    """In 64 bits, so that lengths are measured and not rounded."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(delta)])


@given(st.lists(FLOATS, min_size=4, max_size=4), LIMITS, FLOATS)
def test_nothing_leaves_longer_than_the_limit(values, clip_norm, weight):
    values = np.array(values, np.float32)
    found = clipped(update(values, weight), jnp.float32(clip_norm))
    after = flat(found.delta)
    assert np.linalg.norm(after) <= np.float32(clip_norm)
    if not (np.abs(values) < LARGEST).all():
        assert not after.any()
        assert (found.weight, found.unclipped, found.refused) == (0, 0, 1)
        return
    assert (found.weight, found.refused) == (1, 0)
    before = values.astype(np.float64)
    length = np.linalg.norm(before)
    if found.unclipped:
        assert length <= clip_norm
        np.testing.assert_array_equal(after, before)
    else:
        assert length > 0.9999 * clip_norm
        np.testing.assert_allclose(after / clip_norm, before / length, atol=1e-4)


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", [1, 1000, 300_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_long_updates_leave_at_the_limit_and_not_far_below(size, scale):
    values = scale * np.random.default_rng(0).normal(size=2 * size).astype(np.float32)
    length = np.linalg.norm(values.astype(np.float64))
    clip_norm = np.float32(length / 3)
    found = clipped(update(values), jnp.float32(clip_norm))
    left = np.linalg.norm(flat(found.delta))
    assert 0.9999 * clip_norm < left <= clip_norm and found.unclipped == 0


@pytest.mark.parametrize("values", [[0.0, -0.0], [1e-45, -1e-45]])
def test_nothing_to_clip(values):
    found = clipped(update(np.array(values, np.float32)), jnp.float32(1.0))
    assert (found.unclipped, found.refused, found.weight) == (1, 0, 1)
    assert np.linalg.norm(flat(found.delta)) <= 1e-44


def test_a_refusal_is_kept():
    """ClientMethod training found the loss not finite, and sent zeros."""
    sent = update(np.zeros(2, np.float32))
    told = Update(sent.delta, jnp.zeros(()), *([jnp.zeros(())] * 3), jnp.ones(()), jnp.ones(()))
    assert clipped(told, jnp.float32(1.0)).refused == 1


# ---- a limit that follows a quantile ---------------------------------------------------

EXACT = plan("gaussian", clip_quantile=0.5, clip_noise=1e-6, noise_multiplier=0.0)


def total(unclipped, members):
    rest = [jnp.zeros(())] * 5
    return Total({"w": jnp.zeros(2)}, *rest, jnp.float32(unclipped), jnp.float32(members))


step = jax.jit(next_clip_state, static_argnums=0)


def moved(unclipped, members):
    key = cipher_key_for(0, "noise")
    after = step(EXACT, jnp.int32(0), start(), total(unclipped, members), key)
    return float(after.clip_norm), float(after.unclipped)


def start(clip_norm=1.0):
    return ClipState(jnp.float32(clip_norm), jnp.float32(math.nan), jnp.float32(0))


def test_the_limit_goes_towards_the_quantile():
    assert moved(10, 10)[0] == pytest.approx(math.exp(-0.1), rel=1e-4)
    assert moved(0, 10)[0] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert moved(5, 10) == pytest.approx((1.0, 0.5), rel=1e-4)


def shares(unclipped, members, draws=1000):
    chosen = plan("gaussian", clip_quantile=0.5, clip_noise=1.0)
    given = (chosen, jnp.int32(0), start(), total(unclipped, members))
    keys = (cipher_key_for(0, "noise", round=r) for r in range(draws))
    found = [float(step(*given, key).unclipped) for key in keys]
    return (np.array(found) - 0.5) * chosen.denominator


def test_one_member_moves_what_is_released_by_a_half():
    """The accountant counts on it: the noise is `2 * clip_noise` times what a member can do."""
    rest = shares(3, 6, draws=50)
    for unclipped in (0, 1):
        with_one = shares(3 + unclipped, 7, draws=50)
        np.testing.assert_allclose(np.abs(with_one - rest), 0.5, atol=1e-4)


def test_the_count_has_the_noise_of_the_plan():
    found = shares(3, 6)
    assert scipy.stats.kstest(found, scipy.stats.norm(0, 1.0).cdf).pvalue > 0.001
    assert scipy.stats.kstest(found, scipy.stats.norm(0, 0.7).cdf).pvalue < 1e-4


def test_sum_and_count_together_cost_what_the_plan_says():
    """Two normal releases of one member: inverse variances add up."""
    chosen = plan("gaussian", clip_quantile=0.5, clip_noise=3.0)
    assert chosen.sum_multiplier > chosen.noise_multiplier
    together = chosen.sum_multiplier**-2 + (0.5 / chosen.clip_noise) ** 2
    assert together == pytest.approx(chosen.noise_multiplier**-2)


def test_a_limit_stays_a_number():
    """Even if all updates vanish, or none is unclipped, for ever."""
    key = cipher_key_for(0, "noise")
    for first, unclipped in ((SHORTEST, 10), (LONGEST, 0)):
        after = step(EXACT, jnp.int32(0), start(first), total(unclipped, 10), key)
        assert float(after.clip_norm) == np.float32(first)


# ---- a limit that moves where the noise restarts ---------------------------------------

RESTARTS = [(rounds, every) for rounds in (5, 8, 9) for every in (2, 3, 4, 7) if every < rounds]


def joint(chosen, rounds, weight):
    """What tree and counts release in some rounds, with noises of one, if counts cost `weight`."""
    every = chosen.restart_every
    left = chosen.noise_multiplier**-2 - weight * (2 * chosen.clip_noise) ** -2
    counts = np.zeros((rounds // every, rounds))
    for k, row in enumerate(counts):
        row[k * every : (k + 1) * every] = 0.5 / chosen.clip_noise
    return np.concatenate([left**0.5 * tree_strategy(rounds, every), counts])


@pytest.mark.parametrize("rounds, every", RESTARTS)
def test_counts_and_trees_together_cost_what_the_plan_says(rounds, every):
    """Against every placement of a client, after every number of rounds."""
    for apart, most in ((0, 0), (0, 2), (1, 0), (2, 2)):
        sampling = dataclasses.replace(APART, min_separation=apart, max_participations=most)
        chosen = plan(
            "tree", sampling, rounds=rounds, restart_every=every, clip_quantile=0.5, clip_noise=2.5
        )
        for ran in range(1, rounds + 1):
            truth = sensitivity_of_matrix(joint(chosen, ran, chosen.count_weight), apart, most)
            claimed = of_tree(ran, apart, most, restart_every=every).value
            assert truth <= claimed / chosen.noise_multiplier**2 * (1 + 1e-9)


def test_a_lighter_count_would_cost_more_than_the_plan_says():
    """Three rounds are two blocks: neither holds all of a client's participations."""
    sampling = dataclasses.replace(APART, min_separation=0)
    chosen = plan("tree", sampling, rounds=6, restart_every=3, clip_quantile=0.5, clip_noise=2.5)
    assert chosen.count_weight == 2
    claimed = of_tree(6, 0, 0, restart_every=3).value / chosen.noise_multiplier**2
    assert sensitivity_of_matrix(joint(chosen, 6, 1), 0, 0) > 1.01 * claimed
    assert sensitivity_of_matrix(joint(chosen, 6, 2), 0, 0) <= claimed
    apart = dataclasses.replace(chosen, sampling=APART)
    assert apart.count_weight == 1 and chosen.sum_multiplier > apart.sum_multiplier > 2.0


NARROW = {"bands": 2, "matrix": (0.9, 0.43)}
MATRICES = {
    "banded": ("banded", 1, NARROW),
    "toeplitz": ("toeplitz", 0, {"bands": 2}),
    "blt": ("blt", 0, {"buffers": 2, "matrix": BLT}),
}


def with_counts(chosen, rounds, weight):
    """What a restarted matrix and its counts release, with noises of one."""
    every = chosen.restart_every
    left = chosen.noise_multiplier**-2 - weight * (2 * chosen.clip_noise) ** -2
    counts = np.kron(np.eye(rounds // every), np.full((1, every), 0.5 / chosen.clip_noise))
    counts = np.pad(counts, ((0, 0), (0, rounds - counts.shape[1])))
    return np.concatenate([left**0.5 * strategy(chosen)[:rounds, :rounds], counts])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MATRICES)
def test_counts_and_matrices_together_cost_what_the_plan_says(name):
    """Against every placement of a client, after some numbers of rounds."""
    mechanism, apart, settings = MATRICES[name]
    adaptive = {"restart_every": 3, "clip_quantile": 0.5, "clip_noise": 4.0, "rounds": 7}
    for most in (0, 2):
        sampling = dataclasses.replace(APART, min_separation=apart, max_participations=most)
        sampling = dataclasses.replace(sampling, population=200)
        chosen = plan(mechanism, sampling, **settings, **adaptive)
        check_plan(chosen)
        entry, noise = MECHANISMS[mechanism], chosen.noise_multiplier
        for ran in (2, 3, 5, 6, 7):
            claimed = entry.sensitivity(chosen, ran)
            alone = sensitivity_of_matrix(strategy(chosen)[:ran, :ran], apart, most)
            assert alone <= claimed.value * (1 + 1e-9)
            if claimed.exact:
                assert claimed.value == pytest.approx(alone, rel=1e-6)
            truth = sensitivity_of_matrix(
                with_counts(chosen, ran, chosen.count_weight), apart, most
            )
            assert truth <= claimed.value / noise**2 * (1 + 1e-9)
        assert chosen.sum_multiplier > noise


def test_a_lighter_count_beside_a_matrix_is_found_out():
    """With columns that do not overlap, as many rounds as a restart holds weigh as many times."""
    sampling = dataclasses.replace(APART, min_separation=0, population=200)
    chosen = plan(
        "banded", sampling, bands=1, matrix=(1.0,), rounds=6, restart_every=3,
        clip_quantile=0.5, clip_noise=4.0,
    )  # fmt: skip
    assert chosen.count_weight == 3
    claimed = 6 / chosen.noise_multiplier**2
    assert sensitivity_of_matrix(with_counts(chosen, 6, 3), 0, 0) == pytest.approx(claimed)
    assert sensitivity_of_matrix(with_counts(chosen, 6, 2), 0, 0) > 1.01 * claimed


def test_a_limit_stands_still_until_the_noise_restarts():
    chosen = plan("tree", restart_every=3, clip_quantile=0.5, noise_multiplier=0.0)
    limits, shares = [start()], []
    for r, unclipped in enumerate((10, 10, 4, 0, 0, 0)):
        key = cipher_key_for(0, "noise", round=r)
        limits.append(next_clip_state(chosen, jnp.int32(r), limits[-1], total(unclipped, 10), key))
        shares.append(float(limits[-1].unclipped))
    assert np.isnan(shares[:2]).all() and shares[2:] == pytest.approx([0.8, 0.8, 0.8, 0.0])
    wanted = [0, 0, 0, -0.06, -0.06, -0.06, 0.04]
    np.testing.assert_allclose([np.log(x.clip_norm) for x in limits], wanted, atol=1e-6)
    assert float(limits[-1].counted) == 0.0
