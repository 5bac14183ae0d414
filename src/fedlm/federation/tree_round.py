"""One round of a tree of federations: down, training, and up again.

In:       a `TreeConfig`, an engine, a `TreeState`.
Out:      the next `TreeState`, and what each node received, trained and reported.
Promise:  a federation looks like a member from above: it receives a backbone and returns a change.
          A tree of one node is the flat federation, by the same functions. Every step is a function
          of the state and of results that never change again; what survives a round is in
          `TreeState`. Nothing leaves a leaf but what the config allows: under leaf noise a clipped
          change with noise; at temperature zero, no personal layer. A node that did not answer
          stays as it was before the round, and so does a federation none of whose children came.
Not here: attention between layers (`layer_attention.py`), the shape (`topology.py`), training
          (`engine`), metrics and rounds one after another (`tree_rounds.py`).

Down, level by level: a node takes its parent's backbone, and mixes its personal layers with its
parent's and with residuals that were sent to it. Nodes that hold text train. Up, from the deepest:
a node moves its backbone by its children's mean change, through an optimiser whose memory is its
own, mixes its personal layers with theirs, and sends up the layers that fit it worst. The root
sends those down again in the next round, each to the subtree that is most like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32
from numpy.typing import DTypeLike

from fedlm.cohort.sampling import draw
from fedlm.core.keys import generator_for
from fedlm.core.types import (
    Cohort,
    Engine,
    OptState,
    Params,
    PyTree,
    ServerMethod,
    Start,
    Total,
    Update,
    Vector,
)
from fedlm.federation import layer_attention
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.layer_attention import (
    Backbone,
    Layers,
    LayersOf,
    Parts,
    Residual,
    Routed,
    attend,
    length,
    mean_change,
    parts_of,
)
from fedlm.federation.leaf import LeafRules, LeafStart, leaving
from fedlm.federation.member import ClientState
from fedlm.federation.round import (
    NodeState,
    init_node,
    private_seed,
    server_half,
    start_of_round,
)
from fedlm.federation.topology import Topology

Compare = Literal["start", "root"]
Order = Literal["levels", "together"]


def add_change(node: int, part: PyTree, change: PyTree) -> PyTree:
    """Return a part of a node after a change, in memory."""
    return jax.tree.map(np.add, part, change)


def rows_in_memory(
    shape: tuple[int, int], dtype: DTypeLike, given: Sequence[Parts]
) -> Float[np.ndarray, "rows width"]:
    """Return a matrix whose first rows are given, each in parts; further rows are zero."""
    made = np.zeros(shape, dtype)
    for row, parts in zip(made, given, strict=False):
        np.concatenate(parts, out=row)
    return made


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Every choice that a round of a tree needs."""

    topology: Topology
    personal_layers: tuple[str | None, ...]  # of each leaf of the model; None is the backbone
    seed: int
    temperature: float
    compare: Compare  # what changes of personal layers are measured from
    residuals: int  # how many per layer each node sends up; 0 is none
    sync_every: int  # rounds of a federation to one report to the federation above it
    order: Order  # parents train before their children receive, or not
    servers: tuple[ServerMethod, ...]  # what each node does with its children's mean change
    weights: tuple[float, ...]  # how much each node counts at its parent
    pool_clients: bool  # a node's text is one member, not a federation of clients
    init_memory: Callable[[Params], Any] | None  # of a leaf's optimiser, where that is kept
    rest: Callable[[int, PyTree], PyTree]  # moves a part of a node to where it waits for its use
    clients: int  # how many there are; beyond their numbers, `clients + node` is a pooled node
    algorithms: tuple[Algorithm | None, ...]  # of nodes that are federations of clients
    clip_norm: float  # the longest change that leaves a leaf; 0 is any
    noise_multiplier: float  # on what leaves a leaf, in multiples of the clip norm
    edge_bytes: Callable[[Any], int]
    # `rest` of a part after a change: the sum need not be in memory whole.
    rest_sum: Callable[[int, PyTree, PyTree], PyTree] = add_change
    # Whether what pooled text is sent and sends counts: with codecs it is somewhere else.
    counts_frames: bool = False
    # Stores a matrix, given by its first rows (the others are zero), where `rest` stores models.
    rest_rows: Callable[[Any, Any, Sequence[Parts]], np.ndarray] = rows_in_memory
    # Whether nodes with text keep their own models elsewhere: states hold what others know of them.
    models_at_home: bool = False

    @property
    def leaf(self) -> LeafRules:
        """The rules by which a leaf mixes layers and lets a change leave."""
        return LeafRules(
            personal_layers=self.personal_layers,
            temperature=self.temperature,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
        )

    @property
    def layers_stay(self) -> bool:
        """Whether personal layers never leave their node."""
        return self.leaf.layers_stay

    @property
    def hides(self) -> bool:
        """Whether what leaves a leaf is clipped, and perhaps noisy."""
        return self.leaf.hides

    def backbone(self, params: Params) -> Backbone:
        """Return the leaves of a model that a federation shares."""
        return layer_attention.backbone_of(self.personal_layers, params)

    def personal(self, params: Params) -> Layers:
        """Return the personal layers of a model as vectors."""
        return layer_attention.personal_of(self.personal_layers, params)

    def layers(self, params: Params) -> LayersOf:
        """Return the personal layers of a model, each made when it is asked for."""
        return LayersOf(self.personal_layers, params)

    def join(self, like: Params, backbone: Backbone, personal: Layers) -> Params:
        """Return the model that a backbone and personal layers make up."""
        return layer_attention.join_layers(self.personal_layers, like, backbone, personal)

    def cost(self, part: PyTree) -> int:
        """Return the bytes that a part of a model takes between two nodes; zero if it is empty."""
        return self.edge_bytes(part) if jax.tree.leaves(part) else 0

    def receives(self, node: int, round: int) -> bool:
        """Return whether a node receives from its parent in a round."""
        return round % self.sync_every ** self.topology.heights[node] == 0

    def reports(self, node: int, round: int) -> bool:
        """Return whether a node reports to its parent in a round."""
        return (round + 1) % self.sync_every ** self.topology.heights[node] == 0


