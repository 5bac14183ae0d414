"""Law 2: a tree with one branch is the flat federation. Laws 1, 3 and 8 for trees."""

import dataclasses
import json
import math
import mmap
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from fedlm.core.errors import ConfigError
from fedlm.core.types import Start
from fedlm.evaluate.held_out import TextHere
from fedlm.inference import load_params
from fedlm.privacy.account import plans_from, spent
from fedlm.privacy.ledger import UNKNOWN, begin_entry, round_entry, spent_by_node, spent_of
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.settings import dump, load
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import dumps, read
from fedlm.training import Watcher, promised, train
from tests.conftest import write_tiny

# The recurrent layer is key, the embedding is backbone; a leaf is one member.
TREE = """
[federation]
levels = [0, 1]
personal_layers = "last 0.5"
"""
SMALL = ("model.name=cifg", "server.rounds=3", "run.prompts=[]")
FLAT = (
    "federation.pool_clients=false",
    "federation.optimizer=fedavg",
    "federation.learning_rate=1.0",
)
BARE = "\n[federation]\n"
HIDDEN = ("federation.noise_multiplier=0.5", "federation.clip_norm=0.01", "federation.noise_seed=3")
KEPT = ("client.optimizer=adam", "client.learning_rate=0.01", "federation.keep_optimizer=true")
PLAN = (
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1.0",
    "privacy.clip_norm=0.1",
    "privacy.seed=1",
    "privacy.delta=1e-3",
    "server.sampling=poisson",
)
ONE_BRANCH = """
[federation]
personal_layers = "last 0.5"
[[federation.node]]
name = "world"
[[federation.node]]
name = "country"
parent = "world"
[[federation.node]]
name = "town"
parent = "country"
groups = ["*"]
"""
MIXED = """
[federation]
personal_layers = "last 0.5"
[[federation.node]]
name = "world"
groups = ["north"]
[[federation.node]]
name = "south side"
parent = "world"
groups = ["south"]
learning_rate = 0.5
optimizer = "fedavg"
"""


TOWNS = """
[federation]
pool_clients = false
[[federation.node]]
name = "world"
[[federation.node]]
name = "north"
parent = "world"
groups = ["north"]
cohort = 9
[[federation.node]]
name = "south"
parent = "world"
groups = ["south"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One store for all trees of this file."""
    made = tmp_path_factory.mktemp("tree")
    write_tiny(made)
    return made


@pytest.fixture(scope="module")
def experiment(folder):
    """`experiment("federation.sync_every=2")`: a tree over the tiny store, with changes."""
    text = (folder / "tiny.toml").read_text()

    def make(*changes, table=TREE):
        path = folder / f"tree-{abs(hash(table))}.toml"
        path.write_text(text + table)
        return build(load(path, (*SMALL, *changes)), folder / "stores", lambda s, d: None)

    return make


@pytest.fixture(scope="module")
def tree_of(experiment):
    """`tree_of("federation.sync_every=2")`: the experiment, state and facts after two rounds."""
    made = {}

    def run_once(*changes, table=TREE):
        if (changes, table) not in made:
            found = experiment(*changes, table=table)
            made[changes, table] = (found, *rounds(found))
        return made[changes, table]

    return run_once


def rounds(experiment, count=2):
    """The state after some rounds, and what each told."""
    state, told = experiment.round.init(experiment.start()), []
    for played in experiment.round.play(state, range(count)):
        state = played.state
        told.append(dict(played.told))
    return state, told


@pytest.fixture(scope="module")
def flat(experiment):
    """The parameters of the same clients after two rounds without a tree."""
    plain = experiment("federation.levels=[]", *FLAT, table=BARE)
    recipe = plain.recipe.model_copy(update={"federation": None})
    one = flat_run(recipe, plain.store, out=Path())
    state, _ = rounds(one)
    return jax.tree.map(np.asarray, state.params)


def close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_a_tree_of_one_place_is_flat_to_the_byte(tree_of, flat):
    _, state, _ = tree_of("federation.levels=[]", *FLAT, table=BARE)
    assert eqx.tree_equal(flat, state.nodes[0].params)


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0.0, 0.1, math.inf])
def test_a_tree_with_one_branch_is_flat_at_any_temperature(experiment, flat, temperature):
    chain = experiment(*FLAT, f"federation.temperature={temperature}", table=ONE_BRANCH)
    state, _ = rounds(chain)
    # At temperature zero personal layers never leave the leaf.
    for node in state.nodes if temperature else state.nodes[-1:]:
        close(node.params, flat, 2e-5)


