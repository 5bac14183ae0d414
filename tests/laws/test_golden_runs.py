"""Law 8 over time: the parameters that a recipe ends with change only by a commit that says why.

The fingerprints hold for one kind of processor and one version of JAX; elsewhere the tests skip.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fedlm.recipe.build import build
from fedlm.recipe.settings import load

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((Path(__file__).parent / "golden_runs.json").read_text())
SMALL = (
    "data.vocabulary=1000",
    "model.embedding_size=32",
    "model.hidden_size=48",
    "run.devices=2",
    "run.baselines=false",
    "run.trackers=[]",
    "run.prompts=[]",
    "server.evaluate_rows=64",
)
RUNS = {
    "flat": ("run.engine=loop", "server.rounds=4"),
    "private": (
        "server.rounds=6",
        "server.sampling=spaced",
        "privacy.mechanism=blt",
        "privacy.clip_norm=0.5",
        "privacy.noise_multiplier=1.0",
        "privacy.min_separation=5",
        "privacy.delta=1e-3",
        "privacy.seed=5",
    ),
    "traffic": (
        "server.rounds=4",
        "model.name=transformer",
        "model.heads=2",
        "model.layers=2",
        "wire.trainable=member",
        "wire.trainable_fraction=0.4",
        "wire.upload=uniform-8",
    ),
    "tree": (
        "server.rounds=3",
        "server.learning_rate=",
        "server.optimizer=",
        "server.schedule=",
        "model.name=mpt",
        "model.heads=2",
        "model.layers=3",
        "client.max_steps=4",
        "client.optimizer=adam",
        "client.learning_rate=0.003",
        "federation.levels=[0]",
    ),
}


def machine():
    """The processor and the version of JAX, whose arithmetic the fingerprints are of."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    facts = [
        re.search(rf"^{name}\s*: (.*)$", text, re.M)
        for name in ("model name", "cpu family", "model")
    ]
    told = " / ".join(fact.group(1) if fact else "unknown" for fact in facts)
    return f"{told}, jax {version('jax')}"


def train(recipe, changes, out):
    """Trains in a process of its own: tests compile with other flags than users do."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    settings = [part for change in changes for part in ("--set", change)]
    code = "from fedlm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", recipe, *settings, "--out", out, "--json"],
        cwd=Path(out).parent,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", RUNS)
def test_their_settings_are_accepted_on_every_processor(name, tmp_path_factory):
    """Where there are no fingerprints the runs below are skipped, and nobody would notice."""
    stores = tmp_path_factory.getbasetemp() / "golden-stores"
    build(load(ROOT / "recipes/sotu.toml", (*SMALL, *RUNS[name])), stores)


@pytest.mark.skipif(machine() not in GOLDEN, reason=f"no fingerprints of {machine()}")
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_the_parameters_that_it_always_had(name, tmp_path):
    found = train(str(ROOT / "recipes/sotu.toml"), (*SMALL, *RUNS[name]), str(tmp_path / name))
    wanted = GOLDEN[machine()][name]
    assert {fact: found[fact] for fact in wanted} == wanted


@pytest.mark.slow
@pytest.mark.skipif(machine() not in GOLDEN, reason=f"no fingerprints of {machine()}")
def test_twenty_rounds_of_the_first_recipe(tmp_path):
    changes = ("run.engine=loop", "server.rounds=20", "run.devices=2", "run.baselines=false")
    found = train(str(ROOT / "recipes/sotu.toml"), changes, str(tmp_path / "sotu"))
    wanted = GOLDEN[machine()]["sotu"]
    assert {fact: found[fact] for fact in wanted} == wanted
