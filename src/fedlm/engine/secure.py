"""An engine whose totals are secure sums of nodes in this process.

In:       another engine; the integers of updates; how many nodes share the cohort.
Out:      the sum of a cohort's updates, as the server of a secure sum opens it.
Promise:  each update is rounded by itself; a node adds up the integers of its members; every sum
          goes through the whole protocol of `secure`, message by message; flat and relayed nodes
          give the same bits; single updates are not shown.
Not here: the protocol (`secure`), the range and the rounding (`wire/fixed_point.py`), nodes on a
          network.

The numbers beside a change (members, steps, tokens, loss) are added up in a second secure sum of 64
bits, in units of 2^-20: each may reach 2^42.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from fedlm.core.errors import EngineError
from fedlm.core.types import Arrived, Cohort, Engine, Gathered, Members, Starts, Total, Update
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like, start_of
from fedlm.secure.keys import IdentityKey
from fedlm.secure.local import made_up_members, secure_sum
from fedlm.secure.terms import Member, Session, Terms

COUNTS = ("weight", "nats", "tokens", "steps", "refused", "unclipped")
UNIT = 2.0**-20


class Integers(Protocol):
    """The integers of a secure sum (`recipe/secure_sums.py` makes them)."""

    @property
    def bits(self) -> int:
        """Sums are modulo 2^bits."""

    @property
    def members(self) -> int:
        """The most updates of a sum."""

    def rounded(self, delta: Any, clip_norm: float, round: int, member: int) -> np.ndarray:
        """Return the integers of one update."""

    def wrapped(self, total: np.ndarray) -> np.ndarray:
        """Return signed integers as words modulo 2^bits."""

    def values(self, words: np.ndarray, like: Any, round: int) -> Any:
        """Return the numbers of a sum in the shapes of a model."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a simulated secure federation."""

    count: int
    threshold: int
    colluders: int = 0
    relays: int = 0  # 0: all nodes are below the server; else they are below so many relays


class SecureEngine:
    """An engine that makes totals by secure sums of in-process nodes."""

    def __init__(
        self, inner: Engine, algorithm: Algorithm, integers: Integers, nodes: Nodes, seed: int
    ) -> None:
        self.inner, self.algorithm, self.integers, self.nodes = inner, algorithm, integers, nodes
        self.members, self.identities = made_up_members(max(nodes.count, nodes.relays))
        self.run = hashlib.sha256(f"fedlm/secure/{seed}".encode()).hexdigest()[:32]

    def prepare(self, round: int, members: Members) -> Cohort:
        """Make the members' batches."""
        return self.inner.prepare(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Refuse: a secure sum shows no single update."""
        raise EngineError("single updates were asked for: under secure sums nobody sees them.")

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return the sum of a cohort's updates that the server opens."""
        if len(cohort.members) > self.integers.members:
            raise EngineError(
                f"{len(cohort.members)} members in round {cohort.round}: the range of the sum is "
                f"for {self.integers.members}. Give wire.upload more members."
            )
        like = update_like(self.algorithm, model_like(starts), cohort.round).delta
        deltas, counts, download = self._sums_of_nodes(starts, cohort)
        words, sent = self._sum(deltas, self.integers.bits, cohort.round, "")
        told, more = self._sum(counts, 64, cohort.round, "00")
        numbers = told.view(np.int64) * UNIT
        change = self.integers.values(words, like, cohort.round)
        total = Total(change, *(jnp.float32(x) for x in numbers))
        return Gathered(total, sent + more, download)

    def _sums_of_nodes(
        self, starts: Starts, cohort: Cohort
    ) -> tuple[list[np.ndarray], list[np.ndarray], int]:
        """Return for each node the words of its members' sum, those of its counts, and bytes."""
        many, download = self.nodes.count, 0
        deltas: list[Any] = [0] * many
        counts = [np.zeros(len(COUNTS) + 1) for _ in range(many)]
        places = {int(member): place for place, member in enumerate(cohort.members)}
        for member, update, _, received in self.inner.updates(starts, cohort):
            node = member % many
            start = start_of(starts, places[member])
            codes = self.integers.rounded(update.delta, start.clip_norm, cohort.round, member)
            deltas[node] = deltas[node] + codes * int(_whole_weight(update))
            counts[node] += [*(float(getattr(update, name)) for name in COUNTS), 1.0]
            download += received
        size = max(np.size(total) for total in deltas)
        words = [
            self.integers.wrapped(np.broadcast_to(np.asarray(d, np.int64), (size,))) for d in deltas
        ]
        told = [np.rint(c / UNIT).astype(np.int64).view(np.uint64) for c in counts]
        return words, told, download

    def _sum(
        self, vectors: Sequence[np.ndarray], bits: int, round: int, more: str
    ) -> tuple[np.ndarray, int]:
        """Sum vectors through the protocol, flat or by way of relays; return words and bytes."""
        nodes, sent = self.nodes, 0
        if not nodes.relays:
            return self._one(vectors, bits, round, f"{self.run}{more}", nodes.threshold)
        above = []
        for relay in range(nodes.relays):
            below = list(vectors[relay :: nodes.relays])
            run = f"{self.run}{more}{relay + 1:04x}"
            total, size = self._one(below, bits, round, run, len(below) // 2 + 1)
            above.append(total)
            sent += size
        total, size = self._one(above, bits, round, f"{self.run}{more}", nodes.relays // 2 + 1)
        return total, sent + size

    def _one(
        self, vectors: Sequence[np.ndarray], bits: int, round: int, run: str, threshold: int
    ) -> tuple[np.ndarray, int]:
        members: tuple[Member, ...] = self.members[: len(vectors)]
        identities: list[IdentityKey] = self.identities[: len(vectors)]
        terms = Terms(
            members=members,
            threshold=threshold,
            bits=bits,
            size=len(vectors[0]),
            colluders=0 if self.nodes.relays else self.nodes.colluders,
        )
        found = secure_sum(Session(terms, run, round, 0), identities, vectors)
        return found.total, found.sent


def _whole_weight(update: Update) -> float:
    """Return the weight of a member: one, or zero where its update was refused."""
    weight = float(update.weight)
    if weight not in (0.0, 1.0):
        raise EngineError(f"a member has the weight {weight:g}: under secure sums all count alike.")
    return weight
