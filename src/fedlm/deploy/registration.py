"""Who takes part in a run, and which members each node answers for.

In:       the nodes that are there, and what they say of themselves.
Out:      assignments: a node's name, the number of its first member, how many it has; the recipe
          as nodes were told it.
Promise:  members are assigned once, in the order of node names, and the assignments are kept with
          the run, so that a member has the same number in every round and after every restart;
          nodes are told the same recipe, to the letter, also after an upgrade of the server.
Not here: rounds (`engine/remote.py`).
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlm.core.documents import read_json, read_toml
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, EngineError, FedlmError, RecordError, WireError
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import FIRST_TOLD, Assignment, Quorum, Transport, Undelivered
from fedlm.engine.messages import (
    MOST_HELLO_BYTES,
    Hello,
    Payload,
    Refused,
    encode_hello_request,
    read_hello,
)
from fedlm.engine.remote_evaluation import Survey
from fedlm.evaluate.held_out import Held
from fedlm.recipe.settings import with_defaults

TOLD = "told.toml"  # the recipe of a run as its nodes know it
HELLO_TIMEOUT = 20.0  # seconds until a node that did not reply is asked again
NAP = 0.2

HelloCheck = Callable[[str, Hello], None]
"""A function of a node's name and hello that raises if the node must not take part."""


def assign_members(
    transport: Transport,
    names: Sequence[str],
    check: HelloCheck,
    say: Callable[[str], None],
    quorum: Quorum = Quorum(),  # noqa: B008
) -> tuple[Assignment, ...]:
    """Wait for the hello of every node, then number members in the order of node names.

    A node that says nonsense or does not fit is left out and named; so is one that has said nothing
    by the deadline. If fewer nodes than the quorum are left, nonsense is an error, and silence
    makes the server wait longer.
    """
    hellos: dict[str, Hello] = {}
    asked: dict[str, _Asked] = {name: _Asked() for name in names}
    unfit: dict[str, FedlmError] = {}
    least = max(1, math.ceil(quorum.quorum * len(names) - 1e-9))
    began, told, tells = time.monotonic(), -1, FIRST_TOLD
    while len(hellos) + len(unfit) < len(names):
        online = {n: p for n, p in transport.presence().items() if p.online and n in names}
        for name in sorted(online.keys() - hellos.keys() - unfit.keys()):
            try:
                payload = _ask_hello(transport, online[name].node_id, name, asked[name])
                if payload is not None:
                    hello = hello_of(name, payload)
                    check(name, hello)
                    hellos[name] = hello
            except FedlmError as error:
                unfit[name] = error
                if len(names) - len(unfit) < least:
                    raise
                say(f"without {name}: {error}")
        waited, here = time.monotonic() - began, len(hellos) + len(unfit)
        missing = ", ".join(sorted(set(names) - hellos.keys() - unfit.keys()))
        if here > told or (missing and waited > tells):
            tells = 2 * tells if waited > tells else tells
            told = here
            say(
                f"{len(hellos)} of {len(names)} nodes are here"
                + (missing and f"; waiting for {missing}, {waited:.0f} s")
            )
        if waited > quorum.deadline and len(hellos) >= least:
            say(f"without {missing}: the deadline of {quorum.deadline:g} s has passed")
            break
        if here < len(names):
            time.sleep(NAP)
    return _number([(name, hellos[name]) for name in sorted(hellos)])


@dataclass
class _Asked:
    """The hello requests that a node was sent: a reply to any of them counts."""

    messages: list[str] = field(default_factory=list)
    at: float = -math.inf  # when the newest was sent
    timeout: float = HELLO_TIMEOUT  # seconds until it is asked again, longer each time


def _ask_hello(transport: Transport, node_id: int, name: str, asked: _Asked) -> Payload | None:
    """Return a node's reply, or None if it is not there yet.

    A node that was not asked is asked now; one that is silent is asked again after a while. Looking
    for a reply comes first: with many nodes and a slow server, more than that while may pass
    between two looks at a node.
    """
    for message_id in list(asked.messages):
        try:
            payload = transport.fetch(message_id, MOST_HELLO_BYTES)
        except Undelivered:
            asked.messages.remove(message_id)
            continue
        except WireError as error:
            raise EngineError(f"node {name} did not say who it is: {error}") from None
        if payload is not None:
            return payload
    if not asked.messages or time.monotonic() - asked.at > asked.timeout:
        if asked.messages:
            asked.timeout *= 2
        message_id = transport.send(node_id, encode_hello_request(), 0)
        asked.messages += [message_id] if message_id else []
        asked.at = time.monotonic()
    return None


def hello_of(name: str, payload: Payload) -> Hello:
    """Convert a payload to the hello of the node with this name."""
    try:
        return read_hello(payload)
    except Refused as refusal:
        raise EngineError(f"node {name}: {str(refusal)[:300]}") from None
    except WireError as error:
        raise EngineError(f"node {name} did not say who it is: {error}") from None


