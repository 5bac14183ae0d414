"""Secure sums of nodes over a transport: an engine whose totals are opened sums.

In:       what members begin from, a cohort whose text is elsewhere, the federation's members.
Out:      the sum of the updates of all nodes that stayed, with the bytes that crossed the wire.
Promise:  a round whose sum is not opened is lost and said, and the next one goes on; several in a
          row end the run with the reasons; a relay among the members changes nothing but the
          address: the sum has the same bits.
Not here: the questions (`secure_attempts.py`), the protocol (`secure`), what a vector holds
          (`secure_vector.py`), a node's half (`deploy/secure_worker.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.errors import EngineError, require
from fedlm.core.keys import key_for
from fedlm.core.types import Arrived, Cohort, Gathered, Members, Start, Starts
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats, Transport
from fedlm.engine.secure import Nodes, check_members
from fedlm.engine.secure_attempts import Opened, SecureSums, SumQuestion
from fedlm.engine.secure_vector import Integers, Shares, SumVector
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like
from fedlm.secure.terms import Member

MOST_LOST = 3  # rounds in a row


class RemoteSecureEngine:
    """An engine whose totals are secure sums of the nodes of a network."""

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        assignments: Sequence[Assignment],
        members: tuple[Member, ...],
        *,
        nodes: Nodes,
        leaves: int,
        integers: Integers,
        shares: Callable[[Any], Shares] | None,
        run: str,
        recipe: str,
        seed: int,
        quorum: Quorum,
        on_stats: Callable[[RoundStats], None] = lambda tally: None,
        counters: Counters | None = None,
        say: Callable[[str], None] = lambda text: None,
        file: Path | None = None,
    ) -> None:
        """Take the members of the federation's list, which every node has too.

        `leaves` is how many nodes hold text, below relays too; `shares` is noise at nodes, from
        the shapes of an update; `file` keeps the attempt under way for a server that is killed.
        """
        self.algorithm, self.assignments, self.members = algorithm, tuple(assignments), members
        self.nodes, self.leaves, self.integers, self.shares = nodes, leaves, integers, shares
        self.recipe, self.seed, self.on_stats, self.say = recipe, seed, on_stats, say
        self.lost = 0
        self.sums = SecureSums(
            transport,
            self.assignments,
            members,
            run=run,
            recipe=recipe,
            population=sum(a.clients for a in self.assignments),
            quorum=quorum,
            counters=counters or Counters(),
            say=say,
            file=file,
        )
        self._check()

    def _check(self) -> None:
        """Refuse a number of nodes for which counts and noise would not be made."""
        here = sum(max(1, len(a.leaves)) for a in self.assignments)
        found = here + len(self.members) - len(self.assignments)  # who is not there counts as one
        relayed = any(a.leaves for a in self.assignments)
        require(
            found <= self.leaves if relayed else self.leaves == len(self.members),
            "wire.secure_nodes",
            self.leaves,
            f"{found}, the nodes that hold text, below relays too"
            if relayed
            else f"{len(self.members)}, the members of the federation's list",
        )

    @property
    def adds_noise(self) -> bool:
        """Whether a total carries the noise of its nodes."""
        return self.shares is not None

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort by its members alone; its text is elsewhere."""
        return Cohort(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Refuse: a secure sum shows no single update."""
        raise EngineError("single updates were asked for: under secure sums nobody sees them.")

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return the sum of the updates of all nodes that stayed; zero if the round is lost."""
        assert isinstance(starts, Start)  # one per member is a tree, which has no secure sums
        check_members(self.integers, cohort)
        began, stats = time.monotonic(), RoundStats(cohort.round)
        vector = self._vector(starts, cohort.round)
        found = self._opened(vector, starts, cohort, stats)
        stats.answered = [self.members[place].name for place in found.survivors]
        stats.seconds = time.monotonic() - began
        for kind in (stats.refused, stats.garbage):
            for name in set(kind) & set(stats.answered):
                del kind[name]
        stats.away = sorted(set(stats.away) - set(stats.answered))
        stats.late = sorted(set(stats.late) - set(stats.answered))
        self.on_stats(stats)
        self._count_lost(stats)
        total = vector.total(found.words, cohort.round, found.members)
        return Gathered(total, stats.up_bytes, stats.down_bytes, vector.excess(found.nodes))

    def _vector(self, start: Start, round: int) -> SumVector:
        like = update_like(self.algorithm, model_like(start), round).delta
        shares = None if self.shares is None else self.shares(like)
        return SumVector(integers=self.integers, nodes=self.leaves, like=like, shares=shares)

    def _opened(self, vector: SumVector, start: Start, cohort: Cohort, stats: RoundStats) -> Opened:
        """Return the sum of a round; zeros and nobody if it is lost."""
        bits, key = self.integers.bits, key_for(self.seed, "download", round=cohort.round)
        asked = SumQuestion(
            terms=self.nodes.terms(self.members, bits=bits, size=vector.size),
            round=cohort.round,
            members=self.sums.members_by_node(np.asarray(cohort.members).tolist()),
            clip_norm=start.clip_norm,
            frame=self.algorithm.download.encode(start.model, key),
        )
        found = self.sums.opened(asked, stats)
        return Opened(np.zeros(vector.size, np.uint64), (), 0, 0) if found is None else found

    def _count_lost(self, stats: RoundStats) -> None:
        """Say that a round is lost; raise `EngineError` if several are, one after the other."""
        if not stats.lost:
            self.lost = 0
            return
        self.lost += 1
        self.say(f"round {stats.round} is lost, and its model stays as it was: {stats.lost}")
        if self.lost >= MOST_LOST:
            why = {**stats.refused, **stats.garbage}
            said = " ".join(f"{name}: {reason}" for name, reason in sorted(why.items())[:4])
            raise EngineError(
                f"{self.lost} rounds in a row were lost, the last one because: {stats.lost} {said} "
                "Bring the nodes back, and go on with --resume."
            )
