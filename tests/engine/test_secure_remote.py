"""A server of secure sums and nodes that are called: who leaves, who is killed, what is on disk."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedlm.core.errors import EngineError
from fedlm.core.types import Cohort, Start
from fedlm.engine.dispatch import Assignment, Quorum
from fedlm.engine.messages import respond
from fedlm.engine.secure import Nodes, SecureEngine
from fedlm.engine.secure_messages import (
    SecureReply,
    encode_secure_reply,
    read_secure_request,
)
from fedlm.engine.secure_remote import RemoteNodeSums
from fedlm.engine.secure_vector import NodeSum, SumVector
from fedlm.recipe.secure_sums import UpdateIntegers
from fedlm.secure.local import STEPS
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Session, Terms
from fedlm.wire.dense import dense
from tests.deploy.secure import SecureTransport
from tests.engine.test_secure import (
    GRID,
    LIKE,
    MEMBERS,
    algorithm,
    bits,
    engine,
    sent,
    totals,
    update,
)
from tests.secure.federation import people

RUN = "5ec0" * 8
INTEGERS = UpdateIntegers(GRID, 5, False)
VECTOR = SumVector(integers=INTEGERS, nodes=5, like=LIKE)
FIRST = (0, 3, 5, 8, 11, 13)  # numbers of the nodes' first clients, and the end


class GivenNode:
    """A node with the real messages, state and vector, whose members' updates are given."""

    def __init__(self, place, folder, listed=None, **terms):
        self.place, self.folder, self.terms = place, folder, {"threshold": 3, **terms}
        self.members, identities = people(5) if listed is None else listed
        self.identity, self.store = identities[place], None
        self.start()

    def start(self):
        if self.store is not None:
            self.store.close()
        self.store = NodeStore(self.folder, self.identity)

    def __call__(self, payload):
        others = {
            "secure_request": lambda p: encode_secure_reply(self.answer(read_secure_request(p)))
        }
        return respond(payload, hello=None, train=None, say=lambda text: None, others=others)

    def answer(self, request):
        terms = Terms(members=self.members, bits=20, size=VECTOR.size, **self.terms)
        session = Session(terms, request.run, request.round, request.attempt)
        assert session.digest.hex() == request.session
        frame = self._answer(request, session)
        told = {name: getattr(request, name) for name in ("round", "attempt", "step")}
        masked = request.step == "mask"
        told |= {"nodes": int(masked), "members": len(request.members) * masked}
        return SecureReply(**told, frames=(frame,), counter=7)

    def _answer(self, request, session):
        if request.step == "keys":
            return self.store.keys(session)
        question = request.frames[0]
        if request.step != "mask":
            return getattr(self.store, request.step)(session, question)
        total = NodeSum(VECTOR, request.round)
        for member in request.members:
            total.add(member, update(sent(member)), np.inf)
        return self.store.mask(session, question, total.words())


@pytest.fixture
def nodes(tmp_path):
    return {f"node-{i}": GivenNode(i, tmp_path / f"node-{i}") for i in range(5)}


def server(transport, file=None, said=None, stats=None, deadline=0.15, **more):
    assignments = [Assignment(f"node-{i}", FIRST[i], FIRST[i + 1] - FIRST[i]) for i in range(5)]
    facts = {
        "nodes": Nodes(count=5, threshold=3),
        "leaves": 5,
        "run": RUN,
        "recipe": "",
        "seed": 5,
        "quorum": Quorum(deadline=deadline),
        "say": (lambda text: None) if said is None else said.append,
        "on_stats": (lambda _: None) if stats is None else stats.append,
        "file": file,
        **more,
    }
    return remote(transport, assignments, people(5)[0], **facts)


def remote(transport, assignments, members, **facts):
    made = RemoteNodeSums(transport, assignments, members, download=dense(), **facts)
    return SecureEngine(algorithm(), made, INTEGERS)


def total(made, round=2):
    return made.total(Start(LIKE, np.inf), Cohort(round, MEMBERS)).total


