"""Trackers show every round once, go on after a resume, and never end a run."""

import json
import math
import struct
import sys
from importlib.util import find_spec

import pytest

from fedlm.core.errors import ConfigError
from fedlm.core.releasable import Releasable
from fedlm.privacy.release import release
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load, parse
from fedlm.record.trackers import EXTRAS, TRACKERS, TrackerContext, Trackers, check_installed
from fedlm.training import Watcher, train

RECIPE = {
    "server": {"rounds": 6},
    "privacy": {"noise_multiplier": 1.0, "seed": 1234567},
    "federation": {"levels": [0, 1], "noise_seed": 7654321},
    "run": {"seed": 3, "prompts": ["dear anna"]},
}


def needs(name):
    """Skips a test where the extra of this name is missing."""
    return pytest.mark.skipif(find_spec(EXTRAS[name]) is None, reason=f"needs fedlm[{name}]")


BUILT_IN = [name for name in TRACKERS if name not in EXTRAS]
# W&B starts a process that takes seconds to begin and to end.
SLOW = {"wandb": [pytest.mark.slow]}
EVERY = [
    *BUILT_IN,
    *(pytest.param(name, marks=[needs(name), *SLOW.get(name, [])]) for name in EXTRAS),
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """What a user or another test has set decides nothing here."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def metrics_of(number):
    facts = {"round": number, "loss": number + 0.5, "nodes": {"a": 1}, "perplexity": math.inf}
    return release(None, "round", facts)


def follow(name, directory, rounds, say=print):
    """A session with one tracker, resumed if it does not begin with round 0."""
    directory.mkdir(exist_ok=True)
    first = rounds[0] if rounds else 0
    context = TrackerContext(
        directory=directory,
        name="run",
        first_round=first,
        recipe=RECIPE,
        earlier=[metrics_of(number) for number in range(first)],
    )
    trackers = Trackers([name], context, say)
    for number in rounds:
        trackers.log(number, metrics_of(number))
    trackers.close()


def events(directory):
    """Whatever the event files hold, in order: (step, name, value), or (step, 'start')."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((directory / "tensorboard").glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = struct.unpack_from("<Q", data, at)[0]
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                yield event.step, "start", None
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_tensorboard_shows_every_finite_number_of_a_round(tmp_path):
    follow("tensorboard", tmp_path, range(2))
    assert list(events(tmp_path)) == [
        (0, "round/round", 0.0),
        (0, "round/loss", 0.5),
        (1, "round/round", 1.0),
        (1, "round/loss", 1.5),
    ]


def test_tensorboard_hides_rounds_that_a_resumed_run_repeats(tmp_path):
    follow("tensorboard", tmp_path, range(4))
    follow("tensorboard", tmp_path, range(2, 4))
    # TensorBoard forgets older steps from that of a start on.
    assert (2, "start", None) in events(tmp_path)
    follow("tensorboard", tmp_path, range(2))  # killed before its first checkpoint
    assert (0, "start", None) in events(tmp_path)


def wandb_folders(directory):
    """The records of each offline session, oldest first: id, configuration, history."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # waits for the process that writes its files, as the end of a command does
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        store, config, history, id = DataStore(), {}, [], None
        store.open_for_scan(str(path))
        while data := store.scan_data():
            record = Record.FromString(data)
            id = record.run.run_id or id
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            items = {"".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "round/loss" in items:
                history.append((record.history.step.num, json.loads(items["round/loss"])))
        store.close()
        yield id, config, history


@pytest.mark.slow
@needs("wandb")
def test_wandb_writes_into_the_run_directory_and_keeps_its_id(tmp_path):
    run = tmp_path / "a run"
    follow("wandb", run, range(4))
    follow("wandb", run, range(2, 6))
    (first, config, before), (second, _, after) = wandb_folders(run)
    assert first == second
    assert before == [(r, r + 0.5) for r in range(4)]
    assert after == [(r, r + 0.5) for r in range(6)]
    assert config["server"] == {"rounds": 6} and config["privacy"] == {"noise_multiplier": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["a run"]


@pytest.mark.slow
@needs("wandb")
def test_wandb_mode_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    follow("wandb", tmp_path, range(2))
    assert not list(wandb_folders(tmp_path))


def mlflow_runs(store):
    """Every run of a store: its status, its parameters, the history of the loss."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("fedlm")
    for run in client.search_runs([experiment.experiment_id]):
        history = client.get_metric_history(run.info.run_id, "round/loss")
        steps = [(metric.step, metric.value) for metric in history]
        yield run.info.status, run.data.params, steps


@needs("mlflow")
def test_mlflow_goes_on_in_one_run_and_repeats_no_round(tmp_path):
    run = tmp_path / "a run"
    follow("mlflow", run, range(4))
    follow("mlflow", run, range(2, 6))
    [(status, params, history)] = mlflow_runs(run / "mlflow")
    assert status == "FINISHED"
    assert params == {
        "server.rounds": "6",
        "privacy.noise_multiplier": "1.0",
        "federation.levels": "[0, 1]",
        "run.seed": "3",
    }
    assert history == [(r, r + 0.5) for r in range(6)]
    assert [path.name for path in tmp_path.iterdir()] == ["a run"]


@needs("mlflow")
def test_mlflow_gets_the_rounds_that_a_failure_kept_from_it(tmp_path):
    follow("mlflow", tmp_path, range(2))
    follow("mlflow", tmp_path, range(4, 6))
    [(_, _, history)] = mlflow_runs(tmp_path / "mlflow")
    assert history == [(r, r + 0.5) for r in range(6)]


@needs("mlflow")
def test_mlflow_writes_where_the_user_says_and_begins_anew_elsewhere(tmp_path, monkeypatch):
    run, other = tmp_path / "run", tmp_path / "other"
    follow("mlflow", run, range(2))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other.as_uri())
    follow("mlflow", run, range(2, 4))
    assert [len(history) for _, _, history in mlflow_runs(run / "mlflow")] == [2]
    assert [history for _, _, history in mlflow_runs(other)] == [[(r, r + 0.5) for r in range(4)]]


