"""Law 1 where several devices share a model: a divided lane returns the loop engine's sum."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.types import Cohort, Start
from fedlm.deploy.local import redacted
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import LaneInput, MeshEngine
from fedlm.engine.sharding import LaneMesh, divided, of_any_lane, of_lane
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods.optimizers import client_optimizer
from fedlm.models import catalog
from fedlm.recipe.build import build
from fedlm.recipe.settings import load, parse
from tests.engine.test_laws import (
    MEMBERS,
    SHAPE,
    SIZES,
    algorithm,
    assert_same,
    engine_of,
    model,
    private,
    rows_of,
    same_updates,
    total,
)
from tests.engine.test_traffic import ALGORITHMS, rounds

Sharded = partial(MeshEngine, shard=2)  # one lane of the two devices that tests have


@pytest.fixture
def made(tiny_recipe, tmp_path):
    """`made("table.key=value", ...)`: the tiny experiment with changes."""
    return lambda *changes: build(
        load(tiny_recipe, changes), tmp_path / "stores", lambda stage, done: None
    )


EIGHT = Path(__file__).with_name("eight_devices.py")


def test_a_place_follows_from_the_shape():
    assert divided((10_000, 96), 4) == P("shards")
    assert divided((96, 10_000), 4) == P(None, "shards")
    assert divided((30, 96), 4) == P(None, "shards"), "the longest that can be divided"
    assert divided((96, 96), 4) == P("shards"), "the first of several"
    for whole in ((96,), (), (30, 50), (0, 3)):
        assert divided(whole, 4) == P()
    assert divided((96, 96), 1) == P()


def test_devices_that_are_no_multiple_of_the_shards_are_refused():
    with pytest.raises(ConfigError, match=r"run\.shard = 3: expected a number that divides the 2"):
        MeshEngine(algorithm(), rows_of, SHAPE, 7, shard=3)


def test_what_was_divided_comes_back_whole():
    places = LaneMesh(tuple(jax.devices()), 2)
    rows = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
    put = jax.device_put(rows, places.of_lanes(rows))
    assert {part.data.shape for part in put.addressable_shards} == {(1, 4, 3)}
    np.testing.assert_array_equal(of_lane(put, 0), rows[0])
    same = jax.device_put(rows[0], places.of_all(rows[0]))
    np.testing.assert_array_equal(of_any_lane(same), rows[0])
    np.testing.assert_array_equal(places.on_first_lane(same), rows[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(catalog.ARCHITECTURES))
def test_a_divided_lane_equals_the_loop_for_every_architecture(name):
    params = model(name)
    assert_same(total(engine_of(Sharded), params), total(engine_of(LoopEngine), params))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifg", "transformer"])
def test_a_divided_lane_equals_the_loop_in_bfloat16(name):
    """To the rounding of bfloat16, as an undivided lane."""
    params = dataclasses.replace(model(name), dtype="bfloat16")
    fast, slow = (total(engine_of(E), params) for E in (Sharded, LoopEngine))
    assert_same(fast, slow, rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(fast)} == {np.dtype("float32")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_divided_lane_equals_the_loop_over_rounds(name):
    chosen = ALGORITHMS[name]()
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, Sharded))
    (slow, *moved), (fast, *counted) = rounds(loop, chosen), rounds(mesh, chosen)
    lossy = chosen.upload.name != "float32" or chosen.download.name != "float32"
    assert_same(fast.params, slow.params, rtol=2e-3 if lossy else 2e-5)
    if slow.client_state is not None and not lossy:
        assert_same(fast.client_state, slow.client_state, rtol=1e-4)
    if not chosen.upload.fixed_size:  # one number rounded the other way deflates to other bytes
        np.testing.assert_allclose(counted[0], moved[0], rtol=2e-3)
        counted[0] = moved[0]
    assert counted == moved and min(moved) > 0


def test_a_divided_lane_equals_the_loop_under_a_plan_whose_clip_binds():
    chosen, params = private(), model()
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, Sharded))
    slow, fast = (total(e, params, 3, clip_norm=chosen.plan.clip_norm) for e in (loop, mesh))
    assert_same(fast, slow)
    assert 0 < float(slow.unclipped) < len(SIZES) - 2, "some are clipped and some are not"


# ---- adaptive optimisers ---------------------------------------------------------------------
#
# Adam divides a gradient by its own size. Where one is zero by nature, as that of the bias of keys
# is, which softmax cancels, its rounding becomes a step as long as any other: there two right
# programs differ by whole steps. So far the loop engine also moves from itself if its start is
# nudged, and that is the measure of each leaf.

ADAPTIVE, RATE, CLIP = ("adam", "adamw"), 0.1, 0.5  # of `algorithm`; most gradients are longer


def leaves_apart(found, wanted):
    """How far each leaf of two sums of changes is apart, in units of `assert_same`'s tolerance."""
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted.delta))
    theirs = tree.named_leaves(found.delta)
    return {
        name: float(np.max(np.abs(theirs[name] - y) / (2e-5 * (max(1e-3, scale) + np.abs(y)))))
        for name, y in tree.named_leaves(wanted.delta).items()
    }


def nudged(params, seed):
    """Every number moved by one unit in its last place, up or down."""
    rng = np.random.default_rng(seed)

    def one(x):
        ways = np.where(rng.random(x.shape) < 0.5, -np.inf, np.inf).astype(x.dtype)
        return np.nextafter(np.asarray(x), ways)

    return jax.tree.map(one, params)


@functools.cache
def by_rounding(optimizer):
    """The loop engine's sum, and how far four nudges of the start move each of its leaves."""
    loop, params = engine_of(LoopEngine, optimizer, CLIP), model("transformer")
    wanted = total(loop, params)
    moved = [leaves_apart(total(loop, nudged(params, seed)), wanted) for seed in range(4)]
    return wanted, {leaf: max(one[leaf] for one in moved) for leaf in moved[0]}


