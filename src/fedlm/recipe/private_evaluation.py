"""Private evaluation: `[privacy]` to noisy figures of training clients.

In:       a recipe with `privacy.evaluation_noise`, the rows of the clients, a plan.
Out:      a `ScheduledEvaluation`, or None if nothing is asked for or nothing has to be hidden.
Promise:  the text is the validation split, which no round trains on; settings that would be passed
          over in silence are refused.
Not here: the noisy figures (`privacy/evaluation.py`), the ledger's line (`training/rounds.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from fedlm.core.errors import require
from fedlm.core.types import FederationState, Figures, Params, ScoreFn
from fedlm.corpus.rows import ClientRows
from fedlm.evaluate.clients import by_owner
from fedlm.evaluate.perplexity import Evaluator
from fedlm.models import catalog
from fedlm.privacy import release
from fedlm.privacy.evaluation import PrivateEvaluation, ScheduledEvaluation
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe

# Nats per token above a uniform guess with which a client still counts as it is.
WORSE_THAN_GUESSING = 1.0


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
    asked = recipe.privacy
    if asked.evaluation_noise is None or not release.hides(plan):
        return None
    _check(recipe, plan)
    of = {"": range(len(rows.clients))} if places is None else places
    made = PrivateEvaluation(
        noise_multiplier=asked.evaluation_noise,
        tokens=asked.evaluation_tokens,
        most_nats=math.log(rows.store.vocabulary) + WORSE_THAN_GUESSING,
    )
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
        nats, tokens, right = np.array([(s.nats, s.tokens, s.correct) for s in each]).T
        return made.release(nats, tokens, right, os.urandom(16))

    return ScheduledEvaluation(
        figures=figures, noise_multiplier=asked.evaluation_noise, every=asked.evaluation_every
    )


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
