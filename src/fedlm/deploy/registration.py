"""Who takes part in a run, and which members each node answers for.

In:       the nodes that are there, and what they say of themselves.
Out:      seats: a name, the number of its first member, how many it has.
Promise:  seats are given out once, in the order of names, and kept with the run, so that a member
          has the same number in every round and after every restart.
Not here: rounds (`engine/remote.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from fedlm.core.errors import ConfigError, EngineError, RecordError, WireError
from fedlm.deploy.node_worker import HELLO
from fedlm.deploy.workspace import NAME
from fedlm.engine.dispatch import Assignment, Transport, Undelivered
from fedlm.record.checkpoint import write_atomically

HELLO_SECONDS = 20.0  # until a node that did not answer is greeted again
MOST_CLIENTS = 1 << 40
MOST_HELLO = 1 << 22  # bytes
MOST_LEAVES, LONGEST_PATH = 1 << 14, 1000


class Hello(NamedTuple):
    """What a node says of itself."""

    clients: int
    text: str
    tokenizer: str
    version: str
    leaves: tuple[tuple[str, int], ...] = ()  # of a relay: the nodes below, and their clients


def seat_all(
    post: Transport,
    names: Sequence[str],
    check: Callable[[str, Hello], None],
    say: Callable[[str], None],
) -> tuple[Assignment, ...]:
    """Waits for every node, hears what it has, and numbers the members in the order of names."""
    hellos: dict[str, Hello] = {}
    sent: dict[str, tuple[str, float]] = {}
    told = -1
    while len(hellos) < len(names):
        there = {n: p for n, p in post.presence().items() if p.online and n in names}
        for name in sorted(there.keys() - hellos.keys()):
            message, at = sent.get(name, ("", 0.0))
            if not message or time.monotonic() - at > HELLO_SECONDS:
                sent[name] = _greet(post, there[name].node_id), time.monotonic()
                continue
            try:
                reply = post.fetch(message, MOST_HELLO)
            except Undelivered:
                del sent[name]
                continue
            except WireError as error:
                raise EngineError(f"node {name} did not say who it is: {error}") from None
            if reply is not None:
                hellos[name] = read_hello(name, reply)
                check(name, hellos[name])
        if len(hellos) > told:
            told = len(hellos)
            missing = ", ".join(sorted(set(names) - hellos.keys()))
            say(f"{told} of {len(names)} nodes are here" + (missing and f"; waiting for {missing}"))
        time.sleep(0.2)
    return _number([(name, hellos[name]) for name in sorted(names)])


def _number(hellos: list[tuple[str, Hello]]) -> tuple[Assignment, ...]:
    first, seats = 0, []
    for name, hello in hellos:
        seats.append(Assignment(name, first, hello.clients, hello.text, hello.leaves))
        first += hello.clients
    return tuple(seats)


def _greet(post: Transport, node_id: int) -> str:
    return post.send_message(Message(RecordDict(), node_id, HELLO, group_id="hello"))


def read_hello(name: str, reply: Message) -> Hello:
    """What a node answered to a greeting, checked."""
    if reply.has_error():
        raise EngineError(f"node {name} failed to say who it is: {reply.error.reason}")
    facts = reply.content.get("hello")
    if not isinstance(facts, ConfigRecord):
        raise EngineError(f"node {name} did not say who it is.")
    refusal = facts.get("refusal")
    if isinstance(refusal, str) and refusal:
        raise EngineError(f"node {name}: {refusal[:300]}")
    clients, texts = facts.get("clients"), [facts.get(n) for n in Hello._fields[1:4]]
    if type(clients) is not int or not 1 <= clients <= MOST_CLIENTS:
        raise EngineError(f"node {name} says that it has {clients!r} clients.")
    if not all(isinstance(value, str) and len(value) <= 200 for value in texts):
        raise EngineError(f"node {name} did not say who it is.")
    text, tokenizer, version = map(str, texts)
    return Hello(clients, text, tokenizer, version, _leaves(name, facts, clients))


def told_leaves(seats: Sequence[Assignment]) -> dict[str, list[Any]]:
    """What a relay says of the nodes below it, however deep: their paths and client counts."""
    below: list[tuple[str, int]] = []
    for seat in seats:
        deeper = [(f"{seat.name}/{path}", clients) for path, clients in seat.leaves]
        below += deeper or [(seat.name, seat.clients)]
    return {"leaves": [path for path, _ in below], "counts": [clients for _, clients in below]}


def _leaves(name: str, facts: ConfigRecord, clients: int) -> tuple[tuple[str, int], ...]:
    """What was told of the nodes below a relay, checked; a node tells nothing."""
    paths, counts = facts.get("leaves"), facts.get("counts")
    if paths is None and counts is None:
        return ()
    lists = isinstance(paths, list) and isinstance(counts, list)
    if not lists or not 0 < len(paths) == len(counts) <= MOST_LEAVES:  # type: ignore[arg-type]
        raise EngineError(f"node {name} did not say which nodes are below it.")
    for path, count in zip(paths, counts, strict=True):  # type: ignore[arg-type]
        named = type(path) is str and len(path) <= LONGEST_PATH
        if not named or not all(NAME.fullmatch(part) for part in str(path).split("/")):
            raise EngineError(f"node {name} names a node below it that has no name.")
        if type(count) is not int or not 1 <= count <= clients:
            raise EngineError(f"node {name} says that {path} has {count!r} clients.")
    below = tuple(zip(map(str, paths), map(int, counts), strict=True))  # type: ignore[arg-type]
    if sum(count for _, count in below) != clients or len(dict(below)) != len(below):
        raise EngineError(f"node {name} has {clients} clients: its nodes below say otherwise.")
    return below


def same_tokenizer(wanted: str, where: str) -> Callable[[str, Hello], None]:
    """Refuses a node whose tokens mean other words."""

    def check(name: str, hello: Hello) -> None:
        if hello.tokenizer != wanted:
            raise ConfigError(
                f"node {name} has another tokenizer than {where}: its tokens mean other words. "
                "Prepare its store again, with fedlm prepare --like."
            )

    return check


def keep(file: Path, seats: Sequence[Assignment]) -> None:
    """Writes the seats of a run."""
    write_atomically(file, json.dumps([seat._asdict() for seat in seats], indent=2).encode())


def kept(file: Path) -> tuple[Assignment, ...] | None:
    """The seats that were given out when a run began."""
    if not file.is_file():
        return None
    try:
        read = [Assignment(**seat) for seat in json.loads(file.read_text(encoding="utf-8"))]
        return tuple(s._replace(leaves=tuple((str(p), int(n)) for p, n in s.leaves)) for s in read)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
