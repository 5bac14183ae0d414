"""Recipes with secure sums and robust rules: what they train, and what is refused."""

import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.engine.robust import RobustEngine
from fedlm.engine.secure import SecureEngine
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.settings import load

SECURE = ("wire.secure_nodes=4", "wire.upload=secure-24-clip1-members8", "client.weight=uniform")
FEDADAMW = ("client.method=fedadamw", "client.optimizer=adamw")
TRANSFORMER = ("model.name=transformer", "model.layers=1", "model.heads=2")
PLAIN = ("server.optimizer=fedavg", "server.learning_rate=1")
BOTH = (*TRANSFORMER, *PLAIN, "wire.trainable=lora-both", "wire.rank=2")
PLAN = (
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=0.5",
    "privacy.clip_norm=0.5",
    "server.sampling=poisson",
)


@pytest.fixture
def made(tiny_recipe, tmp_path):
    return lambda *changes: build(
        load(tiny_recipe, changes), tmp_path / "stores", lambda stage, done: None
    )


def after(run, rounds=2):
    state = run.round.init(run.start())
    for played in run.round.play(state, range(rounds)):
        state = played.state
    return state.params, played.metrics


def test_a_secure_run_trains_what_a_plain_run_trains_up_to_rounding(made):
    run = made(*SECURE)
    assert isinstance(run.engine, SecureEngine)
    params, metrics = after(run)
    plain, wanted = after(made("client.weight=uniform"))
    away = tree.norm(tree.sub(params, plain)) / tree.norm(tree.sub(plain, run.start()))
    assert 0 < float(away) < 0.01
    for name in ("members", "tokens", "steps", "refused"):
        assert metrics[name] == wanted[name]
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


@pytest.mark.slow
def test_more_nodes_and_fewer_neighbors_train_the_same_bits(made):
    one, _ = after(made(*SECURE), 1)
    for changes in ((), ("wire.secure_threshold=6", "wire.secure_neighbors=2")):
        run = made(*SECURE, "wire.secure_nodes=7", *changes)
        assert run.engine.sums.nodes.neighbors == (2 if changes else 0)
        assert tree.sha256(after(run, 1)[0]) == tree.sha256(one)


@pytest.mark.slow
def test_a_secure_run_under_a_plan_clips_rounded_updates(made):
    # Poisson cohorts differ in size: leave room.
    run = made(*SECURE, *PLAN, "wire.upload=secure-26-clip0.5-members20")
    params, _ = after(run, 1)
    assert np.isfinite(float(tree.norm(params)))


@pytest.mark.slow
def test_robust_rules_are_engines_around_the_usual_one(made):
    run = made("server.aggregate=median", "server.update_norm=0.1")
    assert isinstance(run.engine, RobustEngine)
    params, metrics = after(run, 1)
    assert np.isfinite(float(tree.norm(params))) and metrics["members"] == 4


@pytest.mark.parametrize(
    "changes, said",
    [
        ((*SECURE, "wire.upload=uniform-8"), "wire.upload = 'uniform-8': expected a codec of int"),
        ((*SECURE, "wire.upload=secure-24+zlib"), "without '.zlib'"),
        ((*SECURE, "wire.secure_nodes=2"), "wire.secure_nodes = 2: expected 0 or at least 3"),
        ((*SECURE, "wire.secure_threshold=2"), "wire.secure_threshold = 2: expected 3 to 4"),
        (("wire.secure_threshold=2",), "0 without wire.secure_nodes"),
        (("wire.secure_rotation=true",), "False without wire.secure_nodes"),
        (("wire.secure_neighbors=2",), "0 without wire.secure_nodes"),
        (
            (*SECURE, "wire.secure_nodes=9", "wire.secure_neighbors=2"),
            "wire.secure_neighbors = 2: expected 0 .all others., or an even number from 4 to 8",
        ),
        (
            (*SECURE, "wire.secure_nodes=9", "wire.secure_neighbors=5"),
            "wire.secure_neighbors = 5: expected 0 .all others., or an even number",
        ),
        ((*SECURE, "client.weight=examples"), "'uniform' with wire.secure_nodes"),
        ((*SECURE, "wire.upload=secure-24-clip1-members3"), "server.cohort = 4: expected at most"),
        ((*SECURE, "wire.upload=secure-3-clip1-members8"), "could overflow"),
        ((*SECURE, "wire.error_feedback=true"), "wire.error_feedback"),
        ((*SECURE, "server.aggregate=median"), "secure sums hide the updates it looks at"),
        ((*SECURE, "server.update_norm=1.0"), "secure sums hide the updates it looks at"),
        ((*SECURE, "server.mode=buffered"), "wire.secure_nodes"),
        ((*SECURE, "wire.trainable=member", "wire.trainable_fraction=0.5"), "train alike"),
        ((*PLAN, "server.aggregate=median"), "whose claim is about sums"),
        ((*PLAN, "server.update_norm=1.0"), "whose claim is about sums"),
        ((*SECURE, *PLAN, "privacy.clip_norm=2.0"), "privacy.clip_norm = 2.0: expected at most 1"),
        (
            (*SECURE, *PLAN, "wire.upload=secure-24-clip1-members7"),
            "room for [0-9]+ members",
        ),
        (("server.update_norm=1.0", *FEDADAMW), "client.method = 'fedadamw': expected 'fedavg' or"),
        (("server.aggregate=median", "client.method=scaffold"), "statistics and counts beside"),
        ((*SECURE, *FEDADAMW), "client.method = 'fedadamw': expected 'fedavg' or 'feddyn'"),
        (("server.mode=buffered", *FEDADAMW), "the discount of a late answer"),
        (("server.aggregate=median", *BOTH), "whose updates are added as they are sent"),
        ((*SECURE, *BOTH), "whose updates are added as they are sent"),
        (("server.trim=0.2",), "server.trim = 0.2"),
        (("server.aggregate=meen",), "server.aggregate"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_in_one_sentence(made, changes, said):
    with pytest.raises(ConfigError, match=said):
        made(*changes)


def test_over_a_network_secure_rounds_must_be_saved_and_robust_rules_need_no_memory(made):
    run = made()
    for change, why in (
        (SECURE, r"run.checkpoint_every = 2: expected 1 with secure sums over a network"),
        (
            ("server.aggregate=median", "client.method=feddyn", "client.proximal=0.1"),
            "server.aggregate = 'median': expected nothing over a network where members remember",
        ),
    ):
        recipe = made(*change).recipe
        with pytest.raises(ConfigError, match=why):
            flat_run(
                recipe,
                run.store,
                out=run.store.path,
                members=run.population,
                engine=lambda algorithm: run.engine,
            )
