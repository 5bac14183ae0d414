"""Laws 1 and 4: every engine returns the loop engine's sum; cohorts share one program."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.cohort.packing import batch_order, batches_of
from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.core.types import PAD, BatchSpec, Cohort, Loss, Sampling, Start
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import init_node, server_half
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.methods.optimizers import CLIENT_OPTIMIZERS, client_optimizer, schedule
from fedlm.models import catalog
from fedlm.privacy.plan import PrivacyPlan
from fedlm.wire.dense import dense

SIZES = (1, 9, 4, 30, 2, 17, 4, 5)
SHAPE = BatchSpec(batch_size=4, sequence_length=6)
MEMBERS = np.arange(len(SIZES))
SERVER = fedavg.fedavg_server(optax.sgd(1.0))  # one program for all algorithms that have it


def rows_of(client):
    rng = np.random.default_rng(client)
    rows = rng.integers(4, 30, (SIZES[client], 7)).astype(np.int16)
    rows[rng.random(SIZES[client]) < 0.3, 4:] = PAD
    return rows


@functools.cache  # equal algorithms share the programs of the loop engine and of the server
def algorithm(optimizer="sgd", weight="examples", loss=catalog.loss, clip=0.0):
    return Algorithm(
        participation=Sampling(law="fixed", population=len(SIZES), cohort=4),
        local=local_training(loss, client_optimizer(optimizer, 0.1, clip=clip), WEIGHTS[weight]),
        upload=dense(),
        download=dense(),
        server=SERVER,
    )


def private(**changes):
    """Everybody in every round, with a clip that is shorter than most updates."""
    drawn = Sampling(law="poisson", population=len(SIZES), cohort=len(SIZES))
    settings = {"rounds": 4, "clip_norm": 0.03, "noise_multiplier": 0.5, "delta": 1e-5}
    plan = PrivacyPlan(mechanism="gaussian", sampling=drawn, **(settings | changes))
    return dataclasses.replace(algorithm(weight="uniform"), participation=plan)


@functools.cache
def model(name="cifg"):
    return catalog.make(
        name,
        catalog.Dimensions(vocab=30, embedding_size=8, hidden_size=16, heads=2, kernel_size=3),
        key_for(0, "init"),
    )


def assert_same(a, b, rtol=2e-5):
    """Equal up to rounding at the scale of the whole tree: some gradients are zero by nature."""
    scale = max(float(np.abs(y).max()) for y in jax.tree.leaves(getattr(b, "delta", b)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1e-3, scale))


@functools.cache
def engine_of(kind, optimizer="sgd", clip=0.0):
    """An engine that tests share: what one of them has compiled, the others need not."""
    return kind(algorithm(optimizer, clip=clip), rows_of, SHAPE, 7)


def total(engine, params, round=0, members=MEMBERS, **start):
    """The sum of a cohort's updates, all from the same parameters."""
    return engine.total(Start(params, **start), engine.prepare(round, members)).total


