"""Adapters over a network: every node has the frozen model itself, and it must be the same."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core.errors import ConfigError, EngineError, WireError
from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.deploy.delivery import deliver
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, Refusal
from fedlm.deploy.registration import assign_members
from fedlm.deploy.server_app import server_store
from fedlm.engine.counters import Counters
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.parts import base_sha256, resolve
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.training import train
from tests.conftest import write_tiny
from tests.deploy.local import LocalTransport, workers
from tests.deploy.test_evaluation import relayed
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
    refused = {k: v for stats in said for k, v in stats.refused.items()}
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


@pytest.mark.slow
@pytest.mark.parametrize("through", ["directly", "a relay"])
def test_nodes_score_adapters_on_their_base_and_get_them_alone(folder, tmp_path, through):
    """The server has no text: nodes score B on the base that they have, and keep B."""
    store = Store(next((folder / "stores").iterdir()))
    more = (*LORA, f"model.init_from={folder / 'one'}", "run.engine=loop", "server.rounds=1")
    alone = flat_run(resolve(load(folder / "tiny.toml", more), store), store, out=tmp_path / "here")
    parts = deal(store, ("north", "south"), tmp_path / "dealt", held=None)
    nodes = {
        name: Worker(parts[name], Policy(), base=folder / "one", name=name, models=tmp_path / name)
        for name in ("north", "south")
    }
    transport = LocalTransport(nodes if through == "directly" else relayed(tmp_path, nodes))
    nodes_there = sorted(transport.nodes)
    assignments = assign_members(transport, nodes_there, lambda n, h: None, lambda text: None)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        made = special_tokens_map(store.tokenizer) if name[0] == "s" else None
        (tmp_path / name).write_bytes(made or (store.path / name).read_bytes())
    text = (folder / "tiny.toml").read_text().replace("vocabulary = 60\n", "")
    text = text.replace('source = "tiny.jsonl"', f'tokenizer = "{tmp_path / "tokenizer.json"}"')
    (tmp_path / "server.toml").write_text(text)
    recipe = load(tmp_path / "server.toml", more)
    held = server_store(recipe, tmp_path / "cache")
    out = tmp_path / "run"
    out.mkdir()
    run_id = "ab" * 16
    over = networked_run(
        resolve(recipe, held), held, assignments, out, transport=transport, run_id=run_id
    )
    state = alone.round.init(alone.start())
    wanted = alone.evaluation.watch(state)["perplexity"]
    assert over.evaluation.watch(state)["perplexity"] == pytest.approx(wanted, rel=1e-6)
    (out / "held_out.json").unlink()  # or the folder is not free
    train(over)
    train(alone)
    asked = {"run_id": run_id, "counters": Counters(), "deadline": 60.0}
    before = "" if through == "directly" else "relay/"
    names = [f"{before}north", f"{before}south"]
    assert deliver(over, assignments, transport, **asked) == names
    here, there = (load_file(adapter_beside(run.record.weights)) for run in (alone, over))
    sent = sum(x.nbytes for name, x in here.items() if name.endswith("lora_b"))
    frames = [sum(map(len, payload.frames)) for _, payload in transport.sent.values()]
    assert (
        sent < max(frames) < 2 * sent + 600 < (folder / "one" / "model.safetensors").stat().st_size
    )
    for name in here:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-5, atol=1e-7)
        for node in nodes:
            kept = load_file(adapter_beside(RunDirectory(tmp_path / node / run_id[:8]).weights))
            np.testing.assert_array_equal(kept[name], there[name])