# ---- what survives a round -------------------------------------------------------------------


class TreeNodeState(eqx.Module):
    """The state that a node keeps between rounds; models rest on the host."""

    params: Params
    server_memory: OptState  # of the optimiser that moves its backbone, where it has children
    received_backbone: Backbone | None  # what its report is measured from, if not every round
    training_memory: PyTree  # of the optimiser of its own training, where that is kept
    federation: NodeState | None  # of its clients, without parameters; None if text is pooled
    public_layers: dict[str, Any] | None  # its personal layers as others know them, if hidden


class TreeState(eqx.Module):
    """The state that a tree keeps between rounds; nothing else survives."""

    nodes: tuple[TreeNodeState, ...]
    origin: dict[str, Any]  # the personal layers that all began with
    waiting: dict[str, Any]  # residuals at the root for the next round, one row each
    waiting_from: Int[Array, "layers rows"]  # the nodes they came from; -1 is an empty row
    secret: UInt32[Array, "4"]  # what private draws are made from
    round: Int[Array, ""]

    @property
    def params(self) -> tuple[Params, ...]:
        """Return the model of every node, the root's first."""
        return tuple(node.params for node in self.nodes)


def init_tree(
    config: TreeConfig, params: Params, secret: bytes = bytes(16), secrets: Sequence[bytes] = ()
) -> TreeState:
    """Return the state before the first round: all nodes begin with the same model.

    `secret` is that of noise at the leaves; `secrets` has one per node, for its clients' plan.
    """
    params = jax.device_get(params)
    topology, origin = config.topology, config.personal(params)
    memory = jax.device_get(config.init_memory(params)) if config.init_memory else None
    nodes = tuple(
        replace(
            _init_node_state(config, node, params, secrets[node] if secrets else bytes(16)),
            training_memory=memory,
            public_layers=dict(origin) if config.hides else None,
        )
        for node in range(len(topology))
    )
    rows = config.residuals * len(topology.children[0])
    return TreeState(
        nodes=nodes,
        origin=dict(origin),
        waiting={layer: np.zeros((rows, v.size), v.dtype) for layer, v in origin.items()},
        waiting_from=jnp.full((len(origin), rows), -1, jnp.int32),
        secret=jnp.asarray(np.frombuffer(secret, "<u4").astype(np.uint32)),
        round=jnp.int32(0),
    )