def _number(hellos: list[tuple[str, Hello]]) -> tuple[Assignment, ...]:
    first, assignments = 0, []
    for name, hello in hellos:
        about = (hello.clients, hello.text, hello.leaves, hello.tokens)
        assignments.append(Assignment(name, first, *about))
        first += hello.clients
    return tuple(assignments)


def leaves_below(assignments: Sequence[Assignment]) -> tuple[tuple[str, int], ...]:
    """Return the path and the number of clients of each node with text, at any depth.

    >>> leaves_below([Assignment("a", 0, 1), Assignment("b", 1, 2, "", (("c", 2),))])
    (('a', 1), ('b/c', 2))
    """
    below: list[tuple[str, int]] = []
    for node in assignments:
        deeper = [(f"{node.name}/{path}", clients) for path, clients in node.leaves]
        below += deeper or [(node.name, node.clients)]
    return tuple(below)


def tokens_below(assignments: Sequence[Assignment]) -> tuple[int, ...]:
    """Return the tokens of the nodes of `leaves_below`, 0 where a node does not tell."""
    return tuple(n for a in assignments for n in a.tokens or (0,) * max(1, len(a.leaves)))


def same_tokenizer(wanted: str, where: str) -> HelloCheck:
    """Return a check that refuses a node with another tokenizer."""

    def check(name: str, hello: Hello) -> None:
        if hello.tokenizer != wanted:
            raise ConfigError(
                f"node {name} has another tokenizer than {where}: its tokens mean other words. "
                "Prepare its store again, with fedlm prepare --like."
            )

    return check


def heard(counters: Counters, then: HelloCheck, say: Callable[[str], None]) -> HelloCheck:
    """Return a check that records a node's ledger counter, then calls another check."""

    def check(name: str, hello: Hello) -> None:
        if hello.counter < counters.of(name):
            say(
                f"node {name} came back with a ledger at {hello.counter}, and {counters.of(name)} "
                "was heard before: it will answer nothing until its operator confirms "
                "(fedlm node ledger KIT --confirm)."
            )
        counters.hear(name, hello.counter)
        then(name, hello)

    return check


def save_assignments(file: Path, assignments: Sequence[Assignment]) -> None:
    """Write the assignments of a run to a file."""
    facts = [assignment._asdict() for assignment in assignments]
    write_atomically(file, json.dumps(facts, indent=2).encode())


def load_assignments(file: Path) -> tuple[Assignment, ...] | None:
    """Read the assignments that were made when a run began; return None if the file is missing."""
    if not file.is_file():
        return None
    try:
        told = read_json(file, str(file), RecordError)
        return tuple(_assignment(**facts) for facts in told)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{file} is damaged: {error}.") from None


def _assignment(
    name: str,
    first: int,
    clients: int,
    text: str = "",
    leaves: Sequence[Sequence[Any]] = (),
    tokens: Sequence[int] = (),
) -> Assignment:
    """Return an assignment that was read from a file, or raise `ValueError`."""
    found = tuple((path, count) for path, count in leaves)
    words = [name, text, *(p for p, _ in found)]
    counts = [first, clients, *(n for _, n in found), *tokens]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("a name is not text")
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a number of members is not a whole number from zero on")
    return Assignment(name, first, clients, text, found, tuple(tokens))


def save_survey(file: Path, survey: Survey) -> None:
    """Write how much held-out text nodes announced to a file."""
    write_atomically(file, json.dumps(survey).encode())


def as_told(path: Path, text: str) -> str:
    """Return the recipe as the nodes of a run know it; `text` is how this version would tell it.

    A later version has more settings, and nodes take another text for another run.
    """
    file = path / TOLD
    if not file.is_file():
        return text
    before, now = read_toml(file, str(file), RecordError), tomllib.loads(text)
    return file.read_text() if with_defaults(before) == with_defaults(now) else text


def keep_told(path: Path, text: str) -> None:
    """Keep with a run what its nodes are told, once."""
    if not (path / TOLD).is_file():
        write_atomically(path / TOLD, text.encode())


def load_survey(file: Path) -> Survey | None:
    """Read what nodes announced when a run began; return None if the file is missing."""
    if not file.is_file():
        return None
    try:
        told = read_json(file, str(file), RecordError)
        return {
            str(split): {int(place): _held(*numbers) for place, numbers in of.items()}
            for split, of in told.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{file} is damaged: {error}. Remove it: nodes are asked again."
        ) from None


def _held(rows: int, tokens: int, bytes: int, clients: int) -> Held:
    """Return an announcement that was read from a file, or raise `ValueError`."""
    found = Held(rows, tokens, bytes, clients)
    if not all(type(number) is int and number >= 0 for number in found):
        raise ValueError("an amount of text is not a whole number from zero on")
    return found
