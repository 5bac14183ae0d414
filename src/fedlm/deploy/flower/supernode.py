"""A node's side of a SuperLink: receive a request, reply to it, stay alive.

In:       a node's kit; a function from request to reply.
Out:      requests from the server as payloads, one at a time, and a way to reply.
Promise:  every connection goes out from the node, over TLS, and is accepted only from a server
          whose certificate the federation's authority signed for that very name; everything sent
          is signed with the node's key; while the process lives it renews its lease, whatever it
          is busy with; a lost connection is tried again for ever, and that is said.
Not here: what a request asks for (`node_worker.py`, `relay.py`).

Flower's own SuperNode starts one process per message and runs the program that the server sent.
Here the same requests are made by a process that stays, and nothing that is sent is run. Written
for flwr 1.41 (`flwr.supernode.fleet_http_client`, the protobuf requests); can go once a SuperNode
can call a function in its own process.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
from flwr.app import Message, Metadata
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from google.protobuf.message import DecodeError

from fedlm.core.documents import json_value
from fedlm.core.errors import EngineError, WireError
from fedlm.core.types import Say
from fedlm.deploy import certificates, signing
from fedlm.deploy.flower.line import Answer, Line
from fedlm.deploy.flower.parcels import OF_NODES, Part, in_order
from fedlm.deploy.flower.polls import HELD_HEADER, POLLED
from fedlm.deploy.flower.pull import Missing, PullObject, assemble, object_puller
from fedlm.deploy.flower.push import NotTaken, PushObject, object_pusher, push
from fedlm.deploy.flower.records import from_records, reply_message, with_message_id
from fedlm.deploy.flower.whole import Puller, Pushed, given, push_whole
from fedlm.deploy.workspace import Kit, address
from fedlm.engine.messages import LONGEST_FRAME, Payload, encode_refusal, printable

LEASE_SECONDS = 10.0  # Flower's minimum; a node counts as away after two leases without a beat
LONGEST_WAIT = 5.0  # seconds between two attempts to reach a server that is not there
# Seconds between two polls that a server answered at once, in a run and after it.
BUSY_NAP, IDLE_NAP = 0.2, 2.0
IDLE_SECONDS = 60.0  # without a request, after which a node is idle
NAP_PER_POLL = 4.0  # a nap is at least so many times as long as the poll before it took
Stop = Callable[[], bool]
T = TypeVar("T")


class Rejected(Exception):
    """The server does not let this node in."""


class Lost(Exception):
    """The server is not there, or does not know this node any more."""


class Stale(Exception):
    """The server no longer wants this reply."""


class Received(NamedTuple):
    """A request, and the head of the message that carried it."""

    payload: Payload
    head: Metadata


def serve(node: SuperNode, respond: Callable[[Payload], Payload], *, say: Say, stop: Stop) -> None:
    """Reply to requests one after the other, and join again when the server was away."""
    try:
        while node.join(stop, patient=True):
            say(f"{node.settings.name}: joined {node.settings.federation} at {node.address}")
            try:
                return _reply_to_all(node, respond, stop)
            except Lost as error:
                say(str(error))
    finally:
        node.leave()


def _reply_to_all(node: SuperNode, respond: Callable[[Payload], Payload], stop: Stop) -> None:
    last = time.monotonic()
    while not stop():
        asked = time.monotonic()
        try:
            received = node.receive()
            if received is not None:
                node.reply(received.head, respond(received.payload))
                last = time.monotonic()
                continue
        except Stale:
            pass  # the run ended while its message was on the way
        if node.held:
            continue  # it has waited at the server
        now = time.monotonic()
        time.sleep(nap_after(now - asked, quiet=now - last))


def nap_after(poll: float, *, quiet: float) -> float:
    """Return the seconds until the next poll, when the last one took `poll` and found nothing.

    `quiet` are the seconds since the last request. The polls of many nodes must not keep a slow
    server from its work.

    >>> nap_after(0.01, quiet=1.0), nap_after(0.25, quiet=1.0), nap_after(9.0, quiet=1.0)
    (0.2, 1.0, 2.0)
    >>> nap_after(0.01, quiet=100.0)
    2.0
    """
    least = BUSY_NAP if quiet < IDLE_SECONDS else IDLE_NAP
    return max(least, min(IDLE_NAP, NAP_PER_POLL * poll))


class _Signature:
    """An interceptor that signs all of a request; Flower's own signs a time alone."""

    def __init__(self, private: Any, public: bytes) -> None:
        self.private, self.public, self.process = private, public, signing.new_process()
        self.held = False  # whether the server held the last poll open

    def intercept(self, context: Any, call_next: Any) -> Any:
        request = context.request
        signed = signing.sign(
            self.private,
            self.public,
            request.method,
            request.url.path,
            request.content,
            self.process,
        )
        request.headers.update(signed)
        response = call_next(context)
        if request.url.path == POLLED:
            self.held = HELD_HEADER in response.headers
        return response

    def headers(self, method: str, path: str, table: bytes, length: int) -> dict[str, str]:
        """Return the headers of a request of many parts."""
        shown = base64.b64encode(self.public).decode("ascii")
        signed = signing.sign(self.private, self.public, method, path, table, self.process, length)
        return {**signed, FLEET_HTTP_PUBLIC_KEY_HEADER: shown}