PAIRS = [
    *((o, "examples") for o in sorted(CLIENT_OPTIMIZERS)),
    ("sgd", "tokens"),
    ("sgd", "uniform"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer, weight", PAIRS)
def test_mesh_equals_loop(optimizer, weight):
    chosen = algorithm(optimizer, weight, clip=0.5)
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    params = model()
    slow = loop.total(Start(params), loop.prepare(3, MEMBERS))
    fast = mesh.total(Start(params), mesh.prepare(3, MEMBERS))
    assert_same(fast.total, slow.total)
    assert (fast.upload_bytes, fast.download_bytes) == (slow.upload_bytes, slow.download_bytes)


def test_mesh_equals_loop_where_the_clients_rate_changes_over_rounds():
    rate = schedule("cosine", 0.1, rounds=8, warmup=2, end=0.1)
    local = local_training(catalog.loss, client_optimizer("sgd", 1.0), WEIGHTS["examples"])
    chosen = dataclasses.replace(algorithm(), local=local, rate_of=lambda round: float(rate(round)))
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    moved = []
    for round in (0, 6):
        slow, fast = (total(e, model(), round) for e in (loop, mesh))
        assert_same(fast, slow)
        moved.append(float(tree.norm(fast.delta)))
    assert mesh.traces <= 1, "a round's rate is data"
    assert moved[0] > 1.3 * moved[1] > 0, "0.5 of the rate in the first round, 0.33 in the seventh"


def test_mesh_equals_loop_under_a_plan_whose_clip_binds():
    chosen, params = private(), model()
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    clip_norm = chosen.plan.clip_norm
    slow, fast = (total(e, params, 3, clip_norm=clip_norm) for e in (loop, mesh))
    assert_same(fast, slow)
    assert 0 < float(slow.unclipped) < len(SIZES) - 2, "some are clipped and some are not"
    assert float(slow.weight) == float(slow.members) == len(SIZES)
    for arrived in mesh.updates(Start(params, clip_norm), mesh.prepare(3, MEMBERS)):
        assert float(tree.norm(arrived.update.delta)) <= clip_norm
    tighter = total(mesh, params, 3, clip_norm=clip_norm / 2)
    assert mesh.traces <= 1, "a clip_norm is data, and another one no other program"
    assert float(tree.norm(tighter.delta)) < float(tree.norm(fast.delta))


@pytest.mark.slow
def test_engines_stay_together_while_a_clip_adapts():
    """Noise of a round is named by its sum, so here there is none: sums differ by rounding."""
    chosen = private(clip_quantile=0.6, noise_multiplier=0.0, clip_rate=1.0)
    ended = []
    for engine in (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine)):
        state, limits = init_node(chosen, model()), []
        for r in range(4):
            limits.append(float(state.clip_norm))
            found = total(engine, state.params, r, clip_norm=limits[-1])
            state = server_half(chosen, state, found, MEMBERS)
        assert len(set(limits)) == 4
        ended.append((state.params, np.array(limits)))
    assert_same(ended[1][0], ended[0][0])
    np.testing.assert_allclose(ended[1][1], ended[0][1], rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(catalog.ARCHITECTURES))
def test_mesh_equals_loop_for_every_architecture(name):
    loop, mesh = (engine_of(E) for E in (LoopEngine, MeshEngine))
    params = model(name)
    assert_same(total(mesh, params), total(loop, params))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["cifg", "transformer"])
