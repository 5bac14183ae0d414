"""A run whose members live at the nodes of a federation.

In:       a resolved recipe, the server's store, the assignments of a run, a transport.
Out:      a `Run`, flat or a tree, whose engine asks nodes.
Promise:  the server computes what a simulation computes, with the same numbers; in a tree each
          place that holds text is trained at exactly one node, wherever relays put it.
Not here: asking (`engine/remote.py`), what a node does (`node_worker.py`), carrying a run out
          (`server_app.py`).

Over a network the groups of a node are its name, and before it those of the relays through which it
is reached: `groups = ["oslo"]` names the node oslo, and `levels` grows the tree that relays make.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Engine, FederationState
from fedlm.corpus.population import Population, of_paths
from fedlm.corpus.store import Store
from fedlm.deploy import registration
from fedlm.deploy.local import bounds_of, told_to_nodes
from fedlm.deploy.replies import Answers
from fedlm.deploy.round_stats import earlier_rounds
from fedlm.engine.buffered import RemoteWaiting
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats
from fedlm.engine.evaluate_messages import SPLITS
from fedlm.engine.messages import MOST_MEMBERS
from fedlm.engine.remote import Leaf, RemoteEngine, leaves_of
from fedlm.engine.remote_evaluation import HeldOutAtNodes, NodeEvaluation
from fedlm.engine.secure_remote import RemoteNodeSums
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.buffered_round import Buffer
from fedlm.federation.leaf import LeafRules
from fedlm.federation.topology import EVERYBODY, Topology
from fedlm.privacy.evaluation import PrivateEvaluation, ScheduledEvaluation
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import hides
from fedlm.privacy.release import splits as release_splits
from fedlm.recipe import parts
from fedlm.recipe.build import flat_run
from fedlm.recipe.federation import NODE_WEIGHTS
from fedlm.recipe.private_evaluation import private_evaluation_at_nodes
from fedlm.recipe.secure_sums import nodes_of, secure_engine
from fedlm.recipe.settings import Recipe
from fedlm.recipe.tree import leaf_rules, settings_of, tree_run
from fedlm.run import Run
from fedlm.secure.terms import Member
from fedlm.wire.dense import dense

ATTEMPT = "secure.json"  # who was in which list of the secure sum that is under way
ANSWERS = "answers"  # of buffered rounds, until they are added
SURVEY = "held_out.json"  # how much held-out text nodes announced


def networked_run(
    recipe: Recipe,
    store: Store,
    assignments: tuple[Assignment, ...],
    path: Path,
    *,
    transport: Any = None,
    quorum: Quorum = Quorum(),  # noqa: B008
    on_stats: Callable[[RoundStats], None] = lambda stats: None,
    run_id: str | None = None,
    counters: Counters | None = None,
    say: Callable[[str], None] = lambda text: None,
    secure_members: tuple[Member, ...] = (),
) -> Run:
    """Return a run whose members live at nodes.

    It is evaluated on held-out text of the local store, or by the nodes if that has none. Nodes
    tell runs apart by `run_id`; without one the run gets a new one. `secure_members` is the
    federation's list, for recipes with secure sums.
    """
    asking = {
        "exact": dense(),
        "quorum": quorum,
        "run": run_id or secrets.token_hex(16),
        "counters": counters or Counters(),
        "say": say,
    }
    nodes = _Nodes(recipe, store, assignments, path, transport, asking, on_stats, secure_members)
    return _flat(nodes) if recipe.federation is None else _tree(nodes)


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a run: who they are, how they are asked to train and to score models."""

    recipe: Recipe
    store: Store  # the server's own; its text is held out, or there is none
    assignments: tuple[Assignment, ...]
    path: Path
    transport: Any
    asking: Mapping[str, Any]  # what questions to train and to score have in common
    on_stats: Callable[[RoundStats], None]
    secure_members: tuple[Member, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The nodes that hold text."""
        return leaves_of(self.assignments)

    @property
    def score_models(self) -> bool:
        """Whether nodes score models, because the server has no held-out text."""
        return not len(self.store)

    def told(self, algorithm: Algorithm) -> str:
        """Return the recipe as every question carries it."""
        return registration.as_told(self.path, told_to_nodes(self.recipe, algorithm))

    def engine(
        self,
        algorithm: Algorithm,
        homes: Mapping[int, Leaf] | None = None,
        at_home: LeafRules | None = None,
    ) -> Engine:
        """Return the engine that asks nodes.

        In a tree `homes` maps each leaf to the holder of its text, and `at_home` has the rules of
        leaves that keep their own models.
        """
        told = self.told(algorithm)
        if self.recipe.wire.secure_nodes and self.transport is not None:
            return self._secure_engine(algorithm, told)
        return RemoteEngine(
            algorithm,
            self.transport,
            self.assignments,
            homes=homes,
            recipe=told,
            seed=self.recipe.run.seed,
            secret_names=hides(algorithm.plan),
            on_stats=self.on_stats,
            bounds=bounds_of(self.recipe, self.store.vocabulary),
            earlier=partial(earlier_rounds, self.path),
            at_home=at_home,
            **self.asking,
        )

    def _secure_engine(self, algorithm: Algorithm, told: str) -> Engine:
        """Return the engine whose totals are secure sums of the members on the list."""
        recipe = self.recipe
        sums = RemoteNodeSums(
            self.transport,
            self.assignments,
            self.secure_members,
            download=algorithm.download,
            nodes=nodes_of(recipe, len(self.secure_members)),
            leaves=recipe.wire.secure_nodes,
            recipe=told,
            seed=recipe.run.seed,
            on_stats=self.on_stats,
            file=None if self.path == Path() else self.path / ATTEMPT,
            **{name: of for name, of in self.asking.items() if name != "exact"},
        )
        return secure_engine(recipe, algorithm, sums)

    def held_out(
        self,
        places: Mapping[int, Leaf],
        population: int,
        algorithm: Algorithm,
        leaf_plan: PrivacyPlan | None = None,
    ) -> HeldOutAtNodes:
        """Return the nodes' held-out text by place, of the splits that a plan allows to tell."""
        plan = leaf_plan or algorithm.plan
        survey = self.path / SURVEY
        kept: dict[str, Any] = {}
        if self.path != Path():
            kept["load"] = partial(registration.load_survey, survey)
            kept["save"] = partial(registration.save_survey, survey)
        return HeldOutAtNodes(
            transport=self.transport,
            places=places,
            in_tree=self.recipe.federation is not None,
            recipe=self.told(algorithm),
            population=population,
            splits=release_splits(plan, SPLITS),
            **kept,
            **self.asking,
        )


# ---- a flat federation ---------------------------------------------------------------------


def _flat(nodes: _Nodes) -> Run:
    recipe = nodes.recipe
    members = of_paths([(each.name,) for each in nodes.assignments for _ in range(each.clients)])

    def waiting(engine: Any, buffer: Buffer) -> RemoteWaiting:
        back = recipe.run.checkpoint_every * recipe.run.keep_checkpoints
        spool = Answers(nodes.path / ANSWERS, rounds_kept=buffer.largest_staleness + back)
        return RemoteWaiting(engine, spool, buffer.grace)

    def evaluation(algorithm: Algorithm) -> NodeEvaluation:
        return NodeEvaluation(
            held_out=nodes.held_out(dict(enumerate(nodes.leaves)), members.size, algorithm),
            params=lambda state: state.params,
            watch_split=("validation", "test"),
        )

    def private_evaluation(algorithm: Algorithm) -> ScheduledEvaluation | None:
        @cache
        def text() -> HeldOutAtNodes:
            return nodes.held_out(dict(enumerate(nodes.leaves)), members.size, algorithm)

        def ask(state: FederationState, made: PrivateEvaluation) -> dict[str, np.ndarray]:
            return text().noisy_sums(int(state.round), state.params, made.check_noisy)

        vocabulary = nodes.store.vocabulary
        return private_evaluation_at_nodes(recipe, vocabulary, algorithm.plan, ask)

    return flat_run(
        recipe,
        nodes.store,
        out=nodes.path,
        members=members,
        engine=nodes.engine,
        evaluation=evaluation if nodes.score_models else None,
        waiting=waiting,
        private_evaluation=private_evaluation,
    )


# ---- a tree of places ----------------------------------------------------------------------


def _tree(nodes: _Nodes) -> Run:
    recipe, leaves = nodes.recipe, nodes.leaves
    members = _members(recipe, leaves)
    rules = leaf_rules(recipe, parts.model_spec(recipe, nodes.store.vocabulary).shapes())
    if rules.layers_stay and rules.keeps and not nodes.score_models:
        nodes.asking["say"](
            "personal layers stay at their nodes (federation.temperature = 0): figures on the "
            "server's own text are of models with the layers that all began with."
        )

    def engine(algorithm: Algorithm, topology: Topology) -> Engine:
        homes = homes_of(topology, leaves, members.size)
        return nodes.engine(algorithm, homes, rules if rules.keeps else None)

    reasons: list[Mapping[str, str]] = []  # why nodes told nothing of their held-out text

    def text(algorithm: Algorithm, topology: Topology, plan: PrivacyPlan | None) -> HeldOutAtNodes:
        homes = homes_of(topology, leaves, members.size)
        order = sorted(homes, key=lambda number: homes[number].first)
        places = {number - members.size: homes[number] for number in order}
        made = nodes.held_out(places, members.size, algorithm, leaf_plan=plan)
        reasons.append(made.reasons)
        return made

    def nothing_held(topology: Topology, held: Mapping[str, Any]) -> str:
        found = set().union(*(rows.keys() for rows in held.values()))
        missing = [topology.names[n] for n in topology.with_text if n not in found]
        refused = [f"{name}: {why}" for told in reasons for name, why in told.items()]
        if refused:
            return (
                f"no figures of held-out text from {', '.join(missing)}, because a node refused: "
                + " ".join(refused)
            )
        if nodes.score_models:
            return (
                f"the nodes of {', '.join(missing) or 'every place in one split'} hold out no "
                "text that they may tell figures of: prepare their stores with a larger "
                "--validation or --test-clients, or lower smallest_evaluation in their policies."
            )
        return (
            f"the server's store {nodes.store.path} has no held-out text of "
            f"{', '.join(missing) or 'every node in one split'}: a held-out client belongs to the "
            "leaf whose node has the name of one of its groups."
        )

    return tree_run(
        recipe,
        nodes.store,
        out=nodes.path,
        members=members,
        engine=engine,
        text=text if nodes.score_models else None,
        nothing_held=nothing_held,
        tokens=_tokens(leaves) if NODE_WEIGHTS[settings_of(recipe).weight] else None,
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
    """Return a function from client to tokens; a node's tokens count for its first client."""
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
