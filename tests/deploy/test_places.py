"""A tree over nodes is its simulation: directly, through relays, and with nodes that are away."""

import json
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from fedlm.core.errors import ConfigError, EngineError
from fedlm.corpus.shard import deal_parts
from fedlm.deploy import registration
from fedlm.deploy.local import check_deployable
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.relay import Relay
from fedlm.engine import messages
from fedlm.engine.dispatch import Quorum
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from fedlm.recipe.tree import tree_run
from fedlm.record.journal import read
from fedlm.training import Watcher, train
from tests.deploy.local import LocalTransport, prepared, store_in

TOWNS = ("town-0", "town-1", "town-2", "town-3")
SIDES = {"south side": ("town-0", "town-2"), "north side": ("town-1", "town-3")}


def place(name, parent=None, *groups):
    above = f'parent = "{parent}"\n' if parent else ""
    return f'[[federation.node]]\nname = "{name}"\n{above}groups = {json.dumps(groups)}\n'


TREE = '\n[federation]\npersonal_layers = "last 0.5"\n' + place("world")
for side, towns in SIDES.items():
    TREE += place(side, "world") + "".join(place(f"the {t}", side, t) for t in towns)
# Text above text, and one town far below.
MIXED = '\n[federation]\npersonal_layers = "last 0.5"\n' + place("world", None, "town-3")
MIXED += place("a", "world", "town-0") + place("b", "a", "town-2") + place("c", "b", "town-1")
SMALL = ("model.name=cifg", "server.rounds=3", "run.prompts=[]", "data.test_clients=0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("places"), *SMALL)


@pytest.fixture(scope="module")
def store(folder):
    return store_in(folder)


@pytest.fixture(scope="module")
def parts(store, folder):
    """A store a town, and the server's."""
    clients = store.training_clients
    towns = {t: [n for n in clients if t in store.groups(int(n))] for t in TOWNS}
    return deal_parts(store, {t: np.array(c) for t, c in towns.items()}, folder / "dealt")


@pytest.fixture
def workers(parts):
    return {town: Worker(parts[town], Policy()) for town in TOWNS}


def recipe_of(folder, *changes, table=TREE):
    path = folder / "tree.toml"
    path.write_text((folder / "tiny.toml").read_text() + table)
    return load(path, (*SMALL, "run.engine=loop", *changes))


def simulated(folder, store, *changes, table=TREE, out=Path()):
    recipe = recipe_of(folder, *changes, table=table)
    return tree_run(resolve(recipe, store), store, out=out)


def relay(folder, name, nodes):
    transport = LocalTransport(nodes)
    path = folder / name
    path.mkdir(parents=True)
    return Relay(path, transport, sorted(nodes), Quorum(), name=name, say=lambda text: None)


def networked(recipe, parts, nodes, transport=None, out=Path(), **more):
    """The tree over what is there: nodes, relays, or both."""
    transport = transport or LocalTransport(nodes)
    assignments = registration.assign_members(
        LocalTransport(nodes), sorted(nodes), lambda n, h: None, lambda text: None
    )
    held = parts["server"]
    return networked_run(resolve(recipe, held), held, assignments, out, transport=transport, **more)


def direct(folder, workers):
    return workers


def relayed(folder, workers):
    return {
        "north": relay(folder, "north", {t: workers[t] for t in ("town-1", "town-3")}),
        "south": relay(folder, "south", {t: workers[t] for t in ("town-0", "town-2")}),
    }


def nested(folder, workers):
    """A relay behind a relay, and a node beside them."""
    inner = relay(folder, "inner", {t: workers[t] for t in ("town-1", "town-2")})
    outer = relay(folder, "outer", {"inner": inner, "town-3": workers["town-3"]})
    return {"outer": outer, "town-0": workers["town-0"]}


def rounds(experiment, count=2, state=None):
    """The state after some rounds, and what each told."""
    state, told = state or experiment.round.init(experiment.start()), []
    first = int(state.round)
    for played in experiment.round.play(state, range(first, first + count)):
        state = played.state
        told.append({k: v for k, v in played.told.items() if k != "seconds"})
    return state, told


CASES = {
    "direct": (direct, TREE),
    "relayed": (relayed, TREE),
    "nested": (nested, TREE),
    "text above text": (direct, MIXED),
    "text above text, relayed": (nested, MIXED),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_tree_over_nodes_is_its_simulation(name, folder, store, parts, workers, tmp_path):
    shape, table = CASES[name]
    here, told = rounds(simulated(folder, store, table=table))
    over = networked(recipe_of(folder, table=table), parts, shape(tmp_path, workers))
    there, said = rounds(over)
    assert said == told
    assert eqx.tree_equal(jax.device_get(there), jax.device_get(here))


SETTINGS = {
    "codecs": ("wire.upload=uniform-8", "wire.download=bfloat16"),
    "kept optimisers": ("client.optimizer=adam", "federation.keep_optimizer=true"),
    "tokens": ("federation.weight=tokens",),
    "their own pace": ("federation.sync_every=2",),
    "everything": (
        *("wire.upload=drive", "client.optimizer=momentum", "federation.keep_optimizer=true"),
        *("federation.weight=tokens", "federation.sync_every=2", "federation.order=together"),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", [direct, nested])
def test_a_tree_over_nodes_is_its_simulation_with(name, shape, folder, store, parts, tmp_path):
    """To the bit over four rounds: models, optimisers of federations, what is told."""
    changes = ("server.rounds=4", *SETTINGS[name])
    table = MIXED if name == "their own pace" else TREE
    telling = {t: Worker(parts[t], Policy(tell_tokens=True)) for t in TOWNS}
    here, told = rounds(simulated(folder, store, *changes, table=table), 4)
    over = networked(recipe_of(folder, *changes, table=table), parts, shape(tmp_path, telling))
    there, said = rounds(over, 4)
    assert said == told
    assert same(there.params, here.params)
    for a, b in zip(there.nodes, here.nodes, strict=True):
        assert same(a.server_memory, b.server_memory)
    if "federation.keep_optimizer=true" in changes:
        assert {int(n.training_memory) for n in there.nodes} == {-1, 3}  # the rest is at nodes
        plain = [c for c in changes if "keep_optimizer" not in c]
        assert not same(
            rounds(simulated(folder, store, *plain, table=table), 4)[0].params, here.params
        )


def test_nodes_tell_their_tokens_only_if_their_policy_says_so(folder, parts, workers):
    assert workers["town-0"].hello().tokens == ()
    telling = {t: Worker(parts[t], Policy(tell_tokens=t != "town-1")) for t in TOWNS}
    with pytest.raises(ConfigError, match=r"and town-1 did not.*tell_tokens = true"):
        networked(recipe_of(folder, "federation.weight=tokens"), parts, telling)


@pytest.mark.slow
def test_the_mesh_engine_agrees(folder, store, parts, workers):
    changes = ("run.engine=mesh", "federation.order=together")
    here, _ = rounds(simulated(folder, store, *changes, table=MIXED))
    there, _ = rounds(networked(recipe_of(folder, *changes, table=MIXED), parts, workers))
    for a, b in zip(jax.tree.leaves(here.params), jax.tree.leaves(there.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_the_tree_may_be_that_of_the_relays(folder, parts, workers, tmp_path):
    over = networked(
        recipe_of(folder, table='\n[federation]\nlevels = [0, 1]\npersonal_layers = "last 0.5"\n'),
        parts,
        relayed(tmp_path, workers),
    )
    assert over.round.config.topology.names == (
        *("root", "north", "town-1", "town-3"),
        *("south", "town-0", "town-2"),
    )
    assert float(rounds(over, 1)[1][0]["loss"]) > 0


# ---- who is away ---------------------------------------------------------------------------


def same(a, b):
    return eqx.tree_equal(jax.device_get(a), jax.device_get(b))


def test_a_place_whose_node_is_away_stays_as_it_was(folder, parts, workers):
    plain = ("federation.optimizer=fedavg", "federation.learning_rate=1.0")
    transport, stats = LocalTransport(workers), []
    more = {"quorum": Quorum(quorum=0.25, deadline=5.0), "on_stats": stats.append}
    over = networked(recipe_of(folder, *plain), parts, workers, transport, **more)
    before, _ = rounds(over, 1)
    transport.away |= {"town-0", "town-2", "town-1"}
    after, (facts,) = rounds(over, 1, before)
    number = {name: i for i, name in enumerate(over.round.config.topology.names)}
    gone = ("south side", "the town-0", "the town-2", "the town-1")
    for name in gone:  # a federation of which nobody came is away too
        assert facts["nodes"][name]["missed"] and same(
            after.nodes[number[name]], before.nodes[number[name]]
        )
    assert not any(facts["nodes"][n].get("missed") for n in number if n not in gone)
    # Of whom nothing came does not count: the mean of one is that one.
    backbones = [
        over.round.config.backbone(after.params[number[n]]) for n in ("world", "north side")
    ]
    for a, b in zip(*backbones, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert not same(after.params[0], before.params[0])
    assert facts["members"] == 1 and sorted(stats[-1].away) == ["town-0", "town-1", "town-2"]
    transport.away.clear()
    assert rounds(over, 1, after)[1][0]["members"] == 4


def test_an_inner_place_that_is_away_passes_its_children_on(folder, parts, workers):
    """Asked together, so that a quorum is one of all nodes."""
    transport, quorum = LocalTransport(workers), Quorum(quorum=0.5)
    recipe = recipe_of(folder, "federation.order=together", table=MIXED)
    over = networked(recipe, parts, workers, transport, quorum=quorum)
    before, _ = rounds(over, 1)
    transport.away.add("town-0")
    after, (facts,) = rounds(over, 1, before)
    assert facts["members"] == 3 and facts["nodes"]["a"]["missed"]
    assert "loss" not in facts["nodes"]["a"] and "agreement" in facts["nodes"]["a"]
    assert not same(after.params[over.round.config.topology.names.index("a")], before.params[1])


def test_a_round_in_levels_is_one_line(folder, parts, workers):
    stats = []
    rounds(networked(recipe_of(folder, table=MIXED), parts, workers, on_stats=stats.append), 1)
    assert stats[-1].answered == ["town-3", "town-0", "town-2", "town-1"]
    assert stats[-1].up_bytes == 4 * stats[0].up_bytes > 0


def test_too_few_nodes_end_the_run(folder, parts, workers):
    refusing = {**workers, "town-1": Worker(parts["town-1"], Policy(smallest_cohort=2))}
    with pytest.raises(EngineError, match=r"town-1 refused: .*at least 2"):
        rounds(networked(recipe_of(folder), parts, refusing), 1)


# ---- a whole run ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_what_its_simulation_leaves(folder, store, parts, workers, tmp_path):
    whole = train(simulated(folder, store, out=tmp_path / "simulated"))
    seen = []

    def run(**watch):
        nodes = relayed(tmp_path / str(len(seen)), workers)
        over = networked(recipe_of(folder), parts, nodes, out=tmp_path / "networked")
        return train(over, resume=bool(seen), watcher=Watcher(**watch))

    assert run(round=seen.append, stop=lambda: len(seen) == 2) is None
    done = run()
    for fact in ("params_sha256", "rounds", "tokens", "upload_bytes", "download_bytes"):
        assert done[fact] == whole[fact]
    assert [n["perplexity"] for n in done["nodes"]] == pytest.approx(
        [n["perplexity"] for n in whole["nodes"]]
    )
    page = (tmp_path / "networked" / "report.html").read_text()
    assert "the town-3" in page and "on the held-out text of every place" in page
    assert len(list((tmp_path / "networked" / "nodes").iterdir())) == 7
    told = [
        [
            (e["loss"], e["nodes"])
            for e in read(tmp_path / name / "journal.jsonl")
            if e["kind"] == "round"
        ]
        for name in ("simulated", "networked")
    ]
    assert told[0] == told[1]


# ---- what cannot be ------------------------------------------------------------------------


def test_a_place_needs_exactly_one_node(folder, parts, workers):
    table = "\n[federation]\n" + place("world") + place("all", "world", *TOWNS)
    with pytest.raises(ConfigError, match=r"'all' is fed by the nodes town-0, town-1.*exactly one"):
        networked(recipe_of(folder, table=table), parts, workers)
    table = "\n[federation]\n" + place("world") + place("all", "world", "town-9")
    with pytest.raises(ConfigError, match=r"'town-9', which is no node here"):
        networked(recipe_of(folder, table=table), parts, workers)


def test_every_place_needs_held_out_text_at_the_server(folder, store, parts, workers, tmp_path):
    few = [n for n in store.training_clients if "town-2" not in store.groups(int(n))]
    here = deal_parts(store, {"few": np.array(few)}, tmp_path)
    with pytest.raises(ConfigError, match=r"no held-out text of the town-2.*name of one of its"):
        networked(recipe_of(folder), {"server": here["few"]}, workers)


@pytest.mark.parametrize(
    "change, words",
    [
        ("federation.pool_clients=false", "federation.pool_clients = False.*relays"),
        ("data.groups=['north']", "data.groups"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused(folder, change, words):
    with pytest.raises(ConfigError, match=words):
        check_deployable(recipe_of(folder, change))


def test_a_node_that_makes_no_sense_is_named():
    told = messages.encode_hello(messages.Hello(3, "t", "t", "1", (("a", 1),)))
    with pytest.raises(EngineError, match="node r did not say who it is: it has 3 clients"):
        registration.hello_of("r", told)
    with pytest.raises(EngineError, match="node r: no room"):
        registration.hello_of("r", messages.encode_refusal("no room"))


def test_assignments_are_kept_with_the_nodes_below(tmp_path, parts, workers):
    nodes = nested(tmp_path, workers)
    assignments = registration.assign_members(
        LocalTransport(nodes), sorted(nodes), lambda n, h: None, lambda t: None
    )
    assert [p for p, _ in assignments[0].leaves] == ["inner/town-1", "inner/town-2", "town-3"]
    registration.save_assignments(tmp_path / "seats.json", assignments)
    assert registration.load_assignments(tmp_path / "seats.json") == assignments