def test_no_tracker_is_told_seeds_of_noise_or_prompts(tmp_path):
    context = TrackerContext(directory=tmp_path, name="run", first_round=0, recipe=RECIPE)
    assert context.config() == {
        "server": {"rounds": 6},
        "privacy": {"noise_multiplier": 1.0},
        "federation": {"levels": [0, 1]},
        "run": {"seed": 3},
    }
    assert context.recipe["privacy"]["seed"] == 1234567


@pytest.mark.parametrize("name", EVERY)
def test_a_run_of_no_rounds_is_closed(name, tmp_path):
    follow(name, tmp_path, range(0), say=pytest.fail)


def test_a_recipe_chooses_among_the_registered_trackers():
    assert Recipe().run.trackers == ("tensorboard",)
    assert parse({"run": {"trackers": list(TRACKERS)}}).run.trackers == tuple(TRACKERS)
    refused = {
        "Did you mean 'mlflow'": {"trackers": ["mlflw"]},
        "run.trackers = 'wandb': expected a list": {"trackers": "wandb"},
        "tensorboard is now called 'trackers'": {"tensorboard": False},
    }
    for message, settings in refused.items():
        with pytest.raises(ConfigError, match=message):
            parse({"run": settings})


class Fragile:
    """A tracker that fails in its third round."""

    def __init__(self, context):
        self.seen = []

    def log(self, round, metrics):
        if round == 2:
            raise OSError("no space left\non the device")
        self.seen.append(round)

    def close(self):
        pytest.fail("it was left out")


def test_a_tracker_that_fails_is_named_once_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "fragile", Fragile)
    said = []
    follow("fragile", tmp_path, range(5), say=said.append)
    [warning] = said
    assert warning.startswith("Warning: the tracker fragile failed (no space left) and is left out")


def test_a_tracker_that_cannot_start_is_one_sentence_and_closes_the_others(tmp_path, monkeypatch):
    closed = []

    class Good(Fragile):
        def close(self):
            closed.append(True)

    def bad(context):
        raise RuntimeError("no key was given.\nSee the manual.")

    monkeypatch.setitem(TRACKERS, "good", Good)
    monkeypatch.setitem(TRACKERS, "bad", bad)
    context = TrackerContext(directory=tmp_path, name="run", first_round=0, recipe=RECIPE)
    with pytest.raises(ConfigError, match=r"run\.trackers = 'bad': .* no key was given\. Mend"):
        Trackers(["good", "bad"], context, print)
    assert closed == [True]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_one_sentence_before_the_run_begins(
    name, run_cli, tiny_recipe, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, EXTRAS[name], None)
    done = run_cli("train", tiny_recipe, "--set", f"run.trackers=['{name}']")
    assert done.code == 2 and "Traceback" not in done.stderr
    assert f"run.trackers = '{name}': expected its package to be installed." in done.stderr
    assert f"pip install 'fedlm[{name}]'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_the_same_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "tracked").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXTRAS, "wandb", "tracked")
    with pytest.raises(ConfigError, match="its package to be installed"):
        check_installed(["wandb"])


@pytest.mark.parametrize(
    "left_out",
    [pytest.param(SLOW, id="quick ones"), pytest.param((), marks=pytest.mark.slow, id="all")],
)
def test_training_with_all_trackers_prints_one_json_object(
    run_cli, tiny_recipe, tmp_path, left_out
):
    installed = [name for name in TRACKERS if name not in EXTRAS or find_spec(EXTRAS[name])]
    here = [name for name in installed if name not in left_out]
    done = run_cli(
        "train", tiny_recipe, "--set", "server.rounds=2", "--set", f"run.trackers={here}", "--json"
    )
    assert done.code == 0, done.stderr
    assert done.json["rounds"] == 2 and done.stdout.count("\n") == 1
    assert "Warning" not in done.stderr
    for name in here:
        assert list((tmp_path / "runs" / "tiny" / name).rglob("*"))


def test_a_resumed_run_tells_trackers_what_may_be_told(tiny_recipe, tmp_path, monkeypatch):
    """Also of the rounds that its journal holds: the rule is applied to them once more."""
    seen = []

    class Listener:
        def __init__(self, context):
            seen.append(context.earlier)

        def log(self, round, metrics):
            seen.append([metrics])

        def close(self):
            pass

    monkeypatch.setitem(TRACKERS, "listener", Listener)
    plan = ("server.sampling=poisson", "privacy.noise_multiplier=1", "data.test_clients=0.3")
    changes = ("server.rounds=2", "run.trackers=['listener']", "privacy.mechanism=gaussian", *plan)
    monkeypatch.chdir(tmp_path)
    run = build(load(tiny_recipe, changes), tmp_path / "stores", out=tmp_path / "run")
    assert train(run, watcher=Watcher(stop=lambda: True)) is None
    assert train(run, resume=True)["rounds"] == 2
    first, played, earlier, _ = seen
    assert not first and [told["round"] for told in earlier] == [0]
    assert all(isinstance(told, Releasable) for told in (*played, *earlier))
    assert dict(earlier[0]) == dict(played[0]) and "loss" not in earlier[0]
