"""Trees of places whose nodes train adapters on a model that each of them has: B alone travels."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedlm.core import tree
from fedlm.core.errors import ConfigError, EngineError
from fedlm.corpus.shard import deal_parts
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.deploy import registration
from fedlm.deploy.delivery import deliver
from fedlm.deploy.local import check_deployable
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.server_app import server_store
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Quorum
from fedlm.engine.evaluate_messages import EVALUATE_REQUEST
from fedlm.federation.tree_round import shown_models
from fedlm.recipe.build import build
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from fedlm.recipe.tree import tree_run
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.training import Watcher, train
from tests.conftest import call, write_tiny
from tests.deploy.local import LocalTransport
from tests.deploy.test_leaves_at_home import NOISE, SECRET, KnownSecret, own_models
from tests.deploy.test_places import SIDES, TOWNS, direct, nested, networked, place, rounds, same
from tests.models.interop.test_huggingface import write as write_folder
from tests.recipe.test_init_from import words

TREE = "\n[federation]\n" + place("world")
for side, towns in SIDES.items():
    TREE += place(side, "world") + "".join(place(f"the {t}", side, t) for t in towns)
ADAPTERS = (
    "wire.trainable=lora", "wire.rank=2", "client.learning_rate=2.0", "server.rounds=2",
    "run.engine=loop", "run.baselines=false", "run.prompts=[]",
    "data.layout=windows",
)  # fmt: skip
LAST = ("federation.personal_layers=last 0.5",)
OWN = ("federation.personal_layers=*.lora_b",)
COLD = ("federation.temperature=0",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base and another one, both with the same tokenizer; a text and its recipe."""
    path = tmp_path_factory.mktemp("on-base")
    recipe = write_tiny(path)
    text = recipe.read_text().replace("vocabulary = 60", "").split("[model]")
    recipe.write_text(text[0] + "[client]" + text[1].split("[client]")[1])
    for name in ("base", "other"):
        write_folder(path / name)
        words().save(str(path / name / "tokenizer.json"))
    arrays = load_file(path / "other" / "model.safetensors")
    arrays["model.norm.weight"] = arrays["model.norm.weight"] + 1e-3
    save_file(arrays, path / "other" / "model.safetensors", {"format": "pt"})
    build(recipe_of(path), path / "stores")
    return path


@pytest.fixture(scope="module")
def store(folder):
    whole = Store(next((folder / "stores").iterdir()))
    for name in ("tokenizer.json", "special_tokens_map.json"):
        made = special_tokens_map(whole.tokenizer) if name[0] == "s" else None
        (folder / name).write_bytes(made or (whole.path / name).read_bytes())
    return whole


@pytest.fixture(scope="module")
def parts(store, folder):
    """A store a town, and the server's with the held-out text."""
    clients = store.training_clients
    of = {t: np.array([n for n in clients if t in store.groups(int(n))]) for t in TOWNS}
    return deal_parts(store, of, folder / "dealt")


@pytest.fixture(scope="module")
def towns_of(store, folder):
    """A store a town with its own held-out text: the server has none."""
    of = {t: np.array([n for n in range(len(store)) if t in store.groups(n)]) for t in TOWNS}
    return deal_parts(store, of, folder / "towns", held=None)


def recipe_of(folder, *changes, here=True):
    """The recipe with all text here, or with a tokenizer and no text."""
    text, given = (folder / "tiny.toml").read_text() + TREE, [f"model.init_from={folder / 'base'}"]
    if here:
        given += [f"data.tokenizer={folder / 'base' / 'tokenizer.json'}", "data.test_clients=0.5"]
    else:
        text = text.replace('source = "tiny.jsonl"', 'tokenizer = "tokenizer.json"')
    file = folder / ("here.toml" if here else "server.toml")
    file.write_text(text)
    return load(file, (*given, *ADAPTERS, *changes))


def simulated(folder, store, *changes, out=Path()):
    return tree_run(resolve(recipe_of(folder, *changes), store), store, out=out)


