"""Whatever does not have exactly the expected form is refused, and nothing else is."""

from dataclasses import replace

import pytest

from fedlm.core.errors import EngineError, WireError
from fedlm.engine.messages import (
    SUMS,
    Hello,
    Payload,
    Refused,
    TrainReply,
    TrainRequest,
    encode_hello,
    encode_hello_request,
    encode_refusal,
    encode_reply,
    encode_request,
    read_hello,
    read_reply,
    read_request,
    respond,
)

REQUEST = TrainRequest(
    run="0123456789abcdef" * 2,
    recipe="[run]\nseed = 1",
    round=3,
    first=10,
    population=40,
    text="abc",
    members=(11, 13),
    clip_norm=float("inf"),
    each=True,
    longest=10,
    frames=(b"parameters",),
)
SUM = dict.fromkeys(SUMS, 1.0)
PLACES = replace(REQUEST, numbers=(43, 41), frames=(b"one", b"other"))
REPLY = TrainReply(round=3, members=(11, 13), frames=(b"one", b"two"), sums=(SUM, SUM))


@pytest.mark.parametrize("asked", [REQUEST, PLACES])
def test_a_request_arrives_as_it_was(asked):
    assert read_request(encode_request(asked)) == asked


def test_a_reply_arrives_as_it_was():
    assert read_reply(encode_reply(REPLY), REQUEST) == REPLY


def test_a_sum_needs_one_frame():
    request = replace(REQUEST, each=False)
    reply = replace(REPLY, frames=(b"sum",), sums=(SUM,))
    assert read_reply(encode_reply(reply), request) == reply
    with pytest.raises(WireError, match="exactly 1 frames"):
        read_reply(encode_reply(REPLY), request)


def test_a_relay_may_speak_for_some_of_those_asked():
    reply = replace(REPLY, members=(13,), frames=(b"two",), sums=(SUM,))
    assert read_reply(encode_reply(reply), REQUEST).members == (13,)


def test_a_refusal_is_cut_and_cleaned():
    with pytest.raises(Refused) as refused:
        read_reply(encode_refusal("no\x1b[31m" + "x" * 5000), REQUEST)
    assert len(str(refused.value)) <= 1000 and "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    "reply",
    [
        replace(REPLY, round=2),
        replace(REPLY, members=(11, 14)),
        replace(REPLY, members=(13, 11)),
        replace(REPLY, members=()),
        replace(REPLY, sums=(SUM, {**SUM, "weight": float("nan")})),
        replace(REPLY, sums=(SUM, {**SUM, "weight": -1.0})),
        replace(REPLY, sums=(SUM, {**SUM, "nats": float("inf")})),
    ],
    ids=["round", "stranger", "order", "nobody", "nan", "negative", "infinite"],
)
def test_replies_to_something_else_are_refused(reply):
    with pytest.raises(WireError):
        read_reply(encode_reply(reply), REQUEST)


