"""The server at which nodes meet: Flower's SuperLink, behind a guard.

In:       a federation's workspace.
Out:      a server that nodes and the operator reach over TLS on one port.
Promise:  only nodes whose keys are registered may fetch work and answer, each for itself alone;
          only who holds the federation's control key may register nodes, start runs or see them;
          a request larger than a chunk is refused before it is read; no code that is sent here is
          ever run.
Not here: rounds (`server_app.py`), the operator's side (`client.py`), the nodes' (`supernode.py`).

Flower serves its three interfaces on one port, and the one for operators asks nobody who they are.
So the SuperLink is started from here, with a guard before it: `/v1/fleet` is for nodes, which sign
what they send, and everything else needs the control key. A SuperLink compares the key of a request
with the node that the request names, but not with the sender that its messages name: the guard
does. Written for flwr 1.41, with its application factory (`flwr.superlink.main`); can go once the
SuperLink authenticates operators and checks the senders of messages itself.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from fedlm.deploy.flower.client import CONTROL_HEADER, SuperLinkClient
from fedlm.deploy.flower.database import make_ready
from fedlm.deploy.workspace import Workspace

# Flower cuts objects into chunks of 5 MB; nodes send nothing much larger.
LARGEST_REQUEST = 48 << 20
REPLIES = "/v1/fleet/push-messages"
START_TIMEOUT = 120.0  # seconds until the server listens


class Guard:
    """An ASGI application that passes only authorised requests on to another."""

    def __init__(self, app: Any, secret: str) -> None:
        self.app, self.secret = app, secret.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = self._verdict(scope)
            if status is not None:
                await _refuse(send, status)
                return
            if scope["path"].rstrip("/") == REPLIES:
                body = await _read(receive)
                if body is None or not is_own_reply(body):
                    await _refuse(send, 403)
                    return
                receive = _replay(body, receive)
        elif scope["type"] != "lifespan":
            return
        await self.app(scope, receive, send)

    def _verdict(self, scope: Any) -> int | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        size = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers or not (size == b"" or size.isdigit()):
            return 411
        if int(size or 0) > LARGEST_REQUEST:
            return 413
        if scope["path"].startswith("/v1/fleet/"):
            return None  # signed by the node's key, checked behind this guard
        shown = headers.get(CONTROL_HEADER.encode(), b"")
        return None if hmac.compare_digest(shown, self.secret) else 403


def is_own_reply(body: bytes) -> bool:
    """Tell whether all messages in a request are replies by the node that the request names."""
    try:
        request = PushMessagesRequest.FromString(body)
    except Exception:  # the library declares none; after any error the body is no request
        return False
    heads = [message.metadata for message in request.messages_list]
    own = request.node.node_id
    return bool(heads) and all(h.src_node_id == own and h.reply_to_message_id for h in heads)


async def _read(receive: Any) -> bytes | None:
    """Read the body of a request of checked length; return None if the sender went away."""
    body, more = bytearray(), True
    while more:
        part = await receive()
        if part["type"] != "http.request" or len(body) > LARGEST_REQUEST:
            return None
        body += part.get("body", b"")
        more = part.get("more_body", False)
    return bytes(body)


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` function that yields a body that was already read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Any:
        return left.pop() if left else await receive()

    return give


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def application(workspace: Workspace) -> Any:
    """Return the guarded SuperLink of a federation."""
    settings = workspace.settings
    files = (workspace.authority, workspace.certificate, workspace.certificate_key)
    ca, certificate, key = (file.read_bytes() for file in files)
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=settings.bind,
        port=settings.port,
        insecure=False,
        certificates=(ca, certificate, key),
        superexec_auth_secret=None,
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(workspace.authority),
        ssl_certfile=str(workspace.certificate),
        ssl_keyfile=str(workspace.certificate_key),
        database=str(workspace.database),
        isolation="process",
        runtime_dependency_install=False,
    )
    inner = create_app(config, SuperLinkLifespan)
    return Guard(inner, workspace.control_key.read_text(encoding="ascii"))


def _register(workspace: Workspace) -> None:
    """Wait until the server listens, then allow the nodes of the workspace to join."""
    with closing(SuperLinkClient(workspace, timeout=START_TIMEOUT)) as client:
        client.register()


def serve(workspace: Workspace, say: Callable[[str], None]) -> None:
    """Serve a federation's SuperLink until the process ends."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    make_ready(workspace.database, say)
    threading.Thread(target=_register, args=[workspace], daemon=True).start()
    settings = workspace.settings
    uvicorn.run(
        application(workspace),
        host=settings.bind,
        port=settings.port,
        ssl_certfile=str(workspace.certificate),
        ssl_keyfile=str(workspace.certificate_key),
        log_level="warning",
        access_log=False,
        workers=1,
    )
