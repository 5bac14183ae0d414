"""A recipe as one node carries it out: its own text, the numbers of the whole federation.

In:       a recipe that a server has or sent, the node's store.
Out:      the recipe as it is sent; what a node needs to train its members, or all its text as one
          leaf of a tree.
Promise:  the members' programs, shuffles and keys are those of the simulation; a recipe that works
          only where all members are in one place is refused with the way out.
Not here: whether the node allows it (`policy.py`), messages (`node_worker.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from fedlm.core.errors import require
from fedlm.core.types import BatchSpec, Engine, Rows, Sampling
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer import kind_of
from fedlm.engine.bounds import MOST_GUESSES, MOST_STEPS, Bounds
from fedlm.evaluate.held_out import HeldOutText
from fedlm.evaluate.perplexity import Evaluator
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.leaf import LeafRules
from fedlm.models import catalog
from fedlm.models.catalog import ModelSpec
from fedlm.models.partial import TRAINABLE
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import parts, privacy_plan
from fedlm.recipe import tree as tree_parts
from fedlm.recipe.assemble import algorithm_of, trained_part
from fedlm.recipe.federation import FederationTable
from fedlm.recipe.settings import Recipe, dump
from fedlm.wire.dense import dense

NO_PATHS: dict[str, Any] = {"source": None, "store": None, "stores": ()}


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """The parts from which a node answers the requests of one run."""

    recipe: Recipe
    algorithm: Algorithm
    engine: Engine
    rows_of: Rows
    batches: BatchSpec
    sent_like: Any  # the shapes of what the server sends down to be trained
    model_like: Any  # the shapes of what it sends down to be scored: without a part held still
    held_out: Mapping[str, HeldOutText]  # the node's own, by split
    evaluator: Callable[[], Evaluator]
    seed: int
    vocabulary: int
    parameters: int
    leaf: bool = False  # all text of the node is one leaf of a tree
    leaf_plan: PrivacyPlan | None = None  # what noise on all that leaves a leaf promises to it
    at_home: LeafRules | None = None  # what leaves a leaf that keeps its own model

    @property
    def plan(self) -> PrivacyPlan | None:
        """What is promised to this node, or to its clients."""
        return self.leaf_plan or self.algorithm.plan


def members_work(
    recipe: Recipe, store: Store, *, first: int, population: int, whole: bool
) -> NodeWork:
    """Return the work of training this store's clients as members `first`, `first + 1`, ...

    With `whole` the store is one member. The engine takes decoded parameters and returns updates
    before they are encoded.
    """
    rows = parts.client_rows(recipe, store, parts.training_clients(recipe, store))
    pooled = parts.pooled_rows(rows)
    rows_of: Rows = pooled if whole else lambda member: rows.train(member - first)
    spec = parts.model_spec(recipe, store.vocabulary)
    participation = privacy_plan.participation_of(recipe, population)
    start = parts.start_maker(recipe, store)
    here = 1 if whole else len(rows.clients)
    algorithm = algorithm_of(recipe, participation, spec.shapes(), start, remembered=here)
    work = _work(recipe, store, rows, rows_of, algorithm, spec)
    server = algorithm.server
    sent = jax.eval_shape(lambda p: server.send(p, server.init(p)), work.model_like)
    return replace(work, sent_like=sent)


def _work(
    recipe: Recipe,
    store: Store,
    rows: ClientRows,
    rows_of: Rows,
    algorithm: Algorithm,
    spec: ModelSpec,
) -> NodeWork:
    """Return work whose server sends the trained parameters and nothing beside them."""
    bare = replace(algorithm, upload=dense(), download=dense())
    owners = parts.owners_of(recipe, store, rows.clients)
    trained = trained_part(recipe, spec.shapes())
    return NodeWork(
        recipe=recipe,
        algorithm=algorithm,
        engine=parts.engine_of(recipe, bare, rows_of),
        rows_of=rows_of,
        batches=parts.batch_spec(recipe),
        sent_like=trained,
        model_like=trained,
        held_out={s: parts.held_out_text(recipe, rows, o) for s, o in owners.items()},
        evaluator=cache(lambda: Evaluator(catalog.score, store.special)),
        seed=recipe.run.seed,
        vocabulary=store.vocabulary,
        parameters=spec.parameters,
    )


def leaf_work(recipe: Recipe, store: Store, *, population: int) -> NodeWork:
    """Return the work of training on all text of this store as one leaf of any tree.

    `population` is the number of clients of the federation, at least as many as leaves. With noise
    a leaf takes part in every round, so that the number decides only which delta is small enough.
    The engine takes decoded parameters and returns updates before they are encoded.
    """
    rows = parts.client_rows(recipe, store, parts.training_clients(recipe, store))
    spec = parts.model_spec(recipe, store.vocabulary)
    alone = Sampling(law="fixed", population=1, cohort=1)
    start = parts.start_maker(recipe, store)
    algorithm = tree_parts.leaf_algorithm(recipe, alone, spec.shapes(), start)
    rules = tree_parts.leaf_rules(recipe, spec.shapes())
    return replace(
        _work(recipe, store, rows, parts.pooled_rows(rows), algorithm, spec),
        leaf=True,
        leaf_plan=tree_parts.leaf_plan(recipe, population),
        at_home=rules if rules.keeps else None,
    )


def check_deployable(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings that need all members in one place."""
    require(
        not TRAINABLE[recipe.wire.trainable].exact_mean,
        "wire.trainable",
        recipe.wire.trainable,
        "'lora' over a network: a node would send sums of whole matrices",
    )
    require(not recipe.data.groups, "data.groups", recipe.data.groups, "none over a network")
    if recipe.federation is not None:
        _check_tree(recipe, recipe.federation)


