"""Privacy mechanisms by name, and whether a plan is sound.

In:       a plan.
Out:      its mechanism's entry; its noise; or a refusal.
Promise:  `check` passes only plans whose epsilon can be computed; no other pair of mechanism and
          sampling law is let through; one line in `MECHANISMS` adds a mechanism.
Not here: what a mechanism does (`gaussian.py`, `spaced.py`), epsilon (`account.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedlm.core.errors import either, nearest, require
from fedlm.privacy.at_nodes import DISTRIBUTED
from fedlm.privacy.gaussian import GAUSSIAN
from fedlm.privacy.mechanism import Mechanism
from fedlm.privacy.noise import Noise, silent
from fedlm.privacy.plan import PrivacyPlan, check_numbers
from fedlm.privacy.spaced import BANDED, BLT, TOEPLITZ, TREE

MECHANISMS: dict[str, Mechanism] = {
    "gaussian": GAUSSIAN,
    "distributed": DISTRIBUTED,
    "tree": TREE,
    "banded": BANDED,
    "toeplitz": TOEPLITZ,
    "blt": BLT,
}
# Searching for the matrix of more rounds takes minutes: 45 s for a blt of 10,000 on two cores.
MOST_SEARCHED = 20_000


def noise_for(plan: PrivacyPlan) -> Noise:
    """Make the noise of a plan, in units of the clip norm.

    Its standard deviation is `plan.sum_multiplier`, whatever `plan.clip_norm` is: `Noise.add`
    multiplies it by the clip norm of the round.
    """
    stddev = plan.sum_multiplier
    return MECHANISMS[plan.mechanism].noise(plan, stddev) if stddev else silent()


def with_matrix(plan: PrivacyPlan, begun: PrivacyPlan | None = None) -> PrivacyPlan:
    """Return the plan with the numbers of its matrix: those of a run that began, or found now."""
    find = MECHANISMS[plan.mechanism].find_matrix
    if plan.matrix or find is None:
        return plan
    if begun is not None and _same_matrix(begun) == _same_matrix(plan):
        return dataclasses.replace(plan, matrix=begun.matrix)
    return dataclasses.replace(plan, matrix=find(plan))


def _same_matrix(plan: PrivacyPlan) -> tuple[Any, ...]:
    """Return all that the best matrix depends on."""
    sampling = plan.sampling
    joins = (sampling.law, sampling.min_separation, sampling.max_participations)
    return (plan.mechanism, plan.rounds, plan.restart_every, plan.bands, plan.buffers, *joins)


def may_grow(plan: PrivacyPlan) -> bool:
    """Return whether a run under this plan may be extended beyond its planned rounds."""
    return plan.sampling.law in MECHANISMS[plan.mechanism].replay_laws


def as_begun(plan: PrivacyPlan, begun: PrivacyPlan | None) -> PrivacyPlan:
    """Return a plan with the rounds with which it was begun, if those may have grown since."""
    if begun is None or not may_grow(plan) or plan.rounds <= begun.rounds:
        return plan
    return dataclasses.replace(plan, rounds=begun.rounds)


def check_plan(plan: PrivacyPlan) -> None:
    """Refuse a plan that could not keep, or not account for, what it claims."""
    require(
        plan.mechanism in MECHANISMS,
        "privacy.mechanism",
        plan.mechanism,
        f"one of {', '.join(MECHANISMS)}",
        nearest(str(plan.mechanism), MECHANISMS),
    )
    mechanism = MECHANISMS[plan.mechanism]
    check_numbers(plan)
    _check_law(plan, mechanism)
    plan.sampling.check()
    _check_unused(plan, mechanism)
    require(
        not plan.matrix or mechanism.find_matrix is not None,
        "matrix",
        f"{len(plan.matrix)} numbers",
        f"none with privacy.mechanism = {plan.mechanism!r}: its noise has no matrix to choose",
    )
    require(
        bool(plan.matrix) or mechanism.find_matrix is None or plan.rounds <= MOST_SEARCHED,
        "server.rounds",
        plan.rounds,
        f"at most {MOST_SEARCHED} with privacy.mechanism = {plan.mechanism!r}, because the search "
        "for its matrix would take too long",
    )
    mechanism.check(plan)
    if plan.clip_quantile:
        _check_adaptive(plan, mechanism)


def own_settings() -> list[str]:
    """List the settings that shape the noise of some mechanisms only."""
    return sorted({name for entry in MECHANISMS.values() for name in entry.settings})


def with_setting(name: str) -> list[str]:
    """List the mechanisms whose noise a setting shapes."""
    return [known for known, entry in MECHANISMS.items() if name in entry.settings]


def _check_law(plan: PrivacyPlan, mechanism: Mechanism) -> None:
    law = plan.sampling.law
    fit = [name for name, entry in MECHANISMS.items() if law in entry.laws]
    wanted = f"{either(fit)} when" if fit else "another mechanism: none has a known cost when"
    require(
        law in mechanism.laws,
        "privacy.mechanism",
        plan.mechanism,
        f"{wanted} server.sampling = {law!r}, {mechanism.reason}",
        mechanism.way_out,
    )


def _check_unused(plan: PrivacyPlan, mechanism: Mechanism) -> None:
    """Refuse a setting that shapes only the noise of other mechanisms."""
    defaults = {field.name: field.default for field in dataclasses.fields(plan)}
    for name in own_settings():
        require(
            name in mechanism.settings or getattr(plan, name) == defaults[name],
            f"privacy.{name}",
            getattr(plan, name),
            f"{defaults[name]} with privacy.mechanism = {plan.mechanism!r}: it is a setting of "
            f"{either(map(repr, with_setting(name)))}",
        )


def _check_adaptive(plan: PrivacyPlan, mechanism: Mechanism) -> None:
    require(
        0 <= plan.clip_quantile < 1,
        "privacy.clip_quantile",
        plan.clip_quantile,
        "0 (a fixed clip) or a share of updates below 1",
    )
    require(
        mechanism.independent or plan.sampling.law not in mechanism.chance_laws,
        "privacy.clip_quantile",
        plan.clip_quantile,
        f"0 with privacy.mechanism = {plan.mechanism!r} and server.sampling = "
        f"{plan.sampling.law!r}: a count over a restart adds up turns whose chances are accounted "
        "for one by one",
        "Or set server.sampling = 'spaced'.",
    )
    require(
        mechanism.clip_moves == "every round" or 0 < plan.restart_every < plan.rounds,
        "privacy.clip_quantile",
        plan.clip_quantile,
        f"0 with privacy.restart_every = {plan.restart_every}, because correlated noise is made "
        "for one clip until it restarts",
        f"Set privacy.restart_every below server.rounds, here {plan.rounds}.",
    )
    least = plan.noise_multiplier * plan.count_weight**0.5 / 2
    more = "half of" if plan.count_weight == 1 else f"{plan.count_weight**0.5 / 2:.3g} times"
    require(
        plan.noise_multiplier == 0 or plan.clip_noise > least,
        "privacy.clip_noise",
        plan.clip_noise,
        f"more than {more} privacy.noise_multiplier, here {least:g}: the count of updates let "
        "through spends a part of the same budget",
        "A twentieth of all updates that are counted together is common.",
    )
