"""Hold a node's poll open until there is a message for it.

In:       a poll that found nothing; word that messages for some nodes have come.
Out:      the answer to the poll: at once if there is a message, else when one comes or after a
          few seconds.
Promise:  no message that comes during a poll waits for the next one; a node that hangs up is not
          handed a message; a poll asks Flower at most twice, and not at all before a message comes
          if Flower had none a few seconds ago.
Not here: who may poll (`superlink.py`), how often nodes do (`supernode.py`).

Flower answers `pull-messages` at once, so a node that naps between two polls adds its nap to every
exchange, and secure sums have five exchanges per round. Written for flwr 1.41; can go once the
fleet interface waits by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest

HOLD_SECONDS = 2.0  # a node that is told to stop waits at most so long for its poll
FRESH_SECONDS = 15.0  # for which an answer without a message is believed, if none was sent since
HELD_HEADER = "fedlm-held"  # tells a node that it has waited here and need not nap
POLLED, ASKED = "/v1/fleet/pull-messages", "/v1/runtime/push-messages"


class HeldAnswer(NamedTuple):
    """What an application answered."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Polls:
    """The polls of nodes that wait for a message."""

    def __init__(self, seconds: float = HOLD_SECONDS) -> None:
        self.seconds = seconds
        self._waiting: dict[int, set[asyncio.Event]] = {}
        self._empty: dict[int, tuple[float, bytes, HeldAnswer]] = {}  # when Flower had nothing

    async def answer(self, app: Any, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Answer one poll; `body` is the request, which has been read."""
        node = _node(body)
        came = asyncio.Event()
        self._waiting.setdefault(node, set()).add(came)  # before Flower is asked: no gap
        try:
            known = self._known(node, body)
            answer = known or await _ask(app, scope, body)
            if answer.status == 200 and not _has_message(answer.body):
                if known is None and not came.is_set():
                    self._empty[node] = time.monotonic(), body, answer
                if not await self._wait(came, receive):
                    return
                if came.is_set():
                    answer = await _ask(app, scope, body)
                answer = answer._replace(headers=[*answer.headers, (HELD_HEADER.encode(), b"1")])
        finally:
            self._waiting[node].discard(came)
            if not self._waiting[node]:
                del self._waiting[node]
        start = {"status": answer.status, "headers": answer.headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": answer.body})

    def _known(self, node: int, body: bytes) -> HeldAnswer | None:
        """Return Flower's last answer to a poll, if it had no message and none has come since."""
        if node not in self._empty:
            return None
        since, asked, answer = self._empty[node]
        return answer if asked == body and time.monotonic() - since < FRESH_SECONDS else None

    async def _wait(self, came: asyncio.Event, receive: Any) -> bool:
        """Wait for a message, or until the time is over; return False if the node hung up."""
        gone = asyncio.ensure_future(receive())  # the body is read: what comes is its end
        word = asyncio.ensure_future(came.wait())
        try:
            await asyncio.wait({gone, word}, timeout=self.seconds, return_when="FIRST_COMPLETED")
            return not (gone.done() and gone.result()["type"] == "http.disconnect")
        finally:
            for task in (gone, word):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def wake(self, nodes: Iterable[int]) -> None:
        """Answer the polls of these nodes: messages for them have come."""
        for node in nodes:
            self._empty.pop(node, None)
            for came in self._waiting.get(node, ()):
                came.set()


def addressees(body: bytes) -> set[int]:
    """Return the nodes that an operator's request has messages for; none if it is no request."""
    try:
        request = PushAppMessagesRequest.FromString(body)
    except Exception:  # the library declares none; Flower says what is wrong with it
        return set()
    return {message.metadata.dst_node_id for message in request.messages_list}


def _node(body: bytes) -> int:
    try:
        return int(PullMessagesRequest.FromString(body).node.node_id)
    except Exception:
        return 0  # Flower refuses it


def _has_message(body: bytes) -> bool:
    try:
        return bool(PullMessagesResponse.FromString(body).messages_list)
    except Exception:
        return True  # not for us to hold


async def _ask(app: Any, scope: Any, body: bytes) -> HeldAnswer:
    """Pass a request to an application, and return its answer."""
    left = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()
    status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> Any:
        if not left:
            await never.wait()
        return left.pop()

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return HeldAnswer(status, headers, b"".join(parts))
