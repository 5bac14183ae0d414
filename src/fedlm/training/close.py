"""The end of a run: its model, final figures, report and summary.

In:       a `Run` and its last state.
Out:      the files that others use, and the summary that the command line prints.
Promise:  all of it can be made again from the last checkpoint; the summary is written last, so that
          a run with a summary is whole.
Not here: how figures are computed (`evaluate`), pages (`record/report.py`).
"""

from __future__ import annotations

from typing import Any

from fedlm import lineage
from fedlm.core import tree
from fedlm.core.durable import write_atomically
from fedlm.core.types import FederationState, Params
from fedlm.evaluate.progress import listening
from fedlm.federation.round import Metrics
from fedlm.inference import predict
from fedlm.models.adapters import merged
from fedlm.privacy.claim import ALWAYS, Claim
from fedlm.privacy.release import release
from fedlm.publish.pages import page_of
from fedlm.record import tree_report
from fedlm.record.facts import Facts, facts_of
from fedlm.record.journal import Journal, dumps
from fedlm.run import Run
from fedlm.training.early_stopping import EarlyStopping
from fedlm.training.node_runs import write_run, write_trained
from fedlm.training.watcher import Watcher
from fedlm.training.write_ahead import Resumed, WriteAhead

Summary = dict[str, Any]


def close(run: Run, last: Resumed, watcher: Watcher) -> Summary:
    """Write weights, final figures, report and summary; all can be remade from a checkpoint."""
    directory, cadence, state, say = run.record, run.cadence, last.state, watcher.say
    say("evaluating on all held-out text")
    with listening(watcher.scored):
        splits = {split: run.evaluation.final(state, split) for split in run.evaluation.splits()}
    counted: Metrics = {}
    if run.outputs.baselines:
        say("counting n-grams on the training tokens")
        counted = run.evaluation.baselines(list(splits))
    if cadence.rounds < cadence.asked_rounds and not last.ended:
        say(
            f"The privacy budget ends here: round {cadence.rounds + 1} of {cadence.asked_rounds} "
            f"would pass epsilon {cadence.budget:g}. The model is kept."
        )
    journal = Journal(directory.journal)
    journal.rewind(int(state.round))
    models = run.round.models(state)
    claim = _claim(run)
    if claim is not None:
        for said in (each for each in claim.not_covered if each not in ALWAYS):
            say(f"Not covered by the privacy claim: {said}.")
    final = {
        **splits,
        "baselines": counted,
        "predictions": _predictions(run, models[""]),
        "privacy": None if claim is None else {**claim.facts, **WriteAhead(run).releases()},
    }
    journal.append(release(run.plan, "final", final))
    journal.sync()
    own = run.round.own_models(state)
    # Of what `write_trained` writes.
    hashes = ([tree.sha256(merged(m)) for m in of.values()] for of in (models, own))
    lineage.add_models(directory.path, run.store, *hashes)
    write_trained(run, directory.weights, models.pop(""))
    for name, params in models.items():
        _write_node(run, name, params, state, splits)
    for name, params in own.items():
        write_trained(run, directory.own_weights_of(name), params, private=True)
    facts = facts_of(directory.path)
    for warning in tree_report.warnings(facts.header, facts.rounds):
        say(f"Warning: {warning}")
    write_atomically(directory.report, page_of([directory.path]).encode())
    summary = summary_of(run, run.round.params(state), facts)
    write_atomically(directory.summary, (dumps(summary) + "\n").encode())
    directory.forget_frozen()
    return summary


def _write_node(
    run: Run, name: str, params: Params, state: FederationState, splits: Metrics
) -> None:
    """Write the model of a node of a tree, with its figures, as a run of its own."""
    figures = {
        split: next(node for node in found["nodes"] if node["name"] == name)
        for split, found in splits.items()
    }
    directory = run.record.node(name)
    write_run(
        directory,
        params,
        run.node_recipes[name],
        run.store,
        rounds=int(state.round),
        final=figures,
        part_of={
            "run": run.record.path.resolve().name,
            "node": name,
            "private": run.plan is not None,
        },
        plan=run.plan,
    )


def _predictions(run: Run, params: Params) -> list[Metrics]:
    """Return the likeliest next words after the prompts of the recipe."""
    return [
        {"prompt": prompt, "next": predict(params, run.store.tokenizer, prompt)}
        for prompt in run.outputs.prompts
    ]


def _claim(run: Run) -> Claim | None:
    """Return the privacy claim of the run in numbers and words; None without a plan."""
    if run.plan is None:
        return None
    return lineage.claim_of_run(run.record.path, facts_of(run.record.path).header)


def summary_of(run: Run, params: Params, facts: Facts) -> Summary:
    """Return the figures of a finished run, by the names that the command line prints."""
    headline = facts.final.get("test") or facts.final.get("validation") or {}
    seconds = sum(r["seconds"] for r in facts.rounds)
    last = facts.rounds[-1] if facts.rounds else {}
    counted = facts.final.get("baselines") or {}
    return {
        "run": str(run.record.path),
        "rounds": len(facts.rounds),
        "perplexity": headline.get("perplexity"),
        "accuracy": headline.get("accuracy"),
        "bits_per_byte": headline.get("bits_per_byte"),
        "tokens": facts.tokens,
        "upload_bytes": last.get("upload_bytes", 0),
        "download_bytes": last.get("download_bytes", 0),
        **_spent(facts),
        "params": run.model.parameters,
        "params_sha256": tree.sha256(params),
        "seconds": round(seconds, 3),
        "clients_per_second": sum(r["members"] for r in facts.rounds) / seconds
        if seconds
        else None,
        "start_perplexity": facts.header["start"]["perplexity"],
        **_best(facts, run),
        "validation_perplexity": (facts.final.get("validation") or {}).get("perplexity"),
        "baselines": counted.get("test") or counted.get("validation"),
        "predictions": facts.final.get("predictions"),
        "report": str(run.record.report),
        **({"nodes": headline["nodes"]} if "nodes" in headline else {}),
    }


def _best(facts: Facts, run: Run) -> Metrics:
    """Return when a run stopped early, and the figures of the best model if it keeps one."""
    found: Metrics = {}
    if facts.stopped_after is not None:
        found["stopped_early"] = facts.stopped_after
    best = EarlyStopping(0, facts.rounds).best
    if best is not None and run.record.best.is_file():
        found["best"] = {"round": best[0] + 1, "perplexity": best[1]}
    return found


def _spent(facts: Facts) -> Metrics:
    claim = facts.final.get("privacy") or {}
    return {"epsilon": claim.get("epsilon"), "delta": claim.get("delta")} | (
        {"privacy": claim["sentence"]} if claim else {}
    )