def _init_node_state(config: TreeConfig, node: int, params: Params, secret: bytes) -> TreeNodeState:
    """Return a node's state before the first round, without parts that all nodes share."""
    topology, backbone = config.topology, config.backbone(params)
    algorithm, federation = config.algorithms[node], None
    if algorithm is not None and topology.clients[node]:
        federation = eqx.tree_at(lambda s: s.params, init_node(algorithm, params, secret), None)
    now_and_then = config.sync_every > 1 and topology.heights[node] and node
    return TreeNodeState(
        params=params,
        server_memory=config.servers[node].init(backbone) if topology.children[node] else (),
        received_backbone=backbone if now_and_then else None,
        training_memory=None,
        federation=federation,
        public_layers=None,
    )


# ---- a round ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The results of a round's nodes so far, by number."""

    received: dict[int, FromAbove] = field(default_factory=dict)
    trained: dict[int, TrainedNode] = field(default_factory=dict)  # nodes that answered
    reported: dict[int, Reported] = field(default_factory=dict)  # all but those that stay

    def now(self, node: int) -> FromAbove | TrainedNode:
        """Return a node as it is before the way up."""
        return self.trained.get(node, self.received[node])


def tree_round(config: TreeConfig, engine: Engine, state: TreeState) -> tuple[TreeState, Results]:
    """Play one round of the whole tree; return its next state, and what each node did."""
    topology, results = config.topology, Results()
    for level in topology.levels():
        for node in level:
            results.received[node] = down(config, state, node, results)
        if config.order == "levels":
            with_text = [node for node in level if topology.clients[node]]
            results.trained.update(train_nodes(config, engine, state, with_text, results))
    if config.order == "together":
        results.trained.update(train_nodes(config, engine, state, topology.with_text, results))
    for node in reversed(range(len(topology))):
        report = up(config, state, node, results)
        if report is not None:
            results.reported[node] = report
    return _state_after(config, state, results), results


def received(config: TreeConfig, state: TreeState) -> list[Params]:
    """Return the models with which the nodes would begin the next round."""
    results = Results()
    for node in range(len(config.topology)):
        results.received[node] = down(config, state, node, results)
    return [result.params for result in results.received.values()]


def shown_models(config: TreeConfig, state: TreeState) -> list[Params]:
    """Return the models of `received` as others may see them, made of clipped, noisy changes."""
    models = received(config, state)
    if not config.hides:
        return models
    return [
        config.join(model, config.backbone(model), _known(config, state.nodes[node]))
        if config.topology.clients[node]
        else model
        for node, model in enumerate(models)
    ]


def _known(config: TreeConfig, node: TreeNodeState | FromAbove | TrainedNode) -> Layers:
    """Return a node's personal layers as other nodes know them."""
    return dict(_shown(config, node))


def _shown(
    config: TreeConfig, node: TreeNodeState | FromAbove | TrainedNode
) -> Mapping[str, Vector]:
    """Return a node's personal layers as other nodes know them, each made when it is asked for."""
    if node.public_layers is None:
        return config.layers(node.params)
    return {layer: np.asarray(values) for layer, values in node.public_layers.items()}


def _origin(config: TreeConfig, state: TreeState) -> Layers:
    """Return the personal layers from which changes are measured in this round."""
    if config.compare == "root":
        return config.personal(state.nodes[0].params)
    return {layer: np.asarray(values) for layer, values in state.origin.items()}


# ---- down ------------------------------------------------------------------------------------


