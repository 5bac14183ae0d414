"""Law 1 where several devices share a model: a divided lane returns the loop engine's sum."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.types import Cohort, Start
from fedlm.deploy.local import redacted
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import LaneInput, MeshEngine
from fedlm.engine.sharding import LaneMesh, divided, of_any_lane, of_lane
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(catalog.ARCHITECTURES))
def test_a_divided_lane_equals_the_loop_for_every_architecture(name):
    params = model(name)
    assert_same(total(engine_of(Sharded), params), total(engine_of(LoopEngine), params))


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
    assert counted == moved and min(moved) > 0


def test_a_divided_lane_equals_the_loop_under_a_plan_whose_clip_binds():
    chosen, params = private(), model()
    loop, mesh = (E(chosen, rows_of, SHAPE, 7) for E in (LoopEngine, Sharded))
    slow, fast = (total(e, params, 3, clip_norm=chosen.plan.clip_norm) for e in (loop, mesh))
    assert_same(fast, slow)
    assert 0 < float(slow.unclipped) < len(SIZES) - 2, "some are clipped and some are not"


def test_members_of_a_divided_lane_may_begin_from_models_of_their_own():
    few = MEMBERS[:3]
    starts = [Start(tree.scale(model(), 1 + 0.1 * k)) for k in range(len(few))]
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
    (found,) = eight(str(shard), "cifg")
    assert found["lanes"] == 8 // shard and found["divided"] > 0
    assert found["off"] <= 1, "in units of the tolerance"


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, 4, 8])
def test_eight_devices_equal_the_loop_for_every_architecture(shard):
    found = eight(str(shard), *catalog.ARCHITECTURES)
    assert [row["name"] for row in found] == list(catalog.ARCHITECTURES)
    assert all(row["off"] <= 1 for row in found), found
