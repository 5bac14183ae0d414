"""A run tells its status file what it tells its watcher."""

import contextlib
import json

import pytest

from fedlm.core.errors import DivergenceError, EngineError, RecordError
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.status import read_status
from fedlm.training import Watcher, train
from fedlm.training.status import in_status
from tests.training.test_write_ahead import ROUNDS, TREE

QUICK = ("server.rounds=4", "run.baselines=false", "run.prompts=[]")


def test_a_run_says_what_it_does_until_it_is_finished(tiny_recipe, tmp_path):
    run = build(load(tiny_recipe, QUICK), tmp_path / "stores", out=tmp_path / "run")
    seen, played = [], []

    def look(*_):
        found = read_status(run.record.status)
        seen.append((found.state, found.round))

    watcher = Watcher(begin=look, round=played.append, stop=lambda: len(played) == 2)
    assert train(run, watcher=watcher) is None
    assert seen == [("compiling", 0)]
    found = read_status(run.record.status)
    assert (found.state, found.round, found.rounds) == ("stopped", 2, 4)
    assert train(run, resume=True) is not None
    found = read_status(run.record.status)
    assert (found.state, found.round) == ("finished", 4)
    with pytest.raises(RecordError, match="--resume"):
        train(run)  # the directory is not its own: the status stays
    assert read_status(run.record.status) == found


def test_the_status_says_how_a_run_ended(tmp_path):
    directory = RunDirectory(tmp_path)
    for error, state, words in [
        (DivergenceError("round 3: the loss is not finite."), "failed", "not finite"),
        (KeyboardInterrupt(), "stopped", ""),
        (ZeroDivisionError("secret"), "failed", "ZeroDivisionError"),
    ]:
        with pytest.raises(type(error)), in_status(directory, Watcher(), 1) as watcher:
            watcher.claimed()
            raise error
        found = read_status(directory.status)
        assert found.state == state and words in found.doing and "secret" not in found.doing


def test_everybody_may_read_the_status_of_a_private_run(tiny_recipe, tmp_path):
    """It has rounds, times and fixed sentences: nothing that a run says or fails with."""
    plan = (*TREE, f"server.rounds={ROUNDS}", "data.test_clients=0.3")
    run = build(load(tiny_recipe, (*QUICK, *plan)), tmp_path / "stores", out=tmp_path / "run")
    seen, heard = [], []

    def look(*_):
        seen.append(read_status(run.record.status).doing)

    def listen(text):
        heard.append(text)
        look()

    watcher = Watcher(begin=look, round=look, evaluating=look, scored=look, say=listen)
    assert train(run, watcher=watcher) is not None
    assert heard and len(seen) > 4
    assert set(seen) <= {"", "the first round takes longest", "on held-out text", "at work"}
    wanted = {"format", "state", "doing", "follows", "pid", "process", "command", "home", "folder",
              "round", "rounds", "started", "updated"}  # fmt: skip
    assert set(json.loads(run.record.status.read_text())) == wanted
    directory = RunDirectory(tmp_path)
    for say in (True, False):
        with (
            contextlib.suppress(EngineError),
            in_status(directory, Watcher(), 1, secret=True) as watcher,
        ):
            watcher.claimed()
            watcher.status._wrote = -1.0
            if not say:
                raise EngineError("member 17 of sweden: its update is not finite.")
            watcher.say("waiting for sweden (keys), 40 s")
            assert read_status(directory.status).doing == "waiting for nodes"
        found = directory.status.read_text()
        assert "sweden" not in found and "17 of" not in found
    assert read_status(directory.status).state == "failed"


def test_whom_a_round_waits_for_is_told_until_the_next_round(tmp_path):
    said = []
    with in_status(RunDirectory(tmp_path), Watcher(say=said.append), 10, home=tmp_path) as watcher:
        watcher.claimed()
        watcher.status._wrote = -1.0
        watcher.say("waiting for sweden, 40 s")
        found = read_status(tmp_path / "status.json")
        assert found.doing == said[0] == "waiting for sweden, 40 s"
        assert (found.command, found.home) == ("federation train", str(tmp_path.resolve()))
        watcher.status._wrote = -1.0
        watcher.round({"round": 0})
        found = read_status(tmp_path / "status.json")
        assert (found.state, found.doing) == ("training", "")


def test_an_evaluation_says_how_far_it_has_come(tiny_recipe, tmp_path):
    """On the way and at the end, in the file and to the watcher."""
    run = build(load(tiny_recipe, QUICK), tmp_path / "stores", out=tmp_path / "run")
    heard, seen = [], []

    def scored(done, rows):
        heard.append((done, rows))
        seen.append(read_status(run.record.status))

    assert train(run, watcher=Watcher(scored=scored)) is not None
    assert all(0 < done <= rows for done, rows in heard) and heard[-1][0] == heard[-1][1]
    assert len([1 for done, rows in heard if done == rows]) > 2
    with in_status(RunDirectory(tmp_path), Watcher(), 1) as watcher:
        watcher.claimed()
        watcher.status._wrote = -1.0
        watcher.scored(1500, 20_000)
        found = read_status(tmp_path / "status.json")
        assert (found.state, found.doing) == (
            "evaluating",
            "on held-out text, 1,500 of 20,000 rows",
        )
