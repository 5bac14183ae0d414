"""A node's life: come, work, come again.

In:       a kit, a store, a policy.
Out:      nothing; it works until it is asked to stop.
Promise:  a server that goes away is waited for; what cannot be answered is told and passed over.
Not here: the connection (`fleet.py`), the work (`client_app.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Message

from fedlm.corpus.store import Store
from fedlm.deploy.flower.client import running
from fedlm.deploy.flower.supernode import Fleet, Lost, Stale
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import load
from fedlm.deploy.processes import follow_parent
from fedlm.deploy.relay import Relay
from fedlm.deploy.workspace import Home, Kit
from fedlm.engine.dispatch import Quorum

BUSY_NAP, IDLE_NAP = 0.2, 2.0  # between two looks for a message, in a run and long after one
IDLE_SECONDS = 60.0


def work(
    kit_path: Path,
    store_path: Path,
    policy_path: Path | None,
    *,
    whole: bool,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Joins and works until asked to stop."""
    follow_parent()
    kit = Kit.existing(kit_path)
    policy = load(policy_path or kit.policy)
    name = kit.settings.name
    store = Store(store_path)
    store.verify()  # a pass over its own file, before it speaks for it
    worker = Worker(store, policy, name=name, whole=whole, say=say)
    serve(Fleet(kit, say), worker, say=say, stop=stop)


def relay(
    kit_path: Path, home_path: Path, *, say: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    """Joins the federation above with the nodes of the one below, whose server must be running."""
    follow_parent()
    kit, home = Kit.existing(kit_path), Home.existing(home_path)
    settings = home.settings
    patience = Quorum(quorum=settings.quorum, deadline=settings.deadline or math.inf)
    with running(home) as post:
        passed_on = Relay(
            home.path / "server",
            post,
            sorted(home.nodes()),
            patience,
            name=kit.settings.name,
            say=say,
        )
        serve(Fleet(kit, say), passed_on, say=say, stop=stop)


def serve(
    fleet: Fleet,
    answer: Callable[[Message], Message],
    *,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Fetches and answers, one message after the other; comes again when the server was away."""
    try:
        while fleet.join(stop, patient=True):
            say(f"{fleet.settings.name}: joined {fleet.settings.federation} at {fleet.address}")
            try:
                return _answer_all(fleet, answer, stop)
            except Lost as error:
                say(str(error))
    finally:
        fleet.leave()


def _answer_all(
    fleet: Fleet, answer: Callable[[Message], Message], stop: Callable[[], bool]
) -> None:
    last = time.monotonic()
    while not stop():
        try:
            message = fleet.receive()
            if message is not None:
                fleet.answer(answer(message))
                last = time.monotonic()
                continue
        except Stale:
            pass  # the run ended while its message was on the way
        time.sleep(BUSY_NAP if time.monotonic() - last < IDLE_SECONDS else IDLE_NAP)
