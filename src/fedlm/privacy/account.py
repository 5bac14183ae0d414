"""The privacy account: from a plan and the rounds that ran to an epsilon, and back.

In:       a plan, and how many rounds ran.
Out:      epsilon at the plan's delta, how it was computed and what it assumes; or the noise, or
          the number of rounds, that keep to a target.
Promise:  epsilon holds for one client replaced by zero in every round; it is that of the mechanism
          that ran; more noise or fewer rounds never raise it, but for the error of a loss that is
          sampled (`bin_samples.py`).
Not here: the cost of each mechanism (`gaussian.py`, `spaced.py`), how dp_accounting computes it
          (`cost.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedlm.core.documents import JsonObject
from fedlm.core.errors import SURPRISES, ConfigError, RecordError, require
from fedlm.core.late import late
from fedlm.core.types import Sampling
from fedlm.privacy.catalog import MECHANISMS, check_plan
from fedlm.privacy.cost import MOST_NOISE, DpEvent, compose
from fedlm.privacy.cost import epsilon_of_rho as epsilon_of_rho
from fedlm.privacy.mechanism import Cost
from fedlm.privacy.plan import PrivacyPlan

scipy = late("scipy")  # up to a second

UNIT = "one client with all its text; neighbours differ by its contributions replaced by zero"
SERVER = "whoever sees updates or sums before noise is added is trusted"
UNITS = {
    "client": UNIT,
    "leaf": "one leaf of the tree with all text that it trains on; neighbours differ by everything "
    "that it sends replaced by zero",
}
TRUSTED = {
    "client": SERVER,
    "leaf": "the leaf itself, which clips and adds the noise, is trusted, and so is whoever can "
    "read the run's private files (mode 0600)",
}


LITTLE = "delta is not below one in the population, so this epsilon promises little"


class Spent(NamedTuple):
    """An epsilon, with the accountant and the assumptions behind it."""

    epsilon: float
    delta: float
    rho: float | None
    accountant: str
    assumptions: tuple[str, ...]
    # Of correlated noise: what papers print, by zCDP and RDP. Never below `epsilon`.
    published_epsilon: float | None = None


def spent(plan: PrivacyPlan, rounds: int) -> Spent:
    """Return the privacy cost of the first `rounds` rounds of a plan."""
    check_plan(plan)
    require(rounds >= 0, "rounds", rounds, "zero or more rounds")
    cost = _cost(plan, rounds)
    assumptions = (UNITS[plan.unit], *cost.assumptions, trusted_in(plan), *_warnings(plan))
    return Spent(
        cost.epsilon, plan.delta, cost.rho, cost.accountant, assumptions, cost.published_epsilon
    )


def trusted_in(plan: PrivacyPlan) -> str:
    """Say who is trusted under a plan."""
    own = MECHANISMS[plan.mechanism].trusted
    return TRUSTED[plan.unit] if own is None else own(plan)


def _warnings(plan: PrivacyPlan) -> tuple[str, ...]:
    """Return what makes a claim worth little, whatever its mechanism."""
    return (LITTLE,) if plan.delta * plan.sampling.population >= 1 else ()


def spent_by_plan(plans: Mapping[str, PrivacyPlan], rounds: int) -> dict[str, Spent]:
    """Return what the first `rounds` rounds cost the clients of each node, the dearest first."""
    found = {node: spent(plan, rounds) for node, plan in plans.items()}
    return dict(sorted(found.items(), key=lambda entry: -entry[1].epsilon))


def dearest_first(plans: Mapping[str, PrivacyPlan]) -> dict[str, PrivacyPlan]:
    """Order the plans of a tree's nodes by what all their rounds cost, the dearest first."""
    if len(set(plans.values())) < 2:
        return dict(plans)
    cost = {node: spent(plan, plan.rounds).epsilon for node, plan in plans.items()}
    return {node: plans[node] for node in sorted(plans, key=lambda node: -cost[node])}


def event_of(plan: PrivacyPlan, rounds: int) -> DpEvent:
    """Return what the first `rounds` rounds of a plan release, to compose it with other releases.

    `cost.compose` computes the epsilon of several events about the same clients.
    """
    check_plan(plan)
    require(rounds >= 0, "rounds", rounds, "zero or more rounds")
    return MECHANISMS[plan.mechanism].event(plan, rounds)


