"""A round of a tree: training at the nodes that hold text, and the way up.

In:       the rules, an engine, a `TreeState`.
Out:      the state after the round, and the facts of the round.
Promise:  nothing leaves a leaf but what its rules allow: under leaf noise a clipped change with
          noise; where key layers are personal, no key layer. A place that did not answer stays as
          it was before the round, and so does a federation none of whose places came.
Not here: the way down, and what a node carries (`tree.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedlm.cohort.sampling import draw
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import (
    Cohort,
    Engine,
    History,
    OptState,
    Params,
    ServerMethod,
    Start,
    Total,
    Update,
)
from fedlm.federation import layer_attention
from fedlm.federation.layer_attention import Key, Residual
from fedlm.federation.member import ClientState
from fedlm.federation.round import private_seed, server_half, start_of_round
from fedlm.federation.tree import (
    Backbone,
    Descent,
    TreeConfig,
    TreeState,
    backbone_of,
    change_of,
    join,
    join_totals,
    kept_waiting,
    key_of,
    length,
)
from fedlm.privacy.clip import clip
from fedlm.privacy.noise import add_scaled, standard_normal

Facts = dict[str, Any]


class Turn:
    """One round; made for it and thrown away after it."""

    def __init__(self, rules: TreeConfig, engine: Engine, state: TreeState) -> None:
        self.rules, self.engine, self.state = rules, engine, state
        self.round = int(state.round)
        self.nodes = list(state.nodes)
        self.down = Descent(rules, state)
        self.starts: dict[int, Params] = {}  # where each node began this round
        self.sent: dict[int, Backbone] = {}  # the backbone that each node shows its parent
        self.done: dict[int, Update | Total] = {}  # without the change
        self.moved: dict[int, float] = {}  # how long it was
        self.missed: set[int] = set()  # places that were asked to train and did not answer
        self.silent: set[int] = set()  # those, and federations that nobody reported to
        self.emitted: dict[int, Sequence[Residual]] = {}
        self.up_bytes = [0] * len(rules.topology)
        self.client_bytes = [0, 0]  # up and down, between nodes and clients that are members
        self.attention: dict[int, dict[str, np.ndarray]] = {}
        self.agreement: dict[int, float] = {}

    def __call__(self) -> tuple[TreeState, Facts]:
        topology = self.rules.topology
        for level in topology.levels():
            for node in level:
                self.down.receive(node)
                self._begin(node)
            if self.rules.order == "levels":
                self._train([node for node in level if topology.clients[node]])
        if self.rules.order == "together":
            self._train(list(topology.with_text))
        for node in reversed(range(len(topology))):
            self._rise(node)
        return self._after(), self._facts()

    def _begin(self, node: int) -> None:
        params = self.starts[node] = self.down.params[node]
        branch = eqx.tree_at(lambda b: b.params, self.nodes[node], params)
        if branch.anchor is not None and self.rules.receives(node, self.round):
            branch = eqx.tree_at(lambda b: b.anchor, branch, backbone_of(self.rules, params))
        self.nodes[node] = branch

    # ---- training ------------------------------------------------------------------------

    def _train(self, nodes: list[int]) -> None:
        """All these nodes, as one cohort where their text is pooled."""
        if not nodes:
            return
        if not self.rules.pooled:
            for node in nodes:
                self._train_federation(node)
            return
        first = self.rules.clients
        cohort = Cohort(self.round, np.asarray([first + node for node in nodes]))
        starts = [Start(self.starts[node], client_state=self._memory(node)) for node in nodes]
        self.missed.update(nodes)
        # A node is not far from its own text: what travels is counted between nodes.
        for member, update, *_ in self.engine.updates(starts, cohort):
            node = member - first
            self.missed.remove(node)
            self._remember(node, update)
            self.done[node] = _without_change(update)
            self.moved[node] = length(update.delta)
            self._trained(node, jax.tree.map(np.add, self.starts[node], update.delta))
            if self.rules.hidden:
                self._hide(node, update)

    def _memory(self, node: int) -> ClientState | None:
        memory = self.nodes[node].local
        return None if memory is None else ClientState(memory, None)

    def _remember(self, node: int, update: Update) -> None:
        branch = self.nodes[node]
        if branch.local is not None:
            self.nodes[node] = eqx.tree_at(lambda b: b.local, branch, update.client_state.own)

    def _train_federation(self, node: int) -> None:
        """A node whose clients are members: the flat round, on its part of the clients."""
        algorithm, inner = self.rules.algorithms[node], self.nodes[node].federation
        assert algorithm is not None and inner is not None
        state = eqx.tree_at(
            lambda s: s.params, inner, self.starts[node], is_leaf=lambda x: x is None
        )
        seed = self.rules.seed if algorithm.plan is None else private_seed(state)
        # By its place among those with text: the only one draws as a flat federation does.
        place = self.rules.topology.with_text.index(node)
        rng = generator_for(seed, "cohort", round=self.round, member=place)
        history = History(*(np.asarray(part) for part in state.history))
        members = draw(algorithm.sampling, rng, self.round, history)
        clients = np.asarray(self.rules.topology.clients[node])
        cohort = self.engine.prepare(self.round, clients[members])
        start = start_of_round(algorithm, state, members)
        total, upload, download = self.engine.total(start, cohort)
        self.client_bytes[0] += upload
        self.client_bytes[1] += download
        after = server_half(algorithm, state, total, members)
        self.done[node] = _without_change(total)
        self._trained(node, jax.device_get(after.params))
        after = eqx.tree_at(lambda s: s.params, after, None)
        self.nodes[node] = eqx.tree_at(
            lambda b: b.federation, self.nodes[node], after, is_leaf=lambda x: x is inner
        )

    def _trained(self, node: int, params: Params) -> None:
        params = self.rules.rest(node, params)
        self.nodes[node] = eqx.tree_at(lambda b: b.params, self.nodes[node], params)
        self.down.params[node] = params  # what children receive in the order of levels

    def _hide(self, node: int, update: Update) -> None:
        """What others may know of a leaf's work: its change, clipped, with noise."""
        rules, short = self.rules, clip(update, jnp.float32(self.rules.clip))
        delta = jax.device_get(short.delta)
        if rules.noise:
            secret = private_seed(self.state)  # type: ignore[arg-type]
            key = key_for(secret, "noise", round=self.round, member=node)
            noise = standard_normal(key, delta)
            delta = jax.device_get(add_scaled(delta, noise, rules.noise * rules.clip))
        public = jax.tree.map(np.add, self.starts[node], delta)
        self.sent[node] = backbone_of(rules, public)
        moved = key_of(rules, delta)
        told = {k: np.asarray(v) + moved[k] for k, v in (self.nodes[node].told or {}).items()}
        self.down.public[node] = told
        self.nodes[node] = eqx.tree_at(lambda b: b.told, self.nodes[node], told)

    # ---- up --------------------------------------------------------------------------------

    def _rise(self, node: int) -> None:
        rules = self.rules
        due = [c for c in rules.topology.children[node] if rules.reports(c, self.round)]
        came = [child for child in due if child not in self.silent]
        if not came and (node in self.missed or (due and node not in self.done)):
            self._leave_out(node)
            return
        if rules.topology.children[node]:
            self._aggregate(node, came)
        elif rules.residuals:
            known = self.down.known(node)
            self.emitted[node] = [Residual(layer, node, values) for layer, values in known.items()]
        self.sent.setdefault(node, backbone_of(rules, self.nodes[node].params))
        if node and rules.reports(node, self.round):
            self.up_bytes[node] += rules.cost(self.sent[node])
            if not rules.personal:
                self.up_bytes[node] += rules.cost(self.down.known(node))
                if rules.topology.children[node]:  # a leaf's layers are its residuals
                    self.up_bytes[node] += sum(
                        rules.cost(r.values) for r in self.emitted.get(node, ())
                    )

    def _leave_out(self, node: int) -> None:
        """Puts a node back to where it was: what was sent to it has not been received."""
        self.silent.add(node)
        self.nodes[node] = self.state.nodes[node]
        self.down.params[node] = self.nodes[node].params
        self.down.attention.pop(node, None)
        self.down.down_bytes[node] = 0

    def _aggregate(self, node: int, came: Sequence[int]) -> None:
        """The children's mean change into the backbone, their key layers into its own."""
        rules, branch = self.rules, self.nodes[node]
        if not came:
            return
        shares = [rules.shares[child] for child in came]
        changes = [self._change(child) for child in came]
        base = backbone_of(rules, branch.params)
        if rules.order == "together" and node in self.done:
            base = backbone_of(rules, self.starts[node])
            changes.append(change_of(backbone_of(rules, branch.params), base))
            shares.append(float(np.mean(shares)))
        change = _mean(changes, shares)
        self.agreement[node] = _agreement(change, changes, shares)
        backbone, memory = _step(rules.servers[node], base, branch.memory, change)
        key = self._meet(node, came)
        params = rules.rest(node, join(rules, branch.params, jax.device_get(backbone), key))
        self.nodes[node] = eqx.tree_at(
            lambda b: (b.params, b.memory), branch, (params, memory), is_leaf=lambda x: x is None
        )
        self.down.params[node] = params
        if rules.hidden:
            self.down.public[node] = key

    def _change(self, child: int) -> Backbone:
        anchor = self.nodes[child].anchor
        before = backbone_of(self.rules, self.starts[child]) if anchor is None else anchor
        return change_of(self.sent[child], before)

    def _meet(self, node: int, came: Sequence[int]) -> Key:
        """A node's own layers are those it trained, or the mean of its children's."""
        rules, known = self.rules, self.down.known(node)
        own = known if node in self.done or node in self.missed else None
        if not known or rules.personal:
            return known
        theirs = [self.down.known(child) for child in came]
        own = own or layer_attention.mean(theirs, [rules.shares[child] for child in came])
        met = layer_attention.attend(own, theirs, self.down.origin, rules.temperature)
        self.attention[node] = met.weights
        if rules.residuals:
            candidates = [r for child in came for r in self.emitted.get(child, ())]
            self.emitted[node] = (
                layer_attention.worst(candidates, met.key, self.down.origin, rules.residuals)
                if node
                else candidates
            )
        return met.key

    # ---- after -----------------------------------------------------------------------------

    def _after(self) -> TreeState:
        nodes = []
        for node, branch in enumerate(self.nodes):
            if branch.told is not None and not self.rules.topology.clients[node]:
                branch = eqx.tree_at(lambda b: b.told, branch, dict(self.down.public[node]))
            nodes.append(branch)
        waiting: dict[str, Any] = self.state.waiting
        whose: Any = self.state.waiting_from
        if 0 in self.emitted:  # else nobody reported to the root
            waiting, whose = kept_waiting(self.state, self.emitted[0])
        return TreeState(
            nodes=tuple(nodes),
            origin=self.state.origin,
            waiting=dict(waiting),
            waiting_from=jnp.asarray(whose),
            secret=self.state.secret,
            round=self.state.round + 1,
        )

    def _facts(self) -> Facts:
        """Sums over all that trained, and a line a node."""
        names, sums = self.rules.topology.names, join_totals(list(self.done.values()))
        return {
            "sums": sums,
            "upload_bytes": sum(self.up_bytes) + self.client_bytes[0],
            "download_bytes": sum(self.down.down_bytes) + self.client_bytes[1],
            "nodes": {name: self._node_facts(node) for node, name in enumerate(names)},
            "routes": [
                {
                    "layer": sent.residual.layer,
                    "from": names[sent.residual.origin],
                    "to": names[sent.to],
                    "likeness": {names[c]: round(v, 4) for c, v in sent.likeness.items()},
                }
                for sent in self.down.routed
            ],
        }

    def _node_facts(self, node: int) -> Facts:
        facts: Facts = {"up_bytes": self.up_bytes[node], "down_bytes": self.down.down_bytes[node]}
        done = self.done.get(node)
        if done is not None:
            facts["loss"] = float(done.nats) / max(float(done.tokens), 1.0)
        if node in self.silent or node in self.missed:
            facts["missed"] = True
        if node in self.moved:
            facts["change"] = self.moved[node]
        for name, found in (("entropy_down", self.down.attention), ("entropy_up", self.attention)):
            if node in found:
                facts[name] = layer_attention.entropy(found[node])
        if node in self.down.attention:
            shares = [float(share[0]) for share in self.down.attention[node].values()]
            facts["self_weight"] = float(np.mean(shares))
        if node in self.agreement:
            facts["agreement"] = self.agreement[node]
            facts["backbone_norm"] = length(backbone_of(self.rules, self.nodes[node].params))
        return facts


@eqx.filter_jit
def _step(
    server: ServerMethod, params: Backbone, memory: OptState, change: Backbone
) -> tuple[Backbone, OptState]:
    return server.step(params, memory, change)


def _without_change(done: Any) -> Any:
    """What a member tells of its work besides the change, which is as long as a model."""
    return eqx.tree_at(lambda d: (d.delta, d.client_state), done, (None, None), is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _mean(changes: list[Backbone], shares: list[float]) -> Backbone:
    part = np.asarray(shares, np.float32) / np.float32(sum(shares))
    return tuple(
        sum((x * p for x, p in zip(leaves[1:], part[1:], strict=True)), leaves[0] * part[0])
        for leaves in zip(*changes, strict=True)
    )


def _agreement(change: Backbone, changes: list[Backbone], shares: list[float]) -> float:
    """The length of the mean change over the mean length: one if all agree, near zero if none."""
    mean = float(np.average([length(c) for c in changes], weights=shares))
    return length(change) / mean if mean > 0 else 1.0


def turn(rules: TreeConfig, engine: Engine, state: TreeState) -> tuple[TreeState, Facts]:
    """One round of the whole tree."""
    return Turn(rules, engine, state)()
