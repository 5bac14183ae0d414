"""The shared corpora, where they are: real clients through the whole flow."""

from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"
RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name, corpus", [("irc", "irc-ubuntu"), ("shakespeare", "shakespeare-roles")]
)
def test_a_recipe_of_a_shared_corpus_trains(name, corpus, tmp_path, run_cli):
    source = SHARED / f"{corpus}.jsonl.gz"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    few = ("server.rounds=3", "server.evaluate_every=3", f"data.source={source}", "run.devices=2")
    changes = [part for setting in few for part in ("--set", setting)]
    done = run_cli("train", RECIPES / f"{name}.toml", *changes, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    assert done.json["perplexity"] < done.json["start_perplexity"]


def test_the_shipped_recipe_learns_from_sotu(tmp_path, run_cli):
    changes = (
        "--set",
        "server.rounds=30",
        "--set",
        "run.devices=2",
        "--set",
        "run.baselines=false",
    )
    done = run_cli("train", RECIPES / "sotu.toml", *changes, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    assert done.json["perplexity"] < 0.2 * done.json["start_perplexity"]


@pytest.mark.skipif(find_spec("chitchat_dataset") is None, reason="needs fedlm[chitchat]")
@pytest.mark.parametrize("name", ["chitchat", "chitchat-private", "chitchat-tree"])
def test_a_recipe_of_chitchat_trains(name, tmp_path, run_cli):
    few = ("server.rounds=3", "server.evaluate_every=3", "run.devices=2", "run.baselines=false")
    changes = [part for setting in few for part in ("--set", setting)]
    done = run_cli("train", RECIPES / f"{name}.toml", *changes, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.stderr
    assert done.json["perplexity"] < done.json["start_perplexity"]
