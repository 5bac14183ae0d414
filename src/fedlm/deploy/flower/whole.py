"""Send and receive a whole Flower message in few requests of many parts.

In:       a message and who announces it; the tree of a message and what came with it.
Out:      what the server says of it; a function that pulls its objects.
Promise:  a message is sent from the memory that holds it, without a copy; when one is received,
          memory holds a chunk beside it; large objects that the server has already are not sent
          again; an answer is refused before more of it is read than was allowed.
Not here: the connection (`line.py`), what the server does (`exchange.py`), requests for single
          objects, for servers that do not know these (`push.py`, `pull.py`).

Flower has a request for each object of a message. Written for flwr 1.41, with the internals of its
objects (`flwr.supercore.inflatable`) and its protobuf requests; can go once flwr sends and receives
several objects in one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from fedlm.core.errors import WireError
from fedlm.deploy.flower.line import Answer
from fedlm.deploy.flower.parcels import GONE, INLINE, Part, in_order
from fedlm.deploy.flower.push import NotTaken
from fedlm.deploy.flower.records import Chunk

BATCH = 16 << 20  # bytes of objects with which a request is full
ALWAYS = 1 << 16  # bytes up to which an object is sent though the server may have it
MOST_NAMES = 256  # objects that a request asks for

Post = Callable[[str, Sequence[Part], Sequence[str]], Answer]
"""A function of verb, parts and the hashes of parts that makes a request, and repeats it if the
connection is lost."""


class Pushed:
    """The large objects that were sent last: a frame for many nodes is sent once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def remember(self, names: set[str]) -> None:
        """Remember the objects of the message that was just sent."""
        self._names = names


def push_whole(
    message: Message,
    post: Post,
    announce: Callable[[Any, Any], bytes],
    read: Callable[[bytes], Any],
    of_session: Callable[[str], PushObjectRequest],
    pushed: Pushed,
) -> Any:
    """Push a message and return what the server says of it, or raise `NotTaken`.

    Args:
      message: the message.
      post: makes a request.
      announce: makes the request that announces a head and a tree of objects.
      read: reads the answer to that.
      of_session: makes the head of requests that push objects.
      pushed: what was pushed before.
    """
    with no_object_id_recompute():
        head = message_to_proto(remove_content_from_message(message))
        head.metadata.message_id = message.object_id
        tree, objects = get_object_tree(message), get_all_nested_objects(message)
        inline = dict(_inline(objects, pushed))
        first = announce(head, tree)
        answer = read(post("push", [first, *inline.values()], ["", *inline]).part())
        if answer.objects_to_push:
            about = of_session(answer.session_id).SerializeToString()
            for batch in _batches(objects, answer.objects_to_push):
                said = post("objects", [about, *batch.values()], ["", *batch]).part()
                if not PushObjectResponse.FromString(said).stored:
                    raise NotTaken(message.object_id)
        pushed.remember(set(objects))
    return answer


def _inline(objects: dict[str, Any], pushed: Pushed) -> Iterator[tuple[str, Part]]:
    """Yield objects that travel with their message: heads first, while they are small."""
    left = INLINE
    for name in reversed(objects):
        content = _content(objects[name])
        size = sum(map(len, content))
        if size > left:
            return
        if size <= ALWAYS or name not in pushed:
            left -= size
            yield name, content


def _batches(objects: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, Part]]:
    batch, size = dict[str, Part](), 0
    for name in names:
        if name not in objects:
            raise NotTaken(name)  # not for us to send
        content = _content(objects[name])
        batch[name], size = content, size + sum(map(len, content))
        if size >= BATCH:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _content(thing: Any) -> tuple[bytes | memoryview, ...]:
    """Return the pieces of an object as it is sent, without a copy of a chunk."""
    return (thing.head, thing.data) if isinstance(thing, Chunk) else (thing.deflate(),)


def given(answer: Answer) -> dict[str, bytes]:
    """Read the objects that came with a message, by name."""
    if sum(entry.length for entry in answer.left) > 2 * INLINE:
        raise WireError("the objects that came with a message are too large.")
    return {answer.left[0].sha256.hex(): answer.part() for _ in list(answer.left)}


class Puller:
    """Pulls the objects of a message in order, several in one request."""

    def __init__(
        self, post: Post, node: Node, run_id: int, tree: Any, given: dict[str, bytes]
    ) -> None:
        self._post, self._given = post, given
        self._head = PullObjectRequest(node=node, run_id=run_id).SerializeToString()
        self._names = [name for name in in_order([tree]) if name not in given]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._answer: Answer | None = None

    def __call__(self, object_id: str) -> bytes:
        """Return an object, or raise one of Flower's errors of objects."""
        if object_id in self._given:
            return self._given[object_id]
        for _ in range(2):  # a connection may break within an answer
            try:
                return self._read(object_id)
            except httpx.TransportError:
                self._answer = None
        return self._read(object_id)

    def _read(self, object_id: str) -> bytes:
        if self._answer is None or not _begins(self._answer, object_id):
            self._answer = None
            place = self._places.get(object_id)
            names = [object_id] if place is None else self._names[place : place + MOST_NAMES]
            answer = self._post("pull", [self._head, " ".join(names).encode()], ())
            if answer.part() == GONE:
                raise ObjectPullError(object_id, "the object could not be found.")
            if not answer.left:
                raise ObjectUnavailableError(object_id)
            if not _begins(answer, object_id):
                raise ObjectPullError(object_id, "another object came.")
            self._answer = answer
        return self._answer.part()


def _begins(answer: Answer, object_id: str) -> bool:
    return bool(answer.left) and answer.left[0].sha256.hex() == object_id
