"""A recipe as one node sees it: its own text, the numbers of the whole federation.

In:       a recipe that a server has or sent, the node's store.
Out:      the recipe as it is sent; an experiment that trains members of this node, or all its text
          as a place of a tree.
Promise:  the members' programs, shuffles and keys are those of the simulation; a recipe that works
          only where all members are in one place is refused with the way out.
Not here: whether the node allows it (`policy.py`), messages (`client_app.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedlm.core.errors import require
from fedlm.core.types import Engine, Sampling
from fedlm.corpus.tokenizer import kind_of
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.models import catalog
from fedlm.recipe import privacy_plan
from fedlm.recipe.branches import TreeExperiment
from fedlm.recipe.build import Experiment
from fedlm.recipe.federation import Federation
from fedlm.recipe.settings import Recipe, dump
from fedlm.wire.dense import dense


@dataclass(frozen=True)
class Local(Experiment):
    """The clients of this store as members of a flat federation."""

    first: int = 0
    population: int = 0
    whole: bool = False  # the store is one member, not one a client

    @cached_property
    def sampling(self) -> Sampling:
        return privacy_plan.sampling_of(self.recipe, self.population)

    @cached_property
    def engine(self) -> Engine:
        """Takes what arrived, and gives updates as they are before they are sent."""
        kind = {"mesh": MeshEngine, "loop": LoopEngine}[self.recipe.run.engine]
        bare = replace(self.algorithm, upload=dense(), download=dense())
        return kind(bare, self._rows_of, self.shape, self.recipe.run.seed)

    @cached_property
    def sent_like(self) -> Any:
        """The shapes of what a server sends down."""
        server = self.algorithm.server
        like = catalog.shapes(self.architecture, self.size)
        return jax.eval_shape(lambda params: server.send(params, server.init(params)), like)

    def _rows_of(self, member: int) -> np.ndarray:
        if self.whole:
            return self._all_rows
        return self.rows.train(member - self.first)


@dataclass(frozen=True)
class LocalPlace(TreeExperiment):
    """All text of this store as one place of a tree, whatever the rest of the tree is."""

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(law="fixed", population=1, cohort=1)

    @cached_property
    def sent_like(self) -> Any:
        """The shapes of what the root sends down: a model."""
        return catalog.shapes(self.architecture, self.size)

    def _rows_of(self, member: int) -> np.ndarray:
        return self._all_rows


def check_deployable(recipe: Recipe) -> None:
    """Refuses what works only where all members are in one place."""
    require(
        recipe.client.method in ("fedavg", "mimelite") and not recipe.wire.error_feedback,
        "client.method",
        recipe.client.method,
        "'fedavg' or 'mimelite' without wire.error_feedback over a network: what members remember "
        "between their turns is not kept at nodes",
    )
    require(not recipe.data.groups, "data.groups", recipe.data.groups, "none over a network")
    if recipe.federation is not None:
        _check_tree(recipe.federation)


def _check_tree(tree: Federation) -> None:
    """Over a network the root holds the models of all places, and nodes keep nothing."""
    simulate = "Or simulate it, with fedlm train."
    require(
        tree.pool_clients,
        "federation.pool_clients",
        tree.pool_clients,
        "true over a network, where a place is a node",
        "For clients as members leave [federation] out, and let relays make the tree.",
    )
    require(
        tree.weight == "uniform",
        "federation.weight",
        tree.weight,
        "'uniform' over a network: nodes do not tell how much text they have",
        "federation.node.weight says how much a place counts.",
    )
    require(
        tree.clip_norm == 0 and tree.noise_multiplier == 0,
        "federation.clip_norm",
        tree.clip_norm,
        "neither clip nor noise over a network: the root holds the places' models as they are",
        simulate,
    )
    require(
        not tree.keep_optimizer,
        "federation.keep_optimizer",
        tree.keep_optimizer,
        "false over a network: nodes keep nothing between rounds",
        simulate,
    )


def redacted(recipe: Recipe, noise: float | None = None) -> str:
    """The recipe as nodes are told it: no paths, no secret, the noise that was found."""
    privacy = recipe.privacy
    if noise is not None:
        # That a seed is fixed is told, so that a policy can refuse it; not which one.
        fixed = None if privacy.seed is None else 0
        privacy = privacy.model_copy(update={"noise_multiplier": noise, "seed": fixed})
    return dump(
        recipe.model_copy(
            update={
                "data": recipe.data.model_copy(
                    update={
                        "source": None,
                        "store": None,
                        "stores": (),
                        "tokenizer": kind_of(recipe.data.tokenizer),
                    }
                ),
                "model": recipe.model.model_copy(update={"init_from": None}),
                "run": recipe.run.model_copy(update={"devices": 0, "prompts": ()}),
                "privacy": privacy,
            }
        )
    )
