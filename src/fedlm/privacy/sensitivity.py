"""Sensitivity: how far one client can move what is released, over all rounds it may join.

In:       a tree or a matrix, the rounds that ran, and how clients may join.
Out:      the square of the L2 sensitivity, for contributions of at most length one.
Promise:  the largest value over every allowed placement of a client's participations; where the
          search would be too long, a value that is not below it, marked as not exact.
Not here: noise (`correlated.py`), epsilon (`cost.py`).

`min_separation` counts the rounds strictly between two participations: 0 allows neighbouring
rounds. The libraries below count the difference of the two indices, which is one more. A
`max_participations` of 0 is as many as the separation allows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fedlm.privacy.strategy import Strategy, exact

# Array elements that the tree's dynamic programme may touch: a few seconds on one core. A row
# costs as much as ROW elements, however short it is.
WORK = 300_000_000
ROW = 1000
FAR = np.int32(2**30)


class Squared(NamedTuple):
    """A squared sensitivity, and whether it is the maximum or a bound above it."""

    value: float
    exact: bool = True


def participations(rounds: int, min_separation: int, max_participations: int) -> int:
    """How often a client can join."""
    fit = -(-rounds // (min_separation + 1))
    return min(fit, max_participations) if max_participations else fit


def of_strategy(
    chosen: Strategy, rounds: int, min_separation: int, max_participations: int
) -> float:
    """The first `rounds` rounds of a matrix strategy, exactly.

    Columns that do not overlap at the separation are orthogonal, so their squared lengths add up
    and the best choice of rounds is a one-dimensional programme. Otherwise the column must be
    non-negative and falling; then the worst placement is the earliest and closest one.
    """
    # Imported here: it costs over a second, which runs without such noise need not pay.
    from jax_privacy.matrix_factorization import sensitivity, toeplitz

    apart, most = min_separation + 1, max_participations or None
    with exact():
        if len(chosen.coefficients) <= apart:
            squares = jnp.asarray(chosen.column_norms(rounds) ** 2)
            return float(sensitivity.max_participation_for_linear_fn(squares, apart, most))
        if chosen.normalized:
            raise ValueError("a normalised strategy must not be wider than the separation")
        column = jnp.asarray(chosen.coefficients)
        return float(toeplitz.minsep_sensitivity_squared(column, apart, most, n=rounds))


def of_matrix(
    matrix: Float[np.ndarray, "out rounds"], min_separation: int, max_participations: int
) -> float:
    """Any matrix with no negative products of columns, by trying every placement: the definition.

    Its time grows exponentially; it is what the faster ways are tested against.
    """
    gram = matrix.T @ matrix
    if (gram < -1e-9).any():
        raise ValueError("columns with negative products need more than equal contributions")
    rounds = matrix.shape[1]
    most = participations(rounds, min_separation, max_participations)
    return max(
        float(gram[np.ix_(chosen, chosen)].sum())
        for count in range(1, most + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(b - a > min_separation for a, b in itertools.pairwise(chosen))
    )


@functools.lru_cache(maxsize=4096)
def of_tree(
    rounds: int, min_separation: int, max_participations: int, *, restart_every: int = 0
) -> Squared:
    """The maximum, over placements, of the sum over complete nodes of (participations inside)^2.

    A node counts if its block is complete after `rounds` rounds: only then is its noise used.
    """
    most, apart = participations(rounds, min_separation, max_participations), min_separation + 1
    blocks = list(forest(rounds, restart_every))
    bound = _bound(blocks, apart, most)
    if _value(blocks, range(0, rounds, apart)[:most]) == bound:
        return Squared(float(bound))
    try:
        tables = _tables(max(height for _, height in blocks) + 1, apart, most)
        return Squared(float(_best(blocks, tables, apart, most)))
    except _TooLong:
        return Squared(float(bound), exact=False)


def forest(rounds: int, restart_every: int = 0) -> Iterator[tuple[int, int]]:
    """The complete binary trees that `rounds` rounds leave behind, as (first round, height).

    >>> list(forest(6))
    [(0, 2), (4, 1)]
    >>> list(forest(6, restart_every=4))
    [(0, 2), (4, 1)]
    >>> list(forest(5, restart_every=3))
    [(0, 1), (2, 0), (3, 1)]
    """
    length = restart_every or rounds
    for start in range(0, rounds, length):
        left = min(length, rounds - start)
        while left:
            height = left.bit_length() - 1
            yield start, height
            start, left = start + (1 << height), left - (1 << height)


class _TooLong(Exception):
    """The programme would touch more than WORK elements."""


# For a number of participations: values that can be reached, falling, and for each the earliest
# last participation, by where the first one may be at the earliest.
PlacementTable = dict[int, tuple[Int[np.ndarray, " values"], Int[np.ndarray, "values starts"]]]


@functools.lru_cache(maxsize=64)
def _tables(heights: int, apart: int, most: int) -> tuple[PlacementTable, ...]:
    """What a complete tree of each height can hold."""
    one = np.array([[0, FAR]], np.int32)
    tables: list[PlacementTable] = [{1: (np.array([1]), one)}]
    work = 0
    for height in range(1, heights):
        half, below = 1 << (height - 1), tables[-1]
        table: PlacementTable = {}
        for count in range(1, min(most, -(-2 * half // apart)) + 1):
            found, cost = _join(below, count, half, apart)
            work += cost
            if work > WORK:
                raise _TooLong
            if found:
                table[count] = _frontier(found, count * count)
        tables.append(table)
    return tuple(tables)


def _join(
    below: PlacementTable, count: int, half: int, apart: int
) -> tuple[dict[int, Int[np.ndarray, " starts"]], int]:
    """Every way to share `count` participations between two halves, and how long it took."""
    found: dict[int, Int[np.ndarray, " starts"]] = {}
    nowhere = np.full(half, FAR, np.int32)

    def keep(value: int, last: Int[np.ndarray, " starts"]) -> None:
        found[value] = np.minimum(found[value], last) if value in found else last

    work = 0
    for value, last in zip(*below.get(count, ((), ())), strict=True):
        keep(int(value), np.concatenate([last[:half], nowhere, [FAR]]))  # all in the left half
        right = np.minimum(last + half, FAR)
        keep(int(value), np.concatenate([np.full(half, right[0]), right]))  # all in the right
    for left in range(1, count):
        if left not in below or count - left not in below:
            continue
        values, lasts = below[count - left]
        for value, last in zip(*below[left], strict=True):
            starts = np.clip(last[:half].astype(np.int64) + apart - half, 0, half)
            ends = np.minimum(lasts[:, starts] + half, FAR)
            work += ends.size + ROW * len(ends)
            for other, end in zip(values, ends, strict=True):
                keep(int(value + other), np.concatenate([end, nowhere, [FAR]]))
        if work > WORK:
            raise _TooLong
    return found, work


def _frontier(
    found: dict[int, Int[np.ndarray, " starts"]], gain: int
) -> tuple[Int[np.ndarray, " values"], Int[np.ndarray, "values starts"]]:
    """Only what no higher value reaches as early; every value raised by this node's own."""
    values, lasts = [], []
    best: Int[np.ndarray, " starts"] | None = None
    for value in sorted(found, reverse=True):
        last = found[value] if best is None else np.minimum(found[value], best)
        if (best is None and (last < FAR).any()) or (best is not None and (last < best).any()):
            values.append(value + gain)
            lasts.append(last)
            best = last
    return np.array(values), np.stack(lasts)