def wanted(survivors):
    """The sum of the rounded updates of the members of some nodes."""
    here = [m for m in MEMBERS for i in survivors if FIRST[i] <= m < FIRST[i + 1]]
    codes = [INTEGERS.rounded(sent(m), np.inf, 2, m) for m in here]
    return GRID.values(GRID.wrapped(sum(codes, np.zeros(17, np.int64))), LIKE), len(here)


def check(found, survivors):
    values, members = wanted(survivors)
    for name in LIKE:
        np.testing.assert_array_equal(found.delta[name], values[name])
    assert float(found.members) == members == float(found.weight)
    assert float(found.tokens) == 40 * members


def test_a_networked_sum_is_the_simulated_one_to_the_bit(nodes):
    found = total(server(SecureTransport(nodes)))
    check(found, range(5))
    assert bits(found) == bits(totals(engine(nodes=5)).total)
    assert bits(found) == bits(totals(engine(nodes=9, relays=3)).total)


@pytest.mark.parametrize("step", STEPS)
def test_up_to_two_of_five_may_leave_at_every_step(nodes, step):
    leave, stats = {"node-1": step, "node-4": step}, []
    found = total(server(SecureTransport(nodes, leave), stats=stats))
    gone = STEPS.index(step) <= STEPS.index("mask")
    check(found, (0, 2, 3) if gone else range(5))
    assert not stats[0].lost
    assert stats[0].answered == [f"node-{i}" for i in ((0, 2, 3) if gone else range(5))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS[1:])
def test_with_three_gone_the_round_is_lost_and_said_and_the_next_goes_on(nodes, step):
    transport, said, stats = SecureTransport(nodes), [], []
    made = server(transport, said=said, stats=stats)
    transport.leave = {f"node-{i}": step for i in (1, 2, 4)}
    lost = total(made, 1)
    assert float(lost.members) == 0 and not any(np.asarray(x).any() for x in lost.delta.values())
    assert "threshold is 3. No sum was opened" in stats[0].lost
    assert any("round 1 is lost, and its model stays as it was: 2 nodes" in text for text in said)
    transport.leave, transport.away = {}, set()
    check(total(made), range(5))
    assert not stats[1].lost


def test_a_node_that_comes_back_in_time_saves_the_round(nodes):
    """All leave at the mask of the first attempt; a second attempt has other keys and opens."""
    leave = {f"node-{i}": (2, 0, "mask") for i in range(5)}
    transport, stats = SecureTransport(nodes, leave), []
    made = server(transport, stats=stats)
    look = transport.presence

    def back():
        if any(at == (2, 1, "keys") for _, at in transport.seen) or len(transport.away) == 5:
            transport.away = set()
        return look()

    transport.presence = back
    check(total(made), range(5))
    assert {at for _, at in transport.seen} >= {(2, 1, step) for step in STEPS}


