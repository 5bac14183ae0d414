"""Send a round's requests to nodes, and wait for their replies.

In:       a request per node, a transport, a quorum with its deadline.
Out:      well-formed replies in the order of the assignments, and a count of everything else.
Promise:  only replies to these requests are ever read; a node that is away, late, refuses or sends
          garbage is counted, and ends the round only if fewer than the quorum are left; a node that
          went away and came back is asked again.
Not here: what a reply means (`remote.py`), its format (`messages.py`), the network
          (`deploy/flower`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from fedlm.core.errors import EngineError, WireError
from fedlm.engine.messages import (
    NodeRequest,
    Payload,
    Refused,
    encode_request,
    printable,
    read_reply,
)

PRESENCE_SECONDS = 1.0  # between two looks at who is there
FIRST_TOLD, LAST_TOLD = 20.0, 600.0  # seconds of waiting that are told first, and most apart
SHORTEST_NAP, LONGEST_NAP = 0.02, 0.5  # seconds between two attempts to fetch


class Presence(NamedTuple):
    """The presence of a node: a lease that runs out unless the node renews it."""

    node_id: int
    online: bool
    since: str  # when it last joined; another value means that it was away in between
    until: float | str = 0.0


class Assignment(NamedTuple):
    """The members that a node answers for in a run."""

    name: str  # of the node
    first: int  # the number of its first member, over the whole federation
    clients: int
    text: str = ""  # a fingerprint
    leaves: tuple[tuple[str, int], ...] = ()  # of a relay: the nodes below, and their clients
    tokens: tuple[int, ...] = ()  # as in a hello


class Undelivered(Exception):
    """A message that gets no reply: its node went away, or the server lost it."""


class Transport(Protocol):
    """The carrier of payloads to nodes and back."""

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        """Send a payload and return its message id, or "" if the server did not take it."""
        ...

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        """Return the reply to a message, or None while there is none.

        Raises `Undelivered` if there will be none, and `WireError` without reading the reply if it
        is malformed, larger than `max_bytes` or from a node that was not asked.
        """
        ...

    def presence(self) -> dict[str, Presence]:
        """Return the presence of each registered node by name."""
        ...


class NodeReply(Protocol):
    """A node's reply of any kind."""

    @property
    def frames(self) -> tuple[bytes, ...]: ...


RequestT = TypeVar("RequestT", bound=NodeRequest)
ReplyT = TypeVar("ReplyT", bound=NodeReply)


class RequestKind(NamedTuple, Generic[RequestT, ReplyT]):
    """The encoder of one kind of request, and the parser of its replies."""

    encode: Callable[[RequestT], Payload]
    read: Callable[[Payload, RequestT], ReplyT]


TRAINING = RequestKind(encode_request, read_reply)
Frames = Callable[[Sequence[str]], Iterable[tuple[str, tuple[bytes, ...]]]]
"""Node names to the frames of their requests, encoded as they are sent, so that none is kept."""


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The share of asked nodes that must reply, and the deadline for the others."""

    quorum: float = 1.0  # share of the nodes asked, at least one of them
    deadline: float = math.inf  # seconds
    gives_up: bool = False  # whether to wait no longer, though fewer than the quorum replied


@dataclass
class RoundStats:
    """The outcome of a round's requests, by node."""

    round: int
    answered: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    garbage: dict[str, str] = field(default_factory=dict)
    asked_again: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)  # not asked, because of what they sent before
    weights: dict[str, float] = field(default_factory=dict)  # of the updates that were used
    put_aside: dict[str, int] = field(default_factory=dict)  # now, until this round
    lost: str = ""  # why a secure sum was not opened
    seconds: float = 0.0
    up_bytes: int = 0  # frames alone, as often as they were fetched or sent
    down_bytes: int = 0
    edges: dict[str, tuple[int, int]] = field(default_factory=dict)  # the same by node: up, down

    def moved(self, name: str, up: int = 0, down: int = 0) -> None:
        """Count bytes that travelled between the server and a node."""
        before = self.edges.get(name, (0, 0))
        self.edges[name] = (before[0] + up, before[1] + down)
        self.up_bytes += up
        self.down_bytes += down

    def add_edges(self, other: RoundStats) -> None:
        """Add the bytes by node of another step of the round, and leave the totals alone."""
        for name, (up, down) in other.edges.items():
            before = self.edges.get(name, (0, 0))
            self.edges[name] = (before[0] + up, before[1] + down)


