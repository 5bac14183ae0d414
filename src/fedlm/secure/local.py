"""A secure sum with all nodes in this process, for simulation, tests and benchmarks.

In:       terms, identities, a vector per node, who leaves at which step.
Out:      the sum, who survived, the bytes that each side sent.
Promise:  the very messages and states of a networked sum; only the network is missing.
Not here: what vectors mean (`wire/fixed_point.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedlm.secure import node, server
from fedlm.secure.keys import IdentityKey
from fedlm.secure.terms import Member, Session

STEPS = ("keys", "share", "mask", "sign", "reveal")


class Summed(NamedTuple):
    """The result of a secure sum."""

    total: np.ndarray  # modulo 2^bits
    survivors: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]
    sent: int  # bytes from nodes to the server
    received: int  # bytes from the server to nodes


@dataclass
class Transcript:
    """All bytes that the server saw, by step and place."""

    answers: dict[str, dict[int, bytes]] = field(default_factory=dict)
    received: int = 0


def made_up_members(count: int) -> tuple[tuple[Member, ...], list[IdentityKey]]:
    """Return a federation of new identities, for simulations."""
    identities = [IdentityKey.generate() for _ in range(count)]
    width = len(str(count - 1))
    members = [Member(f"node-{i:0{width}d}", made.public) for i, made in enumerate(identities)]
    return tuple(members), identities


def secure_sum(
    session: Session,
    identities: Sequence[IdentityKey],
    vectors: Sequence[np.ndarray],
    absent: Mapping[int, str] | None = None,
    seen: Transcript | None = None,
) -> Summed:
    """Run one attempt; `absent` says from which of the `STEPS` on a node does not answer."""
    gone = {place: STEPS.index(step) for place, step in (absent or {}).items()}
    seen = Transcript() if seen is None else seen
    states = {i: node.begin(session, identity) for i, identity in enumerate(identities)}

    def ask(step: str, questions: Mapping[int, bytes]) -> server.Messages:
        """Yield the answers of the nodes that are asked and still there."""
        kept = seen.answers.setdefault(step, {})
        for place, question in sorted(questions.items()):
            if gone.get(place, len(STEPS)) <= STEPS.index(step):
                continue
            seen.received += len(question)
            kept[place] = answer(step, place, question)
            yield place, kept[place]

    def answer(step: str, place: int, question: bytes) -> bytes:
        state, identity = states[place], identities[place]
        if step == "keys":
            return node.keys(identity, state)
        if step == "share":
            states[place], found = node.share(state, question)
        elif step == "mask":
            states[place], found = node.mask(state, question, vectors[place])
        elif step == "sign":
            states[place], found = node.sign(identity, state, question)
        else:
            states[place], found = node.reveal(state, question)
        return found

    def all_of(places: Sequence[int], question: bytes) -> dict[int, bytes]:
        return dict.fromkeys(places, question)

    everybody = range(len(identities))
    state, question = server.take_keys(session, ask("keys", all_of(everybody, b"")))
    state, each = server.take_shares(state, ask("share", all_of(sorted(state.keys), question)))
    state, question = server.take_masked(state, ask("mask", each))
    asked = all_of(state.survivors, question)
    state, question = server.take_signatures(state, ask("sign", asked))
    signed = [place for place in seen.answers["sign"]]
    state, total = server.take_revealed(state, ask("reveal", all_of(signed, question)))
    sent = sum(len(answer) for step in seen.answers.values() for answer in step.values())
    return Summed(total, state.survivors, state.faults, sent, seen.received)
