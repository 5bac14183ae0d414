"""The question how well models predict held-out text, and its answer in sums.

In:       an `EvaluateRequest` or an `EvaluateReply`; a payload from anywhere.
Out:      a payload; a request or a reply that was checked.
Promise:  a reply holds sums over rows of text and nothing else, to a question for noisy figures
          noisy sums and nothing else; a payload without exactly the expected kind, names, types
          and sizes is a `WireError`, and so are sums that contradict each other or exceed what the
          node announced.
Not here: whom to ask (`remote_evaluation.py`), scoring (`deploy/node_worker.py`).

A request is a list of asks. Each names a node by its first member, a split, one of the models that
the request carries, and how many rows count. Without a model an ask is a survey: the reply says how
much text there is. A request of the phase `keep` asks for nothing: it carries models for nodes to
keep, and names in place of a split whether a model is the shared one or the node's own. A request
of the phase `noisy` asks each node once, for one model, on the validation text of all its clients:
the answer is the noisy sum of `privacy/evaluation.py`, whose numbers may be below zero. Over a
network the splits of different nodes are scored as if they were one text: `offset` and `total` say
where the rows of a node lie in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlm.core.errors import WireError
from fedlm.engine.dispatch import RequestKind
from fedlm.engine.messages import (
    MOST_BESIDE,
    MOST_MEMBERS,
    REQUEST_FACTS,
    NodeRequest,
    Payload,
    check_counter,
    check_facts,
    check_frames,
    check_integers,
    check_members_there,
    check_refusal,
    check_request,
    check_sizes,
    columns_of,
    payload_of,
    sums_by_row,
)
from fedlm.evaluate.held_out import NO_MODEL, Held, Phase
from fedlm.evaluate.perplexity import MOST_NATS, Sums

EVALUATE_REQUEST, EVALUATE_REPLY = "evaluate_request", "evaluate_reply"
SPLITS = ("test", "validation")
ROLES = ("shared", "own")  # of a model that a node is to keep
PHASES = ("survey", "watch", "final", "keep", "noisy")
MOST_ASKS = 1 << 14
MOST_ROWS = 1 << 40
ASK_BYTES = 1 << 9  # of a reply, for the numbers of one ask
COUNTS = ("tokens", "correct", "words", "correct_words", "known")
TEXT = ("rows", "bytes", "clients")
SUMS = (*Sums._fields, *TEXT)
NOISY = tuple(f"noisy_{place:02d}" for place in range(27))  # the numbers of a noisy sum
MOST_NOISY = 1e15  # what any of them may be; how many clients there are says more

# Beside the facts of all requests, of which each ask has one.
_BY_ASK: dict[str, type] = {
    "members": int,
    "numbers": int,
    "splits": str,
    "models": int,
    "rows": int,
    "offsets": int,
}
_REQUEST_FACTS: dict[str, type] = {
    **REQUEST_FACTS,
    "phase": str,
    "total": int,
    **dict.fromkeys(_BY_ASK, list),
}
_REPLY_FACTS: dict[str, type] = {"round": int, "phase": str, "asks": list, "counter": int}


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(NodeRequest):
    """A server's question how well models predict the held-out text of nodes after a round."""

    phase: Phase
    total: int  # rows of all nodes together; 0 where every node is by itself
    members: tuple[int, ...]  # of each ask: the first member of the node, never falling
    numbers: tuple[int, ...]  # the number of its place in a tree, else 0
    splits: tuple[str, ...]
    models: tuple[int, ...]  # frames by their place; NO_MODEL: only how much text there is
    rows: tuple[int, ...]  # only so many of the first rows; 0: all
    offsets: tuple[int, ...]  # rows of the nodes before it

    @property
    def max_reply_bytes(self) -> int:
        """The largest size of a well-formed reply."""
        return len(self.members) * ASK_BYTES + MOST_BESIDE


@dataclass(frozen=True, kw_only=True)
class EvaluateReply:
    """A node's sums, one set for each ask."""

    round: int
    phase: Phase
    asks: tuple[int, ...]  # by their places in the request: all, or those that a relay reached
    sums: tuple[Mapping[str, float], ...]  # names as in SUMS, of the phase `noisy` as in NOISY
    counter: int = 0
    frames: tuple[bytes, ...] = ()  # always none: a reply is sums


def encode_evaluate_request(request: EvaluateRequest) -> Payload:
    """Convert a request to a payload."""
    return payload_of(EVALUATE_REQUEST, request, _REQUEST_FACTS)


def read_evaluate_request(payload: Payload) -> EvaluateRequest:
    """Convert a payload to a request, or raise `WireError`."""
    facts = check_request(payload, EVALUATE_REQUEST, _REQUEST_FACTS, {"total": MOST_ROWS})
    asks = len(facts["members"])
    for name, kind in _BY_ASK.items():
        values = facts[name]
        if not 1 <= len(values) == asks <= MOST_ASKS or not all(type(v) is kind for v in values):
            raise WireError(f"request has no list {name!r} of one value per ask.")
        facts[name] = tuple(values)
    request = EvaluateRequest(frames=payload.frames, **facts)
    texts = ROLES if request.phase == "keep" else SPLITS
    if request.phase not in PHASES or not set(request.splits) <= set(texts):
        raise WireError("request asks for another text than fedlm holds out.")
    _check_asks(request)
    if request.phase == "noisy":
        _check_noisy_asks(request)
    return request


