"""The terms of secure sums: who takes part, with which threshold, over which numbers.

In:       the federation's list of members, a threshold, the width and the number of values.
Out:      checked terms; the session of one attempt at one round's sum; who is whose neighbour.
Promise:  all that must be equal at every node is in the digest of a session, and every message
          carries that digest: a message of other terms, another run, round or attempt is refused.
Not here: what the messages hold (`messages.py`).

Threshold. Shares of t nodes open a mask; t nodes must sign one list of survivors before any of them
opens one. Of n members let m work together with the server.
- Any t > m keeps an honest-but-curious server from opening a mask by itself.
- A server that lies could show two groups of honest nodes two lists, and get one kind of share of
  the same node from each. It needs t signatures for each: 2 t <= (n - m) + 2 m. So 2 t > n + m
  makes that impossible, and also that two attempts at one round are both opened (`store.py`). It
  is checked here; with m = 0 it says t > n / 2.
- n - t nodes may be absent at any stage; one more, and the round is lost.

Graph. Each node agrees on masks with all others, or (`neighbors` = k) with k of them: the present
nodes are put in a circle in an order drawn from the digest of their keys, and each is linked to k/2
on either side (a Harary graph, as in Bell et al. 2020). One node's work then grows with k, not n.
What is opened is the sum of each part of the graph that honest survivors form; a server that lies
chooses who is absent, and could cut the circle at two places. So the graph must hold together by
itself: a Harary graph stays in one piece while fewer than k nodes are taken out, hence
k > (n - t) + m is checked. k/2 + 1 shares open a mask, honest nodes reveal one kind, and m <= k/2
keeps the colluders from opening the other kind alone: checked too. So the claim is that of the full
graph and rests on no chance. The price: a round is also lost if more than k/2 of one node's
neighbors are absent.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedlm.core.errors import EngineError, require
from fedlm.secure.keys import digest, is_public

MOST_MEMBERS = 1024
MOST_VALUES = 2**33
MOST_ATTEMPTS = 8


class SecureError(EngineError):
    """An error about a secure sum that cannot go on; no input was shown."""


class TooFew(SecureError):
    """The error of a sum that too few nodes are left for: the round is lost, the next goes on."""


class Member(NamedTuple):
    """A member of the federation: its name and its identity's public key."""

    name: str
    public: bytes


def least_neighbors(members: int, threshold: int, colluders: int) -> int:
    """Return with how many others a node must agree on masks, so that no part is cut off.

    >>> least_neighbors(200, 180, 5)
    26
    """
    return max(members - threshold + colluders + 1, 2 * colluders, 2)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all nodes of a secure sum agree on before it begins.

    Attributes:
      members: the federation's list, in the order of names.
      threshold: the number of nodes that must stay until the end, t.
      bits: sums are modulo 2^bits.
      size: the number of values of a vector.
      colluders: how many members are assumed to work together with the server, m.
      neighbors: with how many others a node agrees on masks; 0: with all.
    """

    members: tuple[Member, ...]
    threshold: int
    bits: int
    size: int
    colluders: int = 0
    neighbors: int = 0

    def __post_init__(self) -> None:
        n, t, m, k = len(self.members), self.threshold, self.colluders, self.neighbors
        names = [member.name for member in self.members]
        require(
            3 <= n <= MOST_MEMBERS,
            "secure.members",
            n,
            f"3 to {MOST_MEMBERS} nodes: of a sum of two, each knows the other's part",
        )
        require(
            names == sorted(set(names)), "secure.members", names[:8], "different names, in order"
        )
        keys = [member.public for member in self.members]
        require(
            all(map(is_public, keys)) and len(set(keys)) == n,
            "secure.members",
            names[:8],
            "a P-384 public key of its own for each member",
        )
        require(m >= 0, "secure.colluders", m, "zero or a number of nodes")
        least = (n + m) // 2 + 1
        require(
            least <= t <= n,
            "secure.threshold",
            t,
            f"{least} to {n}, because {n} nodes of which {m} may work together with the server "
            "must not sign two lists of survivors",
            "Raise it, or lower secure.colluders." if least <= n else "Lower secure.colluders.",
        )
        require(1 <= self.bits <= 64, "secure.bits", self.bits, "1 to 64")
        require(1 <= self.size <= MOST_VALUES, "secure.size", self.size, f"1 to {MOST_VALUES}")
        require(
            k == 0 or (2 <= k < n and k % 2 == 0),
            "secure.neighbors",
            k,
            f"0 (all) or an even number from 2 to {n - 1}",
        )
        require(
            k == 0 or k >= least_neighbors(n, t, m),
            "secure.neighbors",
            k,
            f"0 (all), or at least {least_neighbors(n, t, m)}: with {n - t} nodes absent and {m} "
            "in league with the server, it could cut off some of the others and learn their sum",
            "Raise it, or raise secure.threshold.",
        )

    @functools.cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the terms."""
        numbers = (self.threshold, self.bits, self.size, self.colluders, self.neighbors)
        listed = [part for m in self.members for part in (m.name.encode(), m.public)]
        return digest(b"fedlm secure terms 1", *(i.to_bytes(8, "big") for i in numbers), *listed)

    @property
    def share_threshold(self) -> int:
        """The number of shares that open a mask: t, or the majority of a neighborhood."""
        return self.neighbors // 2 + 1 if self.neighbors else self.threshold


@dataclass(frozen=True)
class Session:
    """One attempt at the sum of one round of a run."""

    terms: Terms
    run: str  # hexadecimal
    round: int
    attempt: int

    def __post_init__(self) -> None:
        ok = re.fullmatch(r"[0-9a-f]{8,64}", self.run) is not None
        require(ok, "secure run", self.run[:80], "8 to 64 hexadecimal digits")
        require(0 <= self.round < 2**32, "secure round", self.round, "a number below 2^32")
        require(
            0 <= self.attempt < MOST_ATTEMPTS,
            "secure attempt",
            self.attempt,
            f"below {MOST_ATTEMPTS}",
        )

    @functools.cached_property
    def digest(self) -> bytes:
        """The SHA-256 that every message of this attempt carries."""
        numbers = self.round.to_bytes(8, "big"), self.attempt.to_bytes(8, "big")
        return digest(b"fedlm secure session 1", self.terms.digest, self.run.encode(), *numbers)

    def name(self, place: int) -> str:
        """Return the name of the member at a place of the list."""
        return self.terms.members[place].name


def neighborhoods(terms: Terms, present: Sequence[int], seed: bytes) -> dict[int, tuple[int, ...]]:
    """Return the neighbors of each present node, in order and without itself.

    >>> from types import SimpleNamespace
    >>> found = neighborhoods(SimpleNamespace(neighbors=2), range(6), bytes(32))
    >>> all(i in found[j] for i in found for j in found[i]), {len(of) for of in found.values()}
    (True, {2})
    """
    half = terms.neighbors // 2
    if not half or len(present) <= terms.neighbors + 1:
        return {i: tuple(j for j in present if j != i) for i in present}
    circle = sorted(present, key=lambda i: hashlib.sha256(seed + i.to_bytes(2, "big")).digest())
    steps = [step for step in range(-half, half + 1) if step]
    return {
        node: tuple(sorted(circle[(at + step) % len(circle)] for step in steps))
        for at, node in enumerate(circle)
    }
