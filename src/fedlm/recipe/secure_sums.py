"""How a round's updates become one change: a plain sum, a secure sum, or a robust centre.

In:       a recipe, the engine that trains its members.
Out:      that engine, or one around it.
Promise:  under a privacy plan the integers of an update are no longer than the plan's clip, so
          that its noise on the sum is enough.
Not here: which settings exclude each other (`sum_rules.py`), the engines (`engine/secure.py`,
          `engine/robust.py`), the rules (`server/robust.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlm.cohort.sampling import most_members
from fedlm.core import tree
from fedlm.core.errors import require
from fedlm.core.keys import digest_for, generator_for, key_for
from fedlm.core.types import Engine, PyTree
from fedlm.engine.robust import RobustEngine, flattened, like_model
from fedlm.engine.secure import Nodes, NodeSums, SecureEngine
from fedlm.engine.secure_local import LocalNodeSums
from fedlm.federation.algorithm import Algorithm
from fedlm.privacy.at_nodes import LEAST_VARIANCE, round_rho
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.distributed import DistributedNoise, shares_for
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe
from fedlm.recipe.sum_rules import check_honest_nodes, secure_threshold_of
from fedlm.secure.terms import Member, Terms
from fedlm.server.robust import RULES, bounded
from fedlm.wire.bitwise import seed_of
from fedlm.wire.catalog import named
from fedlm.wire.dense import dense
from fedlm.wire.fixed_point import FixedPoint, grid_of
from fedlm.wire.rotation import layout, rotated, unrotated

BLOCK = 4096  # values that are rotated together


@dataclass(frozen=True)
class UpdateIntegers:
    """The integers of updates: bounded value by value, and by their norm under a plan."""

    grid: FixedPoint
    seed: int
    private: bool
    rotate: bool = False  # by a rotation that all members of a round share
    bound: float = math.inf  # the plan's clip norm: noise is made for it, whatever a round says

    @property
    def bits(self) -> int:
        """Sums are modulo 2^bits."""
        return self.grid.bits

    @property
    def members(self) -> int:
        """The most updates of a sum."""
        return self.grid.members

    def size(self, like: PyTree) -> int:
        """Return how many integers an update has: a rotation fills up its last block."""
        total = tree.size(like)
        return sum(n * block for n, block in layout(total, BLOCK)) if self.rotate else total

    def rounded(self, delta: PyTree, clip_norm: float, round: int, member: int) -> np.ndarray:
        """Return the integers of one update, drawn by its own address."""
        flat = flattened(delta)
        if self.rotate:
            flat = np.asarray(
                rotated(flat.astype(np.float32), self._rotation(round), BLOCK), np.float64
            )
        if not self.private:
            rng = generator_for(self.seed, "upload", round=round, member=member)
            return self.grid.rounded(flat, rng.random(len(flat)))
        seed = digest_for(self.seed, "upload", round=round, member=member)
        longest = min(clip_norm, self.bound)  # in 32 bits a clip norm may be a little longer
        within = norm_before_rounding(longest, self.grid.step, len(flat))
        rounding = DistributedNoise(clip=within, size=len(flat), variance=1, honest=1)
        inside = np.clip(flat, -self.grid.clip, self.grid.clip)
        return rounding.rounded(inside / self.grid.step, seed)

    def _rotation(self, round: int) -> Any:
        return seed_of(key_for(self.seed, "rotation", round=round))

    def wrapped(self, total: np.ndarray) -> np.ndarray:
        """Return signed integers as words modulo 2^bits."""
        return self.grid.wrapped(total)

    def values(self, words: np.ndarray, like: PyTree, round: int) -> PyTree:
        """Return the numbers of a sum in the shapes of a model."""
        if not self.rotate:
            return self.grid.values(words, like)
        turned = (self.grid.signed(words) * self.grid.step).astype(np.float32)
        return like_model(
            np.asarray(unrotated(turned, self._rotation(round), tree.size(like), BLOCK)), like
        )


def norm_before_rounding(clip_norm: float, step: float, size: int) -> float:
    """Return the norm, in steps, to which an update is shortened so that rounded it fits the clip.

    It is the largest c whose bound after conditional rounding (`privacy/distributed.py`) is at most
    the clip. Refuses a grid so coarse that rounding alone would fill the clip.
    """
    most = (clip_norm / step) ** 2 - 1  # the bound is rounded up to a whole number
    root = 0.25 + most - size / 4 - math.sqrt(size) / 2
    by_chance = -0.5 + math.sqrt(root) if root > 0.25 else 0.0
    by_worst = math.sqrt(max(most, 0.0)) - math.sqrt(size)
    within = max(by_chance, by_worst)
    require(
        within > 0.5 * clip_norm / step,
        "wire.upload",
        f"a step of {step:g}",
        f"a finer one: rounding {size} values would take more than half of the clip "
        f"norm {clip_norm:g}",
        "Give the codec more bits or fewer members.",
    )
    return within


def engine_for(recipe: Recipe, algorithm: Algorithm, make: Callable[[Algorithm], Engine]) -> Engine:
    """Return the engine of a flat simulation; `make` returns the one that trains its members."""
    wire = recipe.wire
    if wire.secure_nodes:
        exact = dataclasses.replace(algorithm, upload=dense())
        nodes = LocalNodeSums(make(exact), nodes_of(recipe), recipe.run.seed)
        return secure_engine(recipe, algorithm, nodes)
    return with_centre(recipe, algorithm, make(algorithm))


def secure_engine(recipe: Recipe, algorithm: Algorithm, sums: NodeSums) -> SecureEngine:
    """Return the engine whose totals are secure sums of nodes, here or on a network."""
    integers, shares = integers_of(recipe, algorithm), shares_of(recipe, algorithm)
    most = most_members(algorithm.sampling, recipe.server.rounds)
    require(
        most <= integers.members,
        "wire.upload",
        recipe.wire.upload,
        f"room for {most} members: server.sampling = {algorithm.sampling.law!r} draws cohorts of "
        f"different sizes, {algorithm.sampling.cohort} on average",
    )
    return SecureEngine(algorithm, sums, integers, shares)


def with_centre(recipe: Recipe, algorithm: Algorithm, inner: Engine) -> Engine:
    """Return an engine whose totals follow the recipe's rule, which may look at single updates."""
    server = recipe.server
    if server.aggregate == "mean" and server.update_norm is None:
        return inner
    require(
        not algorithm.memory_at_nodes,
        "server.aggregate" if server.update_norm is None else "server.update_norm",
        server.aggregate if server.update_norm is None else server.update_norm,
        "nothing over a network where members remember something (client.method, "
        "wire.error_feedback)",
    )
    norm = math.inf if server.update_norm is None else server.update_norm
    return RobustEngine(
        inner,
        algorithm,
        functools.partial(_centre, server.aggregate, server.trim),
        functools.partial(bounded, norm=norm),
    )


