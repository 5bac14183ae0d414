"""Sensitivity: how far one client can move what is released, over all rounds it may join.

In:       a tree or a matrix, the rounds that ran, and how clients may join.
Out:      the square of the L2 sensitivity, for contributions of at most length one.
Promise:  the largest value over every allowed placement of a client's participations; where the
          search would be too long, a value that is not below it, marked as not exact.
Not here: noise (`correlated.py`), epsilon (`cost.py`).

`min_separation` counts the rounds strictly between two participations: 0 allows neighbouring
rounds. The libraries below count the difference of the two indices, which is one more. A
`max_participations` of 0 is as many as the separation allows.

Proof sketch. A client joins the rounds of a placement S and contributes x_t of length at most one
in round t of S. Its squared sensitivity is the maximum, over S and x, of the squared length of the
difference between the two neighbouring runs before noise of equal variance is added.

Tree. Node v releases the sum of its block of rounds, so the client moves it by the sum of x_t over
S in v: at most n_v = |S in v|, with equality at every node at once if all x_t are one unit vector.
Only nodes whose blocks are complete are used, and estimates from them are post-processing. So the
squared sensitivity is the maximum over S of the sum of n_v^2 over complete nodes.
- Recursion: in a tree that holds c participations, the sum is c^2 plus the sums of its two halves.
  The halves share only the total c and the separation. For the right half, the separation depends
  only on the last participation in the left half.
- Exchange: of two placements with the same count and the same earliest allowed first round, one
  whose value is not lower and whose last participation is not later can replace the other, because
  every continuation of the other stays allowed. So `_tables` loses no maximum by keeping, for each
  count, value and first round, the earliest last participation. By induction over heights its
  tables are exact; `_best` joins the trees of the forest from the left by the same exchange.
- Bound: `_bound` maximises each height alone. A node of 2^d rounds holds at most ceil(2^d / apart)
  participations, apart = min_separation + 1, and a sum of squares with a given total is largest
  with as many full nodes as possible. The sum of these maxima is not below the maximum of the sum.
  It is exact if the closest placement reaches it; else it is used only where the tables would take
  too long, and marked as not exact.

Released tree. What goes out is not the nodes but running sums of least variance, one per round, and
that is less. After round t they show the estimate of the largest block that ends with t; its height
h is the number of trailing zeros of t. With b = X + z at a leaf, and b = (b_left + b_right) / 2 +
X + z above, where X is the block's sum and z fresh noise, the estimate is b times a constant, and
released are the b of all such blocks B, which are left halves or whole trees.
- Of the left half of B its own b_left is known exactly. Then 2 b - b_left = b_right + 2 X + 2 z is
  the right half's b with a shift and more noise. Its left half's b is released too, and so on down
  to the last round of B: there remains one number with the noise z_last + 2 z + 4 z + ..., of
  variance 1 + 4 + ... + 4^h = (4^(h+1) - 1) / 3, which no other block shares. A round of B moves it
  by 2^(h+1) - 2^(h-k), where k is how often the way down to it turns right before it turns left,
  and the last round of B by 2^(h+1) - 1.
- So the releases are a square matrix M of such rows, each over its standard deviation, plus
  independent noise of variance one. M is not negative, so equal unit vectors are the worst, as
  below. `of_released_tree` bounds the maximum over placements by branch and bound: rounds are put
  into cells, each pair of cells is charged with the largest entry of M^T M between them, cells are
  halved, and combinations are dropped whose charge is not above a placement that was found. Stopped
  at any cell size, the largest charge is an upper bound; at single rounds it is the maximum.

Matrix. The noise M^-1 Z on sums x is post-processing of M x + Z, so the client moves the release by
M x. With G = M^T M, |M x|^2 is the sum over s, t in S of G_st <x_s, x_t>.
- If no G_st is negative (up to rounding), each term is at most G_st, with equality for equal unit
  vectors, and trying every S gives the maximum: `tests/oracle.py` does, and the faster functions
  below are compared with it.
- `of_strategy`, with at most `apart` diagonals: columns of S do not overlap: G_st = 0 for s != t.
  The maximum is that of a sum of squared column lengths, which a dynamic programme finds.
- `of_strategy`, with more: M is Toeplitz (normalised columns are refused) with first column c, and
  over n rounds
  G_st = sum_(i < n - t) c_i c_(i + t - s) for s <= t. If c is non-negative and falling, G_st does
  not fall as t and t - s shrink. The j-th participation, counted from 0, is never before round
  j * apart, and the i-th and j-th are at least (j - i) * apart rounds from each other. So the
  placement 0, apart, 2 * apart, ... makes every term largest at once, and one more participation
  adds no negative term.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fedlm.core.late import late
from fedlm.privacy.strategy import Strategy, exact

library = late("jax_privacy.matrix_factorization.sensitivity")  # over a second
toeplitz = late("jax_privacy.matrix_factorization.toeplitz")  # over a second

# Array elements that the tree's dynamic programme may touch: a few seconds on one core. A row
# costs as much as ROW elements, however short it is.
WORK = 300_000_000
ROW = 1000
FAR = np.int32(2**30)
# Bounds of the search over a tree's releases: participations, rounds (a square matrix of them) and
# combinations of cells.
MOST_TURNS, MOST_ROUNDS, MOST_CELLS = 8, 2048, 400_000


class Squared(NamedTuple):
    """A squared sensitivity, and whether it is the maximum or a bound above it."""

    value: float
    exact: bool = True


def participations(rounds: int, min_separation: int, max_participations: int) -> int:
    """Return the largest number of rounds that a client can join."""
    fit = -(-rounds // (min_separation + 1))
    return min(fit, max_participations) if max_participations else fit


def of_strategy(
    chosen: Strategy, rounds: int, min_separation: int, max_participations: int
) -> float:
    """Return the exact squared sensitivity of the first `rounds` rounds of a matrix strategy.

    Columns that do not overlap at the separation are orthogonal, so their squared lengths add up
    and a one-dimensional dynamic programme finds the worst rounds. Otherwise the column must be
    non-negative and falling; then the worst placement is the earliest and closest one.
    """
    # Imported here: it costs over a second, which runs without such noise need not pay.
    apart, most = min_separation + 1, max_participations or None
    with exact():
        if len(chosen.coefficients) <= apart:
            squares = jnp.asarray(chosen.column_norms(rounds) ** 2)
            return float(library.max_participation_for_linear_fn(squares, apart, most))
        if chosen.normalized:
            raise ValueError("a normalised strategy must not be wider than the separation")
        column = jnp.asarray(chosen.coefficients)
        return float(toeplitz.minsep_sensitivity_squared(column, apart, most, n=rounds))


def of_restarted(
    chosen: Strategy, rounds: int, min_separation: int, max_participations: int
) -> Squared:
    """Return the squared sensitivity of a strategy that begins anew after its own rounds.

    The releases of two restarts have nothing in common, so squared lengths add up. If columns do
    not overlap at the separation, one dynamic programme over all rounds finds the worst. Otherwise
    the worst of every restart is taken, over all ways to divide the participations among them,
    whatever the rest between two restarts; that is a bound, and the maximum where the closest
    placement begins every restart.
    """
    apart, length = min_separation + 1, chosen.rounds
    if rounds <= length:
        return Squared(of_strategy(chosen, rounds, min_separation, max_participations))
    lengths = [length] * (rounds // length) + [rounds % length] * (rounds % length > 0)
    most = participations(rounds, min_separation, max_participations)
    if len(chosen.coefficients) <= apart:
        squares = np.concatenate([chosen.column_norms(part) ** 2 for part in lengths])
        with exact():
            found = library.max_participation_for_linear_fn(jnp.asarray(squares), apart, most)
        return Squared(float(found))
    tables = {
        part: [0.0, *(of_strategy(chosen, part, min_separation, c) for c in range(1, fit + 1))]
        for part, fit in ((part, participations(part, min_separation, most)) for part in lengths)
    }
    best = np.zeros(most + 1)  # by the number of participations so far, at most
    for part in lengths:
        table = tables[part]
        best = np.array(
            [
                max(best[n - c] + table[c] for c in range(min(n, len(table) - 1) + 1))
                for n in range(most + 1)
            ]
        )
    free = max_participations == 0 or most == participations(rounds, min_separation, 0)
    return Squared(float(best[-1]), exact=length % apart == 0 and free)


@functools.lru_cache(maxsize=4096)
def of_tree(
    rounds: int, min_separation: int, max_participations: int, *, restart_every: int = 0
) -> Squared:
    """Return the maximum over placements of the sum over complete nodes of (participations)^2.

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


