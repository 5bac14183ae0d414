"""A federation without a network: nodes that are called, for tests of everything else."""

from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.engine.dispatch import Assignment, Presence
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from tests.conftest import write_tiny


def prepared(folder, *changes):
    """A folder with the tiny recipe and its store."""
    write_tiny(folder)
    build(load(folder / "tiny.toml", changes), folder / "stores", lambda stage, done: None)
    return folder


def store_in(folder):
    """The store of a prepared folder."""
    return Store(next((folder / "stores").iterdir()))


class LocalTransport:
    """Carries payloads to callables by name; `away` are not there, `slow` do not reply yet."""

    def __init__(self, nodes, away=(), slow=()):
        self.nodes, self.away, self.slow = dict(nodes), set(away), set(slow)
        self.numbers = {number: name for number, name in enumerate(sorted(self.nodes), 2)}
        self.sent, self.asked, self.since = {}, [], dict.fromkeys(self.nodes, "first")

    def send(self, node_id, payload, round):
        message_id = f"message-{len(self.sent)}"
        self.sent[message_id] = self.numbers[node_id], payload
        self.asked.append(self.numbers[node_id])
        return message_id

    def fetch(self, message_id, max_bytes):
        name, payload = self.sent[message_id]
        return None if name in self.away | self.slow else self.nodes[name](payload)

    def presence(self):
        return {
            name: Presence(number, name not in self.away, self.since[name])
            for number, name in self.numbers.items()
        }


def workers(store, folder, names=("north", "south"), **more):
    """Nodes with a part of a store each, and their assignments."""
    parts = deal(store, names, folder)
    made = {n: Worker(parts[n], more.get("policy", Policy())) for n in sorted(names)}
    first, assignments = 0, []
    for name, worker in made.items():
        assignments.append(Assignment(name, first, worker.clients, worker.text))
        first += worker.clients
    return made, tuple(assignments), parts["server"]
