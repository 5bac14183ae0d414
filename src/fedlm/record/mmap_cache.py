"""Models that are kept in memory-mapped files while they are not in use.

In:       a number and a tree of arrays.
Out:      the same tree, its arrays mapped from a file.
Promise:  the values are the same to the bit; what is on the shelf costs address space, not memory.
          A file has no name any more when it is mapped: it goes with the last of its arrays.
Not here: when a model is put away (`federation/tree_round.py`), checkpoints (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from fedlm.core.errors import RecordError
from fedlm.core.types import PyTree

ALIGNED = 64  # bytes between the beginnings of two arrays are a multiple of it
AT_A_TIME = 1 << 16  # entries of a sum


class Shelf:
    """Files in the system's folder for temporary files, one for each tree that is put away."""

    def put(self, number: int, state: PyTree, change: PyTree | None = None) -> PyTree:
        """Write a tree to a file, and return it mapped from there.

        With `change`, the sum of both is written: it is never in memory whole.
        """
        leaves, structure = jax.tree.flatten(state)
        # Not ascontiguousarray, which turns a scalar into a vector.
        arrays = [np.asarray(leaf, order="C") for leaf in leaves]
        changes = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(change)]
        with _no_room(f"the model of node {number}"):
            arrays = _mapped(arrays, changes)
        return jax.tree.unflatten(structure, arrays)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return zeros that are mapped from a file, to be written to."""
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        with _no_room("residuals"), tempfile.TemporaryFile(prefix="fedlm-node-") as file:
            # Room is taken now: a full disk would end the process when a page is written.
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
            whole = np.memmap(file, dtype, "r+", shape=shape)
        return np.asarray(whole)


@contextlib.contextmanager
def _no_room(what: str) -> Iterator[None]:
    """Turn an error of the disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{what} could not be written to a temporary file: {error.strerror}. Set TMPDIR to a "
            "folder with room, or federation.resident to 0."
        ) from None


def _mapped(arrays: list[np.ndarray], changes: list[np.ndarray]) -> list[Any]:
    """Write arrays, each with its change if there are any, to a file without a name; map them."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    if not end:
        return list(arrays)
    with tempfile.TemporaryFile(prefix="fedlm-node-", buffering=0) as file:
        os.truncate(file.fileno(), end)
        for number, (start, array) in enumerate(zip(starts, arrays, strict=True)):
            if changes:
                _write_sum(file.fileno(), array, changes[number], start)
            else:
                _write(file.fileno(), array, start)
        whole = np.memmap(file, np.uint8, "r", shape=(end,))
    return [
        np.asarray(whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        for start, array in zip(starts, arrays, strict=True)
    ]


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
