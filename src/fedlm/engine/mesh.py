"""A whole cohort as one compiled program over the devices that are here.

In:       parameters and a cohort.
Out:      the sum of the members' updates, or each of them.
Promise:  what the loop engine returns, without a dispatch per member or step; one program
          whatever the cohort; memory of one member a lane, whatever the cohort.
Not here: algorithm choices (`federation`), how batches are spread (`cohort/packing.py`).

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
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedlm.cohort.packing import Plan, Segment, batch_up, count_batches, lay_out, spread
from fedlm.core import tree
from fedlm.core.errors import EngineError
from fedlm.core.keys import digest_for, generator_for, key_data, key_for
from fedlm.core.types import BatchSpec, ClientMethod, Members, Params, Prepared, Rows, Total, Update
from fedlm.engine import multihost, payload_size
from fedlm.federation.algorithm import Algorithm, round_key, update_like
from fedlm.federation.member import Trip, add_member, empty_total, member_half


class Stream(NamedTuple):
    """One chunk of every lane; the leading axis of each array is the lane."""

    tokens: Any  # lanes capacity batch width
    starts: Any  # lanes capacity: first batch of each segment
    stops: Any  # lanes capacity: one past its last batch
    opens: Any  # lanes capacity: the member begins with this segment
    closes: Any  # lanes capacity: the member ends with this segment
    examples: Any  # lanes capacity: how many examples the member trained on
    keys: Any  # lanes capacity 2
    places: Any  # lanes capacity: where in the cohort the member stands
    segments: Any  # lanes: how many are real


class LaneState(NamedTuple):
    """What a lane holds between chunks."""

    carry: Any
    total: Total
    client_state: Any = None  # what its only member remembers, where members remember


class Lanes(NamedTuple):
    """All lanes at work: what their members start from, how long an update may be, the rest."""

    shared: Any
    bound: Any
    state: LaneState

    def of(self, lane: int) -> LaneState:
        """What one lane holds, on the host: lanes are not to wait for each other over it."""
        shard = lambda x: np.asarray(x.addressable_shards[lane].data)[0]  # noqa: E731
        one: LaneState = jax.tree.map(shard, self.state)
        return one

    def work(self, state: LaneState, examples: int) -> payload_size.Work:
        """One lane's member at the end of its work, on the host."""
        shared, clip_norm = jax.tree.map(
            lambda x: np.asarray(x.addressable_data(0)), (self.shared, self.bound)
        )
        return payload_size.Work(shared, state, examples, clip_norm)


