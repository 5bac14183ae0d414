"""Send a Flower message object by object.

In:       a message; a way to announce it and to push its objects.
Out:      nothing; what the server says of it goes to who announced it.
Promise:  beside the message itself, memory holds one chunk of it; an object that the server has
          already (a frame that goes to many nodes) is not sent again.
Not here: what a message holds (`records.py`), how one is received (`pull.py`).

Flower's own grid makes all chunks ready before it sends the first. Written for flwr 1.41, with the
internals of its objects (`flwr.supercore.inflatable`); can go once `Grid.push_messages` deflates
one object at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

PushObject = Callable[[str, bytes], None]
Announce = Callable[[Any, Any], tuple[Iterable[str], PushObject]]
"""A function of a message's head and its tree of objects. It returns the ids of the objects that
the server does not have yet, and a function that pushes one object."""


class NotTaken(Exception):
    """A message that the server gave up before all of it was there."""


def push(message: Message, announce: Announce) -> None:
    """Announce a message, then push the objects that the server does not have."""
    with no_object_id_recompute():
        head = message_to_proto(remove_content_from_message(message))
        head.metadata.message_id = message.object_id
        wanted, push_object = announce(head, get_object_tree(message))
        objects = get_all_nested_objects(message)
        for object_id in wanted:
            push_object(object_id, objects[object_id].deflate())


def object_pusher(verb: Callable[[Any], Any], node: Node, run_id: int, session: str) -> PushObject:
    """Return a function that pushes one object with the `PushObject` verb of a Flower client."""
    push_object = make_push_object_fn_protobuf(verb, node, run_id, session)

    def checked(object_id: str, content: bytes) -> None:
        try:
            push_object(object_id, content)
        except ObjectPushError as error:
            raise NotTaken(str(error)) from None

    return checked
