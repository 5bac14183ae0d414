"""Nodes that sent nothing of use, and who is not asked for a while because of that.

In:       who sent an unusable answer in a round or none in time, who sent a usable one.
Out:      whom to ask in a round.
Promise:  a node that is there and sends nothing of use in several rounds in a row is put aside for
          a while, each time for longer; one usable answer clears it; if nobody else is left, it is
          asked; a run that goes on knows what its earlier rounds recorded.
Not here: what is unusable (`messages.py`, `bounds.py`, `remote.py`), the record
          (`deploy/round_stats.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Earlier = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the fields of a `RoundStats` per round, in order."""
OFFENCES = 3  # rounds in a row
SHORTEST, LONGEST = 10, 640  # rounds that a node is put aside


class Offenders:
    """The record of nodes in one run.

    >>> nodes = Offenders()
    >>> for round in range(3):
    ...     nodes.judge(round, bad=["south"], good=["north"])
    []
    []
    [('south', 13)]
    >>> nodes.to_ask({"north": 1, "south": 2}, round=12)
    {'north': 1}
    >>> nodes.to_ask({"north": 1, "south": 2}, round=13)
    {'north': 1, 'south': 2}
    >>> nodes.to_ask({"south": 2}, round=12)
    {'south': 2}
    """

    def __init__(self, earlier: Earlier = tuple) -> None:
        """Begin a record; `earlier` gives the outcomes of rounds that another process played."""
        self._earlier: Earlier | None = earlier
        self._last: dict[str, int] = {}  # the newest round with an unusable answer
        self._in_a_row: dict[str, int] = {}
        self._until: dict[str, int] = {}  # the first round in which it is asked again
        self._rounds: dict[str, int] = {}  # for how many it was put aside last

    def to_ask(self, asked: Mapping[str, T], round: int) -> dict[str, T]:
        """Return the requests to nodes that are not put aside; all, if all of them are."""
        if self._earlier is not None:
            entries, self._earlier = self._earlier(), None
            for entry in entries:
                if entry["round"] < round:  # later ones are played again
                    bad = {*entry["garbage"], *entry["late"]}
                    self.judge(entry["round"], bad, entry["answered"])
        kept = {name: one for name, one in asked.items() if self._until.get(name, 0) <= round}
        return kept or dict(asked)

    def judge(self, round: int, bad: Collection[str], good: Iterable[str]) -> list[tuple[str, int]]:
        """Take the outcome of a round; return who is put aside now, and until which round."""
        for name in set(good) - set(bad):
            for held in (self._last, self._in_a_row, self._rounds):
                held.pop(name, None)
        put_aside = []
        for name in sorted(bad):
            if self._last.get(name) == round:  # a tree asks several times in a round
                continue
            self._last[name] = round
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
            if self._in_a_row[name] >= OFFENCES:
                self._in_a_row[name] = OFFENCES - 1  # the next one puts it aside again
                rounds = min(LONGEST, 2 * self._rounds.get(name, SHORTEST // 2))
                self._rounds[name], self._until[name] = rounds, round + 1 + rounds
                put_aside.append((name, round + 1 + rounds))
        return put_aside
