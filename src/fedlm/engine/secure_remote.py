"""The sums of a secure engine whose nodes are on a network.

In:       what members begin from, a cohort whose text is elsewhere, the federation's members.
Out:      the opened sum of all nodes that stayed, with the bytes that crossed the wire.
Promise:  a round whose sum is not opened is lost and said, and the next one goes on; several in a
          row end the run with the reasons; a relay among the members changes nothing but the
          address: the sum has the same bits.
Not here: the engine (`secure.py`), the questions (`secure_attempts.py`), the protocol (`secure`),
          what a vector holds (`secure_vector.py`), a node's half (`deploy/secure_worker.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedlm.core.errors import EngineError, require
from fedlm.core.keys import key_for
from fedlm.core.types import Codec, Cohort, Members, Start, Starts
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Quorum, RoundStats, Transport
from fedlm.engine.secure import Nodes, RoundSum
from fedlm.engine.secure_attempts import Opened, SecureSums, SumQuestion
from fedlm.engine.secure_vector import SumVector
from fedlm.secure.terms import Member

MOST_LOST = 3  # rounds in a row


class RemoteNodeSums:
    """Nodes of a network that open secure sums."""

    def __init__(
        self,
        transport: Transport,
        assignments: Sequence[Assignment],
        members: tuple[Member, ...],
        *,
        download: Codec,
        nodes: Nodes,
        leaves: int,
        run: str,
        recipe: str,
        seed: int,
        quorum: Quorum,
        on_stats: Callable[[RoundStats], None] = lambda stats: None,
        counters: Counters | None = None,
        say: Callable[[str], None] = lambda text: None,
        file: Path | None = None,
    ) -> None:
        """Take the members of the federation's list, which every node has too.

        `leaves` is how many nodes hold text, below relays too; `file` keeps the attempt under way
        for a server that is killed.
        """
        self.assignments, self.members, self.download = tuple(assignments), members, download
        self.nodes, self.leaves, self.seed = nodes, leaves, seed
        self.on_stats, self.say = on_stats, say
        self.lost = 0
        self.attempts = SecureSums(
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

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort by its members alone; its text is elsewhere."""
        return Cohort(round, members)

    def opened(self, vector: SumVector, starts: Starts, cohort: Cohort) -> RoundSum:
        """Return the sum of the vectors of all nodes that stayed."""
        assert isinstance(starts, Start)  # one per member is a tree, which has no secure sums
        began, stats = time.monotonic(), RoundStats(cohort.round)
        found = self._asked(vector, starts, cohort, stats)
        stats.answered = [self.members[place].name for place in found.survivors]
        stats.seconds = time.monotonic() - began
        for kind in (stats.refused, stats.garbage):
            for name in set(kind) & set(stats.answered):
                del kind[name]
        stats.away = sorted(set(stats.away) - set(stats.answered))
        stats.late = sorted(set(stats.late) - set(stats.answered))
        self.on_stats(stats)
        self._count_lost(stats)
        return RoundSum(found.words, found.members, found.nodes, stats.up_bytes, stats.down_bytes)

    def _asked(self, vector: SumVector, start: Start, cohort: Cohort, stats: RoundStats) -> Opened:
        """Return the sum of a round; zeros and nobody if it is lost."""
        bits, key = vector.integers.bits, key_for(self.seed, "download", round=cohort.round)
        asked = SumQuestion(
            terms=self.nodes.terms(self.members, bits=bits, size=vector.size),
            round=cohort.round,
            members=self.attempts.members_by_node(np.asarray(cohort.members).tolist()),
            clip_norm=start.clip_norm,
            frame=self.download.encode(start.model, key),
        )
        found = self.attempts.opened(asked, stats)
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
