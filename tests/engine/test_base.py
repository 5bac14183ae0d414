"""What nobody trains is held once: not in states, frames or sums, and never copied per round."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.types import Start
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import LaneInput, MeshEngine
from fedlm.federation.algorithm import update_like
from fedlm.federation.round import FlatRound, init_node, start_of_round
from tests.engine.test_laws import MEMBERS, SHAPE, private, rows_of
from tests.engine.test_traffic import ALGORITHMS, KEEP, PARAMS, on_a_base, rounds

NAMES = list(tree.named_leaves(PARAMS))
TRAINED = [name for name, keep in zip(NAMES, KEEP, strict=True) if keep]


def names(of):
    return list(tree.named_leaves(of))


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", [LoopEngine, MeshEngine])
def test_a_base_gives_the_same_model_as_a_subset_of_a_whole_one(engine):
    whole, based = ALGORITHMS["fixed"](), on_a_base()
    (one, up, down), (two, *moved) = (
        rounds(engine(a, rows_of, SHAPE, 7), a) for a in (whole, based)
    )
    assert tree.sha256(one.params) == tree.sha256(tree.join(two.params, based.base))
    assert moved[0] == up and moved[1] == up < 0.8 * down


def test_states_frames_and_sums_hold_the_trained_part_alone():
    chosen = on_a_base()
    state = init_node(chosen, PARAMS)
    engine = LoopEngine(chosen, rows_of, SHAPE, 7)
    found = engine.total(start_of_round(chosen, state, MEMBERS), engine.prepare(0, MEMBERS)).total
    assert 0 < len(TRAINED) < len(NAMES)
    assert names(state.params) == names(found.delta) == TRAINED
    assert names(update_like(chosen, state.params).delta) == TRAINED
    whole = FlatRound(algorithm=chosen, engine=engine, seed=0).models(state)[""]
    assert tree.sha256(whole) == tree.sha256(PARAMS)


@pytest.mark.slow
def test_noise_goes_on_the_trained_part_alone():
    based = on_a_base()
    chosen = dataclasses.replace(private(), local=based.local, make_base=based.make_base)
    after, *_ = rounds(MeshEngine(chosen, rows_of, SHAPE, 7), chosen, 1)
    before = tree.without(PARAMS, based.base)
    assert names(after.params) == TRAINED
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after.params), strict=True):
        assert np.all(np.asarray(old) != np.asarray(new)), "every number gets noise of its own"


def buffers(base):
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(base)
        for shard in leaf.addressable_shards
    ]


def test_the_base_stays_where_it_is_and_one_program_does_all_rounds():
    chosen = on_a_base()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    rounds(engine, chosen, 1)
    before = buffers(engine._base)
    rounds(engine, chosen, 3)
    assert buffers(engine._base) == before and engine.traces <= 1
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(engine._base))
    lanes = engine._begin(chosen.local, Start(init_node(chosen, PARAMS).params), 0)
    assert names(lanes.shared) == TRAINED, "what is made anew each round has no base in it"


def test_the_base_is_no_constant_of_the_program():
    chosen = on_a_base()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    lanes = engine._begin(chosen.local, Start(init_node(chosen, PARAMS).params), 0)
    stream = engine._to_lanes(engine.prepare(0, MEMBERS).batches[0])
    given = LaneInput((lanes.shared, lanes.clip_norm), engine._base, stream)
    made = jax.make_jaxpr(engine._programs._run_chunk, static_argnums=(0, 1))(
        chosen.local, False, lanes.state, given
    )
    largest = max((np.size(c) for c in made.consts), default=0)
    assert largest < min(np.size(leaf) for leaf in jax.tree.leaves(chosen.base))


def test_algorithms_that_differ_in_their_base_alone_share_programs():
    one = on_a_base()
    two = dataclasses.replace(one, make_base=lambda: tree.scale(one.base, 2.0))
    assert one == two and hash(one) == hash(two) and one.base is not two.base


def test_a_base_that_a_trace_asks_for_first_is_made_of_arrays():
    frozen = tree.split(PARAMS, KEEP)[1]
    chosen = dataclasses.replace(on_a_base(), make_base=lambda: tree.scale(frozen, 1.0))
    like = jax.eval_shape(lambda p: init_node(chosen, p), jax.eval_shape(lambda: PARAMS))
    assert names(like.params) == TRAINED
    assert all(
        eqx.is_array(leaf) and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(chosen.base)
    )


@pytest.mark.slow
def test_each_member_alone_is_the_same_in_both_engines():
    chosen = on_a_base()
    start = start_of_round(chosen, init_node(chosen, PARAMS), MEMBERS)
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, MeshEngine))
    shared, own = (
        [list(e.updates(s, e.prepare(0, MEMBERS))) for e in (loop, mesh)]
        for s in (start, [start] * len(MEMBERS))
    )
    for slow, *others in zip(*shared, *own, strict=True):
        for other in others:
            assert slow[2:] == other[2:]
            for x, y in zip(
                jax.tree.leaves(slow.update.delta), jax.tree.leaves(other.update.delta), strict=True
            ):
                np.testing.assert_allclose(x, y, atol=1e-5)
