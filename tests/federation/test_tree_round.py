"""A round of a tree by hand: two numbers of backbone, one personal layer, a root and two leaves."""

import math
import threading
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.core.errors import RecordError
from fedlm.core.types import Arrived, Update
from fedlm.federation.topology import Place, tree
from fedlm.federation.tree_round import (
    Results,
    TreeConfig,
    _hide,
    add_change,
    down,
    init_tree,
    received,
    train_nodes,
    tree_round,
    up,
)
from fedlm.federation.tree_rounds import tree_metrics
from fedlm.methods import fedavg

START = {"backbone": np.array([1.0, 2.0], np.float32), "head": np.zeros(3, np.float32)}
TOPOLOGY = tree(
    [Place("root", None), Place("a", "root", ("a",)), Place("b", "root", ("b",))], [("a",), ("b",)]
)
ROOT, A, B = range(3)
BYTES = 4


def config(**changes):
    settings = {
        "topology": TOPOLOGY,
        "personal_layers": (None, "head"),
        "seed": 0,
        "temperature": math.inf,
        "compare": "start",
        "residuals": 1,
        "sync_every": 1,
        "order": "levels",
        "servers": (fedavg.fedavg_server(optax.sgd(1.0)),) * 3,
        "weights": (1.0, 3.0, 1.0),
        "pool_clients": True,
        "init_memory": None,
        "rest": lambda node, params: params,
        "clients": 10,
        "algorithms": (None,) * 3,
        "clip_norm": 0.0,
        "noise_multiplier": 0.0,
        "edge_bytes": lambda part: BYTES * sum(x.size for x in jax.tree.leaves(part)),
    }
    return TreeConfig(**(settings | changes))


class Leaves:
    """An engine whose members move by what they are told to; `away` ones do not answer."""

    def __init__(self, *away):
        self.away = away

    def updates(self, starts, cohort):
        for start, member in zip(starts, cohort.members, strict=True):
            if member - 10 not in self.away:
                assert set(start.model) == set(START)
                yield Arrived(int(member), moved(member - 10), 100, 100)


def moved(node):
    delta = jax.tree.map(lambda x: np.full_like(x, node), START)
    one = jnp.ones(())
    return Update(delta, one, 2.0 * one, one, one, 0.0 * one, one)


def test_the_root_moves_by_the_weighted_mean_and_mixes_the_layers_of_its_children():
    chosen = config()
    state, results = tree_round(chosen, Leaves(), init_tree(chosen, START))
    root, a, b = state.nodes
    np.testing.assert_allclose(a.params["backbone"], START["backbone"] + 1)
    np.testing.assert_allclose(b.params["head"], np.full(3, 2.0))
    mean = (3 * 1 + 1 * 2) / 4
    np.testing.assert_allclose(root.params["backbone"], START["backbone"] + mean)
    # An infinite temperature: its own layers are the weighted mean of theirs, and count as one.
    np.testing.assert_allclose(root.params["head"], np.full(3, (mean + 1 + 2) / 3), rtol=1e-6)
    assert int(state.round) == 1 and results.reported[ROOT].agreement == pytest.approx(1.0)


def test_a_model_is_put_to_rest_while_the_next_node_trains_and_never_two_at_a_time():
    done, resting, next_trains = [], threading.Lock(), threading.Event()

    class Watched(Leaves):
        def updates(self, starts, cohort):
            for arrived in super().updates(starts, cohort):
                yield arrived
                next_trains.set()

    def rest_sum(node, part, change):
        assert resting.acquire(blocking=False), "two at a time"
        assert next_trains.wait(60), "the engine goes on while a model is put to rest"
        done.append(node)
        resting.release()
        return add_change(node, part, change)

    chosen = config(rest_sum=rest_sum)
    state, results = tree_round(chosen, Watched(), init_tree(chosen, START))
    assert done == list(results.trained) == [A, B]
    plain = config()
    assert eqx.tree_equal(state, tree_round(plain, Leaves(), init_tree(plain, START))[0])


@pytest.mark.parametrize("node", [A, B])
def test_a_model_that_cannot_be_put_to_rest_ends_the_round_with_its_error(node):
    """The last one too, after which the engine is asked for nothing more."""

    def rest_sum(which, part, change):
        if which == node:
            raise RecordError("no room.")
        return add_change(which, part, change)

    chosen = config(rest_sum=rest_sum)
    with pytest.raises(RecordError, match=r"^no room\.$"):
        tree_round(chosen, Leaves(), init_tree(chosen, START))


def test_a_node_begins_the_next_round_with_the_backbone_of_its_parent():
    chosen = config(temperature=0.0, residuals=0)
    state, _ = tree_round(chosen, Leaves(), init_tree(chosen, START))
    for node, params in enumerate(received(chosen, state)):
        np.testing.assert_array_equal(params["backbone"], state.nodes[ROOT].params["backbone"])
        np.testing.assert_array_equal(params["head"], state.nodes[node].params["head"])


