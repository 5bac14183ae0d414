"""Adapters over a network: every node has the frozen model itself, and it must be the same."""

import pytest

from fedlm.core.errors import ConfigError, EngineError, WireError
from fedlm.corpus.store import Store
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, Refusal
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.parts import base_sha256, resolve
from fedlm.recipe.settings import load
from fedlm.training import train
from tests.conftest import write_tiny
from tests.deploy.local import LocalTransport, workers
from tests.engine.test_remote import apart, deployed, round_of
from tests.laws.test_adapter_runs import LORA

WHOLE = ("model.name=llama", "model.layers=2", "model.heads=2", "model.embedding_size=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, its store, and two models that were trained elsewhere."""
    path = tmp_path_factory.mktemp("adapters")
    recipe = write_tiny(path)
    more = ("server.rounds=1", "run.baselines=false", "run.prompts=[]")
    for number, name in enumerate(("one", "other")):
        made = load(recipe, (*WHOLE, *more, f"run.seed={number}"))
        train(build(made, path / "stores", out=path / name))
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """The run of adapters, simulated."""
    store = Store(next((folder / "stores").iterdir()))
    more = (*LORA, f"model.init_from={folder / 'one'}", "run.engine=loop")
    recipe = load(folder / "tiny.toml", more)
    return flat_run(resolve(recipe, store), store, out=folder / "run")


def nodes(whole, folder, base):
    made, assignments, _ = workers(whole.store, folder)
    given = {n: Worker(w.store, Policy(), base=base) for n, w in made.items()}
    kept = [a._replace(text=given[a.name].text) for a in assignments]
    return given, tuple(kept)


@pytest.mark.slow
def test_nodes_with_the_same_base_train_as_in_simulation(whole, folder, tmp_path):
    made, assignments = nodes(whole, tmp_path / "dealt", folder / "one")
    over = deployed(whole, LocalTransport(made), assignments)
    state = whole.round.init(whole.start())
    found, wanted = (round_of(run, state) for run in (over, whole))
    assert apart(found.delta, wanted.delta) < 1e-5 and float(found.weight) == float(wanted.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "words"),
    [("other", "the model of this node is"), (None, "this node has no model to train adapters on")],
)
def test_a_node_with_another_base_or_none_refuses_by_name(whole, folder, tmp_path, base, words):
    made, assignments = nodes(whole, tmp_path / "dealt", base and folder / base)
    said = []
    over = deployed(whole, LocalTransport(made), assignments, on_stats=said.append)
    with pytest.raises(EngineError):
        round_of(over, whole.round.init(whole.start()))
    refused = {k: v for tally in said for k, v in tally.refused.items()}
    assert refused and all(words in v and "model.base_sha256" in v for v in refused.values())
    assert str(folder) not in str(refused), "files of a node are nobody's business"


@pytest.mark.slow
def test_a_server_cannot_name_files_of_a_node(whole):
    worker = Worker(whole.store, Policy())
    with pytest.raises(WireError, match="names a file of this node"):
        worker._on_own_base(whole.recipe)
    plain = whole.recipe.model.model_copy(update={"init_from": None, "base_sha256": "a" * 64})
    with pytest.raises(Refusal, match="no model to train adapters on"):
        worker._on_own_base(whole.recipe.model_copy(update={"model": plain}))


@pytest.mark.slow
def test_a_recipe_may_pin_its_base(whole, folder):
    digest = base_sha256(whole.algorithm)
    for value, fits in ((digest, True), ("0" * 64, False)):
        model = whole.recipe.model.model_copy(update={"base_sha256": value})
        recipe = whole.recipe.model_copy(update={"model": model})
        if fits:
            flat_run(recipe, whole.store, out=folder / "pinned")
        else:
            with pytest.raises(ConfigError, match=r"model\.base_sha256 = '0000"):
                flat_run(recipe, whole.store, out=folder / "pinned")
