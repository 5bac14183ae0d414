"""Epsilons of Gaussian noise, as dp_accounting computes them.

In:       a noise multiplier or a rho, how cohorts are drawn, rounds, a delta; or events.
Out:      epsilon; the events of rounds, and what several events cost together.
Promise:  epsilon holds for one client replaced by zero in every round; no rounds cost nothing, and
          without noise the cost is infinite.
Not here: which noise a plan has (`catalog.py`), the noise for a target (`account.py`).

dp_accounting is loaded when it is first used: training does not need it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fedlm.core.late import late
from fedlm.privacy import balls_in_bins, fixed_size
from fedlm.privacy.balls_in_bins import BallsInBinsEvent
from fedlm.privacy.bin_samples import Overlap

dp_accounting = late("dp_accounting")  # over a second
privacy_loss_distribution = late("dp_accounting.pld.privacy_loss_distribution")  # over a second
scipy = late("scipy")  # up to a second

# An event of dp_accounting: what was released, with how much noise, on which sample.
DpEvent = Any
Leaves = list[tuple[DpEvent, int]]  # single releases, and how often each happened

# More noise than this drowns any sum; a target that needs more cannot be met.
MOST_NOISE = 1e6
# The step of privacy loss distributions, for noise multipliers above 0.3; larger for less noise,
# whose losses are large.
STEP = 1e-4
# Any order gives a valid epsilon; so fine a grid finds the best one to five digits.
ORDERS = 1 + np.logspace(-1.9, 6, 4000)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Convert zCDP through RDP, as papers do: an upper bound for any mechanism with that rho.

    It is the minimum over orders a of rho a + log(1 - 1/a) - log(delta a) / (a - 1).
    """
    if rho == 0 or math.isinf(rho):
        return rho
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS, relation)
    return float(accountant.compose(dp_accounting.ZCDpEvent(rho)).get_epsilon(delta))


def rho_of(squared_sensitivity: float, noise_multiplier: float) -> float:
    """Convert a squared sensitivity and a noise multiplier to zCDP's rho."""
    if squared_sensitivity == 0:
        return 0.0
    return squared_sensitivity / (2 * noise_multiplier**2) if noise_multiplier else math.inf