def test_mesh_equals_loop_in_bfloat16(name):
    """To the rounding of bfloat16, which programs do in different places; sums are float32."""
    loop, mesh = (engine_of(E) for E in (LoopEngine, MeshEngine))
    params = dataclasses.replace(model(name), dtype="bfloat16")
    fast, slow = total(mesh, params), total(loop, params)
    assert_same(fast, slow, rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(fast)} == {np.dtype("float32")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(BatchSpec(batch_size=4, sequence_length=6, epochs=3), id="epochs"),
        pytest.param(BatchSpec(batch_size=4, sequence_length=6, max_examples=5), id="examples"),
        pytest.param(BatchSpec(batch_size=4, sequence_length=6, epochs=2, max_steps=3), id="steps"),
        pytest.param(BatchSpec(batch_size=64, sequence_length=6), id="one batch"),
    ],
)
def test_mesh_equals_loop_for_every_shape_of_local_work(shape):
    loop, mesh = (E(algorithm(), rows_of, shape, 7) for E in (LoopEngine, MeshEngine))
    params = model()
    assert_same(total(mesh, params, 1), total(loop, params, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("capacity", [1, 2, 3, 64])
def test_the_cut_into_chunks_changes_nothing(capacity):
    params, whole = model(), engine_of(MeshEngine, "adam")
    cut = MeshEngine(algorithm("adam"), rows_of, SHAPE, 7, capacity=capacity)
    assert_same(total(cut, params), total(whole, params))


def test_one_lane_equals_two():
    params, two = model(), engine_of(MeshEngine)
    one = MeshEngine(algorithm(), rows_of, SHAPE, 7, devices=jax.devices()[:1])
    assert (one.lanes, two.lanes) == (1, 2)
    assert_same(total(one, params), total(two, params))


def same_updates(fast, slow):
    for a, b in zip(fast, slow, strict=True):
        assert (a.member, *a[2:]) == (b.member, *b[2:]), "members and bytes"
        assert_same(a.update, b.update)


def test_updates_come_one_by_one_in_the_order_of_the_cohort():
    params = model()
    loop, mesh = (engine_of(E) for E in (LoopEngine, MeshEngine))
    slow, fast = (list(e.updates(Start(params), e.prepare(2, MEMBERS))) for e in (loop, mesh))
    assert [arrived.member for arrived in slow] == list(MEMBERS)
    same_updates(fast, slow)
    sums = loop.total(Start(params), loop.prepare(2, MEMBERS))
    assert sums[1:3] == tuple(sum(arrived[i] for arrived in slow) for i in (2, 3))


def test_members_may_begin_from_models_of_their_own():
    """Each then does what it does alone; three members and two lanes leave one lane idle."""
    few = MEMBERS[:3]
    loop, mesh = (E(algorithm("adam"), rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    models = [jax.tree.map(lambda x, k=k: (1 + 0.1 * k) * x, model()) for k in range(len(few))]
    starts = [Start(m) for m in models]
    slow, fast = (list(e.updates(starts, Cohort(2, few))) for e in (loop, mesh))
    same_updates(fast, slow)
    for place, arrived in enumerate(slow):
        ((*_, alone, _, _),) = loop.updates(starts[place], Cohort(2, few[place : place + 1]))
        assert eqx.tree_equal(arrived.update, alone)
    sums = [e.total(starts, Cohort(2, few)) for e in (loop, mesh)]
    assert_same(sums[1].total, sums[0].total)
    assert sums[1][1:] == sums[0][1:]
    assert mesh.traces <= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [LoopEngine, MeshEngine])
def test_batches_packed_ahead_change_nothing(kind):
    engine = engine_of(kind)
    ahead, later = engine.prepare(1, MEMBERS), Cohort(1, MEMBERS)
    assert eqx.tree_equal(*(engine.total(Start(model()), c).total for c in (ahead, later)))


def test_cohorts_of_any_size_share_one_program():
    engine = MeshEngine(algorithm(), rows_of, SHAPE, 7, capacity=8)
    for round, size in enumerate((1, 3, 5, 8, 2)):
        total(engine, model(), round, MEMBERS[:size])
    assert engine.traces <= 1, "none if another test has compiled it"


def test_an_empty_cohort_sums_to_nothing():
    """A Poisson cohort may be empty."""
    engine = engine_of(MeshEngine)
    nothing = total(engine, model(), 0, MEMBERS[:0])
    assert float(nothing.members) == 0 and float(tree.norm(nothing.delta)) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [LoopEngine, MeshEngine])
def test_a_member_that_is_not_finite_is_left_out_and_counted(kind):
    """Client 3 holds the only row with token 29, and the loss is NaN there."""

    def rows(client):
        found = np.minimum(rows_of(client), 28)
        if client == 3:
            found[0, 1] = 29
        return found

    def loss(params, tokens):
        nats, count = catalog.loss(params, tokens)
        return Loss(jnp.where(jnp.any(tokens == 29), jnp.nan, 1.0) * nats, count)

    params = model()
    engine = kind(algorithm(loss=loss), rows, SHAPE, 7)
    found = total(engine, params)
    without = kind(algorithm(), rows, SHAPE, 7)
    wanted = total(without, params, 0, np.delete(MEMBERS, 3))
    assert float(found.refused) == 1
    assert_same(found.delta, wanted.delta)
    assert float(found.weight) == float(wanted.weight)


@pytest.mark.slow
def test_padding_is_inert():
    """Batches of eight hold the same rows as a batch of four filled up with PAD rows."""
    rows = rows_of(1)[:4]
    params = model()
    small, large = (
        batches_of(rows, batch_order(len(rows), shape, np.random.default_rng(0)))[0]
        for shape in (BatchSpec(batch_size=n, sequence_length=6) for n in (4, 8))
    )
    wide = np.pad(large, ((0, 0), (0, 5)), constant_values=PAD)
    gradient = jax.jit(jax.grad(lambda p, t: catalog.loss(p, t).nats))
    grads = [gradient(params, jnp.asarray(t, jnp.int32)) for t in (small, large, wide)]
    assert_same(grads[1], grads[0])
    assert_same(grads[2], grads[0])


def test_the_same_cohort_twice_is_the_same_to_the_byte():
    engine = engine_of(MeshEngine, "adam")
    assert eqx.tree_equal(total(engine, model()), total(engine, model()))
