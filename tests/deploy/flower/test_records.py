"""Whatever is not facts and frames is refused, and nothing else is."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

from fedlm.core.errors import WireError
from fedlm.deploy.flower.records import (
    Chunk,
    Sender,
    from_records,
    reply_message,
    request_message,
    to_records,
)
from fedlm.engine.messages import Payload

FACTS = {"round": 3, "name": "x", "each": True, "norm": float("inf"), "none": [], "many": [1, 2]}


@pytest.mark.parametrize("frames", [(), (b"",), (b"one", b"two", b"one")])
def test_a_payload_comes_back_as_it_was(frames):
    payload = Payload("train_reply", FACTS, frames)
    found = from_records(to_records(payload))
    assert found == payload
    assert [type(v) for v in found.facts.values()] == [type(v) for v in FACTS.values()]


@pytest.mark.parametrize("kind", ["request", "reply"])
def test_chunks_are_named_as_flower_names_them_and_not_copied(kind):
    frame = np.random.default_rng(0).bytes(12_000_000)
    message = request_message(Payload("train_request", FACTS, (frame,)), 7, 1, Sender(1, 1, 1))
    if kind == "reply":
        message = reply_message(Payload("train_reply", FACTS, (frame,)), message.metadata)
    chunks = [c for c in get_all_nested_objects(message).values() if isinstance(c, ArrayChunk)]
    assert len(chunks) == 3
    for chunk in chunks:
        assert isinstance(chunk, Chunk) and chunk.data.obj is frame
        assert chunk.head + bytes(chunk.data) == chunk.deflate()
        assert chunk.object_id == get_object_id(ArrayChunk(chunk.data).deflate())


def broken():
    good = to_records(Payload("train_reply", FACTS, (b"one", b"two")))
    facts, frames = good["train_reply"], good["frames"]
    yield RecordDict()
    yield RecordDict({"train_reply": facts})
    yield RecordDict({"frames": frames})
    yield RecordDict({"train_reply": facts, "frames": frames, "text": ConfigRecord({"a": "b"})})
    yield RecordDict({"train_reply": MetricRecord({"round": 3}), "frames": frames})
    yield RecordDict({"train_reply": ConfigRecord({"hidden": b"bytes"}), "frames": frames})
    yield RecordDict({"train_reply": ConfigRecord({"hidden": [b"bytes"]}), "frames": frames})
    yield RecordDict({"train_reply": facts, "frames": facts})
    yield RecordDict({"train_reply": facts, "frames": ArrayRecord({"1": frames["0"]})})
    pickled = Array("object", (3,), "numpy.ndarray", b"one")
    yield RecordDict({"train_reply": facts, "frames": ArrayRecord({"0": pickled})})
    short = Array("uint8", (9,), "fedlm.frame", b"one")
    yield RecordDict({"train_reply": facts, "frames": ArrayRecord({"0": short})})


@pytest.mark.parametrize("records", list(broken()))
def test_records_of_another_form_are_refused(records):
    with pytest.raises(WireError):
        from_records(records)
