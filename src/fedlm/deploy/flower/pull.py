"""Receive a Flower message object by object, and only if it is not too large.

In:       a message's tree of objects, a way to pull one, a number of bytes.
Out:      the message.
Promise:  the size of a message is known from its heads before its chunks are pulled, and the bytes
          that came are counted: more than `max_bytes` are neither kept nor put together; a chunk
          that is named many times counts as often; memory holds the message once, and one chunk.
Not here: who may send it (`transport.py`), what it means (`records.py`, `engine/messages.py`).

Flower keeps a message as a tree of objects, named by their hashes: a message, its records, their
arrays, and the chunks of those. Its grid pulls all of them, whatever their size, repeats a chunk
as often as an array says, and holds an array three times while it is put together. Written for
flwr 1.41, with the internals of its objects (`flwr.supercore.inflatable`); can go once
`Grid.pull_messages` takes a limit of bytes.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flwr.app import Array, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)

from fedlm.core.errors import WireError

CHUNK_DEPTH = 4  # message, records, record, array, chunk
LONGEST_CHUNK_HEAD = 256  # bytes: a chunk has no children to name
OBJECT_TIMEOUT = 60.0  # seconds to wait for the next object of an announced message
SHORTEST_NAP, LONGEST_NAP = 0.02, 0.5

PullObject = Callable[[str], bytes]


class Missing(Exception):
    """A message whose objects never came."""


class TooLarge(Exception):
    """More bytes than a message may have."""


def object_puller(verb: Callable[[Any], Any], node: Node, run_id: int) -> PullObject:
    """Return a function that pulls one object with the `PullObject` verb of a Flower client."""
    return make_pull_object_fn_protobuf(verb, node, run_id)


def assemble(tree: Any, pull: PullObject, max_bytes: int) -> Message:
    """Pull the message of a tree of objects: heads first, then the chunks they announce."""
    heads, chunks = _split_by_depth(tree)
    budget = Budget(pull, max_bytes)
    try:
        contents = {object_id: budget(object_id) for object_id in heads}
        with _as_wire_error():
            announced = _arrays(contents)
        _check_size(sum(array.size for array in announced.values()), max_bytes)
        filled: dict[str, InflatableObject] = {
            object_id: _fill(array, chunks, budget) for object_id, array in announced.items()
        }
    except TooLarge:
        raise WireError(f"the message has more than {max_bytes} bytes.") from None
    except ObjectPullError as error:
        raise Missing(str(error)) from None
    with _as_wire_error():
        message = inflate_object_from_contents(tree.object_id, contents, objects=filled)
    if not isinstance(message, Message):
        raise WireError("the bytes are not a Flower message.")
    return message


@contextmanager
def _as_wire_error() -> Iterator[None]:
    """Convert any Flower parse error to `WireError`."""
    try:
        yield
    except Exception as error:
        raise WireError(f"the bytes are not a Flower message: {str(error)[:200]}") from None


class Budget:
    """A limit on bytes under which objects are pulled one after the other.

    All objects are pulled in one thread, because memory freed by another thread is not reused.
    """

    def __init__(self, pull: PullObject, max_bytes: int) -> None:
        self.pull, self.left = pull, max_bytes

    def __call__(self, object_id: str) -> bytes:
        content = self._wait(object_id)
        self.left -= len(content)
        if self.left < 0:
            raise TooLarge
        return content

    def _wait(self, object_id: str) -> bytes:
        """Pull an object, waiting while its sender is still pushing it."""
        nap, ends = SHORTEST_NAP, time.monotonic() + OBJECT_TIMEOUT
        while True:
            try:
                return self.pull(object_id)
            except ObjectUnavailableError:
                if time.monotonic() > ends:
                    raise Missing(object_id) from None
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)


def _split_by_depth(tree: Any) -> tuple[list[str], set[str]]:
    """Return the ids of heads and the ids of chunks, without duplicates."""
    heads: dict[str, None] = {}
    level = [tree]
    for _ in range(CHUNK_DEPTH):
        heads.update((part.object_id, None) for part in level)
        level = [child for part in level for child in part.children]
    if any(part.children for part in level):
        raise WireError("the message nests its parts deeper than any message of fedlm.")
    return list(heads), {part.object_id for part in level} - set(heads)


class Announced(NamedTuple):
    """The facts in the head of an array."""

    dtype: str
    size: int  # bytes
    stype: str
    chunks: list[str]


def _arrays(contents: dict[str, bytes]) -> dict[str, Announced]:
    """Return the announced facts of the arrays among the objects, by id."""
    found = {}
    for object_id, content in contents.items():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            facts = json.loads(get_object_body(content, Array))
            (size,) = facts["shape"]
            if type(size) is not int or size < 0:
                raise ValueError("an array has no size.")
            chunks = [children[i] for i in facts["arraychunk_ids"]]
            found[object_id] = Announced(facts["dtype"], size, facts["stype"], chunks)
    return found


def _fill(array: Announced, known: set[str], pull: PullObject) -> Array:
    """Pull an array chunk by chunk, and check that it has the announced length."""
    made = io.BytesIO()  # returns its contents without a copy
    if 0 < array.size <= len(set(array.chunks)) * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE:
        made.seek(array.size - 1)
        made.write(b"\0")  # reserves the whole size at once: growing would copy
        made.seek(0)
    for chunk in array.chunks:
        if chunk not in known or made.tell() > array.size:
            break
        content = memoryview(pull(chunk))
        made.write(content[bytes(content[:LONGEST_CHUNK_HEAD]).find(HEAD_BODY_DIVIDER) + 1 :])
    if made.tell() != array.size:
        raise WireError(f"the message announces {array.size} bytes and holds others.")
    with _as_wire_error():
        return Array(array.dtype, (array.size,), array.stype, made.getvalue())


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise WireError(f"the message announces {size} bytes: {max_bytes} is the most.")