def test_bytes_are_those_of_the_edges():
    """Not those of the engine: a node is where its text is."""
    chosen = config()
    first = init_tree(chosen, START)
    state, results = tree_round(chosen, Leaves(), first)
    metrics = tree_metrics(chosen, 0, results, 0.0)
    whole = BYTES * (2 + 3)
    assert [n["up_bytes"] for n in metrics["nodes"].values()] == [0, whole, whole]
    assert metrics["upload_bytes"] == metrics["download_bytes"] == 2 * whole
    # What waited at the root goes down now: the layer of each leaf to the other one.
    _, results = tree_round(chosen, Leaves(), state)
    metrics = tree_metrics(chosen, 1, results, 0.0)
    assert [(way["from"], way["to"]) for way in metrics["routes"]] == [("a", "b"), ("b", "a")]
    assert metrics["download_bytes"] == 2 * (whole + BYTES * 3)
    alone = config(temperature=0.0, residuals=0)
    _, results = tree_round(alone, Leaves(), first)
    assert tree_metrics(alone, 0, results, 0.0)["upload_bytes"] == 2 * BYTES * 2


def test_the_steps_of_a_round_change_nothing_that_they_are_given():
    chosen, results = config(), Results()
    state = init_tree(chosen, START)
    before = jax.tree.map(np.array, state)
    for node in range(3):
        results.received[node] = down(chosen, state, node, results)
    results.trained.update(train_nodes(chosen, Leaves(), state, (A, B), results))
    for node in (B, A, ROOT):
        results.reported[node] = up(chosen, state, node, results)
        assert up(chosen, state, node, results) is not None
    assert eqx.tree_equal(jax.tree.map(np.array, state), before)
    again, _ = tree_round(chosen, Leaves(), state)
    for node, report in results.reported.items():
        assert eqx.tree_equal(report.after, again.nodes[node])


def test_noise_at_a_leaf_is_another_one_for_another_change():
    """Two releases of one round that differ in the change must not cancel their noise."""
    chosen = config(clip_norm=1.0, noise_multiplier=2.0)
    wide = {"backbone": np.zeros(400, np.float32), "head": np.zeros(200, np.float32)}
    state = init_tree(chosen, wide, bytes(range(16)))
    start = down(chosen, state, ROOT, Results())

    def noise(delta, node=A, state=state):
        update = eqx.tree_at(lambda u: u.delta, moved(node), delta)
        backbone, layers = _hide(chosen, state, node, start, update)
        shown = np.concatenate([*jax.tree.leaves(backbone), *layers.values()])
        return shown - np.concatenate(jax.tree.leaves(delta))

    small = jax.tree.map(lambda x: x + np.float32(1e-3), wide)
    nearly = {**small, "head": small["head"] * np.float32(1.001)}
    one = noise(small)
    assert np.array_equal(one, noise(small)) and one.std() == pytest.approx(2.0, rel=0.1)
    later = replace(state, round=state.round + 1)
    for other in (noise(nearly), noise(small, B), noise(small, state=later)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.2


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", [False, True])
def test_who_does_not_answer_stays_as_it_was_and_counts_nothing(hidden):
    chosen = config(clip_norm=0.5 if hidden else 0.0, weights=(1.0, 1.0, 1.0))
    state, _ = tree_round(chosen, Leaves(), init_tree(chosen, START))
    after, results = tree_round(chosen, Leaves(A), state)
    metrics = tree_metrics(chosen, 1, results, 0.0)
    assert eqx.tree_equal(after.nodes[A], state.nodes[A])
    assert metrics["nodes"]["a"] == {"up_bytes": 0, "down_bytes": 0, "missed": True}
    assert metrics["members"] == 1 and metrics["loss"] == 2.0
    change = after.nodes[ROOT].params["backbone"] - state.nodes[ROOT].params["backbone"]
    length = 0.5 / math.sqrt(5) if hidden else 2.0  # of the other leaf, perhaps clipped
    np.testing.assert_allclose(change, np.full(2, length), rtol=1e-5)
    nobody, _ = tree_round(chosen, Leaves(A, B), state)
    assert eqx.tree_equal(nobody, replace(state, round=state.round + 1))


def test_a_hidden_leaf_keeps_its_work_and_shows_a_clipped_change():
    chosen = config(clip_norm=0.5)
    state, results = tree_round(chosen, Leaves(), init_tree(chosen, START))
    leaf = state.nodes[B]
    np.testing.assert_allclose(leaf.params["head"], np.full(3, 2.0))
    shown = np.concatenate(
        [leaf.public_layers["head"], results.reported[B].backbone[0] - START["backbone"]]
    )
    assert np.linalg.norm(shown) == pytest.approx(0.5, rel=1e-5)
