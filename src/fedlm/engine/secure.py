"""An engine whose totals are secure sums of nodes in this process.

In:       another engine; the integers of updates; how many nodes share the cohort.
Out:      the sum of a cohort's updates, as the server of a secure sum opens it.
Promise:  each update is rounded by itself; a node adds up the integers of its members, and its
          share of noise if the plan has nodes add it; every sum goes through the whole protocol of
          `secure`, message by message; flat and relayed nodes give the same bits; single updates
          are not shown.
Not here: the protocol (`secure`), what a vector holds (`secure_vector.py`), nodes on a network
          (`remote_secure.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlm.core.errors import EngineError
from fedlm.core.types import Arrived, Cohort, Engine, Gathered, Members, Starts
from fedlm.engine.secure_vector import Integers, NodeSum, Shares, SumVector
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like, start_of
from fedlm.secure.keys import IdentityKey
from fedlm.secure.local import made_up_members, secure_sum
from fedlm.secure.terms import Member, Session, Terms


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of one list of a secure federation."""

    count: int
    threshold: int
    colluders: int = 0
    neighbors: int = 0  # with whom a node agrees on masks; 0: with all
    relays: int = 0  # 0: all nodes are below the server; else they are below so many relays

    def terms(self, members: tuple[Member, ...], *, bits: int, size: int) -> Terms:
        """Return the terms of a sum of vectors of so many values."""
        return Terms(
            members=members,
            threshold=self.threshold,
            bits=bits,
            size=size,
            colluders=self.colluders,
            neighbors=self.neighbors,
        )


class SecureEngine:
    """An engine that makes totals by secure sums of in-process nodes."""

    def __init__(
        self,
        inner: Engine,
        algorithm: Algorithm,
        integers: Integers,
        nodes: Nodes,
        seed: int,
        shares: Callable[[Any], Shares] | None = None,
    ) -> None:
        """Take `shares`, from the shapes of an update to its noise, if nodes add noise."""
        self.inner, self.algorithm, self.integers, self.nodes = inner, algorithm, integers, nodes
        self.shares = shares
        self.members, self.identities = made_up_members(max(nodes.count, nodes.relays))
        self.run = hashlib.sha256(f"fedlm/secure/{seed}".encode()).hexdigest()[:32]

    @property
    def adds_noise(self) -> bool:
        """Whether a total carries the noise of its nodes."""
        return self.shares is not None

    def prepare(self, round: int, members: Members) -> Cohort:
        """Make the members' batches."""
        return self.inner.prepare(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Refuse: a secure sum shows no single update."""
        raise EngineError("single updates were asked for: under secure sums nobody sees them.")

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return the sum of a cohort's updates that the server opens."""
        check_members(self.integers, cohort)
        like = update_like(self.algorithm, model_like(starts), cohort.round).delta
        shares = None if self.shares is None else self.shares(like)
        vector = SumVector(integers=self.integers, nodes=self.nodes.count, like=like, shares=shares)
        sums, download = self._sums_of_nodes(vector, starts, cohort)
        secret = getattr(starts, "noise_secret", b"")
        vectors = [part.words(_noise_seed(secret, place, part)) for place, part in enumerate(sums)]
        words, sent = self._sum(vectors, cohort.round)
        total = vector.total(words, cohort.round, len(cohort.members))
        return Gathered(total, sent, download, vector.excess(self.nodes.count))

    def _sums_of_nodes(
        self, vector: SumVector, starts: Starts, cohort: Cohort
    ) -> tuple[list[NodeSum], int]:
        """Return the sum of each node's members, and the bytes that members received."""
        many, download = self.nodes.count, 0
        sums = [NodeSum(vector, cohort.round) for _ in range(many)]
        places = {int(member): place for place, member in enumerate(cohort.members)}
        for member, update, _, received in self.inner.updates(starts, cohort):
            start = start_of(starts, places[member])
            sums[member % many].add(member, update, start.clip_norm)
            download += received
        return sums, download

    def _sum(self, vectors: Sequence[np.ndarray], round: int) -> tuple[np.ndarray, int]:
        """Sum vectors through the protocol, flat or by way of relays; return words and bytes."""
        nodes, sent = self.nodes, 0
        if not nodes.relays:
            return self._one(vectors, round, self.run, nodes)
        above = []
        for relay in range(nodes.relays):
            below = list(vectors[relay :: nodes.relays])
            run = f"{self.run}{relay + 1:04x}"
            total, size = self._one(below, round, run, _majority(len(below)))
            above.append(total)
            sent += size
        total, size = self._one(above, round, self.run, _majority(nodes.relays))
        return total, sent + size

    def _one(
        self, vectors: Sequence[np.ndarray], round: int, run: str, nodes: Nodes
    ) -> tuple[np.ndarray, int]:
        identities: list[IdentityKey] = self.identities[: len(vectors)]
        terms = nodes.terms(
            self.members[: len(vectors)], bits=self.integers.bits, size=len(vectors[0])
        )
        found = secure_sum(Session(terms, run, round, 0), identities, vectors)
        return found.total, found.sent


def _majority(count: int) -> Nodes:
    return Nodes(count=count, threshold=count // 2 + 1)


def check_members(integers: Integers, cohort: Cohort) -> None:
    """Refuse a cohort that the range of a sum is not made for."""
    if len(cohort.members) > integers.members:
        raise EngineError(
            f"{len(cohort.members)} members in round {cohort.round}: the range of the sum is "
            f"for {integers.members}. Give wire.upload more members."
        )


def _noise_seed(secret: bytes, place: int, part: NodeSum) -> bytes:
    """Return the seed of a simulated node's noise, derived also from the sum that gets the noise.

    A round that is played again has the same sum and the same noise. Should its sum differ, the
    noise does too: the difference of two sums must not cancel it.
    """
    address = b"fedlm/secure/noise" + place.to_bytes(4, "big") + part.codes.tobytes()
    return hashlib.blake2b(address, key=secret, digest_size=32).digest()
