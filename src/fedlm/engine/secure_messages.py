"""The five questions of a secure sum to a node, and their answers, as payloads.

In:       a `SecureRequest` or a `SecureReply`; a payload from anywhere.
Out:      a payload; a request or a reply that was checked.
Promise:  a payload without exactly the expected kind, names, types and sizes is a `WireError`; each
          step has its own number of frames; a reply has one frame, which is a message of the
          protocol.
Not here: what those messages hold (`secure/messages.py`), whom to ask (`secure_remote.py`).

Every step repeats the whole training question of the round, so that a node can refuse before others
rely on it. Frames of a request: none for `keys`; for `mask` the shares for this node and the
model's parameters; for the others the question of the protocol.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedlm.core.errors import WireError
from fedlm.engine.dispatch import RequestKind
from fedlm.engine.messages import (
    LONGEST_FRAME,
    MOST_BESIDE,
    MOST_CLIENTS,
    REQUEST_FACTS,
    SECURE_REPLY,
    SECURE_REQUEST,
    NodeRequest,
    Payload,
    TrainRequest,
    check_clip_norm,
    check_counter,
    check_facts,
    check_frames,
    check_integers,
    check_members_there,
    check_refusal,
    check_request,
    payload_of,
)
from fedlm.secure.local import STEPS
from fedlm.secure.terms import MOST_ATTEMPTS, MOST_VALUES

FRAMES = {"keys": 0, "share": 1, "mask": 2, "sign": 1, "reveal": 1}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REQUEST_FACTS: dict[str, type] = {
    **REQUEST_FACTS,
    "attempt": int,
    "step": str,
    "session": str,
    "size": int,
    "members": list,
    "clip_norm": float,
    "longest": int,
}
_REPLY_FACTS: dict[str, type] = {
    "round": int,
    "attempt": int,
    "step": str,
    "nodes": int,
    "members": int,
    "counter": int,
}
_MOST = {"attempt": MOST_ATTEMPTS - 1, "size": MOST_VALUES, "longest": LONGEST_FRAME}


@dataclass(frozen=True, kw_only=True)
class SecureRequest(NodeRequest):
    """A server's question to a node in one step of a secure sum."""

    attempt: int
    step: str  # one of `secure.local.STEPS`
    session: str  # hexadecimal: the digest of members, terms, run, round and attempt
    size: int  # of a vector, for a relay, which has no model to know it from
    members: tuple[int, ...]  # of the node in this round; none is allowed
    clip_norm: float
    longest: int  # bytes: the frame of a reply cannot be longer

    @property
    def max_reply_bytes(self) -> int:
        """The largest size of a well-formed reply."""
        return self.longest + self.longest // 1024 + MOST_BESIDE

    @property
    def training(self) -> TrainRequest:
        """The training question of the round: the same in every attempt."""
        return TrainRequest(
            run=self.run,
            recipe=self.recipe,
            round=self.round,
            first=self.first,
            population=self.population,
            text=self.text,
            members=self.members,
            clip_norm=self.clip_norm,
            each=False,
            longest=0,
            frames=self.frames[1:],
            counter=self.counter,
        )


@dataclass(frozen=True, kw_only=True)
class SecureReply:
    """A node's answer to one step.

    With its masked vector a node says how much is in it: itself and its members of the round; a
    relay the nodes below that stayed, and theirs.
    """

    round: int
    attempt: int
    step: str
    frames: tuple[bytes, ...]
    nodes: int = 0
    members: int = 0
    counter: int = 0


def encode_secure_request(request: SecureRequest) -> Payload:
    """Convert a request to a payload."""
    return payload_of(SECURE_REQUEST, request, _REQUEST_FACTS)


def read_secure_request(payload: Payload) -> SecureRequest:
    """Convert a payload to a request, or raise `WireError`."""
    facts = check_request(payload, SECURE_REQUEST, _REQUEST_FACTS, _MOST)
    facts["members"] = check_integers(facts["members"], "members", rising=True)
    if facts["step"] not in STEPS:
        raise WireError(f"request is for the step {facts['step'][:40]!r}: a secure sum has none.")
    check_frames(payload, FRAMES[facts["step"]])
    if not _DIGEST.fullmatch(facts["session"]):
        raise WireError("request does not name its session by 64 hexadecimal digits.")
    check_clip_norm(facts["clip_norm"])
    request = SecureRequest(frames=payload.frames, **facts)
    check_members_there(request, request.members)
    return request


def encode_secure_reply(reply: SecureReply) -> Payload:
    """Convert a reply to a payload."""
    return payload_of(SECURE_REPLY, reply, _REPLY_FACTS)


def read_secure_reply(payload: Payload, request: SecureRequest) -> SecureReply:
    """Convert a payload to the reply to a request, or raise `Refused` or `WireError`."""
    check_refusal(payload)
    facts = check_facts(payload, SECURE_REPLY, _REPLY_FACTS)
    check_frames(payload, 1)
    asked = (request.round, request.attempt, request.step)
    if (facts["round"], facts["attempt"], facts["step"]) != asked:
        raise WireError("reply is to another request.")
    check_counter(facts["counter"])
    masked = request.step == "mask"
    if not masked <= facts["nodes"] <= masked * MOST_CLIENTS:
        raise WireError(f"reply is of {facts['nodes']} nodes.")
    if not 0 <= facts["members"] <= masked * len(request.members):
        raise WireError(f"reply is of {facts['members']} members: it was asked for others.")
    if len(payload.frames[0]) > request.longest:
        raise WireError(f"reply holds a frame of more than {request.longest} bytes.")
    return SecureReply(frames=payload.frames, **facts)


SECURE = RequestKind(encode_secure_request, read_secure_reply)
