"""Objects of messages as files beside the SuperLink's database.

In:       Flower's objects, by their hashes, and the trees that name them.
Out:      the same objects; their sizes without reading them.
Promise:  what Flower's own store promises: an object is stored only if it was announced and has the
          hash that is its name; it is there whole or not at all, also after a crash; it is removed
          with the last message that names it. Trees are files too, so that messages on their way
          outlive the process; a file that a crash has damaged is an object that is not there.
Not here: who may push or pull an object (`superlink.py`, `exchange.py`).

Flower's store is tables of SQLite: a blob is written twice, to the log and to the pages, and
overwritten when it is deleted, and each object takes a dozen statements. Written for flwr 1.41
(`flwr.supercore.object_store`); can go once its store has files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    is_valid_sha256_hash,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from google.protobuf.message import DecodeError

TREE = ".tree"  # ends the name of a file that holds a run's number and a message's tree
RUN_BYTES = 8


@dataclass
class _Object:
    children: tuple[str, ...]
    size: int = 0  # bytes; 0 until it is there
    parents: int = 0
    runs: set[int] = field(default_factory=set)
    whole: bool = True  # False for a file from an earlier process that has not been read yet


class FileStore(ObjectStore):
    """Flower's store of objects, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Open a folder, and remove the files that no tree in it names."""
        self.folder = folder
        self._objects: dict[str, _Object] = {}
        self._lock = threading.RLock()
        self._offered = threading.local()
        folder.mkdir(mode=0o700, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
        for name in names:
            if name.endswith(TREE):
                self._load(folder / name)
        for name in names - self._objects.keys():
            if name.removesuffix(TREE) not in self._objects or not name.endswith(TREE):
                (folder / name).unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        """Load a message that an earlier process stored."""
        raw = path.read_bytes()
        try:
            tree = ObjectTree.FromString(raw[RUN_BYTES:])
            new = _checked(tree)
            if tree.object_id + TREE == path.name:
                self._register(int.from_bytes(raw[:RUN_BYTES], "big"), new)
        except (DecodeError, ValueError):
            return  # a crash has damaged it
        for name in new:
            with contextlib.suppress(FileNotFoundError):
                self._objects[name].size = (self.folder / name).stat().st_size
                self._objects[name].whole = False

    # ---- storing -----------------------------------------------------------------------

    @contextlib.contextmanager
    def offering(self, objects: Mapping[str, bytes | bytearray]) -> Iterator[None]:
        """Offer objects with checked hashes to the store calls of this thread inside the block."""
        self._offered.objects = objects
        try:
            yield
        finally:
            self._offered.objects = {}

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Announce the objects of a message; return those that are not there yet."""
        new = _checked(object_tree)
        offered: Mapping[str, bytes | bytearray] = getattr(self._offered, "objects", {})
        for name in new.keys() & offered.keys():  # before anything is changed
            _check_object(offered[name])
        with self._lock:
            missing = self._register(run_id, new)
            tree = run_id.to_bytes(RUN_BYTES, "big") + object_tree.SerializeToString()
            self._write(object_tree.object_id + TREE, tree)
            for name in missing:
                if name in offered:
                    self.put(name, offered[name])
        return [name for name in missing if name not in offered]

    def _register(self, run_id: int, new: Mapping[str, tuple[str, ...]]) -> list[str]:
        for name, children in new.items():  # before anything is changed
            known = self._objects.get(name)
            if known is not None and set(known.children) != set(children):
                raise ValueError(f"object {name} was announced with other children")
        for name, children in new.items():  # children come before their parents
            if name not in self._objects:
                self._objects[name] = _Object(children)
                for child in children:
                    self._objects[child].parents += 1
            self._objects[name].runs.add(run_id)
        return [name for name in new if not self._objects[name].size]

    def put(self, object_id: str, object_content: bytes | bytearray) -> None:
        """Store an object that was announced."""
        offered: Mapping[str, bytes | bytearray] = getattr(self._offered, "objects", {})
        if object_id not in offered and _hash(object_content) != object_id:
            raise ValueError(f"object {object_id} has another hash")
        _check_object(object_content)
        with self._lock:
            known = self._objects.get(object_id)
            if known is None:
                raise NoObjectInStoreError(f"object {object_id} was not announced")
            if not known.size:
                self._write(object_id, object_content)
                known.size, known.whole = len(object_content), True

    def _write(self, name: str, content: bytes | bytearray) -> None:
        made = self.folder / f"{name}.{secrets.token_hex(4)}"
        try:
            with open(made, "xb", opener=_private, buffering=0) as file:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
            os.replace(made, self.folder / name)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    # ---- reading -----------------------------------------------------------------------

    def get_object_tree(self, object_id: str) -> ObjectTree:
        """Return the tree of an object that was announced."""
        with self._lock:
            known = self._objects.get(object_id)
            if known is None:
                raise NoObjectInStoreError(f"object {object_id} was not announced")
            children = [self.get_object_tree(child) for child in known.children]
        return ObjectTree(object_id=object_id, children=children)

    def get(self, object_id: str) -> bytes | None:
        """Return an object; b"" if it was announced and did not come yet."""
        known = self._objects.get(object_id)
        if known is None or not known.size:
            return None if known is None else b""
        try:
            found = (self.folder / object_id).read_bytes()
        except FileNotFoundError:
            return None
        if not known.whole:
            if _hash(found) != object_id:
                return None
            known.whole = True
        return found

    def sizes(self, object_ids: Iterable[str]) -> dict[str, int]:
        """Return the sizes in bytes of announced objects, 0 for those that did not come yet."""
        known = ((name, self._objects.get(name)) for name in object_ids)
        return {name: entry.size for name, entry in known if entry is not None}

    # ---- deleting ----------------------------------------------------------------------

    def delete(self, object_id: str) -> None:
        """Delete an object, and what it alone names, unless something names it."""
        with self._lock:
            known = self._objects.get(object_id)
            if known is None or known.parents:
                return
            del self._objects[object_id]
            (self.folder / object_id).unlink(missing_ok=True)
            (self.folder / (object_id + TREE)).unlink(missing_ok=True)
            for child in known.children:
                self._objects[child].parents -= 1
                self.delete(child)

    def delete_objects_in_run(self, run_id: int) -> None:
        """Delete the messages of a run."""
        with self._lock:
            for name in [n for n, known in self._objects.items() if run_id in known.runs]:
                if name in self._objects:
                    self._objects[name].runs.discard(run_id)
                    self.delete(name)

    def clear(self) -> None:
        """Delete all objects."""
        with self._lock:
            for path in self.folder.iterdir():
                path.unlink(missing_ok=True)
            self._objects.clear()

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._objects

    def __len__(self) -> int:
        return len(self._objects)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hash(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_object(content: Any) -> None:
    try:
        validate_object_content(content=content)
    except UnexpectedObjectContentError as error:
        raise ValueError(str(error)) from None


def _checked(tree: ObjectTree) -> dict[str, tuple[str, ...]]:
    """Return the children of each object of a tree, children first, or raise `ValueError`."""
    found: dict[str, tuple[str, ...]] = {}
    for part in iterate_object_tree(tree):
        children = tuple(child.object_id for child in part.children)
        if not is_valid_sha256_hash(part.object_id):
            raise ValueError("the name of an object is no hash")
        if len(set(children)) != len(children):
            raise ValueError(f"object {part.object_id} names another one twice")
        if found.setdefault(part.object_id, children) != children or part.object_id in children:
            raise ValueError(f"object {part.object_id} is announced twice, with other children")
    return found


def with_files(app: Any, database: Path) -> FileStore:
    """Have Flower's application keep objects in files; call it before the first request."""
    factory = app.state.linkstate_factory
    store = FileStore(database.with_name(f"{database.name}.objects"))
    factory.objectstore_factory.store_instance = store
    factory.state()._object_store = store
    return store
