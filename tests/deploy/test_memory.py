"""What members remember stays at their nodes, and a run over nodes is its simulation."""

import json
import os
import stat
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.deploy import workspace
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_memory import NEVER, NodeMemory
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, Refusal
from fedlm.deploy.relay import Relay
from fedlm.engine.dispatch import Quorum
from fedlm.engine.messages import REFUSAL, read_request
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from tests.deploy.local import LocalTransport, prepared, store_in, workers

RUN = "0123456789abcdef" * 2
NAMES = ("north", "south")
CASES = {
    "scaffold": ("client.method=scaffold", "wire.upload=uniform-8"),
    "feddyn": ("client.method=feddyn", "client.proximal=0.1", "wire.upload=uniform-8"),
    "error feedback": ("wire.upload=topk-0.1", "wire.error_feedback=true"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("remembering"))


@pytest.fixture(scope="module")
def store(folder):
    return store_in(folder)


@pytest.fixture(scope="module")
def dealt(store, folder):
    """The nodes' stores and the assignments of their clients."""
    made, assignments, _ = workers(store, folder / "dealt", NAMES)
    return {name: worker.store for name, worker in made.items()}, assignments


def simulated(folder, store, *changes):
    recipe = load(folder / "tiny.toml", ("run.engine=loop", *changes))
    return flat_run(resolve(recipe, store), store, out=folder)


class Nodes:
    """Nodes with memories on disk, which can be started anew."""

    def __init__(self, stores, path):
        self.stores, self.path = stores, path
        path.mkdir(exist_ok=True)
        self.ledgers = {}
        self.start()

    def start(self):
        for ledger in self.ledgers.values():
            ledger.close()
        self.ledgers = {name: NodeLedger(self.path / f"{name}.jsonl") for name in self.stores}
        self.made = {
            name: Worker(
                store,
                Policy(),
                ledger=self.ledgers[name],
                memory=NodeMemory(self.path / name),
            )
            for name, store in self.stores.items()
        }

    def run(self, whole, assignments, transport=None, **more):
        here = [a._replace(text=self.made[a.name].text) for a in assignments]
        transport = transport or LocalTransport(self.made)
        out = whole.record.path
        return networked_run(
            whole.recipe, whole.store, tuple(here), out, transport=transport, run_id=RUN, **more
        )


@pytest.fixture
def nodes(dealt, tmp_path):
    made = Nodes(dealt[0], tmp_path / "kits")
    yield made
    for ledger in made.ledgers.values():
        ledger.close()


def play(run, state, count):
    first = int(state.round)
    for played in run.round.play(state, range(first, first + count)):
        state = played.state
    return state


def begun(run):
    return run.round.init(run.start())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_remembered_at_nodes_is_remembered_in_simulation(name, folder, store, dealt, nodes):
    """To the bit: the model and every client's memory, though nodes are started anew midway."""
    whole = simulated(folder, store, *CASES[name])
    here = play(whole, begun(whole), 4)
    over = nodes.run(whole, dealt[1])
    there = play(over, begun(over), 2)
    nodes.start()
    over = nodes.run(whole, dealt[1])
    there = play(over, there, 2)
    assert tree.sha256(there.params) == tree.sha256(here.params)
    assert tree.sha256(there.server_memory) == tree.sha256(here.server_memory)
    last = np.asarray(there.client_state)
    assert last.dtype == np.int32 and set(last.tolist()) > {NEVER}
    first = tree.take(here.client_state, 0)
    for assignment in dealt[1]:
        memory = nodes.made[assignment.name].memory
        for client in range(assignment.clients):
            number = assignment.first + client
            found = memory.read(RUN, client, int(last[number]), tree.zeros_like(first))
            assert tree.sha256(found) == tree.sha256(tree.take(here.client_state, number))


def test_what_is_remembered_is_its_owners_alone(folder, store, dealt, nodes):
    over = nodes.run(simulated(folder, store, *CASES["scaffold"]), dealt[1])
    play(over, begun(over), 1)
    files = list(nodes.path.glob("*/*/*/round-*.safetensors"))
    assert len(files) == 4
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert {stat.S_IMODE(f.parent.stat().st_mode) for f in files} == {0o700}


def test_the_same_question_has_the_same_answer_and_advances_a_memory_once(
    folder, store, dealt, nodes
):
    transport = LocalTransport(nodes.made)
    over = nodes.run(simulated(folder, store, *CASES["scaffold"]), dealt[1], transport)
    play(over, begun(over), 3)
    held = {f: f.read_bytes() for f in nodes.path.glob("*/*/*/round-*")}
    for name, payload in transport.sent.values():  # of all three rounds, the first ones last
        request = read_request(payload)
        first, again = nodes.made[name](payload), nodes.made[name](payload)
        assert first.frames == again.frames and first.kind == again.kind != REFUSAL
        assert len(request.remembered) == len(request.members)
    assert {f: f.read_bytes() for f in nodes.path.glob("*/*/*/round-*")} == held


@pytest.mark.slow
def test_a_server_that_goes_back_to_its_checkpoint_ends_the_same(folder, store, dealt, nodes):
    whole = simulated(folder, store, *CASES["scaffold"])
    over = nodes.run(whole, dealt[1])
    early = play(over, begun(over), 2)
    play(over, early, 3)  # and then the server is killed
    late = play(over, early, 4)
    assert tree.sha256(late.params) == tree.sha256(play(whole, begun(whole), 6).params)


@pytest.mark.slow
def test_an_answer_that_did_not_count_is_not_remembered(folder, store, dealt, nodes):
    """A node that trained and was too late goes on from its memory before that."""
    whole = simulated(folder, store, *CASES["scaffold"], "server.cohort=18")
    transport = LocalTransport(nodes.made)
    patient = Quorum(quorum=0.5, deadline=0.3)
    over = nodes.run(whole, dealt[1], transport, quorum=patient)
    state = play(over, begun(over), 1)
    transport.slow = {"south"}
    state = play(over, state, 1)
    south = dealt[1][1]
    last = np.asarray(state.client_state)
    assert set(last[: south.first].tolist()) == {1}
    assert set(last[south.first :].tolist()) == {0}
    asked = [p for name, p in transport.sent.values() if name == "south"][-1]
    nodes.made["south"](asked)  # it trained all the same
    transport.slow = set()
    play(over, state, 1)
    asked = [p for name, p in transport.sent.values() if name == "south"][-1]
    assert set(read_request(asked).remembered) == {0}
    rounds = {f.name for f in nodes.path.glob(f"south/{RUN}/0/round-*")}
    assert rounds == {"round-000000.safetensors", "round-000002.safetensors"}


@pytest.mark.slow
def test_a_relay_passes_on_who_remembers_what(folder, store, dealt, nodes, tmp_path):
    whole = simulated(folder, store, *CASES["error feedback"])
    below = LocalTransport(nodes.made)
    relay = Relay(tmp_path, below, list(NAMES), Quorum(), name="r", say=lambda text: None)
    hello = relay.hello()
    above = dealt[1][0]._replace(name="r", clients=hello.clients, text=hello.text)
    over = networked_run(
        whole.recipe,
        whole.store,
        (above,),
        folder,
        transport=LocalTransport({"r": relay}),
        run_id=RUN,
    )
    there, here = play(over, begun(over), 3), play(whole, begun(whole), 3)
    assert tree.sha256(there.params) == tree.sha256(here.params)


def test_a_memory_that_is_lost_is_a_refusal(tmp_path):
    memory = NodeMemory(tmp_path)
    first = {"w": jnp.zeros(3)}
    assert memory.read(RUN, 0, NEVER, first) is first
    with pytest.raises(Refusal, match="after round 4 is not here: begin another run"):
        memory.read(RUN, 0, 4, first)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_memory_is_kept_as_long_as_a_server_can_go_back(on_disk, tmp_path):
    memory = NodeMemory(tmp_path if on_disk else None)
    first = {"w": jnp.zeros(3)}
    for round in (1, 4, 5, 9, 12):
        memory.write(RUN, 0, round, jax.tree.map(lambda x, r=round: x + r, first))
    memory.forget(RUN, 0, last=9, round=12, window=6)
    assert sorted(memory.rounds(RUN, 0)) == [5, 9, 12]
    memory.forget(RUN, 0, last=5, round=12, window=6)  # round 9 did not count
    assert sorted(memory.rounds(RUN, 0)) == [5, 12]
    assert memory.read(RUN, 0, 5, first)["w"].tolist() == [5, 5, 5]


def test_what_members_remember_of_runs_that_are_over_is_removed(run_cli, tmp_path):
    kit = workspace.init(tmp_path / "fed", "fed", ["localhost"], 9443, ["north"]).kit("north")
    memory = NodeMemory(kit.memory)
    first, second, third = ("1" * 32, "12" + "0" * 30, "3" * 32)
    for run in (first, second, third):
        memory.write(run, 0, 4, {"x": jnp.zeros(2)})
    os.utime(kit.memory / third / "0" / "round-000004.safetensors", (0, 0))
    said = run_cli("node", "forget", kit.path, "1")
    assert said.code == 2 and "RUN" in said.stderr, "two runs begin so"
    assert run_cli("node", "forget", kit.path, "9").code == 2
    told = json.loads(run_cli("node", "forget", kit.path, "--json").stdout)
    assert told["forgotten"] == [third] and set(memory.runs()) == {first, second}
    assert run_cli("node", "forget", kit.path, "12").code == 0
    assert set(memory.runs()) == {first}
    with pytest.raises(Refusal, match="begin another run"):
        memory.read(second, 0, 4, None)
    with closing(NodeLedger(kit.ledger)):  # a node is at work
        assert run_cli("node", "forget", kit.path, "11").code != 0
    assert set(memory.runs()) == {first}
