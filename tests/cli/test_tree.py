"""A tree from the command line: its nodes in the summary, its report, and what is refused."""

import json

import pytest

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
    done = train(
        made,
        "federation.noise_multiplier=0.5",
        "federation.clip_norm=0.1",
        "federation.noise_seed=1",
    )
    assert done.code == 0, done.stderr
    (made / "summary.json").write_text(done.stdout)
    return made


def test_the_summary_names_every_node(folder):
    nodes = json.loads((folder / "summary.json").read_text())["nodes"]
    assert nodes[0]["name"] == "root" and len(nodes) == 7
    assert all(n["perplexity"] > 1 for n in nodes)
    assert len(list((folder / "run" / "nodes").iterdir())) == 7


def test_the_report_shows_tree_matrix_routes_and_what_noise_is_worth(folder):
    page = (folder / "run" / "report.html").read_text()
    for words in ("└─ town", "on the text of every place", "Residuals", "promises nothing"):
        assert words in page
    assert "This run makes no privacy claim" in page


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


@pytest.mark.parametrize(
    "change, table, words",
    [
        ("federation.level=[0]", TREE, ("[federation] has no setting 'level'", "'levels'")),
        ("federation.levels=[7]", TREE, ("federation.levels = [7]", "2 groups")),
        ("federation.levels=[0]", WRITTEN, ("expected either levels", "not both")),
        ("federation.personal_layers=middle", TREE, ("personal_layers = 'middle'", "last SHARE")),
        ("federation.temperature=-1", TREE, ("federation.temperature = -1",)),
        ("federation.noise_multiplier=1", TREE, ("federation.clip_norm = 0.0", "positive length")),
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
