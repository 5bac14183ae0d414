"""Any state tree to disk and back.

In:       a tree of arrays and the number of the round it belongs to.
Out:      `round-000040.safetensors`, with a digest of everything in it.
Promise:  a checkpoint is either whole or not there, and only its owner can read it; the last few
          are kept; a damaged one is passed over for the one before, and that is said; a tree of
          another structure is refused by naming the leaf that differs.
Not here: when to save (`run.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedlm.core import tree
from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import SURPRISES, RecordError
from fedlm.core.types import PyTree, Say

_NAME = "round-{:06d}.safetensors"


class _OtherTree(RecordError):
    """An intact checkpoint of another structure; older checkpoints would not fit either."""


def _digest(arrays: dict[str, np.ndarray], facts: str) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def sweep(folder: Path) -> None:
    """Remove the files that killed writes left in a folder in which nobody else writes."""
    for stale in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            stale.unlink()


def to_bytes(state: PyTree, **facts: Any) -> bytes:
    """Return a tree as safetensors bytes, with its digest in the metadata."""
    # Not ascontiguousarray, which turns a scalar into a vector.
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in tree.named_leaves(state).items()}
    told = json.dumps(facts)
    # One entry: safetensors writes several entries in any order, and equal trees should give equal
    # files.
    metadata = {"fedlm": json.dumps({"digest": _digest(arrays, told), "facts": told})}
    return bytes(save_tensors(arrays, metadata))


class Saved(NamedTuple):
    """A tree from a file, and the facts that were written with it."""

    state: PyTree
    facts: JsonObject


def from_bytes(data: bytes, like: PyTree, where: str) -> PyTree:
    """Return the tree that `to_bytes` wrote; `like` gives structure, shapes and types."""
    return saved_in(data, like, where).state


def saved_in(data: bytes, like: PyTree, where: str) -> Saved:
    """Return the tree and the facts that `to_bytes` wrote."""
    arrays, facts = arrays_in(data, where)
    return Saved(_fit(arrays, like, where), facts)


def arrays_in(data: bytes, where: str) -> Saved:
    """Return the arrays by leaf name, and the facts, that `to_bytes` wrote."""
    try:
        size = int.from_bytes(data[:8], "little")
        arrays = load_tensors(data)
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fedlm"])
        digest, facts = str(told["digest"]), str(told["facts"])
        if digest != _digest(arrays, facts):
            raise ValueError("its digest does not match")
        found = json.loads(facts)
        if not isinstance(found, dict):
            raise ValueError("its facts are no object")
    except (SafetensorError, *SURPRISES) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecordError(f"{where} is damaged: {reason}.") from None
    return Saved(arrays, found)


def _fit(arrays: dict[str, np.ndarray], like: PyTree, where: str) -> PyTree:
    wanted = tree.named_leaves(like)
    for name in sorted(wanted.keys() ^ arrays.keys()):
        side = "lacks" if name in wanted else "has an unknown"
        raise _OtherTree(f"{where} {side} leaf {name!r}: it belongs to another recipe.")
    for name, leaf in wanted.items():
        found = arrays[name]
        grown = tuple(leaf.shape) == (0,) and found.ndim == 1  # empty at first: it grows in a run
        if not (grown or found.shape == tuple(leaf.shape)) or found.dtype != np.dtype(leaf.dtype):
            raise _OtherTree(
                f"{where}: leaf {name!r} is {found.dtype}{list(found.shape)}, this recipe wants "
                f"{np.dtype(leaf.dtype)}{list(leaf.shape)}."
            )
    return tree.with_leaves(like, tree.from_host(arrays))


def save(
    folder: Path, round: int, state: PyTree, keep: int = 3, facts: JsonMapping | None = None
) -> Path:
    """Write the checkpoint of a round and remove all but the newest `keep`.

    It holds the run's secret, so only its owner can read it. `facts` are read back with it.
    """
    path = folder / _NAME.format(round)
    try:
        data = to_bytes(state, **{**(facts or {}), "round": round})
        write_atomically(path, data, private=True)
        if folder.stat().st_mode & 0o077:  # an older version, or a copy, left it open
            folder.chmod(0o700)
    except RecordError as error:
        raise RecordError(
            f"{error} The checkpoint before it is whole: make room, then repeat with --resume."
        ) from None
    for old in newest_first(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the highest round first."""
    # By length first: round 1000000 has one digit more than the padded names.
    files = folder.glob("round-*.safetensors")
    return sorted(files, key=lambda path: (len(path.name), path.name), reverse=True)


def load_newest(folder: Path, like: PyTree, say: Say) -> Saved | None:
    """Return the newest intact checkpoint with its facts, or None if there never was one."""
    files = newest_first(folder)
    for path in files:
        try:
            return saved_in(_read(path), like, f"checkpoint {path}")
        except _OtherTree:
            raise
        except RecordError as error:
            say(f"{error} Going back to the checkpoint before it.")
    if files:
        raise RecordError(f"none of the {len(files)} checkpoints in {folder} is whole.")
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"checkpoint {path} is not readable: {error.strerror}.") from None
