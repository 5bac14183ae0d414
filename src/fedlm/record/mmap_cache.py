"""Models that are kept in memory-mapped files while they are not in use.

In:       a number and a tree of arrays.
Out:      the same tree, its arrays mapped from a file that is written like a checkpoint.
Promise:  the values are the same to the bit; what is on the shelf costs address space, not memory.
Not here: when a model is put away (`federation/tree_round.py`), checkpoints (`checkpoint.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np

from fedlm.core import tree
from fedlm.core.errors import RecordError
from fedlm.core.types import PyTree
from fedlm.record.checkpoint import to_bytes


class Shelf:
    """A temporary folder with one file per number, deleted together with the shelf."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fedlm-nodes-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def put(self, number: int, state: PyTree) -> PyTree:
        """Write a tree to its file, and return it mapped from there.

        Trees that an earlier `put` of the same number returned stay valid.
        """
        path = self._folder / f"{number}.safetensors"
        partial = path.with_suffix(".part")
        try:
            partial.write_bytes(to_bytes(state))
            os.replace(partial, path)
            return tree.with_leaves(state, mapped(path))
        except OSError as error:
            raise RecordError(
                f"{path} could not be written: {error.strerror}. Set TMPDIR to a folder with "
                "room, or federation.resident to 0."
            ) from None


def mapped(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a safetensors file without reading them."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        facts = json.loads(file.read(size))
    facts.pop("__metadata__", None)
    kinds = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "U32": np.uint32}
    found = {}
    for name, told in facts.items():
        kind, shape, (first, _) = kinds[told["dtype"]], tuple(told["shape"]), told["data_offsets"]
        whole = np.zeros(shape, kind)
        if whole.size:
            whole = np.asarray(np.memmap(path, kind, "r", 8 + size + first, shape))
        found[name] = whole
    return found
