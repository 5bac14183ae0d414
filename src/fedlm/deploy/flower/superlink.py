"""The server at which nodes meet: Flower's SuperLink, behind a guard.

In:       a federation's workspace.
Out:      a server that nodes and the operator reach over TLS on one port.
Promise:  only nodes whose keys are registered may fetch work and answer, each for itself alone;
          only who holds the federation's control key may register nodes, start runs or see them;
          nothing of a request is read before it is known who sent it, and then no more than was
          announced and signed; what a node may leave lying is bounded; no code that is sent here
          is ever run; an answer that was fetched does not stay in the server's files.
Not here: rounds (`server_app.py`), the operator's side (`client.py`), the nodes' (`supernode.py`),
          signatures (`signing.py`), connections (`connections.py`).

Flower serves its three interfaces on one port, and the one for operators asks nobody who they are.
So the SuperLink is started from here, with a guard before it: `/v1/fleet` is for nodes, which sign
all that they send (Flower's own signature covers a time alone), and everything else needs the
control key. A SuperLink compares the key of a request
with the node that the request names, but not with the sender that its messages name: the guard
does. Written for flwr 1.41, with its application factory (`flwr.superlink.main`); can go once the
SuperLink authenticates operators and checks the senders of messages itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import hmac
import json
import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TASK_TOKEN_HEADER
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from fedlm.core.durable import write_atomically
from fedlm.core.errors import EngineError
from fedlm.deploy import certificates, connections, history
from fedlm.deploy.doctor import EXPIRING_DAYS
from fedlm.deploy.flower.bodies import Parcel, Turned, length_of, read
from fedlm.deploy.flower.client import CONTROL_HEADER, SuperLinkClient
from fedlm.deploy.flower.database import make_ready
from fedlm.deploy.flower.exchange import Caller, Exchange
from fedlm.deploy.flower.forget import forget_deleted
from fedlm.deploy.flower.middlewares import only_where_needed
from fedlm.deploy.flower.parcels import OF_NODES, OF_RUNS
from fedlm.deploy.flower.polls import ASKED, POLLED, Polls, addressees
from fedlm.deploy.flower.store import with_files
from fedlm.deploy.membership import Identities
from fedlm.deploy.signing import WHO_AM_I, Identity, Signer, Unsigned, Verifier
from fedlm.deploy.workspace import Workspace
from fedlm.engine.messages import VERSION

FLEET, REPLIES, OBJECTS = "/v1/fleet/", "/v1/fleet/push-messages", "/v1/fleet/push-object"
CONFIRMED = "/v1/runtime/confirm-message-received"
RUNS = ("/v1/control/start-run", "/v1/control/stop-run")
START_TIMEOUT = 120.0  # seconds until the server listens
MOST_AT_ONCE = 4  # requests of one node: it makes one, and beats beside it
REQUEST_SECONDS = 600.0  # for Flower to answer, and for a node to read it
ANNOUNCED = 8  # bytes of memory for a byte of a tree: a name of 66 takes 400 in `FileStore`
LEAST_FREE = 1 << 30  # bytes of disk that nodes leave to the server
MESSAGE_SECONDS = 43_200.0  # Flower forgets a message after so long
REGISTER_SECONDS = 1.0  # between two looks at the nodes of the workspace
TOLD_SECONDS = 60.0  # between two lines about the same refusal
MOST_TOLD = 1000


class FrontDoor:
    """An ASGI application that passes only authorised requests on to another."""

    def __init__(
        self,
        app: Any,
        secret: str,
        verifier: Verifier,
        *,
        quota: float = math.inf,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        exchange: Callable[[Polls], Exchange] | None = None,
        sightings: Path | None = None,
        known: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Guard an application.

        Args:
          app: the application.
          secret: the control key.
          verifier: checks nodes' signatures.
          quota: bytes that a node may leave lying, until the server has fetched them.
          folder: where they lie; nodes leave it some room.
          say: is told who was turned away, and why.
          exchange: makes what answers requests for whole messages; without it there are none.
          sightings: a file about the processes that use each node's key.
          known: is told the addresses from which nodes, or the operator, have come.
        """
        self.app, self.secret, self.verifier = app, secret.encode(), verifier
        self.stored, self.folder, self.say = Stored(quota), folder, say
        self.polls = Polls()
        self.exchange = exchange(self.polls) if exchange else None
        self.known = known
        self.seen = Sightings(sightings, say)
        self._at_once: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            length = length_of(headers)
            if scope["path"].startswith(FLEET) or scope["path"] == WHO_AM_I:
                await self._of_node(scope, headers, length, receive, send)
            else:
                await self._of_operator(scope, headers, receive, send)
        except Turned as turned:
            self._tell(scope, turned)
            await _refuse(send, turned)

    # ---- nodes -------------------------------------------------------------------------

    async def _of_node(
        self, scope: Any, headers: dict[bytes, bytes], length: int, receive: Any, send: Any
    ) -> None:
        """Pass on what a registered node signed; the body is read only after that is known."""
        if scope.get("query_string"):
            raise Turned(400, "the request has a query")
        try:
            signer = self.verifier.check(scope["method"], scope["path"], headers, length)
        except Unsigned as unsigned:
            raise Turned(401, str(unsigned)) from None
        self.known(_address(scope))
        name = signer.identity.name
        if self._at_once[name] >= MOST_AT_ONCE:
            raise Turned(429, "the node makes too many requests at once")
        self._at_once[name] += 1
        try:
            if self.exchange is not None and scope["path"].startswith(OF_NODES):
                await self._parcel_of_node(scope, headers, length, signer, receive, send)
                return
            body = await read(receive, length)
            if hashlib.sha256(body).hexdigest() != signer.body:
                raise Turned(401, "the body is not the one that was signed")
            self.seen.see(name, signer.process)
            if scope["path"] == WHO_AM_I:
                about = {"name": name, **_about(), "until": signer.identity.until}
                await _answer(send, {**about, "parcels": self.exchange is not None})
                return
            self._check(scope["path"], headers, signer.identity, body)
            async with asyncio.timeout(REQUEST_SECONDS):
                if scope["path"].rstrip("/") == POLLED:
                    await self.polls.answer(self.app, scope, body, receive, send)
                else:
                    await self.app(scope, _replay(body, receive), send)
            if self.exchange is not None and scope["path"].rstrip("/") in (REPLIES, OBJECTS):
                self.exchange.wake_all()
        finally:
            self._at_once[name] -= 1

    async def _parcel_of_node(
        self,
        scope: Any,
        headers: dict[bytes, bytes],
        length: int,
        signer: Signer,
        receive: Any,
        send: Any,
    ) -> None:
        """Answer a request of many parts; a signature covers their table."""
        assert self.exchange is not None
        parcel, identity = Parcel(receive, length), signer.identity
        await parcel.open(signer.body)
        self.seen.see(identity.name, signer.process)
        _check_key(headers, identity)

        def admit(size: int) -> None:
            self._admit(identity, size)

        def announce(head: bytes) -> None:
            self._announce(identity, head)

        caller = Caller(key=identity.public, announce=announce, admit=admit)
        async with asyncio.timeout(REQUEST_SECONDS):
            await self.exchange.answer(scope["path"], caller, parcel, receive, send)

    def _check(self, path: str, headers: Any, identity: Identity, body: bytes) -> None:
        """Raise unless a node speaks for itself alone and leaves no more than it may."""
        _check_key(headers, identity)
        path = path.rstrip("/")
        if path == REPLIES:
            self._announce(identity, body)
        elif path == OBJECTS:
            self._admit(identity, len(body))

    def _announce(self, identity: Identity, body: bytes) -> None:
        """Raise unless a node announces replies of its own."""
        replies = own_replies(body)
        if not replies:
            raise Turned(403, "a node answers questions, and for itself alone")
        self.stored.announce(identity.name, replies)
        self.stored.add(identity.name, ANNOUNCED * len(body))

    def _admit(self, identity: Identity, size: int) -> None:
        """Count bytes that a node is about to leave, or raise."""
        if self.folder is not None and shutil.disk_usage(self.folder).free < LEAST_FREE:
            raise Turned(507, "the server's disk is full")
        self.stored.add(identity.name, size)

    # ---- the operator ------------------------------------------------------------------

    async def _of_operator(
        self, scope: Any, headers: dict[bytes, bytes], receive: Any, send: Any
    ) -> None:
        shown = headers.get(CONTROL_HEADER.encode(), b"")
        if not hmac.compare_digest(shown, self.secret):
            raise Turned(403, "the control key of the federation is wanted")
        self.known(_address(scope))
        path = scope["path"].rstrip("/")
        if self.exchange is not None and path.startswith(OF_RUNS):
            parcel = Parcel(receive, length_of(headers))
            await parcel.open(None)
            token = headers.get(TASK_TOKEN_HEADER.encode(), b"").decode("latin-1")
            caller = Caller(token=token, fetched=self.stored.fetched)
            await self.exchange.answer(path, caller, parcel, receive, send)
            return
        if path == CONFIRMED:
            body = await read(receive, length_of(headers))
            receive = _replay(body, receive)
            with contextlib.suppress(Exception):  # Flower says what is wrong with it
                self.stored.fetched(
                    ConfirmMessageReceivedRequest.FromString(body).message_object_id
                )
        elif path == ASKED:
            body = await read(receive, length_of(headers))
            await self.app(scope, _replay(body, receive), send)
            self.polls.wake(addressees(body))
            return
        elif path in RUNS:
            self.stored.clear()
        await self.app(scope, receive, send)

    def _tell(self, scope: Any, turned: Turned) -> None:
        """Say who was turned away, each address and reason once in a while."""
        text, now = f"turned away {_address(scope)}: {turned.reason}", time.monotonic()
        if turned.reason and now - self._told.get(text, -TOLD_SECONDS) >= TOLD_SECONDS:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told[text] = now
            self.say(text)


