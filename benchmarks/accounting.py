"""Accounts of the same noise, and noise at equal epsilon: `python -m benchmarks.accounting`.

Computed, not sampled; no model is trained.

The first has the epsilon of a plan by the account that papers and other libraries print, and by the
one that fedlm claims: of correlated noise, zCDP converted through RDP against the exact Gaussian
profile; of cohorts of fixed size, RDP and Poisson accounting with half the noise against the loss
distribution of `privacy/fixed_size.py`.

The second calibrates four plans to one epsilon and tells the noise that they leave in prefix sums
of the mean updates: the standard deviation after t rounds, in multiples of the clip, over rounds
times cohort; the root of its mean square over t, and the largest. "poisson" is DP-SGD; "blt" has
three buffers and the longest rest that the population allows; "cyclic" is banded noise on cyclic
Poisson cohorts, with as many bands as groups; "bins" is banded noise on balls-in-bins cohorts, with
as many bins as the population fills. Of a few numbers of bands each takes the one that leaves the
least. All train as many rounds with as large a cohort. Rows that `--out` holds already are not
computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np

from fedlm.core.types import Sampling
from fedlm.privacy import account, balls_in_bins, bin_samples, strategy
from fedlm.privacy.catalog import MECHANISMS, with_matrix
from fedlm.privacy.cost import compose, poisson_by_rdp, quiet
from fedlm.privacy.plan import PrivacyPlan

DELTA = 1e-6
CORRELATED = [("tree", 2000, 313, 6, 7.0), ("tree", 500, 99, 5, 7.0), ("blt", 500, 99, 5, 5.0)]
CORRELATED += [("banded", 500, 99, 5, 2.0), ("toeplitz", 2000, 313, 6, 4.0)]
FIXED = [(1.0, 100, 10_000, 1000), (2.0, 100, 10_000, 1000), (4.0, 100, 10_000, 1000)]
FIXED += [(1.0, 10, 100, 32)]
BANDS = (2, 4, 8, 16, 32)
BIN_BANDS = (1, 10, 20)


def plan_of(mechanism: str, sampling: Sampling, rounds: int, noise: float, **more: Any) -> Any:
    """A plan with a clip of one."""
    made = PrivacyPlan(
        mechanism=mechanism,
        sampling=sampling,
        rounds=rounds,
        clip_norm=1.0,
        noise_multiplier=noise,
        delta=DELTA,
        **more,
    )
    return with_matrix(made)


def spaced(rounds: int, apart: int, most: int) -> Sampling:
    """Enough clients for a separation."""
    return Sampling(
        law="spaced",
        population=max(apart + 1, rounds),
        cohort=1,
        min_separation=apart,
        max_participations=most,
    )


def by_half_the_noise(noise: float, cohort: int, population: int, rounds: int) -> tuple[float, ...]:
    """Epsilons of a fixed cohort by RDP without replacement and by Poisson PLD, at half noise."""
    half = dp_accounting.GaussianDpEvent(noise / 2)
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(population, cohort, half)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    renyi = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    with quiet("absl"):
        first = renyi.compose(drawn, rounds).get_epsilon(DELTA)
    loss = dp_accounting.pld.PLDAccountant()
    loss.compose(dp_accounting.PoissonSampledDpEvent(cohort / population, half), rounds)
    return first, loss.get_epsilon(DELTA)


def accounts() -> None:
    """Print the first table."""
    print(f"| plan | published | claimed | less |   (delta {DELTA:g})\n|---|---|---|---|")
    for mechanism, rounds, apart, most, noise in CORRELATED:
        found = account.spent(
            plan_of(mechanism, spaced(rounds, apart, most), rounds, noise), rounds
        )
        before = found.published_epsilon
        assert before is not None
        print(
            f"| {mechanism}, {rounds} rounds, separation {apart}, at most {most} turns, noise "
            f"{noise:g} | {before:.2f} | {found.epsilon:.2f} | {1 - found.epsilon / before:.1%} |",
            flush=True,
        )
    print("\n| fixed cohort | RDP, half noise | Poisson, half noise | claimed | Poisson cohort |")
    print("|---|---|---|---|---|")
    for noise, cohort, population, rounds in FIXED:
        renyi, half = by_half_the_noise(noise, cohort, population, rounds)
        drawn = Sampling(law="fixed", population=population, cohort=cohort)
        fixed = account.spent(plan_of("gaussian", drawn, rounds, noise), rounds).epsilon
        coins = dataclasses.replace(drawn, law="poisson")
        poisson = account.spent(plan_of("gaussian", coins, rounds, noise), rounds).epsilon
        print(
            f"| noise {noise:g}, {cohort} of {population}, {rounds} rounds | {renyi:.2f} | "
            f"{half:.2f} | {fixed:.2f} | {poisson:.2f} |",
            flush=True,
        )


def errors(plan: PrivacyPlan) -> tuple[float, float]:
    """The noise of prefix sums over the sum of all cohorts: root mean square, and largest."""
    rounds = plan.rounds
    row = MECHANISMS[plan.mechanism].strategy
    if row is None:
        variance = np.arange(1, rounds + 1, dtype=float)
    else:
        # The rows of (prefix sums) M^-1: the inverse of a Toeplitz matrix is one, with the
        # columns of a normalised one scaled back.
        chosen = row(plan)
        column = np.zeros(rounds)
        column[: len(chosen.coefficients)] = chosen.coefficients[:rounds]
        inverse = inverse_column(column)
        lengths = np.ones(rounds)
        if chosen.normalized:
            lengths = np.sqrt(np.cumsum(column**2)[::-1])
        dense = np.zeros((rounds, rounds))
        for t in range(rounds):
            dense[t, : t + 1] = inverse[t::-1]
        dense *= lengths[:, None]  # (C D^-1)^-1 = D C^-1
        variance = (np.cumsum(dense, axis=0) ** 2).sum(axis=1)
    noise = plan.noise_multiplier / (rounds * plan.sampling.cohort) * np.sqrt(variance)
    return float(np.sqrt((noise**2).mean())), float(noise.max())


def inverse_column(column: np.ndarray) -> np.ndarray:
    """The first column of the inverse of a lower-triangular Toeplitz matrix."""
    found = np.zeros_like(column)
    found[0] = 1 / column[0]
    for t in range(1, len(column)):
        found[t] = -(column[1 : t + 1] @ found[t - 1 :: -1][:t]) / column[0]
    return found


def calibrated(plan: PrivacyPlan, epsilon: float) -> PrivacyPlan:
    """The plan with the least noise for a target."""
    return dataclasses.replace(plan, noise_multiplier=account.calibrate(plan, epsilon))


def turns_guess(plan: PrivacyPlan, epsilon: float) -> float:
    """Quickly, by RDP: the noise that a cyclic plan needs, to choose among numbers of bands."""
    groups = plan.sampling.min_separation + 1
    rate = min(plan.sampling.cohort * groups / plan.sampling.population, 1.0)
    low, high = 0.2, 300.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        fits = poisson_by_rdp(middle, rate, -(-plan.rounds // groups), plan.delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


def cyclic(population: int, cohort: int, rounds: int, epsilon: float) -> PrivacyPlan | None:
    """The plan of amplified banded noise that leaves the least noise, over a few widths."""
    best: tuple[float, PrivacyPlan] | None = None
    for bands in BANDS:
        if population < cohort * bands:
            continue
        drawn = Sampling(
            law="cyclic-poisson", population=population, cohort=cohort, min_separation=bands - 1
        )
        made = plan_of("banded", drawn, rounds, 1.0, matrix=column_of(rounds, bands))
        made = dataclasses.replace(made, noise_multiplier=turns_guess(made, epsilon))
        found = errors(made)[0]
        if best is None or found < best[0]:
            best = found, made
    return None if best is None else calibrated(best[1], epsilon)


def column_of(rounds: int, bands: int) -> tuple[float, ...]:
    """The square root of prefix sums, cut: within two percent of what an optimiser finds."""
    root = strategy.toeplitz(rounds, bands).coefficients
    return tuple(np.round(root / np.linalg.norm(root), 6).tolist())


def in_bins(population: int, cohort: int, rounds: int, epsilon: float) -> PrivacyPlan | None:
    """The plan of banded noise on balls-in-bins cohorts that leaves the least noise."""
    best: tuple[float, PrivacyPlan] | None = None
    for bands in BIN_BANDS:
        bins = population // cohort // bands * bands
        if not bins:
            continue
        noise = bins_noise(bins, bands, bins * cohort / population, rounds, epsilon)
        made = bins_plan(population, cohort, bins, bands, rounds, noise)
        found = errors(made)[0]
        if best is None or found < best[0]:
            best = found, made
    if best is None:
        return None
    bins, bands = best[1].sampling.min_separation + 1, best[1].bands
    share, guess = bins * cohort / population, best[1].noise_multiplier
    noise = bins_noise(bins, bands, share, rounds, epsilon, bin_samples.SAMPLES, guess)
    return bins_plan(population, cohort, bins, bands, rounds, noise)


def bins_plan(
    population: int, cohort: int, bins: int, bands: int, rounds: int, noise: float
) -> PrivacyPlan:
    """A plan of banded noise on balls-in-bins cohorts."""
    drawn = Sampling(
        law=balls_in_bins.LAW, population=population, cohort=cohort, min_separation=bins - 1
    )
    column = column_of(rounds, bands)
    made: PrivacyPlan = plan_of("banded", drawn, rounds, noise, matrix=column, bands=bands)
    return made


@functools.cache
def bins_noise(
    bins: int,
    bands: int,
    share: float,
    rounds: int,
    epsilon: float,
    samples: int = bin_samples.AT_ONCE,
    guess: float = 0.0,
) -> float:
    """The noise that bins need, never too little: to eight percent, or to two beside a guess."""
    usual, bin_samples.SAMPLES = bin_samples.SAMPLES, samples
    overlap = bin_samples.overlap_of(column_of(rounds, bands), rounds, rounds, bins)
    low, high = (0.85 * guess, guess) if guess else (0.6, 12.0)
    while high / low > (1.02 if guess else 1.08):
        middle = math.sqrt(low * high)
        if overlap is None:
            event = balls_in_bins.event_of_bins(middle, rounds, bins, bands, share)
            fits = compose([event], DELTA)[0] <= epsilon
        else:  # the sampled bound alone, which is quicker
            ways = bin_samples.deltas(overlap, middle, share, 2 * epsilon)
            fits = max(way.at(np.array([epsilon]))[0] for way in ways) <= DELTA
        low, high = (low, middle) if fits else (middle, high)
    bin_samples.SAMPLES = usual
    return high


def blt(population: int, cohort: int, rounds: int, epsilon: float) -> PrivacyPlan:
    """The plan of BLT noise with the longest rest that the population allows."""
    apart = min(population // cohort, rounds) - 1
    drawn = Sampling(law="spaced", population=population, cohort=cohort, min_separation=apart)
    return calibrated(plan_of("blt", drawn, rounds, 1.0), epsilon)


def poisson(population: int, cohort: int, rounds: int, epsilon: float) -> PrivacyPlan:
    """DP-SGD."""
    drawn = Sampling(law="poisson", population=population, cohort=cohort)
    return calibrated(plan_of("gaussian", drawn, rounds, 1.0), epsilon)


MAKERS = {"poisson": poisson, "blt": blt, "cyclic": cyclic, "bins": in_bins}


def row_of(epsilon: float, count: int, population: int, cohort: int) -> str:
    """A row of the second table."""
    plans = {name: make(population, cohort, count, epsilon) for name, make in MAKERS.items()}
    found = {name: errors(plan) for name, plan in plans.items() if plan}
    cells = []
    for name, plan in plans.items():
        cell = "-" if plan is None else f"{1e3 * found[name][0]:.3g} ({1e3 * found[name][1]:.3g})"
        if plan is not None and plan.mechanism == "banded":
            cell += f", {len(plan.matrix)} bands"
        cells.append(cell)
    best = min(found, key=lambda name: found[name][0])
    sizes = f"{epsilon:g} | {count} | {population:,} | {cohort:,}"
    return f"| {sizes} | {' | '.join(cells)} | {best} |"


def amplification(rounds: list[int], epsilons: list[float], out: Path | None) -> None:
    """Print the second table."""
    known = json.loads(out.read_text()) if out is not None and out.exists() else {}
    print(f"\n| epsilon | rounds | population | cohort | {' | '.join(MAKERS)} | best |")
    print("|---|---|---|---|---|---|---|---|---|")
    sizes = [(10**3, 50), (10**4, 50), (10**4, 500), (10**5, 500), (10**6, 500), (10**6, 5000)]
    for case in itertools.product(epsilons, rounds, sizes):
        epsilon, count, (population, cohort) = case
        if str(case) not in known:
            known[str(case)] = row_of(epsilon, count, population, cohort)
            if out is not None:
                out.write_text(json.dumps(known))
        print(known[str(case)], flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[500])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[2.0])
    parser.add_argument("--out", type=Path, help="a file for rows of the second table")
    asked = parser.parse_args()
    began = time.perf_counter()
    accounts()
    amplification(asked.rounds, asked.epsilons, asked.out)
    print(
        "\nNoise of prefix sums in thousandths of the clip: root mean square over rounds "
        f"(largest). {time.perf_counter() - began:.0f} s."
    )


if __name__ == "__main__":
    main()