class FromAbove(NamedTuple):
    """A node after the way down."""

    params: Params
    public_layers: dict[str, Any] | None
    routed: Sequence[Routed] = ()  # residuals that it sends on to its children
    attention: dict[str, np.ndarray] | None = None  # weights of self, parent and residuals
    down_bytes: int = 0
    at_home: LeafStart | None = None  # what a node mixes with its own layers where these are


def down(config: TreeConfig, state: TreeState, node: int, results: Results) -> FromAbove:
    """Take the parent's backbone, and mix personal layers with the parent's and with residuals.

    Needs the parent's result of the way down, and of training if it trains before its children.
    """
    before, parent = state.nodes[node], config.topology.parents[node]
    unchanged = FromAbove(before.params, before.public_layers)
    if not config.receives(node, int(state.round)):
        return unchanged
    if parent is None:
        return unchanged._replace(routed=_route(config, state, node, _waiting(state)))
    sent = results.received[parent].routed
    residuals = [one.residual for one in sent if one.to == node]
    return _take(config, state, node, results.now(parent), residuals)


def _take(
    config: TreeConfig,
    state: TreeState,
    node: int,
    parent: FromAbove | TrainedNode,
    residuals: Sequence[Residual],
) -> FromAbove:
    """Return a node with its parent's backbone and a mixture of personal layers."""
    before = state.nodes[node]
    backbone, held = config.backbone(parent.params), config.layers(before.params)
    down_bytes, attention, at_home = config.cost(backbone), None, None
    own: Layers | None = None
    if held and not config.layers_stay:
        # To measure from the root takes its layers too; a child of the root has them already.
        from_root = config.compare == "root" and config.topology.depths[node] > 1
        down_bytes += (2 if from_root else 1) * config.cost(held.shapes())
        down_bytes += sum(config.cost(list(residual.parts)) for residual in residuals)
        above, origin = _shown(config, parent), _origin(config, state)
        if config.models_at_home and config.topology.clients[node]:
            told = origin if config.compare == "root" else None  # or those that all began with
            at_home = LeafStart(backbone, None, dict(above), told, tuple(residuals))
        else:
            own, attention = attend(held, [above], origin, config.temperature, residuals)
    # The backbone is the parent's, which rests already: all children share it.
    resting = config.rest(node, dict(held) if own is None else own)
    own = {layer: resting[layer] for layer in held}
    params = config.join(before.params, backbone, own)
    # A leaf's own layers are not public where it hides them.
    public = own if config.hides and not config.topology.clients[node] else before.public_layers
    routed = _route(config, state, node, residuals)
    return FromAbove(params, public, routed, attention, down_bytes, at_home)


def _route(
    config: TreeConfig, state: TreeState, node: int, residuals: Sequence[Residual]
) -> Sequence[Routed]:
    """Send residuals on, each to the child that is most like it."""
    if not residuals:
        return ()
    children = {
        child: (_shown(config, state.nodes[child]), config.topology.below(child))
        for child in config.topology.children[node]
        if config.receives(child, int(state.round))
    }
    return layer_attention.route(residuals, children, _origin(config, state))


def _waiting(state: TreeState) -> list[Residual]:
    """Return the residuals that the root sends down."""
    found = []
    origins = np.asarray(state.waiting_from)
    for row, (layer, values) in enumerate(sorted(state.waiting.items())):
        for slot, node in enumerate(origins[row]):
            if node >= 0:
                found.append(Residual(layer, int(node), [np.asarray(values)[slot]]))
    return found


# ---- training --------------------------------------------------------------------------------


class TrainedNode(NamedTuple):
    """A node after training."""

    params: Params
    public_layers: dict[str, Any] | None
    sums: Update | Total  # what happened, without the change and memories
    public_backbone: Backbone | None = None  # as its parent sees it, if not as it is
    change: float | None = None  # the L2 norm of the change; of pooled text alone
    training_memory: PyTree = None
    federation: NodeState | None = None
    upload_bytes: int = 0  # between the node and its text, or clients that are its members
    download_bytes: int = 0


