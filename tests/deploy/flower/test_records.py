"""Whatever is not facts and frames is refused, and nothing else is."""

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlm.core.errors import WireError
from fedlm.deploy.flower.records import from_records, to_records
from fedlm.engine.messages import Payload

FACTS = {"round": 3, "name": "x", "each": True, "norm": float("inf"), "none": [], "many": [1, 2]}


@pytest.mark.parametrize("frames", [(), (b"",), (b"one", b"two", b"one")])
def test_a_payload_comes_back_as_it_was(frames):
    payload = Payload("train_reply", FACTS, frames)
    found = from_records(to_records(payload))
    assert found == payload
    assert [type(v) for v in found.facts.values()] == [type(v) for v in FACTS.values()]


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