def workers(stores, tmp_path, base):
    return {
        town: Worker(
            stores[town],
            Policy(),
            ledger=KnownSecret(tmp_path / town / "ledger.jsonl"),
            memory=NodeMemory(tmp_path / town / "memory"),
            models=tmp_path / town / "models",
            name=town,
            base=base,
        )
        for town in TOWNS
    }


def over_nodes(folder, nodes, out, *changes, **more):
    """The tree over nodes that have all text, at a server that has none."""
    transport = LocalTransport(nodes)
    assignments = registration.assign_members(
        transport, sorted(nodes), lambda n, h: None, lambda text: None
    )
    recipe = recipe_of(folder, *changes, here=False)
    held = server_store(recipe, folder / "cache")
    out.mkdir(exist_ok=True)
    run = networked_run(resolve(recipe, held), held, assignments, out, transport=transport, **more)
    return run, transport, assignments


def numbers_of_b(run):
    return sum(x.size for name, x in leaves(run.start()) if name.endswith("lora_b"))


def leaves(params):
    return tree.named_leaves(params).items()


CASES = {
    "mixed layers": (direct, LAST),
    "mixed layers, relayed": (nested, LAST),
    "adapters of each node": (direct, OWN),
    "one backbone": (nested, ("federation.personal_layers=none",)),
    "codecs": (direct, (*LAST, "wire.upload=uniform-8", "wire.download=bfloat16")),
    "kept optimisers": (direct, (*LAST, "client.optimizer=adam", "federation.keep_optimizer=true")),
    "half the base": (direct, (*OWN, "model.base_dtype=bfloat16", "wire.last_blocks=1")),
    "a part of the base itself": (
        direct,
        ("wire.trainable=fixed", "wire.trainable_fraction=0.3", *LAST),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_tree_on_a_base_over_nodes_is_its_simulation_to_the_bit(
    name, folder, store, parts, tmp_path
):
    shape, changes = CASES[name]
    simulation = simulated(folder, store, *changes)
    here, told = rounds(simulation)
    nodes = shape(tmp_path / "relays", workers(parts, tmp_path, folder / "base"))
    transport = LocalTransport(nodes)
    over = networked(recipe_of(folder, *changes), parts, nodes, transport)
    there, said = rounds(over)
    assert said == told
    assert same(there.params, here.params) and same(there.waiting, here.waiting)
    for a, b in zip(there.nodes, here.nodes, strict=True):
        assert same(a.server_memory, b.server_memory)
    began = over.round.init(over.start()).params[0]
    assert not same(there.params[0], began), "the tree has learned"
    if "fixed" not in str(changes):
        # The state and every frame are of B alone: the base is at the server once.
        count = numbers_of_b(over)
        assert all(tree.size(node.params) == count for node in there.nodes)
        frames = [len(frame) for _, asked in transport.sent.values() for frame in asked.frames]
        assert frames and max(frames) <= 4 * count + 600


HIDDEN = {
    "noise": (direct, (*NOISE, *LAST)),
    "noise, adapters of each node": (nested, (*NOISE, *OWN)),
    "clip alone": (direct, (*NOISE[:1], *LAST)),
    "noise, layers kept": (nested, (*NOISE, *LAST, *COLD)),
    "noise, kept optimisers": (
        direct,
        (*NOISE, *LAST, "client.optimizer=adam", "federation.keep_optimizer=true"),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HIDDEN)
def test_clip_and_noise_of_leaves_act_on_b(name, folder, store, parts, tmp_path):
    """Given the same secret: what others know, and what each node keeps, to the bit."""
    shape, changes = HIDDEN[name]
    seed = (f"federation.noise_seed={SECRET}",) if "noise" in name else ()
    simulation = simulated(folder, store, *changes, *seed)
    here, told = rounds(simulation)
    nodes = workers(parts, tmp_path, folder / "base")
    over = networked(recipe_of(folder, *changes), parts, shape(tmp_path / "relays", nodes))
    there, said = rounds(over)
    if "noise" in name:
        assert said == told
    config = over.round.config
    assert same(shown_models(config, there), shown_models(simulation.round.config, here))
    for node, model in own_models(over, nodes, there).items():
        assert same(model, here.nodes[node].params), "the node has its own adapters"
        assert tree.size(model) == numbers_of_b(over)
        assert not same(there.nodes[node].params, here.nodes[node].params), "nobody else has"


def test_adapters_that_stay_are_at_their_node_alone(folder, store, parts, tmp_path):
    """Temperature zero: nothing of an adapter leaves, and each node trains its own."""
    changes = (*OWN, *COLD)
    here, _ = rounds(simulated(folder, store, *changes))
    nodes = workers(parts, tmp_path, folder / "base")
    over = networked(recipe_of(folder, *changes), parts, nodes)
    there, _ = rounds(over)
    began = over.round.init(over.start()).params[0]
    for node in there.nodes:
        assert same(node.params, began), "the server never learned another adapter"
    found = own_models(over, nodes, there)
    for node, model in found.items():
        assert same(model, here.nodes[node].params) and not same(model, began)
    assert not same(*list(found.values())[:2]), "each node has its own"


@pytest.mark.slow
def test_the_mesh_engine_agrees(folder, store, parts, tmp_path):
    # A learning rate of 2 would make rounding larger with every step.
    common = (*LAST, "client.learning_rate=0.1", "federation.order=together")
    changes = (*common, "run.engine=mesh")
    here, _ = rounds(simulated(folder, store, *changes))
    loop, _ = rounds(simulated(folder, store, *common))
    nodes = workers(parts, tmp_path, folder / "base")
    there, _ = rounds(networked(recipe_of(folder, *changes), parts, nodes))
    for other in (there, loop):
        pairs = zip(jax.tree.leaves(here.params), jax.tree.leaves(other.params), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "said"),
    [("other", "the model of this node is"), (None, "this node has no model to train adapters on")],
)
def test_a_node_with_another_base_or_none_refuses_and_says_so(folder, parts, tmp_path, base, said):
    nodes = workers(parts, tmp_path, folder / "base")
    nodes["town-1"].base = base and folder / base
    stats = []
    over = networked(recipe_of(folder, *LAST), parts, nodes, on_stats=stats.append)
    with pytest.raises(EngineError, match=r"town-1 refused: model\.base_sha256 = "):
        rounds(over, 1)
    (refused,) = [words for name, words in stats[-1].refused.items() if name == "town-1"]
    assert said in refused and str(folder) not in refused
    # Where others are enough, its place stays as it was and the tree goes on.
    changes, quorum = (*LAST, "federation.order=together"), Quorum(quorum=0.5)
    over = networked(recipe_of(folder, *changes), parts, nodes, quorum=quorum)
    _, (facts,) = rounds(over, 1)
    missed = [name for name, figures in facts["nodes"].items() if figures.get("missed")]
    assert missed == ["the town-1"] and facts["members"] == 3


def test_what_a_tree_on_a_base_cannot_do_is_refused(folder, store):
    check_deployable(recipe_of(folder))
    with pytest.raises(ConfigError, match=r"personal_layers = 'last\.\*': expected layers with"):
        simulated(folder, store, "federation.personal_layers=last.*")
    with pytest.raises(ConfigError, match=r"model\.base_sha256 = '0000"):
        simulated(folder, store, f"model.base_sha256={'0' * 64}")
    with pytest.raises(ConfigError, match=r"'lora' or 'fixed'"):
        simulated(folder, store, *LAST, "wire.error_feedback=true")


# ---- a whole run ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", [LAST, (*OWN, *COLD), (*NOISE, *LAST)])
def test_every_node_has_its_adapters_on_its_own_base_in_the_end(
    folder, store, towns_of, tmp_path, changes, monkeypatch
):
    """The server has no text and keeps no base in its checkpoints; nodes score B on their own."""
    monkeypatch.chdir(folder)
    nodes = workers(towns_of, tmp_path, Path("base"))  # as an owner would name it
    monkeypatch.chdir(tmp_path)
    run_id, out = "ab" * 16, tmp_path / "run"
    over, transport, assignments = over_nodes(folder, nodes, out, *changes, run_id=run_id)
    (out / "held_out.json").unlink(missing_ok=True)  # or the folder is not free
    summary = train(over)
    asked = {"run_id": run_id, "counters": Counters(), "deadline": 60.0}
    assert deliver(over, assignments, transport, **asked) == sorted(TOWNS)
    count = numbers_of_b(over)
    frames = [len(f) for _, p in transport.sent.values() for f in p.frames]
    assert {p.kind for _, p in transport.sent.values()} >= {EVALUATE_REQUEST}
    assert max(frames) <= 4 * count + 600
    for file in (out / "checkpoints").glob("*.safetensors"):
        # Seven nodes with B, what their servers and residuals keep of it, and no base.
        assert sum(x.size for x in load_file(file).values()) < 6 * 7 * count + 200, file
    noisy, cold = "federation.clip_norm=0.5" in changes, COLD[0] in changes
    alone = simulated(folder, store, *changes, out=tmp_path / "here")
    if not noisy:
        simulated_summary = train(alone)
        for figure in ("start_perplexity", "perplexity"):
            assert summary[figure] == pytest.approx(simulated_summary[figure], rel=1e-5)
        again = call(tmp_path, "evaluate", alone.record.path, "--json")
        assert again.code == 0, again.stderr
        assert again.json["perplexity"] == pytest.approx(simulated_summary["perplexity"], rel=1e-5)
        if not cold:
            assert summary["params_sha256"] == simulated_summary["params_sha256"]
    own = {}
    for town in TOWNS:
        here = tmp_path / town / "models" / run_id[:8]
        kept = RunDirectory(here / "nodes" / town)
        own[town] = load_file(adapter_beside(kept.weights))
        if not noisy:
            wanted = load_file(adapter_beside(alone.record.weights_of(f"the {town}")))
            for leaf in wanted:
                np.testing.assert_allclose(own[town][leaf], wanted[leaf], rtol=1e-5, atol=1e-7)
        done = call(
            tmp_path, "export", kept.path, "--format", "peft", "--out", town + "-p", "--json"
        )
        assert done.code == 0, done.stderr
        told = json.loads((tmp_path / f"{town}-p" / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == str(folder / "base")
        shared = call(tmp_path, "export", here, "--format", "peft", "--out", town + "-s", "--json")
        if cold:  # nothing was shared, so the shared adapters are those that all began with
            assert shared.code == 2 and "equal their start" in shared.stderr, shared.stderr
        else:
            assert shared.code == 0, shared.stderr
            card = (tmp_path / f"{town}-s" / "README.md").read_text()
            assert f"the run `{run_id}` in 2 rounds" in card
            assert ("the claim of the run" in card) == noisy, card
        card = (tmp_path / f"{town}-p" / "README.md").read_text()
        assert f"as the model of `{town}`" in card
        assert ("no promise covers this model" in card) == noisy, card
    judged = call(tmp_path, "evaluate", kept.path, "--json")
    assert judged.code == 0 and judged.json["perplexity"] > 1, judged.stderr
    b = [name for name in own["town-0"] if name.endswith("lora_b")]
    assert any(not np.array_equal(own["town-0"][n], own["town-1"][n]) for n in b)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "mesh"])
def test_a_resumed_tree_on_a_base_ends_alike(folder, store, tmp_path, engine):
    changes = (*LAST, f"run.engine={engine}", "client.optimizer=adam")
    changes = (*changes, "federation.keep_optimizer=true")
    whole = train(simulated(folder, store, *changes, out=tmp_path / "whole"))
    seen = []
    watcher = Watcher(round=seen.append, stop=lambda: bool(seen))
    assert train(simulated(folder, store, *changes, out=tmp_path / "part"), watcher=watcher) is None
    resumed = train(simulated(folder, store, *changes, out=tmp_path / "part"), resume=True)
    assert resumed["params_sha256"] == whole["params_sha256"]