def _check_asks(request: EvaluateRequest) -> None:
    """Raise `WireError` for an ask that no honest server makes."""
    numbers, population = request.numbers, request.population
    check_members_there(request, request.members)
    if tuple(sorted(request.members)) != request.members:
        raise WireError("request has a list 'members' that falls.")
    places = range(population, population + MOST_MEMBERS)
    if any(numbers) and not all(number in places for number in numbers):
        raise WireError("request holds numbers that are none of places.")
    used = {NO_MODEL} if request.phase == "survey" else set(range(len(request.frames)))
    if set(request.models) != used or (request.phase == "survey" and request.frames):
        raise WireError("request does not use each model that it carries, and no other.")
    if not all(0 <= value <= MOST_ROWS for value in (*request.rows, *request.offsets)):
        raise WireError("request counts rows that are none.")
    if len(set(_keys(request))) != len(request.members):
        raise WireError("request asks for the same twice.")


def _check_noisy_asks(request: EvaluateRequest) -> None:
    """Raise `WireError` unless each node is asked for one sum over all its clients."""
    nodes = len(set(request.members))
    whole = not any((request.total, *request.numbers, *request.rows, *request.offsets))
    if len(request.members) != nodes or len(request.frames) != 1 or not whole:
        raise WireError("request asks a node for more than one noisy sum, or for one of a part.")
    if set(request.splits) != {"validation"}:
        raise WireError("request asks for noisy sums of another text than validation text.")


def sums_in(phase: Phase) -> tuple[str, ...]:
    """Return the names of the numbers in an answer."""
    return NOISY if phase == "noisy" else SUMS


def _keys(request: EvaluateRequest) -> list[Any]:
    asks = (request.members, request.numbers, request.splits, request.models, request.rows)
    return list(zip(*asks, strict=True))


def encode_evaluate_reply(reply: EvaluateReply) -> Payload:
    """Convert a reply to a payload."""
    told = ("round", "phase", "asks", "counter")
    columns = columns_of(reply.sums, sums_in(reply.phase))
    return payload_of(EVALUATE_REPLY, reply, told, **columns)


def read_evaluate_reply(payload: Payload, request: EvaluateRequest) -> EvaluateReply:
    """Convert a payload to the reply to a request, or raise `Refused` or `WireError`."""
    check_refusal(payload)
    names = sums_in(request.phase)
    expected = {**_REPLY_FACTS, **dict.fromkeys(names, list)}
    facts = check_facts(payload, EVALUATE_REPLY, expected)
    check_frames(payload, 0)
    asks = check_integers(facts["asks"], "asks", rising=True)
    known = asks and asks[0] >= 0 and asks[-1] < len(request.members)
    if facts["round"] != request.round or facts["phase"] != request.phase or not known:
        raise WireError("reply is to another request.")
    check_counter(facts["counter"])
    for name in names:
        (_check_noisy if names is NOISY else check_sizes)(facts[name], name, len(asks))
    sums = sums_by_row(facts, names, len(asks))
    for part in sums if names is SUMS else ():
        _check_sums(part, scored=request.phase in ("watch", "final"))
    return EvaluateReply(
        round=request.round,
        phase=request.phase,
        asks=asks,
        sums=sums,
        counter=facts["counter"],
    )


def _check_noisy(values: list[Any], name: str, wanted: int) -> None:
    if len(values) != wanted:
        raise WireError(f"message does not hold {wanted} values of {name!r}.")
    if not all(type(v) is float and abs(v) <= MOST_NOISY for v in values):
        raise WireError(f"message holds a {name!r} that is no number of a noisy sum.")


def _check_sums(part: Mapping[str, float], *, scored: bool) -> None:
    """Raise `WireError` for sums that no text can have."""
    whole = all(part[name].is_integer() and part[name] <= MOST_ROWS for name in (*COUNTS, *TEXT))
    parts = (
        part["correct"] <= part["tokens"]
        and part["known"] <= part["tokens"]
        and part["words"] <= part["known"]
        and part["correct_words"] <= min(part["correct"], part["words"])
        and part["clients"] <= part["rows"] <= part["tokens"]
    )
    nats = part["known_nats"] <= part["nats"] <= part["tokens"] * MOST_NATS
    if not (whole and parts and nats):
        raise WireError("reply holds sums that no text can have.")
    if not scored and (part["nats"] or part["correct"]):
        raise WireError("reply scores a model that was not sent.")


def check_announced(part: Mapping[str, float], held: Held, *, all_rows: bool) -> None:
    """Raise `WireError` if sums are over more text than a node announced, or over less."""
    here = Held(*(int(part[name]) for name in Held._fields))
    if here == held if all_rows else all(a <= b for a, b in zip(here, held, strict=True)):
        return
    raise WireError("reply is over another text than the node announced.")


def sums_of(part: Mapping[str, float]) -> Sums:
    """Convert a reply's sums by name to `Sums`."""
    return Sums(*(part[name] for name in Sums._fields))


EVALUATION = RequestKind(encode_evaluate_request, read_evaluate_reply)
