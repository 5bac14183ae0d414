"""Every parser meets a few damaged inputs whenever the tests run; `make fuzz` makes many."""

import random
from pathlib import Path

import pytest

from fedlm.core.errors import RecordError
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.privacy.account import plan_from
from fuzz.run import mutated
from fuzz.targets import TARGETS

NASTY = [b"", b"\0", b"\xff\xfe", b"[" * 50_000, b"{" * 50_000, b'{"a":' * 9_000, b"9" * 400]
NASTY += [b"9" * 5_000, b"x = " + b"9" * 400, b"x = " + b"9" * 5_000, b"x = " + b"[" * 3_000]
NASTY += [b"null", b"[]", b"{}", b"[[a]]\n", b"[server]\nrounds = " + b"9" * 400, b'{"kind": []}']
SEVERAL = 10  # mutations in a default run


# Codecs compile, and have tests of their own.
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n == "frames" else n for n in TARGETS]


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted_and_nothing_else_is_unhandled(name):
    target, rng = TARGETS[name](), random.Random(name)
    accepted = [target.try_one(seed) for seed in target.seeds]
    assert any(accepted) or name == "federation-file"
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