def _check_tree(recipe: Recipe, tree: FederationTable) -> None:
    """Raise `ConfigError` for tree settings that do not work over a network.

    There a place is a node. With a clip each node clips what leaves it, adds its own noise, and
    keeps its own model.
    """
    require(
        tree.pool_clients,
        "federation.pool_clients",
        tree.pool_clients,
        "true over a network, where a place is a node",
        "For clients as members leave [federation] out, and let relays make the tree.",
    )
    require(
        tree.noise_seed is None,
        "federation.noise_seed",
        tree.noise_seed,
        "none over a network: each node draws its noise from a secret of its own",
        "Or simulate it, with fedlm train.",
    )
    for name in ("upload", "download"):
        require(
            tree.clip_norm == 0 or getattr(recipe.wire, name) == dense().name,
            f"wire.{name}",
            getattr(recipe.wire, name),
            f"{dense().name!r} with federation.clip_norm over a network: a leaf sends what it "
            "clipped, with its noise, as it is",
        )


def bounds_of(recipe: Recipe, vocabulary: int) -> Bounds:
    """Return the largest sums that a member can report for a round of a recipe."""
    client, rows = recipe.client, recipe.client.max_examples
    steps = min(client.max_steps or MOST_STEPS, MOST_STEPS)
    if rows is not None:
        steps = min(steps, client.epochs * -(-rows // client.batch_size))
    tokens = steps * client.batch_size * recipe.data.sequence_length
    weights = {"uniform": 1.0, "examples": float(rows or MOST_STEPS * client.batch_size)}
    return Bounds(
        steps=steps,
        tokens=tokens,
        weight=weights.get(client.weight, tokens),
        nats_per_token=MOST_GUESSES * math.log(vocabulary),
    )


def held_at_nodes(recipe: Recipe) -> bool:
    """Return whether nodes must have the frozen model themselves: no seed makes it."""
    return TRAINABLE[recipe.wire.trainable].leaves is not None and bool(recipe.model.init_from)


def told_to_nodes(recipe: Recipe, algorithm: Algorithm) -> str:
    """Return the recipe as every question to nodes carries it."""
    plan = algorithm.plan
    base = parts.base_sha256(algorithm) if held_at_nodes(recipe) else None
    return redacted(recipe, None if plan is None else plan.noise_multiplier, base)


def redacted(recipe: Recipe, noise: float | None = None, base: str | None = None) -> str:
    """Return the recipe as sent to nodes: without paths and secrets, with the resolved noise.

    `base` is the digest of a frozen model that nodes must have themselves.
    """
    privacy, kind = recipe.privacy, kind_of(recipe.data.tokenizer)
    if noise is not None:
        # Nodes learn that a seed is fixed, so that a policy can refuse it, but not its value.
        fixed = None if privacy.seed is None else 0
        privacy = privacy.model_copy(update={"noise_multiplier": noise, "seed": fixed})
    return dump(
        recipe.model_copy(
            update={
                "data": recipe.data.model_copy(update={**NO_PATHS, "tokenizer": kind}),
                "model": recipe.model.model_copy(update={"init_from": None, "base_sha256": base}),
                "run": recipe.run.model_copy(
                    update={
                        "devices": 0,
                        "shard": 1,
                        "prompts": (),
                        "cache_frozen": 0,
                        "frozen_folder": None,
                    }
                ),
                "privacy": privacy,
            }
        )
    )