@pytest.mark.parametrize(
    "change",
    [
        {"clip_norm": 0.0},
        {"members": (9, 11)},
        {"members": (11, 40)},
        {"round": -1},
        {"round": 1 << 40},
        {"population": 1 << 50},
        {"counter": -1},
        {"clip_norm": float("nan")},
        {"run": "the first"},
        {"recipe": "#" * 70_000},
        {"longest": -1},
        {"longest": 1 << 60},
        {"frames": ()},
        {"frames": (b"one", b"other")},
        {"remembered": (0,)},
        {"remembered": (0, -2)},
        {"remembered": (0, 3)},  # in the round that is asked for
    ],
)
def test_requests_out_of_range_are_refused(change):
    with pytest.raises(WireError):
        read_request(encode_request(replace(REQUEST, **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": (43,), "frames": (b"one",)},
        {"numbers": (43, 41, 42), "frames": (b"one", b"other", b"third")},
        {"numbers": (43, 43)},
        {"numbers": (43, 39)},
        {"numbers": (43, 1 << 40)},
        {"frames": (b"one",)},
        {"each": False},
    ],
)
def test_requests_to_places_out_of_range_are_refused(change):
    with pytest.raises(WireError):
        read_request(encode_request(replace(PLACES, **change)))


@pytest.mark.parametrize(
    "change",
    [
        *({name: 1} for name in ("round", "first", "population", "longest")),
        {"run": "f" * 32},
        {"recipe": "[run]"},
        {"text": "xyz"},
        {"members": (11, 12)},
        {"clip_norm": 1.0},
        {"numbers": (41, 43)},
        {"frames": (b"other", b"one")},
    ],
)
def test_a_digest_covers_all_of_a_request(change):
    assert replace(PLACES, **change).digest != PLACES.digest
    assert read_request(encode_request(PLACES)).digest == PLACES.digest
    assert replace(PLACES, counter=7).digest == PLACES.digest  # it grows while one asks again


def test_a_frame_longer_than_any_can_be_is_refused():
    long = replace(REPLY, frames=(b"one", b"x" * 11))
    with pytest.raises(WireError, match="more than 10 bytes"):
        read_reply(encode_reply(long), REQUEST)


GOOD = encode_reply(REPLY)


def changed(**facts):
    return replace(GOOD, facts={**GOOD.facts, **facts})


@pytest.mark.parametrize(
    "payload",
    [
        Payload("", {}),
        replace(GOOD, kind="train_request"),
        replace(GOOD, facts={k: v for k, v in GOOD.facts.items() if k != "weight"}),
        changed(text="a secret"),
        changed(version=3),
        changed(version=4.0),
        changed(counter=-1),
        changed(counter=1 << 60),
        changed(round=3.0),
        changed(round=True),
        changed(weight=[1, 1]),
        changed(weight=[1.0]),
        changed(members=[11.0, 13.0]),
        replace(GOOD, frames=()),
        replace(encode_refusal("no"), frames=(b"hidden",)),
    ],
)
def test_payloads_of_another_form_are_refused(payload):
    with pytest.raises(WireError):
        read_reply(payload, REQUEST)


# ---- hello ---------------------------------------------------------------------------------

HELLO = Hello(3, "text", "tokenizer", "1.0")


def hello(**facts):
    good = encode_hello(HELLO)
    return replace(good, facts={**good.facts, **facts})


@pytest.mark.parametrize("said", [HELLO, HELLO._replace(leaves=(("a", 1), ("b/c", 2)))])
def test_a_hello_arrives_as_it_was(said):
    assert read_hello(encode_hello(said)) == said


@pytest.mark.parametrize(
    "told",
    [
        {"leaves": ["a"]},
        {"counts": [3]},
        {"leaves": ["a", "b"], "counts": [3]},
        {"leaves": ["a", "b"], "counts": [1, 1]},
        {"leaves": ["a", "a"], "counts": [1, 2]},
        {"leaves": ["a", "b"], "counts": [3, 0]},
        {"leaves": ["a", "b"], "counts": [4, -1]},
        {"leaves": ["a", "../b"], "counts": [1, 2]},
        {"leaves": ["a", ""], "counts": [1, 2]},
        {"leaves": ["a", "b" * 5000], "counts": [1, 2]},
        {"leaves": [1, 2], "counts": [1, 2]},
        {"leaves": ["a", "b"], "counts": [1.0, 2.0]},
        {"leaves": "ab", "counts": [1, 2]},
        {"clients": 0},
        {"clients": 1 << 50},
        {"clients": 3.0},
        {"tokenizer": "x" * 5000},
        {"name": "north"},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(told):
    with pytest.raises(WireError):
        read_hello(hello(**told))


# ---- a node's side -------------------------------------------------------------------------


def replied(payload, train=lambda request: REPLY):
    said = []
    return respond(payload, hello=lambda: HELLO, train=train, say=said.append), said


def test_a_node_replies_to_each_kind_of_request():
    assert read_hello(replied(encode_hello_request())[0]) == HELLO
    assert read_reply(replied(encode_request(REQUEST))[0], REQUEST) == REPLY


def test_what_goes_wrong_is_said_and_refused():
    def train(request):
        raise EngineError("no room.")

    reply, said = replied(encode_request(REQUEST), train)
    assert said == ["refused round 3: no room."]
    with pytest.raises(Refused, match="no room"):
        read_reply(reply, REQUEST)
    reply, said = replied(Payload("question", {"version": 2}))
    assert "version '2'" in said[0]
    with pytest.raises(Refused, match="the same fedlm"):
        read_hello(reply)
