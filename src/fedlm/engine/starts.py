"""Members that begin from parameters of their own.

In:       a cohort, and where each of its members begins.
Out:      each member's update, measured from there.
Promise:  what `collect` would return for that member alone, from its own parameters; one compiled
          program for all of them, as many members at a time as there are lanes.
Not here: who begins where (`federation/tree.py`), how a lane trains (`mesh.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedlm.cohort.pack import lay_out
from fedlm.core.types import Members, Params, Total, Update
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import LaneState, MeshEngine, Stream

Starts = Callable[[int], Params]


class LoopStarts(LoopEngine):
    """One member after the other."""

    def collect_from(
        self, starts: Starts, round: int, members: Members
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update from its own start."""
        for place in range(len(members)):
            one = members[place : place + 1]
            yield from self.collect(starts(int(one[0])), self.prepare(round, one))


class MeshStarts(MeshEngine):
    """A member a lane; the parameters are sharded over the lanes like the text."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own_chunk = jax.jit(self._run_own_chunk, donate_argnums=2)
        self._own_start = jax.jit(jax.vmap(self._begin), out_shardings=self._per_lane)

    def collect_from(
        self, starts: Starts, round: int, members: Members
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update from its own start."""
        for at in range(0, len(members), self.lanes):
            group = members[at : at + self.lanes]
            begin = [starts(int(member)) for member in group]
            begin += begin[:1] * (self.lanes - len(group))  # an idle lane needs any parameters
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *begin)
            params = jax.device_put(stacked, self._per_lane)
            total = jax.device_get(self._train(params, round, group).total)
            yield from ((int(m), _alone(total, lane)) for lane, m in enumerate(group))
            self._count_bytes(begin[0], len(group))

    def _train(self, params: Params, round: int, group: Members) -> LaneState:
        rows = [self.rows_of(member) for member in group]
        queues = [[place] if place < len(group) else [] for place in range(self.lanes)]
        plan = lay_out(queues, [self._steps(len(r)) for r in rows], self.capacity)
        state = self._own_start(params)
        for stream in self._streams(round, group, rows, plan):
            limit = jnp.float32(math.inf)
            state = self._own_chunk(params, limit, state, self._to_lanes(stream))
        return state

    def _begin(self, params: Params) -> LaneState:
        one: LaneState = jax.tree.map(lambda x: x[0], self._start_lanes(params))
        return one

    def _run_own_chunk(
        self, params: Params, limit: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        self.traces += 1
        lanes = P("lanes")
        run = jax.shard_map(
            self._run_own_lane,
            mesh=self.mesh,
            in_specs=(lanes, P(), lanes, lanes),
            out_specs=lanes,
            check_vma=False,
        )
        done: LaneState = run(params, limit, state, stream)
        return done

    def _run_own_lane(
        self, params: Params, limit: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        return self._run_lane(jax.tree.map(lambda x: x[0], params), limit, state, stream)


def _alone(total: Total, lane: int) -> Update:
    """The update of the only member in a lane, on the host."""
    one = jax.tree.map(lambda x: x[lane], total)
    share = np.float32(1.0) / one.weight if one.weight > 0 else np.float32(0.0)
    delta = jax.tree.map(lambda x: x * share, one.delta)
    return Update(delta, one.weight, one.nats, one.tokens, one.steps, one.refused, one.inside)
