"""Private evaluation: `[privacy]` to noisy figures of training clients.

In:       a recipe with `privacy.evaluation_noise`, a plan, the rows of the clients or a way to ask
          the nodes that have them.
Out:      a `ScheduledEvaluation`, or None if nothing is asked for or nothing has to be hidden.
Promise:  the text is the validation split, which no round trains on; settings that would be passed
          over in silence are refused. Simulated and at nodes a client counts with the same numbers.
Not here: the noisy figures (`privacy/evaluation.py`), the ledger's line (`training/rounds.py`),
          asking (`engine/remote_evaluation.py`), answering (`deploy/node_evaluation.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fedlm.core.errors import require
from fedlm.core.types import FederationState, Figures, Params, ScoreFn
from fedlm.corpus.rows import ClientRows
from fedlm.evaluate.clients import by_owner
from fedlm.evaluate.perplexity import Evaluator
from fedlm.models import catalog
from fedlm.privacy import release
from fedlm.privacy.evaluation import (
    PrivateEvaluation,
    ScheduledEvaluation,
    Vector,
    releases,
)
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe

# Nats per token above a uniform guess with which a client still counts as it is.
WORSE_THAN_GUESSING = 1.0


class PlannedFigures(NamedTuple):
    """All releases of noisy figures of a run."""

    noise_multiplier: float  # of each
    releases: int

    @property
    def together(self) -> float:
        """The noise multiplier of the one Gaussian release that they amount to."""
        return self.noise_multiplier / math.sqrt(self.releases)


def private_evaluation_of(
    recipe: Recipe,
    rows: ClientRows,
    plan: PrivacyPlan | None,
    models: Callable[[FederationState], Mapping[str, Params]],
    *,
    score: ScoreFn = catalog.score,
    places: Mapping[str, Sequence[int]] | None = None,
) -> ScheduledEvaluation | None:
    """Return the noisy evaluation of training clients' held-out text that a recipe asks for.

    In a tree, `places` are the positions of each place's clients among the training clients. A
    client counts with the model of its own place, once, so one release costs what it costs in a
    flat run.
    """
    if not has_noisy_figures(recipe, plan):
        return None
    _check(recipe, plan)
    of = {"": range(len(rows.clients))} if places is None else places
    made = noisy_figures(recipe, rows.store.vocabulary)
    evaluator = cache(lambda: Evaluator(score, rows.store.special))

    @cache
    def text(place: str) -> tuple[np.ndarray, np.ndarray]:
        clients = rows.clients[np.asarray(of[place], int)]
        parts = [rows.held(int(number)) for number in clients]
        return np.concatenate(parts), np.repeat(clients, [len(part) for part in parts])

    def figures(state: FederationState) -> Figures:
        each: list[Any] = []
        of_places = models(state)
        for place in of:
            held, owners = text(place)
            each += by_owner(evaluator()(of_places[place], held), owners).values()
        sums = [(s.nats, s.tokens, s.correct) for s in each]  # none, if nobody has held-out text
        nats, tokens, right = np.array(sums, np.float64).reshape(-1, 3).T
        return made.release(nats, tokens, right, os.urandom(16))

    every = recipe.privacy.evaluation_every
    return ScheduledEvaluation(figures=figures, noise_multiplier=made.noise_multiplier, every=every)


def private_evaluation_at_nodes(
    recipe: Recipe,
    vocabulary: int,
    plan: PrivacyPlan | None,
    ask: Callable[[FederationState, PrivateEvaluation], Mapping[str, Vector]],
) -> ScheduledEvaluation | None:
    """Return the same evaluation where `ask` gets each node's noisy sum, by the node's name."""
    if not has_noisy_figures(recipe, plan):
        return None
    _check(recipe, plan)
    made = noisy_figures(recipe, vocabulary)
    return ScheduledEvaluation(
        figures=lambda state: made.figures_of(ask(state, made)),
        noise_multiplier=made.noise_multiplier,
        every=recipe.privacy.evaluation_every,
        at_nodes=True,
    )


def has_noisy_figures(recipe: Recipe, plan: PrivacyPlan | None) -> bool:
    """Return whether a recipe asks for noisy figures, and its plan leaves something to hide."""
    return recipe.privacy.evaluation_noise is not None and release.hides(plan)


def noisy_figures(recipe: Recipe, vocabulary: int) -> PrivateEvaluation:
    """Return with which numbers clients count in the noisy figures of a recipe."""
    asked = recipe.privacy
    assert asked.evaluation_noise is not None
    return PrivateEvaluation(
        noise_multiplier=asked.evaluation_noise,
        tokens=asked.evaluation_tokens,
        most_nats=math.log(vocabulary) + WORSE_THAN_GUESSING,
    )


def planned_figures(recipe: Recipe, plan: PrivacyPlan | None) -> PlannedFigures | None:
    """Return the releases of noisy figures that a recipe leads to; None if there are none."""
    asked, rounds = recipe.privacy, recipe.server.rounds
    if asked.evaluation_noise is None or not has_noisy_figures(recipe, plan):
        return None
    return PlannedFigures(asked.evaluation_noise, releases(rounds, asked.evaluation_every))


def refuse_private_evaluation(recipe: Recipe, where: str) -> None:
    """Raise `ConfigError` if a recipe asks for noisy figures where there are none."""
    noise = recipe.privacy.evaluation_noise
    require(noise is None, "privacy.evaluation_noise", noise, f"nothing {where}")


def _check(recipe: Recipe, plan: PrivacyPlan | None) -> None:
    asked, every = recipe.privacy, recipe.server.evaluate_every
    require(
        plan is not None and plan.unit == "client",
        "privacy.evaluation_noise",
        asked.evaluation_noise,
        "nothing beside federation.noise_multiplier: its noise hides a client, not a whole leaf",
    )
    require(
        asked.evaluation_every % every == 0,
        "privacy.evaluation_every",
        asked.evaluation_every,
        f"0 or a multiple of server.evaluate_every, which is {every}",
    )
    require(
        recipe.data.validation > 0,
        "privacy.evaluation_noise",
        asked.evaluation_noise,
        "data.validation above 0: the figures are of that text",
    )
