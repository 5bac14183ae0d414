"""An engine whose totals are secure sums of nodes, in this process or on a network.

In:       the integers of updates; nodes that open a sum of a cohort's vectors.
Out:      the sum of a cohort's updates, as the server of a secure sum opens it.
Promise:  each update is rounded by itself; a node adds up the integers of its members, and its
          share of noise if the plan has nodes add it; wherever the nodes are, the same updates give
          the same bits; single updates are not shown.
Not here: nodes in this process (`secure_local.py`), nodes over a transport (`secure_remote.py`),
          what a vector holds (`secure_vector.py`), the protocol (`secure`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedlm.core.errors import EngineError
from fedlm.core.types import Arrived, Cohort, Gathered, Members, Starts
from fedlm.engine.secure_vector import Integers, Shares, SumVector
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like
from fedlm.secure.terms import Member, Terms


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of one list of a secure federation."""

    count: int
    threshold: int
    colluders: int = 0
    neighbors: int = 0  # with whom a node agrees on masks; 0: with all

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


class RoundSum(NamedTuple):
    """The sum of a round that the server opened; zeros and nobody if the round is lost."""

    words: np.ndarray  # modulo 2^bits
    members: int  # whose updates are in the sum
    nodes: int  # that hold text and are in the sum
    upload_bytes: int
    download_bytes: int


class NodeSums(Protocol):
    """Nodes that train the members of a cohort and open the sum of their vectors."""

    @property
    def leaves(self) -> int:
        """How many nodes hold text, below relays too."""

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort of a round, with the text that is here."""

    def opened(self, vector: SumVector, starts: Starts, cohort: Cohort) -> RoundSum:
        """Return the sum of a cohort's vectors."""


class SecureEngine:
    """An engine whose totals are secure sums of nodes."""

    def __init__(
        self,
        algorithm: Algorithm,
        sums: NodeSums,
        integers: Integers,
        shares: Callable[[Any], Shares] | None = None,
    ) -> None:
        """Take `shares`, from the shapes of an update to its noise, if nodes add noise."""
        self.algorithm, self.sums, self.integers, self.shares = algorithm, sums, integers, shares

    @property
    def adds_noise(self) -> bool:
        """Whether a total carries the noise of its nodes."""
        return self.shares is not None

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort of a round."""
        return self.sums.prepare(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Refuse: a secure sum shows no single update."""
        raise EngineError("single updates were asked for: under secure sums nobody sees them.")

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return the sum of a cohort's updates that the server opens."""
        self._check_members(cohort)
        vector = self.vector(starts, cohort.round)
        found = self.sums.opened(vector, starts, cohort)
        total = vector.total(found.words, cohort.round, found.members)
        excess = vector.excess(found.nodes)
        return Gathered(total, found.upload_bytes, found.download_bytes, excess)

    def vector(self, starts: Starts, round: int) -> SumVector:
        """Return what the nodes of a round add up."""
        like = update_like(self.algorithm, model_like(starts), round).delta
        shares = None if self.shares is None else self.shares(like)
        return SumVector(integers=self.integers, nodes=self.sums.leaves, like=like, shares=shares)

    def _check_members(self, cohort: Cohort) -> None:
        """Refuse a cohort that the range of a sum is not made for."""
        if len(cohort.members) > self.integers.members:
            raise EngineError(
                f"round {cohort.round} drew more members than the {self.integers.members} for "
                "which the range of the sum is made. Begin another run whose wire.upload has more."
            )
