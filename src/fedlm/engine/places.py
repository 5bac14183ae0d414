"""The places of a tree, each trained at the node that holds its text.

In:       places, and where each of them begins.
Out:      the update of each place whose node answered.
Promise:  what `LoopStarts` returns for those places, from the same starts and numbers; updates come
          in the order of the places, whoever was faster; a place whose node did not answer is left
          out.
Not here: who begins where (`federation/tree.py`), asking and summing (`flower.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fedlm.core.keys import key_for
from fedlm.core.types import Members, Update
from fedlm.engine.dispatch import Assignment, RoundStats
from fedlm.engine.messages import TrainRequest
from fedlm.engine.remote import FlowerEngine
from fedlm.engine.starts import Starts
from fedlm.federation.algorithm import update_like


class Leaf(NamedTuple):
    """A node that holds text, at the meeting point or behind relays."""

    path: tuple[str, ...]  # its name, after those of the relays before it
    seat: Assignment  # through which it is asked
    first: int  # the number of its first client
    clients: int


def leaves_of(seats: Sequence[Assignment]) -> tuple[Leaf, ...]:
    """All nodes that hold text, in the order of the numbers of their clients.

    >>> [leaf.path for leaf in leaves_of([Assignment("a", 0, 3, "", (("x", 1), ("y/z", 2)))])]
    [('a', 'x'), ('a', 'y', 'z')]
    """
    found = []
    for seat in seats:
        at = seat.first
        for path, clients in seat.leaves or (("", seat.clients),):
            below = tuple(path.split("/")) if path else ()
            found.append(Leaf((seat.name, *below), seat, at, clients))
            at += clients
    return tuple(found)


class FlowerStarts(FlowerEngine):
    """Asks the node of each place, with a frame of its own."""

    def __init__(self, *args: Any, homes: Mapping[int, Leaf], **options: Any) -> None:
        """`homes`: the number under which a place trains to the node that holds its text."""
        super().__init__(*args, **options)
        self.homes = homes
        self._told = RoundStats(-1)
        self._tell, self.tell = self.tell, self._tell_round

    def collect_from(
        self, starts: Starts, round: int, members: Members
    ) -> Iterator[tuple[int, Update]]:
        """Each place's update from its own start; none of a place whose node did not answer."""
        numbers = [int(member) for member in members]
        like = update_like(self.algorithm, starts(numbers[0])[0], round).delta
        place_at = {self.homes[number].first: number for number in numbers}
        arrived: dict[int, Update] = {}
        key = key_for(self.seed, "download", round=round)
        encode, asked = self.algorithm.download.encode, self._asked(round, numbers, like)

        def frames(names: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
            for name in names:
                yield name, tuple(encode(starts(n)[0], key) for n in asked[name].numbers)

        for (at,), update in self.ask(round, asked, like, frames):
            if update is not None:
                arrived[place_at[at]] = update
        for number in numbers:
            if number in arrived:
                yield number, arrived.pop(number)

    def _asked(self, round: int, numbers: Sequence[int], like: Any) -> dict[str, TrainRequest]:
        """A question a seat: behind a relay live several places."""
        by_seat: dict[Assignment, list[int]] = {}
        for number in sorted(numbers, key=lambda n: self.homes[n].first):
            by_seat.setdefault(self.homes[number].seat, []).append(number)
        return {
            seat.name: self.question(
                seat,
                like,
                round=round,
                members=tuple(self.homes[n].first for n in here),
                clip_norm=math.inf,
                each=True,
                numbers=tuple(here),
            )
            for seat, here in by_seat.items()
        }

    def _tell_round(self, tally: RoundStats) -> None:
        """A level of the tree is asked after the other: a round is told with all before it."""
        self._told = tally if tally.round != self._told.round else _joined(self._told, tally)
        self._tell(self._told)


def _joined(before: RoundStats, now: RoundStats) -> RoundStats:
    whole = RoundStats(now.round)
    for field in fields(RoundStats):
        one, other = getattr(before, field.name), getattr(now, field.name)
        if isinstance(one, dict):
            setattr(whole, field.name, {**one, **other})
        elif field.name != "round":
            setattr(whole, field.name, one + other)
    return whole
