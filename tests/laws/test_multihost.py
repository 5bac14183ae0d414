"""Two processes on loopback compute what one computes; whoever fails ends both."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import write_tiny

MAIN = "from fedlm.cli.main import main; main()"
PATIENCE = 20
# Bounds on a hang, not on speed: a starved machine took more than two minutes to the first round.
LONGEST = 600
LONG = ("--set", "server.rounds=5000", "--patience", PATIENCE)
network = pytest.mark.network


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Processes:
    """`fedlm train` as processes of one run, each in a folder of its own; reaped at the end."""

    def __init__(self, folder):
        self.folder, self.running, self.port = folder, [], free_port()

    def start(self, number, *args, env=None, place=None):
        home = self.folder / f"host-{number}"
        if not home.exists():
            home.mkdir()
            write_tiny(home)
        if place is None:
            place = ("--coordinator", f"localhost:{self.port}", "--process", number)
            place = (*place, "--processes", 2)
        command = ["train", "tiny.toml", "--json", "--out", "run", "--set", "run.devices=1"]
        self.running.append(
            subprocess.Popen(
                [sys.executable, "-c", MAIN, *command, *map(str, (*place, *args))],
                cwd=home,
                env={**os.environ, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.running[-1]

    def both(self, *args):
        """Process 1 first: it waits for the one that listens."""
        late, first = (self.start(number, *args) for number in (1, 0))
        return first, late

    def rounds(self):
        journal = self.folder / "host-0" / "run" / "journal.jsonl"
        return journal.read_text().count('"kind": "round"') if journal.exists() else 0

    def train_for(self, rounds):
        deadline = time.monotonic() + LONGEST
        while self.rounds() < rounds and all(p.poll() is None for p in self.running):
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.05)


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


def ended(process, code, timeout=LONGEST):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    assert code != 2 or err.rstrip().splitlines()[-1].startswith("fedlm: ")
    return out, err


def sha(folder):
    return json.loads((folder / "summary.json").read_text())["params_sha256"]


@network
def test_two_processes_compute_what_one_does_and_only_the_first_writes(
    processes, tmp_path, trained
):
    first, second = processes.both()
    out, _ = ended(first, 0)
    assert out.count("\n") == 1
    # Two lanes in both cases, and a sum of two numbers has no order: equal to the byte.
    assert json.loads(out)["params_sha256"] == sha(trained / "runs" / "tiny")
    said, talked = ended(second, 0)
    assert said == "" and "process 1 of 2" in talked
    left = {p.name for p in (tmp_path / "host-1").iterdir()}
    assert left == {"tiny.toml", "tiny.jsonl", ".fedlm"}


@network
def test_four_lanes_of_two_processes_agree_with_four_of_one_up_to_rounding(processes, tmp_path):
    """More than two numbers are added in another order between processes than within one."""
    for process in processes.both("--set", "run.devices=2"):
        ended(process, 0)
    alone = processes.start(2, "--set", "run.devices=4", place=())
    ended(alone, 0)
    one, two = (load_file(tmp_path / f"host-{n}/run/model.safetensors") for n in (2, 0))
    for name, leaf in one.items():
        np.testing.assert_allclose(two[name], leaf, rtol=1e-5, atol=1e-5)


@network
def test_two_processes_whose_devices_share_a_model_agree_with_one_that_has_all(processes, tmp_path):
    """A lane of two devices per process, and two lanes of two devices in one."""
    for process in processes.both("--set", "run.devices=2", "--set", "run.shard=2"):
        ended(process, 0)
    alone = processes.start(2, "--set", "run.devices=4", "--set", "run.shard=2", place=())
    whole = processes.start(3, "--set", "run.engine=loop", place=())
    for process in (alone, whole):
        ended(process, 0)
    two, one, loop = (load_file(tmp_path / f"host-{n}/run/model.safetensors") for n in (0, 2, 3))
    for name, leaf in loop.items():
        np.testing.assert_allclose(one[name], leaf, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(two[name], leaf, rtol=1e-5, atol=1e-5)


@network
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_either_stops_both_after_the_same_round_and_they_go_on(
    processes, run_cli, tiny_recipe, tmp_path, asked
):
    changes = ("--set", "server.rounds=100", "--set", "server.evaluate_every=1")
    running = processes.both(*changes)
    processes.train_for(2)
    running[asked].send_signal((signal.SIGINT, signal.SIGTERM)[asked])
    _, err = ended(running[0], 130)
    assert "Go on with, as every process was started" in err
    ended(running[1], 130)
    before = processes.rounds()
    kept = max((tmp_path / "host-0/run/checkpoints").iterdir())
    assert kept.name == f"round-{before:06d}.safetensors"
    # Only process 0 has the checkpoint: the other one gets it from there.
    first, second = processes.both(*changes, "--resume")
    _, err = ended(first, 0)
    assert f"going on after round {before}" in err
    ended(second, 0)
    alone = run_cli("train", tiny_recipe, *changes, "--json").json
    assert sha(tmp_path / "host-0" / "run") == alone["params_sha256"]


@network
def test_a_complete_run_is_complete_for_all(processes, tmp_path):
    for arguments in ((), ("--resume",)):
        first, second = processes.both("--set", "server.rounds=2", *arguments)
        out, _ = ended(first, 0)
        ended(second, 0)
    assert json.loads(out) == json.loads((tmp_path / "host-0/run/summary.json").read_text())


@network
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_dies_ends_the_other_with_a_sentence(processes, killed):
    running = processes.both(*LONG)
    processes.train_for(2)
    running[killed].kill()
    _, err = ended(running[1 - killed], 2, timeout=6 * PATIENCE)
    assert "another process of this run is gone" in err and "--resume" in err


@network
def test_a_process_that_stops_answering_ends_the_other(processes):
    first, second = processes.both(*LONG)
    processes.train_for(2)
    second.send_signal(signal.SIGSTOP)
    _, err = ended(first, 2, timeout=6 * PATIENCE)
    assert "no longer answers" in err


@network
def test_an_error_of_one_is_the_sentence_of_both(processes, tmp_path):
    (tmp_path / "host-0").mkdir()
    write_tiny(tmp_path / "host-0")
    (tmp_path / "host-0" / "run").write_text("in the way")
    for process in processes.both():
        _, err = ended(process, 2)
        assert "process 0: run is not a run directory" in err and "Traceback" not in err


@network
@pytest.mark.parametrize(
    "change, words",
    [
        (("server.rounds = 6", "server.rounds = 7"), "server.rounds is 6 there and 7 here"),
        (("the cat", "a cat"), "run.prompts"),
        (None, "store.clients_sha256"),
    ],
)
def test_another_recipe_or_text_at_a_host_is_refused(processes, tmp_path, change, words):
    home = tmp_path / "host-1"
    home.mkdir()
    recipe = write_tiny(home)
    file = home / "tiny.jsonl" if change is None else recipe
    old, new = ("cat", "dog") if change is None else (c.removeprefix("server.") for c in change)
    file.write_text(file.read_text().replace(old, new))
    for process in processes.both():
        _, err = ended(process, 2)
        assert "process 1: this process would train something else" in err and words in err
    assert not (tmp_path / "host-0" / "run").exists()


@network
@pytest.mark.parametrize(
    "setting, words",
    [
        ("run.engine=loop", "run.engine = 'loop': expected mesh for several processes"),
        ("server.patience=2", "server.patience = 2: expected 0 for several processes"),
        ("federation.levels=[0]", "processes = 'several': expected one for a tree"),
    ],
)
def test_what_several_processes_cannot_train_is_refused(processes, tmp_path, setting, words):
    for process in processes.both("--set", setting):
        _, err = ended(process, 2)
        assert words in err and "Traceback" not in err
    assert not (tmp_path / "host-0" / "run").exists()


@network
def test_who_is_not_there_is_not_waited_for_forever(processes):
    late = processes.start(1, "--patience", 2)
    _, err = ended(late, 2)
    assert "not reached within 2 seconds" in err and "Traceback" not in err
    first = processes.start(0, "--patience", 2)
    _, err = ended(first, 2)
    assert "not all processes came within 2 seconds" in err


@network
def test_a_port_that_is_taken_is_named(processes):
    with contextlib.closing(socket.create_server(("", processes.port))):
        _, err = ended(processes.start(0), 2)
    assert f"port {processes.port} is not free here" in err


@network
def test_under_slurm_nothing_but_auto_is_needed(processes, tmp_path, trained):
    def slurm(number):
        facts = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": number}
        found = {f"SLURM_{k}": str(v) for k, v in {**facts, "LOCALID": number}.items()}
        return {**found, "JAX_COORDINATOR_PORT": str(processes.port)}

    auto = ("--coordinator", "auto")
    for process in [processes.start(n, env=slurm(n), place=auto) for n in (1, 0)]:
        ended(process, 0)
    assert sha(tmp_path / "host-0" / "run") == sha(trained / "runs" / "tiny")


@pytest.mark.parametrize(
    "args, words",
    [
        (("--processes", 2), "--processes = 2: expected --coordinator beside it"),
        (("--process", 0), "--process = 0: expected --coordinator beside it"),
        (("--coordinator", "auto"), "SLURM_JOB_ID is not set"),
        (("--coordinator", "auto", "--processes", 2), "none beside --coordinator auto"),
        (("--coordinator", "here"), "--coordinator = 'here': expected HOST:PORT"),
        (("--coordinator", "here:0"), "--coordinator = 'here:0': expected HOST:PORT"),
        (("--coordinator", "here:1"), "--processes = None: expected how many there are"),
        (("--coordinator", "here:1", "--processes", 2), "--process = None: expected a number"),
        (
            ("--coordinator", "here:1", "--processes", 2, "--process", 2),
            "--process = 2: expected a number from 0 to 1",
        ),
        (("--coordinator", "here:1", "--patience", 0), "--patience = 0: expected at least one"),
    ],
)
def test_a_place_that_cannot_be(run_cli, tiny_recipe, tmp_path, monkeypatch, args, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = run_cli("train", tiny_recipe, *args)
    assert result.code == 2 and words in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()
