"""What a round over the network costs beside the work: time over payload, and memory.

    python -m benchmarks.network                 round overhead for 0.1 to 64 MB and two nodes
    python -m benchmarks.network --nodes 16 --megabytes 100 --rounds 1

Nodes answer at once with the frame they were sent. They share a process, the meeting point has
one of its own, and everything goes over TLS on loopback. Memory is the peak of the process that
sums, less its peak before.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flwr.app import Message

from fedlm.core.keys import key_for
from fedlm.deploy import home as homes
from fedlm.deploy.fleet import Fleet
from fedlm.deploy.node import serve
from fedlm.deploy.operator import running
from fedlm.deploy.processes import Child, children, follow_parent, free_port, wait_for_port
from fedlm.engine.messages import SUMS, Answer, Question, read_question, tell
from fedlm.engine.waiting import Patience, Tally, Waiting
from fedlm.wire.dense import dense


def idle(message: Message) -> Message:
    """Answers with the frame that was sent: the right size, and no work."""
    question = read_question(message.content)
    sums = (dict.fromkeys(SUMS, 1.0),)
    answer = Answer(
        round=question.round, members=question.members, frames=question.frames, sums=sums
    )
    return Message(tell(answer), reply_to=message)


def rounds(post: object, names: list[str], megabytes: float, count: int) -> list[float]:
    """Seconds of each round, the sum included."""
    codec = dense()
    like = np.zeros(int(megabytes * 1e6 / 4), np.float32)
    seconds = []
    for number in range(count):
        began = time.perf_counter()
        frame = codec.encode(jnp.asarray(like), key_for(0, "download"))
        question = Question(
            recipe="",
            round=number,
            first=0,
            population=len(names),
            text="",
            members=(0,),
            limit=1.0,
            each=False,
            longest=len(frame),
            frames=(frame,),
        )
        asked = {n: replace(question, first=i, members=(i,)) for i, n in enumerate(names)}
        total = np.zeros_like(like)
        wait = Waiting(post, Patience(), asked, Tally(number))  # type: ignore[arg-type]
        for name, answer in wait.answers():
            total += np.asarray(codec.decode(answer.frames[0], like))
            wait.tally.answered.append(name)
        wait.check_quorum()
        seconds.append(time.perf_counter() - began)
    return seconds


def peak() -> float:
    """Megabytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def be_idle(home: homes.Home) -> None:
    """All nodes of a federation, in this process, until it is ended."""
    said = lambda text: print(text, flush=True)  # noqa: E731
    work = {"say": said, "stop": lambda: False}
    nodes = [
        threading.Thread(target=serve, args=(Fleet(home.kit(name), said), idle), kwargs=work)
        for name in home.nodes()
    ]
    for node in nodes:
        node.start()
    for node in nodes:  # a process whose main thread has ended starts no more threads
        node.join()


def measure(made: homes.Home, sizes: list[float], count: int) -> None:
    """Prints a line a payload size."""
    names = sorted(made.nodes())
    with running(made) as post:
        while not all(p.online for p in post.presence().values()) or not post.presence():
            time.sleep(0.2)
        for size in sizes:
            before = peak()
            taken = rounds(post, names, size, count)
            print(
                f"{len(names)} nodes x {size:g} MB: {min(taken):.2f} s best, "
                f"{sorted(taken)[len(taken) // 2]:.2f} s median; "
                f"peak {peak() - before:.0f} MB more",
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
        be_idle(homes.Home(asked.idle))
        return
    names = [f"n{i:03d}" for i in range(asked.nodes)]
    with tempfile.TemporaryDirectory() as folder, children() as started:
        port = free_port()
        path = Path(folder) / "fed"
        made = homes.init(path, "fed", ["127.0.0.1"], port, names, bind="127.0.0.1")
        log = Path(folder) / "log"
        started.append(Child(["federation", "serve", str(path)], log))
        wait_for_port(port, started[0])
        started.append(Child(["--idle", str(path)], log, module="benchmarks.network"))
        measure(made, asked.megabytes, asked.rounds)


if __name__ == "__main__":
    main()
