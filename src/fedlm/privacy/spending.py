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
from fedlm.privacy.ledger import Entry, costliest, plans_of, released, rounds_of

dp_accounting = late("dp_accounting")  # over a second

Book = Sequence[Entry]
# Trees whose nodes have different noise give each client one of several plans. Beyond so many
# combinations of them the costs of the ledgers are added, which is never too little. One that is
# not Gaussian noise alone takes up to a second.
MOST_COMBINATIONS, MOST_SLOW_COMBINATIONS = 256, 16


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
    ways = _alike([choices for choices in map(_choices, unique) if choices])
    quick = cost.is_quick([*fixed, *(event for choices, _ in ways for event in choices)])
    most = MOST_COMBINATIONS if quick else MOST_SLOW_COMBINATIONS
    if math.prod(math.comb(len(c) + n - 1, n) for c, n in ways) > most:
        epsilon, accountant = _added(ways, fixed, at, extra)
    else:
        drawn = [itertools.combinations_with_replacement(c, n) for c, n in ways]
        found = [
            cost.compose([*fixed, *itertools.chain(*way)], at, extra)
            for way in itertools.product(*drawn)
        ]
        epsilon, accountant = max(found)
    said = [account.UNIT, f"{len(unique)} ledgers are counted together", account.SERVER]
    return Spent(epsilon, at, None, accountant, tuple(said))


def _alike(ways: list[list[Any]]) -> list[tuple[list[Any], int]]:
    """Return the choices of ledgers, each with how many ledgers have the same ones."""
    found: list[tuple[list[Any], int]] = []
    for choices in ways:
        place = next((n for n, (there, _) in enumerate(found) if there == choices), None)
        if place is None:
            found.append((choices, 1))
        else:
            found[place] = (choices, found[place][1] + 1)
    return found


def _added(
    ways: list[tuple[list[Any], int]], fixed: list[Any], delta: float, extra: float
) -> tuple[float, str]:
    """Return a bound of every combination: each ledger's dearest plan, at its share of delta.

    What costs most alone need not cost most together with others, so that no one combination may
    be taken for the worst.
    """
    parts = sum(count for _, count in ways) + bool(fixed or extra)
    share = (delta - extra) / parts
    if share <= 0:
        return math.inf, "none"
    total = sum(n * max(cost.compose([event], share)[0] for event in c) for c, n in ways)
    total += cost.compose(fixed, share)[0] if fixed else 0.0
    return total, "costs of single ledgers, added"


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
    plans = costliest(plans_of(book).values())
    return [released(plan, rounds) for plan in plans if plan is not None]


def _composed(events: list[Any]) -> Any:
    """Return several releases as one event."""
    return dp_accounting.ComposedDpEvent(events)


def _best(entry: Entry) -> Any:
    """Return the event of a private selection."""
    one = account.event_of(account.plan_from(entry["plan"]), entry["rounds"])
    return selection.event_of_best(one, entry["law"], entry["mean"])
