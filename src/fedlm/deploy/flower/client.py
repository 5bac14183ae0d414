"""The operator's side of the meeting point: who may join, who is there, a run's grid.

In:       a federation's folder, with its control key.
Out:      nodes by name, and a Flower grid that carries the messages of one run.
Promise:  every request is over TLS, checked against the federation's own authority, and carries
          the control key; a lost connection is tried again until it is back or it is said.
Not here: what is sent (`engine/messages.py`), rounds (`server_app.py`).

Written for flwr 1.41: it uses the clients that `flwr run` and `flwr-serverapp` are made of, because
those commands would start processes and unpack programs where nothing but messages is wanted.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
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
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedlm.core.errors import EngineError
from fedlm.deploy.flower.pull import Missing, fetch
from fedlm.deploy.flower.push import send
from fedlm.deploy.workspace import Home, address
from fedlm.engine.dispatch import Presence, Undelivered

# Flower wants a bundle with every run; this one holds no code, and nobody unpacks it.
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
KIND = "train.fedlm"
# Flower's own answers for nodes that went away and messages that it no longer has.
UNAVAILABLE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)

FIRST_SECONDS = 10.0  # for a server that was never seen
PATIENCE_SECONDS = 120.0  # for one that was, and is being started again


class _Key:
    """Shows the control key with every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[CONTROL_HEADER] = self.secret
        return call_next(context)


class _Taken(Exception):
    """It is there already, or no longer."""


class Operator:
    """A connection to the meeting point, with the control key."""

    def __init__(self, home: Home, *, patience: float = FIRST_SECONDS) -> None:
        self.home = home
        settings = home.settings
        local = settings.bind in ("0.0.0.0", "::", "127.0.0.1")
        host = "127.0.0.1" if local else settings.host
        self.address = address(host, settings.port)
        self.control = self._client(ControlHttpClient, patience=patience)

    def _client(self, kind: Any, *more: Any, patience: float = PATIENCE_SECONDS) -> Any:
        return kind.from_server_address(
            self.address,
            False,
            self.home.authority.read_bytes(),
            [_Key(self.home.control_key.read_text(encoding="ascii")), *more],
            retry_invoker=_retries(patience),
        )

    def register(self) -> None:
        """Lets the nodes of the folder join, and nobody else."""
        there = {node.public_key: node for node in self._nodes()}
        wanted = self.home.nodes()
        for key, node in there.items():
            if key not in wanted.values():
                self._ask("UnregisterNode", UnregisterNodeRequest(node_id=node.node_id))
        for name, key in wanted.items():
            if key not in there:
                with suppress(_Taken):  # by another process that registers the same nodes
                    self._ask("RegisterNode", RegisterNodeRequest(public_key=key, name=name))

    def _nodes(self) -> list[Any]:
        found = self._ask("ListNodes", ListNodesRequest()).nodes_info
        return [node for node in found if node.status != "unregistered"]

    def nodes(self) -> dict[str, Presence]:
        """The registered nodes by name: whether they are there, and since when."""
        return {node.name: presence(node) for node in self._nodes()}

    def _ask(self, verb: str, request: Any) -> Any:
        try:
            return getattr(self.control, verb)(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 412:
                raise _Taken from None
            raise EngineError(
                f"the server at {self.address} refused {verb}: {error.response.status_code}. Is it "
                "the server of this federation?"
            ) from None
        except httpx.TransportError as error:
            raise EngineError(
                f"no connection to {self.address}: {error}. Is fedlm federation serve running?"
            ) from None

    @contextmanager
    def run(self) -> Iterator[HttpGrid]:
        """A new run on the link, and its grid; runs that were left over are stopped first."""
        for left in self._ask("ListRuns", ListRunsRequest()).run_dict.values():
            if left.finished_at == "":
                with suppress(_Taken):
                    self._ask("StopRun", StopRunRequest(run_id=left.run_id))
        bundle = _bundle()
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        self._ask("StartRun", StartRunRequest(fab=fab_to_proto(fab)))
        client = self._client(RuntimeHttpClient)
        try:
            task = client.AcquireTask(
                AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
        finally:
            client.close()
        if not task.token:
            raise EngineError(f"the server at {self.address} gave this run to somebody else.")
        with self._grid(task.token) as grid:
            yield grid

    @contextmanager
    def _grid(self, token: str) -> Iterator[HttpGrid]:
        client = self._client(
            RuntimeHttpClient,
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            RuntimeTokenHttpInterceptor(token=token),
        )
        grid = HttpGrid(self.address, False, self.home.authority.read_bytes(), token=token)
        grid._client = client  # its own would not show the control key
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = given.task_id
        TaskIdentity.run_id = given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        beat = HeartbeatSender(_beat(client))
        beat.start()
        ended = SubStatus.FAILED
        try:
            yield grid
            ended = SubStatus.COMPLETED
        finally:
            beat.stop()
            grid._client = self._client(RuntimeHttpClient, RuntimeTokenHttpInterceptor(token=token))
            grid._client._retry_invoker = None  # who leaves does not wait
            with _forgiven():
                grid._client.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=""))
            client.close()
            grid.close()

    def close(self) -> None:
        self.control.close()


