"""The statement that a data-protection officer signs for a run.

In:       the directory of a finished run with a privacy plan.
Out:      its facts, and one printable page.
Promise:  the claim is the one of the report, made again from ledger and lineage; a run without a
          finite epsilon has no statement.
Not here: what the page looks like (`record/statement.py`), the claim (`lineage.py`).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from fedlm import lineage
from fedlm.core.documents import JsonObject, read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.words import count
from fedlm.privacy import account, cost
from fedlm.privacy.ledger import of_run, rounds_of, spent_of
from fedlm.privacy.plan import PrivacyPlan
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.journal import dumps
from fedlm.record.statement import PRIORS, StatementFacts
from fedlm.record.svg import posterior
from fedlm.record.trust import trust_rows, whereabouts

AUDIT = "audit.json"  # the result of the last audit, in the run directory
MECHANISMS = {
    "gaussian": "fresh Gaussian noise in every round",
    "tree": "Gaussian noise on the nodes of a binary tree over rounds (DP-FTRL)",
    "banded": "Gaussian noise that is correlated over neighbouring rounds (banded matrix)",
    "toeplitz": "Gaussian noise that is correlated over rounds (Toeplitz matrix)",
    "distributed": "discrete Gaussian noise, a share of it added by every node",
    "blt": "Gaussian noise that is correlated over rounds (buffered linear Toeplitz matrix)",
}
LAWS = {
    "poisson": "every client by a coin of its own, with chance {cohort} in {population}",
    "cyclic-poisson": "clients in turns, each by a coin of its own within its turn",
    "fixed": "{cohort} of {population} clients, drawn anew each time",
    "balls-in-bins": "every client in one round of each epoch, drawn at random",
    "spaced": "{cohort} clients; {pause} between two turns of one client",
}


def statement_of(run: Path) -> StatementFacts:
    """Return what can be signed for a run; refuse where no finite epsilon holds."""
    directory = RunDirectory.existing(run).finished()
    facts = facts_of(directory.path)
    claim = lineage.claim_of_run(directory.path, facts.header)
    if math.isinf(claim.epsilon):
        raise RecordError(f"{run} has nothing to sign for. {claim.sentence}")
    if facts.header.get("unsafe_seed"):
        raise RecordError(
            f"{run} has nothing to sign for: the seed of its noise is a setting, so whoever knows "
            "it can subtract the noise. Train again without privacy.seed."
        )
    plan = account.plan_from(facts.header["privacy"])
    entries, members = of_run(directory.path, facts.header), whereabouts(directory.path)
    released, alone = len(rounds_of(entries)), spent_of(entries)
    return StatementFacts(
        run=directory.path.resolve().name,
        sentence=claim.sentence,
        unit=account.UNITS[plan.unit],
        mechanism=MECHANISMS.get(plan.mechanism, plan.mechanism),
        sampling=_sampling(plan),
        parameters=_parameters(plan, facts.header),
        epsilon=claim.epsilon,
        delta=claim.delta,
        accountant=claim.accountant,
        rounds=released,
        rounds_epsilon_exact=alone.epsilon,
        rounds_epsilon_published=_published(plan, alone, released),
        odds=[{"before": p, "at_most_after": posterior(p, claim.epsilon)} for p in PRIORS],
        covers=list(claim.covers),
        not_covered=list(claim.not_covered),
        assumptions=[line for line in claim.assumptions if line not in _said(plan)],
        trusted=[account.trusted_in(plan)],
        sees=[list(row) for row in trust_rows(facts.recipe, **members._asdict())],
        audit=read_audit(directory),
        ledger_sha256=_sha256(directory.ledger),
        ledger_lines=len(entries),
        model_sha256=_sha256(directory.weights),
        versions=dict(facts.header.get("versions") or {}),
    )


def _said(plan: PrivacyPlan) -> tuple[str, str]:
    """Return the assumptions that have a place of their own on the page."""
    return account.UNITS[plan.unit], account.trusted_in(plan)


def _sampling(plan: PrivacyPlan) -> str:
    if plan.unit == "leaf":
        return "every leaf of the tree"
    drawn = plan.sampling
    pause = f"at least {count(drawn.min_separation, 'round')}"
    return LAWS.get(drawn.law, drawn.law).format(
        cohort=f"{drawn.cohort:,}", population=f"{drawn.population:,}", pause=pause
    )


def _parameters(plan: PrivacyPlan, header: JsonObject) -> JsonObject:
    found = {
        "longest update of one client (clip)": plan.clip_norm,
        "noise, in multiples of the clip": plan.noise_multiplier,
        "planned rounds": plan.rounds,
        "budget: epsilon at most": header.get("privacy_budget"),
        "planted clients, for audits": header.get("canaries") or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _published(plan: PrivacyPlan, alone: account.Spent, rounds: int) -> float | None:
    """Return the epsilon of the rounds by the conversion of the papers; None if there is none."""
    if alone.published_epsilon is not None or rounds > plan.rounds:  # some were released again
        return alone.published_epsilon
    try:
        return cost.by_rdp([account.event_of(plan, rounds)], plan.delta)
    except (NotImplementedError, ValueError):  # dp_accounting knows no divergence of this event
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the audit beside it -----------------------------------------------------------------------


def write_audit(directory: RunDirectory, found: JsonObject) -> None:
    """Keep the result of an audit in the run directory, for its statement."""
    write_atomically(directory.path / AUDIT, (dumps(found) + "\n").encode())


def read_audit(directory: RunDirectory) -> JsonObject | None:
    """Return the result of the last audit of a run; None if there was none."""
    file = directory.path / AUDIT
    if not file.is_file():
        return None
    found = read_json(file, str(file), RecordError)
    wanted: dict[str, tuple[type, ...]] = {
        "canaries": (int,),
        "epsilon_lower": (int, float),
        "confidence": (float,),
    }
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), kind) for name, kind in wanted.items()
    ):
        raise RecordError(f"{file} is damaged: remove it, and audit the run again.")
    return found
