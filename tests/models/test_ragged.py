"""Packed rows: every target has one column, and a stage is as wide as the rows that are left."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core.types import PAD
from fedlm.models.ragged import FEWEST_COLUMNS, enough, gather, pack, widths


def rows_of(lengths, seq):
    rows = np.full((len(lengths), seq), PAD)
    for row, length in enumerate(lengths):
        rows[row, :length] = 100 * (row + 1) + np.arange(length)
    return jnp.asarray(rows)


CASES = {
    "all full": [7] * 16,
    "all empty": [0] * 16,
    "one row": [0] * 9 + [5] + [0] * 6,
    "a staircase": list(range(8)) * 2,
    "few rows": [3, 0, 7],
    "no quarters": [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 2],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_every_target_has_exactly_one_column(lengths):
    targets = rows_of(lengths, 7)
    packing = pack(targets)
    found = np.asarray(gather(packing, targets))
    assert sorted(found[found != PAD]) == sorted(np.asarray(targets)[np.asarray(targets) != PAD])
    assert int(packing.size) == int(np.asarray(packing.used).sum())
    assert np.asarray(packing.used)[: int(packing.size)].all()


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_columns_follow_the_stages(lengths):
    """What the time loop assumes: width by width, step by step, the longest rows first."""
    targets = rows_of(lengths, 7)
    packing = pack(targets)
    column, begin = 0, 0
    order = np.argsort(-np.asarray(lengths), kind="stable")
    for width, end in zip(widths(len(lengths)), np.asarray(packing.ends), strict=True):
        for t in range(begin, int(end)):
            here = slice(column, column + width)
            np.testing.assert_array_equal(packing.time[here], t)
            np.testing.assert_array_equal(packing.row[here], order[:width])
            column += width
        begin = max(begin, int(end))
    assert column == int(packing.size)


def test_no_step_is_wider_than_it_needs_to_be():
    packing = pack(rows_of(CASES["a staircase"], 7))
    # 14, 12, 10, 8, 6, 4 and 2 rows are left at the seven steps.
    assert int(packing.size) == 16 + 12 + 12 + 8 + 8 + 4 + 4


def test_the_least_size_that_is_enough_is_computed():
    columns = FEWEST_COLUMNS * 2
    for used in (0, 1, columns // 8, columns // 8 + 1, columns):
        size = int(enough(jnp.int32(used), columns, lambda n: jnp.int32(n)))
        assert used <= size <= max(used, 1) + columns // 8
    assert enough(jnp.int32(1), 10, lambda n: n) == 10