class Stored:
    """The bytes that nodes left at the server and that nobody has fetched yet.

    >>> stored = Stored(100)
    >>> stored.announce("north", ["message"])
    >>> stored.add("north", 90)
    >>> stored.fetched("message")
    >>> stored.add("north", 90)
    >>> stored.add("north", 90)
    Traceback (most recent call last):
    fedlm.deploy.flower.bodies.Turned: the node leaves more than its quota of 0 MB
    """

    def __init__(self, quota: float) -> None:
        self.quota = quota
        self._messages: dict[str, dict[str, list[float]]] = {}  # by node: when, and bytes

    def announce(self, node: str, messages: Iterable[str]) -> None:
        """Count what a node sends from now on towards these messages."""
        held, now = self._messages.setdefault(node, {}), time.monotonic()
        for message in messages:
            held[message] = held.pop(message, [now, 0.0])  # it is the newest
        for message, (since, _) in list(held.items()):
            if now - since > MESSAGE_SECONDS:
                del held[message]

    def add(self, node: str, size: int) -> None:
        """Count bytes to the newest message of a node, or raise `Turned`."""
        held = self._messages.setdefault(node, {"": [time.monotonic(), 0.0]})
        if sum(bytes_ for _, bytes_ in held.values()) + size > self.quota:
            megabytes = self.quota / 1e6
            raise Turned(507, f"the node leaves more than its quota of {megabytes:.0f} MB")
        newest = next(reversed(held), "")
        held.setdefault(newest, [time.monotonic(), 0.0])[1] += size

    def fetched(self, message: str) -> None:
        """Forget a message that Flower has deleted."""
        for held in self._messages.values():
            held.pop(message, None)

    def clear(self) -> None:
        """Forget everything: with a run, Flower deletes its messages."""
        self._messages.clear()


