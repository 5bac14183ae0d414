"""A federation of federations: what a node carries, and one round from the root and back.

In:       the rules of a federation, an engine, a `TreeState`.
Out:      the next `TreeState`, and what happened.
Promise:  a federation looks like a member from above: it receives a backbone, returns a change.
          A tree of one place is the flat federation, by the same functions. What survives a round
          is in `TreeState`.
Not here: attention between nodes (`peers.py`), the shape (`topology.py`), training (`engine`).

Down, level by level: a node takes its parent's backbone, mixes its key layers with its parent's
and with residuals that were sent to it, and trains if it holds text. Up, from the deepest: a
node moves its backbone by its children's mean change, through an optimiser whose memory is its
own, mixes its key layers with theirs, and sends up the layers that fit it worst. The root sends
those down again in the next round, each to the subtree that is most like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from fedlm.core.types import OptState, Params, ServerMethod, Total, Update
from fedlm.federation import layer_attention
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.layer_attention import Key, Residual
from fedlm.federation.round import NodeState, init_node
from fedlm.federation.topology import Topology

# Models of nodes rest on the host; the device holds those that train.
Backbone = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Everything that a round of a tree needs to know."""

    topology: Topology
    layers: tuple[str | None, ...]  # of each leaf of the model, its key layer
    seed: int
    temperature: float
    compare: Literal["start", "root"]  # what changes of key layers are measured from
    residuals: int  # how many a layer each node sends up; 0 is none
    every: int  # a federation reports to the one above it once in so many of its rounds
    order: Literal["levels", "together"]
    servers: tuple[ServerMethod, ...]  # what each node does with its children's mean change
    shares: tuple[float, ...]  # how much each node counts at its parent
    pooled: bool  # a node's text is one member, not a federation of clients
    init_memory: (
        Callable[[Params], Any] | None
    )  # what an optimiser remembers at first, where it is kept
    rest: Callable[[int, Params], Params]  # where the model of a node lies when nobody uses it
    clients: int  # how many members there are below the pooled ones
    algorithms: tuple[Algorithm | None, ...]  # of nodes that are federations of clients
    clip: float
    noise: float
    edge_bytes: Callable[[Any], int]

    @property
    def personal(self) -> bool:
        """Whether key layers never leave their node."""
        return self.temperature == 0

    @property
    def hidden(self) -> bool:
        """Whether what leaves a leaf is clipped, and perhaps noisy."""
        return self.clip > 0

    def cost(self, part: Any) -> int:
        """The bytes that a part of a model takes between two nodes; nothing takes none."""
        return self.edge_bytes(part) if jax.tree.leaves(part) else 0

    def receives(self, node: int, round: int) -> bool:
        return round % self.every ** self.topology.heights[node] == 0

    def reports(self, node: int, round: int) -> bool:
        return (round + 1) % self.every ** self.topology.heights[node] == 0


class Branch(eqx.Module):
    """What a node carries from round to round."""

    params: Params
    memory: OptState  # of the optimiser that moves its backbone, where it has children
    anchor: Backbone | None  # the backbone as received, where it reports only now and then
    local: Any  # what the optimiser of its own training remembers, where that is kept
    federation: NodeState | None  # of its clients, without parameters; None if text is pooled
    told: dict[str, Any] | None  # its key layers as others know them, where changes are hidden


class TreeState(eqx.Module):
    """What a tree carries from round to round; nothing else survives."""

    nodes: tuple[Branch, ...]
    origin: dict[str, Any]  # the key layers that all began with
    waiting: dict[str, Any]  # residuals at the root, a row each, for the next round
    waiting_from: Int[Array, "layers rows"]  # whose they are; -1 is nobody's
    secret: UInt32[Array, "4"]  # what private draws are made from
    round: Int[Array, ""]

    @property
    def params(self) -> tuple[Params, ...]:
        """The model of every node, the root's first."""
        return tuple(node.params for node in self.nodes)


