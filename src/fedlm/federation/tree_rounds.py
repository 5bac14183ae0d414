"""Rounds of a tree, one after the other: what a run asks of them.

In:       a `TreeConfig`, an engine, the privacy plans of federations of clients.
Out:      states, metrics, what may be told; the models of all nodes.
Promise:  a tree answers a run exactly as a flat federation does.
Not here: one round (`tree_round.py`), figures (`tree_evaluation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedlm.core import tree
from fedlm.core.releasable import Releasable
from fedlm.core.types import Engine, Params, Total, Update
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.layer_attention import Routed, entropy, length
from fedlm.federation.round import Metrics, Played, another_secret, mean_loss
from fedlm.federation.topology import Topology
from fedlm.federation.tree_round import (
    Results,
    TreeConfig,
    TreeNodeState,
    TreeState,
    init_tree,
    received,
    shown_models,
    tree_round,
)
from fedlm.privacy.ledger import joined_digest
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import own_models_stay, release


@dataclass(frozen=True, kw_only=True)
class TreeRound:
    """Rounds of a tree of federations."""

    config: TreeConfig
    engine: Engine
    algorithm: Algorithm
    model_bytes: Callable[[str], int]  # of what is trained, by the codec of a direction
    secret: Callable[[], bytes] = lambda: bytes(16)  # of the clients' privacy plans
    leaf_secret: Callable[[], bytes] = lambda: bytes(16)  # of noise on what leaves a leaf
    plan: PrivacyPlan | None = None  # what the run claims: to each client, or to each leaf

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models: the empty name, which is the root's too, and every node's."""
        return ("", *self.config.topology.names)

    @property
    def topology(self) -> Topology:
        """The nodes of the tree."""
        return self.config.topology

    def init(self, params: Params) -> TreeState:
        """Return the state before the first round; each node that holds text has its own secret."""
        topology, root = self.config.topology, self.secret()
        params = tree.without(params, self.algorithm.base)
        first = topology.with_text[0]
        secrets = [_secret(root, node - first) for node in range(len(topology))]
        return init_tree(self.config, params, self.leaf_secret(), secrets)

    def play(self, state: TreeState, rounds: range) -> Generator[Played, None, None]:
        """Play rounds one after the other."""
        for round in rounds:
            began = time.perf_counter()
            state, results = tree_round(self.config, self.engine, state)
            metrics = tree_metrics(self.config, round, results, began)
            del results  # it holds models of the round's steps, which nobody needs any more
            yield Played(state, metrics, self._told(metrics))

    def _told(self, metrics: Metrics) -> Releasable:
        inner = [a for a in self.config.algorithms if a is not None]
        # A pooled leaf is where its text is: nothing travels to its clients.
        clients = sum(a.sampling.cohort for a in inner)
        leaves = len(self.config.topology.with_text) if self.config.pool_clients else 0

        def expected() -> Metrics:
            """Return the numbers of members and bytes that the plans expect in a round."""
            edges = metrics["nodes"].values()
            return {
                "members": clients + leaves,
                "upload_bytes": clients * self.model_bytes("upload")
                + sum(edge["up_bytes"] for edge in edges),
                "download_bytes": clients * self.model_bytes("download")
                + sum(edge["down_bytes"] for edge in edges),
            }

        return release(self.plan, "round", metrics, expected)

    def models(self, state: TreeState) -> dict[str, Params]:
        """Return every node's model at the start of the next round; the root's name is empty.

        Under noise at the leaves, a leaf's model is the one that others know of it.
        """
        found = self._view(state)
        models = [self._whole(tree.from_host(model)) for model in found]
        return {"": models[0], **dict(zip(self.config.topology.names, models, strict=True))}

    def _whole(self, params: Params) -> Params:
        """Return a node's model with the leaves that nobody trains, which all nodes share."""
        return tree.join(params, self.algorithm.base)

    def _view(self, state: TreeState) -> list[Params]:
        return (shown_models if own_models_stay(self.plan) else received)(self.config, state)

    def own_models(self, state: TreeState) -> dict[str, Params]:
        """Return the leaves' own models without noise, if they differ from those of `models`."""
        if not own_models_stay(self.plan) or self.config.models_at_home:
            return {}
        models, topology = received(self.config, state), self.config.topology
        return {topology.names[n]: self._whole(models[n]) for n in topology.with_text}

    def params(self, state: TreeState) -> Params:
        """Return the parameters of all nodes as they may be shown, then the frozen ones once."""
        shown = tuple(self._view(state)) if own_models_stay(self.plan) else state.params
        base = self.algorithm.base
        return shown if base is None else (shown, base)

    def renewed(self, state: TreeState, lines: int) -> TreeState:
        """Return the state with new secrets, made from the old ones and the ledger's length."""

        def other(node: TreeNodeState) -> TreeNodeState:
            inner = node.federation
            if inner is None:
                return node
            secret = another_secret(inner.secret, lines)
            return replace(node, federation=replace(inner, secret=secret))

        nodes = tuple(map(other, state.nodes))
        return replace(state, nodes=nodes, secret=another_secret(state.secret, lines))

    def digest(self, state: TreeState) -> bytes:
        """Return the ledger's digest of the sums of all federations of clients."""
        inner = [node.federation.digest for node in state.nodes if node.federation is not None]
        found = [np.asarray(digest).tobytes() for digest in inner if digest is not None]
        return joined_digest(found) if found else bytes(32)

    def header(self) -> Metrics:
        """Describe the tree: nodes, parents, clients per node, and personal layers."""
        config, topology = self.config, self.config.topology
        layers = [layer for layer in config.personal_layers if layer is not None]
        held = [len(clients) for clients in topology.clients]
        # How many clients a leaf has is a fact of its text.
        counts = {"clients": held, "left_out": config.clients - sum(held)}
        return {
            "tree": {
                "names": list(topology.names),
                "parents": list(topology.parents),
                **({} if own_models_stay(self.plan) else counts),
                "personal_layers": list(dict.fromkeys(layers)),
                "personal_leaves": len(layers),
            }
        }