class Sightings:
    """The processes that use each node's key: two at a time mean that a kit was copied."""

    def __init__(self, file: Path | None, say: Callable[[str], None]) -> None:
        self.file, self.say = file, say
        self._known: dict[str, list[str]] = {}  # by node: processes, the newest last
        self._twice: dict[str, float] = {}

    def see(self, node: str, process: str) -> None:
        """Record the process of a request, and tell if it returns after another one."""
        known = self._known.setdefault(node, [])
        if known and known[-1] == process:
            return
        if process in known:
            known.remove(process)
            self._tell(node)
        known.append(process)
        del known[:-MOST_PROCESSES]

    def _tell(self, node: str) -> None:
        now = time.time()
        if now - self._twice.get(node, 0.0) > TOLD_SECONDS:
            self._twice[node] = now
            self.say(f"two processes use the kit of {node} at the same time: was it copied?")
            if self.file is not None:
                write_atomically(self.file, json.dumps(self._twice).encode(), private=True)


MOST_PROCESSES = 16


def own_replies(body: bytes) -> list[str]:
    """Return the ids of the messages in a request, if all are replies by the node it names."""
    try:
        request = PushMessagesRequest.FromString(body)
    except Exception:  # the library declares none; after any error the body is no request
        return []
    heads = [message.metadata for message in request.messages_list]
    own = request.node.node_id
    if not all(h.src_node_id == own and h.reply_to_message_id for h in heads):
        return []
    return [head.message_id for head in heads]


