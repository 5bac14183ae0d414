"""What privacy costs: a plan and the rounds that ran to an epsilon, and back.

In:       a plan, and how many rounds ran; or a journal.
Out:      epsilon at the plan's delta, how it was computed and what it assumes; or the noise, or
          the number of rounds, that keep to a target.
Promise:  epsilon holds for one client replaced by zero in every round; it is computed by
          dp_accounting from the mechanism that ran; more noise or fewer rounds never raise it.
Not here: noise (`noise.py`), the worst placement of a client (`sensitivity.py`).

dp_accounting is imported inside functions: it costs over a second, and training does not need it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.core.types import Sampling
from fedlm.privacy import sensitivity
from fedlm.privacy.plan import PrivacyPlan, check

# More noise than this drowns any sum; a target that needs more cannot be met.
MOST_NOISE = 1e6
UNIT = "one client with all its text; neighbours differ by its contributions replaced by zero"
SERVER = "whoever sees updates or sums before noise is added is trusted"
# Any order gives a valid epsilon; so fine a grid finds the best one to five digits.
ORDERS = 1 + np.logspace(-1.9, 6, 4000)


class Spent(NamedTuple):
    """An epsilon and what it rests on."""

    epsilon: float
    delta: float
    rho: float | None
    accountant: str
    assumptions: tuple[str, ...]


def spent(plan: PrivacyPlan, rounds: int) -> Spent:
    """The cost of the first `rounds` rounds of a plan."""
    check(plan)
    require(rounds >= 0, "rounds", rounds, "zero or more rounds")
    law, rho = plan.sampling.law, None
    if plan.mechanism != "gaussian":
        require(
            rounds <= plan.rounds,
            "rounds",
            rounds,
            f"at most the {plan.rounds} rounds for which the noise was made",
        )
        squared = sensitivity.of_plan(plan, rounds) if rounds else sensitivity.Squared(0.0)
        rho = _rho(squared.value, plan.noise_multiplier)
        epsilon = epsilon_of_rho(rho, plan.delta)
        name, why = f"zCDP of {plan.mechanism} noise, converted through RDP", _separated(plan)
        why = (*why, _placement(squared))
    elif law == "poisson":
        epsilon = _poisson(plan, rounds)
        name, why = "PLD of Poisson-sampled Gaussian noise", (_poisson_words(plan),)
    else:
        epsilon = _fixed(plan, rounds)
        name, why = "RDP of Gaussian noise on fixed-size cohorts", _fixed_words(plan)
    return Spent(epsilon, plan.delta, rho, name, (UNIT, *why, SERVER, *_warning(plan)))


def calibrate(plan: PrivacyPlan, target_epsilon: float) -> float:
    """The smallest noise multiplier with which all planned rounds keep to the target.

    It is found to four digits and never lies below: `spent` with it is at most the target.
    """
    import scipy.optimize

    _check_target(target_epsilon)
    check(dataclasses.replace(plan, noise_multiplier=1.0))

    @functools.cache
    def over(log_noise: float) -> float:
        trial = dataclasses.replace(plan, noise_multiplier=math.exp(log_noise))
        ratio = _epsilon(trial, plan.rounds) / target_epsilon
        return math.log(min(max(ratio, 1e-30), 1e30))

    low, high = _bracket(over, math.log(_guess(plan, target_epsilon)))
    if over(high) > 0:
        raise ConfigError(
            f"privacy.epsilon = {target_epsilon!r}: expected a target that some noise can meet in "
            f"{plan.rounds} rounds at privacy.delta = {plan.delta!r}. Raise one of them, or lower "
            "server.rounds."
        )
    if over(low) <= 0:
        return math.exp(low)
    found = scipy.optimize.brentq(over, low, high, xtol=2e-5)
    while over(found) > 0:
        found += 2e-5
    return math.exp(found)


def _bracket(over: Callable[[float], float], start: float) -> tuple[float, float]:
    """Logarithms of noise with the target in between, as far as there is any."""
    limit, step = math.log(MOST_NOISE), 0.1
    low = high = start
    while over(high) > 0 and high < limit:
        low, high, step = high, min(high + step, limit), 2 * step
    while over(low) <= 0 and low > -limit:
        low, high, step = max(low - step, -limit), low, 2 * step
    return low, high


def allowed_rounds(plan: PrivacyPlan, target_epsilon: float) -> int:
    """How many of the planned rounds fit into a budget."""
    _check_target(target_epsilon)
    check(plan)
    if _epsilon(plan, plan.rounds) <= target_epsilon:
        return plan.rounds
    low, high = 0, plan.rounds  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = _epsilon(plan, middle) <= target_epsilon
        low, high = (middle, high) if fits else (low, middle)
    return low


def from_journal(header: dict[str, Any], rounds: Iterable[dict[str, Any]]) -> Spent:
    """The cost of a run, from the plan and the rounds that its journal names."""
    facts = header.get("privacy")
    if facts is None:
        raise RecordError("the run makes no privacy claim: its recipe has no [privacy] table.")
    ran = list(rounds)
    # A line lost in the middle must not make a run look cheaper than it was.
    count = max([len(ran), *(int(entry.get("round", -1)) + 1 for entry in ran)])
    return spent(plan_from(facts), count)


def plan_from(facts: dict[str, Any]) -> PrivacyPlan:
    """The plan that `dataclasses.asdict` wrote, read strictly."""
    try:
        sampling = _typed(Sampling, facts["sampling"])
        return PrivacyPlan(**{**_known(PrivacyPlan, facts), "sampling": Sampling(**sampling)})
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"the journal's privacy plan is damaged: {error}.") from None


def _known(kind: Any, facts: dict[str, Any]) -> dict[str, Any]:
    return _typed(kind, {name: value for name, value in facts.items() if name != "sampling"})


def _typed(kind: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with the types of a dataclass; JSON writes 1.0 as 1.0 and infinity as null."""
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    read: dict[str, Any] = {}
    for name, value in facts.items():
        if name not in types:
            raise ValueError(f"{name} is not known")
        wanted = types[name]
        if wanted == "float":
            value = math.inf if value is None else value
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif wanted == "bool":
            good = isinstance(value, bool)
        elif wanted == "int":
            good = isinstance(value, int) and not isinstance(value, bool)
        else:
            good = isinstance(value, str)
        if not good:
            raise ValueError(f"{name} = {value!r}")
        read[name] = float(value) if wanted == "float" else value
    return read


