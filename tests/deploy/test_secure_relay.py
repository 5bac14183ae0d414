"""A relay in a secure sum: the flat sum to the bit, whoever leaves or is killed on either side."""

from dataclasses import replace

import numpy as np
import pytest

from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.policy import Policy
from fedlm.deploy.relay import Relay
from fedlm.deploy.secure_worker import SecureAnswers
from fedlm.engine.dispatch import Assignment, Quorum
from fedlm.engine.messages import REFUSAL, Hello, encode_refusal, respond
from fedlm.engine.messages import encode_request as encode_train
from fedlm.engine.secure_messages import (
    encode_secure_reply,
    encode_secure_request,
    read_secure_request,
)
from fedlm.engine.secure_vector import NodeSum
from fedlm.recipe.secure_sums import nodes_of
from fedlm.recipe.settings import dump, load
from fedlm.recipe.sum_rules import secure_threshold_of
from fedlm.secure import members
from fedlm.secure.local import STEPS, made_up_members
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Member
from fedlm.wire.pack import pack
from tests.conftest import write_tiny
from tests.deploy.leaks import Search
from tests.deploy.secure import SecureTransport
from tests.engine.test_secure import MEMBERS, bits, sent, totals, update
from tests.engine.test_secure import engine as simulated
from tests.engine.test_secure_remote import FIRST, RUN, VECTOR, GivenNode, check, remote, total

ABOVE, BELOW = ("a", "hub", "z"), ("hub-1", "hub-2", "hub-3")
LEAVES = ("a", *BELOW, "z")  # in the order of their members' numbers, FIRST
SETTINGS = (
    "wire.secure_nodes=5",
    "wire.secure_threshold=3",
    "wire.upload=secure-20-clip1-members12",
    "client.weight=uniform",
    "server.cohort=8",
    "run.checkpoint_every=1",
)


class Leaf(GivenNode):
    """A node that also says hello to its relay."""

    def __call__(self, payload):
        others = {
            "secure_request": lambda p: encode_secure_reply(self.answer(read_secure_request(p)))
        }
        hello = Hello(self.clients, f"text of {self.name}", "tokens", "1")
        return respond(
            payload, hello=lambda: hello, train=None, say=lambda text: None, others=others
        )


def listed(names):
    made, keys = made_up_members(len(names))
    return tuple(Member(n, m.public) for n, m in zip(names, made, strict=True)), keys


class World:
    """Nodes a and z and the relay hub below a server; three nodes below the relay."""

    def __init__(self, folder, *changes, policy=None):
        recipe = load(write_tiny(folder), (*SETTINGS, *changes))
        self.folder, self.recipe, self.policy = folder, recipe, policy or Policy()
        self.lists = {"above": listed(ABOVE), "below": listed(BELOW)}
        self.nodes = {}
        for number, name in enumerate(LEAVES):
            names, where = (BELOW, "below") if name in BELOW else (ABOVE, "above")
            leaf = Leaf(names.index(name), folder / name, self.lists[where], threshold=2)
            leaf.name, leaf.clients = name, FIRST[number + 1] - FIRST[number]
            self.nodes[name] = leaf
        self.below = SecureTransport({name: self.nodes[name] for name in BELOW})
        self.relay = None
        self.start()
        hello = self.relay.hello()
        self.assignments = (
            Assignment("a", 0, FIRST[1]),
            Assignment("hub", FIRST[1], hello.clients, hello.text, hello.leaves),
            Assignment("z", FIRST[4], FIRST[5] - FIRST[4]),
        )

    def start(self):
        """Start the relay, or start it again after a kill: its files are what is left."""
        if self.relay is not None:
            self.relay.secure.store.close()
            self.relay.ledger.close()
        kit = self.folder / "kit"
        identity = self.lists["above"][1][ABOVE.index("hub")]
        self.relay = Relay(
            self.folder / "relay",
            self.below,
            list(BELOW),
            Quorum(deadline=0.3),
            name="hub",
            say=lambda text: None,
            policy=self.policy,
            ledger=NodeLedger(kit / "ledger.jsonl"),
            secure=SecureAnswers(
                NodeStore(kit / "secure", identity), lambda: members.first(self.lists["above"][0])
            ),
            members_below=lambda: members.first(self.lists["below"][0]),
        )

    def transport(self, **more):
        known = {"a": self.nodes["a"], "z": self.nodes["z"]}
        return SecureTransport({**known, "hub": lambda payload: self.relay(payload)}, **more)

    def server(self, transport, *, said=None, stats=None, deadline=0.5, file=None):
        return remote(
            transport,
            self.assignments,
            self.lists["above"][0],
            nodes=nodes_of(self.recipe, len(ABOVE)),
            leaves=5,
            run=RUN,
            recipe=dump(self.recipe),
            seed=5,
            quorum=Quorum(deadline=deadline),
            say=(lambda text: None) if said is None else said.append,
            on_stats=(lambda _: None) if stats is None else stats.append,
            file=file,
        )


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def places(*names):
    return [LEAVES.index(name) for name in LEAVES if name in names]


