"""Whether a question is one that its recipe makes possible.

In:       a request, its recipe and plan, how many members this place answers for.
Out:      nothing, or a `Refusal` with the sentence that the server is told.
Promise:  an honest server's question is never refused here (once in 10^12 draws, where chance
          decides); a round that was not planned, a clip norm that the plan does not lead to, more
          members or turns than it draws, and single updates that nothing needs, are refused.
Not here: the form of a request (`engine/messages.py`), what the policy says of the recipe
          (`policy.py`), what was answered before (`node_ledger.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from fedlm.cohort.sampling import LAWS
from fedlm.core import words
from fedlm.core.late import late
from fedlm.deploy.policy import Policy, Refusal
from fedlm.engine.evaluate_messages import EvaluateRequest
from fedlm.engine.messages import TrainRequest
from fedlm.engine.secure_messages import SecureRequest
from fedlm.models.partial import TRAINABLE
from fedlm.privacy import release
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.clip import LONGEST, SHORTEST
from fedlm.privacy.evaluation import is_due, releases
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.private_evaluation import has_noisy_figures
from fedlm.recipe.settings import Recipe
from fedlm.wire.catalog import named
from fedlm.wire.dense import dense

scipy = late("scipy")  # up to a second

# The share of honest draws that may be taken for a dishonest one.
CHANCE = 1e-12
# What float32 can move a clip norm by in one round, relative to it.
ROUNDING = 1e-6


class Asked(NamedTuple):
    """Who is asked: a node, or all nodes below a relay."""

    members: int  # that it answers for
    clients_per_member: int = 1  # more where a store is one member


def check_question(
    policy: Policy, request: TrainRequest, recipe: Recipe, plan: PrivacyPlan | None, asked: Asked
) -> None:
    """Raise `Refusal` if a question does not follow from the recipe, or the policy forbids it."""
    rounds = recipe.server.rounds
    if request.round >= rounds:
        raise Refusal(f"round {request.round} is asked for: the recipe has {rounds} rounds.")
    _check_population(policy, request, asked)
    _check_single(policy, request, recipe, plan, asked)
    if plan is not None:
        _check_clip(plan, request)
        _check_count(plan, request, asked)


def check_evaluation(
    policy: Policy,
    request: EvaluateRequest,
    recipe: Recipe,
    plan: PrivacyPlan | None,
    asked: Asked,
) -> None:
    """Raise `Refusal` if a question about held-out text does not follow from the recipe."""
    rounds = recipe.server.rounds
    if request.round > rounds:
        raise Refusal(f"figures after round {request.round}: the recipe has {rounds} rounds.")
    _check_population(policy, request, asked)
    if request.phase == "keep":
        return  # nothing is told: the node gets a model
    if request.phase == "noisy":
        _check_figures(policy, request, recipe, plan, asked)
        return
    told = release.splits(plan, request.splits)
    if set(told) != set(request.splits):
        raise Refusal(
            "figures of training clients are asked for: under a privacy plan without "
            "privacy.reveal this node tells those of held-out clients only."
        )


def _check_figures(
    policy: Policy,
    request: EvaluateRequest,
    recipe: Recipe,
    plan: PrivacyPlan | None,
    asked: Asked,
) -> None:
    """Raise `Refusal` for noisy figures that the recipe has not, or the policy forbids."""
    if not has_noisy_figures(recipe, plan) or plan is None or plan.unit != "client":
        raise Refusal(
            "noisy figures of training clients are asked for: the recipe has none "
            "(privacy.evaluation_noise beside a privacy plan without privacy.reveal)."
        )
    if request.round < 1:
        raise Refusal("noisy figures before the first round are asked for: the recipe has none.")
    clients = asked.members * asked.clients_per_member  # as the node says when it joins
    if clients < policy.least_evaluated:
        raise Refusal(
            f"noisy figures of {words.count(clients, 'client')}: this node wants at least "
            f"{policy.least_evaluated} behind a figure (smallest_evaluation in its policy)."
        )


def check_figures_due(request: EvaluateRequest, recipe: Recipe, told: Collection[int]) -> None:
    """Raise `Refusal` if a run would tell more noisy figures than its recipe plans.

    A run that ends early, because its budget holds fewer rounds, tells its last figures after a
    round of its own: one such round is answered, in place of the last one of the recipe. However
    a server asks, a run tells no more figures than its recipe plans.

    Args:
      request: the question.
      recipe: its recipe.
      told: the other rounds after which noisy figures were told in this run.
    """
    rounds, every = recipe.server.rounds, recipe.privacy.evaluation_every
    most = releases(rounds, every)
    if len(told) >= most:
        raise Refusal(
            f"noisy figures after round {request.round}: the recipe leads to "
            f"{words.count(most, 'such answer')} in a run, and so many were given."
        )
    early = [round for round in (*told, request.round) if not is_due(every, round, rounds)]
    if request.round in early and len(early) > 1:
        raise Refusal(
            f"noisy figures after round {request.round}: the recipe has them "
            + (f"every {every} rounds and " if every else "")
            + f"after the last round, and this run told some after round {early[0]}, with which a "
            "run ends early."
        )


def check_part(
    policy: Policy,
    request: SecureRequest,
    recipe: Recipe,
    plan: PrivacyPlan | None,
    threshold: int,
    asked: Asked,
) -> None:
    """Raise `Refusal` if a secure sum could show less than the policy wants to be added up.

    Args:
      policy: the policy.
      request: a question of any step.
      recipe: its recipe.
      plan: the recipe's plan.
      threshold: how many nodes must sign one list of survivors before it is opened.
      asked: how many members this place answers for.
    """
    least = policy.smallest_sum
    if least is not None and threshold < least:
        raise Refusal(
            f"wire.secure_threshold = {recipe.wire.secure_threshold}: a sum of {threshold} nodes "
            f"of this node's list could be opened, and this node wants at least {least} "
            "(smallest_sum in its policy)."
        )
    at_nodes = plan is not None and MECHANISMS[plan.mechanism].at_nodes
    part, clients = policy.least_part(noise_at_nodes=at_nodes), len(request.members)
    if 0 < clients * asked.clients_per_member < part:
        raise Refusal(
            f"{words.count(clients, 'client')} of this node in round {request.round}: this node "
            f"wants at least {part} or none, because a server that draws nobody else opens their "
            "sum (smallest_part in its policy; privacy.mechanism = 'distributed' covers one alone)."
        )


def most_turns(plan: PrivacyPlan | None) -> float:
    """Return in how many rounds one client can take part."""
    if plan is None:
        return math.inf
    law = LAWS[plan.sampling.law]
    if not law.by_chance:
        return plan.sampling.max_participations or math.inf
    turns = -(-plan.rounds // (plan.sampling.min_separation + 1))
    # By chance anew in each round in which it may be its turn, or once for all of them.
    return turns if law.looks_back else _most_of(turns, _share(plan))


def single_updates_for(recipe: Recipe) -> str:
    """Return the setting because of which updates cannot be added at a node; nothing if they can.

    A rule that looks at single updates, or bounds them, needs them at the server.
    """
    wire, server = recipe.wire, recipe.server
    if named("wire.upload", wire.upload).name != dense().name:
        return f"wire.upload = {wire.upload!r}"
    if TRAINABLE[wire.trainable].by_member:
        return f"wire.trainable = {wire.trainable!r}"
    if server.aggregate != "mean":
        return f"server.aggregate = {server.aggregate!r}"
    if server.update_norm:
        return f"server.update_norm = {server.update_norm:g}"
    return "" if recipe.federation is None else "[federation]"


def _check_population(
    policy: Policy, request: TrainRequest | EvaluateRequest, asked: Asked
) -> None:
    told, least = request.population, policy.smallest_population
    if least is not None and told < least:
        raise Refusal(f"the federation has {told} clients: this node wants at least {least}.")
    if told < request.first + asked.members:
        raise Refusal(
            f"the federation is said to have {told} clients, but this node alone has "
            f"{asked.members}, from number {request.first} on."
        )


def _check_single(
    policy: Policy, request: TrainRequest, recipe: Recipe, plan: PrivacyPlan | None, asked: Asked
) -> None:
    if recipe.wire.secure_nodes:  # `check_part` has seen to who is alone
        if request.each:
            raise Refusal("the update of each member is asked for: this recipe has secure sums.")
        return
    needed, allowed = single_updates_for(recipe), policy.allows_single_updates
    if request.each and not needed and (plan is not None or not allowed):
        raise Refusal(
            "the update of each member by itself is asked for: this recipe needs their sum alone."
        )
    alone = request.each or len(request.members) == 1
    if alone and asked.clients_per_member == 1 and not allowed:
        what = f"{needed}: updates would leave one by one"
        if not request.each:
            what = "one client of this node is asked alone: its sum would be its own update"
        raise Refusal(
            f"{what}. This node does not allow it (single_updates or smallest_cohort in its "
            "policy)."
        )


def _check_clip(plan: PrivacyPlan, request: TrainRequest) -> None:
    """Refuse a clip norm that the plan cannot have led to by this round."""
    low = high = plan.clip_norm
    if plan.clip_quantile:  # moved by exp(-rate * (share - quantile)), share between 0 and 1
        reach = plan.clip_rate * request.round
        low = max(SHORTEST, low * math.exp(-min(700.0, reach * (1 - plan.clip_quantile))))
        high = min(LONGEST, high * math.exp(min(700.0, reach * plan.clip_quantile)))
    slack = 1 + ROUNDING * (request.round + 1)
    if not low / slack <= request.clip_norm <= high * slack:
        planned = f"{high:g}" if low == high else f"between {low:.3g} and {high:.3g}"
        raise Refusal(f"clip_norm = {request.clip_norm:g} is asked for: the plan has {planned}.")


def _check_count(plan: PrivacyPlan, request: TrainRequest, asked: Asked) -> None:
    cohort = plan.sampling.cohort
    exactly = plan.sampling.law in ("fixed", "spaced")
    most = cohort if exactly else _most_of(asked.members, _share(plan))
    if len(request.members) > most:
        raise Refusal(
            f"{len(request.members)} members of this node are asked in one round: with "
            f"server.cohort = {cohort} there can be {most:g}."
        )


def _share(plan: PrivacyPlan) -> float:
    """Return the chance that a client joins a round in which it may be its turn."""
    sampling = plan.sampling
    return min(1.0, sampling.cohort * (sampling.min_separation + 1) / sampling.population)


def _most_of(tries: int, share: float) -> float:
    """Return a number of successes that honest draws exceed with chance `CHANCE` at most."""
    low, high = -1, tries  # nobody exceeds `high`, `low` is exceeded too often
    while high - low > 1:
        middle = (low + high) // 2
        rare = share < 1 and scipy.special.bdtrc(middle, tries, share) <= CHANCE
        low, high = (low, middle) if rare else (middle, high)
    return high