class MeshEngine:
    """Trains a cohort in lanes, one lane a device."""

    def __init__(
        self,
        algorithm: Algorithm,
        rows_of: Rows,
        shape: BatchSpec,
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
        per_lane, replicated = NamedSharding(self.mesh, P("lanes")), NamedSharding(self.mesh, P())
        self._per_lane, self._replicated = per_lane, replicated
        self._share = jax.jit(self._make_shared, static_argnums=0)
        self._start = jax.jit(self._start_lanes, static_argnums=0, out_shardings=per_lane)
        self._chunk = jax.jit(self._run_chunk, static_argnums=0, donate_argnums=3)
        self._sum = jax.jit(_sum_lanes, out_shardings=replicated)
        self._replicate = jax.jit(lambda total: total, out_shardings=replicated)

    # ---- on the host -------------------------------------------------------------------

    def prepare(self, round: int, members: Members) -> Prepared:
        """The cohort's batches, spread over lanes and cut into chunks."""
        rows = [self.rows_of(member) for member in members]
        steps = [count_batches(len(r), self.shape) for r in rows]
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
        width = (self.shape.batch_size, like.shape[-1])
        stream = Stream(
            tokens=np.zeros((*full, *width), like.dtype),
            starts=np.zeros(full, np.int32),
            stops=np.zeros(full, np.int32),
            opens=np.zeros(full, bool),
            closes=np.zeros(full, bool),
            examples=np.zeros(full, np.float32),
            keys=np.zeros((*full, 2), np.uint32),
            places=np.zeros(full, np.int32),
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
                stream.places[here] = place
                at += last - first
        return stream

    def gather(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Total:
        """The sum of the cohort's updates."""
        if self.algorithm.remembers or not self.algorithm.upload.fixed_size:
            return self._gather_each(sent, cohort, clip_norm, client_state)
        local = self.algorithm.local_of(cohort.round)
        lanes = self._begin(local, sent, cohort.round, clip_norm)
        for stream in cohort.batches:
            lanes = self._take(local, lanes, stream)
        if cohort.batches:
            self._compare(local, lanes, sent, cohort)
        self._count_bytes(sent, cohort)
        return self._from_all(self._sum, lanes.state.total)

    def collect(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update: one member a lane at a time."""
        place = 0
        for group, lanes in self._groups(sent, cohort, clip_norm, client_state):
            total = self._from_all(self._replicate, lanes.state.total)
            for lane, member in enumerate(group):
                after = self._after(cohort, lanes, lane, place, tree.take(client_state, place))
                yield member, _single(total, lane, after)
                place += 1
        self._count_bytes(sent, cohort)

    def _gather_each(
        self, sent: Any, cohort: Prepared, clip_norm: float, client_state: Any
    ) -> Total:
        """The sum where members remember something, or a frame's size depends on what it holds."""
        total = _zeros_of(update_like(self.algorithm, sent, cohort.round))
        rows: list[Any] = []
        for group, lanes in self._groups(sent, cohort, clip_norm, client_state):
            total = tree.add(total, self._from_all(self._sum, lanes.state.total))
            for lane in range(len(group)):
                before = tree.take(client_state, len(rows))
                rows.append(self._after(cohort, lanes, lane, len(rows), before))
        self._count_bytes(sent, cohort)
        if not self.algorithm.remembers or not rows:
            return total
        stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
        return eqx.tree_at(lambda t: t.client_state, total, stacked, is_leaf=lambda x: x is None)

    def _after(self, cohort: Prepared, lanes: Lanes, lane: int, place: int, before: Any) -> Any:
        """What a lane's only member remembers; its frame is counted where no formula knows it."""
        state = lanes.of(lane)
        if not self.algorithm.upload.fixed_size:
            member = cohort.members[place]
            one = Prepared(cohort.round, np.array([member]), None)
            held = min(len(self.rows_of(member)), self.shape.max_examples or 1 << 62)
            work = lanes.work(state._replace(client_state=before), held)
            local, key = (
                self.algorithm.local_of(cohort.round),
                payload_size.upload_key(self.seed, one),
            )
            self.upload_bytes += payload_size.really_sent(self.algorithm, local, work, key)
        return state.client_state

    def _begin(self, local: ClientMethod, sent: Any, round: int, clip_norm: float) -> Lanes:
        """Lanes that have done nothing yet, and what their members start from."""
        download = key_for(self.seed, "download", round=round)
        shared = self._share(local, sent, download, round_key(self.algorithm, round))
        shared, bound = self._to_all((shared, jnp.float32(clip_norm)))
        return Lanes(shared, bound, self._start(local, shared))

    def _take(self, local: ClientMethod, lanes: Lanes, stream: Stream) -> Lanes:
        """The lanes after one more chunk."""
        shared, bound, state = lanes
        return lanes._replace(
            state=self._chunk(local, shared, bound, state, self._to_lanes(stream))
        )

    def _groups(
        self, sent: Any, cohort: Prepared, clip_norm: float, client_state: Any
    ) -> Iterator[tuple[Members, Lanes]]:
        """The cohort, as many members at a time as there are lanes, and the lanes after them."""
        local = self.algorithm.local_of(cohort.round)
        fresh = self._begin(local, sent, cohort.round, clip_norm)
        for at in range(0, len(cohort.members), self.lanes):
            group = cohort.members[at : at + self.lanes]
            rows = [self.rows_of(member) for member in group]
            lanes = fresh._replace(state=self._start(local, fresh.shared))
            if client_state is not None:
                # A lane without a member gets somebody's, and does nothing with it.
                places = [at + lane if lane < len(group) else at for lane in range(self.lanes)]
                own = jax.device_put(tree.take(client_state, places), self._per_lane)
                lanes = lanes._replace(state=lanes.state._replace(client_state=own))
            for stream in self._streams(cohort.round, group, rows, self._one_each(rows)):
                lanes = self._take(local, lanes, stream)
            yield group, lanes

    def _one_each(self, rows: list[Any]) -> Plan:
        """The plan in which each lane has a member of its own; there may be more lanes."""
        queues = [[place] if place < len(rows) else [] for place in range(self.lanes)]
        steps = [count_batches(len(r), self.shape) for r in rows]
        return lay_out(queues, steps, self.capacity)

    # ---- bytes -----------------------------------------------------------------------------

    def _count_bytes(self, sent: Any, cohort: Prepared) -> None:
        """What the cohort's frames take; those whose size is not known yet were counted."""
        self.download_bytes += len(cohort.members) * self.algorithm.download.encoded_bytes(sent)
        if self.algorithm.upload.fixed_size:
            self.upload_bytes += sum(payload_size.sizes(self.algorithm, sent, cohort, self.seed))

    def _compare(self, local: ClientMethod, lanes: Lanes, sent: Any, cohort: Prepared) -> None:
        """Really encodes the last member of the first lane; its size must be the one counted."""
        codec = self.algorithm.upload
        if not multihost.alone() or (codec.name == "float32" and self.upload_bytes):
            return
        stream = next((s for s in reversed(cohort.batches) if s.segments[0]), None)
        if stream is None:
            return
        slot = stream.segments[0] - 1
        address = int(stream.places[0, slot])
        one = Prepared(cohort.round, cohort.members[address : address + 1], None)
        work = lanes.work(lanes.of(0), stream.examples[0, slot])
        made = payload_size.really_sent(
            self.algorithm, local, work, payload_size.upload_key(self.seed, one)
        )
        (stated,) = payload_size.sizes(self.algorithm, sent, one, self.seed)
        if made != stated:
            raise EngineError(
                f"a frame of member {one.members[0]} has {made} bytes and codec {codec.name} "
                f"states {stated}."
            )

    # ---- between this process and all ----------------------------------------------------

    def _to_all(self, params: Params) -> Params:
        """Parameters that are here, on every device of every process."""
        if multihost.alone():
            return jax.device_put(params, self._replicated)
        put = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: put(self._replicated, np.asarray(x), x.shape), params)

    def _to_lanes(self, stream: Stream) -> Stream:
        """The batches of this process's lanes, on their devices."""
        if multihost.alone():
            return jax.device_put(stream, self._per_lane)
        put, lanes = jax.make_array_from_process_local_data, self.lanes
        return jax.tree.map(lambda x: put(self._per_lane, x, (lanes, *x.shape[1:])), stream)

    def _from_all(self, join: Any, total: Total) -> Total:
        """What the lanes of all processes give together, on one device of this process.

        There the server's step is done once; a sum that stayed on every lane would have each lane
        do it, and the second round compile it for another place than the first.
        """
        if not multihost.alone():
            jax.block_until_ready(total)  # processes differ in speed; they join when all are done
            multihost.meet()
        return jax.tree.map(lambda x: x.addressable_data(0), join(total))

    # ---- compiled ----------------------------------------------------------------------

    def _make_shared(self, local: ClientMethod, sent: Any, download: Any, key: Any) -> Any:
        return local.shared(self.algorithm.download.apply(sent, download), key)

    def _start_lanes(self, local: ClientMethod, shared: Any) -> LaneState:
        key = key_for(0, "upload")  # a lane begins with a member, and that one has its own
        client_state = None if local.init_memory is None else local.init_memory(shared)
        carry = local.init(shared, key, client_state)
        like = local.finish(shared, carry, jnp.zeros(()))
        one = LaneState(carry, _zeros_of(like))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.lanes, *x.shape)), one)

    def _run_chunk(
        self, local: ClientMethod, shared: Any, clip_norm: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        self.traces += 1
        lanes = P("lanes")
        run = jax.shard_map(
            partial(self._run_lane, local),
            mesh=self.mesh,
            in_specs=(P(), P(), lanes, lanes),
            out_specs=lanes,
            check_vma=False,
        )
        done: LaneState = run(shared, clip_norm, state, stream)
        return done

    def _run_lane(
        self, local: ClientMethod, shared: Any, clip_norm: Any, state: LaneState, stream: Stream
    ) -> LaneState:
        state, stream = jax.tree.map(lambda x: x[0], (state, stream))
        codec = self.algorithm.upload

        def take(at_and_carry):  # type: ignore[no-untyped-def]
            at, carry = at_and_carry
            return at + 1, local.step(shared, carry, stream.tokens[at].astype(jnp.int32))

        def segment(i, state):  # type: ignore[no-untyped-def]
            carry, total, client_state = state
            key = jr.wrap_key_data(stream.keys[i], impl="threefry2x32")
            own = None if client_state is None else client_state.own
            carry = jax.lax.cond(
                stream.opens[i], lambda: local.init(shared, key, own), lambda: carry
            )
            _, carry = jax.lax.while_loop(
                lambda x: x[0] < stream.stops[i], take, (stream.starts[i], carry)
            )
            trip = Trip(lambda delta: codec.apply(delta, key), clip_norm, client_state)
            update = member_half(self.algorithm, local, shared, carry, stream.examples[i], trip)
            # A member that goes on in the next chunk counts nothing yet: a branch would copy.
            if self.algorithm.remembers:
                client_state = tree.where(stream.closes[i], update.client_state, client_state)
            return LaneState(carry, add_member(total, update, stream.closes[i]), client_state)

        state = jax.lax.fori_loop(0, stream.segments, segment, state)
        return jax.tree.map(lambda x: x[None], state)


def _zeros_of(like: Update) -> Total:
    """The sum over nobody, of updates like this one."""
    return empty_total(like.delta, None if like.mask is None else like.mask.shape[0])


def _sum_lanes(total: Total) -> Total:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), total)


def _single(total: Total, lane: int, client_state: Any) -> Update:
    """The update of the only member in a lane, from that lane's sum."""
    one = tree.take(total, lane)
    share = jnp.where(one.weight > 0, 1.0 / jnp.where(one.weight > 0, one.weight, 1.0), 0.0)
    delta = jax.tree.map(lambda x: x * share, one.delta)
    mask = None if one.shares is None else jnp.where(one.shares > 0, 1.0, 0.0)
    return Update(
        delta,
        one.weight,
        one.nats,
        one.tokens,
        one.steps,
        one.refused,
        one.unclipped,
        mask,
        client_state,
    )
