"""Models that rest in files: the same values, and nothing is left behind."""

import tempfile

import numpy as np
import pytest

from fedlm.core.errors import RecordError
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


def test_zeros_of_a_file_are_zeros_that_can_be_written_to():
    found = Shelf().zeros((3, 4), np.float32)
    assert found.dtype == np.float32 and found.shape == (3, 4) and not found.any()
    found[1] = 2.0
    assert found.sum() == 8.0
    assert Shelf().zeros((0, 4), np.float32).shape == (0, 4)
