"""Laws 1 and 6 for what travels: parts of a model, codecs both ways, memories, other methods."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.core.types import Start
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.federation.algorithm import update_like
from fedlm.federation.round import (
    client_state_of,
    init_node,
    outgoing,
    server_half,
    start_of_round,
)
from fedlm.local.train import ALL, WEIGHTS, local_training
from fedlm.methods import fedadamw, feddyn, mimelite, scaffold
from fedlm.methods.optimizers import client_optimizer, server_optimizer
from fedlm.models import catalog
from fedlm.models.partial import ON_BASE, drawn_subset, leaves_by_fraction, low_rank, own_subset
from fedlm.wire.catalog import codec
from tests.engine.test_laws import (
    MEMBERS,
    SHAPE,
    SIZES,
    algorithm,
    assert_same,
    model,
    rows_of,
    total,
)

PARAMS = model()
LIKE = jax.eval_shape(lambda: PARAMS)
RATE = 0.1
BASE = server_optimizer("fedadagrad", 1.0, momentum=0.9, beta2=0.99, epsilon=1e-3)


def trains(part=ALL, optimizer="sgd", **options):
    inner = client_optimizer(optimizer, RATE)
    return local_training(catalog.loss, inner, WEIGHTS["examples"], part=part, **options)


def changed(**parts):
    return dataclasses.replace(algorithm(), **parts)


KEEP = leaves_by_fraction(LIKE, 0.5, key_for(0, "partial"))


@functools.cache
def on_a_base(**options):
    """The leaves of `KEEP` on a base of all others, as `wire.trainable = "fixed"` has it."""
    return changed(local=trains(ON_BASE, **options), make_base=lambda: tree.split(PARAMS, KEEP)[1])


def three_turns():
    keys = jax.random.split(key_for(0, "partial"), 3)
    return tuple(trains(drawn_subset(LIKE, 0.5, key)) for key in keys)


ALGORITHMS = {
    "fixed": lambda: changed(local=trains(drawn_subset(LIKE, 0.5, key_for(0, "partial")))),
    "base": on_a_base,
    "base, remembering": lambda: on_a_base(optimizer="momentum", remember=True),
    "base, deflated": lambda: dataclasses.replace(
        on_a_base(), upload=codec("uniform", bits=6, deflate=True)
    ),
    "base, feedback": lambda: dataclasses.replace(
        on_a_base(), upload=codec("topk", share=0.1), feedback=True
    ),
    "round": lambda: changed(local=three_turns()[0], turns=three_turns()),
    "member": lambda: changed(local=trains(own_subset(0.5))),
    "member, 8 bits": lambda: changed(local=trains(own_subset(0.5)), upload=codec("uniform")),
    "low rank": lambda: changed(local=trains(low_rank(LIKE, 3))),
    "proximal": lambda: changed(local=trains(proximal=0.5)),
    "download": lambda: changed(download=codec("uniform", bits=12)),
    "feedback": lambda: changed(upload=codec("topk", share=0.1), feedback=True),
    "deflated": lambda: changed(upload=codec("uniform", bits=6, deflate=True)),
    "remembering": lambda: changed(local=trains(optimizer="momentum", remember=True)),
    "mimelite": lambda: changed(
        local=mimelite.mimelite_client(catalog.loss, BASE, RATE),
        server=mimelite.mimelite_server(BASE, 1.0),
    ),
    "fedadamw": lambda: changed(
        local=fedadamw.fedadamw_client(catalog.loss, 0.01, alpha=0.5, weight_decay=0.1, clip=1.0),
        server=fedadamw.fedadamw_server(optax.sgd(1.0), 0.01),
    ),
    "scaffold": lambda: changed(
        local=scaffold.scaffold_client(catalog.loss, RATE),
        server=scaffold.scaffold_server(optax.sgd(1.0), 0.5),
    ),
    "feddyn": lambda: changed(
        local=feddyn.feddyn_client(catalog.loss, client_optimizer("sgd", RATE), 0.1),
        server=feddyn.feddyn_server(0.1, 0.5),
    ),
}


# Made once each: equal algorithms share the programs of the loop engine and of the server.
ALGORITHMS = {name: functools.cache(make) for name, make in ALGORITHMS.items()}


def rounds(engine, chosen, count=2):
    """The state after a few rounds in which different members take part, and their bytes."""
    state, upload, download = init_node(chosen, PARAMS), 0, 0
    for r in range(count):
        members = MEMBERS[r::2]
        found = engine.total(start_of_round(chosen, state, members), engine.prepare(r, members))
        state = server_half(chosen, state, found.total, members)
        upload, download = upload + found.upload_bytes, download + found.download_bytes
    return state, upload, download


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_mesh_equals_loop_over_rounds(name):
    chosen = ALGORITHMS[name]()
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    (slow, *moved), (fast, *counted) = rounds(loop, chosen), rounds(mesh, chosen)
    lossy = chosen.upload.name != "float32" or chosen.download.name != "float32"
    assert_same(fast.params, slow.params, rtol=2e-3 if lossy else 2e-5)
    assert (fast.client_state is None) == (slow.client_state is None)
    if slow.client_state is not None and not lossy:
        assert_same(fast.client_state, slow.client_state, rtol=1e-4)
    assert counted == moved and min(moved) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["member", "deflated", "remembering", "scaffold"])
def test_each_member_alone_is_the_same_in_both_engines(name):
    chosen = ALGORITHMS[name]()
    start = start_of_round(chosen, init_node(chosen, PARAMS), MEMBERS)
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    both = [list(e.updates(start, e.prepare(0, MEMBERS))) for e in (loop, mesh)]
    assert len(both[0]) == len(both[1]) == len(MEMBERS)
    for (number, slow, *sizes), (other, fast, *others) in zip(*both, strict=True):
        assert number == other and sizes == others and min(sizes) > 0
        assert_same(fast.delta, slow.delta, rtol=2e-3)
        assert (fast.client_state is None) == (slow.client_state is None) == (not chosen.remembers)
        if chosen.remembers:
            assert_same(fast.client_state, slow.client_state, rtol=1e-3)


def test_a_leaf_that_nobody_trains_keeps_its_bits():
    chosen = ALGORITHMS["fixed"]()
    state, *_ = rounds(MeshEngine(chosen, rows_of, SHAPE, 7), chosen)
    names = tree.named_leaves(update_like(chosen, PARAMS).delta)
    before, after = tree.named_leaves(PARAMS), tree.named_leaves(state.params)
    assert 0 < len(names) < len(before)
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name not in names), name


def test_a_member_holds_still_what_it_did_not_draw_and_sends_no_byte_of_it():
    chosen = ALGORITHMS["member"]()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    seen, upload = set(), 0
    for _, update, size, _ in engine.updates(Start(PARAMS), engine.prepare(0, MEMBERS)):
        upload += size
        moved = [bool(np.any(np.asarray(x))) for x in jax.tree.leaves(update.delta)]
        assert all(not m or k for m, k in zip(moved, np.asarray(update.mask) > 0, strict=True))
        seen.add(tuple(moved))
    assert len(seen) > 1
    whole = len(MEMBERS) * chosen.upload.encoded_bytes(PARAMS)
    assert 0.3 * whole < upload < 0.75 * whole


def test_each_leaf_is_averaged_over_those_who_trained_it():
    chosen = ALGORITHMS["member"]()
    engine = LoopEngine(chosen, rows_of, SHAPE, 7)
    cohort = engine.prepare(0, MEMBERS)
    updates = [arrived.update for arrived in engine.updates(Start(PARAMS), cohort)]
    state = init_node(chosen, PARAMS)
    after = server_half(chosen, state, engine.total(Start(PARAMS), cohort).total, MEMBERS)
    for leaf, (new, old) in enumerate(
        zip(jax.tree.leaves(after.params), jax.tree.leaves(PARAMS), strict=True)
    ):
        weights = np.array([float(u.weight * u.mask[leaf]) for u in updates])
        moves = np.stack([np.asarray(jax.tree.leaves(u.delta)[leaf]) for u in updates])
        wanted = np.tensordot(weights, moves, 1) / max(weights.sum(), 1e-9)
        np.testing.assert_allclose(np.asarray(new) - np.asarray(old), wanted, atol=1e-6)


@pytest.mark.slow
def test_members_start_from_what_the_download_left():
    """With a coarse download a member that does not move has a change of zero, not of the error."""
    still = changed(
        download=codec("uniform", bits=4), local=local_training(catalog.loss, optax.sgd(0.0))
    )
    engine = MeshEngine(still, rows_of, SHAPE, 7)
    assert float(tree.norm(total(engine, PARAMS).delta)) == 0.0
    moving = changed(download=codec("uniform", bits=4))
    engine = MeshEngine(moving, rows_of, SHAPE, 7)
    coarse = total(engine, PARAMS).delta
    engine = MeshEngine(algorithm(), rows_of, SHAPE, 7)
    exact = total(engine, PARAMS).delta
    assert float(tree.norm(tree.sub(coarse, exact))) > 1e-3 * float(tree.norm(exact))


def test_error_feedback_sends_in_the_end_what_was_left_out():
    """What arrived over the rounds and what is still kept add up to what was wanted."""
    chosen = ALGORITHMS["feedback"]()
    engine = LoopEngine(chosen, rows_of, SHAPE, 7)
    state = init_node(chosen, PARAMS)
    one = MEMBERS[3:4]
    wanted, arrived = tree.zeros_like(PARAMS), tree.zeros_like(PARAMS)
    for r in range(3):
        start, cohort = start_of_round(chosen, state, one), engine.prepare(r, one)
        plain = LoopEngine(algorithm(), rows_of, SHAPE, 7)
        ((_, full, *_),) = plain.updates(Start(state.params), cohort)
        ((_, update, *_),) = engine.updates(start, cohort)
        wanted, arrived = tree.add(wanted, full.delta), tree.add(arrived, update.delta)
        state = server_half(chosen, state, engine.total(start, cohort).total, one)
    left = client_state_of(state, one).residual
    both = tree.add(arrived, tree.take(left, 0))
    assert_same(both, wanted, rtol=1e-5)
    assert float(tree.norm(tree.sub(arrived, wanted))) > 0.01 * float(tree.norm(wanted))


@pytest.mark.slow
def test_a_proximal_term_of_zero_is_fedavg_to_the_byte():
    plain = LoopEngine(algorithm(), rows_of, SHAPE, 7)
    prox = LoopEngine(changed(local=trains(proximal=0.0)), rows_of, SHAPE, 7)
    one, two = (total(e, PARAMS) for e in (plain, prox))
    assert tree.sha256(one.delta) == tree.sha256(two.delta)
    pulled = LoopEngine(changed(local=trains(proximal=5.0)), rows_of, SHAPE, 7)
    assert float(tree.norm(total(pulled, PARAMS).delta)) < 0.9 * float(tree.norm(one.delta))


@pytest.mark.slow
def test_methods_begin_like_fedavg():
    """Before any drift is known, SCAFFOLD's first round is FedAvg's."""
    engine = MeshEngine(algorithm(), rows_of, SHAPE, 7)
    wanted = total(engine, PARAMS).delta
    chosen = ALGORITHMS["scaffold"]()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    start = start_of_round(chosen, init_node(chosen, PARAMS), MEMBERS)
    found = engine.total(start, engine.prepare(0, MEMBERS)).total
    assert_same(found.delta["params"], wanted)
    # A member's drift is its mean gradient: the way it went, over how far it could go.
    steps = -(-SIZES[3] // SHAPE.batch_size)
    plain = LoopEngine(algorithm(), rows_of, SHAPE, 7)
    ((_, moved, *_),) = plain.updates(Start(PARAMS), plain.prepare(0, MEMBERS[3:4]))
    own = tree.take(found.client_state.own, 3)
    assert_same(own, tree.scale(moved.delta, -1.0 / (RATE * steps)), rtol=1e-4)


@pytest.mark.slow
def test_mimelite_uploads_twice():
    mime, plain = ALGORITHMS["mimelite"](), algorithm()
    (_, *twice), (_, *once) = (
        rounds(MeshEngine(a, rows_of, SHAPE, 7), a, 1) for a in (mime, plain)
    )
    assert twice[0] > 1.99 * once[0] - 100 and twice[1] > 1.9 * once[1]


@pytest.mark.slow
def test_mimelite_sends_the_gradient_of_the_whole_text_at_the_servers_model():
    chosen = ALGORITHMS["mimelite"]()
    engine = LoopEngine(chosen, rows_of, SHAPE, 7)
    state = init_node(chosen, PARAMS)
    start, cohort = Start(outgoing(chosen, state)), engine.prepare(0, MEMBERS[3:4])
    ((_, update, *_),) = engine.updates(start, cohort)

    def mean_loss(params):
        nats, tokens = catalog.loss(params, jnp.asarray(rows_of(3), jnp.int32))
        return nats / tokens

    assert_same(update.delta["gradient"], jax.grad(mean_loss)(PARAMS), rtol=1e-4)


@pytest.mark.slow
def test_low_rank_updates_have_the_rank_and_differ_in_their_space_by_round():
    chosen = ALGORITHMS["low rank"]()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    changes, upload = [], 0
    for r in range(2):
        state = init_node(chosen, PARAMS)
        state = dataclasses.replace(state, round=jnp.int32(r))
        found = engine.total(Start(PARAMS), engine.prepare(r, MEMBERS))
        upload += found.upload_bytes
        after = server_half(chosen, state, found.total, MEMBERS)
        changes.append(np.asarray(after.params.embedding - PARAMS.embedding))
    for change in changes:
        values = np.linalg.svd(change, compute_uv=False)
        assert values[3] < 1e-4 * values[0]
    assert np.linalg.matrix_rank(np.concatenate(changes), tol=1e-5) == 6
    assert upload < 0.75 * 2 * len(MEMBERS) * chosen.upload.encoded_bytes(PARAMS)