class SuperNode:
    """A node's connection to the SuperLink, made again whenever it breaks."""

    def __init__(self, kit: Kit, say: Say = lambda text: None) -> None:
        self.settings, self.say = kit.settings, say
        self.address = address(self.settings.host, self.settings.port)
        private = certificates.load_private(kit.key)
        self._public = certificates.public_pem(private)
        self._signature = _Signature(private, self._public)
        self._client = FleetHttpClient.from_server_address(
            self.address,
            False,
            kit.authority,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
                self._signature,
            ],
        )
        at = (self.settings.host, self.settings.port)
        self._line = Line(*at, kit.authority, self._signature.headers)
        self._parcels = False  # whether the server knows requests of many parts
        self._pushed = Pushed()
        self._file = kit.path / "node.id"
        self._node = Node(node_id=_read_id(self._file))  # 0 until it has joined for the first time
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def node_id(self) -> int:
        """The number under which the server knows this node; 0 until it has joined."""
        return int(self._node.node_id)

    @property
    def held(self) -> bool:
        """Whether the server held the last poll open until a message came or its time was over."""
        return self._signature.held

    # ---- being there -------------------------------------------------------------------

    def join(self, stop: Stop, *, patient: bool) -> bool:
        """Join the federation; return False if asked to stop before the server was reached.

        If `patient`, wait for a server that is not there. A server that rejects the node is an
        error.
        """
        wait, gives_up = 0.5, time.monotonic() + 3 * LEASE_SECONDS
        while not stop():
            try:
                with self._lock:
                    self._activate()
            except Rejected as error:
                # A lease from this node's last process, not yet over, rejects it for a while.
                if not patient or time.monotonic() > gives_up:
                    raise EngineError(str(error)) from None
                self._left.wait(2.0)
                continue
            except Lost as error:
                gives_up = time.monotonic() + 3 * LEASE_SECONDS
                if not patient:
                    raise EngineError(str(error)) from None
                self.say(f"{error} Trying again in {wait:.0f} s.")
                self._left.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, daemon=True)
                self._beating.start()
            return True
        return False

    def _activate(self) -> None:
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=LEASE_SECONDS)
        try:
            self._deactivate()  # a killed process that had joined under this name
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
            self._parcels = takes_parcels(self._line.get(signing.WHO_AM_I))
            with contextlib.suppress(OSError):  # a kit may be read-only
                self._file.write_text(str(self.node_id), encoding="ascii")
        except httpx.HTTPStatusError as error:
            raise _rejected(self.address, error) from None
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise EngineError(
                    f"the server at {self.address} showed a certificate that is not good for this "
                    f"federation: {error}. fedlm federation doctor says more."
                ) from None
            raise Lost(f"no connection to {self.address}: {error}.") from None

    def _beat(self) -> None:
        """Renew the lease until the node leaves."""
        while not self._left.wait(LEASE_SECONDS / 3):
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=LEASE_SECONDS)
            # Errors are ignored here: the loop that receives requests meets and reports them.
            with self._lock, contextlib.suppress(httpx.HTTPError):
                if not self._left.is_set():
                    self._client.SendNodeHeartbeat(request)

    def leave(self) -> None:
        """Leave the federation, so that the server does not wait for this node."""
        self._left.set()
        with self._lock:
            with contextlib.suppress(httpx.HTTPError):
                self._deactivate()
            self._client.close()
            self._line.close()

    def _deactivate(self) -> None:
        if self.node_id:
            with contextlib.suppress(httpx.HTTPStatusError):  # it was not there
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node_id))

    # ---- messages ----------------------------------------------------------------------

    def receive(self) -> Received | None:
        """Return the next request, or None; a message that is no payload is refused."""
        asked, with_it = PullMessagesRequest(node=self._node), dict[str, bytes]()
        try:
            if self._parcels:
                answer = self._post("poll", [asked.SerializeToString()], ())
                self._signature.held = HELD_HEADER in answer.headers
                found = PullMessagesResponse.FromString(answer.part())
                with_it = given(answer)
            else:
                found = self.call("PullMessages", asked)
            if not found.messages_list:
                return None
            run_id, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]
            message = assemble(tree, self._puller(run_id, tree, with_it), LONGEST_FRAME)
        except (WireError, Missing, DecodeError, IndexError) as error:
            # The run ended meanwhile, or it is no message.
            self.say(f"a message could not be fetched: {error}")
            return None
        if not set(in_order([tree])) <= with_it.keys():  # else the server has confirmed it
            confirmed = ConfirmMessageReceivedRequest(
                node=self._node, run_id=run_id, message_object_id=tree.object_id
            )
            self.call("ConfirmMessageReceived", confirmed)
        head = with_message_id(message.metadata, tree.object_id)
        try:
            return Received(from_records(message.content), head)
        except WireError as error:
            self.say(f"refused a message: {error}")
            self.reply(head, encode_refusal(str(error)))
            return None

    def _puller(self, run_id: int, tree: Any, with_it: dict[str, bytes]) -> PullObject:
        if self._parcels:
            return Puller(self._post, self._node, run_id, tree, with_it)
        return object_puller(self._verb("PullObject"), self._node, run_id)

    def reply(self, request: Metadata, payload: Payload) -> None:
        """Send the reply to a request; drop a reply that the server no longer waits for."""
        message = reply_message(payload, request)
        try:
            if self._parcels:
                self._reply_whole(request.run_id, message)
            else:
                self._reply_objects(request.run_id, message)
        except (Stale, NotTaken):
            self.say("the reply came too late: nobody waits for it.")

    def _reply_whole(self, run_id: int, message: Message) -> None:
        def announce(head: Any, tree: Any) -> bytes:
            return self._announced(head, tree).SerializeToString()

        def of_session(session: str) -> PushObjectRequest:
            return PushObjectRequest(node=self._node, run_id=run_id, session_id=session)

        read = PushMessagesResponse.FromString
        push_whole(message, self._post, announce, read, of_session, self._pushed)

    def _reply_objects(self, run_id: int, message: Message) -> None:
        def announce(head: Any, tree: Any) -> tuple[list[str], PushObject]:
            said = self.call("PushMessages", self._announced(head, tree))
            verb, session = self._verb("PushObject"), said.session_id
            return said.objects_to_push, object_pusher(verb, self._node, run_id, session)

        push(message, announce)

    def _announced(self, head: Any, tree: Any) -> PushMessagesRequest:
        return PushMessagesRequest(
            node=self._node,
            messages_list=[head],
            message_object_trees=[tree],
            clientapp_runtime_list=[0.0],
        )

    def _post(self, verb: str, parts: Sequence[Part], names: Sequence[str]) -> Answer:
        return self._again(verb, lambda: self._line.call(OF_NODES + verb, parts, names))

    def _verb(self, name: str) -> Callable[[Any], Any]:
        return lambda request: self.call(name, request)

    def call(self, verb: str, request: Any) -> Any:
        """Make a request, and repeat it while the connection is briefly interrupted."""
        return self._again(verb, lambda: getattr(self._client, verb)(request))

    def _again(self, verb: str, call: Callable[[], T]) -> T:
        for wait in (0.2, 0.5, 1.0, None):
            try:
                return call()
            except httpx.TransportError as error:
                if wait is None:
                    raise Lost(f"lost the connection to {self.address}: {error}.") from None
                time.sleep(wait)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 429 and wait is not None:
                    time.sleep(wait)
                    continue
                if error.response.status_code in (401, 404):
                    raise Lost(f"the server at {self.address} does not know this node.") from None
                raise Stale(f"{verb}: {error.response.status_code}") from None
        raise AssertionError("unreachable")


def takes_parcels(told: bytes) -> bool:
    """Read whether a server knows requests of many parts from what it tells a node.

    >>> takes_parcels(b'{"name": "north", "parcels": true}'), takes_parcels(b'{"name": "north"}')
    (True, False)
    """
    try:
        return json_value(told, "the answer", WireError)["parcels"] is True
    except (WireError, KeyError, TypeError):
        return False


def _read_id(file: Path) -> int:
    """Read the number under which this node joined before; return 0 if it never joined."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _rejected(where: str, error: httpx.HTTPStatusError) -> Exception:
    code = error.response.status_code
    if code in (429, 502, 503, 504):
        return Lost(f"the server at {where} is not ready.")
    reason = reason_of(error.response) or "its key is not registered there, or the clocks differ"
    return Rejected(
        f"the server at {where} refused this node ({code}): {reason}. fedlm federation doctor says "
        "more."
    )


def reason_of(response: httpx.Response) -> str:
    """Return the reason in a server's refusal, without what could control a terminal."""
    try:
        return printable(str(response.json()["reason"]))[:200]
    except (ValueError, KeyError, TypeError, httpx.ResponseNotRead):
        return ""