def calibrate(
    plan: PrivacyPlan,
    target_epsilon: float,
    others: Sequence[DpEvent] = (),
    extra_delta: float = 0.0,
) -> float:
    """Find the smallest noise multiplier with which all planned rounds keep to the target.

    The result has four correct digits and is rounded up: its epsilon never exceeds the target.
    `others` are further releases about the same clients that the target must hold too, and
    `extra_delta` the chance that one of them is not covered by its noise.
    """
    _check_target(target_epsilon)
    check_plan(dataclasses.replace(plan, noise_multiplier=1.0))

    @functools.cache
    def over(log_noise: float) -> float:
        trial = dataclasses.replace(plan, noise_multiplier=math.exp(log_noise))
        if others:
            events = [event_of(trial, plan.rounds), *others]
            epsilon = compose(events, plan.delta, extra_delta)[0]
        else:
            epsilon = _epsilon(trial, plan.rounds)
        ratio = epsilon / target_epsilon
        return math.log(min(max(ratio, 1e-30), 1e30))

    guess = MECHANISMS[plan.mechanism].first_guess(plan, target_epsilon)
    low, high = _bracket(over, math.log(guess))
    if over(high) > 0:
        raise ConfigError(
            f"privacy.epsilon = {target_epsilon!r}: expected a target that some noise can meet in "
            f"{plan.rounds} rounds at privacy.delta = {plan.delta!r}"
            f"{', beside the vocabulary and noisy figures' if others else ''}. Raise one of them, "
            "or lower server.rounds."
        )
    if over(low) <= 0:
        return math.exp(low)
    found = scipy.optimize.brentq(over, low, high, xtol=2e-5)
    while over(found) > 0:
        found += 2e-5
    return math.exp(found)


def _bracket(over: Callable[[float], float], start: float) -> tuple[float, float]:
    """Return two logarithms of noise that enclose the target, or end at the search limit."""
    limit, step = math.log(MOST_NOISE), 0.1
    low = high = start
    while over(high) > 0 and high < limit:
        low, high, step = high, min(high + step, limit), 2 * step
    while over(low) <= 0 and low > -limit:
        low, high, step = max(low - step, -limit), low, 2 * step
    return low, high


def allowed_rounds(plan: PrivacyPlan, target_epsilon: float) -> int:
    """Return how many of the planned rounds fit into a target epsilon."""
    _check_target(target_epsilon)
    check_plan(plan)
    if _epsilon(plan, plan.rounds) <= target_epsilon:
        return plan.rounds
    low, high = 0, plan.rounds  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = _epsilon(plan, middle) <= target_epsilon
        low, high = (middle, high) if fits else (low, middle)
    return low


def plans_from(header: JsonObject) -> dict[str, PrivacyPlan]:
    """Return the plans in a journal's header by node; the name of a flat federation is empty."""
    facts, nodes = header.get("privacy"), header.get("privacy_nodes", {})
    if facts is None:
        raise RecordError("the run makes no privacy claim: its recipe has no [privacy] table.")
    if not isinstance(nodes, dict):
        raise RecordError("the journal's privacy plans of nodes are damaged.")
    return {node: plan_from(of) for node, of in (nodes or {"": facts}).items()}


def plan_facts(plan: PrivacyPlan) -> JsonObject:
    """Return a plan as JSON can hold it, with null for infinity; `plan_from` reads it again."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        return None if isinstance(value, float) and math.isinf(value) else value

    facts: JsonObject = plain(dataclasses.asdict(plan))
    return facts


def plan_from(facts: JsonObject) -> PrivacyPlan:
    """Read a plan that `plan_facts` or a journal wrote; refuse unknown names and wrong types."""
    try:
        sampling = _typed(Sampling, facts["sampling"])
        plan = PrivacyPlan(**{**_known(PrivacyPlan, facts), "sampling": Sampling(**sampling)})
    except SURPRISES as error:
        raise RecordError(f"the journal's privacy plan is damaged: {error}.") from None
    entry = MECHANISMS.get(plan.mechanism)
    if entry is not None and entry.find_matrix is not None and not plan.matrix:
        raise RecordError(
            f"the privacy plan lacks the matrix of its {plan.mechanism} noise, so what it costs is "
            "not known: a search today may find another one. Account for it with the fedlm version "
            "that its journal names."
        )
    return plan


def _known(kind: Any, facts: JsonObject) -> JsonObject:
    return _typed(kind, {name: value for name, value in facts.items() if name != "sampling"})


def _typed(kind: Any, facts: JsonObject) -> JsonObject:
    """Check facts against the field types of a dataclass; a null float is infinity in JSON."""
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    read: JsonObject = {}
    for name, value in facts.items():
        if name not in types:
            raise ValueError(f"{name} is not known")
        wanted = types[name]
        if wanted == "float":
            value = math.inf if value is None else value
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif wanted == "tuple[float, ...]":
            good = isinstance(value, (list, tuple)) and all(type(v) in (int, float) for v in value)
            value = tuple(map(float, value)) if good else value
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
    """Return the epsilon of `spent` for a plan that was checked."""
    return _cost(plan, rounds).epsilon


@functools.lru_cache(maxsize=256)  # nodes of a tree often share a plan, and each is asked again
def _cost(plan: PrivacyPlan, rounds: int) -> Cost:
    return MECHANISMS[plan.mechanism].cost(plan, rounds)
