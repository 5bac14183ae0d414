"""Correlated noise on spaced cohorts: tree, banded, toeplitz, blt.

In:       a plan in which a client rests between two turns.
Out:      registry entries: noise, sensitivity, cost, checks; `spaced`, which makes such an entry.
Promise:  the sensitivity is that of the matrix, or tree, that the noise is made with.
Not here: the matrices (`strategy.py`), the noise (`correlated.py`), the worst placement of a client
          (`sensitivity.py`).

Banded noise on cyclic Poisson cohorts (Choquette-Choo et al. 2023). The matrix M has at most b =
min_separation + 1 bands, so column t is zero outside rows t to t + b - 1. A client of group g can
join the rounds g, g + b, g + 2b, ... only. Rows g + jb to g + jb + b - 1 hold its contribution of
round g + jb and no other, so the release M x + Z falls into blocks that are made one after the
other. Given the earlier blocks, what the client sends in its round is fixed, and a block moves by
its column, of length at most one, if its coin for that round says so, and not at all otherwise; the
other clients' contributions inside a block depend on what was released before, as in any adaptive
use of normal noise. So each block costs one round of Gaussian noise on a Poisson cohort with chance
cohort * b / population, and there are at most ceil(rounds / b) of them. Neither the deal into
groups nor the other clients' coins are counted on. Balls-in-bins cohorts: `balls_in_bins.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from fedlm.core.by_value import by_value
from fedlm.core.errors import require
from fedlm.privacy import balls_in_bins, bin_samples, correlated, cost, sensitivity, strategy
from fedlm.privacy.gaussian import bins_event, in_bins
from fedlm.privacy.mechanism import Cost, Mechanism
from fedlm.privacy.noise import Noise
from fedlm.privacy.plan import PrivacyPlan, check_bins, check_separation
from fedlm.privacy.sensitivity import Squared
from fedlm.privacy.strategy import Strategy

# More buffers do not lower the error, and the optimiser of the parameters becomes unstable.
MAX_BUFFERS = 10


def spaced(
    noise: Callable[[PrivacyPlan, float], Noise],
    squared: Callable[[PrivacyPlan, int], Squared],
    check: Callable[[PrivacyPlan], None],
    settings: tuple[str, ...],
    strategy_of: Callable[[PrivacyPlan], Strategy] | None = None,
    find: Callable[[PrivacyPlan], tuple[float, ...]] | None = None,
    released: Callable[[PrivacyPlan, int], Squared] | None = None,
) -> Mechanism:
    """Make the registry entry of correlated noise from its noise, sensitivity and own checks.

    `squared` is the published sensitivity; `released` is that of what really is released, where
    this is less than papers count.
    """
    exact = released or squared

    def check_all(plan: PrivacyPlan) -> None:
        check_separation(plan.sampling, plan.rounds)
        _check_restart(plan)
        check(plan)

    return Mechanism(
        noise=noise,
        cost=lambda plan, rounds: _cost(plan, rounds, squared, exact),
        event=lambda plan, rounds: _event(plan, rounds, exact),
        check=check_all,
        laws=("spaced",),
        reason="because correlated noise is accounted by how often and how closely a client may "
        "join, and that law bounds neither",
        way_out="Or set server.sampling = 'spaced' and privacy.min_separation.",
        settings=settings,
        clip_moves="at restarts",
        sensitivity=squared,
        strategy=strategy_of,
        find_matrix=find,
    )


def matrix(
    strategy_of: Callable[[PrivacyPlan], Strategy],
    check: Callable[[PrivacyPlan], None],
    settings: tuple[str, ...],
    find: Callable[[PrivacyPlan], tuple[float, ...]] | None = None,
) -> Mechanism:
    """Make the registry entry of noise that is multiplied by the inverse of a strategy matrix.

    If `find` searches for it, the search is done once per run.
    """

    @by_value
    def noise(plan: PrivacyPlan, stddev: float) -> Noise:
        return correlated.for_strategy(stddev, strategy_of(plan), rounds=plan.rounds)

    def squared(plan: PrivacyPlan, rounds: int) -> Squared:
        apart, most = plan.sampling.min_separation, plan.sampling.max_participations
        return sensitivity.of_restarted(strategy_of(plan), rounds, apart, most)

    return spaced(noise, squared, check, settings, strategy_of, find)


def _cost(
    plan: PrivacyPlan,
    rounds: int,
    squared_of: Callable[[PrivacyPlan, int], Squared],
    exact_of: Callable[[PrivacyPlan, int], Squared],
) -> Cost:
    """Return the cost by the exact profile, beside rho and epsilon as papers compute them."""
    squared, exact = (_squared(plan, rounds, of) for of in (squared_of, exact_of))
    rho, shift = (cost.rho_of(of.value, plan.noise_multiplier) for of in (squared, exact))
    return Cost(
        cost.epsilon_of_shift(math.sqrt(2 * shift), plan.delta),
        f"exact Gaussian profile of {plan.mechanism} noise",
        (_spacing(plan), _placement(exact)),
        rho,
        published_epsilon=cost.epsilon_of_rho(rho, plan.delta),
    )


def _event(
    plan: PrivacyPlan, rounds: int, squared_of: Callable[[PrivacyPlan, int], Squared]
) -> cost.DpEvent:
    """Return one Gaussian release: all rounds together are one sum with normal noise."""
    squared = _squared(plan, rounds, squared_of)
    return cost.gaussian_event(plan.noise_multiplier, squared.value)


def _squared(
    plan: PrivacyPlan, rounds: int, squared_of: Callable[[PrivacyPlan, int], Squared]
) -> Squared:
    _check_planned(plan, rounds)
    return squared_of(plan, rounds) if rounds else Squared(0.0)


def _check_planned(plan: PrivacyPlan, rounds: int) -> None:
    require(
        rounds <= plan.rounds,
        "rounds",
        rounds,
        f"at most the {plan.rounds} rounds for which the noise was made",
    )


def _spacing(plan: PrivacyPlan) -> str:
    sampling = plan.sampling
    most = sampling.max_participations
    often = f" and at most {most} times" if most else ""
    return (
        f"a client joins with at least {sampling.min_separation} rounds in between{often}, "
        "enforced by the sampler"
    )


def _placement(squared: Squared) -> str:
    kind = "the exact maximum" if squared.exact else "an upper bound, the maximum is lower"
    return f"squared sensitivity {squared.value:.6g}: {kind} over all such placements"


# ---- tree --------------------------------------------------------------------------------


def _tree_noise(plan: PrivacyPlan, stddev: float) -> Noise:
    return correlated.tree_noise(stddev, plan.restart_every, rounds=plan.rounds)


def _tree_sensitivity(plan: PrivacyPlan, rounds: int) -> Squared:
    apart, most = plan.sampling.min_separation, plan.sampling.max_participations
    return sensitivity.of_tree(rounds, apart, most, restart_every=plan.restart_every)


def _released_tree(plan: PrivacyPlan, rounds: int) -> Squared:
    apart, most = plan.sampling.min_separation, plan.sampling.max_participations
    return sensitivity.of_released_tree(rounds, apart, most, restart_every=plan.restart_every)


def _check_restart(plan: PrivacyPlan) -> None:
    require(
        plan.restart_every >= 0,
        "privacy.restart_every",
        plan.restart_every,
        "0 (never) or a positive number of rounds",
    )


# ---- matrices ----------------------------------------------------------------------------


def _length(plan: PrivacyPlan) -> int:
    """Return the rounds that one matrix is for: those of a restart, or all."""
    return min(plan.restart_every or plan.rounds, plan.rounds)


def _bands(plan: PrivacyPlan) -> int:
    """Return how many bands the matrix really has."""
    return min(plan.bands or plan.sampling.min_separation + 1, _length(plan))


def _check_bands(plan: PrivacyPlan) -> None:
    require(
        plan.bands >= 0,
        "privacy.bands",
        plan.bands,
        "0 (min_separation + 1) or a positive number",
    )
    require(
        plan.bands <= _length(plan),
        "privacy.bands",
        plan.bands,
        f"at most the rounds of a matrix, here {_length(plan)}",
    )


def _check_narrow(plan: PrivacyPlan) -> None:
    _check_bands(plan)
    require(
        plan.bands <= plan.sampling.min_separation + 1,
        "privacy.bands",
        plan.bands,
        f"at most min_separation + 1, here {plan.sampling.min_separation + 1}, because wider bands "
        "let two participations of a client overlap",
        "Lower it, or set privacy.mechanism = 'toeplitz', whose cost is known for any width.",
    )


def _find_banded(plan: PrivacyPlan) -> tuple[float, ...]:
    return strategy.find_banded(_length(plan), _bands(plan))


def _banded(plan: PrivacyPlan) -> Strategy:
    return strategy.banded(_length(plan), plan.matrix or _find_banded(plan))


def _check_banded(plan: PrivacyPlan) -> None:
    _check_narrow(plan)
    column = plan.matrix
    if column:
        good = len(column) == _bands(plan) and all(map(math.isfinite, column)) and column[0] > 0
        _check_matrix(plan, good, f"{_bands(plan)} numbers, the first of them positive")


def _check_matrix(plan: PrivacyPlan, good: bool, wanted: str) -> None:
    require(
        good,
        "matrix",
        f"{len(plan.matrix)} numbers",
        f"{wanted}, as they were found when the run began",
        "Leave it empty to search for them.",
    )


def _toeplitz(plan: PrivacyPlan) -> Strategy:
    return strategy.toeplitz(_length(plan), _bands(plan))


def _find_blt(plan: PrivacyPlan) -> tuple[float, ...]:
    apart, most = plan.sampling.min_separation, plan.sampling.max_participations
    return strategy.find_blt(_length(plan), apart, most, plan.buffers)


def _blt(plan: PrivacyPlan) -> Strategy:
    return strategy.blt(_length(plan), plan.matrix or _find_blt(plan))


def _check_blt(plan: PrivacyPlan) -> None:
    """Refuse numbers with which the first column would not fall: its sensitivity rests on that."""
    _check_buffers(plan)
    if plan.matrix:
        decays, scales = plan.matrix[: plan.buffers], plan.matrix[plan.buffers :]
        shares = all(0 <= number <= 1 for number in plan.matrix)
        good = len(decays) == len(scales) == plan.buffers and shares and sum(scales) <= 1
        _check_matrix(
            plan,
            good,
            f"{plan.buffers} decays and {plan.buffers} scales, from 0 to 1, the scales together at "
            "most 1",
        )


def _check_buffers(plan: PrivacyPlan) -> None:
    require(
        1 <= plan.buffers <= MAX_BUFFERS,
        "privacy.buffers",
        plan.buffers,
        f"between 1 and {MAX_BUFFERS}",
        "3 is a good choice.",
    )


# ---- banded noise on cyclic Poisson and on balls-in-bins cohorts ---------------------------


CYCLIC = "cyclic-poisson"


def _amplified(entry: Mechanism) -> Mechanism:
    """Add secret cohorts to a mechanism with narrow bands and columns of length one."""
    events = {CYCLIC: _cyclic_event, balls_in_bins.LAW: _bins_event}
    costs = {CYCLIC: _cyclic_cost, balls_in_bins.LAW: _bins_cost}
    secret = (CYCLIC, balls_in_bins.LAW)

    def check(plan: PrivacyPlan) -> None:
        entry.check(plan)
        if plan.sampling.law in secret:
            check_bins(plan.sampling, plan.rounds)
        if plan.sampling.law == balls_in_bins.LAW:
            _check_divides(plan)

    def event(plan: PrivacyPlan, rounds: int) -> cost.DpEvent:
        return events.get(plan.sampling.law, entry.event)(plan, rounds)

    def cost_of(plan: PrivacyPlan, rounds: int) -> Cost:
        return costs.get(plan.sampling.law, entry.cost)(plan, rounds)

    return dataclasses.replace(
        entry,
        check=check,
        event=event,
        cost=cost_of,
        laws=(*entry.laws, *secret),
        chance_laws=secret,
        way_out=f"Or set server.sampling = 'spaced', {CYCLIC!r} or {balls_in_bins.LAW!r}, and "
        "privacy.min_separation.",
    )


def _check_divides(plan: PrivacyPlan) -> None:
    bins, bands = plan.sampling.min_separation + 1, plan.bands or plan.sampling.min_separation + 1
    require(
        bins % bands == 0,
        "privacy.bands",
        bands,
        f"a divisor of min_separation + 1, here {bins}, when server.sampling = "
        f"{plan.sampling.law!r}: the account tells bins apart that do not overlap",
        "Change either of them.",
    )


def _bins_event(plan: PrivacyPlan, rounds: int) -> cost.DpEvent:
    """Return what rounds release about a client whose bin is secret."""
    _check_planned(plan, rounds)
    bins = plan.sampling.min_separation + 1
    chosen = _banded(plan)
    # A number of rounds that ends with a turn of all bins, so that there are few to sample for.
    turns = min(-(-rounds // bins) * bins, plan.rounds)
    overlap = bin_samples.overlap_of(
        tuple(chosen.coefficients.tolist()), chosen.rounds, turns, bins
    )
    return bins_event(plan, rounds, plan.bands or bins, overlap)


def _bins_cost(plan: PrivacyPlan, rounds: int) -> Cost:
    epsilon, accountant = cost.compose([_bins_event(plan, rounds)], plan.delta)
    name = f"{accountant} of {plan.mechanism} noise on balls-in-bins cohorts"
    sampled = (
        f"the loss was sampled; its bound is wrong with chance {bin_samples.WRONG:g}, or up to a "
        "hundred times as much where noise or rounds were found by such bounds"
    )
    overlap = getattr(_bins_event(plan, rounds), "overlap", None)
    return Cost(epsilon, name, (in_bins(plan), *([sampled] if overlap else [])))


def _cyclic_event(plan: PrivacyPlan, rounds: int) -> cost.DpEvent:
    """Return one Poisson-sampled release per turn of a client's group."""
    _check_planned(plan, rounds)
    turns = sensitivity.participations(rounds, plan.sampling.min_separation, 0)
    return cost.sampled_event(plan.noise_multiplier, _turn_rate(plan), turns)


def _turn_rate(plan: PrivacyPlan) -> float:
    """Return the chance that a client joins a round of its group."""
    sampling = plan.sampling
    return sampling.cohort * (sampling.min_separation + 1) / sampling.population


def _cyclic_cost(plan: PrivacyPlan, rounds: int) -> Cost:
    epsilon, accountant = cost.compose([_cyclic_event(plan, rounds)], plan.delta)
    groups = plan.sampling.min_separation + 1
    return Cost(
        epsilon,
        f"{accountant} of {plan.mechanism} noise on cyclic Poisson cohorts",
        (
            f"clients are dealt into {groups} groups that take turns; in a round of its group a "
            f"client joins by its own coin, with probability {_turn_rate(plan):.6g}, and who "
            "joined stays secret",
        ),
    )


RESTARTS = "restart_every"
TREE = spaced(
    _tree_noise, _tree_sensitivity, lambda plan: None, (RESTARTS,), released=_released_tree
)
BANDED = _amplified(matrix(_banded, _check_banded, (RESTARTS, "bands"), _find_banded))
TOEPLITZ = matrix(_toeplitz, _check_bands, (RESTARTS, "bands"))
BLT = matrix(_blt, _check_blt, (RESTARTS, "buffers"), _find_blt)
