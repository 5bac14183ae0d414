"""Rounds of a tree, one after the other: what a run asks of them.

In:       a `TreeConfig`, an engine, the privacy plans of federations of clients.
Out:      states, metrics, what may be told; the models of all nodes.
Promise:  a tree answers a run exactly as a flat federation does.
Not here: one round (`tree_round.py`), figures (`tree_evaluation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.releasable import Releasable
from fedlm.core.types import Engine, Params, Total, Update
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.layer_attention import Routed, entropy, length
from fedlm.federation.round import Metrics, Played, mean_loss
from fedlm.federation.tree_round import (
    Results,
    TreeConfig,
    TreeState,
    init_tree,
    received,
    tree_round,
)
from fedlm.privacy.release import release

Claim = Callable[[int], Metrics]


@dataclass(frozen=True, kw_only=True)
class TreeRound:
    """Rounds of a tree of federations."""

    config: TreeConfig
    engine: Engine
    algorithm: Algorithm
    model_bytes: Callable[[str], int]  # of a whole model, by the codec of a direction
    secret: Callable[[], bytes] = lambda: bytes(16)  # of the clients' privacy plans
    leaf_secret: Callable[[], bytes] = lambda: bytes(16)  # of noise on what leaves a leaf
    claim: Claim = lambda rounds: {}  # what noise at the leaves is worth

    @property
    def names(self) -> tuple[str, ...]:
        """Every node's model has the node's name; the root's is also the federation's."""
        return ("", *self.config.topology.names)

    def init(self, params: Params) -> TreeState:
        """The state before the first round; each node that holds text has its own secret."""
        topology, root = self.config.topology, self.secret()
        first = topology.with_text[0]
        secrets = [_secret(root, node - first) for node in range(len(topology))]
        return init_tree(self.config, params, self.leaf_secret(), secrets)

    def play(self, state: TreeState, rounds: range) -> Generator[Played, None, None]:
        """Plays rounds one after the other."""
        for round in rounds:
            began = time.perf_counter()
            state, results = tree_round(self.config, self.engine, state)
            metrics = metrics_of(self.config, round, results, began)
            del results  # it holds models of the round's steps, which nobody needs any more
            yield Played(state, metrics, self._told(metrics))

    def _told(self, metrics: Metrics) -> Releasable:
        inner = [a for a in self.config.algorithms if a is not None]
        plan = self.algorithm.plan

        def expected() -> Metrics:
            """Members and bytes of a round, as the plans expect them."""
            members = sum(a.sampling.cohort for a in inner)
            edges = metrics["nodes"].values()
            return {
                "members": members,
                "upload_bytes": members * self.model_bytes("upload")
                + sum(edge["up_bytes"] for edge in edges),
                "download_bytes": members * self.model_bytes("download")
                + sum(edge["down_bytes"] for edge in edges),
            }

        return release(plan, "round", metrics, expected)

    def models(self, state: TreeState) -> dict[str, Params]:
        """Every node's model as it begins the next round; that of the root has no name."""
        models = [jax.tree.map(jnp.asarray, model) for model in received(self.config, state)]
        return {"": models[0], **dict(zip(self.config.topology.names, models, strict=True))}

    def params(self, state: TreeState) -> Params:
        """The parameters of all nodes."""
        return state.params

    def header(self) -> Metrics:
        """The tree: nodes, parents, how many clients feed each, which layers are personal."""
        config, topology = self.config, self.config.topology
        layers = [layer for layer in config.personal_layers if layer is not None]
        held = [len(clients) for clients in topology.clients]
        return {
            "tree": {
                "names": list(topology.names),
                "parents": list(topology.parents),
                "clients": held,
                "left_out": config.clients - sum(held),
                "personal_layers": list(dict.fromkeys(layers)),
                "personal_leaves": len(layers),
            }
        }

    def closing(self, rounds: int) -> Metrics:
        """What noise at the leaves is worth, in numbers and plain words."""
        return self.claim(rounds)


# ---- what happened in a round ----------------------------------------------------------------


def metrics_of(config: TreeConfig, round: int, results: Results, began: float) -> Metrics:
    """Return sums over the nodes that trained, the bytes of the round, and figures per node."""
    names, trained = config.topology.names, results.trained.values()
    nodes = {name: _node_metrics(config, node, results) for node, name in enumerate(names)}
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
    """Return the way of one residual, with the names of nodes."""
    return {
        "layer": sent.residual.layer,
        "from": names[sent.residual.origin],
        "to": names[sent.to],
        "likeness": {names[node]: round(value, 4) for node, value in sent.likeness.items()},
    }


def _node_metrics(config: TreeConfig, node: int, results: Results) -> Metrics:
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
    if received.attention is not None:
        own = [float(weights[0]) for weights in received.attention.values()]
        found["entropy_down"] = entropy(received.attention)
        found["self_weight"] = float(np.mean(own))
    if reported.attention is not None:
        found["entropy_up"] = entropy(reported.attention)
    if reported.agreement is not None:
        found["agreement"] = reported.agreement
        found["backbone_norm"] = length(config.backbone(reported.after.params))
    return found


def _secret(root: bytes, node: int) -> bytes:
    """A secret per node; that of the first with text is that of a flat federation."""
    if node == 0:
        return root
    return hashlib.blake2b(root + str(node).encode(), digest_size=16).digest()
