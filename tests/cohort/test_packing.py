import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.cohort.packing import batch_order, batches_of, count_batches, load_of, spread
from fedlm.core.types import PAD, BatchSpec

shapes = st.builds(
    BatchSpec,
    batch_size=st.integers(1, 5),
    sequence_length=st.just(3),
    epochs=st.integers(1, 3),
    max_examples=st.none() | st.integers(1, 20),
    max_steps=st.none() | st.integers(1, 12),
)


def batch_up(rows, shape, rng):
    """A member's batches, as engines make them."""
    return batches_of(rows, batch_order(len(rows), shape, rng))


def numbered_rows(count):
    """Rows that say who they are, in their first target."""
    rows = np.full((count, 4), 1, np.int16)
    rows[:, 1:] = np.arange(4, count + 4)[:, None]
    return rows


@given(st.integers(0, 20), shapes, st.integers(0, 99))
@settings(deadline=None)
def test_each_epoch_has_every_chosen_row_once_and_padding_only_fills(count, shape, seed):
    rows = numbered_rows(count)
    batches = batch_up(rows, shape, np.random.default_rng(seed))
    chosen = min(count, shape.max_examples or count)
    steps = -(-chosen // shape.batch_size)
    wanted = min(shape.epochs * steps, shape.max_steps or 10**9)
    assert batches.shape == (wanted, shape.batch_size, 4) and batches.dtype == rows.dtype
    epochs = [batches[e * steps : (e + 1) * steps].reshape(-1, 4) for e in range(shape.epochs)]
    seen = []
    for epoch in epochs:
        full = min(chosen, len(epoch))
        assert (epoch[full:] == PAD).all()
        np.testing.assert_array_equal(epoch[:full], rows[epoch[:full, 1] - 4])
        assert len(set(epoch[:full, 1])) == full
        seen.append(set(epoch[:full, 1].tolist()))
    assert all(s == seen[0] for s in seen if len(s) == chosen)


def test_the_order_is_new_each_epoch_and_decided_by_the_generator():
    rows, shape = numbered_rows(50), BatchSpec(batch_size=50, sequence_length=3, epochs=2)
    one, two, other = (batch_up(rows, shape, np.random.default_rng(s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(one, two)
    assert (one[0] != one[1]).any() and (one != other).any()
    assert (one[0] != rows).any()


def test_a_cap_on_examples_draws_them_from_all_rows():
    shape = BatchSpec(batch_size=5, sequence_length=3, max_examples=5)
    drawn = [batch_up(numbered_rows(10), shape, np.random.default_rng(s)) for s in range(50)]
    assert {int(t) - 4 for batches in drawn for t in batches[:, :, 1].ravel()} == set(range(10))


members = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 999)), max_size=20)


@given(members, st.integers(1, 5), st.integers(1, 12))
def test_spreading_runs_every_batch_once_in_order_in_one_lane(members, lanes, capacity):
    steps, loads = [n for n, _ in members], [load for _, load in members]
    plan = spread(steps, loads, lanes, capacity)
    ran = {place: [] for place in range(len(steps))}
    for lane in range(lanes):
        segments = [segment for chunk in plan for segment in chunk[lane]]
        mine = {s.place for s in segments}
        assert not any(ran[place] for place in mine)
        for s in segments:
            assert s.first < s.last
            assert s.opens == (s.first == 0) and s.closes == (s.last == steps[s.place])
            ran[s.place] += range(s.first, s.last)
        # A member is not interrupted: it opens only after the one before it has closed.
        assert [s.opens for s in segments[1:]] == [s.closes for s in segments[:-1]]
    assert [ran[place] for place in range(len(steps))] == [list(range(n)) for n in steps]


@given(members, st.integers(1, 5), st.integers(1, 12))
def test_spreading_is_even_and_fills_chunks(members, lanes, capacity):
    # A member without batches has no load.
    steps, loads = [n for n, _ in members], [load if n else 0 for n, load in members]
    plan = spread(steps, loads, lanes, capacity)
    batches = np.array([[sum(s.last - s.first for s in lane) for lane in chunk] for chunk in plan])
    assert batches.shape[1] == lanes
    assert batches.max() <= capacity
    assert batches.sum() == sum(steps)
    for lane, total in zip(batches.T, batches.sum(axis=0), strict=True):
        assert lane.tolist() == [
            min(capacity, max(0, total - capacity * c)) for c in range(len(plan))
        ]
    assert len(plan) == max(1, -(-int(batches.sum(axis=0).max()) // capacity))
    mine = [{s.place for chunk in plan for s in chunk[lane]} for lane in range(lanes)]
    total = [sum(loads[place] for place in places) for places in mine]
    assert sum(total) == sum(loads)
    # Heaviest first: not even the lightest member of the fullest lane would fit better elsewhere.
    lightest = min((loads[place] for place in mine[int(np.argmax(total))]), default=0)
    assert max(total) - min(total) <= lightest


def test_spreading_is_a_function_of_steps_and_loads():
    steps, loads = np.random.default_rng(0).integers(0, 9, (2, 40)).tolist()
    assert spread(steps, loads, 3, 7) == spread(steps, loads, 3, 7)


def test_lanes_are_even_in_targets_where_members_have_as_many_batches():
    """Four members of two batches each: two of long rows went into one lane."""
    shape = BatchSpec(batch_size=4, sequence_length=20, max_examples=8)
    rows = [np.full((12, 21), PAD, np.int16) for _ in range(4)]
    for each, length in zip(rows, (20, 3, 20, 3), strict=True):
        each[:, : length + 1] = 5
    steps = [count_batches(len(each), shape) for each in rows]
    loads = [load_of(each, n, shape) for each, n in zip(rows, steps, strict=True)]
    assert loads[0] - loads[1] == 8 * (20 - 3)
    plan = spread(steps, loads, 2, 100)
    assert all(len({s.place for s in lane} & {0, 2}) == 1 for lane in plan[0])


def test_no_rows_are_no_batches_and_no_work():
    rows = np.full((0, 7), PAD, np.int16)
    batches = batch_up(rows, BatchSpec(batch_size=3, sequence_length=5), np.random.default_rng(0))
    assert batches.shape == (0, 3, 7)
    assert spread([len(batches)], [0], 2, 4) == [[[], []]]
    assert load_of(rows, 0, BatchSpec(batch_size=3, sequence_length=5)) == 0
