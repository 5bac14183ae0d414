"""The most that members can truthfully report of a round.

In:       the sums that came with an update, how many members it stands for.
Out:      the sums as they may be used, or a `WireError`.
Promise:  no report makes a sum infinite, and none counts for more than a recipe makes possible; a
          loss beyond all sense is cut, because it is a figure and moves no model.
Not here: the update itself (`remote.py`), who is no longer asked (`offenders.py`), the bounds of a
          recipe (`deploy/local.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedlm.core.errors import WireError
from fedlm.core.words import count, number

# What float32 rounding can add to a sum or a norm.
SLACK = 1 + 1e-5
# The longest update without a clip norm: its square, summed over rounds, is finite in float32.
LARGEST_NORM = 1e12
# Steps of a member in a round, where a recipe sets no limit.
MOST_STEPS = 1e6
# Nats per token, in multiples of a guess among all words, with which a report still counts.
MOST_GUESSES = 100.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest sums of one member in one round.

    >>> bounds = Bounds(weight=1.0, tokens=160.0, steps=2.0, nats_per_token=10.0)
    >>> sums = {"weight": 2.0, "nats": 9e9, "tokens": 100.0, "steps": 3.0}
    >>> bounds.checked({**sums, "refused": 0.0, "unclipped": 2.0}, 2)["nats"]
    1000.0
    >>> bounds.checked({**sums, "refused": 0.0, "unclipped": 2.0}, 1)
    Traceback (most recent call last):
    fedlm.core.errors.WireError: report of weight = 2: at most 1 from 1 member.
    """

    weight: float = MOST_STEPS
    tokens: float = MOST_STEPS
    steps: float = MOST_STEPS
    nats_per_token: float = MOST_GUESSES
    refused: float = 1.0
    unclipped: float = 1.0

    def checked(self, sums: Mapping[str, float], members: int) -> dict[str, float]:
        """Return the sums of so many members, or raise `WireError` if they cannot be theirs."""
        for name in ("weight", "tokens", "steps", "refused", "unclipped"):
            most = getattr(self, name) * members
            if not sums[name] <= most * SLACK:
                raise WireError(
                    f"report of {name} = {number(sums[name])}: at most {number(most)} from "
                    f"{count(members, 'member')}."
                )
        return {**sums, "nats": min(sums["nats"], sums["tokens"] * self.nats_per_token)}
