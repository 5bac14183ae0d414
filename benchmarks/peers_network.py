"""The same bytes there and back without fedlm: by Flower's own messages, and by a copy over TLS.

    python -m benchmarks.peers_network --nodes 2 --megabytes 10

Flower: its SuperLink as it comes, with TLS and a database on disk, under uvicorn; its `HttpGrid` at
the server; at nodes the requests of its SuperNode, with its number of objects in flight, in threads
of one process that answer with what they got. Its own waits of three seconds between two polls (of
grid and SuperNode) are left out: nodes nap 0.2 s here, or four times as long as a poll took, and
the grid 20 ms, so these are figures of what it carries.
TLS: a connection per node to a process that sends back what it reads.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app.message import remove_content_from_message
from flwr.common.serde import fab_to_proto, message_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, GetNodesRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlm.deploy import certificates, workspace
from fedlm.deploy.flower.client import _bundle
from fedlm.deploy.flower.records import (
    Sender,
    from_records,
    reply_message,
    request_message,
    with_message_id,
)
from fedlm.deploy.flower.supernode import nap_after
from fedlm.deploy.processes import follow_parent, free_port
from fedlm.engine.messages import Payload

NAP = 0.02


# ---- Flower ----------------------------------------------------------------------------------


class FlowerLoop:
    """A server that asks nodes by a grid of Flower's."""

    def __init__(self, made: workspace.Workspace, port: int, count: int) -> None:
        at, authority = f"127.0.0.1:{port}", made.authority.read_bytes()
        fab = fab_to_proto(Fab(hashlib.sha256(_bundle()).hexdigest(), _bundle(), {}))
        with closing(ControlHttpClient.from_server_address(at, False, authority, [])) as control:
            control.StartRun(StartRunRequest(fab=fab))
        with closing(RuntimeHttpClient.from_server_address(at, False, authority, [])) as client:
            asked = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            token = client.AcquireTask(asked).token
        self.grid = HttpGrid(at, False, authority, token=token)
        self.client = self.grid._runtime_client
        given = self.client.PullTaskInput(PullTaskInputRequest())
        self.grid.set_run(run_from_proto(given.run))
        self.sender = Sender(given.run.run_id, given.context.node_id, given.task_id)
        while len(nodes := self.client.GetNodes(GetNodesRequest()).nodes) < count:
            time.sleep(0.2)
        self.nodes = [node.node_id for node in nodes]

    def round(self, frame: bytes) -> float:
        """Return the seconds until all nodes have sent the frame back."""
        began = time.perf_counter()
        payload = Payload("train_request", {"round": 1}, (frame,))
        messages = [request_message(payload, node, 1, self.sender) for node in self.nodes]
        waiting = set(self.grid.push_messages(messages))
        del messages
        while waiting:
            for message in self.grid.pull_messages(waiting):
                if message.has_error() or from_records(message.content).frames != (frame,):
                    raise SystemExit("another frame came back.")
                waiting.discard(message.metadata.reply_to_message_id)
            time.sleep(NAP)
        return time.perf_counter() - began


def flower_node(made: workspace.Workspace, port: int) -> None:
    """A node that answers with what it got, by Flower's requests."""
    key, public = certificates.node_key()
    private = certificates.load_private(key)
    auth = NodeAuthHttpInterceptor(private, private.public_key())
    client: Any = FleetHttpClient.from_server_address(
        f"127.0.0.1:{port}", False, made.authority.read_bytes(), [auth]
    )
    client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
    node_id = client.ActivateNode(
        ActivateNodeRequest(public_key=public, heartbeat_interval=1800)
    ).node_id
    node = Node(node_id=node_id)
    while True:
        asked = time.monotonic()
        found = client.PullMessages(PullMessagesRequest(node=node))
        if not found.messages_list:
            time.sleep(nap_after(time.monotonic() - asked, quiet=0.0))
            continue
        (tree,), run_id = found.message_object_trees, found.messages_list[0].metadata.run_id
        contents = pull_objects(
            [part.object_id for part in iterate_object_tree(tree)],
            make_pull_object_fn_protobuf(client.PullObject, node, run_id),
        )
        message: Any = inflate_object_from_contents(tree.object_id, contents)
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=node, run_id=run_id, message_object_id=tree.object_id
            )
        )
        head = with_message_id(message.metadata, tree.object_id)
        frames = from_records(message.content).frames
        reply = reply_message(Payload("train_reply", {"round": 1}, frames), head)
        with no_object_id_recompute():
            told = message_to_proto(remove_content_from_message(reply))
            told.metadata.message_id = reply.object_id
            request = PushMessagesRequest(
                node=node, messages_list=[told], message_object_trees=[get_object_tree(reply)]
            )
            said = client.PushMessages(request)
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(client.PushObject, node, run_id, said.session_id),
                object_ids_to_push=set(said.objects_to_push),
            )