# ---- the two parts of a model --------------------------------------------------------------


def backbone_of(rules: TreeConfig, params: Params) -> Backbone:
    """The leaves that a federation shares."""
    leaves = jax.tree.leaves(params)
    return tuple(x for x, layer in zip(leaves, rules.layers, strict=True) if layer is None)


def key_of(rules: TreeConfig, params: Params) -> Key:
    """The key layers as vectors."""
    parts: dict[str, list[np.ndarray]] = {}
    for leaf, layer in zip(jax.tree.leaves(params), rules.layers, strict=True):
        if layer is not None:
            parts.setdefault(layer, []).append(np.asarray(leaf).ravel())
    return {layer: np.concatenate(found) for layer, found in parts.items()}


def join(rules: TreeConfig, like: Params, backbone: Backbone, key: Key) -> Params:
    """A model of two parts."""
    leaves, structure = jax.tree.flatten(like)
    shared, used = iter(backbone), dict.fromkeys(key, 0)
    made = []
    for leaf, layer in zip(leaves, rules.layers, strict=True):
        if layer is None:
            made.append(next(shared))
        else:
            at = used[layer]
            used[layer] = at + leaf.size
            made.append(key[layer][at : at + leaf.size].reshape(leaf.shape))
    return jax.tree.unflatten(structure, made)


# ---- before the first round ----------------------------------------------------------------


def init_tree(
    rules: TreeConfig, params: Params, secret: bytes = bytes(16), secrets: Sequence[bytes] = ()
) -> TreeState:
    """All nodes begin with the same model."""
    params = jax.device_get(params)
    topology, origin = rules.topology, key_of(rules, params)
    nodes = tuple(
        _fresh(rules, node, params, secrets[node] if secrets else bytes(16))
        for node in range(len(topology))
    )
    rows = rules.residuals * len(topology.children[0])
    return TreeState(
        nodes=nodes,
        origin=dict(origin),
        waiting={layer: np.zeros((rows, v.size), v.dtype) for layer, v in origin.items()},
        waiting_from=jnp.full((len(origin), rows), -1, jnp.int32),
        secret=jnp.asarray(np.frombuffer(secret, "<u4").astype(np.uint32)),
        round=jnp.int32(0),
    )


def _fresh(rules: TreeConfig, node: int, params: Params, secret: bytes) -> Branch:
    topology, backbone = rules.topology, backbone_of(rules, params)
    algorithm = rules.algorithms[node]
    inner = None
    if algorithm is not None and topology.clients[node]:
        inner = eqx.tree_at(lambda s: s.params, init_node(algorithm, params, secret), None)
    return Branch(
        params=params,
        memory=rules.servers[node].init(backbone) if topology.children[node] else (),
        anchor=backbone if rules.every > 1 and topology.heights[node] and node else None,
        local=jax.device_get(rules.init_memory(params)) if rules.init_memory else None,
        federation=inner,
        told=dict(key_of(rules, params)) if rules.hidden else None,
    )


# ---- down ----------------------------------------------------------------------------------