@pytest.mark.slow
def test_a_tree_of_leaves_with_no_personal_layers_is_federated_averaging(experiment):
    """By hand: every leaf's text from the same parameters, and the mean of what they became."""
    made = experiment("federation.levels=[1]", "federation.personal_layers=none", *FLAT[1:])
    state, told = rounds(made, 1)
    params, engine, config = made.start(), made.engine, made.round.config
    members = np.asarray([config.clients + n for n in config.topology.with_text])
    arrived = engine.updates(Start(params), engine.prepare(0, members))
    changes = [update.delta for _, update, *_ in arrived]
    wanted = jax.tree.map(lambda p, *d: p + np.mean(d, axis=0), params, *changes)
    close(state.nodes[0].params, wanted, 1e-6)
    assert told[0]["members"] == len(members) == 4


def test_the_mesh_trains_from_many_starts_what_the_loop_trains(tree_of):
    fast, a, told = tree_of()
    _, b, slow = tree_of("run.engine=loop")
    close(a.params, b.params, 1e-4)
    assert told[-1]["upload_bytes"] == slow[-1]["upload_bytes"] > 0
    assert fast.engine.traces <= 1, "all leaves of all rounds share one program"


def test_personal_layers_stay_home_at_temperature_zero_and_do_not_travel(tree_of):
    _, _, own = tree_of("federation.temperature=0")
    _, _, shared = tree_of()
    assert 0 < own[-1]["upload_bytes"] < shared[-1]["upload_bytes"] and not own[-1]["routes"]
    made, state, alone = tree_of("federation.temperature=0", "federation.personal_layers=all")
    assert alone[-1]["upload_bytes"] == alone[-1]["download_bytes"] == 0
    leaves = [state.nodes[n].params.embedding for n in made.round.config.topology.with_text]
    assert len({np.asarray(leaf).tobytes() for leaf in leaves}) == len(leaves)


def test_a_federation_that_reports_every_other_round_moves_the_root_only_then(experiment):
    made = experiment("federation.sync_every=2", "federation.personal_layers=none")
    state, seen = made.round.init(made.start()), []
    for r in range(4):
        state = next(made.round.play(state, range(r, r + 1))).state
        seen.append(np.asarray(state.nodes[0].params.embedding))
    assert np.array_equal(seen[0], made.start().embedding)
    assert not np.array_equal(seen[0], seen[1]) and np.array_equal(seen[1], seen[2])
    assert not np.array_equal(seen[2], seen[3])


def test_both_orders_agree_where_only_leaves_hold_text(tree_of):
    assert eqx.tree_equal(tree_of()[1], tree_of("federation.order=together")[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["levels", "together"])
def test_a_place_with_children_may_hold_text(tree_of, order):
    _, _, told = tree_of(f"federation.order={order}", table=MIXED)
    assert told[-1]["members"] == 2 and told[-1]["loss"] < told[0]["loss"]


def test_residuals_wait_at_the_root_and_go_to_another_subtree(tree_of):
    made, _, told = tree_of()
    assert told[0]["routes"] == [] and told[1]["routes"]
    parents = {p.name: p.parent for p in made.round.config.topology.places}
    for way in told[1]["routes"]:
        assert way["to"] not in (way["from"], parents[way["from"]])
        assert way["likeness"][way["to"]] == max(way["likeness"].values())
    _, _, silent = tree_of("federation.residuals=0")
    assert all(not facts["routes"] for facts in silent)
    assert silent[-1]["download_bytes"] < told[-1]["download_bytes"]


def test_nothing_but_clipped_and_noisy_changes_leaves_a_leaf(experiment):
    made = experiment(*HIDDEN, "federation.levels=[1]", "federation.personal_layers=none")
    (state, _), (again, _) = rounds(made, 1), rounds(made, 1)
    assert eqx.tree_equal(state, again)
    before = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(made.start())])
    leaf, root = (
        np.concatenate([x.ravel() for x in jax.tree.leaves(state.nodes[n].params)]) - before
        for n in (1, 0)
    )
    assert np.linalg.norm(leaf) > 0.1, "a leaf keeps its own work, and its length"
    # The root saw the mean of four clipped changes with noise of 0.005 a coordinate.
    spread = root.std() / (0.7 * (1 + 0.9))  # over the first Nesterov step
    assert 0.85 * 0.0025 < spread < 1.15 * 0.0025
    assert not 0.85 * 0.005 < spread < 1.15 * 0.005, "noise of another size is told apart"


