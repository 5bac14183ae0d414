"""A tree of places over a federation's nodes.

In:       a recipe with a `[federation]` table, the assignments of a run.
Out:      the run of a tree whose text is at nodes.
Promise:  the root computes the tree as a simulation does, with the same numbers; each place that
          holds text is trained at exactly one node, wherever relays put it.
Not here: asking (`engine/remote.py`), what a node does (`node_worker.py`).

Over a network the groups of a node are its name, and before it those of the relays through which it
is reached: `groups = ["oslo"]` names the node oslo, and `levels` grows the tree that relays make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Engine
from fedlm.corpus.population import Population, of_paths
from fedlm.corpus.store import Store
from fedlm.deploy.local import redacted
from fedlm.engine.dispatch import Assignment
from fedlm.engine.messages import MOST_MEMBERS
from fedlm.engine.remote import Leaf, RemoteEngine, leaves_of
from fedlm.engine.remote_evaluation import HeldOutAtNodes
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.topology import EVERYBODY, Topology
from fedlm.recipe.settings import Recipe
from fedlm.recipe.tree import settings_of, tree_run
from fedlm.run import Run


def networked_tree(
    recipe: Recipe,
    store: Store,
    assignments: tuple[Assignment, ...],
    path: Path,
    *,
    transport: Any,
    options: dict[str, Any],
    held_out: dict[str, Any] | None = None,
) -> Run:
    """Return the run of a tree whose text is at nodes.

    It is evaluated on held-out text of the local store; with `held_out`, the parts of a
    `HeldOutAtNodes`, every node scores models on its own.
    """
    leaves = leaves_of(assignments)
    members = _members(recipe, leaves)

    def engine(algorithm: Algorithm, topology: Topology) -> Engine:
        homes = homes_of(topology, leaves, members.size)
        return RemoteEngine(
            algorithm, transport, assignments, homes=homes, recipe=redacted(recipe), **options
        )

    def text(topology: Topology) -> HeldOutAtNodes:
        assert held_out is not None
        homes = homes_of(topology, leaves, members.size)
        order = sorted(homes, key=lambda number: homes[number].first)
        return HeldOutAtNodes(
            places={number - members.size: homes[number] for number in order},
            in_tree=True,
            recipe=redacted(recipe),
            population=members.size,
            **held_out,
        )

    def nothing_held(topology: Topology, held: Mapping[str, Any]) -> str:
        found = set().union(*(rows.keys() for rows in held.values()))
        missing = [topology.names[n] for n in topology.with_text if n not in found]
        if held_out is not None:
            return (
                f"the nodes of {', '.join(missing) or 'every place in one split'} hold out no "
                "text that they may tell figures of: prepare their stores with a larger "
                "--validation or --test-clients, or lower smallest_evaluation in their policies."
            )
        return (
            f"the server's store {store.path} has no held-out text of "
            f"{', '.join(missing) or 'every node in one split'}: a held-out client belongs to the "
            "leaf whose node has the name of one of its groups."
        )

    return tree_run(
        recipe,
        store,
        out=path,
        members=members,
        engine=engine,
        text=None if held_out is None else text,
        nothing_held=nothing_held,
        tokens=_tokens(leaves) if settings_of(recipe).weight == "tokens" else None,
    )


def _members(recipe: Recipe, leaves: tuple[Leaf, ...]) -> Population:
    """Return the clients of all nodes; a client's groups are the names on the path to its node."""
    known = sorted({name for leaf in leaves for name in leaf.path})
    for place in settings_of(recipe).node:
        for name in place.groups:
            if name not in known and name != EVERYBODY:
                raise ConfigError(
                    f"federation.node: {place.name!r} is fed by {name!r}, which is no node here: "
                    f"over a network groups are names of nodes. {nearest(name, known)}"
                )
    size = sum(leaf.clients for leaf in leaves)
    if size > MOST_MEMBERS:
        raise ConfigError(
            f"the nodes have {size} clients: a tree takes {MOST_MEMBERS}. Join with --whole, so "
            "that a node counts as one."
        )
    return of_paths([leaf.path for leaf in leaves for _ in range(leaf.clients)])


def _tokens(leaves: tuple[Leaf, ...]) -> Callable[[int], int]:
    """Return a function from client to tokens: all those of a node are its first client's."""
    silent = ["/".join(leaf.path) for leaf in leaves if not leaf.tokens]
    if silent:
        raise ConfigError(
            "federation.weight = 'tokens': expected nodes that tell how many tokens they have, and "
            f"{', '.join(silent)} did not when the run began: tell_tokens = true in their "
            "policy.toml allows it. Or give places a weight, with federation.node.weight."
        )
    held = {leaf.first: leaf.tokens for leaf in leaves}
    return lambda client: held.get(client, 0)


def homes_of(topology: Topology, leaves: tuple[Leaf, ...], population: int) -> dict[int, Leaf]:
    """Return for each leaf's member number the one node that holds the leaf's text."""
    found = {}
    for place in topology.with_text:
        here = set(topology.clients[place])
        nodes = [leaf for leaf in leaves if leaf.first in here]
        if len(nodes) != 1:
            names = ", ".join("/".join(leaf.path) for leaf in nodes)
            raise ConfigError(
                f"federation: {topology.names[place]!r} is fed by the nodes {names}: over a "
                "network exactly one node feeds a leaf. Give each a leaf of its own."
            )
        found[population + place] = nodes[0]
    return found
