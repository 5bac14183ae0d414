"""Noise has the stated law, and a wrong law is noticed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.core.keys import cipher_key_for
from fedlm.privacy import correlated, strategy
from fedlm.privacy.catalog import MECHANISMS, noise_for
from fedlm.privacy.noise import gaussian, silent
from fedlm.privacy.normal import standard_normal
from tests.privacy.plans import APART, CORRELATED, PLANS, ROUNDS, factor, plan

LIKE = {"w": jnp.ones((3, 2)), "b": jnp.ones((4,), jnp.bfloat16)}


def keys(rounds=ROUNDS, seed=0):
    return [cipher_key_for(seed, "noise", round=r) for r in range(rounds)]


compiled = functools.cache(jax.jit)


@functools.cache
def noise_of(name):
    """The noise of a plan, made once: what adds it is then compiled once for each shape."""
    return noise_for(PLANS[name])


def stream(noise, sums, seed=0):
    """What comes out, round by round, and the memory at the end."""
    add, memory, out = compiled(noise.add), noise.init(sums[0]), []
    for total, key in zip(sums, keys(len(sums), seed), strict=True):
        noisy, memory = add(total, memory, key)
        out.append(noisy)
    return out, memory


def sizes(memory):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(memory)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANS)
def test_shapes_types_and_memory_are_kept(name):
    noise = noise_of(name)
    before = noise.init(LIKE)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(before))
    out, after = stream(noise, [LIKE] * ROUNDS)
    assert sizes(before) == sizes(after)
    for noisy in out:
        assert sizes(noisy) == sizes(LIKE)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(noisy))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANS)
def test_the_same_keys_give_the_same_noise(name):
    noise = noise_of(name)
    one, two, three = (stream(noise, [LIKE] * 3, seed)[0] for seed in (0, 0, 1))
    for a, b, c in zip(one, two, three, strict=True):
        assert (a["w"] == b["w"]).all() and (a["b"] == b["b"]).all()
        assert (a["w"] != c["w"]).all()
        assert len(set(np.asarray(a["w"]).ravel().tolist())) == a["w"].size


def unlike(rows, law):
    """How far the rows' covariance is from that of `law`, in standard errors."""
    white = np.linalg.solve(np.linalg.cholesky(law @ law.T), rows)
    seen = white @ white.T / rows.shape[1]
    return np.abs(seen - np.eye(len(seen))).max() * np.sqrt(rows.shape[1] / 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
def test_the_covariance_is_that_of_the_matrix_and_of_no_other(name):
    chosen = PLANS[name]
    zeros = {"a": jnp.zeros((100, 100)), "b": jnp.zeros(10_000)}
    out, _ = stream(noise_of(name), [zeros] * ROUNDS)
    rows = np.stack([np.concatenate([np.ravel(x) for x in n.values()]) for n in out]).astype(float)
    law = 2.0 * factor(chosen)  # in units of the clip, whatever it is
    assert unlike(rows, law) < 5
    assert unlike(rows, 1.1 * law) > 8 and unlike(rows, law / 1.1) > 8
    if name in CORRELATED:
        alone = np.diag(np.sqrt(np.diag(law @ law.T)))
        assert unlike(rows, alone) > 8
        other = CORRELATED["tree of 3" if name != "tree of 3" else "tree"]
        assert unlike(rows, factor(other)) > 8
    assert abs(np.corrcoef(rows[:, :10_000].ravel(), rows[:, 10_000:].ravel())[0, 1]) < 0.02


def test_no_noise_adds_nothing():
    quiet = [plan(p.mechanism, p.sampling, noise_multiplier=0.0) for p in PLANS.values()]
    others = (silent(), gaussian(0.0), correlated.tree_noise(0.0, rounds=ROUNDS))
    for noise in (*map(noise_for, quiet), *others):
        for noisy in stream(noise, [LIKE] * 3)[0]:
            assert all((noisy[n] == LIKE[n]).all() for n in LIKE)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CORRELATED)
def test_a_round_that_was_not_planned_is_not_released(name):
    out, _ = stream(noise_of(name), [LIKE] * (ROUNDS + 1))
    assert np.isfinite(out[-2]["w"]).all() and np.isnan(out[-1]["w"]).all()


