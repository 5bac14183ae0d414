"""Packing of ragged clients' rows into batches, and of batches into even lanes.

In:       a client's rows; the `BatchSpec` of local work; a generator for the order.
Out:      batches, and a plan that spreads the batches of many members over lanes.
Promise:  every row appears once per epoch; padding is PAD and nothing else; the loads of two
          lanes differ by no more than the longest member.
Not here: rows (`corpus/rows.py`), the choice of members (`sampling.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from fedlm.core.types import PAD, BatchSpec, TokenRows

Batches = Integer[np.ndarray, "steps batch width"]
RowNumbers = Integer[np.ndarray, "steps batch"]
# What a step costs beside its targets, in targets: with ten of them it takes a ninth of what it
# takes with 320, at both shapes of `benchmarks/parts.py`.
STEP_COST = 30
MOST_SEEN = 256  # rows whose length is looked at, where a member may train on any number


def batch_order(count: int, shape: BatchSpec, rng: np.random.Generator) -> RowNumbers:
    """Choose the rows of each batch, by number, shuffled per epoch; PAD fills the last batch."""
    chosen = rng.permutation(count)[: shape.max_examples]
    order = [chosen]
    for _ in range(shape.epochs - 1):
        order.append(rng.permutation(chosen))
    steps = -(-len(chosen) // shape.batch_size)
    out = np.full((shape.epochs, steps * shape.batch_size), PAD)
    for epoch, take in enumerate(order):
        out[epoch, : len(take)] = take
    return out.reshape(shape.epochs * steps, shape.batch_size)[: shape.max_steps]


def batches_of(rows: TokenRows, order: RowNumbers) -> Batches:
    """Return the rows of each batch; a PAD row where there is none."""
    return np.where(order[..., None] == PAD, np.asarray(PAD, rows.dtype), rows[order])


def count_batches(rows: int, shape: BatchSpec) -> int:
    """Count the batches of a member with a number of rows.

    >>> count_batches(33, BatchSpec(batch_size=16, sequence_length=20, epochs=2))
    6
    """
    rows = min(rows, shape.max_examples or rows)
    steps = shape.epochs * -(-rows // shape.batch_size)
    return min(steps, shape.max_steps or steps)


def load_of(rows: TokenRows, steps: int, shape: BatchSpec) -> int:
    """Estimate what a member's batches cost, in targets, from the length of its first rows."""
    seen = rows[: shape.max_examples or MOST_SEEN]
    targets = np.count_nonzero(seen[:, 1:] != PAD) / max(1, len(seen))
    per_epoch = min(len(rows), shape.max_examples or len(rows))
    trained = min(steps * shape.batch_size, shape.epochs * per_epoch)
    return round(trained * targets) + steps * STEP_COST


class Segment(NamedTuple):
    """A run of one member's batches in one lane of one chunk."""

    place: int  # position in the cohort
    first: int  # the member's batches [first, last)
    last: int
    opens: bool  # the member begins here
    closes: bool  # the member ends here


Plan = list[list[list[Segment]]]


def spread(steps: Sequence[int], loads: Sequence[int], lanes: int, capacity: int) -> Plan:
    """Spread members, given batches and load of each, over lanes: a plan `[chunk][lane][segment]`.

    Members go to the least loaded lane, the heaviest first. A chunk holds at most `capacity`
    batches per lane; a member that does not fit goes on in the next chunk of its lane, so every
    chunk of a lane but its last is full and one compiled program serves all cohorts.
    """
    heap = [(0, lane) for lane in range(lanes)]
    queues: list[list[int]] = [[] for _ in range(lanes)]
    for place in sorted(range(len(steps)), key=lambda p: (-loads[p], p)):
        load, lane = heapq.heappop(heap)
        queues[lane].append(place)
        heapq.heappush(heap, (load + loads[place], lane))
    return lay_out(queues, steps, capacity)


def lay_out(queues: list[list[int]], steps: Sequence[int], capacity: int) -> Plan:
    """Return the plan in which each lane trains the members of its queue in order."""
    cuts = [_chunks(queue, steps, capacity) for queue in queues]
    longest = max(len(c) for c in cuts)
    return [[c[i] if i < len(c) else [] for c in cuts] for i in range(longest)]


def _chunks(queue: list[int], steps: Sequence[int], capacity: int) -> list[list[Segment]]:
    chunks: list[list[Segment]] = [[]]
    room = capacity
    for place in queue:
        first = 0
        while first < steps[place]:
            if room == 0:
                chunks.append([])
                room = capacity
            last = min(steps[place], first + room)
            chunks[-1].append(Segment(place, first, last, first == 0, last == steps[place]))
            room -= last - first
            first = last
    return chunks
