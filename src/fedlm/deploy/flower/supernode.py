"""A node's side of the meeting point: fetch a message, answer it, stay alive.

In:       a node's kit.
Out:      messages from the server, one at a time, and a way to answer.
Promise:  every connection goes out from the node, over TLS, and is accepted only from a server
          whose certificate the federation's authority signed for that very name; everything sent
          is signed with the node's key; while the process lives it renews its lease, whatever it
          is busy with; a lost connection is tried again for ever, and that is said.
Not here: what a message asks for (`client_app.py`).

Flower's own SuperNode starts a process a message and runs the program that the server sent. Here
the same requests are made by a process that stays, and nothing that is sent is run. Written for
flwr 1.41.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlm.core.errors import EngineError, WireError
from fedlm.deploy import certificates
from fedlm.deploy.flower.pull import Missing, assemble
from fedlm.deploy.flower.push import push
from fedlm.deploy.workspace import Kit, address
from fedlm.engine.messages import LONGEST_FRAME

LEASE_SECONDS = 10.0  # Flower's shortest; twice as long after the last sign of life a node is away
LONGEST_WAIT = 5.0  # between two attempts to reach a server that is not there
Say = Callable[[str], None]


class Refused(Exception):
    """The server does not let this node in."""


class Lost(Exception):
    """The server is not there, or does not know this node any more."""


class Fleet:
    """A connection that is made again whenever it breaks."""

    def __init__(self, kit: Kit, say: Say = lambda text: None) -> None:
        self.settings, self.say = kit.settings, say
        self.address = address(self.settings.host, self.settings.port)
        private = certificates.load_private(kit.key)
        self._public = certificates.public_pem(private)
        self._client = FleetHttpClient.from_server_address(
            self.address,
            False,
            kit.authority,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )
        self._file = kit.path / "node.id"
        self._node = Node(node_id=_kept(self._file))  # 0 until it has joined for the first time
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._beating: threading.Thread | None = None

    # ---- being there -------------------------------------------------------------------

    def join(self, stop: Callable[[], bool], *, patient: bool) -> bool:
        """Comes to the meeting point; False if asked to stop before it was reached.

        A server that is not there is waited for if `patient`; one that refuses is an error.
        """
        wait, gives_up = 0.5, time.monotonic() + 3 * LEASE_SECONDS
        while not stop():
            try:
                with self._lock:
                    self._activate()
            except Refused as error:
                # A lease of this node that has not run out yet keeps itself out for a while.
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
            self._go()  # whoever was here under this name before, and was killed
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
            with contextlib.suppress(OSError):  # a kit may be read-only
                self._file.write_text(str(self._node.node_id), encoding="ascii")
        except httpx.HTTPStatusError as error:
            raise _refused(self.address, error) from None
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise EngineError(
                    f"the server at {self.address} showed a certificate that is not good for this "
                    f"federation: {error}. fedlm federation doctor says more."
                ) from None
            raise Lost(f"no connection to {self.address}: {error}.") from None

    def _beat(self) -> None:
        while not self._left.wait(LEASE_SECONDS / 3):
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=LEASE_SECONDS)
            # What goes wrong here the loop that fetches messages finds out, and says.
            with self._lock, contextlib.suppress(httpx.HTTPError):
                if not self._left.is_set():
                    self._client.SendNodeHeartbeat(request)

    def leave(self) -> None:
        """Says goodbye, so that nobody waits."""
        self._left.set()
        with self._lock:
            with contextlib.suppress(httpx.HTTPError):
                self._go()
            self._client.close()

    def _go(self) -> None:
        if self._node.node_id:
            with contextlib.suppress(httpx.HTTPStatusError):  # it was not there
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    # ---- messages ----------------------------------------------------------------------

    def receive(self) -> Message | None:
        """The next message, if one waits."""
        found = self._ask("PullMessages", PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        run_id = found.messages_list[0].metadata.run_id
        shape = found.message_object_trees[0]
        try:
            pull = make_pull_object_fn_protobuf(self._verb("PullObject"), self._node, run_id)
            message = assemble(shape, pull, LONGEST_FRAME)
        except (WireError, Missing) as error:  # the run ended meanwhile, or it is no message
            self.say(f"a message could not be fetched: {error}")
            return None
        make_confirm_message_received_fn_protobuf(
            self._verb("ConfirmMessageReceived"), self._node, run_id
        )(shape.object_id)
        message.metadata.__dict__["_message_id"] = shape.object_id
        return message

    def answer(self, message: Message) -> None:
        """Sends an answer; one that nobody waits for any more is dropped."""
        run_id = message.metadata.run_id

        def announce(head: Any, shape: Any) -> tuple[Any, Callable[[str, bytes], None]]:
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[head],
                message_object_trees=[shape],
                clientapp_runtime_list=[0.0],
            )
            pushed = self._ask("PushMessages", request)
            push_one = make_push_object_fn_protobuf(
                self._verb("PushObject"), self._node, run_id, pushed.session_id
            )
            return pushed.objects_to_push, push_one

        try:
            push(message, announce)
        except Stale:
            self.say("the answer came too late: nobody waits for it.")

    def _verb(self, name: str) -> Callable[[Any], Any]:
        return lambda request: self._ask(name, request)

    def _ask(self, verb: str, request: Any) -> Any:
        """A request that is made again while the connection is interrupted for a moment."""
        for wait in (0.2, 0.5, 1.0, None):
            try:
                return getattr(self._client, verb)(request)
            except httpx.TransportError as error:
                if wait is None:
                    raise Lost(f"lost the connection to {self.address}: {error}.") from None
                time.sleep(wait)
            except httpx.HTTPStatusError as error:
                if error.response.status_code in (401, 404):
                    raise Lost(f"the server at {self.address} does not know this node.") from None
                raise Stale(f"{verb}: {error.response.status_code}") from None
        raise AssertionError("unreachable")


class Stale(Exception):
    """The server does not want this any more."""


def _kept(file: Path) -> int:
    """The number under which this node was here before."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _refused(where: str, error: httpx.HTTPStatusError) -> Exception:
    code = error.response.status_code
    if code in (502, 503, 504):
        return Lost(f"the server at {where} is not ready.")
    return Refused(
        f"the server at {where} refused this node ({code}): its key is not registered there, or "
        "the clocks differ. fedlm federation doctor says more."
    )
