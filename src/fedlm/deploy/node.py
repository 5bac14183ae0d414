"""A node's process: join with a store, or with the federation below a relay.

In:       a kit, and a store with a policy or the workspace of another federation.
Out:      nothing; it works until it is asked to stop.
Promise:  a store is verified before the node speaks for it.
Not here: the connection (`flower/supernode.py`), the work (`node_worker.py`, `relay.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from fedlm.corpus.store import Store
from fedlm.deploy.flower.client import open_transport
from fedlm.deploy.flower.supernode import SuperNode, serve
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import load_policy
from fedlm.deploy.processes import follow_parent
from fedlm.deploy.relay import Relay
from fedlm.deploy.workspace import Kit, Workspace
from fedlm.engine.dispatch import Quorum


def work(
    kit_path: Path,
    store_path: Path,
    policy_path: Path | None,
    *,
    whole: bool,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Joins with a store and trains its members until asked to stop."""
    follow_parent()
    kit = Kit.existing(kit_path)
    policy = load_policy(policy_path or kit.policy)
    store = Store(store_path)
    store.verify()
    worker = Worker(store, policy, whole=whole, say=say)
    serve(SuperNode(kit, say), worker, say=say, stop=stop)


def relay(
    kit_path: Path, workspace_path: Path, *, say: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    """Joins the federation above with the nodes of the one below, whose server must be running."""
    follow_parent()
    kit, workspace = Kit.existing(kit_path), Workspace.existing(workspace_path)
    settings = workspace.settings
    quorum = Quorum(quorum=settings.quorum, deadline=settings.deadline or math.inf)
    with open_transport(workspace) as transport:
        below = Relay(
            workspace.path / "server",
            transport,
            sorted(workspace.nodes()),
            quorum,
            name=kit.settings.name,
            say=say,
        )
        serve(SuperNode(kit, say), below, say=say, stop=stop)
