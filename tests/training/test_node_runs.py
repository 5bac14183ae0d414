"""Every node of a tree has a run of its own: asked, judged, exported, loaded."""

import json

import pytest

import fedlm
from fedlm.record.directory import RunDirectory
from tests.conftest import call, write_tiny

TREE = """
[federation]
levels = [0]
personal_layers = "last 0.5"
"""
SMALL = ("model.name=cifg", "server.rounds=1", "run.prompts=[]", "data.layout=windows")
SMALL += ("data.tokenizer=bytes", "data.vocabulary=260", "server.evaluate_rows=0")
SMALL += ("data.test_clients=0.5",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    path = write_tiny(folder)
    path.write_text(path.read_text().replace("vocabulary = 60\n", "") + TREE)
    changes = [part for change in SMALL for part in ("--set", change)]
    done = call(folder, "train", "tiny.toml", "--out", "run", "--json", *changes)
    assert done.code == 0, done.stderr
    return folder / "run"


def test_a_node_is_judged_on_its_own_text_as_in_the_tree(run):
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    found = {node["name"]: node for node in lines[-1]["test"]["nodes"]}
    for name in ("north", "south"):
        told = call(run.parent, "evaluate", "run", "--node", name, "--json").json
        assert told["perplexity"] == pytest.approx(found[name]["perplexity"], rel=1e-6)
        assert told["bits_per_byte"] == pytest.approx(found[name]["bits_per_byte"], rel=1e-6)
        summary = json.loads((run / "nodes" / name / "summary.json").read_text())
        assert summary["perplexity"] == found[name]["perplexity"]


def test_a_node_is_loaded_asked_and_exported(run, tmp_path):
    loaded = fedlm.load_run(run / "nodes" / "north")
    words = call(run.parent, "predict", "run", "the", "--node", "north", "--json").json["next"]
    assert [w["word"] for w in loaded.predict("the")] == [w["word"] for w in words]
    assert loaded.evaluate("validation")["tokens"] > 0
    done = call(run.parent, "export", "run", "--node", "north", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.stderr
    model = (run / "nodes" / "north" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == model
    assert model != (run / "nodes" / "south" / "model.safetensors").read_bytes()


def test_an_unknown_node_is_refused_with_the_nearest(run, trained):
    done = call(run.parent, "predict", "run", "the", "--node", "nort")
    assert done.code == 2 and "north" in done.stderr
    done = call(trained, "predict", "runs/tiny", "the", "--node", "north")
    assert done.code == 2 and "without nodes" in done.stderr


def test_no_name_leads_out_of_the_folder(tmp_path):
    directory = RunDirectory(tmp_path)
    for name in ("..", ".", "a/b", "../../x", "...", "a\\b"):
        assert directory.node(name).path.parent == tmp_path / "nodes"
        assert directory.node(name).path.name not in (".", "..")
        assert directory.own_weights_of(name).parent == tmp_path / "private"