class Descent:
    """One way down the tree: what each node has received, and what was sent to whom."""

    def __init__(self, rules: TreeConfig, state: TreeState) -> None:
        self.rules, self.round = rules, int(state.round)
        begun = {layer: np.asarray(v) for layer, v in state.origin.items()}
        self.origin = begun if rules.compare == "start" else key_of(rules, state.nodes[0].params)
        self.params = [node.params for node in state.nodes]
        self.public = {
            node: {layer: np.asarray(v) for layer, v in branch.told.items()}
            for node, branch in enumerate(state.nodes)
            if branch.told is not None
        }
        self.inbox: dict[int, list[Residual]] = {0: waiting_of(state)}
        self.attention: dict[int, dict[str, np.ndarray]] = {}
        self.routed: list[layer_attention.Routed] = []
        self.down_bytes = [0] * len(rules.topology)

    def known(self, node: int) -> Key:
        """A node's key layers as others know them."""
        found = self.public.get(node)
        return key_of(self.rules, self.params[node]) if found is None else found

    def receive(self, node: int) -> None:
        """A node takes its parent's backbone, and mixes its key layers with its parent's."""
        rules, parent = self.rules, self.rules.topology.parents[node]
        came = self.inbox.get(node, []) if rules.receives(node, self.round) else []
        if parent is None or not rules.receives(node, self.round):
            self._pass_on(node, came)
            return
        backbone = backbone_of(rules, self.params[parent])
        own = key_of(rules, self.params[node])
        self.down_bytes[node] += rules.cost(backbone)
        if own and not rules.personal:
            met = layer_attention.attend(
                own, [self.known(parent)], self.origin, rules.temperature, came
            )
            # Who measures from the root needs to know its layers; a child of the root does.
            known = 2 if rules.compare == "root" and parent else 1
            self.down_bytes[node] += known * rules.cost(own)
            self.down_bytes[node] += sum(rules.cost(r.values) for r in came)
            self.attention[node], own = met.weights, met.key
        made = join(rules, self.params[node], backbone, own)
        self.params[node] = rules.rest(node, made)
        if rules.hidden and not rules.topology.clients[node]:
            self.public[node] = own
        self._pass_on(node, came)

    def _pass_on(self, node: int, came: Sequence[Residual]) -> None:
        """Residuals that came go on to the child that is most like them."""
        rules, homes = self.rules, {}
        for child in rules.topology.children[node] if came else ():
            if rules.receives(child, self.round):
                homes[child] = (self.known(child), rules.topology.below(child))
        for sent in layer_attention.route(came, homes, self.origin):
            self.inbox.setdefault(sent.to, []).append(sent.residual)
            self.routed.append(sent)


def waiting_of(state: TreeState) -> list[Residual]:
    """The residuals that the root will send down."""
    found = []
    whose = np.asarray(state.waiting_from)
    for row, (layer, values) in enumerate(sorted(state.waiting.items())):
        for place, node in enumerate(whose[row]):
            if node >= 0:
                found.append(Residual(layer, int(node), np.asarray(values)[place]))
    return found


def kept_waiting(state: TreeState, residuals: Sequence[Residual]) -> tuple[Key, np.ndarray]:
    """Residuals as the rows of arrays whose shapes never change."""
    values = {layer: np.zeros(v.shape, v.dtype) for layer, v in sorted(state.waiting.items())}
    whose = np.full(state.waiting_from.shape, -1, np.int32)
    for row, (layer, rows) in enumerate(values.items()):
        here = [r for r in residuals if r.layer == layer][: len(rows)]
        for place, residual in enumerate(here):
            rows[place], whose[row, place] = residual.values, residual.origin
    return values, whose


def received(rules: TreeConfig, state: TreeState) -> list[Params]:
    """The models with which the nodes would begin the next round."""
    descent = Descent(rules, state)
    for node in range(len(rules.topology)):
        descent.receive(node)
    return descent.params


def join_totals(parts: Sequence[Total | Update]) -> dict[str, float]:
    """What all nodes that trained did together."""
    names = ("refused", "steps", "tokens", "unclipped", "nats")
    sums = {name: float(sum(float(getattr(p, name)) for p in parts)) for name in names}
    sums["members"] = float(sum(float(getattr(p, "members", 1.0)) for p in parts))
    return sums


def change_of(after: Backbone, before: Backbone) -> Backbone:
    """What a federation or a leaf changed in a backbone that it was given."""
    return tuple(np.subtract(x, y) for x, y in zip(after, before, strict=True))


def length(part: Any) -> float:
    """The L2 norm of a part of a model."""
    return math.sqrt(sum(float(np.vdot(x, x)) for x in jax.tree.leaves(part)))
