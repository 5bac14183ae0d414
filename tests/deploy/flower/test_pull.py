"""A reply is pulled whole or not at all: by its size, and by who sent it."""

import json

import pytest
from flwr.app import Error
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id

from fedlm.core.errors import WireError
from fedlm.deploy.flower.records import MESSAGE_TYPES
from fedlm.engine.dispatch import Undelivered
from fedlm.engine.messages import Payload
from tests.deploy.flower.fake import FakeSuperLink

NODE = 77
REQUEST = Payload("train_request", {"round": 1})
REPLY = Payload("train_reply", {"round": 1}, (bytes(50_000), b"abc"))
assert REQUEST.kind in MESSAGE_TYPES


class Exchange:
    """A request to one node, and what it replied."""

    def __init__(self, content=REPLY, **reply):
        self.superlink = FakeSuperLink()
        self.transport = self.superlink.transport
        self.message_id = self.transport.send(NODE, REQUEST, 1)
        self.superlink.reply(self.message_id, content, **reply)

    @property
    def tree(self):
        return self.superlink.replies[self.message_id][1]

    @tree.setter
    def tree(self, tree):
        self.superlink.replies[self.message_id] = self.superlink.replies[self.message_id][0], tree

    def fetch(self, max_bytes=1 << 20):
        return self.transport.fetch(self.message_id, max_bytes)


def test_a_reply_arrives_as_it_was():
    exchange = Exchange()
    assert exchange.transport.fetch("another message", 1 << 20) is None
    assert exchange.fetch() == REPLY
    assert len(exchange.superlink.confirmed) == 1


def test_a_reply_that_is_too_large_is_not_pulled():
    exchange = Exchange()
    with pytest.raises(WireError, match="announces 50003 bytes: 40000 is the most"):
        exchange.fetch(max_bytes=40_000)
    assert exchange.superlink.pulled < 5_000 and len(exchange.superlink.confirmed) == 1


def swapped(exchange, kind, change):
    """An exchange whose objects of one kind say something else; names follow the bytes."""
    names, objects = {}, exchange.superlink.objects

    def rebuilt(tree):
        children = [rebuilt(child) for child in tree.children]
        content = objects[tree.object_id]
        for old, new in names.items():
            content = content.replace(old.encode(), new.encode())
        head, body = content.split(b"\x00", 1)
        if head.startswith(kind + b" "):
            body = change(body)
            head = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()])
        content = head + b"\x00" + body
        names[tree.object_id] = name = get_object_id(content)
        objects[name] = content
        return ObjectTree(object_id=name, children=children)

    exchange.tree = rebuilt(exchange.tree)
    return exchange


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
        (b"Array", lambda body: b"{", "not a Flower message"),
        (b"ArrayChunk", lambda body: body * 100, "more than 1048576 bytes"),
        (b"ArrayRecord", lambda body: b"[]", "not a Flower message"),
    ],
    ids=["short", "repeated", "negative", "word", "long", "broken", "fat", "another"],
)
def test_a_reply_that_lies_about_its_size_is_refused(kind, change, words):
    with pytest.raises(WireError, match=words):
        swapped(Exchange(), kind, change).fetch()


def test_objects_that_never_came_make_a_message_undelivered():
    exchange = Exchange()
    del exchange.superlink.objects[exchange.tree.object_id]
    with pytest.raises(Undelivered):
        exchange.fetch()


def test_a_tree_without_end_is_refused():
    exchange = Exchange()
    for _ in range(3):
        exchange.tree = ObjectTree(object_id=exchange.tree.object_id, children=[exchange.tree])
    with pytest.raises(WireError, match="nests its parts deeper"):
        exchange.fetch()


@pytest.mark.parametrize("inside, outside", [(78, 78), (78, NODE), (NODE, 78), (1, 1)])
def test_a_reply_of_another_node_is_refused(inside, outside):
    """Outside, inside, both, or as if the SuperLink itself had trained."""
    with pytest.raises(WireError, match="not asked"):
        Exchange(sender=inside, says=outside).fetch()


def test_a_reply_to_another_message_is_refused():
    with pytest.raises(WireError, match="another message"):
        Exchange(to="another").fetch()


GONE, CRASHED = (
    Error(code, "some reason")
    for code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED)
)


def test_only_the_superlink_tells_that_a_node_is_gone():
    with pytest.raises(Undelivered):
        Exchange(GONE, sender=1).fetch()
    with pytest.raises(WireError, match="the node failed: some reason"):
        Exchange(GONE).fetch()
    with pytest.raises(WireError, match="the node failed: some reason"):
        Exchange(CRASHED, sender=1).fetch()
