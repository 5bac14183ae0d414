"""Whole runs: a start model that learned from the same clients, a leaf's noise, a selection."""

import json
import math
import shutil

import pytest

import fedlm
from fedlm import lineage
from fedlm.core.errors import RecordError
from fedlm.corpus.store import Store
from fedlm.record.journal import read
from fedlm.search import sweep
from tests.conftest import call, write_tiny

SMALL = ("model.name=cifg", "run.prompts=[]", "run.baselines=false", "server.rounds=1")
PLAN = (
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=3.0",
    "privacy.clip_norm=0.1",
    "privacy.delta=1e-3",
    "server.sampling=poisson",
)
GRID = """
recipe = "private.toml"
[axes]
"client.learning_rate" = [0.1, 0.5]
[selection]
law = "geometric"
mean = 2
"""


def options(*changes):
    return [part for change in (*SMALL, *changes) for part in ("--set", change)]


@pytest.mark.slow
def test_open_rounds_before_private_ones_leave_no_epsilon_anywhere(tmp_path):
    write_tiny(tmp_path)
    assert call(tmp_path, "train", "tiny.toml", *options(), "--out", "open").code == 0
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "open/model.safetensors").read_bytes())
    begun = options(*PLAN, "model.init_from=copy.safetensors")
    done = call(tmp_path, "train", "tiny.toml", *begun, "--out", "private")
    assert done.code == 0 and "No finite epsilon holds" in done.stdout
    assert "epsilon 0" not in done.stderr
    run = tmp_path / "private"
    assert json.loads((run / "summary.json").read_text())["epsilon"] is None
    assert all(entry.get("epsilon") is None for entry in read(run / "journal.jsonl"))
    page = (run / "report.html").read_text()
    assert page.count("<h2>Privacy") == 1 and "No finite epsilon holds" in page
    found = call(tmp_path, "privacy", "epsilon", "private", "--json").json
    assert found["epsilon"] is None and "no privacy plan" in found["sentence"]
    (store,) = (tmp_path / ".fedlm" / "stores").iterdir()
    found = call(tmp_path, "privacy", "epsilon", store, "--json").json
    assert (found["private_runs"], found["other_runs"]) == (1, 1)


@pytest.mark.slow
def test_a_selection_releases_its_best_run_alone(tmp_path):
    recipe = write_tiny(tmp_path).read_text()
    tables = recipe.replace("rounds = 6", 'rounds = 1\nsampling = "poisson"')
    tables = tables.replace("[model]", '[model]\nname = "cifg"') + (
        '[privacy]\nmechanism = "gaussian"\nnoise_multiplier = 3.0\nclip_norm = 0.1\ndelta = 1e-3\n'
    )
    (tmp_path / "private.toml").write_text(tables)
    (tmp_path / "grid.toml").write_text(GRID)
    alone = call(tmp_path, "train", "private.toml", "--out", "one", "--json").json["epsilon"]
    done = call(tmp_path, "sweep", "grid.toml", "--out", "best", "--json")
    assert done.code == 0, done.stderr
    claim = done.json["privacy"]
    assert alone < claim["epsilon"] < 5 * alone and "stay secret" in claim["covers"][0]
    files = {file.name for file in (tmp_path / "best").rglob("*") if file.is_file()}
    assert files == {
        "claim.json", "ended.json", "ledger.jsonl", "lineage.json", "model.safetensors",
        "recipe.toml", "special_tokens_map.json", "tokenizer.json",
    }  # fmt: skip
    (store,) = (tmp_path / ".fedlm" / "stores").iterdir()
    found = call(tmp_path, "privacy", "epsilon", store, "--json").json
    assert found["private_runs"] == 2, "the selection is counted once, and no candidate"
    assert call(tmp_path, "sweep", "grid.toml", "--out", "best").code == 2


