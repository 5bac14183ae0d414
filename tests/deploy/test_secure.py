"""Secure sums by messages between a server and nodes: the same sum, whoever leaves or is killed."""

import itertools
import math
import re
from dataclasses import replace

import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError, EngineError
from fedlm.core.types import Start
from fedlm.deploy.policy import Policy, Refusal, check_policy
from fedlm.engine.messages import REFUSAL, Payload
from fedlm.engine.messages import encode_request as encode_train
from fedlm.engine.secure_messages import SecureRequest, encode_secure_request
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.secure import members
from fedlm.secure.keys import IdentityKey
from fedlm.secure.terms import Member, Session, Terms
from tests.conftest import write_tiny
from tests.deploy.secure import NAMES, RUN, SETTINGS, federation, played


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_tiny(folder), build(
        load(folder / "tiny.toml", SETTINGS), folder / "stores", lambda stage, done: None
    )


@pytest.fixture
def made(text, tmp_path):
    recipe, run = text
    folders = (tmp_path / str(number) for number in itertools.count())
    return lambda *changes, **more: federation(run.store, recipe, next(folders), *changes, **more)


def test_nodes_train_over_messages_what_the_simulation_trains(made, text):
    fed, stats = made(), []
    state, metrics = played(fed.run(fed.transport(), stats=stats), 2)
    simulated, wanted = played(text[1], 2)
    away = tree.norm(tree.sub(state.params, simulated.params))
    moved = tree.norm(tree.sub(simulated.params, text[1].start()))
    assert float(away / moved) < 1e-3
    for name in ("members", "tokens", "steps", "refused"):
        assert [m[name] for m in metrics] == [m[name] for m in wanted]
    assert stats[0].answered == list(NAMES) and not stats[0].lost


# ---- what a node refuses, one sentence each ------------------------------------------------------


@pytest.fixture(scope="module")
def asked(text, tmp_path_factory):
    """A federation, and the first question to each of its nodes."""
    fed = federation(text[1].store, text[0], tmp_path_factory.mktemp("asked"))
    transport = fed.transport(leave=dict.fromkeys(NAMES, "keys"))
    engine = fed.run(transport).engine
    vector = engine.vector(Start(text[1].start(), math.inf), 0)
    terms = Terms(members=fed.members, threshold=3, bits=24, size=vector.size)
    request = SecureRequest(
        run=RUN,
        recipe=engine.sums.attempts.recipe,
        round=0,
        attempt=0,
        step="keys",
        session=Session(terms, RUN, 0, 0).digest.hex(),
        size=vector.size,
        first=0,
        population=18,
        text=fed.workers["east"].text,
        members=(0,),
        clip_norm=math.inf,
        longest=1 << 20,
    )
    return fed, request


def said(worker, request):
    """Return why a node does not answer."""
    payload = request if isinstance(request, Payload) else encode_secure_request(request)
    reply = worker(payload)
    assert reply.kind == REFUSAL, reply
    return reply.facts["reason"]


