"""`fedlm privacy`: the epsilon of settings or of a run, the noise for a target, an audit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedlm import lineage
from fedlm.cli.console import AsJson, emit, note, out, show, talk
from fedlm.cli.plan_options import PlanOptions, given, takes_plan
from fedlm.cli.train import STORES
from fedlm.core import tree
from fedlm.core.documents import JsonObject
from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.core.words import count, number
from fedlm.corpus.store import Store
from fedlm.engine.devices import use_devices
from fedlm.federation.audit import Seen, look
from fedlm.inference import load_params
from fedlm.privacy import account
from fedlm.privacy import audit as auditor
from fedlm.privacy.ledger import of_run, spent_of
from fedlm.privacy.plan import PrivacyPlan
from fedlm.publish.statement import statement_of, write_audit
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record import checkpoint
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.page import write_page
from fedlm.record.statement import statement_page as statement_page
from fedlm.training import check_same

app = typer.Typer(
    help="What privacy costs: epsilon of settings or of a run, noise for a target, an audit.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
@takes_plan
def epsilon(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory, or a store: all runs on it.")
    ] = None,
    *,
    options: PlanOptions,
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", help="Noise in units of the clip.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What settings cost, what a run has spent, or what all runs on a store cost together.

    Example: fedlm privacy epsilon runs/private
    """
    if run is not None:
        if options.mechanism or options.rounds or noise_multiplier is not None:
            raise ConfigError(f"{run}: it has its own settings; leave the options away.")
        delta = options.delta
        if (run / "store.json").is_file():
            return _answer_store(run, lineage.spent_on(Store(run), delta), as_json)
        require(
            delta is None, "--delta", delta, "a store: a run has its own; leave the options away"
        )
        return _answer_run(run, as_json)
    plan = options.plan(given("--noise-multiplier", noise_multiplier))
    _answer(plan, plan.rounds, _spent(plan, options.population), as_json)


