"""Independent Gaussian noise, whose cost counts on the chance of staying out of a round.

In:       a plan with Poisson, balls-in-bins or fixed-size cohorts.
Out:      the registry entry: noise, cost, checks.
Promise:  the cost is that of the sampling law that the plan names.
Not here: how dp_accounting computes it (`cost.py`), correlated noise (`spaced.py`).
"""

from __future__ import annotations

import math

from fedlm.privacy import balls_in_bins, cost
from fedlm.privacy.bin_samples import Overlap
from fedlm.privacy.mechanism import Cost, Mechanism
from fedlm.privacy.noise import Noise, gaussian
from fedlm.privacy.plan import PrivacyPlan, check_bins, check_without_separation


def _noise(plan: PrivacyPlan, stddev: float) -> Noise:
    return gaussian(stddev)


def _check(plan: PrivacyPlan) -> None:
    """Refuse a minimum separation where the sampling law does not keep it."""
    if plan.sampling.law == balls_in_bins.LAW:
        return check_bins(plan.sampling, plan.rounds)
    check_without_separation(plan.sampling)


def _cost(plan: PrivacyPlan, rounds: int) -> Cost:
    if plan.unit == "leaf":
        return _leaf(plan, rounds)
    sampling = plan.sampling
    epsilon, accountant = cost.compose([_event(plan, rounds)], plan.delta)
    if sampling.law == "poisson":
        name = f"{accountant} of Poisson-sampled Gaussian noise"
        drawn = (
            f"every client joins each round by its own coin, with probability {sampling.cohort} in "
            f"{sampling.population}, and who joined stays secret"
        )
    elif sampling.law == balls_in_bins.LAW:
        name = f"{accountant} of Gaussian noise on balls-in-bins cohorts"
        drawn = in_bins(plan)
    else:
        name = f"{accountant} of Gaussian noise on fixed-size cohorts"
        drawn = (
            f"each cohort is {sampling.cohort} of {sampling.population} clients, drawn without "
            "replacement, and who joined stays secret; another client takes the place of one that "
            "stays out, so server.sampling = 'poisson' costs less"
        )
    return Cost(epsilon, name, (drawn,))


def _leaf(plan: PrivacyPlan, rounds: int) -> Cost:
    """Return the cost of noise that each leaf of a tree adds itself: no leaf stays out."""
    moved = math.sqrt(rounds) / plan.noise_multiplier if plan.noise_multiplier else math.inf
    return Cost(
        cost.epsilon_of_shift(moved, plan.delta) if rounds else 0.0,
        "exact Gaussian profile",
        ("a leaf sends one clipped and noisy change in every round, and nothing else",),
    )


def _event(plan: PrivacyPlan, rounds: int) -> cost.DpEvent:
    """Return what rounds release about one client, also where the unit is a leaf of a tree.

    A leaf without one of its clients sends another change, not none: it moves by twice the clip.
    """
    sampling = plan.sampling
    if plan.unit == "leaf":
        return cost.gaussian_event(plan.noise_multiplier / 2, rounds)
    if sampling.law == "poisson":
        return cost.sampled_event(plan.noise_multiplier, _rate(plan), rounds)
    if sampling.law == balls_in_bins.LAW:
        return bins_event(plan, rounds, bands=1)
    return cost.fixed_size_event(
        plan.noise_multiplier, sampling.cohort, sampling.population, rounds
    )


def bins_event(
    plan: PrivacyPlan, rounds: int, bands: int, overlap: Overlap | None = None
) -> cost.DpEvent:
    """Return what rounds release about a client whose bin is secret."""
    bins, share = plan.sampling.min_separation + 1, bin_share(plan)
    return cost.balls_in_bins_event(plan.noise_multiplier, rounds, bins, bands, share, overlap)


def bin_share(plan: PrivacyPlan) -> float:
    """Return the chance that a client is in a bin at all."""
    sampling = plan.sampling
    return sampling.cohort * (sampling.min_separation + 1) / sampling.population


def in_bins(plan: PrivacyPlan) -> str:
    """Say how balls-in-bins cohorts are drawn."""
    bins, out = plan.sampling.min_separation + 1, 1 - bin_share(plan)
    none = f", or with probability {out:.3g} into none," if out > 1e-9 else ""
    return (
        f"before the first round each client falls into one of {bins} bins by chance{none} and "
        f"joins every {bins}th round, that of its bin; who is in which bin stays secret"
    )


def _rate(plan: PrivacyPlan) -> float:
    return plan.sampling.cohort / plan.sampling.population


def _first_guess(plan: PrivacyPlan, epsilon: float) -> float:
    """Return a noise multiplier to start the search at, by RDP, which is quicker than PLD.

    Cohorts of fixed size need a little more than Poisson cohorts: the search goes up from there.
    """
    noise = 1.0

    def quick(multiplier: float) -> float:
        return cost.poisson_by_rdp(multiplier, _rate(plan), plan.rounds, plan.delta)

    while quick(noise) > epsilon and noise < cost.MOST_NOISE:
        noise *= 1.3
    while quick(noise / 1.1) <= epsilon and noise > 1 / cost.MOST_NOISE:
        noise /= 1.1
    return noise


GAUSSIAN = Mechanism(
    noise=_noise,
    cost=_cost,
    event=_event,
    check=_check,
    laws=("poisson", "fixed", balls_in_bins.LAW),
    reason="because the cost of gaussian noise is computed from the chance of joining a round and "
    "a separation leaves no such chance",
    way_out="Or set server.sampling = 'poisson'.",
    clip_moves="every round",
    independent=True,
    turn_event=lambda plan, turns: cost.gaussian_event(plan.noise_multiplier, turns),
    replay_laws=("poisson", "fixed"),
    chance_laws=("poisson", "fixed", balls_in_bins.LAW),
    first_guess=_first_guess,
)
