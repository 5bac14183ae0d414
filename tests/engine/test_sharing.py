"""Runs of one process share compiled programs if, and only if, they compute the same."""

import gc
import weakref

import pytest

from fedlm.core import tree
from fedlm.core.by_value import by_value
from fedlm.core.types import Start
from fedlm.engine.mesh import MeshEngine
from fedlm.methods import optimizers
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from tests.conftest import write_tiny
from tests.engine.test_laws import MEMBERS, SHAPE, rows_of
from tests.engine.test_traffic import on_a_base

# Each changes what a member computes.
OTHERS = """
client.optimizer=adam
client.optimizer=momentum
client.gradient_clip_norm=0.5
client.proximal=0.1
client.weight=tokens
client.method=scaffold
wire.upload=uniform-8
wire.upload=uniform-4
wire.download=bfloat16
wire.error_feedback=true
wire.trainable=low-rank
privacy.mechanism=gaussian privacy.noise_multiplier=1 privacy.clip_norm=0.5 privacy.delta=1e-2
"""
# Each changes what the server computes, and nothing that a member does.
OF_THE_SERVER = """
server.learning_rate=0.5
server.optimizer=fedyogi
server.schedule=cosine
server.warmup_rounds=2
"""
NOISE = "privacy.mechanism=gaussian privacy.clip_norm=0.5 privacy.delta=1e-2"
# These change numbers that programs take as arguments, or nothing that is compiled.
SAME = ["run.seed=3", "server.rounds=3", "server.cohort=3", "client.epochs=2"]
SAME += ["client.learning_rate=0.25", "client.schedule=cosine client.warmup_rounds=2"]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    path = write_tiny(folder)

    def make(changes=""):
        changes = ["run.prompts=[]", f"data.source={folder}/tiny.jsonl", *changes.split()]
        if any("privacy" in change for change in changes):
            changes.append("server.sampling=poisson")
        return build(load(path, tuple(changes)), folder / "stores", out=folder / "run")

    return make


def test_equal_recipes_and_other_seeds_share_their_programs(run_of):
    first = run_of()
    for changes in ("", *SAME):
        again = run_of(changes)
        assert again.engine._programs is first.engine._programs, changes
        assert again.algorithm.server_half(0) == first.algorithm.server_half(0), changes


def test_no_two_settings_that_compute_something_else_share_any(run_of):
    made = [run_of(changes) for changes in ("", *OTHERS.split("\n")[1:-1])]
    assert len({id(run.engine._programs) for run in made}) == len(made)


def test_what_members_do_leaves_the_program_of_the_server_as_it_is(run_of):
    """But for the part that they train, and a plan: both say what is done with a sum."""
    made = {changes: run_of(changes) for changes in ("", *OTHERS.split("\n")[1:-1])}
    apart = [c for c in made if "low-rank" in c or "privacy" in c or "scaffold" in c]
    halves = {changes: run.algorithm.server_half(0) for changes, run in made.items()}
    assert len({halves[changes] for changes in apart}) == len(apart) == 3
    assert {halves[changes] for changes in made if changes not in apart} == {halves[""]}


def test_what_the_server_does_leaves_the_programs_of_members_as_they_are(run_of):
    noisy = [f"{NOISE} privacy.noise_multiplier={noise}" for noise in (1, 2)]
    for changes in (["", *OF_THE_SERVER.split("\n")[1:-1]], noisy):
        made = [run_of(each) for each in changes]
        assert len({run.algorithm.server_half(0) for run in made}) == len(made), "server's own"
        assert len({id(run.engine._programs) for run in made}) == 1


def test_shared_programs_give_the_same_bits_without_a_trace(run_of):
    params = run_of().start()
    totals = []
    for _ in range(2):
        engine = run_of().engine
        totals.append(engine.total(Start(params), engine.prepare(0, MEMBERS[:4])).total)
    assert engine.traces == 0
    assert tree.sha256(totals[0]) == tree.sha256(totals[1])


def test_what_replaces_an_entry_of_a_registry_is_not_taken_for_it(monkeypatch):
    def made():
        return optimizers.client_optimizer("sgd", 0.5)

    assert made() is made()
    other = optimizers.client_optimizer("adam", 0.5)
    monkeypatch.setitem(optimizers.CLIENT_OPTIMIZERS, "sgd", lambda *settings: other)
    assert made() is other


def test_numbers_that_are_equal_and_of_other_types_are_kept_apart():
    make = by_value(lambda x: [x])
    assert make(1) is make(1) and make(1) is not make(1.0) and make(1) is not make(True)


def test_programs_keep_no_frozen_model_in_memory():
    chosen = on_a_base()
    engine = MeshEngine(chosen, rows_of, SHAPE, 7)
    held = weakref.ref(engine._base)
    programs = engine._programs
    del engine, chosen
    gc.collect()
    assert held() is None and programs is not None
