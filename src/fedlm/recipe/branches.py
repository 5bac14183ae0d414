"""From a recipe with a tree to the objects of its run.

In:       a `Recipe` with a `[federation]` table, and a store.
Out:      a `TreeExperiment`: what `Experiment` is, for a tree.
Promise:  every setting of the table is used once, here; what has no meaning in a tree is refused.
Not here: what the settings may be (`federation.py`), the round (`federation/ascent.py`).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from fedlm.core import tree
from fedlm.core.errors import require
from fedlm.core.types import Params, Sampling, ServerMethod
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.ascent import turn
from fedlm.federation.optimizers import schedule, server_optimizer
from fedlm.federation.round import UNRELEASED
from fedlm.federation.tree import TreeConfig, TreeState, init_tree
from fedlm.local.train import WEIGHTS, local_training
from fedlm.models import catalog
from fedlm.models.split import key_layers
from fedlm.privacy import account
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import privacy_plan
from fedlm.recipe.assemble import algorithm_of, inner_of
from fedlm.recipe.build import Experiment
from fedlm.recipe.census import Census
from fedlm.record.mmap_cache import Shelf
from fedlm.server.step import plain
from fedlm.wire.dense import dense

Facts = dict[str, Any]
# An epsilon beyond this bounds a likelihood ratio by more than twenty thousand: nothing.
MEANINGFUL = 10.0


@dataclass(frozen=True)
class TreeExperiment(Census):
    """Everything a run of a tree is made of."""

    def _check_hidden(self) -> None:
        """Refuses noise and clips that would not hold what they say."""
        settings, topology = self.settings, self.topology
        require(
            settings.noise_multiplier == 0 or settings.clip_norm > 0,
            "federation.clip_norm",
            settings.clip_norm,
            "a positive length: noise is in multiples of it",
        )
        require(
            settings.clip_norm == 0 or settings.pool_clients,
            "federation.clip_norm",
            settings.clip_norm,
            "pool = true: where clients are members, [privacy] protects each of them",
        )
        inner = [topology.names[n] for n in topology.with_text if topology.children[n]]
        require(
            settings.clip_norm == 0 or not inner,
            "federation.clip_norm",
            settings.clip_norm,
            f"text at leaves alone: {', '.join(inner)} would send children what nobody clipped",
        )

    @cached_property
    def rules(self) -> TreeConfig:
        settings, topology = self.settings, self.topology
        names = list(tree.named_leaves(catalog.shapes(self.architecture, self.size)))
        nodes = range(len(topology))
        self._check_hidden()
        return TreeConfig(
            topology=topology,
            layers=key_layers(names, settings.personal_layers),
            seed=self.recipe.run.seed,
            temperature=settings.temperature,
            compare=settings.compare,
            residuals=0 if settings.temperature == 0 else settings.residuals,
            every=settings.sync_every,
            order=settings.order,
            servers=tuple(self._outer(node) for node in nodes),
            shares=tuple(self._share(node) for node in nodes),
            pooled=settings.pool_clients,
            init_memory=self.algorithm.local.init_memory,
            rest=self._rest,
            clients=self.population,
            algorithms=tuple(
                None if settings.pool_clients else self._inner(node) for node in nodes
            ),
            clip=settings.clip_norm,
            noise=settings.noise_multiplier,
            edge_bytes=dense().encoded_bytes,
        )

    @cached_property
    def algorithm(self) -> Algorithm:
        """What a member does; the text of a pooled node stays where it is."""
        made: Algorithm = Experiment.algorithm.func(self)  # type: ignore[attr-defined]
        steps, keep = self.settings.warmup_steps, self.settings.keep_optimizer
        for name, value in (("warmup_steps", steps), ("keep_optimizer", keep)):
            require(
                not value or self.settings.pool_clients,
                f"federation.{name}",
                value,
                "pool = true: it is the optimiser of a node that trains on its own text",
            )
        if not self.settings.pool_clients:
            return made
        client = self.recipe.client
        require(
            self.recipe.wire == type(self.recipe.wire)() and client.method == "fedavg",
            "federation.pool_clients",
            True,
            "no [wire] and no client.method beside it: nodes send each other whole parts of models",
        )
        rate = schedule("constant", client.learning_rate, rounds=steps, warmup=steps, end=0.0)
        inner, weigh = inner_of(self.recipe, rate), WEIGHTS[client.weight]
        local = local_training(catalog.loss, inner, weigh, proximal=client.proximal, remember=keep)
        return replace(made, local=local)

    def _rest(self, node: int, params: Params) -> Params:
        """Models of nodes stay in memory, unless there are more than may."""
        most = self.settings.resident
        return self._shelf.put(node, params) if 0 < most < len(self.topology) else params

    @cached_property
    def _shelf(self) -> Shelf:
        return Shelf()

    def _outer(self, node: int) -> ServerMethod:
        """What a node does with its children's mean change."""
        place, depth = self.topology.places[node], self.topology.depths[node]

        def said(name: str) -> Any:
            return place.setting(name, self.settings.at_depth(name, depth))

        server = self.recipe.server
        return plain(
            server_optimizer(
                said("optimizer"),
                said("learning_rate"),
                momentum=said("momentum"),
                beta2=server.beta2,
                epsilon=server.adam_epsilon,
            )
        )

    def _share(self, node: int) -> float:
        told = 1.0
        if self.settings.weight == "tokens":
            below = self.topology.below(node)
            held = [int(self.training[c]) for n in below for c in self.topology.clients[n]]
            told = float(sum(len(self.store.train(c)) for c in held))
        return float(self.topology.places[node].setting("weight", told))

    def _inner(self, node: int) -> Algorithm | None:
        """The flat federation of a node's own clients; its plan is that of so many clients."""
        held = len(self.topology.clients[node])
        if not held:
            return None
        cohort = self.topology.places[node].setting("cohort", self.recipe.server.cohort)
        server = self.recipe.server.model_copy(update={"cohort": min(cohort, held)})
        recipe = self.recipe.model_copy(update={"server": server})
        sampling = privacy_plan.sampling_of(recipe, held)
        plan = privacy_plan.plan_of(recipe, sampling)
        like = catalog.shapes(self.architecture, self.size)
        return algorithm_of(recipe, sampling, plan, like)

    @cached_property
    def sampling(self) -> Sampling:
        """That of the smallest federation of clients: there a client is drawn most often."""
        if self.settings.pool_clients:
            nodes = len(self.topology.with_text)
            return Sampling(law="fixed", population=nodes, cohort=nodes)
        held = min(len(self.topology.clients[n]) for n in self.topology.with_text)
        cohort = min(self.recipe.server.cohort, held)
        server = self.recipe.server.model_copy(update={"cohort": cohort})
        return privacy_plan.sampling_of(self.recipe.model_copy(update={"server": server}), held)

    @cached_property
    def plan(self) -> PrivacyPlan | None:
        privacy = self.recipe.privacy
        require(
            privacy.mechanism is None or not self.settings.pool_clients,
            "privacy.mechanism",
            privacy.mechanism,
            "federation.pool_clients = false: it protects clients, and a pooled node has none",
            "federation.noise_multiplier protects a node's text as a whole.",
        )
        require(privacy.canaries == 0, "privacy.canaries", privacy.canaries, "0 in a tree")
        return privacy_plan.plan_of(self.recipe, self.sampling)

    # ---- what a run asks for -------------------------------------------------------------

    def init_node(self, params: Params) -> TreeState:  # type: ignore[override]
        """The state before the first round."""
        root = privacy_plan.secret_of(self.recipe.privacy)
        first = self.topology.with_text[0]
        secrets = [_secret(root, node - first) for node in range(len(self.topology))]
        seed = self.settings.noise_seed
        hidden = bytes(16)
        if self.settings.noise_multiplier:
            hidden = os.urandom(16) if seed is None else seed.to_bytes(16, "little")
        return init_tree(self.rules, params, hidden, secrets)

    def turn(self, round: int, state: TreeState) -> tuple[TreeState, Facts, Facts]:
        """One round: the state after it, what happened, and what may be told."""
        began = time.perf_counter()
        state, facts = turn(self.rules, self.engine, state)
        sums = facts.pop("sums")
        nats, tokens = sums.pop("nats"), sums["tokens"]
        facts = {
            "round": round,
            **{name: int(value) for name, value in sums.items()},
            "loss": nats / tokens if tokens else math.inf if sums["refused"] else 0.0,
            "upload_bytes": facts["upload_bytes"],
            "download_bytes": facts["download_bytes"],
            "seconds": time.perf_counter() - began,
            **facts,
        }
        return state, facts, self._released(facts)

    def _released(self, facts: Facts) -> Facts:
        """Under a plan nothing that depends on a client and has no noise."""
        if self.plan is None or self.plan.reveal:
            return dict(facts)
        told = {k: v for k, v in facts.items() if k not in UNRELEASED}
        told["nodes"] = {
            name: {k: v for k, v in node.items() if k not in ("loss", "change")}
            for name, node in facts["nodes"].items()
        }
        inner = [a for a in self.rules.algorithms if a is not None]
        told["members"] = sum(a.sampling.cohort for a in inner)
        # How many clients came decides the real bytes; what is told counts those expected.
        shapes, turns = catalog.shapes(self.architecture, self.size), told["members"]
        edges = [(n["up_bytes"], n["down_bytes"]) for n in facts["nodes"].values()]
        for place, way in enumerate(("upload", "download")):
            codec = getattr(self.algorithm, way)
            told[f"{way}_bytes"] = turns * codec.encoded_bytes(shapes) + sum(
                e[place] for e in edges
            )
        return told

    def _rows_of(self, member: int) -> np.ndarray:
        """A client's rows; beyond the clients, those of a node with all its text."""
        clients = self.population
        if member < clients:
            return super()._rows_of(member)
        held = self.topology.clients[member - clients]
        return np.concatenate([super(TreeExperiment, self)._rows_of(c) for c in held])

    def closing_facts(self, rounds: int) -> Facts:
        """What noise at the leaves is worth, in numbers and plain words."""
        noise, delta = self.settings.noise_multiplier, self.settings.delta
        if not noise:
            return {}
        epsilon = account.epsilon_of_rho(rounds / (2 * noise**2), delta)
        meaning = (
            "That is a claim."
            if epsilon <= MEANINGFUL
            else "Such an epsilon promises nothing: the noise is a test of robustness, no privacy."
        )
        said = (
            f"Every change that left a leaf was clipped to {self.settings.clip_norm:g} and got "
            f"Gaussian noise of {noise:g} times that in every coordinate. For the whole text of "
            f"one leaf replaced by nothing, {rounds} rounds cost epsilon {epsilon:.3g} at delta "
            f"{delta:g}. {meaning}"
        )
        return {"leaves": {"epsilon": epsilon, "delta": delta, "said": said}}

    def checked(self) -> Self:
        _ = self.rules
        return super().checked()


def _secret(root: bytes, node: int) -> bytes:
    """A secret for every node; that of the first with text is that of a flat federation."""
    if node == 0:
        return root
    return hashlib.blake2b(root + str(node).encode(), digest_size=16).digest()
