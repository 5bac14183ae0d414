"""The order of a private round: its state on disk, its line in the ledger, then everything else.

In:       a `Run` under a privacy plan; its rounds as they are played; what a crash left.
Out:      checkpoints and ledger lines; how far a resumed run may go.
Promise:  nobody sees anything of a round before its state and its ledger line are on disk; a
          resumed run goes on from the newest state and never plays a released round again. Where
          released states are lost all the same, rounds with independent noise and draws are
          played again and counted again; where noise or draw was made for one history, or nodes
          that answered hold the text, the run ends with what it has. With `privacy.epsilon` all
          that the claim counts is paid from it: rounds, noisy figures, the vocabulary and the
          runs that the start model came from.
Not here: the file (`privacy/ledger.py`), the loop (`run.py`), the journal (`rounds.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from fedlm import lineage
from fedlm.core.errors import RecordError, require
from fedlm.core.releasable import Releasable
from fedlm.core.types import FederationState, Say
from fedlm.privacy import ledger, spending
from fedlm.privacy.catalog import MECHANISMS, as_begun
from fedlm.privacy.ledger import Entry, Ledger, begin_entry, gaussian_entry, round_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import recall
from fedlm.record import checkpoint, journal
from fedlm.record.checkpoint import Saved
from fedlm.run import Run

ANOTHER = "or begin another run with another --out"


class Resumed(NamedTuple):
    """A state to go on from, and how far."""

    state: FederationState
    rounds: int  # to be played in all
    ended: bool = False  # whether the run must end with this state because later ones are lost


class WriteAhead:
    """The checkpoints and the ledger of a private run, written in this order."""

    def __init__(self, run: Run) -> None:
        assert run.plan is not None
        self.run, self.directory = run, run.record
        self.book = Ledger(run.record.ledger)
        self.plans: dict[str, PrivacyPlan] = dict(run.plans)
        self.entries: list[Entry] = []
        self.copies: list[Ledger] = []  # in the store, which counts a run also when it is gone

    # ---- the beginning -------------------------------------------------------------------

    def check_whole(self) -> None:
        """Refuse to go on where rounds were released and their ledger or all states are gone."""
        path = self.directory.path
        states = checkpoint.newest_first(self.directory.checkpoints)
        told = self._told_rounds()
        if not self.book.exists():
            if told or any(state.stem != "round-000000" for state in states):
                raise RecordError(
                    f"{path} has rounds of a private run and no {ledger.NAME}, so what was "
                    f"released about its clients is not known: bring that file back, {ANOTHER}."
                )
            return
        if ledger.rounds_of(self.book.entries()):
            lineage.lineage_of(path)  # a budget counts what came before the run
        if not states and (told or ledger.rounds_of(self.book.entries())):
            raise RecordError(
                f"{path} has released rounds of a private run and no checkpoint; to begin anew "
                "would release them again, with noise that averages out: bring its checkpoints "
                f"folder back, {ANOTHER}."
            )

    def _told_rounds(self) -> int:
        if not self.directory.journal.is_file():
            return 0
        return sum(entry["kind"] == "round" for entry in journal.read(self.directory.journal))

    def begin(self) -> None:
        """Write the ledger's first line, unless a run that was killed early has left it."""
        if not self.book.exists():
            self.book.begin(begin_entry(self.plans))
        self._read()

    def _read(self) -> None:
        self.entries = self.book.entries()
        if self.run.counted and not self.run.elsewhere:
            self.copies = lineage.copies(self.run.store, self.entries)
        begun = ledger.plans_of(self.entries)
        if begun != {name: as_begun(plan, begun.get(name)) for name, plan in self.plans.items()}:
            raise RecordError(
                f"{self.book.path} was begun with other privacy plans than its recipe gives now: "
                "go on with the versions that its journal names."
            )

    # ---- after a crash -------------------------------------------------------------------

    def resume(self, saved: Saved, say: Say) -> Resumed:
        """Make the ledger hold the newest state's release; return how the run may go on."""
        self._read()
        round, lost = int(saved.state.round), self._after(saved)
        if not lost:
            again = self.missing(saved) is not None
            return Resumed(saved.state, self.affordable(round, again=again))
        said = (
            f"{self.directory.path}: the states after round {round} are lost, and rounds up to "
            f"{max(lost) + 1} were released."
        )
        if why := self._not_replayable():
            say(
                f"{said} {why}, so the run ends with the model of round {round}; its epsilon "
                "counts every release."
            )
            return Resumed(saved.state, round, ended=True)
        say(f"{said} They are played again with other members and noise, and both are counted.")
        state = self.run.round.renewed(saved.state, len(self.entries))
        return Resumed(state, self.affordable(round))

    def _after(self, saved: Saved) -> list[int]:
        """Append the line of the newest state if it is missing; return the rounds after it."""
        round = int(saved.state.round)
        if not round:
            return ledger.rounds_of(self.entries)
        own = round_entry(round - 1, self.run.round.digest(saved.state).hex())
        at = saved.facts.get("ledger")
        if not isinstance(at, int) or at > len(self.entries):
            raise RecordError(
                f"{self.book.path} lacks lines that were there when round {round} was saved, so "
                f"what was released is not known: bring its newest copy back, {ANOTHER}."
            )
        if at == len(self.entries):
            self._append(own)
        elif self.entries[at] != own:
            raise RecordError(
                f"{self.book.path} and the checkpoint of round {round} are of different runs: "
                f"bring back those that belong together, {ANOTHER}."
            )
        return ledger.rounds_of(self.entries[at + 1 :])

    def missing(self, saved: Saved) -> Releasable | None:
        """Return the facts of the newest round if a crash kept them from the journal."""
        last = int(saved.state.round) - 1
        if last < 0 or any(
            entry["kind"] == "round" and entry["round"] == last
            for entry in journal.read(self.directory.journal)
        ):
            return None
        return recall(self.run.plan, saved.facts["told"])

    # ---- rounds --------------------------------------------------------------------------

    def commit(self, state: FederationState, told: Releasable) -> None:
        """Write the state of a round, then its line in the ledger, each safe on disk."""
        round = int(state.round)
        facts = {"ledger": len(self.entries), "told": dict(told)}
        keep = self.run.outputs.keep_checkpoints
        checkpoint.save(self.directory.checkpoints, round, state, keep, facts)
        self._append(round_entry(round - 1, self.run.round.digest(state).hex()))

    def pay(self, what: str, noise_multiplier: float) -> None:
        """Write down another Gaussian release about the clients, before anybody sees it."""
        self._append(gaussian_entry(what, noise_multiplier))

    def pay_once(self, played: int, what: str, noise_multiplier: float) -> None:
        """Write down a Gaussian release after so many rounds, unless it follows their last line.

        For releases that are the same bytes however often they are asked for: a crash after the
        line does not make them another release.
        """
        entry = gaussian_entry(what, noise_multiplier)
        lines = [n for n, line in enumerate(self.entries) if line.get("round") == played - 1]
        if self.entries[max(lines, default=-2) + 1 :][:1] != [entry]:
            self._append(entry)

    def _append(self, entry: Entry) -> None:
        for book in (self.book, *self.copies):
            book.append(entry)
        self.entries.append(entry)

    # ---- what it cost --------------------------------------------------------------------

    def releases(self) -> dict[str, int]:
        """Return the number of released rounds where that is more than the rounds played."""
        rounds = ledger.rounds_of(self.entries or self.book.entries())
        return {"releases": len(rounds)} if ledger.extra_releases(rounds) else {}

    def affordable(self, round: int, *, again: bool = False) -> int:
        """Return how many rounds may be played in all, `round` of them played already.

        Releases besides one per round leave less of the budget than the plan counted on. If noisy
        figures of the last round are to be made `again`, they are paid for again.
        """
        entries = self.entries or self.book.entries()
        wanted, budget = self.run.cadence.rounds, self.run.cadence.budget
        before = self._before()
        plain = len(entries) == 1 + round and ledger.rounds_of(entries) == list(range(round))
        if budget is None or (plain and not before and self.run.private_evaluation is None):
            return wanted

        def fits(last: int) -> bool:
            further = [round_entry(number, ledger.UNKNOWN) for number in range(round, last)]
            figures = self._figures(entries, round, last, again)
            return self._within([*entries, *further, *figures], before)

        low, high = round, max(round, wanted) + 1  # `low` is played, `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def affords(self, what: str, noise_multiplier: float) -> bool:
        """Return whether the budget holds another Gaussian release about the clients."""
        return self._within([*self.entries, gaussian_entry(what, noise_multiplier)], self._before())

    def _within(self, entries: list[Entry], before: list[list[Entry]]) -> bool:
        """Return whether releases, and what came before the run, are within the budget."""
        budget = self.run.cadence.budget
        if budget is None:
            return True
        if not before:
            return ledger.spent_of(entries).epsilon <= budget
        return spending.total_spent([entries, *before], self._delta()).epsilon <= budget

    def check_budget(self, rounds: int, say: Say) -> None:
        """Say how many rounds a run can afford if these are not all; refuse a run without any."""
        wanted, budget = self.run.cadence.rounds, self.run.cadence.budget
        if rounds == wanted:
            return
        besides = "the vocabulary, the start model and noisy figures are paid from it too"
        require(
            rounds > 0,
            "privacy.epsilon",
            budget,
            f"a budget that holds one round: {besides}",
            "Raise it; fedlm privacy epsilon tells what each cost.",
        )
        say(f"privacy.epsilon = {budget:g} holds {rounds} of {wanted} rounds, because {besides}.")

    def _before(self) -> list[list[Entry]]:
        """Return the ledgers that a claim of this run counts besides its own."""
        if next(iter(self.plans.values())).unit != "client":
            return []
        return lineage.books_before(lineage.lineage_of(self.directory.path))

    def _delta(self) -> float:
        return min(plan.delta for plan in self.plans.values())

    def _figures(self, entries: list[Entry], round: int, last: int, again: bool) -> list[Entry]:
        """Return the releases of noisy figures that are due until round `last`."""
        noisy = self.run.private_evaluation
        if noisy is None:
            return []
        # Those of a round that is on record may be missing, as a crash came between. Paid for and
        # not told, they are made again; a node's are the same bytes then.
        unpaid = entries[-1]["kind"] == "round" or (again and not noisy.at_nodes)
        first = round if unpaid else round + 1
        due = sum(noisy.due(played, last) for played in range(max(first, 1), last + 1))
        return [gaussian_entry("evaluation", noisy.noise_multiplier)] * due

    def _not_replayable(self) -> str:
        """Say why lost rounds cannot be played again; nothing if they can."""
        if self.run.elsewhere:
            return "Nodes answer each round once"
        plans = self.plans.values()
        if all(p.sampling.law in MECHANISMS[p.mechanism].replay_laws for p in plans):
            return ""
        return "Noise or members were drawn for all rounds together and cannot be drawn again"
