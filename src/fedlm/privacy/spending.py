"""What several ledgers cost the same clients together.

In:       the entries of ledgers: of runs, of a vocabulary, of the runs that a model started from.
Out:      one epsilon for everything in them.
Promise:  every release of every ledger is counted once; a ledger that appears twice, as a copy,
          counts once; rounds without a plan have no finite cost.
Not here: one ledger (`ledger.py`), which ledgers belong together (`lineage.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedlm.core.errors import RecordError
from fedlm.core.late import late
from fedlm.privacy import account, cost, selection
from fedlm.privacy.account import Spent
from fedlm.privacy.ledger import Entry, plans_of, released, rounds_of

dp_accounting = late("dp_accounting")  # over a second

Book = Sequence[Entry]
# Trees whose nodes have different noise give each client one of several plans; beyond so many
# combinations of them, the one that costs most alone is taken in each ledger.
MOST_COMBINATIONS = 64


def total_spent(books: Iterable[Book], delta: float | None = None) -> Spent:
    """Return what all ledgers cost a client whom they all are about.

    Args:
      books: the entries of each ledger.
      delta: the probability at which epsilon is computed; by default the largest of the plans'.

    Raises:
      RecordError: no ledger has a plan, and no delta is given.
    """
    # Of copies the longest: another may be older.
    unique = list({book[0]["run"]: book for book in sorted(books, key=len)}.values())
    at = delta if delta is not None else largest_delta(unique)
    if at is None:
        raise RecordError("no ledger has a plan, and so no delta of its own: give one.")
    others = _others(unique)
    extra = sum(entry["delta"] for entry in others)
    fixed = [cost.gaussian_event(entry["noise_multiplier"]) for entry in others]
    if any(made_no_promise(book) for book in unique):
        return Spent(math.inf, at, None, "none", ("rounds without a privacy plan",))
    ways = [choices for choices in map(_choices, unique) if choices]
    if math.prod(map(len, ways)) > MOST_COMBINATIONS:
        alone = lambda event: cost.compose([event], at)[0]  # noqa: E731
        ways = [[max(choices, key=alone)] for choices in ways]
    found = [cost.compose([*fixed, *way], at, extra) for way in itertools.product(*ways)]
    epsilon, accountant = max(found)
    said = [account.UNIT, f"{len(unique)} ledgers are counted together", account.SERVER]
    return Spent(epsilon, at, None, accountant, tuple(said))


def largest_delta(books: Sequence[Book]) -> float | None:
    """Return the largest delta of the plans of ledgers, or None if there is no plan."""
    found = [plan.delta for book in books for plan in plans_of(book).values()]
    for entry in (entry for book in books for entry in book if entry["kind"] == "selection"):
        found.append(account.plan_from(entry["plan"]).delta)
    return max(found, default=None)


def made_no_promise(book: Book) -> bool:
    """Return whether a ledger's run had no privacy plan, or told exact sums."""
    plans = plans_of(book).values()
    return bool(rounds_of(book)) and (not plans or any(plan.reveal for plan in plans))


def _others(books: Sequence[Book]) -> list[Entry]:
    """Return the releases besides rounds; a run's copy of its store's lines counts once."""
    of_stores = [e for book in books if not rounds_of(book) for e in book if _is_other(e)]
    of_runs = [e for book in books if rounds_of(book) for e in book if _is_other(e)]
    return [*of_stores, *(e for e in of_runs if e["what"] != "vocabulary" or e not in of_stores)]


def _is_other(entry: Entry) -> bool:
    return bool(entry["kind"] == "gaussian")


def _choices(book: Book) -> list[Any]:
    """Return what the rounds of a ledger release about a client, for each plan it may have."""
    rounds = rounds_of(book)
    best = [_best(entry) for entry in book if entry["kind"] == "selection"]
    if best:
        return [_composed(best)]
    if not rounds:
        return []
    return [released(plan, rounds) for plan in dict.fromkeys(plans_of(book).values())]


def _composed(events: list[Any]) -> Any:
    """Return several releases as one event."""
    return dp_accounting.ComposedDpEvent(events)


def _best(entry: Entry) -> Any:
    """Return the event of a private selection."""
    one = account.event_of(account.plan_from(entry["plan"]), entry["rounds"])
    return selection.event_of_best(one, entry["law"], entry["mean"])
