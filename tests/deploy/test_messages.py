"""Whatever does not have exactly the expected form is refused, and nothing else is."""

from dataclasses import replace

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlm.core.errors import WireError
from fedlm.engine.messages import (
    SUMS,
    TrainReply,
    TrainRequest,
    ask,
    read_reply,
    read_request,
    tell,
)

QUESTION = TrainRequest(
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
PLACES = replace(QUESTION, numbers=(43, 41), frames=(b"one", b"other"))
ANSWER = TrainReply(round=3, members=(11, 13), frames=(b"one", b"two"), sums=(SUM, SUM))


@pytest.mark.parametrize("question", [QUESTION, PLACES])
def test_a_question_arrives_as_it_was(question):
    assert read_request(ask(question)) == question


def test_an_answer_arrives_as_it_was():
    assert read_reply(tell(ANSWER), QUESTION) == ANSWER


def test_a_sum_needs_one_frame():
    question = replace(QUESTION, each=False)
    answer = replace(ANSWER, frames=(b"sum",), sums=(SUM,))
    assert read_reply(tell(answer), question) == answer
    with pytest.raises(WireError, match="exactly 1 frames"):
        read_reply(tell(ANSWER), question)


def test_a_relay_may_speak_for_some_of_those_asked():
    answer = replace(ANSWER, members=(13,), frames=(b"two",), sums=(SUM,))
    assert read_reply(tell(answer), QUESTION).members == (13,)


def test_a_refusal_is_cut_and_cleaned():
    answer = TrainReply(round=3, members=(), refusal="no\x1b[31m" + "x" * 5000)
    read = read_reply(tell(answer), QUESTION)
    assert len(read.refusal) <= 1000 and "\x1b" not in read.refusal


@pytest.mark.parametrize(
    "answer",
    [
        replace(ANSWER, round=2),
        replace(ANSWER, members=(11, 14)),
        replace(ANSWER, members=(13, 11)),
        replace(ANSWER, members=()),
        replace(ANSWER, sums=(SUM, {**SUM, "weight": float("nan")})),
        replace(ANSWER, sums=(SUM, {**SUM, "weight": -1.0})),
        replace(ANSWER, sums=(SUM, {**SUM, "nats": float("inf")})),
    ],
    ids=["round", "stranger", "order", "nobody", "nan", "negative", "infinite"],
)
def test_answers_to_something_else_are_refused(answer):
    with pytest.raises(WireError):
        read_reply(tell(answer), QUESTION)


@pytest.mark.parametrize(
    "change",
    [
        {"clip_norm": 0.0},
        {"members": (9, 11)},
        {"members": (11, 40)},
        {"round": -1},
        {"recipe": "#" * 70_000},
        {"longest": -1},
        {"longest": 1 << 60},
        {"frames": ()},
        {"frames": (b"one", b"other")},
    ],
)
def test_questions_out_of_range_are_refused(change):
    with pytest.raises(WireError):
        read_request(ask(replace(QUESTION, **change)))


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
def test_questions_to_places_out_of_range_are_refused(change):
    with pytest.raises(WireError):
        read_request(ask(replace(PLACES, **change)))


@pytest.mark.parametrize(
    "change",
    [
        *({name: 1} for name in ("round", "first", "population", "longest")),
        {"recipe": "[run]"},
        {"text": "xyz"},
        {"members": (11, 12)},
        {"clip_norm": 1.0},
        {"numbers": (41, 43)},
        {"frames": (b"other", b"one")},
    ],
)
def test_a_digest_covers_all_of_a_question(change):
    assert replace(PLACES, **change).digest != PLACES.digest
    assert read_request(ask(PLACES)).digest == PLACES.digest


def test_a_frame_longer_than_any_can_be_is_refused():
    long = replace(ANSWER, frames=(b"one", b"x" * 11))
    with pytest.raises(WireError, match="more than 10 bytes"):
        read_reply(tell(long), QUESTION)


def broken():
    good = tell(ANSWER)
    facts, frames = good["answer"], good["frames"]
    yield RecordDict()
    yield RecordDict({"answer": facts})
    yield RecordDict({"answer": facts, "frames": frames, "text": ConfigRecord({"a": "b"})})
    yield RecordDict({"answer": MetricRecord({"round": 3}), "frames": frames})
    yield RecordDict({"answer": ConfigRecord({**facts, "version": 1}), "frames": frames})
    yield RecordDict({"answer": ConfigRecord({**facts, "round": 3.0}), "frames": frames})
    yield RecordDict({"answer": ConfigRecord({**facts, "round": True}), "frames": frames})
    yield RecordDict({"answer": ConfigRecord({**facts, "weight": [1, 1]}), "frames": frames})
    yield RecordDict({"answer": facts, "frames": ArrayRecord()})
    pickled = Array("object", (3,), "numpy.ndarray", b"one")
    yield RecordDict({"answer": facts, "frames": ArrayRecord({"0": pickled, "1": pickled})})
    short = Array("uint8", (9,), "fedlm.frame", b"one")
    yield RecordDict({"answer": facts, "frames": ArrayRecord({"0": short, "1": short})})


@pytest.mark.parametrize("records", list(broken()))
def test_records_of_another_form_are_refused(records):
    with pytest.raises(WireError):
        read_reply(records, QUESTION)