def train_nodes(
    config: TreeConfig, engine: Engine, state: TreeState, nodes: Sequence[int], results: Results
) -> dict[int, TrainedNode]:
    """Train nodes that hold text, from what they received; leave out those that do not answer."""
    received = results.received
    if not config.pool_clients:
        return {n: _train_clients(config, engine, state, n, received[n]) for n in nodes}
    if not nodes:
        return {}
    cohort = Cohort(int(state.round), np.asarray([config.clients + node for node in nodes]))
    starts = [_start(config, state.nodes[node], received[node]) for node in nodes]
    made: dict[int, TrainedNode] = {}
    # A node's model is put to rest while the next node trains; never two at a time.
    with ThreadPoolExecutor(1, "rest") as beside:
        last: tuple[int, Future[TrainedNode]] | None = None
        for member, update, upload, download in engine.updates(starts, cohort):
            if last is not None:
                made[last[0]] = last[1].result()
            node, frames = member - config.clients, (upload, download)
            job = beside.submit(_trained, config, state, node, received[node], update, frames)
            last = node, job
            del update  # it goes when the model rests, not when the next one arrives
        if last is not None:
            made[last[0]] = last[1].result()
    return made


def _start(config: TreeConfig, before: TreeNodeState, received: FromAbove) -> Start:
    memory = before.training_memory
    client_state = None if memory is None else ClientState(memory, None)
    if not config.models_at_home:
        return Start(received.params, client_state=client_state)
    backbone = config.backbone(received.params)
    above = received.at_home or LeafStart(backbone)
    if int(memory) < 0:  # nothing of it has counted yet: what is known of it is the common start
        above = above._replace(own=config.personal(received.params))
    return Start(
        received.params,
        clip_norm=config.clip_norm if config.hides else math.inf,
        client_state=client_state,
        from_above=above._replace(backbone=backbone),
    )


def _trained(
    config: TreeConfig,
    state: TreeState,
    node: int,
    start: FromAbove,
    update: Update,
    frames: tuple[int, int],
) -> TrainedNode:
    """Return a node whose pooled text gave an update, in frames of so many bytes up and down."""
    backbone, layers = None, start.public_layers
    params = config.rest_sum(node, start.params, update.delta)
    if config.models_at_home:  # the update is the part that left, and what it starts from is known
        layers = config.personal(params) if config.hides else None
    elif config.hides:
        backbone, layers = _hide(config, state, node, start, update)
    # Otherwise a node is where its text is.
    upload, download = frames if config.counts_frames else (0, 0)
    return TrainedNode(
        params=params,
        public_layers=layers,
        sums=_without_change(update),
        public_backbone=backbone,
        change=length(update.delta),
        training_memory=None
        if update.client_state is None
        else config.rest(node, update.client_state.own),
        upload_bytes=upload,
        download_bytes=download,
    )


def _hide(
    config: TreeConfig, state: TreeState, node: int, start: FromAbove, update: Update
) -> tuple[Backbone, Layers]:
    """Return both parts of a leaf as others may see them: after a clipped, noisy change."""
    secret = private_seed(state)  # type: ignore[arg-type]  # it reads the secret alone
    part = leaving(config.leaf, update, secret, int(state.round), node)
    delta = config.leaf.whole(part, update.delta)
    backbone = config.backbone(jax.tree.map(np.add, start.params, delta))
    moved = config.personal(delta)
    layers = {layer: values + moved[layer] for layer, values in _known(config, start).items()}
    return backbone, layers


