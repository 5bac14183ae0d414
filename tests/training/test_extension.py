"""A run that goes on ends like one that was never shorter; one that no longer improves stops."""

import json
import math
import shutil

import pytest

from fedlm.record.facts import facts_of
from fedlm.record.journal import read
from fedlm.training.early_stopping import EarlyStopping
from tests.cli.test_bad_input import refused
from tests.conftest import call, write_tiny

SHORT = ("--set", "run.baselines=false", "--set", "run.prompts=[]")


def changes(*settings):
    return [part for setting in settings for part in ("--set", setting)]


def kinds(run):
    return [entry["kind"] for entry in read(run / "journal.jsonl")]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A finished run of two rounds, beside its text. Not to be changed."""
    folder = tmp_path_factory.mktemp("short")
    write_tiny(folder)
    done = call(folder, "train", "tiny.toml", *SHORT, *changes("server.rounds=2"), "--out", "run")
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def copy(short, tmp_path):
    shutil.copytree(short, tmp_path / "there")
    return tmp_path / "there"


def resume(folder, *settings):
    args = ("run/recipe.toml", "--out", "run", "--resume", *changes(*settings), "--json")
    return call(folder, "train", *args)


def test_an_extended_run_ends_like_one_that_was_never_shorter(copy):
    longer = resume(copy, "server.rounds=4")
    assert longer.code == 0, longer.stderr
    assert "extended from 2 to 4 rounds" in longer.stderr
    whole = call(
        copy, "train", "tiny.toml", *SHORT, *changes("server.rounds=4"), "--out", "whole", "--json"
    )
    for name in ("params_sha256", "rounds", "perplexity", "upload_bytes"):
        assert longer.json[name] == whole.json[name]
    assert kinds(copy / "run") == [
        "header",
        "round",
        "round",
        "extended",
        "round",
        "round",
        "final",
    ]
    page = (copy / "run" / "report.html").read_text()
    assert "Extended from 2 to 4 rounds." in page
    again = resume(copy)
    assert again.code == 0 and again.json == longer.json and "is complete" in again.stderr
    assert call(copy, "evaluate", "run", "--json").code == 0


def test_a_run_whose_version_did_not_know_a_setting_goes_on(copy):
    recipe, journal = copy / "run" / "recipe.toml", copy / "run" / "journal.jsonl"
    assert "secure_neighbors = 0" in recipe.read_text()
    recipe.write_text(recipe.read_text().replace("secure_neighbors = 0\n", ""))
    header, *others = journal.read_text().splitlines(keepends=True)
    begun = json.loads(header)
    del begun["recipe"]["wire"]["secure_neighbors"]
    journal.write_text("".join([json.dumps(begun) + "\n", *others]))
    longer = resume(copy, "server.rounds=3")
    assert longer.code == 0, longer.stderr
    assert longer.json["rounds"] == 3
    recipe.write_text(recipe.read_text().replace("keep_best = false\n", ""))
    refused(resume(copy, "run.keep_best=true"), "another recipe", "keep_best is False there")


@pytest.mark.parametrize(
    "settings, words",
    [
        (("server.rounds=1",), ("server.rounds = 1: expected more than the 2 rounds",)),
        (("server.rounds=4", "client.batch_size=5"), ("holds another recipe", "batch_size")),
    ],
)
def test_what_is_no_extension_is_refused_and_changes_nothing(copy, settings, words):
    before = {p: p.read_bytes() for p in (copy / "run").rglob("*") if p.is_file()}
    refused(resume(copy, *settings), *words)
    assert before == {p: p.read_bytes() for p in (copy / "run").rglob("*") if p.is_file()}


SCHEDULED = ("server.schedule=cosine",)
GAUSSIAN = ("privacy.mechanism=gaussian", "server.sampling=poisson", "privacy.delta=1e-3")
NOISE = (*GAUSSIAN, "privacy.noise_multiplier=1", "privacy.clip_norm=0.5")
TARGET = (*GAUSSIAN, "privacy.epsilon=5", "privacy.clip_norm=0.5")
TREE = ("privacy.mechanism=tree", "server.sampling=spaced", "privacy.min_separation=1")
TREE += ("privacy.noise_multiplier=1", "privacy.delta=1e-3", "server.cohort=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, words",
    [
        (SCHEDULED, ("server.schedule = 'cosine'", "learning rate of its rounds was made for 2")),
        (TARGET, ("privacy plan", "was made for so many rounds")),
        (TREE, ("tree noise, spaced sampling", "its account covers no more")),
        (("server.patience=5", "server.evaluate_every=1"), ("server.patience = 5: expected 0",)),
    ],
)
def test_runs_whose_rounds_were_made_for_their_number_are_not_extended(tmp_path, settings, words):
    write_tiny(tmp_path)
    settings = changes("server.rounds=2", *settings)
    done = call(tmp_path, "train", "tiny.toml", *SHORT, *settings, "--out", "run")
    assert done.code == 0, done.stderr
    refused(resume(tmp_path, "server.rounds=4"), *words)


@pytest.mark.slow
def test_independent_noise_is_extended_and_every_round_is_counted(tmp_path):
    write_tiny(tmp_path)
    for name, rounds in (("run", 2), ("whole", 4)):
        asked = changes(f"server.rounds={rounds}", *NOISE)
        done = call(tmp_path, "train", "tiny.toml", *SHORT, *asked, "--out", name, "--json")
        assert done.code == 0, done.stderr
    longer = resume(tmp_path, "server.rounds=4")
    assert longer.code == 0, longer.stderr
    assert longer.json["rounds"] == 4
    assert longer.json["epsilon"] == pytest.approx(done.json["epsilon"], rel=1e-9)
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert [json.loads(line)["kind"] for line in ledger.splitlines()].count("round") == 4
    assert call(tmp_path, "privacy", "epsilon", "run", "--json").json["rounds"] == 4


# ---- early stopping ----------------------------------------------------------------------------

STOPS = ("server.rounds=40", "server.evaluate_every=1", "server.patience=2")
STOPS += ("server.learning_rate=0.5", "client.learning_rate=2.0")  # it soon gets worse


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    write_tiny(folder)
    done = call(folder, "train", "tiny.toml", *SHORT, *changes(*STOPS), "--out", "run", "--json")
    assert done.code == 0, done.stderr
    return folder, done


def test_a_run_stops_early_and_keeps_its_best_model(early):
    folder, done = early
    facts = facts_of(folder / "run")
    seen = [r["perplexity"] for r in facts.evaluated]
    best = seen.index(min(seen))
    assert len(seen) == best + 3 < 40 and done.json["rounds"] == len(seen)
    assert done.json["stopped_early"] == len(seen)
    assert done.json["best"] == {"round": best + 1, "perplexity": min(seen)}
    assert "Stopping early" in done.stderr and facts.stopped_after == len(seen)
    assert "Stopped early" in (folder / "run" / "report.html").read_text()
    last = call(folder, "evaluate", "run", "--split", "validation", "--json").json
    kept = call(folder, "evaluate", "run", "--split", "validation", "--best", "--json").json
    assert kept["perplexity"] == pytest.approx(min(seen), rel=1e-4)
    assert kept["perplexity"] < last["perplexity"]
    assert call(folder, "predict", "run", "the", "--best", "--json").code == 0
    exported = call(folder, "export", "run", "--best", "--out", "model", "--json")
    assert exported.code == 0
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert weights == (folder / "run" / "best.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_killed_before_it_was_closed_is_still_stopped(early, tmp_path):
    folder, done = early
    shutil.copytree(folder, tmp_path / "there")
    (tmp_path / "there" / "run" / "summary.json").unlink()
    (tmp_path / "there" / "run" / "model.safetensors").unlink()
    again = resume(tmp_path / "there")
    assert again.code == 0, again.stderr
    assert again.json["params_sha256"] == done.json["params_sha256"]
    assert again.json["stopped_early"] == done.json["stopped_early"]


def test_without_a_best_model_there_is_a_sentence(short):
    for command in (("predict", "run", "the"), ("evaluate", "run"), ("export", "run")):
        refused(call(short, *command, "--best"), "keeps no best model", "run.keep_best=true")


def test_nothing_private_decides_when_to_stop(run_cli, tiny_recipe):
    private = changes(*NOISE, "server.patience=2", "data.test_clients=0")
    refused(run_cli("train", tiny_recipe, *private), "server.patience = 2", "data.test_clients")


def test_patience_counts_evaluations_since_the_best():
    watch = EarlyStopping(2, [{"round": 0, "perplexity": 5.0}, {"round": 1}])
    assert not watch.hear({"round": 2, "perplexity": 5.0}) and not watch.exhausted
    assert watch.hear({"round": 3, "perplexity": 4.0})
    watch.hear({"round": 4, "perplexity": 6.0})
    assert not watch.exhausted
    watch.hear({"round": 5, "perplexity": None})
    watch.hear({"round": 6, "perplexity": 6.0})
    assert watch.exhausted and watch.best == (3, 4.0)
    # Beyond all numbers a perplexity is null in a journal: the same answer before and after.
    lived, told = EarlyStopping(2), EarlyStopping(2)
    for number in range(3):
        assert not lived.hear({"round": number, "perplexity": math.inf})
        assert not told.hear({"round": number, "perplexity": None})
    assert lived.exhausted == told.exhausted
    never = EarlyStopping(0, [{"round": n, "perplexity": float(n)} for n in range(99)])
    assert not never.exhausted
