"""The operator's side of a SuperLink: who may join, who is there, a run's transport.

In:       a federation's workspace, with its control key.
Out:      nodes by name, and a transport that carries the messages of one run.
Promise:  every request is over TLS, checked against the federation's own authority, and carries
          the control key; a lost connection is tried again until it is back or an error says so.
Not here: what is sent (`engine/messages.py`), how (`transport.py`), rounds (`server_app.py`).

Made of the clients that `flwr run` and `flwr-serverapp` are made of, because those commands would
start processes and unpack programs where nothing but messages is wanted. Written for flwr 1.41
(`flwr.supercore.control`, `flwr.supercore.runtime`, the protobuf requests); can go once flwr has a
public client for runs without a program.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient

from fedlm.core.errors import EngineError
from fedlm.deploy.flower.line import Answer, Line
from fedlm.deploy.flower.parcels import OF_RUNS, Part
from fedlm.deploy.flower.records import Sender
from fedlm.deploy.flower.transport import LastingTransport, RunTransport, presence_of
from fedlm.deploy.flower.whole import Post
from fedlm.deploy.versions import VersionedTransport
from fedlm.deploy.workspace import Workspace, address
from fedlm.engine.dispatch import Presence

# Flower requires a bundle with every run; this one holds no code and is never unpacked.
BUNDLE = b"""[project]
name = "fedlm-federation"
version = "1.0.0"
description = "Names a run. It holds no program: both sides run the fedlm that they installed."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedlm"

[tool.flwr.app.components]
serverapp = "fedlm.deploy.server_app:app"
clientapp = "fedlm.deploy.node_worker:app"

[tool.flwr.app.config]
"""
CONTROL_HEADER = "fedlm-control"
FIRST_TIMEOUT = 10.0  # seconds to wait for a server that was never reached
LOST_TIMEOUT = 120.0  # seconds to wait for a server that was reached before and restarts


class _ControlKey:
    """An interceptor that adds the control key to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[CONTROL_HEADER] = self.secret
        return call_next(context)


class _Conflict(Exception):
    """The server's answer that an object exists already, or no longer exists."""