def test_private_layers_stay_and_others_see_noisy_ones(tree_of):
    made, state, _ = tree_of(*HIDDEN)
    leaf = state.nodes[made.round.config.topology.with_text[0]]
    own = np.asarray(leaf.params.layers[0].project).ravel()
    assert not np.any(np.isin(own, leaf.public_layers["layers.0"]))


@pytest.mark.slow
def test_users_of_a_leaf_are_protected_by_a_plan(tree_of):
    made, _, told = tree_of(*FLAT, "federation.levels=[0]", *PLAN)
    assert "loss" not in told[-1] and all("loss" not in n for n in told[-1]["nodes"].values())
    held = [
        len(made.round.config.topology.clients[n]) for n in made.round.config.topology.with_text
    ]
    assert made.plan.sampling.population == min(held)


@pytest.mark.slow
def test_an_optimizer_that_is_kept_goes_on_where_it_stopped(tree_of):
    """One step a round: a memory that is kept makes two rounds of one member two steps of Adam."""
    alone = (
        "federation.personal_layers=all",
        "federation.temperature=0",
        "client.max_steps=1",
        *KEPT,
    )
    made, state, _ = tree_of(*alone)
    leaf = made.round.config.topology.with_text[0]
    counts = [x for x in jax.tree.leaves(state.nodes[leaf].training_memory) if np.ndim(x) == 0]
    assert counts and all(int(c) == 2 for c in counts)
    step = [jax.tree.leaves(s.nodes[leaf].params)[0] for s in (state, tree_of(*alone[:-1])[1])]
    assert not np.array_equal(*step), "a fresh Adam takes a full step each time"


def test_models_that_rest_in_files_are_the_same_models(tree_of):
    _, a, told = tree_of()
    _, b, spilled = tree_of("federation.resident=2")
    assert eqx.tree_equal(a.params, b.params)
    assert [facts["loss"] for facts in told] == [facts["loss"] for facts in spilled]
    leaf = jax.tree.leaves(b.nodes[-1].params)[0]
    assert isinstance(leaf.base.base.obj, mmap.mmap) and not leaf.flags.writeable


# ---- runs --------------------------------------------------------------------------------


def told_by(run):
    entries = [e for e in read(run / "journal.jsonl") if e["kind"] != "header"]
    files = (p for name in ("model", "best") for p in run.rglob(f"{name}.safetensors"))
    models = {str(p.relative_to(run)): p.read_bytes() for p in files}
    timed = ("run", "report", "seconds", "clients_per_second")
    summary = json.loads((run / "summary.json").read_text())
    rest = {k: v for k, v in summary.items() if k not in timed}
    return models, rest, [{k: v for k, v in e.items() if k != "seconds"} for e in entries]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            ("federation.sync_every=2", "federation.temperature=inf", *KEPT, *HIDDEN), id="nodes"
        ),
        pytest.param(("federation.pool_clients=false", "federation.resident=2"), id="clients"),
        pytest.param(
            (
                *("client.optimizer=muon", "client.learning_rate=0.01", "client.weight_decay=0.1"),
                *("client.schedule=cosine", "client.warmup_rounds=1", "run.keep_best=true"),
                *("federation.keep_optimizer=true", "server.evaluate_every=1"),
            ),
            id="schedule",
        ),
    ],
)
def test_a_resumed_tree_ends_the_same_to_the_byte(experiment, tmp_path, changes):
    def carry_out(name, stop_after=None, resume=False):
        seen = []
        watcher = Watcher(round=seen.append, stop=lambda: len(seen) == stop_after)
        made = experiment(*changes, "run.checkpoint_every=1")
        made = dataclasses.replace(made, record=RunDirectory(tmp_path / name))
        return train(made, resume=resume, watcher=watcher)

    whole = carry_out("whole")
    assert carry_out("broken", stop_after=2) is None
    assert carry_out("broken", resume=True) is not None
    assert told_by(tmp_path / "whole") == told_by(tmp_path / "broken")
    names = {"root", "north", "south", *(f"town-{i}" for i in range(4))}
    if "nodes" in whole:  # noise at the leaves: no figures where no place has held-out clients
        assert {node["name"] for node in whole["nodes"]} == names