@contextmanager
def flower(made: workspace.Workspace, count: int) -> Iterator[FlowerLoop]:
    """Yield Flower's own loop with so many nodes."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "flwr.superlink.main:app", "--log-level", "error"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-access-log"]
    command += ["--ssl-certfile", str(made.certificate), "--ssl-keyfile", str(made.certificate_key)]
    database = str(made.path / "flower.db")
    environment = {**os.environ, "FLWR_DATABASE": database, "FLWR_TELEMETRY_ENABLED": "0"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    superlink = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]
    nodes = None
    try:
        _wait(port, superlink)
        nodes = _child("--be-flower-nodes", str(count), made, port)
        yield FlowerLoop(made, port, count)
    finally:
        for process in (nodes, superlink):
            if process is not None:
                process.terminate()
                process.wait()


# ---- a copy over TLS -------------------------------------------------------------------------


def copy_server(made: workspace.Workspace, port: int) -> None:
    """Send back what comes, until the process is ended."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.certificate_key)
    with socket.create_server(("127.0.0.1", port), backlog=64) as listener:
        while True:
            raw, _ = listener.accept()
            threading.Thread(target=_echo, args=(context, raw), daemon=True).start()


def _echo(context: ssl.SSLContext, raw: socket.socket) -> None:
    try:
        with context.wrap_socket(raw, server_side=True) as line:
            while size := int.from_bytes(line.recv(8), "big"):
                got = bytearray(size)
                _fill(line, got)
                line.sendall(got)
    except OSError:
        return


def _fill(line: Any, into: bytearray) -> None:
    view = memoryview(into)
    while view:
        count = line.recv_into(view)
        if not count:
            raise OSError("the connection is closed")
        view = view[count:]


class TlsCopy:
    """Connections over TLS that carry a frame there and back."""

    def __init__(self, made: workspace.Workspace, port: int, count: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(made.authority)
        at = ("127.0.0.1", port)
        self.lines = [
            context.wrap_socket(socket.create_connection(at), server_hostname="127.0.0.1")
            for _ in range(count)
        ]

    def round(self, frame: bytes) -> float:
        """Return the seconds until all have sent the frame back."""
        began = time.perf_counter()
        threads = [threading.Thread(target=self._one, args=(x, frame)) for x in self.lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _one(self, line: Any, frame: bytes) -> None:
        line.sendall(len(frame).to_bytes(8, "big"))
        line.sendall(frame)
        got = bytearray(len(frame))
        _fill(line, got)
        if got != frame:
            os._exit(1)


@contextmanager
def tls(made: workspace.Workspace, count: int) -> Iterator[TlsCopy]:
    """Yield a plain copy over TLS with so many connections."""
    port = free_port()
    process = _child("--be-copy", "1", made, port)
    try:
        _wait(port, process)
        yield TlsCopy(made, port, count)
    finally:
        process.terminate()
        process.wait()


# ---- processes -------------------------------------------------------------------------------


def _child(role: str, count: str, made: workspace.Workspace, port: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.peers_network", role, count]
    return subprocess.Popen([*command, "--workspace", str(made.path), "--port", str(port)])


def _wait(port: int, process: Any) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("a process of the benchmark has ended.")
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("a process of the benchmark does not listen.")


def frame_of(size: float) -> bytes:
    """Return so many megabytes that nobody has seen before."""
    return np.random.default_rng(time.monotonic_ns()).bytes(max(1, int(size * 1e6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0, 1, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--be-flower-nodes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--be-copy", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.workspace:
        follow_parent()
        made = workspace.Workspace(asked.workspace)
        if asked.be_copy:
            return copy_server(made, asked.port)
        nodes = [
            threading.Thread(target=flower_node, args=(made, asked.port))
            for _ in range(asked.be_flower_nodes)
        ]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fed"
        made = workspace.init(path, "fed", ["127.0.0.1"], free_port(), [], bind="127.0.0.1")
        for name, start in (("Flower's messages", flower), ("TLS", tls)):
            with start(made, asked.nodes) as loop:
                for size in asked.megabytes:
                    taken = [loop.round(frame_of(size)) for _ in range(asked.rounds)]
                    print(name, size, "MB", [f"{t:.3f}" for t in taken], "s", flush=True)


if __name__ == "__main__":
    main()
