"""What a round over the network costs beside the work: time over payload, and memory.

    python -m benchmarks.network                 2 and 16 nodes, an empty round to 100 MB, and peers
    python -m benchmarks.network --alone --nodes 2 --megabytes 0.1 1 4 16 64

Nodes answer at once with the frame they were sent, and the server sums them as in a run. Nodes
share a process, the SuperLink has one of its own, and everything goes over TLS on loopback.
MB/s counts a payload there and back for each node. Memory is the peak of a process during the
rounds, less what it held before them. Beside it the same bytes by Flower's own messages and by a
plain copy over TLS (`benchmarks/peers_network.py`); CPU seconds are
those of server, SuperLink and nodes, which other work on the machine changes less than their time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fedavg import fedavg
from benchmarks.memory import Growth
from benchmarks.peers_network import flower, frame_of, tls
from fedlm.core.types import Start
from fedlm.deploy import workspace
from fedlm.deploy.flower.client import open_transport
from fedlm.deploy.flower.supernode import SuperNode, serve
from fedlm.deploy.processes import Child, children, follow_parent, free_port, wait_for_port
from fedlm.engine.dispatch import Assignment, Quorum, Transport
from fedlm.engine.messages import SUMS, Payload, TrainReply, encode_reply, read_request
from fedlm.engine.remote import RemoteEngine
from fedlm.wire.dense import dense


def idle(payload: Payload) -> Payload:
    """Replies with the frame that was sent: the right size, and no work."""
    request = read_request(payload)
    sums = (dict.fromkeys(SUMS, 1.0),)
    reply = TrainReply(
        round=request.round, members=request.members, frames=request.frames, sums=sums
    )
    return encode_reply(reply)


def engine_of(transport: Transport, names: list[str]) -> RemoteEngine:
    """The engine of a run over the network, with one client per node."""
    assignments = [Assignment(name, place, 1) for place, name in enumerate(names)]
    return RemoteEngine(
        fedavg(len(names)),
        transport,
        assignments,
        run="0" * 32,
        recipe="",
        seed=0,
        exact=dense(),
        quorum=Quorum(),
    )


def parameters(count: int) -> jax.Array:
    """Numbers that look like no others, and nothing else in memory."""
    drawn = np.random.default_rng(0).standard_normal(count, np.float32)
    made: jax.Array = jax.block_until_ready(jnp.asarray(drawn))
    del drawn
    time.sleep(1.0)  # until what is free has been given back
    return made


@partial(jax.jit, donate_argnums=0)
def another(sent: jax.Array) -> jax.Array:
    """Other parameters, in place of these."""
    return sent + 1.0


def rounds(engine: RemoteEngine, sent: jax.Array, count: int) -> list[float]:
    """Seconds of each round; the sum must be what it is."""
    members = np.arange(len(engine.assignments))
    seconds = []
    for number in range(count):
        began = time.perf_counter()
        total = jax.block_until_ready(
            engine.total(Start(sent), engine.prepare(number, members)).total
        )
        seconds.append(time.perf_counter() - began)
        if not np.allclose(total.delta[:1000], len(members) * sent[:1000], rtol=1e-5):
            raise SystemExit("the sum is another one.")
        del total
        sent = another(sent)  # or the SuperLink would have the frame already
    return seconds


def be_idle(made: workspace.Workspace) -> None:
    """All nodes of a federation, in this process, until it is ended."""
    said = lambda text: print(text, flush=True)  # noqa: E731
    work = {"say": said, "stop": lambda: False}
    nodes = [
        threading.Thread(target=serve, args=(SuperNode(made.kit(name), said), idle), kwargs=work)
        for name in made.nodes()
    ]
    for node in nodes:
        node.start()
    for node in nodes:  # a process whose main thread has ended starts no more threads
        node.join()


class Row(NamedTuple):
    """What some rounds with one size took."""

    seconds: list[float]
    cpu: float  # seconds a round, of server, SuperLink and nodes
    server: float  # MB
    superlink: float


def cpu_of(processes: Iterable[int]) -> float:
    """Seconds that processes have computed."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(t[11]) + int(t[12]) for t in ticks) / os.sysconf("SC_CLK_TCK")


def measure(
    made: workspace.Workspace, others: Sequence[int], sizes: list[float], count: int
) -> dict[float, Row]:
    """Rounds of fedlm; `others` are the processes of the SuperLink and of the nodes."""
    names, found = sorted(made.nodes()), {}
    with open_transport(made) as transport:
        while not (nodes := transport.presence()) or not all(p.online for p in nodes.values()):
            time.sleep(0.2)
        engine = engine_of(transport, names)
        rounds(engine, jnp.ones(1000), 1)
        for size in sizes:
            sent = parameters(max(1000, int(size * 1e6 / 4)))
            here, there = Growth(), Growth(others[0])
            before = cpu_of([os.getpid(), *others])
            taken = rounds(engine, sent, count)
            computed = (cpu_of([os.getpid(), *others]) - before) / count
            found[size] = Row(taken, computed, here.more(), there.more())
    return found


def peers(names: int, sizes: list[float], count: int) -> dict[str, dict[float, list[float]]]:
    """Seconds of the same rounds by others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fed"
        made = workspace.init(path, "fed", ["127.0.0.1"], free_port(), [], bind="127.0.0.1")
        found = {}
        for name, start in (("flower", flower), ("tls", tls)):
            with start(made, names) as loop:
                loop.round(frame_of(0))
                found[name] = {
                    size: [loop.round(frame_of(size)) for _ in range(count)] for size in sizes
                }
    return found


def show(nodes: int, rows: dict[float, Row], others: dict[str, dict[float, list[float]]]) -> None:
    """Print a row per payload size."""
    for size, row in rows.items():
        cells = [str(nodes), f"{size:g}", *_rate(row.seconds, nodes * size), f"{row.cpu:.2f}"]
        for name in ("flower", "tls"):
            cells += _rate(others[name][size], nodes * size) if others else ["-", "-"]
        payloads = f"{row.server / size:.1f}" if size else "-"
        cells += [f"{row.server:.0f}", payloads, f"{row.superlink:.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def _rate(seconds: list[float], megabytes: float) -> list[str]:
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    spread = f" ({low:.2f}-{high:.2f})" if len(seconds) > 1 else ""
    return [f"{middle:.2f}{spread}", f"{2 * megabytes / middle:.0f}" if megabytes else "-"]


HEAD = (
    *("nodes", "MB each way", "s a round", "MB/s", "CPU s", "Flower, s", "MB/s", "TLS, s", "MB/s"),
    *("server, MB more", "payloads", "SuperLink, MB more"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 16])
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0, 1, 10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without Flower's and TLS's figures")
    parser.add_argument("--idle", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.idle:
        follow_parent()
        be_idle(workspace.Workspace(asked.idle))
        return
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for nodes in asked.nodes:
        names = [f"n{i:03d}" for i in range(nodes)]
        with tempfile.TemporaryDirectory() as folder, children() as started:
            port = free_port()
            path = Path(folder) / "fed"
            made = workspace.init(path, "fed", ["127.0.0.1"], port, names, bind="127.0.0.1")
            log = Path(folder) / "log"
            started.append(Child(["federation", "serve", str(path)], log))
            wait_for_port(port, started[0])
            started.append(Child(["--idle", str(path)], log, module="benchmarks.network"))
            others = [child.process.pid for child in started]
            rows = measure(made, others, asked.megabytes, asked.rounds)
        beside = {} if asked.alone else peers(nodes, asked.megabytes, asked.rounds)
        show(nodes, rows, beside)


if __name__ == "__main__":
    main()