class Dispatch(Generic[RequestT, ReplyT]):
    """The requests of a round, and their replies in the order of the assignments.

    The first pending node is waited for while its lease lasts. A node that is away moves to the
    end, and replies of the nodes after it are buffered until it has replied or the round is over.
    A round ends when every pending node is away or the deadline has passed, if the quorum has
    replied; otherwise it goes on waiting.
    """

    def __init__(
        self,
        transport: Transport,
        quorum: Quorum,
        requests: Mapping[str, RequestT],
        stats: RoundStats,
        *,
        in_order: bool = True,
        frames: Frames | None = None,
        say: Callable[[Sequence[str], float], None] = lambda names, seconds: None,
        exchange: RequestKind[RequestT, ReplyT],
    ) -> None:
        """Take requests by node name; without `frames` the requests hold their own.

        `say` is told now and then who is waited for, and since how many seconds.
        """
        self.transport, self.requests, self.exchange = transport, requests, exchange
        self.stats, self.in_order = stats, in_order
        self.frames = frames or (lambda names: ((name, requests[name].frames) for name in names))
        self.buffered: dict[str, ReplyT] = {}
        self.pending = list(requests)
        self.sent: dict[str, list[str]] = {}  # message ids by node: the first reply counts
        self.since: dict[str, str] = {}  # each node's `Presence.since` when it was last asked
        self.asked_at: dict[str, float] = {}  # when each node was last asked
        self.quorum, self.say, self.began = quorum, say, time.monotonic()
        self.ends, self._tells = self.began + quorum.deadline, FIRST_TOLD
        self._nodes: dict[str, Presence] = {}
        self._looked = -math.inf

    def replies(self) -> Iterator[tuple[str, ReplyT]]:
        """Yield well-formed replies by node, and count everything else."""
        nap = SHORTEST_NAP
        self._send(self.pending)
        while self.pending:
            if self._poll():
                nap = SHORTEST_NAP
                yield from self._release(over=False)
            elif self._over():
                break
            else:
                self._tell()
                time.sleep(nap)
                nap = min(LONGEST_NAP, 1.5 * nap)
        for name in self.pending:
            (self.stats.late if self._online(name) else self.stats.away).append(name)
        yield from self._release(over=True)

    def arrived(self) -> Iterator[tuple[str, ReplyT]]:
        """Yield replies that have arrived, without waiting, and send requests not sent yet."""
        for name in list(self.pending):
            if self._read(name):
                self.pending.remove(name)
            if name in self.buffered:
                yield name, self.buffered.pop(name)

    def _release(self, *, over: bool) -> Iterator[tuple[str, ReplyT]]:
        """Yield buffered replies in the order of the assignments, up to the first pending node."""
        for name in self.requests:
            if name in self.buffered:
                yield name, self.buffered.pop(name)
            elif name in self.pending and self.in_order and not over:
                return

    # ---- one node ----------------------------------------------------------------------

    def _poll(self) -> bool:
        """Read one reply: of the first pending node, or of any node after the deadline."""
        late = time.monotonic() >= self.ends
        for name in list(self.pending) if late else self.pending[:1]:
            if self._read(name):
                self.pending.remove(name)
                return True
            if not self._online(name) and len(self.pending) > 1 and not late:
                self.pending.append(self.pending.pop(0))
        return False

    def _read(self, name: str) -> bool:
        """Buffer a node's reply, or count it as refused or garbage; False if none came."""
        request = self.requests[name]
        try:
            payload = self._fetch(name, request.max_reply_bytes)
            if payload is None:
                return False
            reply = self.exchange.read(payload, request)
        except Refused as refusal:
            self.stats.refused[name] = str(refusal)
        except WireError as error:
            self.stats.garbage[name] = printable(str(error))
        else:
            self.stats.moved(name, up=sum(map(len, reply.frames)))
            self.buffered[name] = reply
        return True

    def _fetch(self, name: str, max_bytes: int) -> Payload | None:
        """Return a node's reply to any of the messages it was sent, asking again if needed."""
        if not self.sent.get(name) or self._came_back(name):
            self._send([name])
        for message_id in list(self.sent.get(name, ())):
            try:
                found = self.transport.fetch(message_id, max_bytes)
            except Undelivered:
                self.sent[name].remove(message_id)
                continue
            if found is not None:
                return found
        return None

    def _send(self, names: Sequence[str]) -> None:
        """Send their requests to the nodes that are present."""
        for name, frames in self.frames([name for name in names if self._online(name)]):
            node = self._presence().get(name)
            if node is None or not node.online:  # it left while others were asked
                continue
            if name in self.sent:
                self.stats.asked_again.append(name)
            request = replace(self.requests[name], frames=frames)
            message_id = self.transport.send(
                node.node_id, self.exchange.encode(request), request.round
            )
            self.stats.moved(name, down=sum(map(len, frames)))
            if message_id:
                self.sent.setdefault(name, []).append(message_id)
                self.since[name], self.asked_at[name] = node.since, time.monotonic()

    def _came_back(self, name: str) -> bool:
        """Return whether a node left and joined again: it may have lost the request.

        Asking twice is safe, because the same request gives the same reply.
        """
        node = self._presence().get(name)
        return node is not None and node.online and node.since != self.since[name]

    # ---- who is there, and is it enough ------------------------------------------------

    def _online(self, name: str) -> bool:
        node = self._presence().get(name)
        return node is not None and node.online

    def _presence(self) -> dict[str, Presence]:
        if time.monotonic() - self._looked > PRESENCE_SECONDS:
            self._nodes, self._looked = self.transport.presence(), time.monotonic()
        return self._nodes

    @property
    def least(self) -> int:
        """The number of nodes that must reply.

        It is a share of those who sent no garbage: what a node sends must not end a run.
        """
        decent = len(self.requests.keys() - (self.stats.garbage.keys() - set(self.stats.answered)))
        return min(decent, max(1, math.ceil(self.quorum.quorum * decent - 1e-9)))

    def _over(self) -> bool:
        """Return whether enough nodes have replied and no other is worth waiting for."""
        if len(self.stats.answered) + len(self.buffered) < self.least:
            return self._hopeless() or (self.quorum.gives_up and time.monotonic() >= self.ends)
        late = time.monotonic() >= self.ends
        return late or not any(self._online(name) for name in self.pending)

    def _hopeless(self) -> bool:
        """Return whether too few can still reply.

        A node that refused would refuse again; one that is there and was silent until its deadline
        stays silent. One that is away may come back.
        """
        late = time.monotonic() - self.quorum.deadline
        silent = [n for n in self.pending if self._online(n) and self.asked_at.get(n, late) < late]
        have = len(self.stats.answered) + len(self.buffered)
        return have + len(self.pending) - len(silent) < self.least

    def _tell(self) -> None:
        """Say who is waited for, after twice as long each time."""
        waited = time.monotonic() - self.began
        if waited >= self._tells:
            self._tells = min(2 * self._tells, self._tells + LAST_TOLD)
            self.say(self.pending, waited)

    def check_quorum(self, *, names: bool = True) -> None:
        """Raise `EngineError` if fewer nodes replied than the quorum.

        Without `names` the error does not tell who was asked, which tells of the draw of members.
        """
        stats = self.stats
        if len(stats.answered) >= self.least or not self.requests:
            return
        if not names:
            raise EngineError(
                f"round {stats.round}: too few nodes answered (quorum in federation.toml). Who was "
                "asked is a secret under a privacy plan: private/nodes.jsonl in the run directory, "
                "which only its owner can read, has names and reasons."
            )
        reasons = [f"{name} refused: {reason}" for name, reason in stats.refused.items()]
        reasons += [f"{name} sent garbage: {reason}" for name, reason in stats.garbage.items()]
        silent = f"did not answer within {self.quorum.deadline:g} s (deadline in federation.toml)."
        reasons += [f"{name} {silent}" for name in stats.late]
        raise EngineError(
            f"round {stats.round}: {len(stats.answered)} of {len(self.requests)} nodes answered, "
            f"{self.least} must (quorum in federation.toml). {' '.join(reasons)}"
        )
