"""A whole cohort as one compiled program over the devices that are here.

In:       parameters and a cohort.
Out:      the sum of the members' updates, or each of them.
Promise:  what the loop engine returns, without a dispatch per member or step; one program
          whatever the cohort; memory of one member a lane, whatever the cohort.
Not here: algorithm choices (`federation`), how batches are spread (`cohort/pack.py`).

Each device is a lane. A lane walks its own stream of batches with loops whose lengths are
data, so ragged members cost what they hold: nothing is padded but a member's last batch.
A stream longer than `capacity` is cut into chunks, in the middle of a member if need be;
what a lane carries (the member at work, the sum so far) lives on its device in between.

Where several processes run together (`hosts.py`), the lanes are those of all of them. Each packs
its own; what goes in and what comes out is local to the process, and the same at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedlm.cohort.pack import Plan, Segment, batch_up, lay_out, spread
from fedlm.core.keys import digest_for, generator_for, key_data
from fedlm.core.types import Members, Params, Prepared, Rows, Shape, Total, Update
from fedlm.engine import hosts
from fedlm.federation.round import Algorithm, add_member, empty_total, member_half


class Stream(NamedTuple):
    """One chunk of every lane; the leading axis of each array is the lane."""

    tokens: Any  # lanes capacity batch width
    starts: Any  # lanes capacity: first batch of each segment
    stops: Any  # lanes capacity: one past its last batch
    opens: Any  # lanes capacity: the member begins with this segment
    closes: Any  # lanes capacity: the member ends with this segment
    examples: Any  # lanes capacity: how many examples the member trained on
    keys: Any  # lanes capacity 2
    segments: Any  # lanes: how many are real


class LaneState(NamedTuple):
    """What a lane holds between chunks."""

    carry: Any
    total: Total


class MeshEngine:
    """Trains a cohort in lanes, one lane a device."""

    def __init__(
        self,
        algorithm: Algorithm,
        rows_of: Rows,
        shape: Shape,
        seed: int,
        *,
        devices: Sequence[jax.Device] | None = None,
        capacity: int = 256,
    ) -> None:
        self.algorithm, self.rows_of, self.shape, self.seed = algorithm, rows_of, shape, seed
        self.capacity = capacity
        devices = list(devices or jax.devices())
        self.mesh = Mesh(np.array(devices), ("lanes",))
        self.lanes = len(devices)
        here = jax.process_index()
        self._mine = [lane for lane, d in enumerate(devices) if d.process_index == here]
        self.upload_bytes = self.download_bytes = 0
        self.traces = 0
        per_lane, shared = NamedSharding(self.mesh, P("lanes")), NamedSharding(self.mesh, P())
        self._per_lane, self._shared = per_lane, shared
        self._start = jax.jit(self._start_lanes, out_shardings=per_lane)
        self._chunk = jax.jit(self._run_chunk, donate_argnums=2)
        self._sum = jax.jit(_sum_lanes, out_shardings=shared)
        self._spread = jax.jit(lambda total: total, out_shardings=shared)

    # ---- on the host -------------------------------------------------------------------

    def prepare(self, round: int, members: Members) -> Prepared:
        """The cohort's batches, spread over lanes and cut into chunks."""
        rows = [self.rows_of(member) for member in members]
        steps = [self._steps(len(r)) for r in rows]
        plan = spread(steps, self.lanes, self.capacity) if rows else []
        return Prepared(round, members, self._streams(round, members, rows, plan))

    def _streams(self, round: int, members: Members, rows: list[Any], plan: Plan) -> list[Stream]:
        """What the plan says, for the lanes of this process."""
        plan = [[chunk[lane] for lane in self._mine] for chunk in plan]
        made, examples, keys = {}, {}, {}
        for place in {segment.place for chunk in plan for lane in chunk for segment in lane}:
            address = {"round": round, "member": members[place]}
            rng = generator_for(self.seed, "shuffle", **address)
            made[place] = batch_up(rows[place], self.shape, rng)
            examples[place] = min(len(rows[place]), self.shape.max_examples or len(rows[place]))
            keys[place] = key_data(digest_for(self.seed, "upload", **address))
        return [self._fill(chunk, rows[0], made, examples, keys) for chunk in plan]

    def _fill(self, chunk: list[list[Segment]], like, made, examples, keys) -> Stream:  # type: ignore[no-untyped-def]
        full = (len(chunk), self.capacity)
        width = (self.shape.batch, like.shape[-1])
        stream = Stream(
            tokens=np.zeros((*full, *width), like.dtype),
            starts=np.zeros(full, np.int32),
            stops=np.zeros(full, np.int32),
            opens=np.zeros(full, bool),
            closes=np.zeros(full, bool),
            examples=np.zeros(full, np.float32),
            keys=np.zeros((*full, 2), np.uint32),
            segments=np.array([len(lane) for lane in chunk], np.int32),
        )
        for lane, segments in enumerate(chunk):
            at = 0
            for slot, (place, first, last, opens, closes) in enumerate(segments):
                here = (lane, slot)
                stream.tokens[lane, at : at + last - first] = made[place][first:last]
                stream.starts[here], stream.stops[here] = at, at + last - first
                stream.opens[here], stream.closes[here] = opens, closes
                stream.examples[here], stream.keys[here] = examples[place], keys[place]
                at += last - first
        return stream

    def gather(self, params: Params, cohort: Prepared, limit: float = math.inf) -> Total:
        """The sum of the cohort's updates."""
        shared, bound = self._to_all((params, jnp.float32(limit)))
        state = self._start(shared)
        for stream in cohort.batches:
            state = self._chunk(shared, bound, state, self._to_lanes(stream))
        self._count_bytes(params, len(cohort.members))
        return self._from_all(self._sum, state.total)

    def collect(
        self, params: Params, cohort: Prepared, limit: float = math.inf
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update: one member a lane at a time."""
        shared, bound = self._to_all((params, jnp.float32(limit)))
        for at in range(0, len(cohort.members), self.lanes):
            group = cohort.members[at : at + self.lanes]
            rows = [self.rows_of(member) for member in group]
            queues = [[place] if place < len(group) else [] for place in range(self.lanes)]
            plan = lay_out(queues, [self._steps(len(r)) for r in rows], self.capacity)
            state = self._start(shared)
            for stream in self._streams(cohort.round, group, rows, plan):
                state = self._chunk(shared, bound, state, self._to_lanes(stream))
            total = self._from_all(self._spread, state.total)
            yield from ((member, _single(total, lane)) for lane, member in enumerate(group))
        self._count_bytes(params, len(cohort.members))

    def _steps(self, rows: int) -> int:
        """How many batches a member with so many rows trains on in a round."""
        shape = self.shape
        rows = min(rows, shape.max_examples or rows)
        steps = shape.epochs * -(-rows // shape.batch)
        return min(steps, shape.max_steps or steps)

    def _count_bytes(self, params: Params, members: int) -> None:
        self.upload_bytes += members * self.algorithm.upload.encoded_bytes(params)
        self.download_bytes += members * self.algorithm.download.encoded_bytes(params)

    # ---- between this process and all ----------------------------------------------------

    def _to_all(self, params: Params) -> Params:
        """Parameters that are here, on every device of every process."""
        if hosts.alone():
            return jax.device_put(params, self._shared)
        put = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: put(self._shared, np.asarray(x), x.shape), params)

    def _to_lanes(self, stream: Stream) -> Stream:
        """The batches of this process's lanes, on their devices."""
        if hosts.alone():
            return jax.device_put(stream, self._per_lane)
        put, lanes = jax.make_array_from_process_local_data, self.lanes
        return jax.tree.map(lambda x: put(self._per_lane, x, (lanes, *x.shape[1:])), stream)

    def _from_all(self, join: Any, total: Total) -> Total:
        """What the lanes of all processes give together, as arrays of this process."""
        if hosts.alone():
            return join(total)
        jax.block_until_ready(total)  # processes differ in speed; they join when all are done
        hosts.meet()
        return jax.tree.map(lambda x: x.addressable_data(0), join(total))

    # ---- compiled ----------------------------------------------------------------------

    def _start_lanes(self, params: Params) -> LaneState:
        one = LaneState(self.algorithm.local.init(params), empty_total(params))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.lanes, *x.shape)), one)

    def _run_chunk(self, params: Params, limit: Any, state: LaneState, stream: Stream) -> LaneState:
        self.traces += 1
        lanes = P("lanes")
        run = jax.shard_map(
            self._run_lane,
            mesh=self.mesh,
            in_specs=(P(), P(), lanes, lanes),
            out_specs=lanes,
            check_vma=False,
        )
        done: LaneState = run(params, limit, state, stream)
        return done

    def _run_lane(self, params: Params, limit: Any, state: LaneState, stream: Stream) -> LaneState:
        state, stream = jax.tree.map(lambda x: x[0], (state, stream))
        local, codec = self.algorithm.local, self.algorithm.upload

        def take(at_and_carry):  # type: ignore[no-untyped-def]
            at, carry = at_and_carry
            return at + 1, local.step(carry, stream.tokens[at].astype(jnp.int32))

        def segment(i, state):  # type: ignore[no-untyped-def]
            carry, total = state
            carry = jax.lax.cond(stream.opens[i], lambda: local.init(params), lambda: carry)
            _, carry = jax.lax.while_loop(
                lambda x: x[0] < stream.stops[i], take, (stream.starts[i], carry)
            )

            update = member_half(self.algorithm, params, carry, stream.examples[i], limit)
            key = jr.wrap_key_data(stream.keys[i], impl="threefry2x32")
            sent = eqx.tree_at(lambda u: u.delta, update, codec.apply(update.delta, key))
            # A member that goes on in the next chunk counts nothing yet: a branch would copy.
            return LaneState(carry, add_member(total, sent, stream.closes[i]))

        state = jax.lax.fori_loop(0, stream.segments, segment, state)
        return jax.tree.map(lambda x: x[None], state)


def _sum_lanes(total: Total) -> Total:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), total)


def _single(total: Total, lane: int) -> Update:
    """The update of the only member in a lane, from that lane's sum."""
    one = jax.tree.map(lambda x: x[lane], total)
    share = jnp.where(one.weight > 0, 1.0 / jnp.where(one.weight > 0, one.weight, 1.0), 0.0)
    delta = jax.tree.map(lambda x: x * share, one.delta)
    return Update(delta, one.weight, one.nats, one.tokens, one.steps, one.refused, one.inside)