class SuperLinkClient:
    """A connection to a SuperLink with the control key."""

    def __init__(self, workspace: Workspace, *, timeout: float = FIRST_TIMEOUT) -> None:
        """Connect to a federation's server; fail if it does not answer within `timeout` seconds."""
        self.workspace = workspace
        settings = workspace.settings
        local = settings.bind in ("0.0.0.0", "::", "127.0.0.1")
        self.host = "127.0.0.1" if local else settings.host
        self.address = address(self.host, settings.port)
        self.control = self._client(ControlHttpClient, timeout=timeout)

    def _client(self, kind: Any, *more: Any, timeout: float = LOST_TIMEOUT) -> Any:
        """Return a Flower client that sends the control key; a timeout of 0 seconds tries once."""
        return kind.from_server_address(
            self.address,
            False,
            self.workspace.authority.read_bytes(),
            [_ControlKey(self.workspace.control_secret), *more],
            retry_invoker=_retries(timeout) if timeout else None,
        )

    def close(self) -> None:
        self.control.close()

    # ---- nodes -------------------------------------------------------------------------

    def register(self) -> None:
        """Allow the nodes of the workspace, and no others, to join."""
        registered = {node.public_key: node for node in self._nodes()}
        wanted = self.workspace.nodes()
        for key, node in registered.items():
            if key not in wanted.values():
                self._call("UnregisterNode", UnregisterNodeRequest(node_id=node.node_id))
        for name, key in wanted.items():
            if key not in registered:
                with suppress(_Conflict):  # another process registers the same nodes
                    self._call("RegisterNode", RegisterNodeRequest(public_key=key, name=name))

    def nodes(self) -> dict[str, Presence]:
        """Return the presence of each registered node by name."""
        return {node.name: presence_of(node) for node in self._nodes()}

    def _nodes(self) -> list[Any]:
        found = self._call("ListNodes", ListNodesRequest()).nodes_info
        return [node for node in found if node.status != "unregistered"]

    def _call(self, verb: str, request: Any) -> Any:
        try:
            return getattr(self.control, verb)(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 412:
                raise _Conflict from None
            raise EngineError(
                f"the server at {self.address} refused {verb}: {error.response.status_code}. Is it "
                "the server of this federation?"
            ) from None
        except httpx.TransportError as error:
            raise EngineError(
                f"no connection to {self.address}: {error}. Is fedlm federation serve running?"
            ) from None

    # ---- a run -------------------------------------------------------------------------

    @contextmanager
    def run(self) -> Iterator[RunTransport]:
        """Start a run on the SuperLink for the duration of the block, and end all other runs."""
        for left in self._call("ListRuns", ListRunsRequest()).run_dict.values():
            if left.finished_at == "":
                with suppress(_Conflict):
                    self._call("StopRun", StopRunRequest(run_id=left.run_id))
        bundle = _bundle()
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        self._call("StartRun", StartRunRequest(fab=fab_to_proto(fab)))
        with self._transport(self._acquire_token()) as transport:
            yield transport

    def _acquire_token(self) -> str:
        """Return a token for the server's task in the run that was just started."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        with closing(self._client(RuntimeHttpClient)) as client:
            token: str = client.AcquireTask(request).token
        if not token:
            raise EngineError(f"the server at {self.address} gave this run to somebody else.")
        return token

    @contextmanager
    def _transport(self, token: str) -> Iterator[RunTransport]:
        """Yield the transport of a run, and report the run's outcome at the end."""
        shows_token = RuntimeTokenHttpInterceptor(token=token)
        version = RuntimeVersionHttpInterceptor(component_name="flwr-serverapp")
        with closing(self._client(RuntimeHttpClient, version, shows_token)) as client:
            given = client.PullTaskInput(PullTaskInputRequest())
            heartbeat = HeartbeatSender(_heartbeat(client))
            heartbeat.start()
            status = SubStatus.FAILED
            try:
                sender = Sender(given.run.run_id, given.context.node_id, given.task_id)
                with closing(self._line(token)) as line:
                    yield RunTransport(client, sender, _poster(line))
                status = SubStatus.COMPLETED
            finally:
                heartbeat.stop()
                self._end_run(status, shows_token)

    def _line(self, token: str) -> Line:
        """Return a connection for requests of many parts."""
        shown = {CONTROL_HEADER: self.workspace.control_secret, TASK_TOKEN_HEADER: token}
        authority = self.workspace.authority.read_bytes()
        port = self.workspace.settings.port
        return Line(self.host, port, authority, lambda *request: shown)

    def _end_run(self, status: str, shows_token: Any) -> None:
        """Report the outcome of a run, without waiting for a server that is gone."""
        request = PushTaskOutputRequest(sub_status=status, details="")
        client = self._client(RuntimeHttpClient, shows_token, timeout=0)
        with closing(client), suppress(httpx.HTTPError):
            client.PushTaskOutput(request)


@contextmanager
def open_transport(workspace: Workspace) -> Iterator[VersionedTransport]:
    """Yield a transport to a federation's nodes; explain connection errors in plain words."""
    _return_freed_memory()
    with _locked(workspace), _network_errors(), closing(SuperLinkClient(workspace)) as client:
        client.register()
        with LastingTransport(client.run) as transport:
            yield VersionedTransport(transport)


def _return_freed_memory() -> None:
    """Make glibc return large blocks of memory as soon as they are free.

    Otherwise it keeps the blocks of all requests of a round, in sum a whole payload.
    """
    threshold, at_least = -3, 1 << 18  # M_MMAP_THRESHOLD, bytes
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(threshold, at_least)


@contextmanager
def _locked(workspace: Workspace) -> Iterator[None]:
    """Hold the workspace's lock: two runs at a time would take each other's nodes."""
    with open(workspace.path / "server" / "train.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EngineError(
                f"another run of {workspace.path} is going on here. Wait for its end, or stop it."
            ) from None
        yield


@contextmanager
def _network_errors() -> Iterator[None]:
    """Convert connection errors to messages that say what to do."""
    try:
        yield
    except httpx.TransportError as error:
        raise EngineError(
            f"the server is gone: {error}. Start fedlm federation serve again and go on with "
            "--resume."
        ) from None
    except httpx.HTTPStatusError as error:
        raise EngineError(
            f"the server answered {error.response.status_code} to {error.request.url.path}: this "
            "run is over there. Go on with --resume."
        ) from None


def _bundle() -> bytes:
    """Return the bundle that Flower requires: a zip archive with a list of its contents."""
    digest = hashlib.sha256(BUNDLE).hexdigest()
    content = f"pyproject.toml,{digest},{8 * len(BUNDLE)}"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in (("pyproject.toml", BUNDLE), (".info/CONTENT", content.encode())):
            archive.writestr(zipfile.ZipInfo(name), data)
    return made.getvalue()


def _heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Return a function that renews a run's lease and tells whether it succeeded.

    Flower's own function ends the process if the SuperLink has forgotten the run.
    """

    def send() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    return send


def _poster(line: Line) -> Post:
    """Return a function that makes requests of many parts, until the server is back."""

    def post(verb: str, parts: Sequence[Part], names: Sequence[str]) -> Answer:
        made = lambda: line.call(OF_RUNS + verb, parts, names)  # noqa: E731
        answer: Answer = _retries(LOST_TIMEOUT).invoke(made)
        return answer

    return post


def _retries(timeout: float) -> RetryInvoker:
    """Return a policy that retries while the server is unreachable; any answer is final."""
    return RetryInvoker(
        wait_gen_factory=lambda: exponential(base_delay=0.2, max_delay=2),
        recoverable_exceptions=(httpx.TransportError,),
        max_tries=None,
        max_time=timeout,
        should_giveup=lambda error: "certificate" in str(error).lower(),
    )