@app.command()
@takes_plan
def calibrate(
    *,
    target_epsilon: Annotated[
        float, typer.Option("--target-epsilon", help="What all rounds may cost.")
    ],
    options: PlanOptions,
    as_json: AsJson = False,
) -> None:
    """The least noise that keeps all rounds within a target.

    Example: fedlm privacy calibrate --target-epsilon 4 --mechanism tree --rounds 99 --delta 1e-6
    """
    plan = options.plan(noise_multiplier=1.0)
    noise = account.calibrate(plan, target_epsilon)
    plan = dataclasses.replace(plan, noise_multiplier=noise)
    _answer(plan, plan.rounds, _spent(plan, options.population), as_json)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A finished run with privacy.canaries.")],
    confidence: Annotated[float, typer.Option(help="Of the lower bounds.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """What the canaries of a run show, beside what was accounted for.

    Example: fedlm privacy audit runs/private
    """
    require(0.5 < confidence < 1, "--confidence", confidence, "between 0.5 and 1")
    directory = RunDirectory.existing(run)
    # First: accounting for correlated noise uses JAX, and then it is too late for lanes.
    use_devices(load(directory.recipe).run.devices)
    facts = facts_of(directory.path)
    accounted = spent_of(of_run(run, facts.header))
    if not facts.header.get("canaries"):
        raise ConfigError(
            f"{run} has no canaries to look for: train again with --set privacy.canaries=100."
        )
    with talk.status("looking for canaries"):
        seen = _look(directory.finished(), facts.header, len(facts.rounds))
        found = auditor.audit(
            seen.scores, seen.strangers, seen.dimensions, accounted.delta, confidence
        )
    _show_audit(run, seen, found, accounted, as_json)


@app.command()
def statement(
    run: Annotated[Path, typer.Argument(help="A finished run with a privacy plan.")],
    page: Annotated[
        Path | None, typer.Option("--out", help="The page; by default RUN/statement.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one printable page that a data-protection officer can sign.

    Example: fedlm privacy statement runs/private --out statement.html
    """
    told = statement_of(run)
    if as_json and page is None:
        emit(told)
        return
    path = page or run / "statement.html"
    write_page(path, statement_page(told))
    if as_json:
        emit({**told, "statement": str(path)})
    else:
        out.print(told["sentence"])
        out.print(f"statement: {path}")


def _look(directory: RunDirectory, header: JsonObject, rounds: int) -> Seen:
    """Return what a run's canaries show, from its recipe, weights and checkpointed secret."""
    recipe = load(directory.recipe)
    run = build(recipe, STORES, out=directory.path)
    check_same(run)
    before = run.start()
    if tree.sha256(before) != header.get("start_sha256"):
        raise RecordError(
            f"{directory.path} began with another model than its recipe makes now, so how the "
            "model changed is not known."
        )
    after = load_params(recipe.model, run.store.vocabulary, directory.weights)
    saved = checkpoint.load_newest(directory.checkpoints, run.round.init(before), note)
    if saved is None:
        raise RecordError(
            f"{directory.path} holds no checkpoint, and with it the secret is gone from which the "
            "canaries were drawn: audit a run before its checkpoints are removed."
        )
    secret = np.asarray(saved.state.secret).astype("<u4").tobytes()
    return look(run.algorithm, before, after, secret=secret, rounds=rounds)


def _show_audit(
    run: Path, seen: Seen, found: auditor.Audit, accounted: account.Spent, as_json: bool
) -> None:
    facts = {
        "run": str(run),
        "canaries": len(seen.turns),
        "took_part": int((seen.turns > 0).sum()),
        "turns_mean": float(seen.turns.mean()),
        "turns_max": int(seen.turns.max()),
        "score_mean": found.mean,
        "score_spread": found.spread,
        "epsilon_estimate": found.estimate,
        "epsilon_lower": found.lower,
        "epsilon_lower_jax_privacy": found.second_lower,
        "confidence": found.confidence,
        "epsilon_accounted": accounted.epsilon,
        "delta": accounted.delta,
    }
    write_audit(RunDirectory(run), facts)
    if as_json:
        emit(facts)
    else:
        show("audit", ["what", "value"], [(k.replace("_", " "), v) for k, v in facts.items()])
    if found.lower > accounted.epsilon:
        note(
            "fedlm: this run is less private than its account says: its clip, its noise or its "
            "sampling is not that of its plan."
        )


def _answer_run(run: Path, as_json: bool) -> None:
    """Print the claim of a run: the same words as in its report."""
    facts = facts_of(RunDirectory.existing(run).path)
    claim = lineage.claim_of_run(run, facts.header)
    plan = account.plan_from(facts.header["privacy"])
    told = {
        "mechanism": plan.mechanism,
        "rounds": len(facts.rounds),
        "noise_multiplier": plan.noise_multiplier,
        **claim.facts,
    }
    if as_json:
        emit(told)
        return
    words = ("sentence", "covers", "not_covered", "assumptions", "nodes")
    show("privacy", ["what", "value"], [(k, v) for k, v in told.items() if k not in words])
    if claim.nodes:
        show("every federation of clients", ["node", "epsilon"], list(claim.nodes.items()))
    out.print(claim.sentence)
    for title, lines in (
        ("It covers:", claim.covers),
        ("It does not cover:", claim.not_covered),
        ("It holds if:", claim.assumptions),
    ):
        out.print(title)
        for line in lines:
            out.print(f"  - {line}")


def _answer_store(store: Path, found: lineage.StoreSpending, as_json: bool) -> None:
    """Print what all runs that a store has seen cost one of its clients."""
    if as_json:
        emit({"store": str(store), **found._asdict()})
        return
    rows = [[each["run"], each["rounds"], each["epsilon"]] for each in found.runs]
    show(f"runs on {store}", ["run", "rounds", "epsilon alone"], rows)
    out.print(store_sentence(found))
    out.print("It does not cover:")
    for line in found.not_covered:
        out.print(f"  - {line}")


def store_sentence(found: lineage.StoreSpending) -> str:
    """Say in one sentence what all runs on a store cost together."""
    known = f"{count(found.private_runs, 'private run')} known to this store"
    spent = "nothing that is known"
    if found.private_epsilon is not None:
        spent = f"epsilon {number(found.private_epsilon)} at delta {found.delta:g}"
    if not found.other_runs:
        return f"Together, {known} cost one client {spent} ({found.accountant})."
    others = count(found.other_runs, "known run")
    return (
        f"No finite epsilon holds for the clients of this store: {others} on it without a privacy "
        f"plan, or with exact sums told. Alone, {known} cost {spent}."
    )


def _spent(plan: PrivacyPlan, population: int | None) -> account.Spent:
    """Return the cost of a plan; a population that was assumed is nothing to warn about."""
    found = account.spent(plan, plan.rounds)
    if population is not None:
        return found
    said = tuple(line for line in found.assumptions if line != account.LITTLE)
    return found._replace(assumptions=said)


def _answer(plan: PrivacyPlan, rounds: int, found: account.Spent, as_json: bool) -> None:
    """Print the cost of a plan."""
    facts = {
        "mechanism": plan.mechanism,
        "rounds": rounds,
        "noise_multiplier": plan.noise_multiplier,
        **found._asdict(),
    }
    if as_json:
        emit(facts)
        return
    facts["by the published conversion"] = facts.pop("published_epsilon")
    rows = [
        (name, value)
        for name, value in facts.items()
        if name != "assumptions" and value is not None
    ]
    show("privacy", ["what", "value"], rows)
    out.print("It holds if:")
    for line in found.assumptions:
        out.print(f"  - {line}")
    if plan.noise_multiplier == 0:
        note("fedlm: without noise there is no privacy, whatever the clip.")
