"""The sums of a secure engine whose nodes are in this process.

In:       an engine that trains members here; how many nodes share the cohort.
Out:      the opened sum of a round, with the bytes that would have crossed the wire.
Promise:  every sum goes through the whole protocol of `secure`, message by message; flat and
          relayed nodes give the same bits.
Not here: the engine (`secure.py`), what a vector holds (`secure_vector.py`), the protocol
          (`secure`), nodes over a transport (`secure_remote.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fedlm.core.types import Cohort, Engine, Members, Starts
from fedlm.engine.secure import Nodes, RoundSum
from fedlm.engine.secure_vector import NodeSum, SumVector
from fedlm.federation.member import start_of
from fedlm.secure.keys import IdentityKey
from fedlm.secure.local import made_up_members, secure_sum
from fedlm.secure.terms import Session


class LocalNodeSums:
    """Nodes in this process, below the server or below relays, that open secure sums."""

    def __init__(self, inner: Engine, nodes: Nodes, seed: int, relays: int = 0) -> None:
        """Take the engine that trains members; without relays all nodes are below the server."""
        self.inner, self.nodes, self.relays = inner, nodes, relays
        self.members, self.identities = made_up_members(max(nodes.count, relays))
        self.run = hashlib.sha256(f"fedlm/secure/{seed}".encode()).hexdigest()[:32]

    @property
    def leaves(self) -> int:
        """How many nodes hold text."""
        return self.nodes.count

    def prepare(self, round: int, members: Members) -> Cohort:
        """Make the members' batches."""
        return self.inner.prepare(round, members)

    def opened(self, vector: SumVector, starts: Starts, cohort: Cohort) -> RoundSum:
        """Return the sum of the vectors of all nodes."""
        sums, download = self._sums_of_nodes(vector, starts, cohort)
        secret = getattr(starts, "noise_secret", b"")
        vectors = [part.words(_noise_seed(secret, place, part)) for place, part in enumerate(sums)]
        words, upload = self._sum(vectors, cohort.round, vector.integers.bits)
        return RoundSum(words, len(cohort.members), self.nodes.count, upload, download)

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

    def _sum(self, vectors: Sequence[np.ndarray], round: int, bits: int) -> tuple[np.ndarray, int]:
        """Sum vectors through the protocol, flat or by way of relays; return words and bytes."""
        if not self.relays:
            return self._one(vectors, round, bits, self.run, self.nodes)
        above, sent = [], 0
        for relay in range(self.relays):
            below = vectors[relay :: self.relays]
            run = f"{self.run}{relay + 1:04x}"
            total, size = self._one(below, round, bits, run, _majority(len(below)))
            above.append(total)
            sent += size
        total, size = self._one(above, round, bits, self.run, _majority(self.relays))
        return total, sent + size

    def _one(
        self, vectors: Sequence[np.ndarray], round: int, bits: int, run: str, nodes: Nodes
    ) -> tuple[np.ndarray, int]:
        identities: list[IdentityKey] = self.identities[: len(vectors)]
        terms = nodes.terms(self.members[: len(vectors)], bits=bits, size=len(vectors[0]))
        found = secure_sum(Session(terms, run, round, 0), identities, vectors)
        return found.total, found.sent


def _majority(count: int) -> Nodes:
    return Nodes(count=count, threshold=count // 2 + 1)


def _noise_seed(secret: bytes, place: int, part: NodeSum) -> bytes:
    """Return the seed of a simulated node's noise, derived also from the sum that gets the noise.

    A round that is played again has the same sum and the same noise. Should its sum differ, the
    noise does too: the difference of two sums must not cancel it.
    """
    address = b"fedlm/secure/noise" + place.to_bytes(4, "big") + part.codes.tobytes()
    return hashlib.blake2b(address, key=secret, digest_size=32).digest()
