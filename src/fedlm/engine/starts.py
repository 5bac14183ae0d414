"""Members that begin from parameters of their own.

In:       members, and where each of them begins and what it remembers.
Out:      each member's update, measured from there.
Promise:  what `collect` would return for that member alone, from its own parameters; one compiled
          program for all of them, as many members at a time as there are lanes.
Not here: who begins where (`federation/tree.py`), how a lane trains (`mesh.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedlm.core.keys import key_for
from fedlm.core.types import ClientMethod, Members, Params, Total, Update
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import LaneState, MeshEngine, Stream
from fedlm.federation.algorithm import round_key
from fedlm.federation.member import ClientState

Starts = Callable[[int], tuple[Params, Any]]
"""A member to where it begins, and to what it remembers of its last turn, if it does."""


class LoopStarts(LoopEngine):
    """One member after the other."""

    def collect_from(
        self, starts: Starts, round: int, members: Members
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update from its own start."""
        for place in range(len(members)):
            one = members[place : place + 1]
            params, memory = starts(int(one[0]))
            rows = _stack([ClientState(memory, None)]) if self.algorithm.remembers else None
            yield from self.collect(params, self.prepare(round, one), math.inf, rows)


class MeshStarts(MeshEngine):
    """A member a lane; what lanes start from is sharded over them like the text."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own_lanes = jax.jit(self._begin_lanes, static_argnums=0)
        self._own_chunk = jax.jit(self._run_own_chunk, static_argnums=0, donate_argnums=2)

    def collect_from(
        self, starts: Starts, round: int, members: Members
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update from its own start."""
        for at in range(0, len(members), self.lanes):
            group = members[at : at + self.lanes]
            begin = [starts(int(member)) for member in group]
            begin += begin[:1] * (self.lanes - len(group))  # an idle lane needs any parameters
            state = jax.device_get(self._train(begin, round, group))
            for lane, member in enumerate(group):
                yield int(member), _alone(state, lane)

    def _train(self, begin: list[tuple[Params, Any]], round: int, group: Members) -> LaneState:
        local = self.algorithm.local_of(round)
        sent = jax.device_put(_stack([params for params, _ in begin]), self._per_lane)
        keys = key_for(self.seed, "download", round=round), round_key(self.algorithm, round)
        shared, state = self._own_lanes(local, sent, keys)
        if self.algorithm.remembers:
            client_state = _stack([ClientState(memory, None) for _, memory in begin])
            state = state._replace(client_state=jax.device_put(client_state, self._per_lane))
        rows = [self.rows_of(member) for member in group]
        for stream in self._streams(round, group, rows, self._one_each(rows)):
            state = self._own_chunk(local, shared, state, self._to_lanes(stream))
        return state

    def _begin_lanes(self, local: ClientMethod, sent: Any, keys: Any) -> tuple[Any, LaneState]:
        """What each lane's member starts from, and lanes that have done nothing yet."""

        def one(params: Params) -> tuple[Any, LaneState]:
            shared = self._make_shared(local, params, *keys)
            lanes = self._start_lanes(local, shared)
            return shared, jax.tree.map(lambda x: x[0], lanes)

        made = jax.vmap(one)(sent)
        lanes: tuple[Any, LaneState] = jax.lax.with_sharding_constraint(made, self._per_lane)
        return lanes

    def _run_own_chunk(
        self, local: ClientMethod, shared: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        self.traces += 1
        lanes = P("lanes")
        run = jax.shard_map(
            partial(self._run_own_lane, local),
            mesh=self.mesh,
            in_specs=(lanes, lanes, lanes),
            out_specs=lanes,
            check_vma=False,
        )
        done: LaneState = run(shared, state, stream)
        return done

    def _run_own_lane(
        self, local: ClientMethod, shared: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        own = jax.tree.map(lambda x: x[0], shared)
        return self._run_lane(local, own, jnp.float32(math.inf), state, stream)


def _stack(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def _alone(state: LaneState, lane: int) -> Update:
    """The update of the only member in a lane, on the host."""
    one: Total = jax.tree.map(lambda x: x[lane], state.total)
    share = np.float32(1.0) / one.weight if one.weight > 0 else np.float32(0.0)
    delta = jax.tree.map(lambda x: x * share, one.delta)
    client_state = jax.tree.map(lambda x: x[lane], state.client_state)
    counts = (one.weight, one.nats, one.tokens, one.steps, one.refused, one.unclipped)
    return Update(delta, *counts, client_state=client_state)
