"""What crosses the network, whatever carries it: requests and replies as payloads.

In:       a request, a reply, a hello or a refusal; a payload from anywhere.
Out:      a payload; a request, a reply or a hello that was checked.
Promise:  frames are the codec's and nothing else; a payload without exactly the expected kind,
          names, types and sizes is a `WireError`; the only text of a reply is the sentence of a
          refusal.
Not here: what a frame holds (`wire`), how a payload travels (`deploy/flower`).
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fedlm.core.errors import FedlmError, WireError

VERSION = 5  # raised whenever a kind of message, its facts or what they mean change
COMPATIBLE = (VERSION - 1, VERSION)
TRAIN_REQUEST, TRAIN_REPLY = "train_request", "train_reply"
HELLO_REQUEST, HELLO_REPLY = "hello_request", "hello_reply"
SECURE_REQUEST, SECURE_REPLY = "secure_request", "secure_reply"
REFUSAL = "refusal"  # may reply to any request
# What a version added: facts of a kind, with what their absence means; None: the kind itself. Kept
# for the newest version alone, because messages are one version apart at most.
ADDED: dict[str, dict[str, Any] | None] = {
    TRAIN_REQUEST: {"remembered": []},
    "evaluate_request": None,
    "evaluate_reply": None,
    SECURE_REQUEST: None,
    SECURE_REPLY: None,
}
SUMS = ("weight", "nats", "tokens", "steps", "refused", "unclipped")
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?")
RUN_NAME = re.compile(r"[0-9a-f]{32}")

LONGEST_RECIPE = 1 << 16
LONGEST_FRAME = 1 << 40
LONGEST_REASON = 1000
MOST_MEMBERS = 1 << 20
MOST_CLIENTS = 1 << 40
MOST_ROUNDS = 1 << 31
MOST_COUNTER = 1 << 53
MOST_TOKENS = 1 << 53
MOST_HELLO_BYTES = 1 << 22
MOST_LEAVES, LONGEST_PATH, LONGEST_FINGERPRINT = 1 << 14, 1000, 200
# Of a reply, beside its frames: names, identities of objects, and seven numbers per member.
MOST_BESIDE, MOST_BESIDE_MEMBER = 1 << 16, 1 << 10

# The facts of every request in a run: exactly these names, of exactly these types.
REQUEST_FACTS: dict[str, type] = {
    "run": str,
    "recipe": str,
    "round": int,
    "first": int,
    "population": int,
    "text": str,
    "counter": int,
}
_TRAIN_REQUEST_FACTS: dict[str, type] = {
    **REQUEST_FACTS,
    "members": list,
    "numbers": list,
    "remembered": list,
    "clip_norm": float,
    "each": bool,
    "longest": int,
}
_REPLY_FACTS: dict[str, type] = {
    "round": int,
    "members": list,
    "counter": int,
    **dict.fromkeys(SUMS, list),
}
_HELLO_FACTS: dict[str, type] = {
    "clients": int,
    "text": str,
    "tokenizer": str,
    "fedlm": str,
    "counter": int,
    "leaves": list,
    "counts": list,
    "tokens": list,
}


# The largest value of each number of every request.
_MOST = {
    "round": MOST_ROUNDS,
    "first": MOST_CLIENTS,
    "population": MOST_CLIENTS,
    "counter": MOST_COUNTER,
}


@dataclass(frozen=True)
class Payload:
    """A message without its address: a kind, named facts, and frames of bytes."""

    kind: str
    facts: Mapping[str, Any]  # text, numbers, truth values, and lists of one of those
    frames: tuple[bytes, ...] = ()


class Refused(Exception):
    """A node's reply that it does not do what it was asked, with its reason."""