def test_every_place_keeps_the_best_model_that_it_received(experiment, tmp_path):
    made = experiment(
        *("run.keep_best=true", "server.evaluate_every=1", "server.rounds=4"),
        *("client.learning_rate=3.0", "client.gradient_clip_norm=1.0", "run.checkpoint_every=1"),
    )
    made = dataclasses.replace(made, record=RunDirectory(tmp_path / "run"))
    train(made, watcher=Watcher())
    scored = [e["places"] for e in read(tmp_path / "run" / "journal.jsonl") if "places" in e]
    assert len(scored) == 4
    for name in scored[0]:
        found = [places[name][0] for places in scored]
        directory = made.record.node(name)
        best = load_params(made.recipe.model, made.store.vocabulary, directory.best)
        places = made.evaluation.of_models(
            {node: best for node in made.round.names}, made.evaluation.told[-1]
        )
        again = next(n["perplexity"] for n in places["nodes"] if n["name"] == name)
        np.testing.assert_allclose(again, min(found), rtol=1e-5)
        if found[-1] == min(found):
            assert directory.best.read_bytes() == directory.weights.read_bytes()
    assert not made.record.best.is_file(), "there is no one best model of a tree"


def test_a_tree_is_watched_on_other_text_than_it_is_judged_by(experiment, monkeypatch):
    """Early stopping and the best model were chosen by the rows of the final figure."""
    made = experiment("data.test_clients=0.5", "data.validation=0.4", "run.seed=3")
    asked = []
    score = TextHere.scores
    monkeypatch.setattr(
        TextHere, "scores", lambda self, *a: (asked.append(a[1:3]), score(self, *a))[1]
    )
    state = made.round.init(made.start())
    watched = made.evaluation.watch(state)
    assert made.evaluation.splits() == ["test", "validation"]
    found = {split: made.evaluation.final(state, split) for split in made.evaluation.splits()}
    assert asked == [("watch", "validation"), ("final", "test"), ("final", "validation")]
    assert found["validation"]["perplexity"] == pytest.approx(watched["perplexity"])
    own = found["validation"]["personal_perplexity"]
    assert own == pytest.approx(watched["personal_perplexity"])
    assert found["test"]["perplexity"] != found["validation"]["perplexity"]
    leaf = next(iter(watched["places"]))
    told = next(n for n in found["validation"]["nodes"] if n["name"] == leaf)
    assert told["personal"] == pytest.approx(watched["places"][leaf][1])


@pytest.mark.parametrize(
    "change",
    [
        "server.learning_rate=5.0",
        "server.optimizer=fedyogi",
        "server.momentum=0.1",
        "server.schedule=cosine",
        "server.warmup_rounds=2",
    ],
)
def test_a_server_that_no_place_has_is_refused(experiment, change):
    """`fedlm tune` tried equal points, and called one of them the best."""
    with pytest.raises(ConfigError, match=r"its default, in a tree whose places are one member"):
        experiment(change)
    experiment(change, "federation.pool_clients=false")


def test_a_flat_recipe_knows_nothing_of_trees(tiny_recipe, tmp_path):
    """The resolved recipe of a flat run, and with it everything else, has not changed."""
    made = build(load(tiny_recipe), tmp_path / "stores", lambda s, d: None)
    assert "federation" not in dump(made.recipe)
    assert made.round.header() == {} and made.round.names == ("",)


# ---- privacy -----------------------------------------------------------------------------------


def test_every_place_is_accounted_with_its_own_cohort(experiment):
    """At the server's cohort the clients of the north would join one round in four."""
    made = experiment(*PLAN, "server.cohort=2", table=TOWNS)
    everyone = spent(made.plans["north"], 3)
    assert list(made.plans) == ["north", "south"] and made.plan == made.plans["north"]
    assert made.plan.sampling.cohort == made.plan.sampling.population
    assert spent(made.plans["south"], 3).epsilon < 0.6 * everyone.epsilon
    header = json.loads(dumps(promised(made)))
    assert plans_from(header) == made.plans
    book = [begin_entry(made.plans), *(round_entry(n, UNKNOWN) for n in range(3))]
    assert spent_of(book).epsilon == everyone.epsilon
    assert spent_by_node(book)["south"].epsilon == spent(made.plans["south"], 3).epsilon


def test_a_budget_ends_a_tree_for_the_place_that_spends_most(experiment):
    asked = (*PLAN, "server.cohort=2", "server.rounds=3")
    north = experiment(*asked, table=TOWNS).plan
    budget = spent(north, 2).epsilon * 1.001
    stopped = experiment(*asked, f"privacy.epsilon={budget}", table=TOWNS)
    assert stopped.cadence.rounds == 2


def test_weights_that_follow_the_text_are_refused_under_a_plan(experiment):
    """They told how many tokens a place's clients have, exactly, beside a finite epsilon."""
    with pytest.raises(ConfigError, match=r"federation\.weight = 'tokens'.*\[privacy\]"):
        experiment(*PLAN, "federation.weight=tokens", table=TOWNS)
