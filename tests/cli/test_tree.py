"""A tree from the command line: its nodes in the summary, its report, and what is refused."""

import json
import stat

import dp_accounting
import equinox as eqx
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.inference import load_params
from fedlm.privacy.ledger import Ledger
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.checkpoint import load_newest
from fedlm.record.journal import read
from tests.conftest import call, write_tiny

TREE = """
[federation]
levels = [0, 1]
personal_layers = "last 0.5"
"""
WRITTEN = """
[federation]
[[federation.node]]
name = "a"
groups = ["north"]
"""
CHILD = """
[[federation.node]]
name = "b"
parent = "a"
groups = ["south"]
"""
ONE_PLACE = "[federation]\nlevels = []\nclip_norm = 1.0\n"
TOKENS = '[federation]\nlevels = [0]\nclip_norm = 1.0\nweight = "tokens"\n'
SMALL = ("server.rounds=2", "run.prompts=[]")


def train(folder, *changes, table=TREE):
    path = folder / "tree.toml"
    path.write_text((folder / "tiny.toml").read_text() + table)
    options = [part for change in (*SMALL, *changes) for part in ("--set", change)]
    return call(folder, "train", path, *options, "--out", "run", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tree-commands")
    write_tiny(made)
    done = train(made)
    assert done.code == 0, done.stderr
    (made / "summary.json").write_text(done.stdout)
    return made


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """A finished run whose leaves add noise, and what it printed."""
    made = tmp_path_factory.mktemp("hidden-leaves")
    write_tiny(made)
    noise = ("federation.noise_multiplier=8", "federation.clip_norm=0.01")
    done = train(made, *noise, "federation.levels=[0]", "data.test_clients=0.5", "server.rounds=2")
    assert done.code == 0, done.stderr
    return made, done


def test_the_summary_names_every_node(folder):
    nodes = json.loads((folder / "summary.json").read_text())["nodes"]
    assert nodes[0]["name"] == "root" and len(nodes) == 7
    assert all(n["perplexity"] > 1 for n in nodes)
    assert len(list((folder / "run" / "nodes").iterdir())) == 7


def test_keys_are_counted_for_one_model_alone(folder):
    refused = call(folder, "evaluate", "run", "--keystrokes")
    assert refused.code == 2 and "expected a flat run whose text is here" in refused.stderr


def test_the_report_shows_tree_matrix_and_routes(folder):
    page = (folder / "run" / "report.html").read_text()
    for words in ("town", "text of every place", "routed as residuals", "Attention going up"):
        assert words in page
    assert "This run makes no privacy claim" in page


def test_noise_at_the_leaves_is_one_claim_for_one_leaf(hidden):
    made, done = hidden
    wanted = dp_accounting.get_epsilon_gaussian(8 / 2**0.5, 1e-5)
    assert done.json["epsilon"] == pytest.approx(wanted) and done.json["delta"] == 1e-5
    page = (made / "run" / "report.html").read_text()
    assert page.count("<h2>Privacy") == 1 and "no privacy claim" not in page
    assert "one leaf of the tree" in page and "one client with all its text" not in page
    found = call(made, "privacy", "epsilon", "run", "--json").json
    assert found["epsilon"] == pytest.approx(wanted)


def test_under_noise_at_the_leaves_files_tell_nothing_of_their_own_models(hidden):
    """No exact loss, no length of a change, no figure of a model without noise, no counts."""
    made, _ = hidden
    header, *rounds, final = read(made / "run" / "journal.jsonl")
    for entry in rounds:
        assert not {"loss", "tokens", "steps", "unclipped", "personal_perplexity"} & entry.keys()
        for node in entry["nodes"].values():
            assert (
                not {"loss", "change", "self_weight", "entropy_down", "attention_down"}
                & node.keys()
            )
        assert entry["members"] == 2
    assert rounds[-1]["perplexity"] > 1
    assert all(own is None for _, own in rounds[-1]["places"].values())
    assert "validation" not in final and final["test"]["personal_perplexity"] is None
    assert not {"clients", "left_out"} & header["tree"].keys()


def test_under_noise_at_the_leaves_saved_models_are_those_that_others_know(hidden):
    made, done = hidden
    run = build(load(made / "run" / "recipe.toml"), made / ".fedlm" / "stores", out=made / "run")
    saved = load_newest(made / "run" / "checkpoints", run.round.init(run.start()), print)
    state = saved.state
    node = run.round.config.topology.names.index("north")
    own, seen = state.nodes[node].params, run.round.models(state)["north"]
    weights = load_params(
        run.recipe.model, run.store.vocabulary, made / "run/nodes/north/model.safetensors"
    )
    public = state.nodes[node].public_layers
    for layer, values in run.round.config.personal(weights).items():
        np.testing.assert_array_equal(values, public[layer])
        assert not np.allclose(values, run.round.config.personal(own)[layer], atol=1e-3)
    # A hash over un-noised models would be a test for whoever guesses the text.
    assert done.json["params_sha256"] == tree.sha256(run.round.params(state))
    assert done.json["params_sha256"] != tree.sha256(state.params)
    assert eqx.tree_equal(weights, seen)
    # The leaf's own model is for its owner alone.
    kept = made / "run" / "private" / "north.safetensors"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert [entry["round"] for entry in Ledger(made / "run/ledger.jsonl").entries()[1:]] == [0, 1]


def test_places_may_be_stores(tmp_path):
    write_tiny(tmp_path)
    lines = (tmp_path / "tiny.jsonl").read_text().splitlines(keepends=True)
    for side, like in (("north", ()), ("south", ("--like", "north"))):
        own = [line for line in lines if json.loads(line)["groups"][0] == side]
        (tmp_path / f"{side}.jsonl").write_text("".join(own))
        made = call(tmp_path, "prepare", f"{side}.jsonl", "--out", side, *like)
        assert made.code == 0, made.stderr
    recipe = (tmp_path / "tiny.toml").read_text().replace("vocabulary = 60\n", "")
    for other, code in (("south", 0), ("nowhere", 2)):
        stores = f'stores = ["north", "{other}"]'
        (tmp_path / "tiny.toml").write_text(recipe.replace('source = "tiny.jsonl"', stores))
        done = train(tmp_path, "federation.levels=[0]")
        assert done.code == code, done.stderr
        if code == 0:
            assert [n["name"] for n in done.json["nodes"]] == ["root", "north", "south"]
    assert "nowhere is not a store" in done.stderr


def test_evaluate_gives_the_figures_of_the_run_again(folder):
    found = call(folder, "evaluate", "run", "--json").json
    nodes = json.loads((folder / "summary.json").read_text())["nodes"]
    assert [n["perplexity"] for n in found["nodes"]] == [n["perplexity"] for n in nodes]
    assert len(found["matrix"]["perplexity"]) == 7
    assert call(folder, "evaluate", "run").code == 0


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "change, table, words",
    [
        ("federation.level=[0]", TREE, ("[federation] has no setting 'level'", "'levels'")),
        ("federation.levels=[7]", TREE, ("federation.levels = [7]", "2 groups")),
        ("federation.levels=[0]", WRITTEN, ("expected either levels", "not both")),
        ("federation.personal_layers=middle", TREE, ("personal_layers = 'middle'", "last SHARE")),
        ("federation.temperature=-1", TREE, ("federation.temperature = -1",)),
        ("federation.noise_multiplier=1", TREE, ("federation.clip_norm = 0.0", "positive length")),
        ("federation.noise_multiplier=1", ONE_PLACE, ("noise_multiplier = 1.0", "single place")),
        ("federation.noise_multiplier=1", TOKENS, ("federation.weight = 'tokens'", "'uniform'")),
        ("federation.clip_norm=1", WRITTEN + CHILD, ("clip_norm = 1.0", "at leaves alone: a")),
        ("federation.optimizer=sgd", TREE, ("federation.optimizer = 'sgd'", "'fedavg'")),
        ("federation.moves=['x > y']", TREE, ("federation.moves", "no place 'x'")),
        ("federation.moves=['x']", TREE, ("expected 'place > parent'",)),
        ("federation.only=['nowhere']", TREE, ("federation.only", "'nowhere'")),
        ("privacy.mechanism=gaussian", TREE, ("privacy.mechanism", "pool_clients = false")),
        ("run.seed=0", WRITTEN + 'weigh = 1\n', ("[federation.node] has no setting", "'weight'")),
        ("run.seed=0", WRITTEN + 'parent = "b"\n', ("the parent 'b' of 'a' is not there",)),
        ("run.seed=0", WRITTEN.replace("north", "nort"), ("'nort'", "Did you mean 'north'?")),
        ("run.seed=0", "[federation]\nlevels = 3\n", ("federation.levels = 3",)),
    ],
)  # fmt: skip
def test_a_tree_that_cannot_be(tmp_path, change, table, words):
    write_tiny(tmp_path)
    done = train(tmp_path, change, table=table)
    assert done.code == 2 and "Traceback" not in done.stderr and done.stdout == ""
    for word in words:
        assert word in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