@dataclass(frozen=True, kw_only=True)
class NodeRequest(abc.ABC):
    """What every request to a node in a run holds."""

    run: str  # 32 hexadecimal digits, drawn when the run began
    recipe: str  # TOML
    round: int
    first: int  # the number of the node's first member, over the whole federation
    population: int  # of the whole federation
    text: str  # the fingerprint of the node's text when the run began
    frames: tuple[bytes, ...] = ()
    counter: int = 0  # the largest counter of this node's ledger that the server has heard of

    @property
    @abc.abstractmethod
    def max_reply_bytes(self) -> int:
        """The largest size of a well-formed reply."""

    @property
    def digest(self) -> str:
        """A fingerprint of the request without its counter, which grows between two copies."""
        hashes = [hashlib.sha256(frame).hexdigest() for frame in self.frames]
        facts = {**asdict(self), "frames": hashes}
        del facts["counter"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrainRequest(NodeRequest):
    """A server's request to a node in a round; its frames are parameters.

    Either each member trains on one client's text, all from the same parameters. Or, in a tree, a
    member stands for all text of its node, which trains under its own number from its own
    parameters: then there is a frame per member.
    """

    members: tuple[int, ...]  # numbers over the whole federation, ascending
    clip_norm: float  # the longest update that a member may send; infinite without a plan
    each: bool  # every member's update by itself, or only their sum
    longest: int  # bytes: no frame of a reply can be longer
    numbers: tuple[int, ...] = ()  # under which the whole text of each member's node trains
    # Where members remember: the round in which each one's answer last counted, -1 if none did.
    remembered: tuple[int, ...] = ()

    @property
    def max_reply_bytes(self) -> int:
        """The largest size of a well-formed reply."""
        frames = len(self.members) if self.each else 1
        return frames * (self.longest + self.longest // 1024 + MOST_BESIDE_MEMBER) + MOST_BESIDE


@dataclass(frozen=True, kw_only=True)
class TrainReply:
    """A node's updates: frames, with the sums that belong to each."""

    round: int
    members: tuple[int, ...]  # all who were asked, or those that a relay reached
    frames: tuple[bytes, ...]
    sums: tuple[Mapping[str, float], ...]  # as many as frames; names as in SUMS
    counter: int = 0  # of the node's ledger, after this reply was entered


class Hello(NamedTuple):
    """A node's description of itself before a run."""

    clients: int
    text: str  # a fingerprint
    tokenizer: str  # a fingerprint
    version: str  # of fedlm
    leaves: tuple[tuple[str, int], ...] = ()  # of a relay: the nodes below, and their clients
    counter: int = 0  # of the node's ledger
    # How many tokens the node trains on, of a relay each node below, 0 if one does not tell; empty
    # if none does.
    tokens: tuple[int, ...] = ()


def respond(
    payload: Payload,
    *,
    hello: Callable[[], Hello],
    train: Callable[[TrainRequest], TrainReply],
    say: Callable[[str], None],
    others: Mapping[str, Callable[[Payload], Payload]] = MappingProxyType({}),
) -> Payload:
    """Return a node's reply to a payload; anything that goes wrong becomes a refusal.

    `others` answer payloads of other kinds than hello and training, by kind.
    """
    what, asked = "a message", payload.facts.get("version")
    version = asked if type(asked) is int and asked in COMPATIBLE else VERSION
    try:
        payload = at_version(payload, VERSION)
        if payload.kind == HELLO_REQUEST:
            check_facts(payload, HELLO_REQUEST, {})
            check_frames(payload, 0)
            reply = encode_hello(hello())
        elif payload.kind in others:
            what = payload.kind.replace("_", " ")
            reply = others[payload.kind](payload)
        else:
            request = read_request(payload)
            what = f"round {request.round}"
            reply = encode_reply(train(request))
        return at_version(reply, version)  # whoever asked understands its own version
    except FedlmError as error:
        say(f"refused {what}: {error}")
        reply = encode_refusal(str(error))
    except Exception as error:  # whatever a message makes go wrong, the node lives
        say(f"refused {what}: {type(error).__name__}: {printable(str(error))[:LONGEST_REASON]}")
        reply = encode_refusal(f"this node cannot do this: {type(error).__name__}.")
    return at_version(reply, version)


# ---- versions ------------------------------------------------------------------------------


def at_version(payload: Payload, version: int) -> Payload:
    """Convert a message to another version, or raise `WireError` if that cannot express it."""
    facts = dict(payload.facts)
    written = facts.get("version")
    if type(written) is not int or written not in COMPATIBLE or version not in COMPATIBLE:
        raise WireError(
            f"message has version {str(written)[:40]!r}: expected "
            f"{' or '.join(map(str, COMPATIBLE))}. Install the same fedlm at the server and at all "
            "nodes."
        )
    if written == version:
        return payload
    added = ADDED.get(payload.kind, {})
    if added is None:
        raise WireError(f"version {version} of fedlm's messages has no {payload.kind[:40]!r}.")
    for name, absent in added.items():
        if version == VERSION:
            facts.setdefault(name, absent)
        elif facts.pop(name, absent) != absent:
            raise WireError(f"version {version} of fedlm's messages cannot say {name!r}.")
    return Payload(payload.kind, {**facts, "version": version}, payload.frames)


# ---- training ------------------------------------------------------------------------------


def payload_of(kind: str, message: Any, names: Iterable[str], **facts: Any) -> Payload:
    """Return the payload of a message: these of its fields, further facts, and its frames."""
    values = {name: getattr(message, name) for name in names} | facts
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return Payload(kind, {"version": VERSION, **plain}, message.frames)


def columns_of(sums: Iterable[Mapping[str, float]], names: Iterable[str]) -> dict[str, list[float]]:
    """Return sums as one list per name, as they travel."""
    rows = list(sums)
    return {name: [float(row[name]) for row in rows] for name in names}


def sums_by_row(
    facts: Mapping[str, Any], names: Sequence[str], rows: int
) -> tuple[dict[str, float], ...]:
    """Return lists of sums that arrived as one mapping per row."""
    return tuple({name: facts[name][i] for name in names} for i in range(rows))


def check_request(
    payload: Payload, kind: str, types: Mapping[str, type], most: Mapping[str, int]
) -> dict[str, Any]:
    """Return the facts of a request, if they are as expected and no number exceeds its bound.

    `most` has the bounds of the numbers that only this kind of request has.
    """
    facts = check_facts(payload, kind, types)
    for name, bound in {**_MOST, **most}.items():
        if not 0 <= facts[name] <= bound:
            raise WireError(f"request says {name} = {str(facts[name])[:40]}.")
    if not RUN_NAME.fullmatch(facts["run"]):
        raise WireError("request does not name its run by 32 hexadecimal digits.")
    if len(facts["recipe"]) > LONGEST_RECIPE:
        raise WireError(f"request holds a recipe of {len(facts['recipe'])} characters.")
    return facts


def check_members_there(request: NodeRequest, members: Iterable[int]) -> None:
    """Raise `WireError` if a request names members that its node cannot have."""
    if not all(request.first <= member < request.population for member in members):
        raise WireError("request names members that are not there.")


def check_clip_norm(clip_norm: float) -> None:
    """Raise `WireError` if no update could be within the clip norm of a request."""
    if not clip_norm > 0:
        raise WireError(f"request says clip_norm = {clip_norm}.")


def encode_request(request: TrainRequest) -> Payload:
    """Convert a request to a payload."""
    return payload_of(TRAIN_REQUEST, request, _TRAIN_REQUEST_FACTS)


def read_request(payload: Payload) -> TrainRequest:
    """Convert a payload to a request, or raise `WireError`."""
    most = {"longest": LONGEST_FRAME}
    facts = check_request(payload, TRAIN_REQUEST, _TRAIN_REQUEST_FACTS, most)
    facts["members"] = check_integers(facts["members"], "members", rising=True)
    facts["numbers"] = check_integers(facts["numbers"], "numbers", rising=False)
    facts["remembered"] = check_integers(facts["remembered"], "remembered", rising=False)
    request = TrainRequest(frames=payload.frames, **facts)
    check_frames(payload, len(request.numbers) or 1)
    check_clip_norm(request.clip_norm)
    check_members_there(request, request.members)
    if request.remembered and not (
        len(request.remembered) == len(request.members)
        and all(-1 <= last < request.round for last in request.remembered)
    ):
        raise WireError("request says of members that they remember what they cannot.")
    if request.numbers and not _are_places(request):
        raise WireError("request holds numbers that are none of places.")
    return request


def _are_places(request: TrainRequest) -> bool:
    """Return whether each member has a distinct number beyond those of clients."""
    numbers, population = request.numbers, request.population
    known = all(population <= number < population + MOST_MEMBERS for number in numbers)
    distinct = len(set(numbers)) == len(numbers) == len(request.members)
    return request.each and known and distinct


def encode_reply(reply: TrainReply) -> Payload:
    """Convert a reply to a payload."""
    told = ("round", "members", "counter")
    return payload_of(TRAIN_REPLY, reply, told, **columns_of(reply.sums, SUMS))


def read_reply(payload: Payload, request: TrainRequest) -> TrainReply:
    """Convert a payload to the reply to a request, or raise `Refused` or `WireError`."""
    check_refusal(payload)
    facts = check_facts(payload, TRAIN_REPLY, _REPLY_FACTS)
    members = check_integers(facts["members"], "members", rising=True)
    known = members and set(members) <= set(request.members)
    if facts["round"] != request.round or not known:
        raise WireError("reply is to another request.")
    check_counter(facts["counter"])
    wanted = len(members) if request.each else 1
    check_frames(payload, wanted)
    if max(map(len, payload.frames)) > request.longest:
        raise WireError(f"reply holds a frame of more than {request.longest} bytes.")
    for name in SUMS:
        check_sizes(facts[name], name, wanted)
    sums = sums_by_row(facts, SUMS, wanted)
    return TrainReply(
        round=request.round,
        members=members,
        frames=payload.frames,
        sums=sums,
        counter=facts["counter"],
    )


# ---- hello and refusal ---------------------------------------------------------------------


def encode_hello_request() -> Payload:
    """Return the payload that asks a node for its description."""
    return Payload(HELLO_REQUEST, {"version": VERSION})


def encode_hello(hello: Hello) -> Payload:
    """Convert a node's description of itself to a payload."""
    facts = {
        "version": VERSION,
        "clients": hello.clients,
        "text": hello.text,
        "tokenizer": hello.tokenizer,
        "fedlm": hello.version,
        "counter": hello.counter,
        "leaves": [path for path, _ in hello.leaves],
        "counts": [clients for _, clients in hello.leaves],
        "tokens": list(hello.tokens),
    }
    return Payload(HELLO_REPLY, facts)


def read_hello(payload: Payload) -> Hello:
    """Convert a payload to a node's description of itself, or raise `Refused` or `WireError`."""
    check_refusal(payload)
    facts = check_facts(payload, HELLO_REPLY, _HELLO_FACTS)
    check_frames(payload, 0)
    clients = facts["clients"]
    if not 1 <= clients <= MOST_CLIENTS:
        raise WireError(f"it says that it has {clients} clients.")
    texts = (facts["text"], facts["tokenizer"], facts["fedlm"])
    if max(map(len, texts)) > LONGEST_FINGERPRINT:
        raise WireError("its fingerprints are too long.")
    check_counter(facts["counter"])
    leaves = _read_leaves(facts["leaves"], facts["counts"], clients)
    tokens = check_integers(facts["tokens"], "tokens", rising=False)
    known = len(tokens) in (0, max(1, len(leaves)))
    if not known or not all(0 <= n <= MOST_TOKENS for n in tokens):
        raise WireError("it does not say how many tokens each of its nodes has.")
    return Hello(clients, *texts, leaves, facts["counter"], tokens)


def _read_leaves(paths: list[Any], counts: list[Any], clients: int) -> tuple[Any, ...]:
    """Pair the nodes below a relay with their clients; a node names none."""
    if len(paths) != len(counts) or len(paths) > MOST_LEAVES:
        raise WireError("it does not say which nodes are below it.")
    for path, count in zip(paths, counts, strict=True):
        named = type(path) is str and len(path) <= LONGEST_PATH
        if not named or not all(NODE_NAME.fullmatch(part) for part in path.split("/")):
            raise WireError("it names a node below it that has no name.")
        if type(count) is not int or not 1 <= count <= clients:
            raise WireError(f"it says that {path} has {count!r} clients.")
    if paths and (sum(counts) != clients or len(set(paths)) != len(paths)):
        raise WireError(f"it has {clients} clients: its nodes below say otherwise.")
    return tuple(zip(paths, counts, strict=True))


def encode_refusal(reason: str) -> Payload:
    """Return the payload of a node that does not do what it was asked."""
    return Payload(REFUSAL, {"version": VERSION, "reason": reason[:LONGEST_REASON]})


def check_refusal(payload: Payload) -> None:
    """Raise `Refused` if a payload is a refusal."""
    if payload.kind == REFUSAL:
        reason = check_facts(payload, REFUSAL, {"reason": str})["reason"][:LONGEST_REASON]
        check_frames(payload, 0)
        raise Refused(printable(reason))


def printable(text: str) -> str:
    """Return text of a peer without characters that could control a terminal.

    >>> printable("no\\x1b[31m")
    'no [31m'
    """
    return "".join(c if c.isprintable() else " " for c in text)


# ---- checks --------------------------------------------------------------------------------


def check_facts(payload: Payload, kind: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the facts of a payload without its version, if names and types are as expected."""
    facts = dict(payload.facts)
    version = facts.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise WireError(
            f"message has version {str(version)[:40]!r}: expected {VERSION}. Install the same "
            "fedlm at the server and at all nodes."
        )
    if payload.kind != kind:
        raise WireError(f"message is {payload.kind[:40]!r}: expected a fedlm {kind}.")
    if facts.keys() != types.keys():
        raise WireError(f"message does not hold exactly the facts of a {kind}.")
    for name, wanted in types.items():
        if type(facts[name]) is not wanted:
            raise WireError(f"message has no {name!r} of type {wanted.__name__}.")
    return facts


def check_frames(payload: Payload, wanted: int) -> None:
    if len(payload.frames) != wanted:
        raise WireError(f"message does not hold exactly {wanted} frames.")


def check_integers(values: list[Any], name: str, *, rising: bool) -> tuple[int, ...]:
    if len(values) > MOST_MEMBERS or not all(type(v) is int for v in values):
        raise WireError(f"message has no list {name!r} of numbers.")
    if rising and not all(a < b for a, b in itertools.pairwise(values)):
        raise WireError(f"message has a list {name!r} that does not rise.")
    return tuple(values)


def check_counter(value: int) -> None:
    if not 0 <= value <= MOST_COUNTER:
        raise WireError(f"its ledger's counter is {str(value)[:40]}.")


def check_sizes(values: list[Any], name: str, wanted: int) -> None:
    if len(values) != wanted:
        raise WireError(f"message does not hold {wanted} values of {name!r}.")
    if not all(type(v) is float and math.isfinite(v) and v >= 0 for v in values):
        raise WireError(f"message holds a {name!r} that is not a size.")
