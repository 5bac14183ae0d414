"""The rounds of a run, each on record before the next one begins.

In:       a `Run`, the state that it begins or goes on from, somebody who watches.
Out:      played rounds; their lines in journal and ledger, their checkpoints, the best model.
Promise:  what was released under a privacy plan is in the ledger before it is in the journal, and
          in the journal before a checkpoint; sums over rounds go on where a killed run left them.
Not here: the loop (`run.py`), the first and the last lines of a journal (`begin.py`, `close.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedlm import lineage
from fedlm.core import tree
from fedlm.core.documents import JsonMapping
from fedlm.core.releasable import Releasable
from fedlm.core.types import FederationState
from fedlm.engine import multihost
from fedlm.evaluate.progress import listening
from fedlm.federation.round import Metrics, Played
from fedlm.models.adapters import merged
from fedlm.privacy.evaluation import ScheduledEvaluation
from fedlm.privacy.release import extend, recall, release
from fedlm.record import checkpoint
from fedlm.record.facts import facts_of
from fedlm.record.journal import Journal, dumps
from fedlm.record.trackers import TrackerContext, Trackers
from fedlm.run import Hooks, Run, rounds
from fedlm.training.begin import Begun
from fedlm.training.early_stopping import EarlyStopping
from fedlm.training.node_runs import write_trained
from fedlm.training.processes import check_equal
from fedlm.training.watcher import Watcher

SUMMED = ("upload_bytes", "download_bytes")


def play_rounds(run: Run, begun: Begun, watcher: Watcher) -> Iterator[Played]:
    """Play rounds from a state to the end or until the run stops; yield each once on record."""
    record = RoundRecord(run, begun, watcher)
    watcher.begin(int(begun.state.round), run.cadence.rounds, record.start_perplexity)
    try:
        if begun.missing is None or not record.complete(begun.missing, begun.state):
            yield from rounds(run, begun.state, record.hooks())
    finally:
        record.trackers.close()


class RoundRecord:
    """What is done with each round, in the order in which the loop asks for it.

    `commit` makes a private round safe, `evaluate` scores its model, `record` writes its facts,
    `stops` says whether the run ends with it, and `keep` saves its state.
    """

    def __init__(self, run: Run, begun: Begun, watcher: Watcher) -> None:
        before = facts_of(run.record.path)
        self.run, self.watcher, self.ahead = run, watcher, begun.ahead
        self.header = before.header
        self.on_record = int(begun.state.round)  # how many rounds
        # Bytes in the journal are sums over rounds: a resumed run continues from the last line.
        last = before.rounds[-1] if before.rounds else dict.fromkeys(SUMMED, 0)
        self.sums = {name: last[name] for name in SUMMED}
        self.journal = Journal(run.record.journal)
        self.trackers = Trackers(
            run.outputs.trackers,
            _tracker_context(run, self.on_record, before.rounds),
            watcher.say,
        )
        self.early = EarlyStopping(run.cadence.patience, before.rounds)
        wanted = run.outputs.keep_best or self.early.patience > 0
        self.keeps_best = len(run.round.names) == 1 and wanted
        # In a tree each place keeps the best model that it received, by its own held-out text.
        self.best_of: dict[str, EarlyStopping] | None = None
        if wanted and not self.keeps_best:
            self.best_of = {}
            for told in before.rounds:
                self._improved(told)
        self.evaluated: Any = None  # the state that was scored last

    @property
    def start_perplexity(self) -> float | None:
        """The perplexity of the model before the first round, if it may be told."""
        start: float | None = self.header["start"]["perplexity"]
        return start

    def hooks(self) -> Hooks:
        """Return what the loop calls after a round."""
        return Hooks(
            commit=self.commit,
            evaluate=self.evaluate,
            record=self.record,
            keep=self.keep,
            stop=lambda: multihost.agree(self.stops() or self.watcher.stop()),
        )

    def complete(self, missing: Releasable, state: FederationState) -> bool:
        """Write the facts that a crash kept from the journal; return whether the run ends there."""
        if not self.run.cadence.evaluates(missing["round"]):
            self.record(missing)
            return False
        self.record(extend(self.run.plan, missing, self.evaluate(state)))
        return self.stops()

    def commit(self, state: FederationState, told: Releasable) -> None:
        """Make the state of a private round and its release safe on disk."""
        assert self.ahead is not None
        self.journal.sync()  # rounds before a checkpoint must be in the journal
        self.ahead.commit(state, told)

    def evaluate(self, state: FederationState) -> Metrics:
        """Return a state's figures on held-out text, and noisy ones where they are due."""
        self.evaluated = state
        self.watcher.evaluating()
        with listening(self.watcher.scored):
            found = dict(self.run.evaluation.watch(state))
        noisy = self.run.private_evaluation
        if noisy is not None and noisy.due(int(state.round), self.run.cadence.rounds):
            found["private_validation"] = self._noisy(noisy, state)
        return found

    def _noisy(self, noisy: ScheduledEvaluation, state: FederationState) -> Metrics | None:
        """Return noisy figures that are on record before anybody sees them."""
        assert self.ahead is not None
        if noisy.at_nodes:  # what a node answers has left it, whatever becomes of this process
            self.ahead.pay_once(int(state.round), "evaluation", noisy.noise_multiplier)
            return noisy.figures(state)
        if not self.ahead.affords("evaluation", noisy.noise_multiplier):
            return None  # paid for before a crash that kept them from the journal
        figures = noisy.figures(state)
        self.ahead.pay("evaluation", noisy.noise_multiplier)
        return figures

    def record(self, told: Releasable) -> Releasable:
        """Write the facts of a round into the journal and tell them; return the written line."""
        self.sums = {name: self.sums[name] + told[name] for name in SUMMED}
        told = extend(self.run.plan, told, {**self.sums, **self._spent(told)})
        if self.early.hear(told) and self.keeps_best:  # before the journal: it promises the model
            _save_best(self.run, self.evaluated, [""])
        if self.best_of is not None and (improved := self._improved(told)):
            _save_best(self.run, self.evaluated, improved)
        self.journal.append(told)
        self.on_record = told["round"] + 1
        self.trackers.log(told["round"], told)
        self.watcher.round(told)
        return told

    def _improved(self, told: JsonMapping) -> list[str]:
        """Return the places of a tree whose received model scored lower than all before."""
        assert self.best_of is not None
        scored = {name: pair[0] for name, pair in (told.get("places") or {}).items()}
        return [
            name
            for name, found in scored.items()
            if self.best_of.setdefault(name, EarlyStopping(0)).hear(
                {"round": told["round"], "perplexity": found}
            )
        ]

    def _spent(self, told: Releasable) -> Metrics:
        """Return what a private run has released so far; where it was scored, epsilon too."""
        if self.ahead is None:
            return {}
        spent: Metrics = dict(self.ahead.releases())
        if "perplexity" in told:
            claim = lineage.claim_of_run(self.run.record.path, self.header)
            spent["epsilon"] = claim.epsilon if math.isfinite(claim.epsilon) else None
        return spent

    def stops(self) -> bool:
        """Return whether the run stops early after the last round, and write that down."""
        early, rounds = self.early, self.on_record
        if not early.exhausted or rounds == self.run.cadence.rounds:
            return False
        assert early.best is not None
        best = early.best[0]
        facts = {"round": rounds - 1, "patience": early.patience, "best_round": best}
        self.journal.append(release(self.run.plan, "stopped", facts))
        self.watcher.say(
            f"Stopping early after round {rounds}: no lower perplexity in {early.patience} "
            f"evaluations; the best was after round {best + 1}."
        )
        return True

    def keep(self, state: FederationState) -> None:
        """Save a state, after the journal's lines up to it."""
        check_equal(state)
        self.journal.sync()
        if self.ahead is None:  # otherwise every round is saved before it is recorded
            most = self.run.outputs.keep_checkpoints
            checkpoint.save(self.run.record.checkpoints, int(state.round), state, most)


def _save_best(run: Run, state: FederationState, names: Sequence[str]) -> None:
    """Write models of a state as the best so far, and remember whose they are."""
    models = run.round.models(state)
    hashes = [tree.sha256(merged(models[name])) for name in names]
    lineage.add_models(run.record.path, run.store, hashes)
    for name in names:
        file = run.record.node(name).best if name else run.record.best
        file.parent.mkdir(parents=True, exist_ok=True)
        write_trained(run, file, models[name])


def _tracker_context(run: Run, first: int, earlier: list[Metrics]) -> TrackerContext:
    # Written and read as in a journal, because JSON has no infinity.
    recipe = json.loads(dumps(run.recipe.model_dump(mode="json", exclude_none=True)))
    return TrackerContext(
        directory=run.record.path,
        name=run.record.path.resolve().name,
        first_round=first,
        recipe=recipe,
        earlier=[recall(run.plan, told) for told in earlier],
    )
