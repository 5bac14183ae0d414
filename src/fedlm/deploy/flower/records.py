"""Payloads as Flower messages, and Flower messages as payloads.

In:       a payload and where it goes; records from anywhere.
Out:      a Flower message; a payload.
Promise:  a payload comes back as it was; records that hold anything else than one table of facts
          and a list of frames are a `WireError`.
Not here: which facts a payload must have (`engine/messages.py`), sending (`push.py`, `pull.py`).

A new Flower `Message` takes its run and its sender from globals of the process. A relay is a server
and a node in one process, so heads are made here, with `make_message`. Written for flwr 1.41; can
go once a `Message` takes its `Metadata` in public. A chunk of Flower's own is copied twice for its
name, and again when it is sent.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, NamedTuple

from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.common.serde_utils import metadata_from_proto, metadata_to_proto
from flwr.supercore.constant import HEAD_BODY_DIVIDER

from fedlm.core.errors import WireError
from fedlm.engine.evaluate_messages import EVALUATE_REQUEST
from fedlm.engine.messages import HELLO_REQUEST, SECURE_REQUEST, TRAIN_REQUEST, Payload

# Flower knows three categories of requests; the part after the dot is fedlm's.
MESSAGE_TYPES = {
    TRAIN_REQUEST: "train.fedlm",
    EVALUATE_REQUEST: "evaluate.fedlm",
    SECURE_REQUEST: "train.secure",
    HELLO_REQUEST: "query.fedlm",
}
FRAMES = "frames"
FRAME_TYPE = "fedlm.frame"
SCALARS = (str, int, float, bool)


class Chunk(ArrayChunk):
    """A chunk of a frame that is named and sent without a copy of its bytes."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self.head = f"{CHUNK}  {len(data)}".encode() + HEAD_BODY_DIVIDER
        named = hashlib.sha256(self.head)
        named.update(data)
        self._name = named.hexdigest()

    @property
    def object_id(self) -> str:
        """The hash that names the chunk; its bytes do not change."""
        return self._name


Chunk.__qualname__ = CHUNK = ArrayChunk.__qualname__  # what it is called where it is read


class Sender(NamedTuple):
    """The numbers under which a process sends the requests of a run."""

    run_id: int
    node_id: int
    task_id: int


def request_message(payload: Payload, node_id: int, round: int, sender: Sender) -> Message:
    """Return the message that carries a request to a node."""
    head = Metadata(
        run_id=sender.run_id,
        message_id="",  # the hash of the message, set when it is pushed
        src_node_id=sender.node_id,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=str(round),
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=MESSAGE_TYPES[payload.kind],
        src_task_id=sender.task_id,
    )
    return make_message(head, to_records(payload))


def reply_message(payload: Payload, request: Metadata) -> Message:
    """Return the message that carries a reply to a request."""
    return Message(to_records(payload), reply_to=make_message(request, RecordDict()))


def with_message_id(head: Metadata, message_id: str) -> Metadata:
    """Return a message's head with its id, which is not part of the hash that Flower makes."""
    made = metadata_to_proto(head)
    made.message_id = message_id
    return metadata_from_proto(made)


def to_records(payload: Payload) -> RecordDict:
    """Convert a payload to Flower records: its facts under its kind, and its frames."""
    # As arrays of bytes: chunks are sent one by one, and a frame for all nodes only once.
    arrays = ArrayRecord(
        {
            str(i): Array("uint8", (len(frame),), FRAME_TYPE, bytes(frame))
            for i, frame in enumerate(payload.frames)
        }
    )
    for array in arrays.values():  # the record's own, which it has made anew
        array.__dict__["_chunks"] = _chunks(array.data)
    facts = ConfigRecord(dict(payload.facts))
    return RecordDict({payload.kind: facts, FRAMES: arrays})


def _chunks(frame: bytes) -> list[tuple[str, Chunk]]:
    size, data = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, memoryview(frame)
    made = [Chunk(data[at : at + size]) for at in range(0, len(frame), size)]
    return [(chunk.object_id, chunk) for chunk in made]


def from_records(records: RecordDict) -> Payload:
    """Convert Flower records to a payload, or raise `WireError`."""
    kinds = [name for name in records if name != FRAMES]
    if len(kinds) != 1 or FRAMES not in records:
        raise WireError("message does not hold exactly facts and frames.")
    facts = records[kinds[0]]
    if not isinstance(facts, ConfigRecord) or not all(map(_is_fact, facts.values())):
        raise WireError("message holds something else than facts.")
    return Payload(kinds[0], dict(facts), _read_frames(records[FRAMES]))


def _is_fact(value: object) -> bool:
    """Tell whether a value is a string, a number, a bool or a list of one of these."""
    values = value if isinstance(value, list) else [value]
    return len({type(v) for v in values}) <= 1 and all(type(v) in SCALARS for v in values)


def _read_frames(record: Any) -> tuple[bytes, ...]:
    if not isinstance(record, ArrayRecord) or list(record) != [str(i) for i in range(len(record))]:
        raise WireError("message does not hold a list of frames.")
    for array in record.values():
        size = (len(array.data),)
        if array.stype != FRAME_TYPE or array.dtype != "uint8" or array.shape != size:
            raise WireError("message holds something else than frames.")
    return tuple(array.data for array in record.values())
