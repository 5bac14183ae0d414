"""Whatever a message says, a node answers with a sentence and lives."""

import threading
import time

import pytest

from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import node_worker
from fedlm.deploy.limits import within
from fedlm.deploy.local import redacted
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, Refusal
from fedlm.engine.messages import REFUSAL, TrainRequest, encode_request
from fedlm.recipe.settings import load
from tests.deploy.local import prepared, store_in

ADMITTED = "frame"  # the parameters of these questions are none: who gets to them has passed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = prepared(tmp_path_factory.mktemp("survival"))
    deal(store_in(path), ("north", "south"), path / "dealt")
    return path


@pytest.fixture
def node(folder):
    return lambda policy=None: Worker(Store(folder / "dealt" / "north"), policy or Policy())


def asked(worker, recipe, **changes):
    facts = {
        "run": "a" * 32,
        "recipe": recipe,
        "round": 0,
        "first": 0,
        "population": 18,
        "text": worker.text,
        "members": (0, 1),
        "clip_norm": float("inf"),
        "each": False,
        "longest": 1 << 20,
        "frames": (b"no parameters",),
    }
    return TrainRequest(**{**facts, **changes})


def said(worker, recipe, **changes):
    """Return why a node does not answer."""
    reply = worker(encode_request(asked(worker, recipe, **changes)))
    assert reply.kind == REFUSAL
    return reply.facts["reason"]


@pytest.fixture
def decent(folder):
    return redacted(load(folder / "tiny.toml"))


HUGE = "9" * 400
KILLERS = {
    "nested brackets": ("cohort = 4", f"cohort = {'[' * 20_000}{']' * 20_000}"),
    "nested tables": ("cohort = 4", f"cohort = {'{a=' * 10_000}1{'}' * 10_000}"),
    "400 digits for a float": ("learning_rate = 0.01", f"learning_rate = {HUGE}"),
    "400 digits": ("cohort = 4", f"cohort = {HUGE}"),
    "5000 digits": ("cohort = 4", f"cohort = {'9' * 5000}"),
    "20000 hexadecimal digits": ("cohort = 4", f"cohort = 0x{'f' * 20_000}"),
    "400 digits in a tree": ("[wire]", f"[federation]\nlearning_rate = {HUGE}\n[wire]"),
    "a batch of 10^9": ("batch_size = 4", "batch_size = 1000000000"),
    "a batch of 10^6": ("batch_size = 4", "batch_size = 1000000"),
    "10^9 epochs": ("epochs = 1", "epochs = 1000000000"),
    "10^6 epochs": ("epochs = 1", "epochs = 1000000"),
    "10^6 epochs and one step": ("epochs = 1", "epochs = 1000000\nmax_steps = 1"),
    "an embedding of 10^8": ("embedding_size = 8", "embedding_size = 100000000"),
    "layers of 10^6": (
        "embedding_size = 8",
        "embedding_size = 1000000",
        "hidden_size = 12",
        "hidden_size = 1000000",
    ),
    "rows of 65536 in a large batch": (
        "sequence_length = 8",
        "sequence_length = 65536",
        "batch_size = 4",
        "batch_size = 65536",
    ),
}


@pytest.mark.parametrize("name", KILLERS)
def test_a_question_that_killed_a_node_is_refused(name, node, decent, monkeypatch):
    worker, recipe, made = node(), decent, []
    for kind in ("members_work", "leaf_work"):
        make = getattr(node_worker, kind)
        monkeypatch.setattr(
            node_worker,
            kind,
            lambda *args, make=make, **more: made.append(1) or make(*args, **more),
        )
    change = KILLERS[name]
    for old, new in zip(change[::2], change[1::2], strict=True):
        assert old in recipe
        recipe = recipe.replace(old, new, 1)
    assert ADMITTED not in said(worker, recipe)
    assert not made, "it is refused before anything of that size is made"
    assert ADMITTED in said(worker, decent), "the node lives and answers the next question"
    assert made


def test_blt_over_a_million_rounds_is_refused(node, folder):
    blt = (
        "server.rounds=1000000",
        "server.cohort=2",
        "server.sampling=spaced",
        "privacy.mechanism=blt",
        "privacy.noise_multiplier=4",
        "privacy.clip_norm=0.1",
        "privacy.min_separation=1",
    )
    worker = node()
    assert "server.rounds" in said(worker, redacted(load(folder / "tiny.toml", blt)), clip_norm=0.1)


def test_an_error_that_nobody_foresaw_is_a_refusal(node, decent, monkeypatch):
    worker = node()

    def broken(request):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_work", broken)
        reason = said(worker, decent)
    assert "MemoryError" in reason
    assert ADMITTED in said(worker, decent)
    assert len(worker.ledger.refusals) == 1 and worker.ledger.runs


# ---- lines of a policy ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, why",
    [
        (Policy(largest_steps=1), "steps"),
        (Policy(largest_memory=1e-5), "memory"),
        (Policy(largest_parameters=10), "parameters"),
    ],
)
def test_a_policy_limits_what_a_question_costs(node, decent, policy, why):
    assert why in said(node(policy), decent)


def test_a_question_that_takes_too_long_is_given_up(node, decent, monkeypatch):
    worker, ended = node(Policy(longest_seconds=0.3)), threading.Event()

    def slow(request):
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_work", slow)
        assert "0.3 seconds" in said(worker, decent)
    assert ended.wait(5), "the work was stopped, not only left alone"
    patient = node()
    assert ADMITTED in said(patient, decent)


def test_what_cannot_be_stopped_at_once_is_not_joined_by_more():
    goes_on, seen = threading.Event(), []

    def stuck():
        goes_on.wait(30)  # in a library: nothing reaches it there
        seen.append("waited for")

    with pytest.raises(Refusal, match="longer than"):
        within(0.1, stuck, grace=0.1)
    with pytest.raises(Refusal, match="still busy"):
        within(0.1, lambda: seen.append("joined"), grace=0.1)
    assert not seen, "neither was it waited for, nor joined"
    goes_on.set()
    for _ in range(100):
        try:
            assert within(1.0, lambda: 7) == 7
            return
        except Refusal:
            time.sleep(0.02)
    raise AssertionError("it stayed busy")


def test_an_error_within_a_limit_is_the_same_error():
    def wrong():
        raise KeyError("what")

    with pytest.raises(KeyError, match="what"):
        within(1.0, wrong)
