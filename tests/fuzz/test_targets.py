"""Every parser meets a few damaged inputs whenever the tests run; `make fuzz` makes many."""

import os
import random
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest

from fedlm.core.errors import RecordError
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.privacy.account import plan_from
from fuzz import run
from fuzz.run import mutated
from fuzz.targets import TARGETS, Target

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


def test_a_refused_ledger_of_a_node_is_let_go(tmp_path):
    """Found by `make fuzz`: every refusal kept a file open, and the lock with it."""
    (tmp_path / "ledger.jsonl").write_text('{"kind": "odd"}\n')
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(RecordError):
            NodeLedger(tmp_path / "ledger.jsonl")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_shares_go_to_those_that_are_fast_and_finished_targets_are_not_run_again(tmp_path, capsys):
    """Every target has its share, a slow one what its time allows; the rest goes to the others."""
    quick = Target(lambda data: None, [b"x"])
    slow = Target(lambda data: time.sleep(0.3), [b"x"])
    targets = {"quick": lambda: quick, "slow": lambda: slow}
    asked = Namespace(inputs=200, seconds=1, seed=0, out=tmp_path, again=False)
    with mock.patch.object(run, "GUIDED", False):
        found = run.run_all(targets, asked)
        assert found["slow"].inputs < 100 and sum(r.inputs for r in found.values()) >= 200
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/*")}
        assert run.run_all(targets, asked) == found and len(before) == 2
        assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("results/*")} == before
    capsys.readouterr()


@pytest.mark.parametrize(
    "read, said",
    [
        (lambda data: {}["missing"], "KeyError"),
        (lambda data: os.kill(os.getpid(), 11), "exit -11"),
        (lambda data: bytearray(1 << 40), "MemoryError"),
    ],
)
def test_what_nobody_handles_is_told_and_kept(tmp_path, read, said, capsys):
    asked = Namespace(inputs=10, seconds=1, seed=0, out=tmp_path, again=False)
    with mock.patch.object(run, "GUIDED", False):
        (found,) = run.run_all({"x": lambda: Target(read, [b"x"])}, asked).values()
    assert said in found.unhandled and (tmp_path / "found" / "x" / "log.txt").is_file()
    assert said in run.table({"x": found})
    capsys.readouterr()
