"""`fedlm privacy audit`: what canaries show, as one JSON object, or one sentence why not."""

import json
import shutil
import subprocess
import sys

import pytest

from fedlm.federation.audit import canary_turns
from fedlm.federation.round import init_node
from fedlm.privacy.catalog import MECHANISMS
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from tests.cli.test_bad_input import refused
from tests.conftest import call, write_tiny
from tests.laws.test_private_runs import state_of

pytestmark = pytest.mark.slow  # canaries need a run of some size
SETTINGS = (
    "server.rounds=4",
    "server.cohort=16",
    "server.optimizer=fedavg",
    "server.learning_rate=1.0",
    "server.sampling=spaced",
    "privacy.mechanism=tree",
    "privacy.clip_norm=0.1",
    "privacy.min_separation=1",
    "privacy.noise_multiplier=2.0",
    "privacy.canaries=30",
    "run.baselines=false",
)


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A folder with a run in which 30 of 48 clients are canaries."""
    folder = tmp_path_factory.mktemp("audited")
    write_tiny(folder)
    changes = [part for setting in SETTINGS for part in ("--set", setting)]
    done = call(folder, "train", "tiny.toml", *changes, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    return folder


def test_an_audit_of_an_honest_run(audited):
    done = call(audited, "privacy", "audit", "run", "--json")
    assert done.code == 0 and done.stdout.count("\n") == 1, done.stderr
    found = done.json
    accounted = call(audited, "privacy", "epsilon", "run", "--json").json
    assert found["epsilon_accounted"] == accounted["epsilon"]
    assert found["canaries"] == 30 and 0 < found["took_part"] <= 30
    assert found["epsilon_lower"] <= found["epsilon_accounted"]
    assert found["epsilon_lower_jax_privacy"] <= found["epsilon_accounted"]
    assert found["epsilon_estimate"] > 0 and found["confidence"] == 0.95
    assert "less private" not in done.stderr
    shown = call(audited, "privacy", "audit", "run").stdout
    assert "epsilon estimate" in shown and "took part" in shown


def test_turns_are_those_of_the_run(audited):
    state = state_of(audited / "run")
    recipe = load(audited / "run" / "recipe.toml")
    made = build(recipe, audited / ".fedlm/stores", lambda *a: None)
    secret = state["secret"].astype("<u4").tobytes()
    begun = init_node(made.algorithm, made.start(), secret)
    turns = canary_turns(made.algorithm, begun, 4)
    assert turns.tolist() == state["history.times"][-30:].tolist()
    assert turns.sum() > 0 and turns.max() <= 2


MECHANISMS_HERE = {
    "gaussian": ("server.sampling=poisson", "privacy.min_separation=0"),
    "distributed": (
        "server.sampling=fixed",
        "privacy.min_separation=0",
        "privacy.honest_nodes=3",
        "wire.secure_nodes=4",
        "wire.upload=secure-18-clip1-members16",
    ),
    "tree": (),
    "banded": (),
    "toeplitz": (),
    "blt": (),
}


def test_every_mechanism_is_audited_here():
    assert MECHANISMS_HERE.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
def test_an_audit_in_a_process_of_its_own_shows_its_lanes(mechanism, tmp_path):
    """Accounting started JAX with one lane, and the run has two."""
    write_tiny(tmp_path)
    settings = (*SETTINGS, f"privacy.mechanism={mechanism}", *MECHANISMS_HERE[mechanism])
    changes = [part for setting in settings for part in ("--set", setting)]
    done = call(tmp_path, "train", "tiny.toml", *changes, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    command = [sys.executable, "-m", "fedlm.cli.main", "privacy", "audit", "run", "--json"]
    apart = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert apart.returncode == 0, apart.stderr
    assert json.loads(apart.stdout)["canaries"] == 30


@pytest.fixture
def copy(audited, tmp_path):
    """The run, to be spoiled, beside its text."""
    shutil.copytree(audited, tmp_path / "there")
    return tmp_path / "there" / "run"


def test_what_cannot_be_audited(run_cli, audited, copy, trained):
    refused(run_cli("privacy", "audit", trained / "runs" / "tiny"), "no privacy claim")
    refused(run_cli("privacy", "audit", trained), "is not a run directory")
    refused(call(audited, "privacy", "audit", "run", "--confidence", 2), "--confidence = 2.0")
    journal = (copy / "journal.jsonl").read_text()
    (copy / "journal.jsonl").write_text(journal.replace('"canaries": 30, "unsafe', '"unsafe'))
    refused(call(copy.parent, "privacy", "audit", "run"), "has no canaries", "privacy.canaries=100")
    (copy / "journal.jsonl").write_text(journal.replace('"start_sha256": "', '"start_sha256": "0'))
    refused(call(copy.parent, "privacy", "audit", "run"), "began with another model")
    (copy / "journal.jsonl").write_text(journal)
    shutil.rmtree(copy / "checkpoints")
    refused(call(copy.parent, "privacy", "audit", "run"), "holds no checkpoint", "secret is gone")
    (copy / "model.safetensors").unlink()
    refused(call(copy.parent, "privacy", "audit", "run"), "holds no trained model yet")
