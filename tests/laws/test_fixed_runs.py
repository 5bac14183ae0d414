"""Runs that train a fixed part of a model: what is held still is in the model, and nowhere else."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core import tree
from fedlm.core.errors import RecordError
from fedlm.deploy.local import check_deployable
from fedlm.inference import load_params
from fedlm.recipe.assemble import trained_leaves
from fedlm.recipe.build import build
from fedlm.recipe.federation import FederationTable
from fedlm.recipe.settings import load
from fedlm.record.checkpoint import to_bytes
from fedlm.training import Watcher, train
from tests.conftest import write_tiny

ALL = ("wire.trainable=all", "wire.trainable_fraction=1")
FIXED = ("wire.trainable=fixed", "wire.trainable_fraction=0.4", "server.rounds=2")


@pytest.fixture
def made(tiny_recipe, tmp_path):
    """`made("table.key=value", ...)`: a fixed run of the tiny recipe."""
    return lambda *changes, out="run": build(
        load(tiny_recipe, (*FIXED, *changes)), tmp_path / "stores", out=tmp_path / out
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A fixed run that has ended, and its summary. Not to be changed."""
    folder = tmp_path_factory.mktemp("fixed")
    run = build(load(write_tiny(folder), FIXED), folder / "stores", out=folder / "run")
    return run, train(run)


def keep_of(run):
    shapes = run.model.shapes()
    return dict(zip(tree.named_leaves(shapes), trained_leaves(run.recipe, shapes), strict=True))


def test_checkpoints_leave_out_what_weights_hold(finished):
    run, summary = finished
    keep, path = keep_of(run), run.record.path
    assert 0 < sum(keep.values()) < len(keep)
    for checkpoint in sorted((path / "checkpoints").iterdir()):
        held = load_file(checkpoint)
        # Parameters, and the server optimiser's statistics of them.
        assert {n for n in keep if f"params.{n}" in held} == {n for n in keep if keep[n]}
        assert not [n for n in held for leaf, k in keep.items() if n.endswith(f".{leaf}") and not k]
    start, weights = tree.named_leaves(run.start()), load_file(path / "model.safetensors")
    assert weights.keys() == keep.keys()
    for name, trains in keep.items():
        assert np.array_equal(weights[name], start[name]) == (not trains), name
    assert summary["download_bytes"] == summary["upload_bytes"]


def test_figures_and_fingerprints_are_those_of_the_whole_model(finished):
    run, summary = finished
    whole = load_params(run.recipe.model, run.store.vocabulary, run.record.weights)
    split = run.evaluation.splits()[0]
    assert tree.sha256(whole) == summary["params_sha256"]
    found = run.evaluation.of_models({"": whole}, split)
    assert found["perplexity"] == summary["perplexity"]
    header = json.loads((run.record.path / "journal.jsonl").read_text().splitlines()[0])
    assert header["start_sha256"] == tree.sha256(run.start())


def test_a_run_keeps_the_frozen_part_in_memory_once(made):
    run = made()
    held = tree.named_leaves(run.algorithm.base)
    start = tree.named_leaves(run.start())
    model = tree.named_leaves(run.round.models(run.round.init(run.start()))[""])
    assert held and all(held[name] is start[name] is model[name] for name in held)


def test_looking_at_a_run_makes_no_base(made):
    assert "base" not in vars(made().algorithm)


def test_a_run_whose_frozen_part_has_changed_does_not_go_on(made, tmp_path):
    def stopped():
        seen = []
        return Watcher(round=seen.append, stop=lambda: bool(seen))

    first = tmp_path / "first.safetensors"
    first.write_bytes(to_bytes(made("run.seed=5").start()))
    begun = f"model.init_from={first}"
    assert train(made(begun), watcher=stopped()) is None
    first.write_bytes(to_bytes(made("run.seed=6").start()))
    with pytest.raises(RecordError, match="checkpoints hold the trained part alone"):
        train(made(begun), resume=True)


def test_a_fixed_part_of_a_model_from_a_file_goes_over_a_network(made):
    recipe = made("model.init_from=runs/one").recipe
    check_deployable(recipe)
    check_deployable(recipe.model_copy(update={"federation": FederationTable(levels=(0,))}))


@pytest.mark.parametrize("pooled", [False, True])
def test_nodes_of_a_tree_hold_the_trained_part_alone(tiny_recipe, tmp_path, pooled):
    tiny_recipe.write_text(
        tiny_recipe.read_text()
        + f"\n[federation]\npool_clients = {str(pooled).lower()}\nlevels = [0]\n"
    )
    run = build(load(tiny_recipe, FIXED), tmp_path / "stores", out=tmp_path / "run")
    state = run.round.init(run.start())
    frozen = tree.size(run.algorithm.base)
    assert frozen > 0
    for node in state.nodes:
        assert tree.size(node.params) == run.model.parameters - frozen
    for model in run.round.models(state).values():
        assert tree.size(model) == run.model.parameters
