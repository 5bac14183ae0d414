"""A federation without a network: nodes that are called, for tests of everything else."""

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from fedlm.corpus.shard import deal
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.engine.dispatch import Assignment, Presence

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class LocalPost:
    """Carries messages to callables, by name; `away` are not there, `slow` answer a call later."""

    def __init__(self, nodes, away=(), slow=()):
        self.nodes, self.away, self.slow = dict(nodes), set(away), set(slow)
        self.numbers = {number: name for number, name in enumerate(sorted(self.nodes), 2)}
        self.messages, self.asked, self.since = {}, [], dict.fromkeys(self.nodes, "first")

    def send(self, node_id, records, round):
        return self.send_message(Message(records, node_id, "train.fedlm", group_id=str(round)))

    def send_message(self, message):
        identity = f"message-{len(self.messages)}"
        message.metadata.__dict__["_message_id"] = identity
        self.messages[identity] = message
        self.asked.append(self.numbers[message.metadata.dst_node_id])
        return identity

    def fetch(self, identity, most):
        message = self.messages[identity]
        name = self.numbers[message.metadata.dst_node_id]
        return None if name in self.away | self.slow else self.nodes[name](message)

    def presence(self):
        return {
            name: Presence(number, name not in self.away, self.since[name])
            for number, name in self.numbers.items()
        }


def workers(store, folder, names=("north", "south"), **more):
    """Nodes with a part of a store each, and their seats."""
    parts = deal(store, names, folder)
    made = {n: Worker(parts[n], more.get("policy", Policy()), name=n) for n in sorted(names)}
    first, seats = 0, []
    for name, worker in made.items():
        seats.append(Assignment(name, first, worker.clients, worker.text))
        first += worker.clients
    return made, tuple(seats), parts["server"]