def integers_of(recipe: Recipe, algorithm: Algorithm) -> UpdateIntegers:
    """Return the integers of a recipe's updates, the same at the server and at every node."""
    wire, plan, grid = recipe.wire, algorithm.plan, grid_of(algorithm.upload)
    if plan is not None:
        require(
            plan.clip_norm <= grid.clip or wire.secure_rotation,
            "privacy.clip_norm",
            plan.clip_norm,
            f"at most {grid.clip:g}, the bound of wire.upload = {wire.upload!r}",
            "Or set wire.secure_rotation, which spreads an update over all values.",
        )
    bound = math.inf if plan is None else plan.clip_norm
    return UpdateIntegers(grid, recipe.run.seed, plan is not None, wire.secure_rotation, bound)


def nodes_of(recipe: Recipe, members: int = 0) -> Nodes:
    """Return the terms of a list of so many members, by default of all nodes of a flat federation.

    Every list has the same share of its members as threshold, and as many honest nodes. Below a
    relay those carry the plan's noise by themselves; above it a relay that is honest carries the
    noise of one node at least.
    """
    n, honest = members or recipe.wire.secure_nodes, recipe.privacy.honest_nodes
    threshold = secure_threshold_of(recipe, n)
    if honest:
        check_honest_nodes(n, threshold, honest)
    k = recipe.wire.secure_neighbors
    return Nodes(
        count=n,
        threshold=threshold,
        colluders=threshold - honest if honest else 0,
        neighbors=k if k < n else 0,
    )


def terms_of(recipe: Recipe, members: tuple[Member, ...], size: int) -> Terms:
    """Return the terms of a list's secure sums, of vectors of so many values."""
    bits = grid_of(named("wire.upload", recipe.wire.upload)).bits
    return nodes_of(recipe, len(members)).terms(members, bits=bits, size=size)


def shares_of(recipe: Recipe, algorithm: Algorithm) -> Callable[[Any], DistributedNoise] | None:
    """Return the noise that nodes share out, by the shapes of an update; None if they add none."""
    plan = algorithm.plan
    if plan is None or not MECHANISMS[plan.mechanism].at_nodes:
        return None
    integers, nodes = integers_of(recipe, algorithm), recipe.wire.secure_nodes
    return functools.partial(_shares, plan, integers, nodes)


def _shares(
    plan: PrivacyPlan, integers: UpdateIntegers, nodes: int, like: PyTree
) -> DistributedNoise:
    """Return the shares of noise for updates of some shapes; refuse a grid that does not fit."""
    size, grid = integers.size(like), integers.grid
    made = shares_for(
        clip=norm_before_rounding(plan.clip_norm, grid.step, size),
        size=size,
        noise_multiplier=plan.noise_multiplier,
        honest=plan.honest_nodes,
    )
    require(
        made.variance >= LEAST_VARIANCE and made.rho <= round_rho(plan),
        "wire.upload",
        f"a step of {grid.step:g}",
        f"a finer one: a share of the noise would have a variance of {made.variance} squared "
        f"steps, and sums of shares are nearly normal from {LEAST_VARIANCE} on",
        "Give the codec more bits.",
    )
    largest = math.ceil(min(grid.clip, plan.clip_norm) / grid.step)
    room, wanted = 2 ** (grid.bits - 1) - 1 - plan.sampling.cohort * largest, made.reserve(nodes)
    require(
        room >= wanted,
        "wire.upload",
        f"{grid.bits} bits for {grid.members} members",
        f"room for the noise of {nodes} nodes: it takes {wanted} steps, and {room} are free beside "
        f"{plan.sampling.cohort} updates",
        "Give the codec twice the members, which leaves half of its range to the noise.",
    )
    return made


def _centre(rule: str, trim: float, updates: np.ndarray) -> np.ndarray:
    return RULES[rule](updates, trim)