def _train_clients(
    config: TreeConfig, engine: Engine, state: TreeState, node: int, start: FromAbove
) -> TrainedNode:
    """Train a node whose clients are members: the flat round, on its part of the clients."""
    algorithm, inner = config.algorithms[node], state.nodes[node].federation
    assert algorithm is not None and inner is not None
    before = eqx.tree_at(lambda s: s.params, inner, start.params, is_leaf=_is_none)
    seed = config.seed if algorithm.plan is None else private_seed(before)
    # Numbered among the nodes with text: the only one draws as a flat federation does.
    round, number = int(state.round), config.topology.with_text.index(node)
    rng = generator_for(seed, "cohort", round=round, member=number)
    history = jax.tree.map(np.asarray, before.history)
    members = draw(algorithm.sampling, rng, round, history)
    cohort = engine.prepare(round, np.asarray(config.topology.clients[node])[members])
    gathered = engine.total(start_of_round(algorithm, before, members), cohort)
    after = server_half(algorithm, before, gathered.total, members)
    return TrainedNode(
        params=config.rest(node, jax.device_get(after.params)),
        public_layers=start.public_layers,
        sums=_without_change(gathered.total),
        federation=eqx.tree_at(lambda s: s.params, after, None),
        upload_bytes=gathered.upload_bytes,
        download_bytes=gathered.download_bytes,
    )


def _without_change(done: Any) -> PyTree:
    """Drop the change and what members remember, which are as large as models."""
    return eqx.tree_at(lambda d: (d.delta, d.client_state), done, (None, None), is_leaf=_is_none)


def _is_none(x: object) -> bool:
    return x is None


# ---- up --------------------------------------------------------------------------------------


class Reported(NamedTuple):
    """A node after the way up, and what it shows its parent."""

    after: TreeNodeState
    backbone: Backbone  # as its parent sees it
    residuals: Sequence[Residual] | None = None  # None if nobody offered any
    attention: dict[str, np.ndarray] | None = None  # weights of self and children
    agreement: float | None = None  # of the children's changes
    up_bytes: int = 0


def up(config: TreeConfig, state: TreeState, node: int, results: Results) -> Reported | None:
    """Join what the children report with the node's own work; None if nobody answered.

    Needs the node's results so far, and the reports of its children.
    """
    round, topology = int(state.round), config.topology
    due = [child for child in topology.children[node] if config.reports(child, round)]
    came = {child: results.reported[child] for child in due if child in results.reported}
    if came:
        report = _aggregate(config, state, node, came, results)
    elif node in results.trained or not (due or topology.clients[node]):
        report = _carry_on(config, state, node, results)
    else:
        return None
    if node == 0 or not config.reports(node, round):
        return report
    up_bytes = config.cost(report.backbone)
    if not config.layers_stay:
        shown = _shown(config, report.after)
        up_bytes += config.cost(shown.shapes() if isinstance(shown, LayersOf) else shown)
        if topology.children[node]:  # a leaf's residuals are its layers
            up_bytes += sum(config.cost(list(r.parts)) for r in report.residuals or ())
    return report._replace(up_bytes=up_bytes)


def _carry_on(config: TreeConfig, state: TreeState, node: int, results: Results) -> Reported:
    """Return a node without children's reports unchanged; a leaf offers its layers as residuals."""
    now, trained, residuals = results.now(node), results.trained.get(node), None
    if config.residuals and not config.topology.children[node]:
        shown = _shown(config, now)  # a model that rests already, or layers that `hides` keeps
        residuals = [Residual(layer, node, parts_of(shown, layer)) for layer in shown]
    backbone = trained.public_backbone if trained is not None else None
    after = _node_after(config, state, node, results)
    return Reported(after, config.backbone(now.params) if backbone is None else backbone, residuals)


def _aggregate(
    config: TreeConfig, state: TreeState, node: int, came: Mapping[int, Reported], results: Results
) -> Reported:
    """Move a node's backbone by its children's mean change, and mix its layers with theirs."""
    now, weights = results.now(node), [config.weights[child] for child in came]
    ends = [report.backbone for report in came.values()]
    begins = [_begun_from(config, state, child, results.received[child]) for child in came]
    base = config.backbone(now.params)
    if config.order == "together" and node in results.trained:
        # It trained beside its children: its own change is one more, of their mean weight.
        base = config.backbone(results.received[node].params)
        ends.append(config.backbone(now.params))
        begins.append(base)
        weights.append(float(np.mean(weights)))
    (change, agreed), memory = mean_change(ends, begins, weights), state.nodes[node].server_memory
    backbone, memory = _server_step(config.servers[node], base, memory, change)
    layers, attention, residuals = _meet(config, state, node, now, came)
    params = config.rest(node, config.join(now.params, jax.device_get(backbone), layers))
    after = replace(
        _node_after(config, state, node, results),
        params=params,
        server_memory=memory,
        public_layers=layers if config.hides else None,
    )
    return Reported(after, config.backbone(params), residuals, attention, agreed)


