"""The guard before the server: who may come in."""

import asyncio

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node

from fedlm.deploy.flower.client import CONTROL_HEADER
from fedlm.deploy.flower.superlink import LARGEST_REQUEST, Guard

KEY = {CONTROL_HEADER: "secret"}


def status(path, headers=None, body=b""):
    sent, seen = [], []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def app(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    raw = [(k.encode(), str(v).encode()) for k, v in (headers or {}).items()]
    scope = {"type": "http", "path": path, "headers": raw}
    asyncio.run(Guard(app, "secret")(scope, receive, send))
    assert seen in ([], [body])  # behind the guard it is read as it was
    return sent[0]["status"]


@pytest.mark.parametrize(
    "path, headers, wanted",
    [
        ("/v1/fleet/pull-messages", {}, 200),
        ("/v1/fleet/push-object", {"content-length": LARGEST_REQUEST}, 200),
        ("/v1/fleet/push-object", {"content-length": LARGEST_REQUEST + 1}, 413),
        ("/v1/fleet/push-object", {"content-length": "many"}, 411),
        ("/v1/fleet/push-object", {"transfer-encoding": "chunked"}, 411),
        ("/v1/control/register-node", {}, 403),
        ("/v1/control/start-run", {CONTROL_HEADER: "guess"}, 403),
        ("/v1/control/start-run", KEY, 200),
        ("/v1/runtime/acquire-task", {}, 403),
        ("/v1/runtime/pull-messages", KEY, 200),
        ("/v1/fleet/../control/start-run", {}, 200),  # no such route behind the guard
        ("/docs", {}, 403),
    ],
)
def test_only_the_fleet_is_open_and_only_so_wide(path, headers, wanted):
    assert status(path, headers) == wanted


def pushed(node, *heads):
    request = PushMessagesRequest(node=Node(node_id=node))
    for sender, answers in heads:
        head = Metadata(src_node_id=sender, reply_to_message_id=answers)
        request.messages_list.append(ProtoMessage(metadata=head))
    return request.SerializeToString()


@pytest.mark.parametrize(
    "body, wanted",
    [
        (pushed(7, (7, "question")), 200),
        (pushed(7, (8, "question")), 403),  # for another node
        (pushed(7, (7, "question"), (8, "question")), 403),
        (pushed(7, (1, "")), 403),  # as if it were the server that asks
        (pushed(7, (7, "")), 403),
        (pushed(7), 403),
        (b"\xff\xff", 403),
    ],
    ids=["own", "other", "both", "server", "question", "nothing", "garbage"],
)
def test_a_node_answers_for_itself_alone(body, wanted):
    assert status("/v1/fleet/push-messages", {"content-length": len(body)}, body) == wanted