def test_three_lost_rounds_in_a_row_end_the_run_with_the_reasons(nodes):
    leave = {f"node-{i}": "share" for i in range(3)}
    transport = SecureTransport(nodes, leave)
    made = server(transport)
    for round in range(2):
        total(made, round)
        transport.away = set()
    with pytest.raises(EngineError, match=r"3 rounds in a row were lost.*go on with --resume"):
        total(made, 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("who", ["nodes", "server"])
def test_a_kill_at_any_step_changes_no_bit(nodes, tmp_path, step, who):
    """The answer of a step was made, and then its sender or its reader is killed."""
    file, killed = tmp_path / "secure.json", []

    def kill(name, payload):
        at = payload.facts.get("step") if payload is not None else None
        if at == step and len(killed) < (2 if who == "nodes" else 1):
            killed.append(name)
            if who == "server":
                raise KeyboardInterrupt
            nodes[name].start()
            return None  # its answer is lost with it; asked again, it gives the same
        return payload

    transport = SecureTransport(nodes, change=kill)
    if who == "server":
        with pytest.raises(KeyboardInterrupt):
            total(server(transport, file, deadline=60.0))
        assert set(json.loads(file.read_text())) == {"round", "attempt", "lists"}
        assert file.stat().st_mode & 0o77 == 0
    check(total(server(transport, file, deadline=60.0)), range(5))
    assert killed


def test_a_server_killed_after_signatures_opens_the_same_list_again(nodes, tmp_path):
    """Node 4 was absent then and is back: a list with it would be another question."""
    file = tmp_path / "secure.json"

    def kill(name, payload):
        if (
            payload is not None
            and payload.facts.get("step") == "reveal"
            and not file.with_name("k").exists()
        ):
            file.with_name("k").touch()
            raise KeyboardInterrupt
        return payload

    transport = SecureTransport(nodes, {"node-4": "mask"}, kill)
    with pytest.raises(KeyboardInterrupt):
        total(server(transport, file, deadline=60.0))
    transport.leave, transport.away = {}, set()
    check(total(server(transport, file, deadline=60.0)), range(4))


def test_a_server_that_comes_back_without_a_node_keeps_its_lists(nodes, tmp_path):
    """The round is lost then; with the node back, the list that was signed is opened."""
    file, killed = tmp_path / "secure.json", []

    def kill(name, payload):
        if payload is not None and payload.facts.get("step") == "reveal" and not killed:
            killed.append(name)
            raise KeyboardInterrupt
        return payload

    transport = SecureTransport(nodes, change=kill)
    with pytest.raises(KeyboardInterrupt):
        total(server(transport, file, deadline=60.0))
    lists = file.read_text()
    transport.away, stats = {"node-4"}, []
    assert float(total(server(transport, file, stats=stats)).members) == 0
    assert "before the restart answered again" in stats[0].lost and file.read_text() == lists
    transport.away = set()
    check(total(server(transport, file, deadline=60.0)), range(5))


def test_without_its_file_a_server_cannot_open_a_signed_round_otherwise(nodes):
    """Node 4 is away now, so that the list would be another one: the round stays opened once."""
    check(total(server(SecureTransport(nodes))), range(5))
    stats = []
    lost = total(server(SecureTransport(nodes, {"node-4": "keys"}), stats=stats))
    assert float(lost.members) == 0 and stats[0].lost
    assert "opened once" in " ".join(stats[0].refused.values())


# ---- many nodes, few neighbors -------------------------------------------------------------------


def crowd(folder, count, threshold, neighbors):
    """A federation of given nodes, each of which agrees on masks with a few others."""
    terms = {"threshold": threshold, "neighbors": neighbors}
    nodes = {
        member.name: GivenNode(i, folder / member.name, people(count), **terms)
        for i, member in enumerate(people(count)[0])
    }
    # The cohort's thirteen numbers belong to the first nodes; the others have no clients.
    at = [Assignment(name, min(i, 13), int(i < 13)) for i, name in enumerate(nodes)]
    made = Nodes(count=count, threshold=threshold, neighbors=neighbors)
    return nodes, at, made


@pytest.mark.parametrize(
    "count, threshold, neighbors",
    [(24, 20, 10), pytest.param(200, 180, 26, marks=pytest.mark.slow)],
)
def test_a_graph_of_neighbors_over_the_transport_gives_the_same_bits(
    tmp_path, monkeypatch, count, threshold, neighbors
):
    """Who is absent before and after the vectors: the sum has the bits of the full graph's."""
    monkeypatch.setattr("tests.engine.test_secure_remote.VECTOR", replace(VECTOR, nodes=count))
    nodes, at, made = crowd(tmp_path, count, threshold, neighbors)
    names = list(nodes)
    leave = {names[-1]: "mask", names[-2]: "share", names[3]: "reveal", names[-3]: "sign"}
    transport, stats = SecureTransport(nodes, leave), []
    engine_of = remote(
        transport,
        at,
        people(count)[0],
        nodes=made,
        leaves=count,
        run=RUN,
        recipe="",
        seed=5,
        quorum=Quorum(deadline=60.0),
        on_stats=stats.append,
    )
    found = total(engine_of)
    assert bits(found) == bits(totals(engine(nodes=5)).total) and not stats[0].lost
    shares = [a for _, (_, _, step), a in transport.answers if step == "share"]
    assert max(len(answer.frames[0]) for answer in shares) < 100 + 84 * neighbors
    for node in nodes.values():
        node.store.close()
