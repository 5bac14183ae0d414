"""A node's process: join with a store, or with the federation below a relay.

In:       a kit, and a store with a policy or the workspace of another federation.
Out:      nothing; it works until it is asked to stop.
Promise:  a store is verified before the node speaks for it; what is answered is in the kit's
          ledger, which one process at a time writes; compiled programs of earlier runs are let go.
Not here: the connection (`flower/supernode.py`), the work (`node_worker.py`, `relay.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from fedlm.core.program_cache import keep_programs
from fedlm.corpus.store import Store
from fedlm.deploy.delivery import MODELS
from fedlm.deploy.flower.client import open_transport
from fedlm.deploy.flower.supernode import SuperNode, serve
from fedlm.deploy.member_list import read_list
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.node_worker import MOST_KEPT, Worker
from fedlm.deploy.policy import Policy, load_policy
from fedlm.deploy.processes import follow_parent
from fedlm.deploy.relay import Relay
from fedlm.deploy.secure_worker import SecureAnswers
from fedlm.deploy.workspace import Kit, Workspace
from fedlm.engine.dispatch import Quorum
from fedlm.recipe.parts import check_model_path
from fedlm.secure.keys import IdentityKey
from fedlm.secure.store import NodeStore


def work(
    kit_path: Path,
    store_path: Path,
    policy_path: Path | None,
    *,
    whole: bool,
    base: Path | None = None,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Join a federation with a store, and train its members until asked to stop."""
    if base is not None:
        check_model_path(base, "--base")
    follow_parent()
    keep_programs(MOST_KEPT)
    kit = Kit.existing(kit_path)
    policy = load_policy(kit.policy, policy_path)
    store = Store(store_path)
    store.verify()
    warn(policy, say)
    identity = IdentityKey.from_pem(kit.key)
    with (
        closing(NodeLedger(kit.ledger)) as ledger,
        closing(NodeStore(kit.secure, identity)) as sums,
    ):
        memory = NodeMemory(kit.memory)
        worker = Worker(
            store,
            policy,
            whole=whole,
            say=say,
            ledger=ledger,
            memory=memory,
            models=kit.path / MODELS,
            name=kit.settings.name,
            base=base,
            secure=SecureAnswers(sums, partial(read_list, kit.members)),
        )
        serve(SuperNode(kit, say), worker, say=say, stop=stop)


def warn(policy: Policy, say: Callable[[str], None]) -> None:
    """Say where a policy limits less than it seems to."""
    if policy.largest_epsilon is not None and policy.largest_lifetime_epsilon is None:
        say(
            "policy: largest_epsilon limits each run by itself. largest_lifetime_epsilon would "
            "limit all runs together."
        )


def relay(
    kit_path: Path, workspace_path: Path, *, say: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    """Join a federation as a relay for the nodes of another, whose server must be running."""
    follow_parent()
    kit, workspace = Kit.existing(kit_path), Workspace.existing(workspace_path)
    settings = workspace.settings
    quorum = Quorum(quorum=settings.quorum, deadline=settings.deadline)
    identity = IdentityKey.from_pem(kit.key)
    with (
        open_transport(workspace) as transport,
        closing(NodeLedger(kit.ledger)) as ledger,
        closing(NodeStore(kit.secure, identity)) as sums,
    ):
        below = Relay(
            workspace.path / "server",
            transport,
            sorted(workspace.nodes()),
            quorum,
            name=kit.settings.name,
            say=say,
            policy=load_policy(kit.policy),
            ledger=ledger,
            secure=SecureAnswers(sums, partial(read_list, kit.members)),
            members_below=partial(read_list, workspace.members),
        )
        serve(SuperNode(kit, say), below, say=say, stop=stop)