def _check_target(target_epsilon: float) -> None:
    require(
        0 < target_epsilon < math.inf,
        "privacy.epsilon",
        target_epsilon,
        "a positive number: no noise reaches zero",
    )


def _epsilon(plan: PrivacyPlan, rounds: int) -> float:
    """`spent` without words."""
    if plan.mechanism != "gaussian":
        squared = sensitivity.of_plan(plan, rounds).value if rounds else 0.0
        return epsilon_of_rho(_rho(squared, plan.noise_multiplier), plan.delta)
    return _poisson(plan, rounds) if plan.sampling.law == "poisson" else _fixed(plan, rounds)


def _guess(plan: PrivacyPlan, target_epsilon: float) -> float:
    """Where to begin the search: PLD is slow, RDP of the same rounds is close and quick."""
    if plan.mechanism != "gaussian" or plan.sampling.law != "poisson":
        return 1.0
    noise = 1.0

    def quick(z: float) -> float:
        return _rdp(_sampled(plan, z), plan.rounds, plan.delta)

    while quick(noise) > target_epsilon and noise < MOST_NOISE:
        noise *= 1.3
    while quick(noise / 1.1) <= target_epsilon and noise > 1 / MOST_NOISE:
        noise /= 1.1
    return noise


def _rho(squared: float, noise: float) -> float:
    if squared == 0:
        return 0.0
    return squared / (2 * noise**2) if noise else math.inf


def epsilon_of_rho(rho: float, delta: float) -> float:
    """The least over orders a of rho a + log(1 - 1/a) - log(delta a) / (a - 1)."""
    import dp_accounting

    if rho == 0 or math.isinf(rho):
        return rho
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS, relation)
    return float(accountant.compose(dp_accounting.ZCDpEvent(rho)).get_epsilon(delta))


def _sampled(plan: PrivacyPlan, noise: float) -> Any:
    """One round of Gaussian noise on a Poisson cohort, as an event."""
    import dp_accounting

    rate = plan.sampling.cohort / plan.sampling.population
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def _poisson(plan: PrivacyPlan, rounds: int) -> float:
    """Privacy loss distributions, composed; tight up to their grid, which errs upwards."""
    import dp_accounting

    if rounds == 0 or plan.noise_multiplier == 0:
        return math.inf if rounds else 0.0
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.pld.PLDAccountant(relation)
    event = dp_accounting.SelfComposedDpEvent(_sampled(plan, plan.noise_multiplier), rounds)
    return float(accountant.compose(event).get_epsilon(plan.delta))


def _fixed(plan: PrivacyPlan, rounds: int) -> float:
    """Renyi accounting of cohorts drawn without replacement.

    In such a cohort a client that stays out is replaced by another one, so that the sum moves by
    up to twice the clip: the theorem is applied with half the noise multiplier. That a client
    joins every round is a second bound, without any chance; the smaller one is the answer.
    """
    import dp_accounting

    if rounds == 0 or plan.noise_multiplier == 0:
        return math.inf if rounds else 0.0
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(
        plan.sampling.population,
        plan.sampling.cohort,
        dp_accounting.GaussianDpEvent(plan.noise_multiplier / 2),
    )
    always = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
    one = dp_accounting.NeighboringRelation.REPLACE_ONE
    return min(_rdp(drawn, rounds, plan.delta, one), _rdp(always, rounds, plan.delta))


def _rdp(event: Any, rounds: int, delta: float, relation: Any = None) -> float:
    import dp_accounting

    relation = relation or dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))


def _separated(plan: PrivacyPlan) -> tuple[str, ...]:
    sampling = plan.sampling
    often = (
        f"and at most {sampling.max_participations} times" if sampling.max_participations else ""
    )
    words = f"a client joins with at least {sampling.min_separation} rounds in between {often}"
    return (f"{words.strip()}, enforced by the sampler",)


def _placement(squared: sensitivity.Squared) -> str:
    kind = "the exact maximum" if squared.exact else "an upper bound, the maximum is lower"
    return f"squared sensitivity {squared.value:.6g}: {kind} over all such placements"


def _poisson_words(plan: PrivacyPlan) -> str:
    sampling = plan.sampling
    return (
        f"every client joins each round by its own coin, with probability {sampling.cohort} in "
        f"{sampling.population}, and who joined stays secret"
    )


def _fixed_words(plan: PrivacyPlan) -> tuple[str, ...]:
    sampling = plan.sampling
    return (
        f"each cohort is {sampling.cohort} of {sampling.population} clients, drawn without "
        "replacement, and who joined stays secret",
        "a cohort of fixed size moves by twice the clip, so RDP is applied with half the noise; "
        "server.sampling = 'poisson' costs less",
    )


def _warning(plan: PrivacyPlan) -> tuple[str, ...]:
    if plan.mechanism == "gaussian" and plan.delta * plan.sampling.population >= 1:
        return ("delta is not below one in the population, so this epsilon promises little",)
    return ()