def test_memory_is_a_few_copies_of_the_model():
    like = jnp.zeros(1000)

    def copies(noise):
        return sum(x.size for x in jax.tree.leaves(noise.init(like)) if x.size >= 1000) / 1000

    assert copies(correlated.tree_noise(1.0, rounds=2000)) == 11
    assert copies(correlated.tree_noise(1.0, 100, rounds=2000)) == 7
    assert copies(correlated.for_strategy(1.0, strategy.toeplitz(2000, 5), rounds=2000)) == 4
    assert copies(noise_for(PLANS["blt"])) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
def test_noise_is_in_units_of_the_clip_norm(name):
    """`Noise.add` multiplies by the clip norm of the round: the plan's must not count twice."""
    wide = dataclasses.replace(PLANS[name], clip_norm=40.0)
    own, others = (stream(n, [LIKE] * 2)[0] for n in (noise_of(name), noise_for(wide)))
    for a, b in zip(own, others, strict=True):
        assert (a["w"] == b["w"]).all()
    by_hand = MECHANISMS[PLANS[name].mechanism].noise(PLANS[name], PLANS[name].sum_multiplier)
    assert (stream(by_hand, [LIKE])[0][0]["w"] == others[0]["w"]).all()


def prefix_noise(rounds, restart_every=0):
    """Noise of the running sum of a scalar by the textbook: nodes, halves, weights."""
    length, done, at = restart_every or rounds, 0.0, []
    for t in range(rounds):
        since = t % length
        if since == 0:
            done, blocks = (at[-1] if at else 0.0), {}
        key, height = keys(rounds)[t], 0

        def fresh(height, key=key):
            return float(standard_normal(key, jnp.zeros(()), height))

        block = fresh(0)
        while height in blocks:
            block = 0.5 * (blocks.pop(height) + block) + fresh(height + 1)
            height += 1
        blocks[height] = block
        at.append(done + sum(b / (2 - 2.0**-h) for h, b in blocks.items()))
    return np.array(at)


@pytest.mark.sample(1)
@pytest.mark.parametrize("restart_every", [0, 5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_on_increments_is_momentum_on_noisy_prefix_sums(restart_every, nesterov):
    rounds, rate, beta = 13, 0.1, 0.9
    gradients = np.sin(np.arange(rounds))
    noise = correlated.tree_noise(1.0, restart_every, rounds=rounds)
    sums, _ = stream(noise, [jnp.float32(g) for g in gradients])
    prefix = np.cumsum(gradients) + prefix_noise(rounds, restart_every)
    fine = 0.003  # what the grid adds in thirteen rounds
    np.testing.assert_allclose(np.cumsum(sums), prefix, atol=3 * fine)
    prefix = np.cumsum(sums)

    optimizer = optax.sgd(rate, momentum=beta, nesterov=nesterov)
    w = jnp.float32(0.0)
    memory = optimizer.init(w)
    v = 0.0
    for total, noisy in zip(sums, prefix, strict=True):
        moved, memory = optimizer.update(total, memory)
        w = optax.apply_updates(w, moved)
        v = beta * v + noisy
        np.testing.assert_allclose(w, -rate * (beta * v + noisy if nesterov else v), atol=1e-4)


def test_momentum_without_noise_is_the_published_fixture():
    optimizer, w = optax.sgd(0.1, momentum=0.9), jnp.float32(0.0)
    memory, seen = optimizer.init(w), []
    for total in stream(silent(), [jnp.float32(1.0)] * 3)[0]:
        moved, memory = optimizer.update(total, memory)
        w = optax.apply_updates(w, moved)
        seen.append(float(w))
    np.testing.assert_allclose(seen, [-0.1, -0.29, -0.561], rtol=1e-6)


def test_least_variance_of_the_tree():
    """The running sum of 2^d rounds has variance 1 / (2 - 2^-d), not 1."""
    chosen = plan("tree", rounds=8, sampling=APART)
    running = np.cumsum(factor(chosen), axis=0)
    for d in range(4):
        assert np.isclose((running[2**d - 1] ** 2).sum(), 1 / (2 - 2.0**-d))