def _begun_from(config: TreeConfig, state: TreeState, node: int, received: FromAbove) -> Backbone:
    """Return the backbone that a node's report is measured from: the one it last received."""
    kept = state.nodes[node].received_backbone
    if kept is None or config.receives(node, int(state.round)):
        return config.backbone(received.params)
    return kept


def _meet(
    config: TreeConfig,
    state: TreeState,
    node: int,
    now: FromAbove | TrainedNode,
    came: Mapping[int, Reported],
) -> tuple[Layers, dict[str, np.ndarray] | None, Sequence[Residual] | None]:
    """Return a node's layers mixed with its children's, the weights, and what it sends up."""
    own = _known(config, now)
    if not own or config.layers_stay:
        return own, None, None
    origin, theirs = _origin(config, state), [_shown(config, r.after) for r in came.values()]
    if not config.topology.clients[node]:  # it learns nothing itself
        own = layer_attention.mean_layers(theirs, [config.weights[child] for child in came])
    layers, weights = attend(own, theirs, origin, config.temperature)
    if not config.residuals:
        return layers, weights, None
    offered = [r for report in came.values() for r in report.residuals or ()]
    if node:
        return layers, weights, layer_attention.worst(offered, layers, origin, config.residuals)
    return layers, weights, offered


@eqx.filter_jit
def _server_step(
    server: ServerMethod, backbone: Backbone, memory: OptState, change: Backbone
) -> tuple[Backbone, OptState]:
    return server.step(backbone, memory, change)


def _node_after(config: TreeConfig, state: TreeState, node: int, results: Results) -> TreeNodeState:
    """Return what a node carries into the next round, before its children's work."""
    before, now, trained = state.nodes[node], results.now(node), results.trained.get(node)
    kept = before.received_backbone
    if kept is not None:
        kept = _begun_from(config, state, node, results.received[node])
    return TreeNodeState(
        params=now.params,
        server_memory=before.server_memory,
        received_backbone=kept,
        training_memory=before.training_memory if trained is None else trained.training_memory,
        federation=before.federation if trained is None else trained.federation,
        public_layers=now.public_layers,
    )


def _state_after(config: TreeConfig, state: TreeState, results: Results) -> TreeState:
    """Return the next state of the tree; a node without a report stays as it was."""
    nodes = list(state.nodes)
    for node, report in results.reported.items():
        nodes[node] = report.after
    waiting, waiting_from = state.waiting, state.waiting_from
    if 0 in results.reported and results.reported[0].residuals is not None:
        waiting, waiting_from = _kept_waiting(config, state, results.reported[0].residuals)
    return replace(
        state,
        nodes=tuple(nodes),
        waiting=waiting,
        waiting_from=jnp.asarray(waiting_from),
        round=state.round + 1,
    )


def _kept_waiting(
    config: TreeConfig, state: TreeState, residuals: Sequence[Residual]
) -> tuple[Layers, Any]:
    """Return residuals as the rows of arrays whose shapes never change."""
    kept: Layers = {}
    origins = np.full(state.waiting_from.shape, -1, np.int32)
    for row, (layer, before) in enumerate(sorted(state.waiting.items())):
        here = [r for r in residuals if r.layer == layer][: len(before)]
        kept[layer] = config.rest_rows(before.shape, before.dtype, [r.parts for r in here])
        origins[row, : len(here)] = [r.origin for r in here]
    return kept, origins