@functools.lru_cache(maxsize=4096)
def of_released_tree(
    rounds: int, min_separation: int, max_participations: int, *, restart_every: int = 0
) -> Squared:
    """Return the squared sensitivity of the running sums that a tree releases.

    It is never above that of the tree's nodes, which is returned where the search would be long.
    """
    nodes = of_tree(rounds, min_separation, max_participations, restart_every=restart_every)
    most = participations(rounds, min_separation, max_participations)
    if most > MOST_TURNS or rounds > MOST_ROUNDS:
        return nodes._replace(exact=False)
    matrix = released_tree(rounds, restart_every)
    gram, found = matrix.T @ matrix, Squared(0.0)
    for count in range(most, 0, -1):  # fewer participations have more room
        found = _branch_and_bound(gram, min_separation + 1, count, found)
    return found if found.value <= nodes.value * (1 + 1e-9) else nodes._replace(exact=False)


def released_tree(rounds: int, restart_every: int = 0) -> Float[np.ndarray, "rounds rounds"]:
    """Return the matrix of a tree's releases: one row per round, over noise of variance one."""
    length = restart_every or rounds
    matrix = np.zeros((rounds, rounds))
    for row in range(rounds):
        since = row % length + 1
        height = (since & -since).bit_length() - 1
        left = 2 ** np.arange(height, -1, -1)  # rounds of the block from the k-th right half on
        weights = np.repeat(2.0 ** (height + 1) - left, np.append(left[:-1] // 2, 1))
        weights[-1] = 2.0 ** (height + 1) - 1
        block = slice(row + 1 - (1 << height), row + 1)
        matrix[row, block] = weights / np.sqrt((4.0 ** (height + 1) - 1) / 3)
    return matrix


def _branch_and_bound(
    gram: Float[np.ndarray, "rounds rounds"], apart: int, most: int, known: Squared
) -> Squared:
    """Bound the largest sum of a non-negative matrix over the pairs of `most` allowed rounds.

    The result is not below `known`, which stands for other numbers of rounds.
    """
    best = max(known.value, _climb(gram, apart, most))
    pools = [gram]  # by cell size: the largest entry between two cells
    while len(pools[-1]) > 2 * most + 8:
        odd = len(pools[-1]) % 2
        wide = np.pad(pools[-1], ((0, odd), (0, odd)))
        halves = [wide[i::2, j::2] for i in (0, 1) for j in (0, 1)]
        pools.append(np.maximum.reduce(halves))
    cells = np.zeros((1, 0), np.int32)
    for _ in range(most):
        longer = np.repeat(cells, len(pools[-1]), axis=0)
        last = np.tile(np.arange(len(pools[-1]), dtype=np.int32), len(cells))
        cells = _reachable(np.column_stack([longer, last]), 1 << (len(pools) - 1), apart, gram)
    for level in range(len(pools) - 1, -1, -1):
        pool = pools[level]
        charge = sum(pool[cells[:, i], cells[:, j]] for i in range(most) for j in range(most))
        cells = cells[charge > best * (1 + 1e-12)]
        top = max(float(np.max(charge, initial=0.0)), best)
        if len(cells) == 0:
            return Squared(best, known.exact or best > known.value)
        if level == 0:
            return Squared(top)
        if len(cells) << most > MOST_CELLS:
            return Squared(top, exact=False)
        halves_of = np.array(list(itertools.product((0, 1), repeat=most)), np.int32)
        split = (2 * cells[:, None] + halves_of).reshape(-1, most)
        cells = _reachable(split, 1 << (level - 1), apart, gram)
    raise AssertionError("the last level returns")


def _reachable(
    cells: Int[np.ndarray, "n most"], size: int, apart: int, gram: np.ndarray
) -> Int[np.ndarray, "m most"]:
    """Keep combinations of cells in which rounds can be far enough from each other."""
    good = (cells * size < len(gram)).all(axis=1)
    early = cells[:, 0] * size
    for i in range(1, cells.shape[1]):
        early = np.maximum(early + apart, cells[:, i] * size)
        good &= early < np.minimum((cells[:, i] + 1) * size, len(gram))
    return cells[good]


def _climb(gram: Float[np.ndarray, "rounds rounds"], apart: int, most: int) -> float:
    """Return the sum over the pairs of a good placement: each participation moved to its best."""
    rounds, best = len(gram), 0.0
    slack = rounds - 1 - (most - 1) * apart
    for start in np.linspace(0, slack, 24).astype(int):
        for placed in (start + np.arange(most) * apart, np.linspace(start, rounds - 1, most)):
            at, value = placed.astype(int), -1.0
            if (np.diff(at) < apart).any():
                continue
            while gram[np.ix_(at, at)].sum() > value + 1e-9:
                value = float(gram[np.ix_(at, at)].sum())
                for i in range(most):
                    low = at[i - 1] + apart if i else 0
                    high = at[i + 1] - apart if i + 1 < most else rounds - 1
                    free, rest = np.arange(low, high + 1), np.delete(at, i)
                    gain = gram[free, free] + 2 * gram[np.ix_(free, rest)].sum(axis=1)
                    at[i] = free[int(gain.argmax())]
            best = max(best, value)
    return best


def forest(rounds: int, restart_every: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the complete binary trees that cover `rounds` rounds, as (first round, height).

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


# By number of participations: the values that can be reached, in falling order, and for each value
# the earliest last participation, by the earliest round that the first one may take.
PlacementTable = dict[int, tuple[Int[np.ndarray, " values"], Int[np.ndarray, "values starts"]]]


@functools.lru_cache(maxsize=64)
def _tables(heights: int, apart: int, most: int) -> tuple[PlacementTable, ...]:
    """Return the placement table of a complete tree of each height."""
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
    """Share `count` participations between two halves in every way; also return the work done."""
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
    """Keep the values that no higher value reaches as early, and add this node's own `gain`."""
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
    """Return the maximum over placements in a row of complete trees, filled from the left."""
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
    """Return the sum over nodes of (participations inside)^2 for one placement."""
    inside = np.zeros(sum(1 << height for _, height in blocks), np.int64)
    inside[placed] = 1
    return sum(
        int((inside[start : start + (1 << height)].reshape(-1, 1 << d).sum(1) ** 2).sum())
        for start, height in blocks
        for d in range(height + 1)
    )


def _bound(blocks: list[tuple[int, int]], apart: int, most: int) -> int:
    """Return an upper bound: the sum over heights of the maximum that each height alone allows."""
    total = 0
    for height in range(max(h for _, h in blocks) + 1):
        nodes = sum(1 << (h - height) for _, h in blocks if h >= height)
        each = min(most, -(-(1 << height) // apart))
        full = min(nodes, most // each)
        total += full * each**2 + (most % each) ** 2 * (full < nodes)
    return total
