"""A tree of places over a federation's nodes.

In:       a recipe with a `[federation]` table, the seats of a run.
Out:      what `TreeExperiment` is, with nodes in the places that hold text.
Promise:  the root computes the tree as a simulation does, with the same numbers; each place that
          holds text is trained at exactly one node, wherever relays put it.
Not here: asking (`engine/remote.py`), what a node does (`client_app.py`).

Over a network the groups of a node are its name, and before it those of the relays through which it
is reached: `groups = ["oslo"]` names the node oslo, and `levels` grows the tree that relays make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Engine
from fedlm.deploy.local import redacted
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats
from fedlm.engine.messages import MOST_MEMBERS
from fedlm.engine.remote import Leaf, RemoteEngine, leaves_of
from fedlm.federation.topology import EVERYBODY, Topology
from fedlm.recipe.branches import TreeExperiment
from fedlm.recipe.federation import topology_of
from fedlm.wire.dense import dense


@dataclass(frozen=True)
class DeployedTree(TreeExperiment):
    """A tree whose text is at nodes; the store here holds held-out text alone."""

    post: Any = None
    seats: tuple[Assignment, ...] = ()
    patience: Quorum = field(default_factory=Quorum)
    tell: Callable[[RoundStats], None] = lambda tally: None

    @property
    def population(self) -> int:
        return sum(seat.clients for seat in self.seats)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves_of(self.seats)

    @cached_property
    def topology(self) -> Topology:
        known = sorted({name for leaf in self.leaves for name in leaf.path})
        for place in self.settings.node:
            for name in place.groups:
                if name not in known and name != EVERYBODY:
                    raise ConfigError(
                        f"federation.node: {place.name!r} is fed by {name!r}, which is no node "
                        f"here: over a network groups are names of nodes. {nearest(name, known)}"
                    )
        if self.population > MOST_MEMBERS:
            raise ConfigError(
                f"the nodes have {self.population} clients: a tree takes {MOST_MEMBERS}. Join with "
                "--whole, so that a node counts as one."
            )
        groups = [leaf.path for leaf in self.leaves for _ in range(leaf.clients)]
        return topology_of(self.settings, groups)

    @cached_property
    def homes(self) -> dict[int, Leaf]:
        """The number under which each place trains, to the one node that holds its text."""
        found = {}
        for place in self.topology.with_text:
            here = set(self.topology.clients[place])
            nodes = [leaf for leaf in self.leaves if leaf.first in here]
            if len(nodes) != 1:
                names = ", ".join("/".join(leaf.path) for leaf in nodes)
                raise ConfigError(
                    f"federation: {self.topology.names[place]!r} is fed by the nodes {names}: over "
                    "a network exactly one node feeds a place. Give each a place of its own."
                )
            found[self.population + place] = nodes[0]
        return found

    def splits(self) -> list[str]:
        """The first split in which every place has held-out text at the server."""
        try:
            return super().splits()
        except ConfigError:
            held = set().union(*(rows.keys() for rows in self._by_split.values()))
            missing = [self.topology.names[n] for n in self.topology.with_text if n not in held]
            raise ConfigError(
                f"the server's store {self.store.path} has no held-out text of "
                f"{', '.join(missing) or 'every place in one split'}: a held-out client belongs to "
                "the place whose node has the name of one of its groups."
            ) from None

    @cached_property
    def engine(self) -> Engine:
        return RemoteEngine(
            self.algorithm,
            self.post,
            self.seats,
            homes=self.homes,
            recipe=redacted(self.recipe),
            seed=self.recipe.run.seed,
            exact=dense(),
            patience=self.patience,
            tell=self.tell,
        )
