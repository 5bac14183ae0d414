"""Law 5: weights of one, a fixed denominator, noise in the sum before any server optimiser."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from fedlm.core import tree
from fedlm.core.keys import cipher_key_for
from fedlm.core.types import BatchSpec, Loss, Sampling, Start, Update
from fedlm.engine.loop import LoopEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.member import add_member, empty_total
from fedlm.federation.round import (
    CohortSampler,
    _noise_key,
    direction,
    init_node,
    private_seed,
    server_half,
    told,
    with_text,
)
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.methods.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fedlm.privacy.clip import clip
from fedlm.privacy.plan import PrivacyPlan
from fedlm.wire.dense import dense
from tests.privacy.plans import plan as plan_of

CLIP = 0.5
SECRET = bytes(range(16))
WIDE = {"a": np.zeros((30, 20), np.float32), "b": np.zeros(7, np.float32)}
SERVER = fedavg.fedavg_server(optax.sgd(1.0))  # one program for all plans that ask for the same


def loss(params, tokens):
    """Half the squared distance to the one number in the batch."""
    return Loss(0.5 * (params["w"] - tokens[0, 0]) ** 2, jnp.float32(1.0))


@functools.cache  # equal algorithms share the program of the server
def algorithm(weight="uniform", server=None, canaries=0, **changes):
    drawn = Sampling(law="poisson", population=4 + canaries, cohort=4)
    settings = {"rounds": 8, "clip_norm": CLIP, "noise_multiplier": 0.0, "delta": 1e-5}
    settings |= {"mechanism": "gaussian", "sampling": drawn}
    plan = PrivacyPlan(**(settings | changes))
    return Algorithm(
        participation=plan,
        local=local_training(loss, optax.sgd(0.1), WEIGHTS[weight]),
        upload=dense(),
        download=dense(),
        server=fedavg.fedavg_server(server) if server else SERVER,
        canaries=canaries,
    )


def sum_of(*updates, clip_norm=CLIP):
    """What an engine gathers of members that moved the model so."""
    zero, one = np.float32(0), np.float32(1)
    total = empty_total(updates[0])
    for delta in updates:
        sent = Update(delta, np.float32(50), zero, zero, zero, zero, one)
        total = add_clipped(total, sent, np.float32(clip_norm))
    return total


add_clipped = jax.jit(lambda total, sent, clip_norm: add_member(total, clip(sent, clip_norm)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("weight", sorted(WEIGHTS))
@pytest.mark.parametrize("rows", [1, 100])
def test_a_member_with_much_text_moves_the_mean_by_no_more_than_clip_over_cohort(weight, rows):
    """Whatever the weighting of the local work, under a plan a member counts once."""
    chosen = algorithm(weight)

    def rows_of(client):
        return np.full((rows if client == 0 else 1, 1), 5000 if client == 0 else 0, np.int32)

    engine = LoopEngine(chosen, rows_of, BatchSpec(batch_size=1, sequence_length=0), seed=0)
    ends = []
    for members in (np.arange(3), np.arange(1, 3)):
        state = init_node(chosen, {"w": jnp.float32(0.0)}, SECRET)
        start = Start(state.params, float(state.clip_norm))
        total = engine.total(start, engine.prepare(0, members)).total
        assert float(total.weight) == len(members)
        ends.append(float(server_half(chosen, state, total, members).params["w"]))
    moved = abs(ends[0] - ends[1])
    assert 0.99 * CLIP / 4 < moved <= CLIP / 4


def test_the_denominator_is_fixed_however_many_came():
    chosen, one = algorithm(), {"w": jnp.float32(0.25)}
    for members in (1, 3, 4):
        state = init_node(chosen, {"w": jnp.float32(0.0)}, SECRET)
        after = server_half(chosen, state, sum_of(*[one] * members), np.arange(members))
        assert float(after.params["w"]) == pytest.approx(members * 0.25 / 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(SERVER_OPTIMIZERS))
def test_noise_enters_before_any_server_optimiser(name):
    """Every rule ends where it ends when it is fed, without a plan, the mean with its noise."""
    outer = server_optimizer(name, 0.3, momentum=0.9, beta2=0.99, epsilon=1e-3)
    chosen = algorithm(server=outer, noise_multiplier=1.5)
    state = init_node(chosen, WIDE, SECRET)
    params, memory, total = WIDE, outer.init(WIDE), sum_of(jax.tree.map(np.ones_like, WIDE))

    @jax.jit
    def step(params, memory, key):
        noisy, _ = chosen.noise.add(total.delta, (), key, CLIP)
        moved, memory = outer.update(tree.scale(noisy, -1 / 4), memory, params)
        return optax.apply_updates(params, moved), memory

    for _ in range(3):
        params, memory = step(params, memory, _noise_key(chosen, state, total))
        state = server_half(chosen, state, total, np.arange(1))
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_the_noise_of_a_round_is_that_of_the_plan_and_no_other():
    chosen = algorithm(noise_multiplier=1.5)
    nobody = empty_total({"w": np.zeros(20_000, np.float32)})
    state = init_node(chosen, nobody.delta, SECRET)
    after = server_half(chosen, state, nobody, np.arange(0))
    for claimed, fits in ((1.5, True), (1.3, False), (1.7, False)):
        law = scipy.stats.norm(0, claimed * CLIP / 4)
        assert (scipy.stats.kstest(np.asarray(after.params["w"]), law.cdf).pvalue > 0.001) == fits


def test_the_noise_follows_a_clip_that_moves():
    """It is made in units of the clip: a state with twice the limit has twice the noise."""
    chosen = algorithm(noise_multiplier=1.5, clip_quantile=0.5, clip_noise=2.0)
    nobody = empty_total(WIDE)
    state = init_node(chosen, WIDE, SECRET)
    wider = dataclasses.replace(state, clip_norm=2 * state.clip_norm)
    one, two = (server_half(chosen, s, nobody, np.arange(0)) for s in (state, wider))
    np.testing.assert_allclose(2 * one.params["b"], two.params["b"], rtol=1e-5)
    assert float(one.clip_norm) != CLIP and np.isfinite(float(one.unclipped))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mechanism", ["tree", "toeplitz"])
def test_correlated_noise_takes_another_clip_when_it_restarts(mechanism):
    """Within a restart the clip stands still; the next one has noise in units of the new clip."""
    drawn = Sampling(law="spaced", population=20, cohort=4, min_separation=3)
    chosen = algorithm(
        mechanism=mechanism, sampling=drawn, restart_every=2, noise_multiplier=1.5,
        clip_quantile=0.5, clip_noise=2.0, clip_rate=2.0,
    )  # fmt: skip
    state, seen, noise = init_node(chosen, WIDE, SECRET), [], []
    for r in range(6):
        total = sum_of(WIDE, clip_norm=float(state.clip_norm))
        after = server_half(chosen, state, total, np.arange(4 * r % 20, 4 * r % 20 + 4))
        seen.append(float(state.clip_norm))
        noise.append((np.asarray(after.params["a"]) - np.asarray(state.params["a"])).ravel())
        state = after
    assert seen[0] == seen[1] != seen[2] == seen[3] != seen[4] == seen[5]
    for first in (0, 2, 4):
        stddev = chosen.plan.sum_multiplier * seen[first] / 4
        assert noise[first].std() == pytest.approx(stddev, rel=0.15)
        # Noise of the second round takes a part of the first back; nothing of the last restart.
        assert np.corrcoef(noise[first], noise[first + 1])[0, 1] < -0.2
        assert first == 0 or abs(np.corrcoef(noise[first - 1], noise[first])[0, 1]) < 0.2


def test_the_same_sum_has_the_same_noise_and_any_other_sum_other_noise():
    """Two releases of one round that differ in a member must not cancel their noise."""
    chosen = algorithm(noise_multiplier=1.5)
    state = init_node(chosen, WIDE, SECRET)
    ones = jax.tree.map(lambda x: np.full_like(x, 1e-3), WIDE)
    nearly = {**ones, "b": ones["b"] + np.float32(1e-9) * (np.arange(7) == 3)}
    total, near, twice = sum_of(ones), sum_of(nearly), sum_of(ones, WIDE)

    def noise(total, state=state):
        after = server_half(chosen, state, total, np.arange(0))
        return (np.asarray(after.params["a"]) - np.asarray(total.delta["a"]) / 4).ravel()

    assert np.array_equal(noise(total), noise(total))
    later = dataclasses.replace(state, round=state.round + 1)
    other = init_node(chosen, WIDE, bytes(16))
    for unrelated in (noise(near), noise(twice), noise(total, later), noise(total, other)):
        assert abs(np.corrcoef(noise(total), unrelated)[0, 1]) < 0.2
    keys = [_noise_key(chosen, state, t) for t in (total, near, twice)]
    assert len({bytes(np.asarray(k)) for k in keys}) == 3


def test_cohorts_under_a_plan_follow_the_secret_and_not_the_seed():
    base = algorithm()
    many = Sampling(law="poisson", population=200, cohort=20)
    chosen = dataclasses.replace(base, participation=dataclasses.replace(base.plan, sampling=many))

    def drawn(seed, secret):
        choose = CohortSampler(chosen, seed, init_node(chosen, WIDE, secret))
        return [tuple(choose(r)) for r in range(3)]

    assert drawn(1, SECRET) == drawn(2, SECRET) != drawn(1, bytes(16))
    assert private_seed(init_node(chosen, WIDE, SECRET)) == int.from_bytes(SECRET, "little")


# ---- canaries --------------------------------------------------------------------------


def test_canaries_are_the_last_of_the_population_and_send_a_clipped_direction():
    chosen = algorithm(canaries=3)
    state = init_node(chosen, WIDE, SECRET)
    members = np.array([1, 3, 4, 6])
    assert with_text(chosen, members).tolist() == [1, 3]
    after = server_half(chosen, state, empty_total(WIDE), members)

    def sent_by(number):
        return direction(cipher_key_for(private_seed(state), "canary", member=number), WIDE)

    sent = [sent_by(number) for number in (4, 6)]
    wanted = tree.scale(tree.add(*sent), CLIP / 4)
    for x, y in zip(jax.tree.leaves(after.params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)
    assert float(tree.norm(sent[0])) == pytest.approx(1, rel=1e-5)
    alike = sum(float(jnp.sum(a * b)) for a, b in zip(*map(jax.tree.leaves, sent), strict=True))
    assert abs(alike) < 0.2, "two canaries have unrelated directions"
    assert tree.sha256(sent_by(4)) == tree.sha256(sent[0])


# ---- what is told, and what is remembered ----------------------------------------------

FACTS = {"round": 2, "seconds": 1.0, "upload_bytes": 5, "download_bytes": 6}
UNRELEASED = ("members", "refused", "steps", "tokens", "loss", "unclipped", "anything_new")
FACTS |= dict.fromkeys(UNRELEASED, 3)


def test_a_private_round_tells_no_sum_without_noise():
    chosen = algorithm(noise_multiplier=1.0)
    state = init_node(chosen, WIDE, SECRET)
    said = told(chosen, dict(FACTS), state, state)
    hidden = {"refused", "steps", "tokens", "loss", "unclipped", "anything_new"}
    assert not hidden & said.keys()
    # How many were expected, not how many came; so too for bytes.
    assert said["members"] == 4
    assert said["upload_bytes"] == 4 * dense().encoded_bytes(WIDE)
    assert said["clip_norm"] == CLIP and said["noise_to_signal"] > 0
    revealed = algorithm(noise_multiplier=1.0, reveal=True)
    assert dict(told(revealed, dict(FACTS), state, state)).items() >= FACTS.items()
    open_ = dataclasses.replace(chosen, participation=chosen.sampling)
    assert dict(told(open_, dict(FACTS), state, state)) == FACTS


def test_an_adaptive_clip_tells_the_noisy_share_and_not_the_count():
    chosen = algorithm(noise_multiplier=1.5, clip_quantile=0.5, clip_noise=2.0)
    state = init_node(chosen, WIDE, SECRET)
    after = server_half(chosen, state, sum_of(WIDE, WIDE), np.arange(2))
    assert told(chosen, dict(FACTS), state, after)["unclipped_share"] == float(after.unclipped)


def test_who_came_and_the_memory_of_the_noise_are_in_the_state():
    plan = plan_of("tree")
    chosen = dataclasses.replace(algorithm(), participation=plan)
    state = init_node(chosen, WIDE, SECRET)
    choose, total, met = CohortSampler(chosen, 0, state), sum_of(WIDE), []
    for r in range(4):
        members = choose(r)
        met.append(members)
        state = server_half(chosen, state, total, members)
        # One who takes over here draws on as one who was there from the start.
        assert CohortSampler(chosen, 0, state)(r + 1).tolist() == _next(choose, r + 1)
    times = np.bincount(np.concatenate(met), minlength=plan.sampling.population)
    assert np.array_equal(np.asarray(state.history.times), times)
    assert len(jax.tree.leaves(state.noise_memory)) > 0
    copied = jax.tree.map(lambda x: jnp.array(np.asarray(x)), state)
    ends = [server_half(chosen, s, total, np.arange(3)) for s in (state, copied)]
    assert tree.sha256(ends[0]) == tree.sha256(ends[1])


def _next(choose, r):
    """The next cohort, without drawing it."""
    history = choose.history
    found = choose(r).tolist()
    choose.history = history
    return found
