"""Packed rows: every target has one column, and a stage is as wide as the slots that are left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core.types import PAD
from fedlm.models import packing as packs
from fedlm.models.packing import FEWEST_COLUMNS, choices, enough, nats_of_enough, widths

pack = jax.jit(packs.pack, static_argnames=("alone", "full_rows"))
gather = jax.jit(packs.gather)


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
    "no pairs": [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 2],
    "three long rows": [7, 7, 7] + [1] * 13,
    "nearly full": [7] * 13 + [6, 3, 5],
}
KINDS = {"paired": {}, "alone if full": {"alone": True}, "full rows": {"full_rows": True}}
every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.sample(2)
@every
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_every_target_has_exactly_one_column(lengths, kind):
    targets = rows_of(lengths, 7)
    packing = pack(targets, **kind)
    found = np.asarray(gather(packing, targets))
    assert sorted(found[found != PAD]) == sorted(np.asarray(targets)[np.asarray(targets) != PAD])
    assert int(np.asarray(packing.used).sum()) == sum(lengths)
    assert not np.asarray(packing.used)[int(packing.size) :].any()


@every
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_columns_follow_the_stages(lengths, kind):
    """What the time loop assumes: in each slot whole rows follow each other, token by token."""
    packing = pack(rows_of(lengths, 7), **kind)
    row, time, used = (np.asarray(x) for x in (packing.row, packing.time, packing.used))
    column, begin = 0, 0
    wide = widths(len(lengths), **kind)
    slots = [[] for _ in range(wide[0])]
    for width, end in zip(wide, np.asarray(packing.ends), strict=True):
        for _ in range(begin, int(end)):
            for slot in range(width):
                slots[slot].append((row[column], time[column], used[column]))
                column += 1
        begin = max(begin, int(end))
    assert column == int(packing.size)
    for slot in slots:
        tokens = [(r, t) for r, t, u in slot if u]
        assert all(u for _, _, u in slot[: len(tokens)])  # what is not used comes last
        rows = list(dict.fromkeys(r for r, _ in tokens))
        assert len(rows) <= 2
        assert tokens == [(r, t) for r in rows for t in range(lengths[r])]


def test_the_longest_row_shares_a_slot_with_the_shortest():
    packing = pack(rows_of(CASES["a staircase"], 7))
    # Slots of 7 + 0, 7 + 0, 6 + 1, 6 + 1, and so on: all of them end together.
    assert int(packing.size) == 8 * 7 == sum(CASES["a staircase"])
    # 7 + 1 three times and 1 + 1 five times: eight slots for two steps, four for the other six.
    assert int(pack(rows_of(CASES["three long rows"], 7)).size) == 8 * 2 + 4 * 6


def test_rows_that_are_nearly_full_have_slots_to_themselves():
    """Then there are half as many time steps, and each is twice as wide."""
    for name in ("all full", "nearly full"):
        rows = rows_of(CASES[name], 7)
        assert np.asarray(pack(rows, True).ends)[-1] == 7
        assert np.asarray(pack(rows, False).ends)[-1] > 7
    ragged = rows_of(CASES["a staircase"], 7)
    np.testing.assert_array_equal(pack(ragged, True).ends[1:], pack(ragged, False).ends)
    assert int(pack(ragged, True).size) == int(pack(ragged, False).size)


def test_full_rows_have_slots_to_themselves_and_half_of_them_half_the_columns():
    whole, half = rows_of([7] * 16, 7), rows_of([7] * 8 + [0] * 8, 7)
    assert int(pack(whole, full_rows=True).size) == 16 * 7
    assert int(pack(half, full_rows=True).size) == 8 * 7
    assert int(pack(half, full_rows=True).ends[-1]) == 7


def test_the_least_size_that_is_enough_is_computed():
    columns = FEWEST_COLUMNS * 2
    for used in (0, 1, columns // 8, columns // 8 + 1, columns):
        size = int(enough(jnp.int32(used), choices(columns, 8), lambda n: jnp.int32(n)))
        assert used <= size <= max(used, 1) + columns // 8
    assert enough(jnp.int32(1), choices(10, 8), lambda n: n) == 10


def test_a_loss_of_enough_columns_has_the_gradient_of_the_whole():
    """In every size, scaled by what comes back; what is frozen gets none and costs none."""
    columns = FEWEST_COLUMNS
    batch = jnp.linspace(-1.0, 1.0, columns)
    model = {"trained": jnp.array([0.3, -0.5]), "frozen": jnp.array(2.0)}

    def plain(trained, used):
        x = jnp.where(jnp.arange(columns) < used, batch, 0.0)
        return 3 * jnp.sum(model["frozen"] * jnp.sin(trained[0] * x + trained[1] * x**2))

    def nats(n, model, x):
        a, b = model["trained"]
        return jnp.sum(model["frozen"] * jnp.sin(a * x[:n] + b * x[:n] ** 2))

    def fast(trained, used):
        x = jnp.where(jnp.arange(columns) < used, batch, 0.0)
        whole = model | {"trained": trained}
        return 3 * nats_of_enough(nats, choices(columns, 4), used, whole, x)

    compute, oracle = jax.jit(jax.value_and_grad(fast)), jax.jit(jax.value_and_grad(plain))
    for used in (0, 1, 32, 33, 100, columns):
        found, wanted = (f(model["trained"], used) for f in (compute, oracle))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.jit(fast)(model["trained"], used), wanted[0], rtol=1e-5)
