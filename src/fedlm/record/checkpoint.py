"""Any state tree to disk and back.

In:       a tree of arrays and the number of the round it belongs to.
Out:      `round-000040.safetensors`, with a digest of everything in it.
Promise:  a checkpoint is either whole or not there; the last few are kept; a damaged one is
          passed over for the one before, and that is said; a tree of another structure is
          refused by naming the leaf that differs.
Not here: when to save (`run.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedlm.core import tree
from fedlm.core.errors import RecordError

_NAME = "round-{:06d}.safetensors"
Say = Callable[[str], None]


class _OtherTree(RecordError):
    """An intact checkpoint of another structure; older checkpoints would not fit either."""


def _digest(arrays: dict[str, np.ndarray], facts: str) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old file or the whole new one."""
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only disk refuses the removal too
            partial.unlink(missing_ok=True)
        raise RecordError(f"{path} could not be written: {error.strerror}.") from None


def _sync_folder(path: Path) -> None:
    """Flush a folder to disk: a new file name is not safe before that."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def to_bytes(state: Any, **facts: Any) -> bytes:
    """Return a tree as safetensors bytes, with its digest in the metadata."""
    # Not ascontiguousarray, which turns a scalar into a vector.
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in tree.named_leaves(state).items()}
    told = json.dumps(facts)
    # One entry: safetensors writes several entries in any order, and equal trees should give equal
    # files.
    metadata = {"fedlm": json.dumps({"digest": _digest(arrays, told), "facts": told})}
    return bytes(save_tensors(arrays, metadata))


def from_bytes(data: bytes, like: Any, where: str) -> Any:
    """Return the tree that `to_bytes` wrote; `like` gives structure, shapes and types."""
    return _fit(arrays_of(data, where), like, where)


def arrays_of(data: bytes, where: str) -> dict[str, np.ndarray]:
    """Return the arrays that `to_bytes` wrote, by leaf name."""
    return _read_all(data, where)[0]


def facts_of(data: bytes, where: str) -> dict[str, Any]:
    """Return the facts that `to_bytes` wrote beside the arrays."""
    return _read_all(data, where)[1]


def _read_all(data: bytes, where: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        size = int.from_bytes(data[:8], "little")
        arrays = load_tensors(data)
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fedlm"])
        digest, facts = str(told["digest"]), str(told["facts"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{where} is damaged: {error}.") from None
    if digest != _digest(arrays, facts):
        raise RecordError(f"{where} is damaged: its digest does not match.")
    return arrays, json.loads(facts)


def _fit(arrays: dict[str, np.ndarray], like: Any, where: str) -> Any:
    wanted = tree.named_leaves(like)
    for name in sorted(wanted.keys() ^ arrays.keys()):
        side = "lacks" if name in wanted else "has an unknown"
        raise _OtherTree(f"{where} {side} leaf {name!r}: it belongs to another recipe.")
    for name, leaf in wanted.items():
        found = arrays[name]
        if found.shape != tuple(leaf.shape) or found.dtype != np.dtype(leaf.dtype):
            raise _OtherTree(
                f"{where}: leaf {name!r} is {found.dtype}{list(found.shape)}, this recipe wants "
                f"{np.dtype(leaf.dtype)}{list(leaf.shape)}."
            )
    return tree.with_leaves(like, {name: jnp.asarray(array) for name, array in arrays.items()})


def save(folder: Path, round: int, state: Any, keep: int = 3) -> Path:
    """Write the checkpoint of a round and remove all but the newest `keep`."""
    path = folder / _NAME.format(round)
    try:
        write_atomically(path, to_bytes(state, round=round))
    except RecordError as error:
        raise RecordError(
            f"{error} The checkpoint before it is whole: make room, then repeat with --resume."
        ) from None
    for old in _newest_first(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def _newest_first(folder: Path) -> list[Path]:
    # By length first: round 1000000 has one digit more than the padded names.
    files = folder.glob("round-*.safetensors")
    return sorted(files, key=lambda path: (len(path.name), path.name), reverse=True)


def load_newest(folder: Path, like: Any, say: Say) -> Any | None:
    """Return the newest intact checkpoint, or None if there never was one."""
    files = _newest_first(folder)
    for path in files:
        try:
            return from_bytes(_read(path), like, f"checkpoint {path}")
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
