"""An answer is fetched whole or not at all: by its size, and by who sent it."""

import json
from types import SimpleNamespace

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)

from fedlm.core.errors import WireError
from fedlm.deploy.flower.pull import Missing, fetch
from tests.deploy.local import TaskIdentity

NODE = 77


def records(sizes=(50_000, 3)):
    arrays = {str(i): Array("uint8", (n,), "fedlm.frame", bytes(n)) for i, n in enumerate(sizes)}
    return RecordDict({"answer": ConfigRecord({"round": 1}), "frames": ArrayRecord(arrays)})


class Grid:
    """What a meeting point holds: one answer, as objects; counts what is fetched of it."""

    node = Node(node_id=1)
    run = SimpleNamespace(run_id=1)

    def __init__(self, content, sender=NODE, said=None):
        TaskIdentity.node_id = 1
        asked = Message(RecordDict(), NODE, "train.fedlm", group_id="1")
        asked.metadata.__dict__["_message_id"] = self.asked = asked.object_id
        reply = Message(content, reply_to=asked)
        reply.metadata.__dict__["_src_node_id"] = sender
        self.tree = get_object_tree(reply)
        self.objects = {n: o.deflate() for n, o in get_all_nested_objects(reply).items()}
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.head = message_to_proto(remove_content_from_message(reply))
        if said is not None:
            self.head.metadata.src_node_id = said
        self.fetched, self.confirmed = 0, 0
        self._runtime_client = self

    def PullMessages(self, request):
        return PullAppMessagesResponse(messages_list=[self.head], message_object_trees=[self.tree])

    def PullObject(self, request):
        content = self.objects.get(request.object_id)
        self.fetched += len(content or b"")
        return PullObjectResponse(
            object_found=content is not None, object_available=True, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed += 1

    def get(self, most=1 << 20):
        return fetch(self, self.asked, sender=NODE, most=most)


def test_an_answer_arrives_as_it_was():
    grid = Grid(records())
    found = grid.get().content["frames"]
    assert [len(array.data) for array in found.values()] == [50_000, 3]
    assert grid.confirmed == 1
    assert fetch(grid, "another message", sender=NODE, most=1 << 20) is None


def test_an_answer_that_is_too_large_is_not_fetched():
    grid = Grid(records())
    with pytest.raises(WireError, match="announces 50003 bytes: 40000 is the most"):
        grid.get(most=40_000)
    assert grid.fetched < 5_000 and grid.confirmed == 1


def swapped(grid, kind, change):
    """A meeting point whose objects of one kind say something else; names follow the bytes."""
    names = {}

    def rebuilt(tree):
        children = [rebuilt(child) for child in tree.children]
        content = grid.objects[tree.object_id]
        for old, new in names.items():
            content = content.replace(old.encode(), new.encode())
        head, body = content.split(b"\x00", 1)
        if head.startswith(kind + b" "):
            body = change(body)
            head = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()])
        content = head + b"\x00" + body
        names[tree.object_id] = name = get_object_id(content)
        grid.objects[name] = content
        return ObjectTree(object_id=name, children=children)

    grid.tree = rebuilt(grid.tree)
    return grid


def array_says(**facts):
    return lambda body: json.dumps({**json.loads(body), **facts}).encode()


@pytest.mark.parametrize(
    "kind, change, words",
    [
        (b"Array", array_says(shape=[10]), "announces 10 bytes and holds"),
        (b"Array", array_says(arraychunk_ids=[0] * 10_000), "holds"),
        (b"Array", array_says(shape=[-1]), "no size"),
        (b"Array", array_says(shape="x"), "no size"),
        (b"Array", array_says(shape=[1 << 19]), "announces 524288 bytes and holds"),
        (b"Array", lambda body: b"{", "no message"),
        (b"ArrayChunk", lambda body: body * 100, "more than 1048576 bytes"),
        (b"ArrayRecord", lambda body: b"[]", "no message"),
    ],
    ids=["short", "repeated", "negative", "word", "long", "broken", "fat", "another"],
)
def test_an_answer_that_lies_about_its_size_is_refused(kind, change, words):
    grid = swapped(Grid(records()), kind, change)
    with pytest.raises(WireError, match=words):
        grid.get()


def test_parts_that_never_came_are_missing():
    grid = Grid(records())
    del grid.objects[grid.tree.object_id]
    with pytest.raises(Missing):
        grid.get()


def test_a_tree_without_end_is_refused():
    grid = Grid(records())
    for _ in range(3):
        grid.tree = ObjectTree(object_id=grid.tree.object_id, children=[grid.tree])
    with pytest.raises(WireError, match="parts of parts"):
        grid.get()


@pytest.mark.parametrize("sender, said", [(78, None), (78, NODE), (NODE, 78)])
def test_an_answer_of_another_node_is_refused(sender, said):
    """Outside, unclipped, or both."""
    with pytest.raises(WireError, match="not asked"):
        Grid(records(), sender, said).get()
