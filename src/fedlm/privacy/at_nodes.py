"""Noise that nodes add, each a share, before the server sees a sum.

In:       a plan with cohorts of fixed size, drawn or spaced.
Out:      the registry entry: what rounds cost, checks, against whom the claim holds.
Promise:  the cost counts no chance of staying out, because the server that draws cohorts is among
          those against whom it holds; it is an upper bound of what the shares of a run cost, which
          is compared with it before the first round (`recipe/secure_sums.py`).
Not here: the shares and the bound (`distributed.py`), secure sums (`secure`).

One round. With shares for a noise multiplier z (`distributed.shares_for`), D^2 / (h s) <= 1 / z^2.
The bound on rho is then (1/z + T sqrt(d))^2 / 2 at most. Shares have a variance s of 16 or more, so
that T = 10 sum exp(-2 pi^2 s k/(k+1)) <= 10 h exp(-pi^2 s) < 10 h 10^-68: with h <= 1024 and
d <= 2^33 T sqrt(d) is below 10^-58. A factor of 1 + 10^-9 covers it for every z up to 10^6.

All rounds. Noise is fresh in every round and the server may choose a round by those before: the rho
of the rounds in which a client takes part add up.
"""

from __future__ import annotations

import math

from fedlm.core.errors import require
from fedlm.privacy import cost
from fedlm.privacy.mechanism import Cost, Mechanism
from fedlm.privacy.noise import Noise, silent
from fedlm.privacy.plan import PrivacyPlan, check_separation, check_without_separation
from fedlm.privacy.sensitivity import participations

LEAST_VARIANCE = 16  # of a share, in squared steps
SLACK = 1 + 1e-9


def round_rho(plan: PrivacyPlan) -> float:
    """Return the zCDP of a round in which a client takes part."""
    return SLACK / (2 * plan.noise_multiplier**2) if plan.noise_multiplier else math.inf


def _turns(plan: PrivacyPlan, rounds: int) -> int:
    """Return in how many of the first rounds a client can take part."""
    sampling = plan.sampling
    if sampling.law != "spaced":
        return rounds
    return participations(rounds, sampling.min_separation, sampling.max_participations)


def _noise(plan: PrivacyPlan, stddev: float) -> Noise:
    """Return nothing for the server to add: the sum that it opens has its noise."""
    return silent()


def _cost(plan: PrivacyPlan, rounds: int) -> Cost:
    turns = _turns(plan, rounds)
    rho = turns * round_rho(plan) if turns else 0.0
    counted = (
        f"a client takes part in at most {turns} of {rounds} rounds; no chance of staying out is "
        "counted, because the server knows who was drawn"
    )
    return Cost(
        cost.epsilon_of_rho(rho, plan.delta),
        "zCDP of sums of discrete Gaussian shares",
        (counted,),
        rho,
    )


def _trusted(plan: PrivacyPlan) -> str:
    return (
        f"it holds against the server together with all nodes but {plan.honest_nodes} of those "
        "that stay in a sum: these clip, add their share of the noise and keep it to themselves; "
        "a client trusts its own node with its text"
    )


def _check(plan: PrivacyPlan) -> None:
    require(
        plan.noise_multiplier > 0,
        "privacy.noise_multiplier",
        plan.noise_multiplier,
        "more than 0 with privacy.mechanism = 'distributed'",
    )
    require(
        plan.honest_nodes >= 1,
        "privacy.honest_nodes",
        plan.honest_nodes,
        "at least 1 with privacy.mechanism = 'distributed': how many of the nodes that stay keep "
        "their noise to themselves",
    )
    require(
        not plan.reveal,
        "privacy.reveal",
        plan.reveal,
        "false with privacy.mechanism = 'distributed': nobody sees sums without noise",
    )
    require(
        plan.clip_quantile == 0,
        "privacy.clip_quantile",
        plan.clip_quantile,
        "0 with privacy.mechanism = 'distributed': counts would have no noise",
    )
    if plan.sampling.law == "spaced":
        return check_separation(plan.sampling, plan.rounds)
    check_without_separation(plan.sampling)


def _event(plan: PrivacyPlan, rounds: int) -> cost.DpEvent:
    return cost.zcdp_event(round_rho(plan), _turns(plan, rounds))


DISTRIBUTED = Mechanism(
    noise=_noise,
    cost=_cost,
    event=_event,
    check=_check,
    laws=("fixed", "spaced"),
    reason="because the range of a secure sum is made for a cohort of known size, and no chance of "
    "staying out is counted",
    way_out="Or set server.sampling = 'fixed'.",
    settings=("honest_nodes",),
    clip_moves="every round",
    independent=True,
    turn_event=lambda plan, turns: cost.zcdp_event(round_rho(plan), turns),
    at_nodes=True,
    trusted=_trusted,
    replay_laws=("fixed",),
)
