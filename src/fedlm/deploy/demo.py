"""A whole federation on one machine: certificates, server, nodes, a run, and its simulation.

In:       a recipe and an empty folder.
Out:      the summaries of both runs, and how far their models are apart.
Promise:  the same recipe and seed, over TLS and in one program; every process is ended.
Not here: any of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core import tree
from fedlm.core.errors import require
from fedlm.corpus.population import of_store
from fedlm.corpus.shard import deal, deal_parts
from fedlm.corpus.store import Store, StoreSettings
from fedlm.corpus.tokenizer_file import write_tokenizer
from fedlm.deploy import member_list, server_app, workspace
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.workspace import Workspace
from fedlm.engine.messages import NODE_NAME
from fedlm.federation.topology import Topology, feed
from fedlm.inference import load_params
from fedlm.recipe.build import build
from fedlm.recipe.federation import FederationTable, NodeTable, topology_of
from fedlm.recipe.parts import open_store, training_clients
from fedlm.recipe.settings import Recipe, parse
from fedlm.recipe.tree import settings_of
from fedlm.record.directory import RunDirectory
from fedlm.run import Run
from fedlm.training import Watcher
from fedlm.training import train as simulate

NODES = ("east", "north", "south", "west")
LEAST_MEMBERS = 3  # of a secure sum
TREE = {"one": ("east", "north"), "two": ("south", "west")}
# Of secure sums every list needs three members: two nodes and a relay above three others.
SECURE_TREE = {"east": (), "hub": ("one", "three", "two"), "west": ()}
StartProcess = Callable[[list[str], str], Child]
Network = Mapping[str, Any]
"""A mapping from node name to the path of its store, or to the network below a relay."""


def recipe(source: str = "sotu", *, secure: bool = False, as_tree: bool = False) -> Recipe:
    """Return a recipe that trains in about a minute."""
    nodes = sum(max(1, len(below)) for below in SECURE_TREE.values()) if as_tree else len(NODES)
    sums = {"upload": "secure-24-clip1-members6", "secure_nodes": nodes, "secure_threshold": 3}
    return parse(
        {
            "data": {"source": source, "vocabulary": 2000, "sequence_length": 16},
            "model": {
                "name": "cifg",
                "embedding_size": 32,
                "hidden_size": 48,
            },  # SI-CIFG would amplify rounding
            "client": {"batch_size": 16, "max_examples": 64, "weight": "uniform"}
            if secure
            else {"batch_size": 16, "max_examples": 64},
            "wire": sums if secure else {},
            "server": {"rounds": 5, "cohort": 6, "evaluate_every": 5, "evaluate_rows": 500},
            "run": {"trackers": (), "baselines": False, "checkpoint_every": 1 if secure else 10},
        }
    )


def demo(
    folder: Path,
    asked: Recipe,
    *,
    as_tree: bool,
    devices: int,
    watcher: Watcher,
    secure: bool = False,
) -> dict[str, Any]:
    """Train over a network of local processes, then in simulation, and compare the models.

    With `secure` every node approves a list of members before it joins.
    """
    require(
        not secure or bool(asked.wire.secure_nodes),
        "wire.secure_nodes",
        asked.wire.secure_nodes,
        f"{recipe(secure=True, as_tree=as_tree).wire.secure_nodes} with --secure",
    )
    folder.mkdir(parents=True)
    whole = open_store(asked.data, folder / "text")
    if asked.data.source is not None:
        asked = _with_store(asked, whole.path)
    if asked.federation is None:
        tree = (SECURE_TREE if asked.wire.secure_nodes else TREE) if as_tree else {}
        network = _dealt(whole, folder / "stores", tree)
    else:
        asked, network = _places(asked, whole, folder / "stores", as_tree=as_tree)
    watcher.say("text dealt to nodes; the server keeps a tokenizer")
    write_tokenizer(whole.tokenizer, folder / "tokenizer")
    networked = _train(folder, asked, network, devices=devices, watcher=watcher)
    if networked is None:
        return {"networked": None, "simulated": None, "difference": None}
    watcher.say("the same recipe in simulation")
    run = build(asked, folder / "text", out=folder / "simulated")
    simulated = simulate(run, watcher=watcher)
    listed = member_list.read_list(folder / "federations" / "world" / workspace.MEMBERS)
    more = {"fingerprint": listed.fingerprint} if secure and listed else {}
    if simulated is None:
        return {"networked": networked, "simulated": None, "difference": None, **more}
    apart = largest_difference(folder / "networked", folder / "simulated", run)
    return {"networked": networked, "simulated": simulated, "difference": apart, **more}


def _train(
    folder: Path, asked: Recipe, network: Network, *, devices: int, watcher: Watcher
) -> dict[str, Any] | None:
    """Train over a network of processes, and end all of them."""
    with children() as started:

        def start(arguments: list[str], log: str) -> Child:
            lanes = ["--devices", str(devices)] if arguments[:2] == ["node", "join"] else []
            started.append(Child([*arguments, *lanes], folder / f"{log}.log", folder))
            return started[-1]

        return server_app.train(
            _start(folder, "world", network, start),
            _with_tokenizer(asked, folder / "tokenizer" / "tokenizer.json"),
            folder / "networked",
            resume=False,
            watcher=watcher,
            stores=folder / "text",
        )


def _dealt(whole: Store, out: Path, tree: Mapping[str, Sequence[str]]) -> Network:
    """Deal the clients of a flat recipe to nodes in equal parts, and return the network.

    A `tree` has the names of nodes by relay, none for a node that is no relay.
    """
    if not tree:
        deal(whole, NODES, out, held=None)
        return {name: out / name for name in NODES}
    # Members are numbered by relay, then by node: the text is dealt in that order.
    paths = {at: {name: out / f"{at}-{name}" for name in names} for at, names in tree.items()}
    below = [[path.name for path in names.values()] or [at] for at, names in paths.items()]
    deal(whole, [name for names in below for name in names], out, held=None)
    return {at: names or out / at for at, names in paths.items()}


def _places(asked: Recipe, whole: Store, out: Path, *, as_tree: bool) -> tuple[Recipe, Network]:
    """Deal a tree's clients to nodes by place; return the recipe and the network.

    A node has the name of the group whose clients it holds.
    """
    settings, training = settings_of(asked), training_clients(asked, whole)
    people = of_store(whole, training)
    topology, parts = topology_of(settings, people.group_paths()), {}
    test = whole.test_clients
    held_out = feed(topology.places, [whole.groups(int(n)) for n in test])
    for place in topology.with_text:
        fed, held = topology.places[place].groups, list(topology.clients[place])
        require(
            len(fed) == 1 and NODE_NAME.fullmatch(fed[0]) is not None,
            "federation.node.groups",
            list(fed),
            "one group per place, whose name can be that of a node: small letters, digits, dots "
            "and hyphens",
        )
        parts[fed[0]] = np.sort(
            np.concatenate([training[held], test[np.asarray(held_out[place], int)]])
        )
    left = people.size - sum(len(topology.clients[place]) for place in topology.with_text)
    require(left == 0, "federation.node", f"{left} clients left out", "a place for every client")
    deal_parts(whole, parts, out, held=None)
    network = _below(topology, 0, out) if as_tree else {name: out / name for name in parts}
    return asked.model_copy(update={"federation": _written(settings, topology)}), network


def _below(topology: Topology, place: int, out: Path) -> Network:
    """Return the network of a place: its own text and its children.

    A child that has children itself becomes a relay.
    """
    network: dict[str, Any] = {name: out / name for name in topology.places[place].groups}
    for child in topology.children[place]:
        below = _below(topology, child, out)
        if topology.children[child]:
            network[topology.names[child]] = below
        else:
            network |= below
    return network


def _written(settings: FederationTable, topology: Topology) -> FederationTable:
    """Return the table with the tree written out, so that places have the same order everywhere."""
    nodes = tuple(
        NodeTable(name=place.name, parent=place.parent, groups=place.groups, **dict(place.own))
        for place in topology.places
    )
    written = {"levels": None, "node": nodes, "only": (), "moves": ()}
    return settings.model_copy(update=written)


def _with_store(asked: Recipe, path: Path) -> Recipe:
    data = {**asked.data.model_dump(exclude_none=True), "store": str(path)}
    for name in ("source", "stores", *vars(StoreSettings())):  # the store decides its own settings
        data.pop(name, None)
    return asked.model_copy(update={"data": type(asked.data)(**data)})


def _with_tokenizer(asked: Recipe, file: Path) -> Recipe:
    """Return a recipe whose text is elsewhere."""
    told = asked.data.model_dump(exclude_none=True)
    for name in ("source", "store", "stores", *vars(StoreSettings())):
        told.pop(name, None)
    data = type(asked.data)(**told, tokenizer=str(file))
    return asked.model_copy(update={"data": data})


def _start(folder: Path, name: str, network: Network, start: StartProcess) -> Workspace:
    """Start a federation's server, its nodes, and the federations below its relays."""
    port = free_port()
    path = folder / "federations" / name
    made = workspace.init(
        path, name, ["127.0.0.1"], port, tuple(network), bind="127.0.0.1", quorum=1.0
    )
    if len(network) >= LEAST_MEMBERS:  # the list of members of secure sums
        file, _ = member_list.propose(made)
        for node in network:
            member_list.approve(made.kit(node), file)
    wait_for_port(port, start(["federation", "serve", str(path)], f"{name}-server"))
    for node, below in network.items():
        kit = str(made.kit(node).path)
        if isinstance(below, Path):
            start(["node", "join", kit, "--store", str(below)], f"{name}-{node}")
        else:
            inner = _start(folder, node, below, start)
            start(["node", "relay", kit, "--home", str(inner.path)], f"{node}-relay")
    return made


def largest_difference(one: Path, other: Path, run: Run) -> float:
    """Return the largest difference between parameters of two runs, over all models of a tree."""
    model, size = run.recipe.model, run.store.vocabulary
    largest = 0.0
    for name in run.round.names:
        paths = (RunDirectory(path).weights_of(name) for path in (one, other))
        a, b = (tree.named_leaves(load_params(model, size, path)) for path in paths)
        for x, y in zip(a.values(), b.values(), strict=True):
            apart = np.abs(np.asarray(x) - np.asarray(y))
            largest = max(largest, float(np.max(apart, initial=0.0)))
    return largest
