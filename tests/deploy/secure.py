"""A secure federation without a network: nodes that are called, with kits of their own."""

from dataclasses import dataclass, field

from fedlm.corpus.shard import deal
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.secure_worker import SecureAnswers
from fedlm.engine.dispatch import Assignment, Quorum
from fedlm.recipe.settings import load
from fedlm.secure import members
from fedlm.secure.local import made_up_members
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Member
from tests.deploy.local import LocalTransport

NAMES = ("east", "north", "south", "west")
SETTINGS = (
    "wire.secure_nodes=4",
    "wire.secure_threshold=3",
    "wire.upload=secure-24-clip1-members8",
    "client.weight=uniform",
    "run.checkpoint_every=1",
    "run.engine=loop",
    "model.name=cifg",
)
RUN = "5ec0" * 8


class SecureTransport(LocalTransport):
    """A transport on which nodes go away before a step, and payloads are kept and changed."""

    def __init__(self, nodes, leave=None, change=lambda name, payload: payload):
        super().__init__(nodes)
        self.leave, self.change = dict(leave or {}), change
        self.seen, self.answers = [], []

    def fetch(self, message_id, max_bytes):
        name, payload = self.sent[message_id]
        step = payload.facts.get("step")
        at = (payload.facts.get("round"), payload.facts.get("attempt"), step)
        if step is not None and self.leave.get(name) in (step, at):
            self.away.add(name)
            return None
        self.seen.append((name, at))
        answer = self.change(name, super().fetch(message_id, max_bytes))
        self.answers.append((name, at, answer))
        return answer


@dataclass
class Federation:
    """Nodes with a part of a store each, and the list that all have."""

    folder: object
    recipe: object
    store: object
    parts: dict
    members: tuple
    identities: dict
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self):
        self.names = tuple(self.identities)
        self.listed = dict.fromkeys(self.names, members.first(self.members))
        self.workers = {}
        for name in self.names:
            self.start(name)
        first, self.assignments = 0, []
        for name, worker in self.workers.items():
            self.assignments.append(Assignment(name, first, worker.clients, worker.text))
            first += worker.clients
        self.assignments = tuple(self.assignments)

    def start(self, name):
        """Start a node, or start it again after a kill: its files are what is left."""
        if name in self.workers:
            self.workers[name].secure.store.close()
            self.workers[name].ledger.close()
        kit = self.folder / "kits" / name
        secure = SecureAnswers(
            NodeStore(kit / "secure", self.identities[name]), lambda: self.listed[name]
        )
        ledger = NodeLedger(kit / "ledger.jsonl")
        self.workers[name] = Worker(self.parts[name], self.policy, ledger=ledger, secure=secure)

    def run(self, transport, *, recipe=None, out=None, said=None, stats=None, deadline=1.0):
        return networked_run(
            recipe or self.recipe,
            self.store,
            self.assignments,
            out or self._out(),
            transport=transport,
            quorum=Quorum(quorum=1.0, deadline=deadline),
            run_id=RUN,
            say=(lambda text: None) if said is None else said.append,
            on_stats=(lambda _: None) if stats is None else stats.append,
            secure_members=self.members,
        )

    def _out(self):
        (self.folder / "run").mkdir(exist_ok=True, parents=True)
        return self.folder / "run"

    def transport(self, **more):
        return SecureTransport(
            {name: (lambda payload, name=name: self.workers[name](payload)) for name in self.names},
            **more,
        )


def federation(store, recipe_file, folder, *changes, policy=None, names=NAMES):
    """Make a federation of nodes, by default four, that share a store."""
    parts = deal(store, names, folder / "dealt")
    made, keys = made_up_members(len(names))
    listed = tuple(Member(name, one.public) for name, one in zip(names, made, strict=True))
    return Federation(
        folder,
        load(recipe_file, (*SETTINGS, *changes)),
        parts["server"],
        parts,
        listed,
        dict(zip(names, keys, strict=True)),
        policy or Policy(),
    )


def played(run, rounds, state=None):
    """Play rounds, and return the last state and the metrics of all."""
    state = run.round.init(run.start()) if state is None else state
    metrics = []
    for one in run.round.play(state, range(int(state.round), int(state.round) + rounds)):
        state = one.state
        metrics.append(one.metrics)
    return state, metrics
