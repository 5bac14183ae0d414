"""Every parser meets a few damaged inputs whenever the tests run; `make fuzz` makes many."""

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fedlm.core.errors import RecordError
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.replies import Answers, Replies
from fedlm.engine.buffered import outcome_of
from fedlm.engine.messages import SUMS, TrainReply
from fedlm.models.interop.gguf import check_bounds
from fedlm.privacy.account import plan_from
from fuzz.run import mutated
from fuzz.targets import TARGETS, _gguf_file

NASTY = [b"", b"\0", b"\xff\xfe", b"[" * 50_000, b"{" * 50_000, b'{"a":' * 9_000, b"9" * 400]
NASTY += [b"9" * 5_000, b"x = " + b"9" * 400, b"x = " + b"9" * 5_000, b"x = " + b"[" * 3_000]
NASTY += [b"null", b"[]", b"{}", b"[[a]]\n", b"[server]\nrounds = " + b"9" * 400, b'{"kind": []}']
SEVERAL = 10  # mutations in a default run


# Codecs compile, and have tests of their own.
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n == "frames" else n for n in TARGETS]


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted_and_nothing_else_is_unhandled(name):
    try:
        target, rng = TARGETS[name](), random.Random(name)
    except ModuleNotFoundError as error:
        assert error.name in ("flwr", "gguf", "h5py")
        pytest.skip(f"{error.name} is not installed")
    accepted = [target.try_one(seed) for seed in target.seeds]
    assert any(accepted)
    for data in [*NASTY, *(mutated(rng, target.seeds) for _ in range(SEVERAL))]:
        target.try_one(data)


def test_an_unexpected_exception_is_not_swallowed():
    target = TARGETS["seats"]()
    broken = type(target)(lambda data: {}["missing"], target.seeds)
    with pytest.raises(KeyError):
        broken.try_one(b"")


@pytest.mark.parametrize("sampling", [1.5, None, [], {"law": "poisson", "cohort": 10**400}])
def test_a_plan_of_any_shape_is_refused(sampling):
    """Found by `make fuzz` in the ledger of a node."""
    with pytest.raises(RecordError, match="privacy plan is damaged"):
        plan_from({"mechanism": "gaussian", "sampling": sampling})
    with pytest.raises(RecordError, match="privacy plan is damaged"):
        plan_from({"sampling": {}, "clip_norm": 10**400})


@pytest.mark.parametrize(
    "at, value, said",
    [
        (b"tokenizer.ggml.token_type", struct.pack("<IIQ", 9, 5, 1 << 60), "beyond its end"),
        (b"tokenizer.ggml.merges", struct.pack("<IIQ", 9, 8, 1 << 60), "beyond its end"),
        (b"general.architecture", struct.pack("<IQ", 8, 1 << 62), "beyond its end"),
        (b"token_embd.weight", struct.pack("<IQQ", 2, 1 << 40, 8), "larger than the file"),
        (b"token_embd.weight", struct.pack("<I", 1 << 30), "dimensions"),
    ],
)
def test_a_gguf_file_that_promises_more_than_it_holds_is_refused(tmp_path, at, value, said):
    """The library would follow such a count for ever, taking memory as it goes."""
    raw = _gguf_file()
    where = raw.index(at) + len(at)
    (tmp_path / "m.gguf").write_bytes(raw)
    check_bounds(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(raw[:where] + value + raw[where + len(value) :])
    with pytest.raises((ValueError, struct.error), match=said):
        check_bounds(tmp_path / "m.gguf")


def test_damaged_answers_of_nodes_on_disk_are_refused(tmp_path):
    kept = Replies(tmp_path / "round")
    sums = (dict.fromkeys(SUMS, 1.0),)
    kept.write("north", TrainReply(round=3, members=(11,), frames=(b"one",), sums=sums))
    whole = (tmp_path / "round" / "north.json").read_text()
    for damaged in ("null", "[]", "{}", whole.replace('"frames": 1', '"frames": 9')):
        (tmp_path / "round" / "north.json").write_text(damaged)
        with pytest.raises(RecordError, match="north"):
            kept.read("north", TrainReply)
    answers = Answers(tmp_path, rounds_kept=3)
    (tmp_path / "taken-00000003.json").write_text("null")
    with pytest.raises(RecordError, match=r"taken-00000003\.json is damaged"):
        answers.taken(3)
    with pytest.raises(RecordError, match="answers that a round took is damaged"):
        outcome_of({"landed": 3}, set())


def test_a_refused_ledger_of_a_node_is_let_go(tmp_path):
    """Found by `make fuzz`: every refusal kept a file open, and the lock with it."""
    (tmp_path / "ledger.jsonl").write_text('{"kind": "odd"}\n')
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(RecordError):
            NodeLedger(tmp_path / "ledger.jsonl")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


# In a process of its own, because the runner forks: this one has the threads of JAX.
RUNNER = """
import json, os, sys, time
from argparse import Namespace
from pathlib import Path
from fuzz import run

run.GUIDED = False


class Target:
    seeds = [b"x"]

    def __init__(self, read):
        self.try_one = read


def asked(folder, inputs):
    out = Path(sys.argv[1]) / folder
    return Namespace(inputs=inputs, seconds=1, seed=0, out=out, again=False)


shares = {"quick": lambda data: None, "slow": lambda data: time.sleep(0.3)}
bad = {
    "error": lambda data: {}["missing"],
    "signal": lambda data: os.kill(os.getpid(), 11),
    "memory": lambda data: bytearray(1 << 40),
}
sys.stdout, told = sys.stderr, sys.stdout
found = []
for folder, reads, inputs in (("a", shares, 200), ("a", shares, 200), ("b", bad, 30)):
    makers = {name: lambda read=read: Target(read) for name, read in reads.items()}
    results = run.run_all(makers, asked(folder, inputs))
    written = {str(p): p.stat().st_mtime_ns for p in (Path(sys.argv[1]) / "a").rglob("*.json")}
    found.append([{n: vars(r) for n, r in results.items()}, run.table(results), written])
print(json.dumps(found), file=told)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    command = [sys.executable, "-c", RUNNER, str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_shares_go_to_those_that_are_fast_and_finished_targets_are_not_run_again(ran):
    _, ((results, _, written), (again, _, written_again), _) = ran
    assert results["slow"]["inputs"] < 100 and sum(r["inputs"] for r in results.values()) >= 200
    assert again == results and written_again == written and len(written) == 2


def test_what_nobody_handles_is_told_and_kept(ran):
    folder, (_, _, (results, table, _)) = ran
    for name, said in (("error", "KeyError"), ("signal", "exit -11"), ("memory", "MemoryError")):
        assert said in results[name]["unhandled"] and said in table
        assert (folder / "b" / "found" / name / "log.txt").is_file()
