"""Models that are kept in a memory-mapped file while they are not in use.

In:       a number and a tree of arrays.
Out:      the same tree, its arrays mapped from a file.
Promise:  the values are the same to the bit, and stay while an array of the tree is held anywhere
          in this process; what is on the shelf costs address space, not memory. The file has no
          name any more when it is written to: it goes with the shelf and the last array.
Not here: when a model is put away (`federation/tree_round.py`), checkpoints (`checkpoint.py`).

A place in the file is used again when the last array of a tree is gone:

    put -> _take(size): a free place of that size, or a new one at the file's end
        -> owner: all bytes of the place; every array of the tree is a view of it
    the last view goes -> the owner goes -> the place is free

Pages of a new file cost far more than the bytes on them (126 MB written to a new file: 0.32 CPU
seconds, over old pages 0.015; docs/log.md), and trees put the same sizes away in every round.

Every place holds a file descriptor. After `os.fork` a child sees places being used again by its
parent: fedlm starts its workers anew instead.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import DTypeLike

from fedlm.core.errors import RecordError
from fedlm.core.types import PyTree

ALIGNED = 64  # bytes between the beginnings of two arrays are a multiple of it
AT_A_TIME = 1 << 16  # entries of a sum


class _Place(NamedTuple):
    """A part of the file, mapped to be read."""

    start: int
    mapped: mmap.mmap


class Shelf:
    """A file in the system's folder for temporary files, with a place for each tree put away."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._end = 0
        self._growing = threading.Lock()
        # By size. Places come back from any thread, even while this one takes one: a deque needs
        # no lock for that.
        self._free: defaultdict[int, deque[_Place]] = defaultdict(deque)

    def put(self, number: int, state: PyTree, change: PyTree | None = None) -> PyTree:
        """Write a tree to the file, and return it mapped from there.

        With `change`, the sum of both is written: it is never in memory whole.
        """
        leaves, structure = jax.tree.flatten(state)
        # Not ascontiguousarray, which turns a scalar into a vector.
        arrays = [np.asarray(leaf, order="C") for leaf in leaves]
        changes = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(change)]
        with _no_room(f"the model of node {number}"):
            arrays = self._mapped(arrays, changes)
        return jax.tree.unflatten(structure, arrays)

    def rows(
        self, shape: tuple[int, int], dtype: DTypeLike, given: Sequence[Sequence[np.ndarray]]
    ) -> np.ndarray:
        """Write the first rows of a matrix, each given in parts; return it mapped.

        Further rows are zero.
        """
        kind, (count, width) = np.dtype(dtype), shape
        if not count * width:
            return np.zeros(shape, kind)
        with _no_room("residuals"):
            assert len(given) <= count
            file, start, owner = self._take(count * width * kind.itemsize)
            empty = [[np.zeros(width, kind)]] * (count - len(given))
            for row, parts in enumerate((*given, *empty)):
                assert sum(part.size for part in parts) == width, f"row {row}"
                for part in parts:
                    part = np.asarray(part, kind, order="C")
                    _write(file, part, start)
                    start += part.nbytes
        return owner[: count * width * kind.itemsize].view(kind).reshape(shape)

    def _mapped(self, arrays: list[np.ndarray], changes: list[np.ndarray]) -> list[np.ndarray]:
        """Write arrays, each with its change if there are any, to one place; map them."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // ALIGNED) * ALIGNED
        if not end:
            return list(arrays)
        file, begin, owner = self._take(end)
        for number, (start, array) in enumerate(zip(starts, arrays, strict=True)):
            if changes:
                _write_sum(file, array, changes[number], begin + start)
            else:
                _write(file, array, begin + start)
        return [
            owner[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _take(self, size: int) -> tuple[int, int, np.ndarray]:
        """Return the file, where a place begins, and its bytes; it is free when those are gone."""
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            place = self._free[size].pop()
        except IndexError:
            place = self._grow(size)
        owner = np.frombuffer(place.mapped, np.uint8)
        weakref.finalize(owner, self._free[size].append, place).atexit = False
        assert self._file is not None
        return self._file, place.start, owner

    def _grow(self, size: int) -> _Place:
        """Add a place to the end of the file."""
        with self._growing:
            if self._file is None:
                file, name = tempfile.mkstemp(prefix="fedlm-node-")
                os.unlink(name)
                weakref.finalize(self, os.close, file)
                self._file = file
            start = self._end
            os.truncate(self._file, start + size)
            mapped = mmap.mmap(self._file, size, access=mmap.ACCESS_READ, offset=start)
            self._end += size
        return _Place(start, mapped)


@contextlib.contextmanager
def _no_room(what: str) -> Iterator[None]:
    """Turn an error of the disk into one sentence."""
    try:
        yield
    except OSError as error:
        way_out = (
            "Raise the limit of open files (ulimit -n)"
            if error.errno == errno.EMFILE
            else "Set TMPDIR to a folder with room"
        )
        raise RecordError(
            f"{what} could not be written to a temporary file: {error.strerror}. {way_out}, or set "
            "federation.resident to 0."
        ) from None


def _write_sum(file: int, array: np.ndarray, change: np.ndarray, start: int) -> None:
    """Write the sum of two arrays, in the type of the first; some entries at a time."""
    one, other = array.reshape(-1), change.reshape(-1)
    buffer = np.empty(min(one.size, AT_A_TIME), one.dtype)
    for first in range(0, one.size, AT_A_TIME):
        part = one[first : first + AT_A_TIME]
        total = np.add(part, other[first : first + AT_A_TIME], out=buffer[: part.size])
        _write(file, total, start + first * one.itemsize)


def _write(file: int, array: np.ndarray, start: int) -> None:
    left = array.reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(file, left, start)  # at most 2 GB at a time
        left, start = left[done:], start + done
