"""An answer, fetched only if it is not larger than it may be and from whom it should be.

In:       a Flower grid, the message that was answered, its recipient, a number of bytes.
Out:      the answer, if there is one.
Promise:  what an answer holds is known from its heads before its chunks are fetched, and the bytes
          that came are counted: more than `most` are neither kept nor put together; a chunk that
          is named many times counts as often; who was not asked is not heard; memory holds the
          answer once, and a chunk.
Not here: what an answer means (`messages.py`), whom to wait for (`waiting.py`).

Flower keeps a message as a tree of objects, named by their hashes: a message, its records, their
arrays, and the chunks of those. Its grid fetches all of them, whatever their size, repeats a chunk
as often as an array says, and holds an array three times while it is put together. Written for
flwr 1.41.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flwr.app import Array, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
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

CHUNKS = 4  # how deep they are: message, records, record, array, chunk
LONGEST_HEAD = 256  # of a chunk, which has no children to name
PATIENCE_SECONDS = 60.0  # for the next object of an answer that its node has announced
LONGEST_NAP = 0.5


class Missing(Exception):
    """An answer whose parts never came."""


class TooLarge(Exception):
    """More bytes than there may be."""


def fetch(grid: Any, message_id: str, *, sender: int, most: int) -> Message | None:
    """The answer to a message; `WireError` if it is too large, or not of the node asked."""
    client, run_id = grid._runtime_client, grid.run.run_id
    found = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
    for answer, shape in zip(found.messages_list, found.message_object_trees, strict=True):
        if answer.metadata.reply_to_message_id != message_id:
            continue
        name = answer.metadata.message_id
        done = ConfirmMessageReceivedRequest(node=grid.node, run_id=run_id, message_object_id=name)
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
        try:
            outside = answer.metadata.src_node_id
            if outside not in (sender, SUPERLINK_NODE_ID):
                raise WireError("the answer is from a node that was not asked.")
            message = assemble(shape, pull, most)
            _check_inside(message, message_id, outside)
        except WireError:
            client.ConfirmMessageReceived(done)  # nobody will look at it again
            raise
        client.ConfirmMessageReceived(done)
        message.metadata.__dict__["_message_id"] = name
        return message
    return None


def _check_inside(message: Message, message_id: str, outside: int) -> None:
    """An answer says the same inside as outside; the link itself only tells of failures."""
    inside = message.metadata
    if inside.src_node_id != outside:
        raise WireError("the answer is from a node that was not asked.")
    if message.has_error() and outside != SUPERLINK_NODE_ID:
        raise WireError(f"the node failed: {str(message.error.reason)[:200]}")
    if not message.has_error() and outside == SUPERLINK_NODE_ID:
        raise WireError("the answer is from a node that was not asked.")
    if inside.reply_to_message_id != message_id:
        raise WireError("the answer is to another message.")


def assemble(shape: Any, pull: Callable[[str], bytes], most: int) -> Message:
    """The message of a tree of objects: heads first, then the chunks that they announce."""
    heads, chunks = _by_depth(shape)
    budget = Budget(pull, most)
    try:
        contents = {name: budget(name) for name in heads}
        with _read():
            announced = _arrays(contents)
        _check_size(sum(array.size for array in announced.values()), most)
        whole: dict[str, InflatableObject] = {
            name: _filled(array, chunks, budget) for name, array in announced.items()
        }
    except TooLarge:
        raise WireError(f"the message has more than {most} bytes.") from None
    except ObjectPullError as error:
        raise Missing(str(error)) from None
    with _read():
        made = inflate_object_from_contents(shape.object_id, contents, objects=whole)
    if not isinstance(made, Message):
        raise WireError("the message is no message.")
    return made


@contextmanager
def _read() -> Iterator[None]:
    """Whatever Flower makes of bytes that are none of its own, in one word."""
    try:
        yield
    except Exception as error:
        raise WireError(f"the message is no message: {str(error)[:200]}") from None


class Budget:
    """A way to pull objects, one after the other, until there are too many bytes.

    In this thread alone: a thread's freed memory is not given back for the next one to use.
    """

    def __init__(self, pull: Callable[[str], bytes], most: int) -> None:
        self.pull, self.left = pull, most

    def __call__(self, object_id: str) -> bytes:
        content = self._wait(object_id)
        self.left -= len(content)
        if self.left < 0:
            raise TooLarge
        return content

    def _wait(self, object_id: str) -> bytes:
        """An object, waited for while its sender is still pushing it."""
        nap, ends = 0.02, time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.pull(object_id)
            except ObjectUnavailableError:
                if time.monotonic() > ends:
                    raise Missing(object_id) from None
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)


def _by_depth(shape: Any) -> tuple[list[str], set[str]]:
    """The names of heads and of chunks, each once."""
    heads: dict[str, None] = {}
    level = [shape]
    for _ in range(CHUNKS):
        heads.update((part.object_id, None) for part in level)
        level = [child for part in level for child in part.children]
    if any(part.children for part in level):
        raise WireError("the message has parts of parts that no message has.")
    return list(heads), {part.object_id for part in level} - set(heads)


class Announced(NamedTuple):
    """What the head of an array says."""

    dtype: str
    size: int
    stype: str
    chunks: list[str]


def _arrays(contents: dict[str, bytes]) -> dict[str, Announced]:
    """The arrays among objects, by name."""
    found = {}
    for name, content in contents.items():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            facts = json.loads(get_object_body(content, Array))
            (size,) = facts["shape"]
            if type(size) is not int or size < 0:
                raise ValueError("an array has no size.")
            chunks = [children[i] for i in facts["arraychunk_ids"]]
            found[name] = Announced(facts["dtype"], size, facts["stype"], chunks)
    return found


def _filled(array: Announced, known: set[str], pull: Callable[[str], bytes]) -> Array:
    """An array, chunk after chunk; it is as long as it says."""
    made = io.BytesIO()  # hands out what it holds without a copy
    if 0 < array.size <= len(set(array.chunks)) * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE:
        made.seek(array.size - 1)
        made.write(b"\0")  # takes the place at once: growing would copy
        made.seek(0)
    for chunk in array.chunks:
        if chunk not in known or made.tell() > array.size:
            break
        content = memoryview(pull(chunk))
        made.write(content[bytes(content[:LONGEST_HEAD]).find(HEAD_BODY_DIVIDER) + 1 :])
    if made.tell() != array.size:
        raise WireError(f"the message announces {array.size} bytes and holds others.")
    with _read():
        return Array(array.dtype, (array.size,), array.stype, made.getvalue())


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise WireError(f"the message announces {size} bytes: {most} is the most.")
