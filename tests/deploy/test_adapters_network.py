"""Adapters over TLS: nodes have the frozen model themselves, and B alone travels, in trees too."""

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedlm.core.errors import ConfigError
from fedlm.corpus.shard import deal, deal_parts
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.deploy import server_app, workspace
from fedlm.deploy.flower.supernode import SuperNode, serve
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.training import Watcher
from fedlm.training import train as simulate
from tests.conftest import call, write_tiny
from tests.models.interop.test_huggingface import write as write_folder
from tests.recipe.test_init_from import words

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NODES = ("north", "south")
ADAPTERS = (
    "wire.trainable=lora", "wire.rank=2", "wire.last_blocks=1", "client.learning_rate=2.0",
    "server.rounds=2", "server.cohort=6", "run.engine=loop", "run.baselines=false",
    "run.prompts=[]", "run.devices=1",
)  # fmt: skip
# A place per node, in the same order everywhere; groups of the tiny text are called as the nodes.
TREE = ", ".join(f'{{name = "{n}", parent = "world", groups = ["{n}"]}}' for n in NODES)
PLACES = (
    f'federation.node=[{{name = "world"}}, {TREE}]',
    "federation.personal_layers=*.lora_b",
)
B = ("blocks.1.attention.query.lora_b", "blocks.1.attention.value.lora_b")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, a text that all nodes cut with its tokenizer, and a server that is running."""
    folder = tmp_path_factory.mktemp("adapters")
    recipe, base = write_tiny(folder), folder / "base"
    text = recipe.read_text().replace("vocabulary = 60", "").split("[model]")
    recipe.write_text(text[0] + "[client]" + text[1].split("[client]")[1])
    write_folder(base)
    words().save(str(base / "tokenizer.json"))
    store = build(recipe_of(folder), folder / "text", out=folder / "none").store
    for name in ("tokenizer.json", "special_tokens_map.json"):
        made = special_tokens_map(store.tokenizer) if name[0] == "s" else None
        (folder / name).write_bytes(made or (store.path / name).read_bytes())
    deal(store, NODES, folder / "stores", held=None)
    of = {node: [n for n in range(len(store)) if node in store.groups(n)] for node in NODES}
    of = {node: np.array(numbers) for node, numbers in of.items()}
    deal_parts(store, of, folder / "places", held=None)
    port = free_port()
    fed = workspace.init(
        folder / "fed", "fed", ["127.0.0.1"], port, NODES, bind="127.0.0.1", quorum=0.5
    )
    with children() as started:
        started.append(Child(["federation", "serve", str(fed.path)], folder / "server.log"))
        wait_for_port(port, started[0])
        yield folder, fed


def recipe_of(folder, *changes, here=True):
    """The recipe with all text here, or with a tokenizer and no text, as a server has it."""
    given = (f"model.init_from={folder / 'base'}", "data.test_clients=0.5", "data.layout=windows")
    file = folder / "tiny.toml"
    if here:
        given = (*given, f"data.tokenizer={folder / 'base' / 'tokenizer.json'}")
    else:
        text = file.read_text().replace('source = "tiny.jsonl"', 'tokenizer = "tokenizer.json"')
        file = folder / "server.toml"
        file.write_text(text)
        given = tuple(change for change in given if "test_clients" not in change)
    return load(file, (*given, *ADAPTERS, *changes))


@contextmanager
def joined(folder, fed, bases, stores="stores"):
    """Both nodes at work with a base each, every one in a thread."""
    stop, threads, ledgers = threading.Event(), [], []
    for name in NODES:
        ledgers.append(NodeLedger(fed.kit(name).ledger))
        more = {"models": folder / name / "models", "name": name, "base": bases[name]}
        store = Store(folder / stores / name)
        worker = Worker(store, Policy(), ledger=ledgers[-1], **more)
        node = SuperNode(fed.kit(name))
        node.join(stop.is_set, patient=True)
        work = {"say": lambda text: None, "stop": stop.is_set}
        threads.append(threading.Thread(target=serve, args=(node, worker), kwargs=work))
        threads[-1].start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        for ledger in ledgers:
            ledger.close()


def over_tls(folder, fed, run, *changes):
    said = []
    done = server_app.train(
        fed,
        recipe_of(folder, *changes, here=False),
        folder / run,
        resume=False,
        watcher=Watcher(say=said.append),
        stores=folder / "cache",
    )
    return done, said


def test_only_b_travels_and_nodes_get_a_peft_folder(place):
    folder, fed = place
    base = folder / "base"
    with joined(folder, fed, dict.fromkeys(NODES, base)):
        networked, said = over_tls(folder, fed, "networked")
    assert any("nodes that have their models: north, south" in line for line in said), said
    simulated = simulate(build(recipe_of(folder), folder / "text", out=folder / "simulated"))
    here, there = (
        load_file(adapter_beside(RunDirectory(folder / run).weights))
        for run in ("networked", "simulated")
    )
    for name in here:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-5, atol=1e-7)
    assert all(np.any(here[name]) for name in B)
    # Scored by nodes on their own base, and in one place.
    for figure in ("start_perplexity", "perplexity"):
        assert networked[figure] == pytest.approx(simulated[figure], rel=1e-4)
    assert networked["perplexity"] < networked["start_perplexity"]
    sent = sum(here[name].nbytes for name in B)
    # A node sends one sum for all of its members: two nodes and six members, in two rounds.
    assert networked["upload_bytes"] * 3 == simulated["upload_bytes"] <= 12 * (sent + 300)
    weights = (base / "model.safetensors").stat().st_size
    assert networked["download_bytes"] <= 12 * (sent + 300) < weights
    run = (folder / "networked" / "run.id").read_text()[:8]
    for name in NODES:
        models = folder / name / "models" / run
        kept = load_file(adapter_beside(RunDirectory(models).weights))
        assert all(np.array_equal(kept[leaf], here[leaf]) for leaf in here)
        done = call(folder, "export", models, "--format", "peft", "--out", f"peft-{name}", "--json")
        assert done.code == 0, done.stderr
        told = json.loads((folder / f"peft-{name}" / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == str(base)
        own = call(folder, "evaluate", models, "--json")
        assert own.code == 0 and own.json["perplexity"] > 1, own.stderr


def test_a_node_with_another_base_is_named_and_left_out(place):
    folder, fed = place
    other = folder / "other"
    write_folder(other)
    words().save(str(other / "tokenizer.json"))
    arrays = load_file(other / "model.safetensors")
    arrays["model.norm.weight"] = arrays["model.norm.weight"] + 1e-3
    save_file(arrays, other / "model.safetensors", {"format": "pt"})
    with joined(folder, fed, {"north": folder / "base", "south": other}):
        done, said = over_tls(folder, fed, "one-other")
    refusal = [line for line in said if line.startswith("round 0: south: model.base_sha256 = ")]
    assert len(refusal) == 1 and "adapters of one model do not fit another" in refusal[0], said
    assert done["rounds"] == 2 and str(other) not in "".join(said)
    run = (folder / "one-other" / "run.id").read_text()[:8]
    assert (folder / "north" / "models" / run).is_dir()
    assert not (folder / "south" / "models" / run).exists()


# ---- a tree of places ------------------------------------------------------------------------


def adapters_of(folder, run, place=""):
    return load_file(adapter_beside(RunDirectory(folder / run).weights_of(place)))


def test_places_train_adapters_on_their_own_base(place):
    """Every place has adapters of its own, as in the simulation of the same tree."""
    folder, fed = place
    base = folder / "base"
    with joined(folder, fed, dict.fromkeys(NODES, base), "places"):
        networked, said = over_tls(folder, fed, "places-networked", *PLACES)
    assert any("nodes that have their models: north, south" in line for line in said), said
    whole = build(recipe_of(folder, *PLACES), folder / "text", out=folder / "places-simulated")
    simulated = simulate(whole)
    assert networked["params_sha256"] == simulated["params_sha256"]
    for figure in ("start_perplexity", "perplexity"):
        assert networked[figure] == pytest.approx(simulated[figure], rel=1e-4)
    assert networked["perplexity"] < networked["start_perplexity"]
    sent = sum(adapters_of(folder, "places-networked")[name].nbytes for name in B)
    # Two rounds: up one frame per place; down its backbone, its layers and a residual.
    assert 0 < networked["upload_bytes"] <= 8 * (sent + 400)
    assert networked["download_bytes"] <= 16 * (sent + 400)
    weights = (base / "model.safetensors").stat().st_size
    for file in (folder / "places-networked" / "checkpoints").glob("*.safetensors"):
        assert file.stat().st_size < weights, "a checkpoint holds no base"
    run = (folder / "places-networked" / "run.id").read_text()[:8]
    for name in NODES:
        there = adapters_of(folder, "places-simulated", name)
        models = folder / name / "models" / run
        kept = load_file(adapter_beside(RunDirectory(models / "nodes" / name).weights))
        assert all(np.array_equal(kept[leaf], there[leaf]) for leaf in there)
        for path, out in ((models, f"tree-{name}"), (models / "nodes" / name, f"place-{name}")):
            done = call(folder, "export", path, "--format", "peft", "--out", out, "--json")
            assert done.code == 0, done.stderr
            told = json.loads((folder / out / "adapter_config.json").read_text())
            assert told["base_model_name_or_path"] == str(base)
    north, south = (adapters_of(folder, "places-simulated", name) for name in NODES)
    assert any(not np.array_equal(north[name], south[name]) for name in B)


def test_a_place_with_no_base_is_named_before_the_first_round(place):
    folder, fed = place
    refused = r"because a node refused: south: model\.base_sha256 = .*fedlm node join --base"
    with (
        joined(folder, fed, {"north": folder / "base", "south": None}, "places"),
        pytest.raises(ConfigError, match=refused),
    ):
        over_tls(folder, fed, "places-one", *PLACES)
    assert not (folder / "places-one" / "model.safetensors").exists()
