"""What a recipe promises to each client: `[privacy]` to a plan.

In:       a recipe, and how many clients there are.
Out:      the sampling law, the plan, how many rounds fit its budget, the secret of its draws.
Promise:  settings that look like a promise and are none are refused; a plan is checked before
          the first round.
Not here: which plans are sound (`privacy/catalog.py`), what they cost (`privacy/account.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fedlm.cohort.sampling import LAWS
from fedlm.core.errors import RecordError, require
from fedlm.core.types import Sampling
from fedlm.privacy import account, evaluation
from fedlm.privacy.catalog import check_plan, own_settings, with_matrix
from fedlm.privacy.cost import gaussian_event
from fedlm.privacy.ledger import Entry, Ledger, gaussian_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Client, Privacy, Recipe
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import read


def sampling_of(recipe: Recipe, clients: int) -> Sampling:
    """Return the law by which members are sampled; canaries count as members of the population."""
    server, privacy = recipe.server, recipe.privacy
    sampling = Sampling(
        law=server.sampling,
        population=clients + privacy.canaries,
        cohort=server.cohort,
        min_separation=privacy.min_separation,
        max_participations=privacy.max_participations,
    )
    sampling.check()
    return sampling


def participation_of(
    recipe: Recipe, clients: int, out: Path | None = None, ledgers: Sequence[Path] = ()
) -> Sampling | PrivacyPlan:
    """Return the privacy plan, or the sampling law if the recipe has no plan.

    With `out`, the directory of its run, the plan has the numbers of its matrix: those with which
    the run began, or new ones. `ledgers` tell what preparing the text has cost the clients.
    """
    sampling = sampling_of(recipe, clients)
    return plan_of(recipe, sampling, out, ledgers) or sampling


def plan_of(
    recipe: Recipe, sampling: Sampling, out: Path | None = None, ledgers: Sequence[Path] = ()
) -> PrivacyPlan | None:
    """Return the privacy plan; noise that is not given is found from the target epsilon."""
    asked = recipe.privacy
    if asked.mechanism is None:
        _refuse_half_a_plan(recipe)
        return None
    require(
        asked.noise_multiplier is not None or asked.epsilon is not None,
        "privacy.noise_multiplier",
        asked.noise_multiplier,
        "a multiple of privacy.clip_norm",
        "Or set privacy.epsilon, and the noise is found from it.",
    )
    count_noise = asked.clip_noise
    if count_noise is None:
        counted = sampling.cohort * (asked.restart_every or 1)
        count_noise = counted / 20 if asked.clip_quantile else 0.0
    plan = PrivacyPlan(
        mechanism=asked.mechanism,
        sampling=sampling,
        rounds=recipe.server.rounds,
        clip_norm=asked.clip_norm,
        noise_multiplier=asked.noise_multiplier or 0.0,
        delta=asked.delta,
        **{name: getattr(asked, name) for name in own_settings()},
        clip_quantile=asked.clip_quantile,
        clip_rate=asked.clip_rate,
        clip_noise=count_noise,
        reveal=asked.reveal,
    )
    check_plan(replace(plan, noise_multiplier=1.0) if asked.noise_multiplier is None else plan)
    if out is not None:
        plan = with_matrix(plan, _begun(out))
    if asked.noise_multiplier is None:
        assert asked.epsilon is not None
        others = _others(recipe, ledgers)
        events = [gaussian_event(entry["noise_multiplier"]) for entry in others]
        extra = sum(entry["delta"] for entry in others)
        noise = account.calibrate(plan, asked.epsilon, events, extra)
        plan = replace(plan, noise_multiplier=noise)
    check_plan(plan)
    return plan


def _others(recipe: Recipe, ledgers: Sequence[Path]) -> list[Entry]:
    """Return the releases besides rounds that the target epsilon of a run must hold."""
    found = [e for path in ledgers for e in Ledger(path).entries() if e["kind"] == "gaussian"]
    asked, rounds = recipe.privacy, recipe.server.rounds
    if asked.evaluation_noise is not None:
        due = evaluation.releases(rounds, asked.evaluation_every)
        found += [gaussian_entry("evaluation", asked.evaluation_noise)] * due
    return found


def _begun(out: Path) -> PrivacyPlan | None:
    """Return the plan with which the run in a directory began, if there is one that can be read."""
    try:
        header = next(read(RunDirectory(out).journal), {})
        return next(iter(account.plans_from(header).values()))
    except (OSError, RecordError):
        return None


def _refuse_half_a_plan(recipe: Recipe) -> None:
    """Raise `ConfigError` for a `[privacy]` table that looks like a promise and is none."""
    nothing = Privacy()
    for name, value in recipe.privacy:
        require(
            value == getattr(nothing, name),
            f"privacy.{name}",
            value,
            "privacy.mechanism beside it: without one nothing is clipped and no noise is added",
        )
    require(
        not LAWS[recipe.server.sampling].keeps_rests,
        "server.sampling",
        recipe.server.sampling,
        "privacy.mechanism and privacy.min_separation beside it",
    )


def client_of(recipe: Recipe) -> Client:
    """Return the `[client]` table, with uniform weights under a privacy plan."""
    client = recipe.client
    if recipe.privacy.mechanism is None or client.weight == "uniform":
        return client
    require(
        "weight" not in client.model_fields_set,
        "client.weight",
        client.weight,
        "'uniform' under a privacy plan, because a weight would let one client move the sum by "
        "more than the clip",
        "Leave it out.",
    )
    return client.model_copy(update={"weight": "uniform"})


def planned_rounds(recipe: Recipe, plans: Iterable[PrivacyPlan]) -> int:
    """Return the number of rounds asked for, or as many as the budget allows under every plan."""
    budget = recipe.privacy.epsilon
    if budget is None or recipe.privacy.noise_multiplier is None:
        return recipe.server.rounds
    return min((_fitting(plan, budget) for plan in set(plans)), default=recipe.server.rounds)


def _fitting(plan: PrivacyPlan, budget: float) -> int:
    fits = account.allowed_rounds(plan, budget)
    require(
        fits > 0,
        "privacy.epsilon",
        budget,
        f"a budget that holds one round: with privacy.noise_multiplier = "
        f"{plan.noise_multiplier:g} the first costs {account.spent(plan, 1).epsilon:.3g}",
        "Raise it or privacy.noise_multiplier.",
    )
    return fits


def new_secret(privacy: Privacy) -> bytes:
    """Return 16 bytes that seed private draws: the system's entropy, or the fixed seed."""
    return os.urandom(16) if privacy.seed is None else privacy.seed.to_bytes(16, "little")