def test_the_same_question_gives_the_same_keys_also_after_a_kill(asked):
    fed, request = asked
    payload = encode_secure_request(request)
    first = fed.workers["east"](payload)
    assert first.kind == "secure_reply" and first == fed.workers["east"](payload)
    fed.start("east")
    assert fed.workers["east"](payload).frames == first.frames


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"session": "0" * 64}, "its list of members or its terms are not those of this node"),
        ({"round": 9}, "means another sum"),
        ({"text": "another"}, "not the one that the run began with"),
        ({"members": (17,)}, "it was asked for others"),
        ({"step": "dance"}, "a secure sum has none"),
        ({"attempt": 8}, "attempt = 8"),
        ({"frames": (b"x",)}, "exactly 0 frames"),
        ({"step": "sign", "frames": (b"x",), "attempt": 0}, "came before this node had answered"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_with_a_sentence(asked, changes, why):
    fed, request = asked
    fed.workers["east"](encode_secure_request(request))
    assert why in said(fed.workers["east"], replace(request, **changes))


def test_a_node_answers_only_by_the_list_that_it_approved(asked):
    fed, request = asked
    worker, held = fed.workers["east"], fed.listed["east"]
    for listed, why in (
        (None, "this node has no list of members"),
        (members.first(fed.members[:3]), "its list of members or its terms are not those"),
        (
            members.first([*fed.members, Member("zeta", IdentityKey.generate().public)]),
            "wire.secure_nodes = 4: the list of members of this node, number 0, has 5",
        ),
        (
            members.first([*fed.members[:3], Member("zeta", IdentityKey.generate().public)]),
            "its list of members or its terms are not those of this node",
        ),
    ):
        fed.listed["east"] = listed
        assert why in said(worker, request)
    fed.listed["east"] = held


def test_a_plain_question_of_a_secure_recipe_is_refused(asked):
    fed, request = asked
    plain = replace(request, step="mask", frames=(b"", b"no parameters")).training
    why = said(fed.workers["east"], encode_train(plain))
    assert "a sum without masks is asked for" in why
    each = replace(plain, each=True)
    assert "without masks" in said(fed.workers["east"], encode_train(each))


def test_a_policy_can_want_secure_sums(asked, text):
    plain = load(text[0], ("client.weight=uniform",))
    with pytest.raises(Refusal, match=r"wire\.secure_nodes = 0: this node wants secure sums"):
        check_policy(Policy(require_secure_sums=True), plain, None, 10, 4)
    check_policy(Policy(require_secure_sums=True), asked[0].recipe, None, 10, 4)


@pytest.mark.parametrize(
    "changes, why",
    [
        (("wire.secure_nodes=5",), "wire.secure_nodes = 5: expected 4, the members"),
        (("run.checkpoint_every=2",), "run.checkpoint_every = 2: expected 1 with secure sums"),
        (("wire.upload=uniform-8",), "a codec of integers that add up"),
        (("wire.secure_threshold=2",), "wire.secure_threshold = 2: expected 3 to 4"),
    ],
)
def test_a_run_that_cannot_work_is_refused_at_start(asked, text, changes, why):
    fed = asked[0]
    with pytest.raises(ConfigError, match=re.escape(why)):
        fed.run(fed.transport(), recipe=load(text[0], (*SETTINGS, *changes)))


def test_strangers_and_more_nodes_than_the_recipe_has_are_refused_at_start(asked):
    fed = asked[0]
    leaves = tuple((f"behind-{i}", int(i == 0) * fed.assignments[0].clients) for i in range(3))
    for other, why in (
        (
            fed.assignments[0]._replace(leaves=leaves),
            "wire.secure_nodes = 4: expected 6, the nodes",
        ),
        (fed.assignments[0]._replace(name="zeta"), "also zeta, who would take part"),
    ):
        known, fed.assignments = fed.assignments, (other, *fed.assignments[1:])
        with pytest.raises(ConfigError, match=why):
            fed.run(fed.transport())
        fed.assignments = known


@pytest.mark.parametrize(
    "policy, members, why",
    [
        (Policy(smallest_part=2), (0,), "1 client of this node in round 0: this node wants at "),
        (Policy(smallest_part=3), (0, 1), "2 clients of this node in round 0"),
        (Policy(single_updates=False), (0,), "a server that draws nobody else opens their sum"),
        (Policy(smallest_cohort=4), (0,), "smallest_part in its policy"),
        (Policy(smallest_sum=4), (0, 1), "wire.secure_threshold = 3: a sum of 3 nodes of this"),
        (Policy(smallest_part=2), (0, 1), ""),
        (Policy(smallest_part=2), (), ""),
        (Policy(smallest_cohort=4, smallest_part=1), (0,), ""),
        (Policy(smallest_sum=3), (0,), ""),
        (Policy(), (0,), ""),
    ],
)
def test_a_policy_says_how_little_may_be_in_a_secure_sum(asked, policy, members, why):
    """What a node can check: its own clients, and how many must sign before a sum is opened."""
    fed, request = asked
    worker = fed.workers["north"]
    told = replace(request, members=members, text=worker.text, run="a11" + RUN[3:])
    terms = Terms(members=fed.members, threshold=3, bits=24, size=request.size)
    told = replace(told, session=Session(terms, told.run, 0, 0).digest.hex())
    known, worker.policy = worker.policy, policy
    try:
        reply = worker(encode_secure_request(told))
    finally:
        worker.policy = known
    if why:
        assert why in reply.facts["reason"] and reply.facts["reason"].endswith(".")
    else:
        assert reply.kind == "secure_reply"


def test_noise_at_nodes_covers_a_client_that_is_alone():
    strict = Policy(single_updates=False)
    assert strict.least_part(noise_at_nodes=False) == 2
    assert strict.least_part(noise_at_nodes=True) == 1


PRIVATE = (
    "privacy.mechanism=distributed",
    "privacy.honest_nodes=2",
    "privacy.clip_norm=0.5",
    "privacy.noise_multiplier=1.0",
    "server.sampling=fixed",
    "wire.upload=secure-18-clip0.5-members16",
)


@pytest.mark.slow
def test_nodes_add_the_noise_and_account_for_it(made, text):
    """The server's sum has the noise of four nodes, no counts, and each ledger has the plan."""
    fed = made(*PRIVATE)
    run = fed.run(fed.transport())
    state, (metrics,) = played(run, 1)
    assert metrics["noise_excess"] == pytest.approx(2.0) and metrics["tokens"] == 0
    moved = tree.sub(state.params, run.start())
    assert float(tree.norm(moved)) > 0
    plan = fed.workers["east"].ledger.runs[RUN].plan
    assert plan.mechanism == "distributed" and plan.honest_nodes == 2
    strict = made(*PRIVATE, policy=Policy(largest_epsilon=0.01, largest_delta=1e-5))
    with pytest.raises(EngineError, match=r"0 of 4 nodes answered.*the run would spend epsilon"):
        played(strict.run(strict.transport()), 1)
