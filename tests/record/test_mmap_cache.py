"""Models that rest in files: the same values, and nothing is left behind."""

import gc
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from fedlm.core.errors import RecordError
from fedlm.federation.tree_round import rows_in_memory
from fedlm.record import mmap_cache
from fedlm.record.mmap_cache import Shelf

STATE = {
    "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
    "turned": np.arange(6, dtype=np.float16).reshape(2, 3).T,
    "count": np.int32(7),
    "key": np.arange(4, dtype=np.uint32),
    "none": np.zeros((0, 5), np.float32),
    "marks": np.array([True, False, True]),
}


def test_what_is_put_away_is_the_same_and_is_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shelf = Shelf()
    first, second = shelf.put(3, STATE), shelf.put(3, {"weights": STATE["weights"] + 1})
    for name, value in STATE.items():
        found = first[name]
        assert found.dtype == value.dtype and found.shape == np.shape(value)
        np.testing.assert_array_equal(found, value)
        assert not found.flags.writeable or not found.size
    np.testing.assert_array_equal(second["weights"], STATE["weights"] + 1)
    assert list(tmp_path.iterdir()) == [], "a file has no name that could be left behind"


def test_the_sum_with_a_change_is_that_of_whole_arrays_to_the_byte(monkeypatch):
    rng, shapes = np.random.default_rng(0), ((3, 50), (), (0, 2), (7,))
    start, change = (
        tuple(np.asarray(rng.normal(size=shape), np.float32) for shape in shapes) for _ in range(2)
    )
    for entries in (7, 1 << 16):
        monkeypatch.setattr(mmap_cache, "AT_A_TIME", entries)
        found = Shelf().put(1, start, change)
        for a, b, total in zip(start, change, found, strict=True):
            assert total.shape == a.shape and total.tobytes() == (a + b).tobytes()


def test_a_tree_without_arrays_stays():
    assert Shelf().put(0, {}) == {}


def test_no_room_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RecordError, match=r"node 5 .* Set TMPDIR .* federation\.resident to 0"):
        Shelf().put(5, STATE)
    with pytest.raises(RecordError, match=r"node 6 .* Set TMPDIR"):
        Shelf().put(6, STATE["weights"], STATE["weights"])


def test_rows_of_a_file_are_those_in_memory_and_zeros_after_them():
    given = [[np.arange(1, dtype=np.float32), np.full(3, 7, np.float32)], [np.ones(4, np.float32)]]
    found, wanted = (rows((3, 4), np.float32, given) for rows in (Shelf().rows, rows_in_memory))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found, [[0, 7, 7, 7], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert Shelf().rows((0, 4), np.float32, []).shape == (0, 4)


def test_no_room_for_rows_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RecordError, match=r"residuals could not .* Set TMPDIR"):
        Shelf().rows((1, 4), np.float32, [])


def test_a_place_is_used_again_when_the_last_array_of_a_tree_is_gone():
    shelf, size = Shelf(), mmap.ALLOCATIONGRANULARITY
    first, second = (shelf.put(n, {"x": np.full(9, n), "y": np.full(3, -n)}) for n in (1, 2))
    assert shelf._end == 2 * size
    held = first["y"][1:]  # a part of an array holds the whole tree
    del first
    third = shelf.put(3, {"x": np.full(9, 3)})
    assert shelf._end == 3 * size
    np.testing.assert_array_equal(held, [-1, -1])
    del held
    fourth = shelf.put(4, {"x": np.full(2, 4)})  # as many pages
    assert shelf._end == 3 * size
    found = [tree["x"][0] for tree in (second, third, fourth)]
    assert found == [2, 3, 4]


def test_rows_that_are_not_given_are_zero_in_a_place_that_was_used_before():
    shelf = Shelf()
    used = shelf.rows((4, 3), np.float32, [[np.ones(3, np.float32)]] * 4)
    assert used.sum() == 12
    del used
    again = shelf.rows((4, 3), np.float32, [[np.ones(3, np.float32)]])
    assert again.sum() == 3 and shelf._end == mmap.ALLOCATIONGRANULARITY


def test_an_array_that_jax_holds_keeps_its_place():
    """JAX may read aligned arrays of the host where they are, without a copy."""
    shelf = Shelf()
    held = [jax.device_put(shelf.put(n, {"x": np.full(4096, n)})["x"]) for n in range(4)]
    shelf.put(9, {"x": np.full(4096, 9)})
    assert [int(x[0]) for x in held] == [int(x[-1]) for x in held] == [0, 1, 2, 3]


def test_threads_share_a_shelf():
    shelf = Shelf()

    def work(n):
        return all((shelf.put(n, {"x": np.full(700, 50 * n + k)})["x"] == 50 * n + k).all()
                   for k in range(50))  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_the_file_is_closed_with_its_shelf():
    shelf = Shelf()
    kept = shelf.put(1, {"x": np.arange(5)})
    file = shelf._file
    del shelf
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)
    np.testing.assert_array_equal(kept["x"], np.arange(5))
