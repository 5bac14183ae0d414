"""A message, sent object by object.

In:       a message; a way to announce it and to push its objects.
Out:      nothing but what the meeting point says of it.
Promise:  beside the message itself, memory holds one chunk of it; what the meeting point has
          already (a frame that goes to many nodes) is not sent again.
Not here: what a message holds (`messages.py`), how one is fetched (`fetching.py`).

Flower's own grid makes all chunks ready before it sends the first. Written for flwr 1.41.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

Announce = Callable[[Any, Any], tuple[Iterable[str], Callable[[str, bytes], None]]]
"""Takes a message's head and its tree of objects; which are wanted, and a way to push one."""


def push(message: Message, announce: Announce) -> None:
    """Announces a message, and pushes what is wanted of it."""
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        head = message_to_proto(remove_content_from_message(message))
        wanted, push_one = announce(head, get_object_tree(message))
        objects = get_all_nested_objects(message)
        for name in wanted:
            push_one(name, objects[name].deflate())


def send(grid: Any, message: Message) -> str:
    """Sends a message over a grid; its identity there, or nothing if it was not taken."""
    client, made = grid._runtime_client, ""

    def announce(head: Any, shape: Any) -> tuple[Iterable[str], Callable[[str, bytes], None]]:
        nonlocal made
        request = PushAppMessagesRequest(messages_list=[head], message_object_trees=[shape])
        said = client.PushMessages(request)
        made = said.message_ids[0] if said.message_ids else ""
        push_one = make_push_object_fn_protobuf(
            client.PushObject, grid.node, grid.run.run_id, said.session_id
        )
        return said.objects_to_push, push_one

    push(message, announce)
    return made
