"""A whole cohort as one compiled program over the devices that are here.

In:       what members begin from, and a cohort.
Out:      the sum of the members' updates, or each of them, with the bytes they took.
Promise:  what the loop engine returns, without a dispatch per member or step; one program
          whatever the cohort; memory of one member per lane, whatever the cohort.
Not here: algorithm choices (`federation`), how batches are spread (`cohort/packing.py`).

Each device is a lane, or as many devices as share a model (`sharding.py`). A lane walks its own
stream of batches with loops whose lengths are data, so ragged members cost what they hold: nothing
is padded but a member's last batch. A stream longer than `capacity` is cut into chunks, in the
middle of a member if need be; what a lane carries (the member at work, the sum so far) lives on its
devices in between.

There are two layouts. *Packed*: all members are spread evenly over the lanes, and only the sum
comes back. *Grouped*: as many members at a time as there are lanes, one member per lane; for each
member's own update, for members that remember something or begin from a model of their own, and
for codecs whose frames must be made to know their size.

What nobody trains (`Algorithm.base`) is put on each lane once and given to every program as an
argument: it is no constant of a program, and never copied from round to round.

Where several processes run together (`multihost.py`), the lanes are those of all of them. Each
packs its own; what goes in and what comes out is local to the process, and the same at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray

from fedlm.cohort.packing import (
    Plan,
    Segment,
    batch_order,
    batches_of,
    count_batches,
    lay_out,
    load_of,
    spread,
)
from fedlm.core import tree
from fedlm.core.errors import EngineError
from fedlm.core.keys import digest_for, generator_for, key_data, key_for
from fedlm.core.program_cache import kept_programs
from fedlm.core.types import (
    Arrived,
    Batch,
    BatchSpec,
    ClientMethod,
    Cohort,
    Gathered,
    Members,
    Message,
    Params,
    Precomputed,
    PyTree,
    Rows,
    Shared,
    Start,
    Starts,
    Total,
    Update,
)
from fedlm.engine import multihost, payload_size
from fedlm.engine.frozen_features import FrozenFeatures
from fedlm.engine.sharding import LANES, LaneMesh, check_shards, of_any_lane, of_lane
from fedlm.federation.algorithm import (
    Algorithm,
    ClientHalf,
    lifted,
    on_base,
    round_key,
    summed_like,
)
from fedlm.federation.member import (
    Finished,
    add_member,
    member_half,
    model_like,
    start_of,
    total_like,
)


class Stream(NamedTuple):
    """One chunk of every lane; the leading axis of each array is the lane."""

    tokens: Any  # lanes capacity batch width
    starts: Any  # lanes capacity: first batch of each segment
    stops: Any  # lanes capacity: one past its last batch
    opens: Any  # lanes capacity: the member begins with this segment
    closes: Any  # lanes capacity: the member ends with this segment
    examples: Any  # lanes capacity: how many examples the member trained on
    keys: Any  # lanes capacity 2
    places: Any  # lanes capacity: the member's place in the cohort
    segments: Any  # lanes: how many are real
    rate: Any  # lanes: the factor of all steps of the round
    order: Any = None  # lanes capacity batch: numbers of rows, if their features are kept
    features: Any = None  # lanes capacity batch sequence embed: put there before a chunk runs


# The most bytes of features that a lane holds at a time: fewer batches per chunk if they are long.
MOST_FEATURES = 64 << 20


class LaneState(NamedTuple):
    """The state of a lane between chunks."""

    carry: PyTree
    total: Total
    client_state: PyTree = None  # what its only member remembers, where members remember


class LaneInput(NamedTuple):
    """The read-only inputs of a chunk, or their partition specs."""

    begun: tuple[Shared, Array] | P  # what members begin from, how long their updates may be
    base: Params | None  # frozen parameters
    stream: Stream | P


class Lanes(NamedTuple):
    """The lanes of a running cohort."""

    shared: Shared  # what members begin from, without the base
    clip_norm: Array  # how long a member's update may be
    state: LaneState
    own: bool = False  # the first two have one entry per lane, and are not the same on all

    def finished(self, lane: int, examples: int, client_state: PyTree) -> Finished:
        """Return a lane's last member, on the host; `client_state` is what it remembered before."""
        begun = (self.shared, self.clip_norm)
        shared, clip_norm = of_lane(begun, lane) if self.own else of_any_lane(begun)
        carry = of_lane(self.state.carry, lane)
        return Finished(shared, carry, jnp.float32(examples), jnp.asarray(clip_norm), client_state)


