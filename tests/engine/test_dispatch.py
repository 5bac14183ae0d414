"""Replies come in the order of the assignments; everything else is counted."""

import time

import pytest

from fedlm.core.errors import EngineError, WireError
from fedlm.engine import dispatch as dispatching
from fedlm.engine.dispatch import TRAINING, Dispatch, Presence, Quorum, RoundStats, Undelivered
from fedlm.engine.messages import (
    SUMS,
    TrainReply,
    TrainRequest,
    encode_refusal,
    encode_reply,
    read_request,
)

NAMES = ("a", "b", "c")


def request(member):
    return TrainRequest(
        run="0" * 32,
        recipe="",
        round=1,
        first=member,
        population=len(NAMES),
        text="",
        members=(member,),
        clip_norm=1.0,
        each=False,
        longest=100,
        frames=(b"parameters",),
    )


REQUESTS = {name: request(i) for i, name in enumerate(NAMES)}


def train(payload):
    asked = read_request(payload)
    sums = (dict.fromkeys(SUMS, 1.0),)
    return encode_reply(TrainReply(round=1, members=asked.members, frames=(b"x",), sums=sums))


class Nodes:
    """A transport to functions; a test changes who is there and what happens at each look."""

    def __init__(self, **replies):
        self.replies = {**dict.fromkeys(NAMES, train), **replies}
        self.away, self.since, self.sent, self.looks = set(), dict.fromkeys(NAMES, "1"), [], 0
        self.at_look = lambda look: None

    def send(self, node_id, payload, round):
        self.sent.append((NAMES[node_id], payload))
        return str(len(self.sent))

    def fetch(self, message_id, max_bytes):
        name, payload = self.sent[int(message_id) - 1]
        return None if name in self.away else self.replies[name](payload)

    def presence(self):
        self.looks += 1
        self.at_look(self.looks)
        return {n: Presence(i, n not in self.away, self.since[n]) for i, n in enumerate(NAMES)}

    @property
    def asked(self):
        return [name for name, _ in self.sent]


@pytest.fixture(autouse=True)
def look_always(monkeypatch):
    monkeypatch.setattr(dispatching, "PRESENCE_SECONDS", 0.0)


def answered(nodes, quorum=None, **options):
    """Who replied, in this order, and the count; `answered` is filled as the engine does."""
    stats, order = RoundStats(1), []
    made = Dispatch(nodes, quorum or Quorum(), REQUESTS, stats, exchange=TRAINING, **options)
    for name, _ in made.replies():
        stats.answered.append(name)
        order.append(name)
    made.check_quorum()
    return order, stats


def test_replies_come_in_the_order_of_the_assignments():
    nodes = Nodes()
    nodes.away.add("a")
    nodes.at_look = lambda look: nodes.away.clear() if look > 20 else None
    assert answered(nodes)[0] == list(NAMES)
    assert nodes.asked == ["b", "c", "a"]


def test_out_of_order_nobody_waits_for_who_was_away():
    nodes = Nodes()
    nodes.away.add("a")
    nodes.at_look = lambda look: nodes.away.clear() if look > 20 else None
    assert answered(nodes, in_order=False)[0] == ["b", "c", "a"]


def test_a_round_ends_without_who_is_away_if_enough_replied():
    nodes = Nodes()
    nodes.away.add("b")
    order, stats = answered(nodes, Quorum(quorum=0.5))
    assert order == ["a", "c"] and stats.away == ["b"] and stats.down_bytes == 20
    assert [stats.edges[name][1] for name in ("a", "c")] == [10, 10] and "b" not in stats.edges
    assert sum(up for up, _ in stats.edges.values()) == stats.up_bytes


def test_who_is_late_is_left_out_after_the_deadline():
    nodes = Nodes(a=lambda payload: None)
    order, stats = answered(nodes, Quorum(quorum=0.5, deadline=0.1))
    assert order == ["b", "c"] and stats.late == ["a"]


def test_refusals_and_garbage_are_told_apart():
    def broken(payload):
        raise WireError("no\x1b frame.")

    nodes = Nodes(a=lambda payload: encode_refusal("not allowed."), b=broken)
    order, stats = answered(nodes, Quorum(quorum=0.3))
    assert order == ["c"]
    assert stats.refused == {"a": "not allowed."} and stats.garbage == {"b": "no  frame."}
    with pytest.raises(EngineError, match=r"1 of 3 nodes answered, 2 must.*a refused: not allowed"):
        answered(nodes)


def test_garbage_alone_ends_no_round():
    """Whoever sends it could otherwise end any run."""

    def broken(payload):
        raise WireError("no frame.")

    order, stats = answered(Nodes(b=broken))
    assert order == ["a", "c"] and stats.garbage == {"b": "no frame."}
    assert answered(Nodes(a=broken, b=broken, c=broken))[0] == []


def test_who_is_there_and_never_answers_does_not_block_for_ever():
    nodes = Nodes(b=lambda payload: None)
    with pytest.raises(EngineError, match=r"2 of 3 nodes.*b did not answer within 0\.1 s"):
        answered(nodes, Quorum(deadline=0.1))


def test_who_was_away_at_the_deadline_has_one_of_its_own():
    """It is asked when it comes back, and not counted as silent at once."""
    nodes = Nodes()
    nodes.away.add("b")
    began = time.monotonic()
    nodes.at_look = lambda look: nodes.away.clear() if time.monotonic() - began > 0.2 else None
    assert answered(nodes, Quorum(deadline=0.1))[0] == list(NAMES)


def test_it_is_told_who_is_waited_for(monkeypatch):
    monkeypatch.setattr(dispatching, "FIRST_TOLD", 0.02)
    nodes, told = Nodes(b=lambda payload: None), []
    say = lambda names, seconds: told.append((list(names), round(seconds, 2)))  # noqa: E731
    with pytest.raises(EngineError):
        answered(nodes, Quorum(deadline=0.5), say=say)
    assert [names for names, _ in told] == [["b", "c"]] * len(told)
    assert 2 <= len(told) <= 5, "after twice as long each time"


def test_a_message_that_got_lost_is_sent_again():
    lost = []

    def forgetful(payload):
        if not lost:
            lost.append(payload)
            raise Undelivered
        return train(payload)

    nodes = Nodes(b=forgetful)
    order, stats = answered(nodes)
    assert order == list(NAMES) and stats.asked_again == ["b"]


def test_a_node_that_joined_again_is_asked_again():
    nodes = Nodes(a=lambda payload: None)

    def come_back(look):
        if look == 20:
            nodes.since["a"], nodes.replies["a"] = "2", train

    nodes.at_look = come_back
    order, stats = answered(nodes)
    assert order == list(NAMES) and stats.asked_again == ["a"]


def test_frames_are_encoded_as_they_are_sent():
    made = []

    def frames(names):
        for name in names:
            made.append(name)
            yield name, (name.encode(),)

    nodes = Nodes()
    answered(nodes, frames=frames)
    assert made == list(NAMES)
    assert [payload.frames for _, payload in nodes.sent] == [(b"a",), (b"b",), (b"c",)]