def test_a_relayed_sum_is_the_flat_one_to_the_bit(world):
    found = total(world.server(world.transport()))
    check(found, range(5))
    assert bits(found) == bits(totals(simulated(nodes=5)).total)
    assert {at[2] for _, at in world.below.seen} == {None, *STEPS}  # the first: its hello


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
def test_one_of_three_may_leave_below_at_every_step(world, step):
    world.below.leave = {"hub-2": step}
    found = total(world.server(world.transport(), deadline=5.0))
    gone = STEPS.index(step) <= STEPS.index("mask")
    check(found, places("a", "hub-1", "hub-3", "z") if gone else range(5))


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
def test_with_two_of_three_gone_below_the_sum_above_goes_on_without_the_relay(world, step):
    world.below.leave = {"hub-1": step, "hub-3": step}
    stats = []
    made = world.server(world.transport(), stats=stats, deadline=5.0)
    check(total(made), places("a", "z"))
    assert "the sum below hub is lost" in stats[0].refused["hub"] and not stats[0].lost
    world.below.leave, world.below.away = {}, set()
    assert float(total(made, 3).members) == 8  # the next round has all


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
def test_a_relay_killed_after_any_answer_gives_it_again(world, step):
    killed = []

    def kill(name, payload):
        at = payload.facts.get("step") if name == "hub" and payload is not None else None
        if at == step and not killed:
            killed.append(step)
            world.start()
            return None
        return payload

    check(total(world.server(world.transport(change=kill), deadline=60.0)), range(5))
    assert killed


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
def test_a_relay_killed_at_any_step_of_the_sum_below_opens_the_same_sum(world, step):
    killed = []

    def kill(name, payload):
        if payload is not None and payload.facts.get("step") == step and not killed:
            killed.append(step)
            raise KeyboardInterrupt
        return payload

    world.below.change = kill
    transport, hub = world.transport(), world.relay

    def relay(payload):
        try:
            return world.relay(payload)
        except KeyboardInterrupt:
            world.start()
            return None

    transport.nodes["hub"] = relay
    check(total(world.server(transport, deadline=60.0)), range(5))
    assert killed and world.relay is not hub


def test_the_sum_below_is_opened_once_for_all_attempts_above(world):
    """All leave before they send the vectors of the first attempt; the second is opened."""
    transport = world.transport(leave=dict.fromkeys(("a", "z"), (2, 0, "mask")))
    look = transport.presence

    def back():
        if len(transport.away) == 2:
            transport.away = set()
        return look()

    transport.presence = back
    check(total(world.server(transport, deadline=2.0)), range(5))
    assert {at[1] for name, at in transport.seen if name == "hub"} == {0, 1}
    asked = [(name, at) for name, at in world.below.seen if at[2] == "mask"]
    assert sorted(asked) == [(name, (2, 0, "mask")) for name in BELOW]