@contextmanager
def _forgiven() -> Iterator[None]:
    with suppress(httpx.HTTPError):
        yield


@contextmanager
def running(home: Home) -> Iterator[LastingTransport]:
    """A run of a federation, for as long as the block lasts; what goes wrong is said in words."""
    _give_back()
    with _alone(home), _sentences():
        operator = Operator(home)
        try:
            operator.register()
            with LastingTransport(operator) as post:
                yield post
        finally:
            operator.close()


def _give_back() -> None:
    """Has large pieces of memory returned as soon as they are free.

    glibc would keep those of all requests of a round, a payload in sum.
    """
    threshold, at_least = -3, 1 << 18  # M_MMAP_THRESHOLD, bytes
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(threshold, at_least)


class GridTransport:
    """A Flower grid, one message at a time."""

    def __init__(self, grid: Any, presence: Callable[[Any], Presence]) -> None:
        self.grid, self._presence = grid, presence
        self._asked: dict[str, int] = {}  # who may answer a message

    def send(self, node_id: int, records: RecordDict, round: int) -> str:
        return self.send_message(Message(records, node_id, KIND, group_id=str(round)))

    def send_message(self, message: Message) -> str:
        made = send(self.grid, message)
        self._asked[made] = message.metadata.dst_node_id
        return made

    def fetch(self, message_id: str, most: int) -> Message | None:
        try:
            found = fetch(self.grid, message_id, sender=self._asked[message_id], most=most)
        except Missing:
            raise Undelivered(message_id) from None
        if found is not None and found.has_error() and found.error.code in UNAVAILABLE:
            raise Undelivered(message_id)
        if found is not None:
            del self._asked[message_id]  # an answer is fetched once
        return found

    def presence(self) -> dict[str, Presence]:
        return {node.name: self._presence(node) for node in self.grid.get_nodes()}


class LastingTransport:
    """A grid that outlives its run on the link.

    A link that was away for a minute ends the run there. Then another one is begun; what was sent
    before is lost, and everybody counts as having come anew, so that they are asked again.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator, self.runs = operator, 0
        self._sent: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> LastingTransport:
        self._post = GridTransport(self._stack.enter_context(self.operator.run()), presence)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def send(self, node_id: int, records: Any, round: int) -> str:
        return self._keep(self._try(lambda: self._post.send(node_id, records, round), ""))

    def send_message(self, message: Message) -> str:
        return self._keep(self._try(lambda: self._post.send_message(message), ""))

    def fetch(self, message_id: str, most: int) -> Message | None:
        if message_id not in self._sent:
            raise Undelivered(message_id)
        found: Message | None = self._try(lambda: self._post.fetch(message_id, most), None)
        return found

    def presence(self) -> dict[str, Presence]:
        found: dict[str, Presence] = self._try(self._post.presence, {})
        return {n: p._replace(since=f"{self.runs} {p.since}") for n, p in found.items()}

    def _keep(self, message_id: str) -> str:
        self._sent.add(message_id)
        return message_id

    def _try(self, ask: Callable[[], Any], lost: Any) -> Any:
        try:
            return ask()
        except (httpx.HTTPStatusError, RunNotRunningException):
            self._stack.close()
            self._sent.clear()
            self.runs += 1
            self.__enter__()  # where this fails too, the server has another reason, and says it
            return lost


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """One run at a time: two would take each other's nodes."""
    with open(home.path / "server" / "train.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EngineError(f"another run of {home.path} is going on here.") from None
        yield


@contextmanager
def _sentences() -> Iterator[None]:
    """What the network says, in words."""
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
    """The file that Flower wants: a zip archive with a list of what is in it."""
    digest = hashlib.sha256(BUNDLE).hexdigest()
    content = f"pyproject.toml,{digest},{8 * len(BUNDLE)}"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in (("pyproject.toml", BUNDLE), (".info/CONTENT", content.encode())):
            archive.writestr(zipfile.ZipInfo(name), data)
    return made.getvalue()


def presence(node: Any) -> Presence:
    """What Flower knows of a node."""
    return Presence(
        node_id=node.node_id,
        online=node.status == "online",
        since=node.last_activated_at,
        until=node.online_until,
    )


def _beat(client: RuntimeHttpClient) -> Any:
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def send() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    return send


def _retries(patience: float) -> RetryInvoker:
    """Tries again while the server cannot be reached; anything that it says is final."""
    return RetryInvoker(
        wait_gen_factory=lambda: exponential(base_delay=0.2, max_delay=2),
        recoverable_exceptions=(httpx.TransportError,),
        max_tries=None,
        max_time=patience,
        should_giveup=lambda error: "certificate" in str(error).lower(),
    )
