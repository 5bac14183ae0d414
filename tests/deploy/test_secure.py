"""Secure sums by messages between a server and nodes: the same sum, whoever leaves or is killed."""

import pytest

from fedlm.core import tree
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from tests.conftest import write_tiny
from tests.deploy.secure import NAMES, SETTINGS, federation, played


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_tiny(folder), build(
        load(folder / "tiny.toml", SETTINGS), folder / "stores", lambda stage, done: None
    )


@pytest.fixture
def made(text, tmp_path):
    recipe, run = text
    return lambda *changes, **more: federation(run.store, recipe, tmp_path, *changes, **more)


def test_nodes_train_over_messages_what_the_simulation_trains(made, text):
    fed, stats = made(), []
    state, metrics = played(fed.run(fed.transport(), stats=stats), 2)
    simulated, wanted = played(text[1], 2)
    away = tree.norm(tree.sub(state.params, simulated.params))
    moved = tree.norm(tree.sub(simulated.params, text[1].start()))
    assert float(away / moved) < 1e-3
    for name in ("members", "tokens", "steps", "refused"):
        assert [m[name] for m in metrics] == [m[name] for m in wanted]
    assert stats[0].answered == list(NAMES) and not stats[0].lost