def _best(
    blocks: list[tuple[int, int]], tables: tuple[PlacementTable, ...], apart: int, most: int
) -> int:
    """The best sum over a row of complete trees, filled from the left."""
    states: dict[int, dict[int, int]] = {0: {0: -apart}}  # count -> value -> earliest last
    for start, height in blocks:
        size, table = 1 << height, tables[height]
        after = {count: dict(values) for count, values in states.items()}
        for count, values in states.items():
            for more, (gains, lasts) in table.items():
                if count + more > most:
                    continue
                into = after.setdefault(count + more, {})
                for value, last in values.items():
                    ends = lasts[:, min(max(last + apart - start, 0), size)]
                    for gain, end in zip(gains.tolist(), ends.tolist(), strict=True):
                        if end < FAR and start + end < into.get(value + gain, FAR):
                            into[value + gain] = start + end
        states = {count: _undominated(values) for count, values in after.items()}
    return max(value for values in states.values() for value in values)


def _undominated(values: dict[int, int]) -> dict[int, int]:
    kept: dict[int, int] = {}
    earliest = int(FAR)
    for value in sorted(values, reverse=True):
        if values[value] < earliest:
            kept[value] = earliest = values[value]
    return kept


def _value(blocks: list[tuple[int, int]], placed: range) -> int:
    """The sum over nodes for one placement."""
    inside = np.zeros(sum(1 << height for _, height in blocks), np.int64)
    inside[placed] = 1
    return sum(
        int((inside[start : start + (1 << height)].reshape(-1, 1 << d).sum(1) ** 2).sum())
        for start, height in blocks
        for d in range(height + 1)
    )


def _bound(blocks: list[tuple[int, int]], apart: int, most: int) -> int:
    """Every height filled as full as it can be, without asking whether heights agree."""
    total = 0
    for height in range(max(h for _, h in blocks) + 1):
        nodes = sum(1 << (h - height) for _, h in blocks if h >= height)
        each = min(most, -(-(1 << height) // apart))
        full = min(nodes, most // each)
        total += full * each**2 + (most % each) ** 2 * (full < nodes)
    return total