def write_private(tmp_path):
    """Write a private recipe and a selection over it."""
    recipe = write_tiny(tmp_path).read_text()
    tables = recipe.replace("rounds = 6", 'rounds = 1\nsampling = "poisson"') + (
        '[privacy]\nmechanism = "gaussian"\nnoise_multiplier = 3.0\nclip_norm = 0.1\ndelta = 1e-3\n'
    )
    (tmp_path / "private.toml").write_text(tables)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path / "grid.toml"


def test_a_selection_stays_within_the_budget_of_a_run(tmp_path):
    """Each run was made for the budget, and the best of several costs more."""
    recipe = write_private(tmp_path).with_name("private.toml")
    noise, budget = "noise_multiplier = 3.0", "noise_multiplier = 3.0\nepsilon = {}"
    text = recipe.read_text()
    recipe.write_text(text.replace(noise, budget.format(0.2)))
    done = call(tmp_path, "sweep", "grid.toml", "--out", "best")
    assert done.code == 2 and not (tmp_path / "best").exists()
    assert "privacy.epsilon = 0.2: expected at least 0.4856" in " ".join(done.stderr.split())


@pytest.mark.parametrize("runs", [0, 2])
def test_a_selection_that_releases_nothing_is_over_and_counted(tmp_path, monkeypatch, runs):
    """Whoever draws again until a model comes out has made several selections."""
    asked = sweep.read_sweep(write_private(tmp_path))
    monkeypatch.setattr(sweep.selection, "draw_number_of_runs", lambda *_: runs)
    monkeypatch.setattr(sweep, "_score", lambda plan, point, *_: (point, math.inf))  # diverged
    out, stores = tmp_path / "out", tmp_path / "stores"
    assert sweep.select(asked, out, stores, lambda: False) is None
    assert not (out / sweep.HIDDEN).exists()
    with pytest.raises(RecordError, match="holds a selection that has ended"):
        sweep.select(asked, out, stores, lambda: False)
    assert sweep.select(asked, tmp_path / "other", stores, lambda: False) is None
    (store,) = stores.iterdir()
    assert lineage.spent_on(Store(store)).private_runs == 2, "another draw is another selection"


@pytest.mark.parametrize(
    ("axis", "wanted"),
    [
        ('"data.vocabulary" = [10, 60]', "one store for all of them"),
        ('"run.trackers" = [["mlflow"]]', "a tracker would show runs that stay secret"),
    ],
)
def test_a_selection_refuses_what_it_would_not_pay_for(tmp_path, axis, wanted):
    write_private(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID.replace('"client.learning_rate" = [0.1, 0.5]', axis))
    done = call(tmp_path, "sweep", "grid.toml", "--out", "best")
    assert done.code == 2 and wanted in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_base_is_known_by_what_it_was_before(tmp_path, dtype):
    """In bfloat16 the hash of an open run's model matched nothing: it was assumed public."""
    text = [(f"c{n}", "the cat sat on the mat\n" * 4) for n in range(12)]
    store = fedlm.prepare(text, out=tmp_path / "s", test_clients=0.2)
    sizes = {"name": "transformer", "embedding_size": 8, "hidden_size": 16, "layers": 1, "heads": 2}
    base = {
        "data": {"store": str(store.path)},
        "server": {"cohort": 2, "rounds": 1},
        "client": {"batch_size": 4},
    }
    fedlm.train({**base, "model": sizes}, tmp_path / "open")
    shutil.copy(tmp_path / "open" / "model.safetensors", tmp_path / "elsewhere.safetensors")
    start = {"init_from": str(tmp_path / "elsewhere.safetensors"), "base_dtype": dtype}
    private = {"mechanism": "gaussian", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3}
    again = {
        **base,
        "server": {**base["server"], "sampling": "poisson"},
        "model": {**sizes, **start},
        "wire": {"trainable": "lora", "rank": 2},
        "privacy": private,
    }
    fedlm.train(again, tmp_path / "run")
    assert math.isinf(fedlm.epsilon(tmp_path / "run").epsilon)
