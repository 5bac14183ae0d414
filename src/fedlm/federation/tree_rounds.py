"""Rounds of a tree, one after the other: what a run asks of them.

In:       a `TreeConfig`, an engine, the privacy plans of federations of clients.
Out:      states, metrics, what may be told; the models of all nodes.
Promise:  a tree answers a run exactly as a flat federation does.
Not here: one round (`tree_round.py`), figures (`tree_evaluation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedlm.core.releasable import Releasable
from fedlm.core.types import Engine, Params
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.ascent import turn
from fedlm.federation.round import Metrics, Played, mean_loss
from fedlm.federation.tree import TreeConfig, TreeState, init_tree, received
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
            state, found = turn(self.config, self.engine, state)
            sums = found.pop("sums")
            nats = sums.pop("nats")
            metrics = {
                "round": round,
                **{name: int(value) for name, value in sums.items()},
                "loss": mean_loss(nats, sums["tokens"], sums["refused"]),
                "seconds": time.perf_counter() - began,
                **found,
            }
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
        layers = [layer for layer in config.layers if layer is not None]
        held = [len(clients) for clients in topology.clients]
        return {
            "tree": {
                "names": list(topology.names),
                "parents": list(topology.parents),
                "clients": held,
                "left_out": config.clients - sum(held),
                "key_layers": list(dict.fromkeys(layers)),
                "key_leaves": len(layers),
            }
        }

    def closing(self, rounds: int) -> Metrics:
        """What noise at the leaves is worth, in numbers and plain words."""
        return self.claim(rounds)


def _secret(root: bytes, node: int) -> bytes:
    """A secret per node; that of the first with text is that of a flat federation."""
    if node == 0:
        return root
    return hashlib.blake2b(root + str(node).encode(), digest_size=16).digest()