class Programs:
    """The compiled programs of all engines whose members do the same on the same devices.

    They hold no parameters and no text: both are arguments. So engines share them whose algorithms
    differ in the server alone, and the second run of a process compiles nothing (`programs_of`).
    """

    def __init__(self, half: ClientHalf, devices: tuple[jax.Device, ...], shards: int = 1) -> None:
        self.half, self.places = half, LaneMesh(devices, shards)
        self.traces = 0  # of the largest program
        self.share = jax.jit(self._make_shared, static_argnums=0)
        self.start = jax.jit(self._start_lanes, static_argnums=0, **self._out(self.places.per_lane))
        self.start_own = jax.jit(self._start_own_lanes, static_argnums=0)
        self.chunk = jax.jit(self._run_chunk, static_argnums=(0, 1), donate_argnums=2)
        summed = _sum_lanes if shards == 1 else self._sum_divided_lanes
        self.sum = jax.jit(summed, **self._out(self.places.replicated))
        self.to_send = jax.jit(self._change_to_send, static_argnums=0)

    def _out(self, place: Any) -> dict[str, Any]:
        """Return the sharding of results for `jit`; a divided model has one per leaf."""
        return {"out_shardings": place} if self.places.shards == 1 else {}

    def _spread(self, places: Any, values: PyTree) -> PyTree:
        """Constrain results to their shardings, if a model is divided."""
        if self.places.shards == 1:
            return values
        return jax.lax.with_sharding_constraint(values, places(values))

    def _make_shared(
        self, local: ClientMethod, model: Message, keys: tuple[PRNGKeyArray, PRNGKeyArray]
    ) -> Shared:
        download, round_key = keys
        return local.shared(self.half.download.apply(model, download), round_key)

    def _start_lanes(self, local: ClientMethod, shared: Shared, base: Params | None) -> LaneState:
        one = _start_lane(local, on_base(base, shared))
        lanes = self.places.lanes
        all_of = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), one)
        return self._spread(self.places.of_lanes, all_of)

    def _start_own_lanes(
        self,
        local: ClientMethod,
        models: PyTree,
        base: Params | None,
        keys: tuple[PRNGKeyArray, PRNGKeyArray],
    ) -> tuple[PyTree, LaneState]:
        def one(model: Params) -> tuple[PyTree, LaneState]:
            shared = self._make_shared(local, model, keys)
            return shared, _start_lane(local, on_base(base, shared))

        made = jax.vmap(one)(models)
        places = self.places.of_lanes(made)
        lanes: tuple[PyTree, LaneState] = jax.lax.with_sharding_constraint(made, places)
        return lanes

    def _sum_divided_lanes(self, total: Total) -> Total:
        return self._spread(self.places.of_all, _sum_lanes(total))

    def _change_to_send(self, local: ClientMethod, base: Params | None, done: Finished) -> PyTree:
        whole = done._replace(shared=on_base(base, done.shared))
        return payload_size.to_send(self.half, local, whole)

    def _run_chunk(
        self, local: ClientMethod, own: bool, state: LaneState, given: LaneInput
    ) -> LaneState:
        self.traces += 1
        lanes = P(LANES)
        run = jax.shard_map(
            partial(self._run_lane, local, own),
            mesh=self.places.mesh,
            in_specs=(lanes, LaneInput(lanes if own else P(), P(), lanes)),
            out_specs=lanes,
            axis_names={LANES},  # within a lane the compiler divides the work
            check_vma=False,
        )
        done: LaneState = run(state, given)
        return self._spread(self.places.of_lanes, done)

    def _run_lane(
        self, local: ClientMethod, own: bool, state: LaneState, given: LaneInput
    ) -> LaneState:
        rest, clip_norm = jax.tree.map(lambda x: x[0] if own else x, given.begun)
        shared = on_base(given.base, rest)
        state, stream = jax.tree.map(lambda x: x[0], (state, given.stream))
        codec, hold = self.half.upload, self.places.hold

        def take(at_and_carry):  # type: ignore[no-untyped-def]
            at, carry = at_and_carry
            tokens = stream.tokens[at].astype(jnp.int32)
            kept = stream.features
            batch: Batch = tokens if kept is None else Precomputed(tokens, kept[at])
            return at + 1, hold(local.step(shared, carry, batch))

        def segment(i, state):  # type: ignore[no-untyped-def]
            carry, total, client_state = state
            key = jr.wrap_key_data(stream.keys[i], impl="threefry2x32")
            memory = None if client_state is None else client_state.own
            carry = jax.lax.cond(
                stream.opens[i],
                lambda: hold(local.init(shared, key, memory, stream.rate)),
                lambda: carry,
            )
            _, carry = jax.lax.while_loop(
                lambda x: x[0] < stream.stops[i], take, (stream.starts[i], carry)
            )
            done = Finished(shared, carry, stream.examples[i], clip_norm, client_state)
            update = member_half(self.half, local, done, lambda d: codec.apply(d, key))
            # A member that goes on in the next chunk counts nothing yet: a branch would copy.
            if self.half.remembers:
                client_state = tree.where(stream.closes[i], update.client_state, client_state)
            total = hold(add_member(total, update, stream.closes[i]))
            return LaneState(carry, total, hold(client_state))

        state = jax.lax.fori_loop(0, stream.segments, segment, state)
        return jax.tree.map(lambda x: x[None], state)