def beyond_rounding(found, optimizer):
    """How far each leaf is from the loop engine's, as a multiple of tolerance and rounding."""
    wanted, moved = by_rounding(optimizer)
    off = leaves_apart(found, wanted)
    return {leaf: off[leaf] / max(1.0, moved[leaf]) for leaf in off}


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_clipped_adam_moves_a_divided_lane_no_further_than_rounding(optimizer):
    params = model("transformer")
    found = beyond_rounding(total(engine_of(Sharded, optimizer, CLIP), params), optimizer)
    assert max(found.values()) <= 4, found
    _, moved = by_rounding(optimizer)
    assert [leaf for leaf in moved if moved[leaf] > 100] == ["blocks.0.attention.key.bias"]


def norm_of_one_device(limit):
    """Clip by the norm of half of every matrix, as if devices did not add up their squares."""

    def update(changes, state, params=None):
        halves = [x[: len(x) // 2] if x.ndim > 1 else x for x in jax.tree.leaves(changes)]
        scale = jnp.minimum(1.0, limit / tree.norm(halves))
        return jax.tree.map(lambda x: x * scale, changes), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def loss_of_one_device(params, tokens):
    """The loss of half of the rows, as if devices did not add up their gradients."""
    return catalog.loss(params, tokens[::2])


WRONG = {
    "norm": lambda optimizer: (
        catalog.loss,
        optax.chain(norm_of_one_device(CLIP), client_optimizer(optimizer, RATE)),
    ),
    "gradient": lambda optimizer: (
        loss_of_one_device,
        client_optimizer(optimizer, RATE, clip=CLIP),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("optimizer", ["sgd", *ADAPTIVE])
def test_a_sum_over_devices_that_was_left_out_is_far_beyond_rounding(optimizer, wrong):
    local = local_training(*WRONG[wrong](optimizer), WEIGHTS["examples"])
    chosen = dataclasses.replace(algorithm(), local=local)
    found = total(Sharded(chosen, rows_of, SHAPE, 7), model("transformer"))
    assert max(beyond_rounding(found, optimizer).values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "conformer", "cifg"])
def test_in_float64_a_divided_lane_equals_the_loop_with_clipped_adam(name):
    """There rounding is below Adam's epsilon, and every leaf is within the usual tolerance."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), model(name))
        slow, fast = (total(engine_of(E, "adam", CLIP), params) for E in (LoopEngine, Sharded))
    assert jax.tree.leaves(fast.delta)[0].dtype == np.float64
    assert_same(fast, slow)


def test_members_of_a_divided_lane_may_begin_from_models_of_their_own():
    """In float64: Adam's first step amplifies the rounding of gradients that are nearly zero."""
    few = MEMBERS[:3]
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), model())
        starts = [Start(tree.scale(params, 1 + 0.1 * k)) for k in range(len(few))]
        loop, mesh = (engine_of(E, "adam") for E in (LoopEngine, Sharded))
        same_updates(*(list(e.updates(starts, Cohort(2, few))) for e in (mesh, loop)))


def test_every_device_of_a_lane_holds_a_part_and_the_program_moves_none():
    """The compiled program takes and gives the divided state in place, with a half per device."""
    engine = engine_of(Sharded, "adam")
    lanes = engine._begin(engine.algorithm.local, Start(model()), 0)
    stream = engine._to_lanes(engine.prepare(0, MEMBERS).batches[0])
    given = LaneInput((lanes.shared, lanes.clip_norm), engine._base, stream)
    lowered = engine._programs.chunk.lower(engine.algorithm.local, False, lanes.state, given)
    compiled = lowered.compile()
    before, after = compiled.input_shardings[0][0], compiled.output_shardings
    held = jax.tree.leaves(lanes.state)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), held, strict=True)
    for enters, leaves, leaf in pairs:
        assert enters.is_equivalent_to(leaves, leaf.ndim)
        assert leaf.sharding.is_equivalent_to(enters, leaf.ndim)
    matrices = [leaf for leaf in held if leaf.ndim > 2]
    assert matrices and all(2 * x.addressable_data(0).size == x.size for x in matrices)


def test_the_loop_engine_has_no_shards(made):
    with pytest.raises(ConfigError, match=r"run\.shard = 2: expected 1, unless run\.engine"):
        made("run.engine=loop", "run.shard=2")
    assert made("run.shard=2").engine.lanes == 1


def test_a_node_is_not_told_how_a_server_divides_its_models():
    assert "shard = 1" in redacted(parse({"run": {"shard": 4}}))


def eight(*arguments):
    """What `eight_devices.py` prints, run with eight devices of its own."""
    done = subprocess.run(
        [sys.executable, EIGHT, *arguments],
        cwd=EIGHT.parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", [2, 4, 8])
def test_eight_devices_in_lanes_of_several_equal_the_loop(shard):
    (found,) = eight(str(shard), "sgd", "cifg")
    assert found["lanes"] == 8 // shard and found["divided"] > 0
    assert found["off"] <= 1, "in units of the tolerance"


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, 4, 8])
def test_lanes_of_several_devices_equal_the_loop_for_every_architecture(shard):
    found = eight(str(shard), "sgd", *catalog.ARCHITECTURES)
    assert [row["name"] for row in found] == list(catalog.ARCHITECTURES)
    assert all(row["off"] <= 1 for row in found), found


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, 4, 8])
def test_eight_devices_equal_the_loop_with_clipped_adam_in_float64(shard):
    found = eight(str(shard), "adam", "cifg", "transformer")
    assert all(row["off"] <= 1 for row in found), found