def test_neither_relay_nor_server_has_a_nodes_vector_on_its_disk_or_in_an_answer(world, tmp_path):
    transport = world.transport()
    total(world.server(transport, file=tmp_path / "secure.json"))
    search, plain = Search(), {}
    for number, name in enumerate(LEAVES):
        words = plain[name] = vector(range(FIRST[number], FIRST[number + 1]))[:17]  # no counts
        search.numbers(words.astype(np.uint64), f"the vector of {name}")
        search._as_bytes(pack(words, 20), f"the vector of {name}, packed", 24)
    subtree = sum(plain[name].astype(np.uint64) for name in BELOW) % 2**20
    search.numbers(subtree, "the sum below hub")
    search._as_bytes(pack(subtree.astype(np.uint32), 20), "the sum below hub, packed", 24)
    for folder in (world.folder / "relay", world.folder / "kit"):
        assert search.leaks(folder) == []
    for name, at, answer in transport.answers + world.below.answers:
        assert not [what for frame in answer.frames for what in search._in(frame)], (name, at)
    (world.folder / "kit" / "leak").write_bytes(pack(subtree.astype(np.uint32), 20))
    assert any("the sum below hub" in leak for leak in search.leaks(world.folder / "kit"))


def vector(numbers):
    """Return the words of the sum of those of some members that are in the cohort."""
    made = NodeSum(VECTOR, 2)
    for member in set(numbers) & set(MEMBERS.tolist()):
        made.add(member, update(sent(member)), np.inf)
    return made.words()


# ---- what is refused, one sentence each ----------------------------------------------------------


def refused(world, **changes):
    """Return why the relay does not answer its first question, changed."""
    asked, transport = [], world.transport()
    hub = transport.nodes["hub"]

    def keep(payload):
        asked.append(payload)
        return encode_refusal("not now.")

    transport.nodes["hub"] = keep
    total(world.server(transport))
    request = replace(read_secure_request(asked[0]), **changes)
    reply = hub(encode_secure_request(request))
    assert reply.kind == REFUSAL, reply
    return reply.facts["reason"]


def test_a_relay_without_a_list_below_or_above_says_so(world):
    world.relay.members_below = lambda: None
    assert "the federation below hub has no list of members" in refused(world)
    world.start()
    world.relay.secure = SecureAnswers(world.relay.secure.store, lambda: None)
    assert "this node has no list of members" in refused(world)
    world.relay.secure = None
    assert "takes part in no secure sums" in refused(world)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"size": 9}, "its list of members or its terms are not those"),
        ({"session": "0" * 64}, "its list of members or its terms are not those"),
        ({"members": (12,)}, "there are 8 members below: others were asked for"),
        ({"text": "other"}, "not those that the run began with"),
    ],
)
def test_a_question_that_does_not_fit_is_refused(world, changes, why):
    assert why in refused(world, **changes)


def test_a_plain_question_of_a_secure_recipe_is_refused(world):
    request = replace(
        read_secure_request(asked_of(world)), step="mask", frames=(b"", b"no parameters")
    ).training
    reply = world.relay(encode_train(request))
    assert "a sum without masks is asked for" in reply.facts["reason"]


def asked_of(world):
    transport, asked = world.transport(), []
    hub = transport.nodes["hub"]
    transport.nodes["hub"] = lambda payload: asked.append(payload) or hub(payload)
    total(world.server(transport))
    return asked[0]


def test_a_relays_policy_holds_for_its_subtree(tmp_path):
    strict = World(tmp_path, policy=Policy(smallest_sum=3))
    assert "a sum of 2 nodes of this node's list could be opened" in refused(strict)


@pytest.mark.parametrize("nodes, whole, wanted", [(5, 3, 2), (5, 4, 3), (9, 0, 2), (3, 3, 3)])
def test_every_list_has_the_same_share_as_threshold(tiny_recipe, nodes, whole, wanted):
    told = (f"wire.secure_nodes={nodes}", f"wire.secure_threshold={whole}")
    recipe = load(tiny_recipe, (*SETTINGS, *told))
    assert secure_threshold_of(recipe, 3) == wanted
    assert secure_threshold_of(recipe) == (whole or 6)