def poisson_by_rdp(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """Bound the epsilon of Poisson cohorts by Renyi accounting, a quick start for a search."""
    return _by_rdp([(_sampled(noise_multiplier, rate), rounds)], delta)[0]


# ---- events, and what several of them cost ---------------------------------------------------


def gaussian_event(noise_multiplier: float, squared_sensitivity: float = 1.0) -> DpEvent:
    """Return the event of one sum with normal noise, or of many rounds that are one such sum."""
    if squared_sensitivity == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.GaussianDpEvent(noise_multiplier / math.sqrt(squared_sensitivity))


def zcdp_event(rho: float, rounds: int) -> DpEvent:
    """Return the event of rounds that are rho-zCDP each, whoever joins them."""
    if rounds == 0 or rho == 0:
        return dp_accounting.NoOpDpEvent()
    if math.isinf(rho):
        return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.ZCDpEvent(rounds * rho)


def sampled_event(noise_multiplier: float, rate: float, rounds: int) -> DpEvent:
    """Return the event of rounds with normal noise that each client joins with chance `rate`."""
    if rounds == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.SelfComposedDpEvent(_sampled(noise_multiplier, rate), rounds)


def fixed_size_event(noise_multiplier: float, cohort: int, population: int, rounds: int) -> DpEvent:
    """Return the event of rounds with normal noise on cohorts drawn without replacement.

    Its noise is in units of what replacing a client by another one moves: twice the clip.
    """
    if rounds == 0:
        return dp_accounting.NoOpDpEvent()
    if cohort == population:
        return _repeated(dp_accounting.GaussianDpEvent(noise_multiplier), rounds)
    release = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(population, cohort, release)
    return dp_accounting.SelfComposedDpEvent(drawn, rounds)


def balls_in_bins_event(
    noise_multiplier: float,
    rounds: int,
    bins: int,
    bands: int,
    share: float,
    overlap: Overlap | None = None,
) -> DpEvent:
    """Return the event of rounds with normal noise of so many bands on balls-in-bins cohorts.

    A client is in one of the bins with chance `share`, and otherwise in none.
    """
    if rounds == 0:
        return dp_accounting.NoOpDpEvent()
    return balls_in_bins.event_of_bins(noise_multiplier, rounds, bins, bands, share, overlap)


def compose(events: Iterable[DpEvent], delta: float, extra_delta: float = 0.0) -> tuple[float, str]:
    """Return the epsilon of several releases about the same clients, and its accountant.

    `noise_multiplier` of an event is the noise over the L2 norm by which one client, replaced by
    zero, moves the release. The exception is sampling without replacement: there it is the norm by
    which one client replaced by another moves it (twice as much). `extra_delta` is the chance that
    a release fails to be covered by its event; it is taken off `delta`.
    """
    left = delta - extra_delta
    leaves = _leaves(events)
    if not leaves:
        return 0.0, "nothing was released"
    if left <= 0 or any(isinstance(e, dp_accounting.NonPrivateDpEvent) for e, _ in leaves):
        return math.inf, "no finite epsilon"

    def tightest() -> tuple[float, str] | None:
        exact = _by_profile(leaves, left) or _by_pld(leaves, left)
        return exact or _by_rdp(_known_bins(leaves), left)

    found = [(math.inf, "no finite epsilon")]
    for bound in (tightest, lambda: _by_profile(_without_draws(leaves), left)):
        # There may be so little noise that its loss is no number.
        with contextlib.suppress(OverflowError, ZeroDivisionError):
            found += [each for each in [bound()] if each]
    return min(found)


def is_quick(events: Iterable[DpEvent]) -> bool:
    """Return whether releases have an exact profile together, which takes no time."""
    return _by_profile(_leaves(events), 0.5) is not None


def _leaves(events: Iterable[DpEvent]) -> Leaves:
    """Return how often each single release happened; without noise it is a non-private one."""
    counts: Leaves = []  # a list, because events may hold lists, which cannot be hashed

    def add(event: DpEvent, count: int) -> None:
        if isinstance(event, dp_accounting.NoOpDpEvent) or count == 0:
            return
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return add(event.event, count * event.count)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            for each in event.events:
                add(each, count)
            return
        if getattr(event, "sampling_probability", None) == 1:
            return add(event.event, count)
        if getattr(getattr(event, "event", event), "noise_multiplier", 1.0) == 0:
            event = dp_accounting.NonPrivateDpEvent()
        for number, (known, times) in enumerate(counts):
            if known == event:
                counts[number] = (event, times + count)
                return
        counts.append((event, count))

    for event in events:
        add(event, 1)
    return counts


def _by_profile(leaves: Leaves, delta: float) -> tuple[float, str] | None:
    """Compose Gaussian releases alone: together they are one, and its profile is exact."""
    if not all(isinstance(event, dp_accounting.GaussianDpEvent) for event, _ in leaves):
        return None
    squared = sum(count / event.noise_multiplier**2 for event, count in leaves)
    return epsilon_of_shift(math.sqrt(squared), delta), "exact Gaussian profile"


def _by_pld(leaves: Leaves, delta: float) -> tuple[float, str] | None:
    """Compose privacy loss distributions, which round up; None if an event has none."""
    if not all(_noise_of(event) for event, _ in leaves):
        return None
    return _epsilon_by_pld(tuple(leaves), delta), "PLD"


@functools.lru_cache(maxsize=256)  # journal, claim, store and summary ask for the same
def _epsilon_by_pld(leaves: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    """Return the epsilon of releases that all have a loss distribution."""
    noises = [_noise_of(event) for event, _ in leaves]
    step = STEP * max(1.0, *((0.3 / noise) ** 2 for noise in noises if noise))
    whole = privacy_loss_distribution.identity(value_discretization_interval=step)
    for event, count in leaves:
        whole = whole.compose(_loss_of(event, count, step))
    return float(whole.get_epsilon_for_delta(delta))


def _noise_of(event: DpEvent) -> float | None:
    """Return the noise multiplier of an event that has a loss distribution, None of others."""
    if isinstance(event, BallsInBinsEvent):
        return event.noise_multiplier / math.sqrt(event.most_turns)
    kinds = (dp_accounting.PoissonSampledDpEvent, dp_accounting.SampledWithoutReplacementDpEvent)
    bare = event.event if isinstance(event, kinds) else event
    good = isinstance(bare, dp_accounting.GaussianDpEvent)
    return float(bare.noise_multiplier) if good else None


@functools.lru_cache(maxsize=16)  # of a run alone, then with its vocabulary, start model, store
def _loss_of(event: DpEvent, count: int, step: float) -> Any:
    """Return the privacy loss distribution of a release that happened `count` times."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        noise = event.noise_multiplier / math.sqrt(count)
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise, value_discretization_interval=step
        )
    if isinstance(event, BallsInBinsEvent):
        once = balls_in_bins.bins_loss(event, step)
        return once if count == 1 else once.self_compose(count)
    return _loss_of_one_round(event, step).self_compose(count)


@functools.lru_cache(maxsize=16)  # half a second to make, and every round of a run asks for it
def _loss_of_one_round(event: DpEvent, step: float) -> Any:
    """Return the privacy loss distribution of normal noise on one cohort that was drawn."""
    noise = event.event.noise_multiplier
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise,
            value_discretization_interval=step,
            sampling_prob=event.sampling_probability,
        )
    rate = event.sample_size / event.source_dataset_size
    return fixed_size.fixed_size_loss(2 * noise, rate, step)


def _without_draws(leaves: Leaves) -> Leaves:
    """Return the releases as if every client joined each fixed-size cohort and bins were known."""
    drawn = dp_accounting.SampledWithoutReplacementDpEvent
    return [
        (dp_accounting.GaussianDpEvent(2 * event.event.noise_multiplier), count)
        if isinstance(event, drawn) and _noise_of(event)
        else (event, count)
        for event, count in _known_bins(leaves)
    ]


def _known_bins(leaves: Leaves) -> Leaves:
    """Return the releases as if each client were known to be in the bin with most turns."""
    return [
        (gaussian_event(event.noise_multiplier, event.most_turns), count)
        if isinstance(event, BallsInBinsEvent)
        else (event, count)
        for event, count in leaves
    ]


def by_rdp(events: Iterable[DpEvent], delta: float) -> float:
    """Return the epsilon of releases by adding up Renyi divergences, as papers print it.

    It is never below that of `compose`, but for the rounding of distributions.
    """
    leaves = _known_bins(_leaves(events))
    if any(_noise_of(event) == 0 for event, _ in leaves):
        return math.inf
    return _by_rdp(leaves, delta)[0] if leaves else 0.0


def _by_rdp(leaves: Leaves, delta: float) -> tuple[float, str]:
    """Add up Renyi divergences, each under the relation that its event is stated for."""
    total, orders = 0.0, np.zeros(0)
    for event, count in leaves:
        drawn = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
        relations = dp_accounting.NeighboringRelation
        accountant = dp_accounting.rdp.RdpAccountant(
            neighboring_relation=relations.REPLACE_ONE if drawn else relations.REPLACE_SPECIAL
        )
        orders = accountant.orders
        with quiet("absl"):
            # Rounding can give a tiny negative divergence, for which epsilon would be called zero.
            total = total + np.maximum(accountant.compose(event, count).rdp, 0.0)
    return float(dp_accounting.rdp.compute_epsilon(orders, total, delta)[0]), "RDP"


def _repeated(event: DpEvent, count: int) -> DpEvent:
    return event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count)


def epsilon_of_shift(shift: float, delta: float) -> float:
    """Return the exact epsilon of normal noise of stddev one on a sum that moves by `shift`.

    It solves delta = Phi(shift/2 - epsilon/shift) - e^epsilon Phi(-shift/2 - epsilon/shift), the
    profile of Balle and Wang (2018). That is all of correlated noise too: M x + Z over all rounds
    is one normal vector, and turned so that the client's M x lies on the first axis, only that
    coordinate differs between neighbours.

    With a = epsilon/shift - shift/2, the density f and Mills' ratio m(x) = Phi(-x) / f(x), delta is
    f(a) (m(a) - m(a + shift)): no product of a huge and a tiny number, whatever delta is.
    """
    if shift == 0 or math.isinf(shift):
        return shift

    def excess(a: float) -> float:
        """Return the logarithm of the profile's delta over the one asked for."""
        if a < -5:  # only for shifts above 10: what is taken off is small
            log_rest = shift * a + shift**2 / 2 + scipy.special.log_ndtr(-a - shift)
            return math.log(scipy.special.ndtr(-a) - math.exp(log_rest)) - math.log(delta)
        mills = scipy.special.erfcx(np.array([a, a + shift]) / math.sqrt(2))
        log_density = -(a**2) / 2 - math.log(2)  # erfcx is Mills' ratio, up to a factor
        fall = mills[0] - mills[1]
        return log_density + (math.log(fall) if fall > 0 else -math.inf) - math.log(delta)

    low, high = -shift / 2, max(-scipy.special.ndtri(delta), -shift / 2) + 1e-6
    if excess(low) <= 0:
        return 0.0
    found = scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-14)
    return float(shift * (found + 1e-12 * max(1.0, abs(found))) + shift**2 / 2)


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence the log of a library, which warns of what does not matter here.

    dp_accounting says that it leaves out an order; jax_privacy advises fewer buffers.
    """
    logger = logging.getLogger(name)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _sampled(noise_multiplier: float, rate: float) -> Any:
    """Return the accounting event of one round: Gaussian noise on a Poisson cohort."""
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(rate, gaussian)
