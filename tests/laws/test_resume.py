"""Law 3: a resumed run equals an uninterrupted one. Law 8: same recipe and seed, same model."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedlm.cohort import sampling
from fedlm.federation.round import _server_step
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record import checkpoint
from fedlm.record.journal import Journal, read
from fedlm.training import Watcher, train


def facts(run):
    """Everything a journal says of its rounds and of the end, but how long they took."""
    return [
        {name: value for name, value in entry.items() if name != "seconds"}
        for entry in read(run / "journal.jsonl")
        if entry["kind"] != "header"
    ]


def told(run):
    """What a run ends with, but for its place and its time."""
    summary = json.loads((run / "summary.json").read_text())
    timed = ("run", "report", "seconds", "clients_per_second")
    return {name: value for name, value in summary.items() if name not in timed}


def newest(run):
    return max((run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(trained):
    """The run that was never interrupted."""
    return trained / "runs" / "tiny"


def same(run, whole):
    assert told(run) == told(whole)
    assert facts(run) == facts(whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(run.rglob("*.part"))


@pytest.fixture
def stopped(tiny_recipe, tmp_path):
    """`stopped(k)`: a run of the tiny recipe that was asked to stop in round k."""

    def start(rounds, resume=False):
        made = build(load(tiny_recipe), tmp_path / "stores", out=tmp_path / "run")
        seen = []
        watcher = Watcher(round=seen.append, stop=lambda: len(seen) == rounds)
        assert train(made, resume=resume, watcher=watcher) is None
        assert len(seen) == rounds
        return made.record.path

    return start


def test_the_same_recipe_and_seed_give_the_same_model(run_cli, tiny_recipe, tmp_path, whole):
    again = run_cli("train", tiny_recipe, "--json").json
    same(tmp_path / "runs" / "tiny", whole)
    other = run_cli("train", tiny_recipe, "--set", "run.seed=1", "--json").json
    assert other["params_sha256"] != again["params_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_run_that_was_stopped_politely_ends_the_same(
    run_cli, tiny_recipe, stopped, whole, rounds
):
    run = stopped(rounds)
    assert not (run / "summary.json").exists()
    assert newest(run).name == f"round-{rounds:06d}.safetensors"
    done = run_cli("train", tiny_recipe, "--out", run, "--resume")
    assert done.code == 0 and f"going on after round {rounds}" in done.stderr
    same(run, whole)


@pytest.mark.slow
def test_a_run_stopped_again_and_again_ends_the_same(run_cli, tiny_recipe, stopped, whole):
    run = stopped(1)
    stopped(2, resume=True)
    assert run_cli("train", tiny_recipe, "--out", run, "--resume").code == 0
    same(run, whole)


def test_what_was_written_after_the_last_checkpoint_is_run_again(
    run_cli, tiny_recipe, stopped, whole
):
    """A kill leaves rounds in the journal that no checkpoint knows, and half a line."""
    run = stopped(5)
    newest(run).unlink()
    with open(run / "journal.jsonl", "a") as file:
        file.write('{"kind": "round", "rou')
    done = run_cli("train", tiny_recipe, "--out", run, "--resume")
    assert done.code == 0 and "going on after round 4" in done.stderr
    same(run, whole)


@pytest.mark.slow
def test_a_truncated_checkpoint_costs_rounds_and_nothing_else(run_cli, tiny_recipe, stopped, whole):
    run = stopped(5)
    newest(run).write_bytes(newest(run).read_bytes()[:-100])
    done = run_cli("train", tiny_recipe, "--out", run, "--resume")
    assert done.code == 0 and "going on after round 4" in done.stderr
    assert "round-000005.safetensors is damaged" in done.stderr
    same(run, whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", [(), ("model.safetensors",), ("journal.jsonl", "checkpoints")])
def test_a_kill_before_the_first_round_or_after_the_last(
    run_cli, tiny_recipe, tmp_path, whole, lost
):
    """Before the first checkpoint a run begins anew; after the last one only the end is redone."""
    run = tmp_path / "runs" / "tiny"
    assert run_cli("train", tiny_recipe).code == 0
    for name in ("summary.json", "report.html", *lost):
        path = run / name
        path.rename(tmp_path / f"lost-{name}")
    assert run_cli("train", tiny_recipe, "--out", run, "--resume").code == 0
    same(run, whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "number, times, kept", [(signal.SIGTERM, 1, 3), (signal.SIGINT, 1, 3), (signal.SIGINT, 2, 0)]
)
def test_a_signal_ends_in_a_command_that_goes_on(
    run_cli, tiny_recipe, tmp_path, monkeypatch, whole, number, times, kept
):
    """The first lets the round end; the second stops at once, here while round 2 is saved."""
    # A shell starts what runs in the background with SIGINT ignored: compare with what was there.
    save, before = checkpoint.save, signal.getsignal(signal.SIGINT)

    def interrupted(folder, round, state, keep=3):
        if round == 2:
            monkeypatch.setattr(checkpoint, "save", save)
            for _ in range(times):
                signal.raise_signal(number)
        return save(folder, round, state, keep)

    monkeypatch.setattr(checkpoint, "save", interrupted)
    done = run_cli("train", tiny_recipe, "--out", "a run", "--json")
    assert done.code == 130 and done.stdout == "" and "Traceback" not in done.stderr
    assert "Stopping after this round; once more stops at once." in done.stderr
    run = tmp_path / "a run"
    assert newest(run).name == f"round-{kept:06d}.safetensors"
    command = ["fedlm", "train", "a run/recipe.toml", "--out", "a run", "--resume"]
    if times == 1:
        assert "Stopped; a checkpoint is in a run. Go on with:" in done.stderr
        command = shlex.split(done.stderr.splitlines()[-1])
    assert run_cli(*command[1:]).code == 0
    same(run, whole)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_journal_is_on_the_disk_before_a_checkpoint_counts_on_it(
    run_cli, tiny_recipe, tmp_path, monkeypatch
):
    order, sync, save = [], Journal.sync, checkpoint.save

    def synced(journal):
        order.append(len(facts(journal.path.parent)))
        sync(journal)

    def saved(folder, round, state, keep=3):
        order.append(("saved", round))
        return save(folder, round, state, keep)

    monkeypatch.setattr(Journal, "sync", synced)
    monkeypatch.setattr(checkpoint, "save", saved)
    assert run_cli("train", tiny_recipe).code == 0
    assert order == [n for r in (0, 2, 4, 6) for n in (r, ("saved", r))] + [7]


ROUNDS = 200
MAIN = "from fedlm.cli.main import main; main()"


@pytest.mark.slow
def test_a_killed_process_ends_the_same(run_cli, tiny_recipe, tmp_path):
    settings = (f"server.rounds={ROUNDS}", "server.evaluate_every=20", "run.checkpoint_every=7")
    changes = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-c", MAIN, "train", str(tiny_recipe), *changes, "--out", "killed"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = tmp_path / "killed" / "journal.jsonl"
    while process.poll() is None and (not journal.exists() or len(facts(journal.parent)) < 10):
        time.sleep(0.01)
    # Any moment of a quarter second: the only draw of the tests that no seed decides.
    moment = int.from_bytes(os.urandom(2), "little") / (1 << 18)
    time.sleep(moment)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was to be killed before its end"
    rounds = len(facts(journal.parent))
    assert 10 <= rounds < ROUNDS

    done = run_cli("train", tiny_recipe, *changes, "--out", "killed", "--resume")
    assert done.code == 0 and "going on after round" in done.stderr
    assert run_cli("train", tiny_recipe, *changes, "--out", "whole").code == 0
    same(tmp_path / "killed", tmp_path / "whole")
    found = [entry["perplexity"] for entry in facts(journal.parent) if "perplexity" in entry]
    assert len(found) == ROUNDS // 20 and np.all(np.isfinite(found))


def test_a_run_of_a_large_population_ends_the_same(tiny_recipe, tmp_path, monkeypatch):
    """Its history grows from round to round; it is read back as it was, and compiles nothing."""
    monkeypatch.setattr(sampling, "MANY", 0)
    plan = ("privacy.mechanism=tree", "privacy.noise_multiplier=0.5", "privacy.delta=1e-3",
            "privacy.clip_norm=0.3", "privacy.seed=3", "privacy.min_separation=2",
            "server.sampling=spaced", "server.cohort=2", "server.rounds=6", "client.weight=uniform",
            "data.test_clients=0.3", "run.baselines=false")  # fmt: skip

    def run(name):
        return build(load(tiny_recipe, plan), tmp_path / "stores", out=tmp_path / name)

    seen = []
    first = run("halved")
    stop = Watcher(round=seen.append, stop=lambda: len(seen) == 3)
    assert train(first, watcher=stop) is None
    compiled = _server_step._cached._cache_size()
    halved, whole = train(run("halved"), resume=True), train(run("whole"))
    assert halved["params_sha256"] == whole["params_sha256"]
    assert _server_step._cached._cache_size() == compiled
    state = checkpoint.load_newest(
        tmp_path / "whole/checkpoints", first.round.init(first.start()), print
    ).state
    assert state.history.times.sum() == 12 and len(state.history.members) <= 12