def _check_key(headers: dict[bytes, bytes], identity: Identity) -> None:
    """Raise unless a request shows Flower the key that signed it."""
    shown = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode(), b"")
    if shown != base64.b64encode(identity.public):
        raise Turned(401, "the request shows another key than the one that signed it")


def _address(scope: Any) -> str:
    """Return the address from which a request came."""
    return str((scope.get("client") or ("somebody",))[0])


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` function that yields a body that was already read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Any:
        return left.pop() if left else await receive()

    return give


def _about() -> dict[str, Any]:
    """Return what a server tells a node of itself."""
    return {"fedlm": version("fedlm"), "protocol": VERSION, "time": time.time()}


async def _answer(send: Any, facts: dict[str, Any], status: int = 200) -> None:
    body = json.dumps(facts).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Any, turned: Turned) -> None:
    await _answer(send, {"reason": turned.reason}, turned.status)


def application(
    workspace: Workspace,
    say: Callable[[str], None],
    known: Callable[[str], None] = lambda address: None,
) -> Any:
    """Return the guarded SuperLink of a federation; `known` is told where nodes are."""
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
    app = create_app(config, SuperLinkLifespan)
    store = with_files(app, workspace.database)
    state = app.state.linkstate_factory.state()
    return FrontDoor(
        only_where_needed(app),
        workspace.control_secret,
        Verifier(Identities(workspace), marks=workspace.signed),
        known=known,
        quota=settings.quota_gigabytes * 1e9,
        folder=workspace.database.parent,
        say=say,
        exchange=lambda polls: Exchange(state, store, polls),
        sightings=workspace.sightings,
    )


def _register(workspace: Workspace) -> None:
    """Wait until the server listens, then keep its nodes those of the workspace."""
    with closing(SuperLinkClient(workspace, timeout=START_TIMEOUT)) as client:
        client.register()
        known = workspace.nodes()
        while True:
            time.sleep(REGISTER_SECONDS)
            with contextlib.suppress(EngineError):  # it is tried again
                if workspace.nodes() != known:
                    client.register()
                    known = workspace.nodes()


def serve(workspace: Workspace, say: Callable[[str], None]) -> None:
    """Serve a federation's SuperLink until the process ends."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    settings = workspace.settings
    files = (str(workspace.certificate), str(workspace.certificate_key))
    left = (certificates.until(workspace.certificate.read_bytes()) - time.time()) / 86_400
    if left < EXPIRING_DAYS:
        renew = f"fedlm federation renew {workspace.path}"
        say(f"the server's certificate ends in {left:.0f} days: {renew}")
    connections.check_certificate_and_key(*files)
    listener = connections.listen(settings.bind, settings.port, settings.connections_per_address)
    make_ready(workspace.database, say)
    forget_deleted(workspace.database)
    history.note(workspace.history, "serve", version=version("fedlm"))
    threading.Thread(target=_register, args=[workspace], daemon=True).start()
    guarded = application(workspace, say, listener.connections.know)
    gc.collect()
    gc.freeze()  # modules live as long as the server: a tenth of its time went into visiting them
    connections.run(guarded, listener, *files)
