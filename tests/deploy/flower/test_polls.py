"""A poll is answered when a message comes, not when the node asks the next time."""

import asyncio
import time

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest

from fedlm.deploy.flower.polls import HELD_HEADER, Polls, addressees

NORTH, SOUTH = 7, 8
LONG = 30.0  # seconds: a test that waits so long has failed


class Flower:
    """Answers polls at once, with what is there."""

    def __init__(self, status=200):
        self.messages, self.asked, self.status = [], 0, status

    async def __call__(self, scope, receive, send):
        self.asked += 1
        assert (await receive())["body"] == poll_of(NORTH)
        answer = PullMessagesResponse(messages_list=self.messages)
        self.messages = []
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": answer.SerializeToString()})


def poll_of(node):
    return PullMessagesRequest(node=Node(node_id=node)).SerializeToString()


def message_to(node):
    return Message(metadata=Metadata(dst_node_id=node, message_id="m"))


async def poll(polls, flower, hangs_up=None):
    """Return status, headers and messages of a poll by north; None if nothing was sent."""
    sent = []

    async def receive():
        await (hangs_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(part):
        sent.append(part)

    await polls.answer(flower, {}, poll_of(NORTH), receive, send)
    if not sent:
        return None
    found = PullMessagesResponse.FromString(sent[1]["body"]).messages_list
    return sent[0]["status"], dict(sent[0]["headers"]), len(found)


def test_a_message_that_is_there_is_answered_at_once():
    flower = Flower()
    flower.messages = [message_to(NORTH)]
    assert asyncio.run(poll(Polls(LONG), flower)) == (200, {}, 1)
    assert flower.asked == 1


def test_a_message_that_comes_ends_the_wait():
    async def both():
        polls, flower = Polls(LONG), Flower()
        waiting = asyncio.ensure_future(poll(polls, flower))
        await asyncio.sleep(0.05)
        flower.messages = [message_to(NORTH)]
        polls.wake([SOUTH])
        await asyncio.sleep(0.05)
        assert not waiting.done()  # what came was for another
        polls.wake([NORTH])
        return await asyncio.wait_for(waiting, LONG / 2), flower.asked, polls._waiting

    answer, asked, left = asyncio.run(both())
    assert answer == (200, {HELD_HEADER.encode(): b"1"}, 1)
    assert (asked, left) == (2, {})


def test_a_message_that_comes_while_flower_is_asked_is_not_missed():
    async def both():
        polls, flower = Polls(LONG), Flower()

        async def slow(scope, receive, send):
            first = flower.asked == 0
            await flower(scope, receive, send)
            if first:  # its answer, "nothing", is on the way
                flower.messages = [message_to(NORTH)]
                polls.wake([NORTH])

        return await asyncio.wait_for(poll(polls, slow), LONG / 2)

    assert asyncio.run(both())[2] == 1


def test_without_a_message_it_is_answered_in_the_end():
    flower = Flower()
    began = time.monotonic()
    assert asyncio.run(poll(Polls(0.1), flower)) == (200, {HELD_HEADER.encode(): b"1"}, 0)
    assert flower.asked == 1 and time.monotonic() - began >= 0.1


def test_flower_is_not_asked_again_before_a_message_comes():
    async def polled():
        polls, flower = Polls(0.01), Flower()
        told = [await poll(polls, flower) for _ in range(5)]
        asked = flower.asked
        flower.messages = [message_to(NORTH)]  # between two polls
        polls.wake([NORTH])
        return told, asked, await poll(polls, flower), await poll(polls, flower), flower.asked

    told, asked, with_message, after, in_all = asyncio.run(polled())
    assert told == [(200, {HELD_HEADER.encode(): b"1"}, 0)] * 5 and asked == 1
    assert with_message == (200, {}, 1)
    assert after[2] == 0 and in_all == 3


def test_flower_is_asked_again_after_a_while(monkeypatch):
    monkeypatch.setattr("fedlm.deploy.flower.polls.FRESH_SECONDS", 0.0)

    async def polled():
        polls, flower = Polls(0.01), Flower()
        return [await poll(polls, flower) for _ in range(3)], flower.asked

    assert asyncio.run(polled())[1] == 3


def test_a_node_that_hangs_up_takes_no_message_along():
    async def both():
        polls, flower, gone = Polls(LONG), Flower(), asyncio.Event()
        waiting = asyncio.ensure_future(poll(polls, flower, gone))
        await asyncio.sleep(0.05)
        gone.set()
        answer = await asyncio.wait_for(waiting, LONG / 2)
        flower.messages = [message_to(NORTH)]
        polls.wake([NORTH])
        return answer, flower

    answer, flower = asyncio.run(both())
    assert answer is None and flower.asked == 1 and flower.messages


@pytest.mark.parametrize("status", [401, 500])
def test_a_refusal_is_not_held(status):
    assert asyncio.run(poll(Polls(LONG), Flower(status)))[0] == status


def test_who_is_meant_is_read_from_the_request():
    request = PushAppMessagesRequest(messages_list=[message_to(NORTH), message_to(SOUTH)])
    assert addressees(request.SerializeToString()) == {NORTH, SOUTH}
    assert addressees(b"\xff\xff garbage") == set()
