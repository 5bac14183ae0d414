"""What a round over the network costs beside the work: time over payload, and memory.

    python -m benchmarks.network                 round overhead for 0.1 to 64 MB and two nodes
    python -m benchmarks.network --nodes 16 --megabytes 100 --rounds 1

Nodes answer at once with the frame they were sent, and the server sums them as in a run. Nodes
share a process, the SuperLink has one of its own, and everything goes over TLS on loopback.
Memory is the peak of a process during the rounds, less what it held before them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fedavg import fedavg
from benchmarks.memory import Growth
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


def measure(made: workspace.Workspace, superlink: int, sizes: list[float], count: int) -> None:
    """Prints a row per payload size."""
    names = sorted(made.nodes())
    head = ["nodes", "MB each way", "s a round", "server, MB more", "payloads", "SuperLink, MB"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    with open_transport(made) as transport:
        while not (nodes := transport.presence()) or not all(p.online for p in nodes.values()):
            time.sleep(0.2)
        engine = engine_of(transport, names)
        rounds(engine, jnp.ones(1000), 1)
        for size in sizes:
            sent = parameters(int(size * 1e6 / 4))
            here, there = Growth(), Growth(superlink)
            taken = rounds(engine, sent, count)
            low, high = f"{min(taken):.2f}", f"{max(taken):.2f}"
            print(
                f"| {len(names)} | {size:g} | {statistics.median(taken):.2f} ({low}-{high}) | "
                f"{here.more():.0f} | {here.more() / size:.1f} | {there.more():.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.1, 1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.idle:
        follow_parent()
        be_idle(workspace.Workspace(asked.idle))
        return
    names = [f"n{i:03d}" for i in range(asked.nodes)]
    with tempfile.TemporaryDirectory() as folder, children() as started:
        port = free_port()
        path = Path(folder) / "fed"
        made = workspace.init(path, "fed", ["127.0.0.1"], port, names, bind="127.0.0.1")
        log = Path(folder) / "log"
        started.append(Child(["federation", "serve", str(path)], log))
        wait_for_port(port, started[0])
        started.append(Child(["--idle", str(path)], log, module="benchmarks.network"))
        measure(made, started[0].process.pid, asked.megabytes, asked.rounds)


if __name__ == "__main__":
    main()