# ---- what happened in a round ----------------------------------------------------------------


def tree_metrics(config: TreeConfig, round: int, results: Results, began: float) -> Metrics:
    """Return sums over the nodes that trained, the bytes of the round, and figures per node."""
    names, trained = config.topology.names, results.trained.values()
    nodes = {name: _node_metrics(config, round, node, results) for node, name in enumerate(names)}
    edges = nodes.values()
    upload, download = (sum(edge[way] for edge in edges) for way in ("up_bytes", "down_bytes"))
    sums = _sums([done.sums for done in trained])
    nats = sums.pop("nats")
    return {
        "round": round,
        **{name: int(value) for name, value in sums.items()},
        "loss": mean_loss(nats, sums["tokens"], sums["refused"]),
        "upload_bytes": upload + sum(done.upload_bytes for done in trained),
        "download_bytes": download + sum(done.download_bytes for done in trained),
        "seconds": time.perf_counter() - began,
        "nodes": nodes,
        "routes": [
            _route(names, sent) for result in results.received.values() for sent in result.routed
        ],
    }


def _sums(parts: Sequence[Update | Total]) -> dict[str, float]:
    names = ("refused", "steps", "tokens", "unclipped", "nats")
    sums = {name: float(sum(float(getattr(p, name)) for p in parts)) for name in names}
    sums["members"] = float(sum(float(getattr(p, "members", 1.0)) for p in parts))
    return sums


def _route(names: Sequence[str], sent: Routed) -> Metrics:
    """Describe the route of one residual, with the names of nodes."""
    return {
        "layer": sent.residual.layer,
        "from": names[sent.residual.origin],
        "to": names[sent.to],
        "likeness": {names[node]: round(value, 4) for node, value in sent.likeness.items()},
    }


def _node_metrics(config: TreeConfig, round: int, node: int, results: Results) -> Metrics:
    received, trained = results.received[node], results.trained.get(node)
    reported = results.reported.get(node)
    if reported is None:  # what was sent to it counts as not received
        return {"up_bytes": 0, "down_bytes": 0, "missed": True}
    found: Metrics = {"up_bytes": reported.up_bytes, "down_bytes": received.down_bytes}
    if trained is not None:
        found["loss"] = float(trained.sums.nats) / max(float(trained.sums.tokens), 1.0)
        if trained.change is not None:
            found["change"] = trained.change
    elif config.topology.clients[node]:
        found["missed"] = True
    topology = config.topology
    if received.attention is not None:
        own = [float(weights[0]) for weights in received.attention.values()]
        found["entropy_down"] = entropy(received.attention)
        found["self_weight"] = float(np.mean(own))
        parent = topology.parents[node]
        assert parent is not None  # the root receives nothing
        came = [sent.residual for sent in results.received[parent].routed if sent.to == node]
        peers = {
            layer: [node, parent, *(r.origin for r in came if r.layer == layer)]
            for layer in received.attention
        }
        found["attention_down"] = _heard(topology.names, received.attention, peers)
    if reported.attention is not None:
        found["entropy_up"] = entropy(reported.attention)
        due = (child for child in topology.children[node] if config.reports(child, round))
        answered = [child for child in due if child in results.reported]
        peers = {layer: [node, *answered] for layer in reported.attention}
        found["attention_up"] = _heard(topology.names, reported.attention, peers)
    if reported.agreement is not None:
        found["agreement"] = reported.agreement
        found["backbone_norm"] = length(config.backbone(reported.after.params))
    return found


def _heard(
    names: Sequence[str], weights: Mapping[str, np.ndarray], peers: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return a node's attention weights by name of the peer, averaged over layers."""
    found: dict[str, float] = {}
    for layer, share in weights.items():
        for peer, part in zip(peers[layer], share, strict=True):
            found[names[peer]] = found.get(names[peer], 0.0) + float(part) / len(weights)
    return {name: round(part, 4) for name, part in found.items()}


def _secret(root: bytes, node: int) -> bytes:
    """Return a node's secret; the first node with text has that of a flat federation."""
    if node == 0:
        return root
    return hashlib.blake2b(root + str(node).encode(), digest_size=16).digest()