@kept_programs
def programs_of(half: ClientHalf, devices: tuple[jax.Device, ...], shards: int = 1) -> Programs:
    """Return the compiled programs of members on some devices, shared by all engines."""
    return Programs(half, devices, shards)


class MeshEngine:
    """An engine that trains a cohort in lanes, of `shard` devices each that share a model."""

    adds_noise = False

    def __init__(
        self,
        algorithm: Algorithm,
        rows_of: Rows,
        shape: BatchSpec,
        seed: int,
        *,
        devices: Sequence[jax.Device] | None = None,
        shard: int = 1,
        capacity: int = 256,
        frozen: FrozenFeatures | None = None,
    ) -> None:
        self.algorithm, self.rows_of, self.shape, self.seed = algorithm, rows_of, shape, seed
        self.frozen = frozen
        if frozen is not None:
            batch = 4 * shape.batch_size * shape.sequence_length * frozen.embed
            capacity = min(capacity, max(1, MOST_FEATURES // batch))
        self.capacity = capacity
        devices = tuple(devices or jax.devices())
        check_shards(sum(d.process_index == jax.process_index() for d in devices), shard)
        self._programs = programs_of(algorithm.client_half, devices, shard)
        self._places = self._programs.places
        # Of lanes that consist of several devices, each has a program of its own (`sharding.py`).
        self._lane_programs = [
            programs_of(algorithm.client_half, lane.devices, shard)
            for lane in (self._places.alone if shard > 1 else ())
        ]
        self.lanes = self._places.lanes
        self._compared = False
        self.traces = 0  # how often the largest program had to be traced for this engine

    # ---- the two verbs -----------------------------------------------------------------

    def prepare(self, round: int, members: Members) -> Cohort:
        """Spread the cohort's batches over lanes and cut them into chunks, if they are packed."""
        if not self._packs:
            return Cohort(round, members)
        rows = [self.rows_of(member) for member in members]
        steps = [count_batches(len(r), self.shape) for r in rows]
        loads = [load_of(r, n, self.shape) for r, n in zip(rows, steps, strict=True)]
        plan = spread(steps, loads, self.lanes, self.capacity) if rows else []
        return Cohort(round, members, self._streams(round, members, rows, plan))

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Sum the updates of a cohort."""
        if not self._packs or not isinstance(starts, Start):
            return self._total_of_groups(starts, cohort)
        if cohort.batches is None:
            cohort = self.prepare(cohort.round, cohort.members)
        local = self.algorithm.local_of(cohort.round)
        lanes = self._begin(local, starts, cohort.round)
        for stream in cohort.batches:
            lanes = self._take(local, lanes, self._with_features(stream, cohort.members))
        if cohort.batches:
            self._compare(lanes, starts, cohort)
        upload = sum(payload_size.sizes(self.algorithm, starts.model, cohort, self.seed))
        total = self._from_all(self._programs.sum, lanes.state.total)
        return Gathered(total, upload, self._download_bytes(starts, cohort))

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Yield each member's update."""
        size_of = self._upload_sizes(starts, cohort)
        download = self.algorithm.download.encoded_bytes(model_like(starts))
        for places, lanes in self._groups(starts, cohort):
            for lane, place in enumerate(places):
                total, client_state = of_lane(lanes.state[1:], lane)  # the carry stays there
                update, upload = _only_member(total, client_state), size_of(lanes, lane, place)
                yield Arrived(int(cohort.members[place]), update, upload, download)
                del total, client_state, update  # nobody needs them while the next member trains
            del lanes

    def _total_of_groups(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Sum the updates of a cohort, one member per lane at a time."""
        size_of, upload = self._upload_sizes(starts, cohort), 0
        total = total_like(summed_like(self.algorithm, model_like(starts), cohort.round))
        remembered = []
        for places, lanes in self._groups(starts, cohort):
            total = tree.add(total, self._from_all(self._programs.sum, lanes.state.total))
            for lane, place in enumerate(places):
                remembered.append(of_lane(lanes.state.client_state, lane))
                upload += size_of(lanes, lane, place)
        if self.algorithm.remembers and remembered:
            rows = _stack(remembered)
            total = eqx.tree_at(lambda t: t.client_state, total, rows, is_leaf=lambda x: x is None)
        return Gathered(total, upload, self._download_bytes(starts, cohort))

    # ---- packing, on the host ------------------------------------------------------------

    @property
    def _packs(self) -> bool:
        """Return whether a sum can be made without looking at single members."""
        return self.algorithm.upload.fixed_size and not self.algorithm.remembers

    def _streams(self, round: int, members: Members, rows: list[Any], plan: Plan) -> list[Stream]:
        """Return the chunks of the plan for the lanes of this process."""
        plan = [[chunk[lane] for lane in self._places.mine] for chunk in plan]
        made, examples, keys = {}, {}, {}
        for place in {segment.place for chunk in plan for lane in chunk for segment in lane}:
            address = {"round": round, "member": members[place]}
            rng = generator_for(self.seed, "shuffle", **address)
            made[place] = batch_order(len(rows[place]), self.shape, rng)
            examples[place] = min(len(rows[place]), self.shape.max_examples or len(rows[place]))
            keys[place] = key_data(digest_for(self.seed, "upload", **address))
        return [self._fill(round, chunk, rows, made, examples, keys) for chunk in plan]

    def _fill(self, round: int, chunk: list[list[Segment]], rows, made, examples, keys) -> Stream:  # type: ignore[no-untyped-def]
        full = (len(chunk), self.capacity)
        batch = self.shape.batch_size
        stream = Stream(
            tokens=np.zeros((*full, batch, rows[0].shape[-1]), rows[0].dtype),
            starts=np.zeros(full, np.int32),
            stops=np.zeros(full, np.int32),
            opens=np.zeros(full, bool),
            closes=np.zeros(full, bool),
            examples=np.zeros(full, np.float32),
            keys=np.zeros((*full, 2), np.uint32),
            places=np.zeros(full, np.int32),
            segments=np.array([len(lane) for lane in chunk], np.int32),
            rate=np.full(len(chunk), self.algorithm.rate_of(round), np.float32),
            order=None if self.frozen is None else np.zeros((*full, batch), np.int32),
        )
        for lane, segments in enumerate(chunk):
            at = 0
            for slot, (place, first, last, opens, closes) in enumerate(segments):
                here = (lane, slot)
                order = made[place][first:last]
                stream.tokens[lane, at : at + last - first] = batches_of(rows[place], order)
                if stream.order is not None:
                    stream.order[lane, at : at + last - first] = order
                stream.starts[here], stream.stops[here] = at, at + last - first
                stream.opens[here], stream.closes[here] = opens, closes
                stream.examples[here], stream.keys[here] = examples[place], keys[place]
                stream.places[here] = place
                at += last - first
        return stream

    def _with_features(self, stream: Stream, members: Members) -> Stream:
        """Return a chunk with the features of its rows, if those of frozen blocks are kept."""
        if self.frozen is None:
            return stream
        *full, width = stream.tokens.shape
        features = np.zeros((*full, width - 1, self.frozen.embed), np.float32)
        at, wanted = [], []
        for lane, segments in enumerate(stream.segments):
            for slot in range(segments):
                at.append((lane, slice(stream.starts[lane, slot], stream.stops[lane, slot])))
                wanted.append((members[stream.places[lane, slot]], stream.order[at[-1]]))
        for place, found in zip(at, self.frozen.batches(wanted), strict=True):
            features[place] = found
        return stream._replace(order=None, features=features)

    def _one_each(self, rows: list[Any]) -> Plan:
        """Return the plan with one member per lane; lanes may stay empty."""
        queues = [[place] if place < len(rows) else [] for place in range(self.lanes)]
        steps = [count_batches(len(r), self.shape) for r in rows]
        return lay_out(queues, steps, self.capacity)

    # ---- lanes at work ---------------------------------------------------------------------

    def _begin(self, local: ClientMethod, start: Start, round: int) -> Lanes:
        """Return lanes that have done nothing yet, whose members all begin from one model."""
        shared = self._programs.share(local, start.model, self._keys(round))
        shared, clip_norm = self._to_all((shared, jnp.float32(start.clip_norm)))
        return Lanes(shared, clip_norm, self._programs.start(local, shared, self._base))

    def _begin_own(self, local: ClientMethod, starts: Sequence[Start], round: int) -> Lanes:
        """Return lanes that have done nothing yet, with one start for each."""
        models = self._put_lanes(_stack([start.model for start in starts]))
        shared, state = self._programs.start_own(local, models, self._base, self._keys(round))
        clip_norm = np.array([start.clip_norm for start in starts], np.float32)
        return Lanes(shared, self._put_lanes(clip_norm), state, own=True)

    @cached_property
    def _base(self) -> Params | None:
        """Return the frozen parameters, put once on every device."""
        return self._to_all(self.algorithm.base)

    def _keys(self, round: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
        return key_for(self.seed, "download", round=round), round_key(self.algorithm, round)

    def _take(self, local: ClientMethod, lanes: Lanes, stream: Stream) -> Lanes:
        """Return the lanes after one more chunk."""
        shared, clip_norm, state, own = lanes
        given = LaneInput((shared, clip_norm), self._base, self._to_lanes(stream))
        every = self._lane_programs or [self._programs]
        before = sum(programs.traces for programs in every)
        if self._lane_programs:
            state = self._each_lane(local, own, state, given, stream)
        else:
            state = self._programs.chunk(local, own, state, given)
        self.traces += sum(programs.traces for programs in every) - before
        return lanes._replace(state=state)

    def _each_lane(
        self, local: ClientMethod, own: bool, state: LaneState, given: LaneInput, stream: Stream
    ) -> LaneState:
        """Return the lanes after one more chunk, each of which runs its own program."""
        places, after = self._places, []
        # All views before the first program runs: it takes its lane's part of the state for itself.
        rows = [places.row_of(state, programs.places) for programs in self._lane_programs]
        for programs, row, segments in zip(self._lane_programs, rows, stream.segments, strict=True):
            lane = programs.places
            if segments:
                begun = (places.row_of if own else places.same_of)(given.begun, lane)
                base, batches = places.same_of(given.base, lane), places.row_of(given.stream, lane)
                row = programs.chunk(local, own, row, LaneInput(begun, base, batches))
            after.append(row)
        joined: LaneState = places.joined(after)
        return joined

    def _groups(self, starts: Starts, cohort: Cohort) -> Iterator[tuple[list[int], Lanes]]:
        """Train as many members at a time as there are lanes; yield their places, and the lanes."""
        if not multihost.alone():
            raise EngineError(
                "several processes give sums alone: train in one process where clients remember "
                "something between rounds, or where the size of an update's frame varies."
            )
        local, round = self.algorithm.local_of(cohort.round), cohort.round
        fresh = self._begin(local, starts, round) if isinstance(starts, Start) else None
        for first in range(0, len(cohort.members), self.lanes):
            group = cohort.members[first : first + self.lanes]
            places = list(range(first, first + len(group)))
            # A lane without a member begins like the first one, and trains on nothing.
            own = [start_of(starts, p) for p in places + [first] * (self.lanes - len(group))]
            if fresh is None:
                lanes = self._begin_own(local, own, round)
            else:
                lanes = fresh._replace(state=self._programs.start(local, fresh.shared, self._base))
            if own[0].client_state is not None:
                rows = self._put_lanes(_stack([s.client_state for s in own]))
                lanes = lanes._replace(state=lanes.state._replace(client_state=rows))
            text = [self.rows_of(member) for member in group]
            for stream in self._streams(round, group, text, self._one_each(text)):
                lanes = self._take(local, lanes, self._with_features(stream, group))
            yield places, lanes
            del lanes  # before the next group has its own

    # ---- bytes -----------------------------------------------------------------------------

    def _download_bytes(self, starts: Starts, cohort: Cohort) -> int:
        return len(cohort.members) * self.algorithm.download.encoded_bytes(model_like(starts))

    def _upload_sizes(self, starts: Starts, cohort: Cohort) -> Callable[[Lanes, int, int], int]:
        """Return a function from a lane and the place of its only member to its frame's size."""
        if self.algorithm.upload.fixed_size:
            model = model_like(starts)
            stated = list(payload_size.sizes(self.algorithm, model, cohort, self.seed))
            return lambda lanes, lane, place: stated[place]

        def made(lanes: Lanes, lane: int, place: int) -> int:
            member, before = cohort.members[place], start_of(starts, place).client_state
            held = len(self.rows_of(member))
            done = lanes.finished(lane, min(held, self.shape.max_examples or held), before)
            return self._made_size(done, cohort.round, member)

        return made

    def _made_size(self, done: Finished, round: int, member: int) -> int:
        """Encode a member's update, and return the size of the frame."""
        key = key_for(self.seed, "upload", round=round, member=member)
        local = self.algorithm.local_of(round)
        delta = self._programs.to_send(local, self.algorithm.base, done)
        return payload_size.really_sent(self.algorithm.upload, delta, done.carry.mask, key)

    def _compare(self, lanes: Lanes, start: Start, cohort: Cohort) -> None:
        """Encode the last member of the first lane, and check its size against the stated one."""
        codec = self.algorithm.upload
        # Plain numbers have one size: a look at the first cohort is enough.
        if not multihost.alone() or (codec.name == "float32" and self._compared):
            return
        stream = next((s for s in reversed(cohort.batches) if s.segments[0]), None)
        if stream is None:
            return
        self._compared = True
        slot = stream.segments[0] - 1
        place = int(stream.places[0, slot])
        one = Cohort(cohort.round, cohort.members[place : place + 1])
        done = lanes.finished(0, stream.examples[0, slot], None)
        made = self._made_size(done, cohort.round, one.members[0])
        (stated,) = payload_size.sizes(self.algorithm, start.model, one, self.seed)
        if made != stated:
            raise EngineError(
                f"a frame of member {one.members[0]} has {made} bytes and codec {codec.name} "
                f"states {stated}."
            )

    # ---- between this process and all ----------------------------------------------------

    def _to_all(self, params: Params) -> Params:
        """Copy parameters to every device of every process."""
        if multihost.alone():
            return jax.device_put(params, self._places.of_all(params))
        put, one = jax.make_array_from_process_local_data, self._places.of_all
        return jax.tree.map(lambda x: put(one(x), np.asarray(x), x.shape), params)

    def _put_lanes(self, rows: PyTree) -> PyTree:
        """Put arrays with a row per lane on the devices of the lanes."""
        return jax.device_put(rows, self._places.of_lanes(rows))

    def _to_lanes(self, stream: Stream) -> Stream:
        """Put the batches of this process's lanes on their devices."""
        if multihost.alone():
            return jax.device_put(stream, self._places.per_lane)
        put, lanes = jax.make_array_from_process_local_data, self.lanes
        return jax.tree.map(lambda x: put(self._places.per_lane, x, (lanes, *x.shape[1:])), stream)

    def _from_all(self, join: Any, total: Total) -> Total:
        """Sum the lanes of all processes, on one lane of this process.

        The server's step then runs there alone. If the sum stayed on every lane, each lane would
        run the step, and the second round would compile it again, for other devices.
        """
        if not multihost.alone():
            jax.block_until_ready(total)  # processes differ in speed; they join when all are done
            multihost.meet()
        summed: Total = self._places.on_first_lane(join(total))
        return summed


def _start_lane(local: ClientMethod, shared: Shared) -> LaneState:
    """Return a lane that has done nothing yet."""
    key = key_for(0, "upload")  # a lane begins with a member, and that one has its own
    client_state = None if local.init_memory is None else local.init_memory(shared)
    carry = local.init(shared, key, client_state, jnp.float32(1))  # that one has its own, too
    update = lifted(local, shared, local.finish(shared, carry, jnp.zeros(())))
    return LaneState(carry, total_like(update))


def _sum_lanes(total: Total) -> Total:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), total)


def _stack(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def _only_member(total: Total, client_state: PyTree) -> Update:
    """Return the update of the only member in a lane's sum."""
    share = np.float32(1.0) / total.weight if total.weight > 0 else np.float32(0.0)
    delta = jax.tree.map(lambda x: x * share, total.delta)
    mask = None if total.shares is None else (total.shares > 0).astype(np.float32)
    counts = (total.weight, total.nats, total.tokens, total.steps, total.refused, total.unclipped)
    return Update(delta, *counts, mask, client_state)
