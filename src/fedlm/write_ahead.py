"""The order of a private round: its state on disk, its line in the ledger, then everything else.

In:       a `Run` under a privacy plan; its rounds as they are played; what a crash left.
Out:      checkpoints and ledger lines; how far a resumed run may go.
Promise:  nobody sees anything of a round before its state and its ledger line are on disk; a
          resumed run goes on from the newest state and never plays a released round again. Where
          released states are lost all the same, independent noise is played again and counted
          again; correlated noise was made for one history, so that run ends with what it has.
Not here: the file (`privacy/ledger.py`), the loop (`run.py`), the journal (`training.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedlm import lineage
from fedlm.core.errors import RecordError
from fedlm.core.releasable import Releasable
from fedlm.core.types import Say
from fedlm.privacy import ledger
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.ledger import Entry, Ledger, begin_entry, gaussian_entry, round_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import recall
from fedlm.record import checkpoint, journal
from fedlm.record.checkpoint import Saved
from fedlm.run import Run

ANOTHER = "or begin another run with another --out"


class Resumed(NamedTuple):
    """A state to go on from, and how far."""

    state: Any
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
        if ledger.plans_of(self.entries) != self.plans:
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
            return Resumed(saved.state, self.affordable(round))
        said = (
            f"{self.directory.path}: the states after round {round} are lost, and rounds up to "
            f"{max(lost) + 1} were released."
        )
        if not self._independent():
            say(
                f"{said} Correlated noise cannot be drawn again for them, so the run ends with the "
                f"model of round {round}; its epsilon counts every release."
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

    def commit(self, state: Any, told: Releasable) -> None:
        """Write the state of a round, then its line in the ledger, each safe on disk."""
        round = int(state.round)
        facts = {"ledger": len(self.entries), "told": dict(told)}
        keep = self.run.recipe.run.keep_checkpoints
        checkpoint.save(self.directory.checkpoints, round, state, keep, facts)
        self._append(round_entry(round - 1, self.run.round.digest(state).hex()))

    def pay(self, what: str, noise_multiplier: float) -> None:
        """Write down another Gaussian release about the clients, before anybody sees it."""
        self._append(gaussian_entry(what, noise_multiplier))

    def _append(self, entry: Entry) -> None:
        for book in (self.book, *self.copies):
            book.append(entry)
        self.entries.append(entry)

    # ---- what it cost --------------------------------------------------------------------

    def releases(self) -> dict[str, int]:
        """Return the number of released rounds where that is more than the rounds played."""
        rounds = ledger.rounds_of(self.entries or self.book.entries())
        return {"releases": len(rounds)} if ledger.extra_releases(rounds) else {}

    def affordable(self, round: int) -> int:
        """Return how many rounds may be played in all, `round` of them played already.

        Releases besides one per round leave less of the budget than the plan counted on.
        """
        entries = self.entries or self.book.entries()
        wanted, budget = self.run.cadence.rounds, self.run.recipe.privacy.epsilon
        plain = len(entries) == 1 + round and ledger.rounds_of(entries) == list(range(round))
        if budget is None or plain:
            return wanted

        def fits(last: int) -> bool:
            further = [round_entry(number, ledger.UNKNOWN) for number in range(round, last)]
            return ledger.spent_of([*entries, *further]).epsilon <= budget

        low, high = round, max(round, wanted) + 1  # `low` is played, `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _independent(self) -> bool:
        return all(MECHANISMS[plan.mechanism].independent for plan in self.plans.values())
