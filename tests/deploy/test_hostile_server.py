"""A node answers what its plan and policy lead to, once, and remembers it; whatever is asked."""

import json
import stat
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from fedlm.core.errors import FedlmError, RecordError
from fedlm.core.types import Gathered, Total
from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import registration
from fedlm.deploy.lifetime import Release, RunTurns, epsilon_of, lifetime
from fedlm.deploy.local import redacted
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.relay import Relay
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.server_app import record_nodes
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Presence, Quorum, RoundStats
from fedlm.engine.messages import REFUSAL, SUMS, Hello, TrainRequest, encode_hello, encode_request
from fedlm.federation.round import metrics_of
from fedlm.privacy.account import spent
from fedlm.privacy.cost import epsilon_of_shift
from fedlm.privacy.release import release
from fedlm.recipe.privacy_plan import plan_of, sampling_of
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from tests.deploy.local import LocalTransport, prepared, store_in

SPACED = (
    "server.rounds=4",
    "server.cohort=2",
    "server.sampling=spaced",
    "privacy.mechanism=tree",
    "privacy.noise_multiplier=4",
    "privacy.clip_norm=0.1",
    "privacy.min_separation=1",
    "privacy.max_participations=2",
    "privacy.delta=0.001",
)
POISSON = (
    "server.rounds=4",
    "server.cohort=4",
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1",
    "privacy.clip_norm=0.1",
    "privacy.delta=0.001",
)
OPEN = ("server.rounds=4", "server.cohort=4")
ADAPTIVE = (*POISSON, "privacy.clip_quantile=0.5", "privacy.clip_noise=1.0")
RUN, OTHER = "a" * 32, "b" * 32
ADMITTED = "frame"  # the parameters of these questions are none: who gets to them has passed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = prepared(tmp_path_factory.mktemp("hostile"))
    deal(store_in(path), ("north", "south"), path / "dealt")
    return path


@pytest.fixture
def node(folder):
    """Make a node with nine clients and some policy."""

    def make(policy=None, ledger=None, **more):
        return Worker(Store(folder / "dealt" / "north"), policy or Policy(), ledger=ledger, **more)

    return make


@pytest.fixture
def asked(folder):
    """Make a question: by default a decent one, of the first round, to two members."""

    def make(worker, settings=SPACED, **changes):
        facts = {
            "run": RUN,
            "recipe": redacted(load(folder / "tiny.toml", settings)),
            "round": 0,
            "first": 0,
            "population": 18,
            "text": worker.text,
            "members": (0, 1),
            "clip_norm": 0.1,
            "each": False,
            "longest": 1 << 20,
            "frames": (b"no parameters",),
        }
        return TrainRequest(**{**facts, **changes})

    return make


def said(worker, request):
    """Return why a node does not answer."""
    reply = worker(encode_request(request))
    assert reply.kind == REFUSAL
    return reply.facts["reason"]


def test_a_decent_question_is_admitted(node, asked):
    worker = node(Policy(smallest_cohort=2, require_privacy=True))
    assert ADMITTED in said(worker, asked(worker))
    assert ADMITTED in said(worker, asked(worker, round=1, members=(2, 3)))


def test_one_client_alone_is_not_told_apart(node, asked):
    strict, open_ = node(Policy(smallest_cohort=2)), node()
    needs_none = "needs their sum alone"
    assert needs_none in said(strict, asked(strict, each=True))
    assert needs_none in said(open_, asked(open_, each=True))
    assert "asked alone" in said(strict, asked(strict, members=(1,)))
    assert ADMITTED in said(open_, asked(open_, members=(1,)))
    lossy = (*SPACED, "wire.upload=uniform-8")
    refused = said(strict, asked(strict, lossy, each=True))
    assert "uniform-8" in refused and "single_updates" in refused
    allowing = node(Policy(smallest_cohort=2, single_updates=True))
    assert ADMITTED in said(allowing, asked(allowing, lossy, each=True))
    forbidding = node(Policy(single_updates=False))
    assert "single_updates" in said(forbidding, asked(forbidding, lossy, each=True))
    # A rule that looks at single updates: the node was told that their sum would do.
    for setting in ("server.aggregate=median", "server.update_norm=1.0"):
        refused = said(forbidding, asked(forbidding, (*OPEN, setting), each=True))
        assert setting.split("=")[0] in refused and "single_updates" in refused
    whole = node(Policy(single_updates=False), whole=True)  # all its clients are one member
    assert ADMITTED in said(whole, asked(whole, members=(0,)))


def test_a_client_takes_part_as_often_as_planned(node, asked):
    once = (*(s for s in SPACED if "max_part" not in s), "privacy.max_participations=1")
    worker = node()
    assert ADMITTED in said(worker, asked(worker, once))
    for round in (2, 3):
        refused = said(worker, asked(worker, once, round=round, members=(1, 2)))
        assert "lets it take part in 1" in refused


def test_a_client_rests_as_long_as_planned(node, asked):
    worker = node()
    assert ADMITTED in said(worker, asked(worker, round=2))
    for round in (1, 3):
        assert "between it and the next" in said(worker, asked(worker, round=round))
    assert ADMITTED in said(worker, asked(worker, round=0))


def test_chance_does_not_draw_the_same_client_for_ever(node, asked):
    """Without a separation: in twenty rounds of a thousand clients, nobody is drawn ten times."""
    rare = (*(s for s in POISSON if "rounds" not in s), "server.rounds=20")
    worker = node()
    question = asked(worker, rare, population=10_000, members=(3,))
    refused = [said(worker, replace(question, round=round)) for round in range(20)]
    passed = sum(ADMITTED in reason for reason in refused)
    assert passed < 6 and "lets it take part" in refused[-1]
    everybody = asked(worker, rare, run=OTHER, population=10_000, members=tuple(range(8)))
    assert "there can be" in said(worker, everybody)


def test_rounds_are_those_of_the_plan(node, asked):
    worker = node()
    assert "the recipe has 4 rounds" in said(worker, asked(worker, round=999_999))
    assert "the recipe has 4 rounds" in said(worker, asked(worker, round=4))


@pytest.mark.parametrize("limit", [1e6, 0.2, 0.05, float("inf")])
def test_the_clip_norm_is_that_of_the_plan(node, asked, limit):
    worker = node()
    assert "the plan has 0.1" in said(worker, asked(worker, clip_norm=limit))


def test_an_adaptive_clip_norm_moves_as_far_as_it_can(node, asked):
    worker = node()
    for round, limit in ((0, 0.1), (1, 0.1 * 1.105), (2, 0.1 / 1.22)):
        assert ADMITTED in said(worker, asked(worker, ADAPTIVE, round=round, clip_norm=limit))
    refused = said(worker, asked(worker, ADAPTIVE, round=3, clip_norm=1e6))
    assert "the plan has between 0.0741 and 0.135" in refused


def test_a_round_is_answered_once(node, asked):
    worker = node()
    first = asked(worker)
    assert ADMITTED in said(worker, first)
    counter = worker.ledger.counter
    assert ADMITTED in said(worker, first)  # the same question, after a crash of the server
    assert worker.ledger.counter == counter
    for change in ({"members": (2, 3)}, {"frames": (b"other parameters",)}):
        assert "answered, to another question" in said(worker, replace(first, **change))


def test_a_run_keeps_its_recipe(node, asked):
    worker = node()
    assert ADMITTED in said(worker, asked(worker))
    changed = (*SPACED, "client.learning_rate=0.1")
    assert "another recipe" in said(worker, asked(worker, changed, round=2))
    assert "another recipe" in said(worker, asked(worker, (), round=2))  # nor without privacy


def test_a_population_is_believed_as_far_as_it_is_known(node, asked, folder):
    """More clients would make it unlikely that one is drawn: 10^9 of them, very."""
    strict = Policy(largest_epsilon=2.1)
    worker = node(strict)
    once = (*POISSON[1:-1], "server.rounds=1", "privacy.delta=1e-10")
    many = asked(worker, once, population=10**9)
    refused = said(worker, many)
    assert "would spend epsilon" in refused and "not on 1000000000" in refused
    known = node(strict.model_copy(update={"largest_population": 100_000}))
    assert ADMITTED in said(known, replace(many, text=known.text, members=(0,)))
    canaries = (*once, "privacy.canaries=1000000000")
    assert "would spend epsilon" in said(worker, asked(worker, canaries))
    least = node(Policy(smallest_population=100))
    assert "wants at least 100" in said(least, asked(least))
    assert "this node alone has 9" in said(
        least, asked(least, first=95, population=100, members=(96,))
    )


def test_delta_is_a_small_probability(node, asked):
    worker = node(Policy(largest_epsilon=2.1))
    careless = (*POISSON[:-1], "privacy.delta=0.5")
    assert "privacy.delta = 0.5" in said(worker, asked(worker, careless))
    worker = node(Policy(largest_delta=1e-6))
    assert "privacy.delta = 0.001" in said(worker, asked(worker))


def test_all_runs_together_have_a_limit(node, asked):
    free = node()
    assert ADMITTED in said(free, asked(free))
    one = lifetime(free.ledger).epsilon  # four Gaussian releases of the same cost twice as much,
    worker = node(Policy(largest_lifetime_epsilon=2.5 * one))  # and a little for their length
    reasons = [said(worker, asked(worker, run=f"{n:032x}")) for n in range(8)]
    answered = [ADMITTED in reason for reason in reasons]
    assert answered == sorted(answered, reverse=True) and 2 < sum(answered) < 8
    assert "over all runs" in reasons[-1]
    assert one < lifetime(worker.ledger).epsilon <= 2.5 * one
    # Others have taken part in nothing yet.
    assert ADMITTED in said(worker, asked(worker, run=OTHER, members=(5, 6)))
    assert "mechanism with noise" in said(worker, asked(worker, (), run="c" * 32))


def test_a_run_counts_as_planned_or_by_turns(folder):
    recipe = load(folder / "tiny.toml", (*POISSON, "privacy.noise_multiplier=4"))
    always = plan_of(recipe, sampling_of(recipe, 4))  # who is always drawn has nothing from chance
    three = epsilon_of_shift(3**0.5 / 4, always.delta)  # by turns: three releases
    shares = (RunTurns(always, 1), RunTurns(always, 2))
    assert epsilon_of(shares, always.delta) == pytest.approx(three)
    four = epsilon_of((RunTurns(always, 2),), always.delta, (Release(4.0, 0.0), Release(4.0, 0.0)))
    assert epsilon_of((RunTurns(always, 4),), always.delta) == pytest.approx(four)
    assert epsilon_of((*shares, RunTurns(None)), always.delta) == float("inf")
    plan = plan_of(recipe, sampling_of(recipe, 18))
    planned = spent(plan, plan.rounds).epsilon
    assert epsilon_of((RunTurns(plan, 3),), plan.delta) == pytest.approx(planned)


def test_a_run_without_privacy_has_no_finite_epsilon(node, asked):
    worker = node()
    assert ADMITTED in said(worker, asked(worker, ("server.rounds=4",), clip_norm=float("inf")))
    limited = node(Policy(largest_lifetime_epsilon=1e6), worker.ledger)
    assert "epsilon inf over all" in said(limited, asked(limited, run=OTHER))
    assert ADMITTED in said(limited, asked(limited, run=OTHER, members=(4, 5)))


# ---- the file ------------------------------------------------------------------------------


def test_what_was_answered_outlives_the_process(node, asked, tmp_path):
    file = tmp_path / "kit" / "ledger.jsonl"
    worker = node(ledger=NodeLedger(file))
    first = asked(worker)
    assert ADMITTED in said(worker, first)
    with pytest.raises(RecordError, match="in use"):
        NodeLedger(file)
    worker.ledger.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = file.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["begin", "run", "answer"]
    assert "c1" not in json.loads(lines[2])["clients"]  # not by its name
    with file.open("ab") as out:
        out.write(b'{"counter": 3, "kind": "ans')  # cut short
    again = node(ledger=NodeLedger(file))
    assert again.text == worker.text
    assert "another question" in said(again, replace(first, members=(2, 3)))
    again.ledger.close()
    assert NodeLedger(file, read_only=True).counter == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("mechanism", ["tree", "banded", "blt"])
def test_a_plan_is_read_as_it_was_written(node, asked, tmp_path, mechanism):
    """Also one whose noise has a matrix that was searched for."""
    ledger = NodeLedger(tmp_path / "ledger.jsonl")
    worker = node(ledger=ledger)
    settings = (*SPACED, f"privacy.mechanism={mechanism}")
    assert ADMITTED in said(worker, asked(worker, settings))
    ledger.close()
    again = NodeLedger(tmp_path / "ledger.jsonl", read_only=True)
    assert again.runs[RUN].plan == ledger.runs[RUN].plan
    assert lifetime(again).epsilon == pytest.approx(lifetime(ledger).epsilon)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"counter": 7, "kind": "lost", "since": "x"}',
        '{"counter": 9, "kind": "refusal", "run": "aa", "round": 1, "reason": ""}',
        '{"counter": 1, "kind": "answer", "run": "aa", "round": 1, "clients": [], "question": "a"}',
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path, line):
    file = tmp_path / "ledger.jsonl"
    NodeLedger(file).close()
    with file.open("a") as out:
        out.write(line + "\n")
    with pytest.raises(RecordError, match="ledger"):
        NodeLedger(file)


def test_an_older_copy_of_the_ledger_answers_nothing(node, asked, tmp_path):
    file, counters = tmp_path / "ledger.jsonl", Counters(tmp_path / "counters.json")
    worker = node(ledger=NodeLedger(file))
    worker.ledger.close()
    backup = file.read_bytes()
    worker = node(ledger=NodeLedger(file))
    assert ADMITTED in said(worker, asked(worker))
    counters.hear("north", worker.hello().counter)
    worker.ledger.close()
    assert stat.S_IMODE(counters.file.stat().st_mode) == 0o600

    file.write_bytes(backup)
    remembered = Counters(counters.file).of("north")  # the server was started again, too
    restored = node(ledger=NodeLedger(file))
    request = asked(restored, members=(2, 3), counter=remembered)
    for _ in range(5):  # however often it is asked
        refused = said(restored, request)
        assert "older copy" in refused and f"--confirm {remembered}" in refused
    restored.ledger.confirm(remembered)
    assert ADMITTED in said(restored, request)
    assert restored.ledger.lost == [(0, remembered)]
    with pytest.raises(RecordError, match="expected the number in the refusal"):
        restored.ledger.confirm(remembered)


def test_the_ledger_is_shown(node, asked, tmp_path, run_cli):
    kit = tmp_path / "kit"
    worker = node(Policy(), NodeLedger(kit / "ledger.jsonl"))
    (kit / "node.toml").write_text('federation = "f"\nname = "n"\nhost = "h"\nport = 1\n')
    for round, members in ((0, (0, 1)), (1, (2, 3)), (2, (0, 2)), (9, (5,))):
        said(worker, asked(worker, round=round, members=members))
    said(worker, asked(worker, round=3, members=(0, 5)))
    worker.ledger.close()
    told = run_cli("node", "ledger", kit, "--json").json
    (run,) = told["runs"]
    assert run["rounds_answered"] == 3 and run["participations"] == {"1": 4, "2": 1}
    assert told["refusals"] == 2 and told["clients"] == 5
    assert told["epsilon"] == pytest.approx(run["epsilon"]) and told["epsilon"] > 0
    shown = run_cli("node", "ledger", kit).stdout
    assert "lifetime epsilon is" in shown and "2 questions refused" in shown
    assert "4 clients 1 time, 1 client 2 times" in shown
    refused = run_cli("node", "ledger", kit, "--confirm", "1")
    assert refused.code == 2 and "expected the number" in refused.stderr
    assert run_cli("node", "ledger", kit, "--confirm", "500", "--json").json["counter"] == 500


# ---- relays --------------------------------------------------------------------------------


def test_a_relay_asks_the_same_of_a_question(node, asked, folder, tmp_path):
    names = ["north", "south"]
    below = {n: Worker(Store(folder / "dealt" / n), Policy()) for n in names}
    transport = LocalTransport(below)
    relay = Relay(tmp_path, transport, names, Quorum(), name="r", say=lambda text: None)
    question = replace(asked(below["north"], members=(0, 12)), text=relay.hello().text)
    before = len(transport.asked)
    for change, why in (
        ({"round": 4}, "4 rounds"),
        ({"clip_norm": 1.0}, "the plan has 0.1"),
        ({"each": True}, "sum alone"),
        ({"counter": 9}, "older copy"),
    ):
        assert why in said(relay, replace(question, **change))
    assert len(transport.asked) == before, "the nodes below were not even asked"
    assert "nodes answered" in said(relay, question)  # they refuse its frame
    assert "another question" in said(relay, replace(question, members=(0, 13)))


def test_a_run_goes_on_through_a_relay_after_another_began_with_fewer_nodes(tmp_path):
    """A later hello made the relay forget who took part in a run that was going on."""

    class Nodes:
        """Nodes that say hello unless they are away."""

        def __init__(self):
            self.away, self.sent = set(), {}

        def presence(self):
            names = {"east": 2, "west": 3}
            return {n: Presence(i, n not in self.away, "x") for n, i in names.items()}

        def send(self, node, payload, run):
            name = str(len(self.sent))
            self.sent[name] = "east" if node == 2 else "west"
            return name

        def fetch(self, name, most):
            return encode_hello(Hello(5, f"text-{self.sent[name]}", "tok", "1", counter=0))

    nodes = Nodes()
    quorum = Quorum(quorum=0.5, deadline=0.2)
    relay = Relay(tmp_path, nodes, ["east", "west"], quorum, name="hub", say=lambda text: None)
    first = relay.hello().text
    nodes.away = {"west"}
    second = relay.hello().text
    assert first != second
    for text, many in ((first, 2), (second, 1)):
        assert len(relay._assignments(SimpleNamespace(text=text))) == many


# ---- what a run tells ----------------------------------------------------------------------


def stats(round):
    return RoundStats(round, ["north"], away=["sweden"], refused={"south": "why"}, up_bytes=round)


def test_who_answered_is_a_secret_under_a_plan(folder, tmp_path):
    recipe, spoken = load(folder / "tiny.toml", POISSON), []
    plan = plan_of(recipe, sampling_of(recipe, 18))
    for round in range(2):
        record_nodes(RunDirectory(tmp_path), stats(round), plan, 3, spoken.append)
    told = (tmp_path / "nodes.jsonl").read_text()
    assert not spoken and not any(name in told for name in ("north", "sweden", "south"))
    for round, line in enumerate(told.splitlines()):
        assert json.loads(line) == {"round": round, "nodes": 3}
    private = tmp_path / "private/nodes.jsonl"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    folder = stat.S_IMODE(private.parent.stat().st_mode)
    assert folder == 0o700, "the size of the file would tell how many were asked"
    assert [entry["away"] for entry in rounds_of(tmp_path)] == [["sweden"]] * 2
    private.unlink()
    with pytest.raises(RecordError, match="secret of its owner"):
        rounds_of(tmp_path)


def test_a_reply_holds_no_more_than_the_server_needs(folder):
    recipe = load(folder / "tiny.toml", POISSON)
    plan = plan_of(recipe, sampling_of(recipe, 18))
    sums = dict.fromkeys(SUMS, 3.0)
    assert set(release(plan, "reply", sums)) == {"weight", "refused", "unclipped"}
    assert dict(release(replace(plan, reveal=True), "reply", sums)) == sums
    assert dict(release(None, "reply", sums)) == sums


def test_an_unusable_update_ends_no_run_whose_tokens_are_not_told():
    zero, one, three = jnp.zeros(()), jnp.ones(()), jnp.full((), 3.0)
    total = Total(None, three, zero, zero, zero, one, three, three)
    assert metrics_of(0, Gathered(total, 0, 0), 0.0)["loss"] == 0.0
    lost = replace(total, refused=three)
    assert metrics_of(0, Gathered(lost, 0, 0), 0.0)["loss"] == float("inf")


def test_a_server_notices_an_older_ledger(node):
    counters, spoken = Counters(), []
    check = registration.heard(counters, lambda name, hello: None, spoken.append)
    counters.hear("north", 7)
    check("north", node().hello())
    check("south", node().hello())
    assert len(spoken) == 1 and "north came back with a ledger at 0, and 7" in spoken[0]


def hello(node, **changes):
    return lambda payload: encode_hello(node.hello()._replace(**changes))


def test_a_node_that_does_not_fit_is_left_out_and_named(node):
    nodes = {"a": hello(node()), "b": hello(node(), clients=0), "c": hello(node(), tokenizer="x")}
    fits = registration.same_tokenizer(node().store.tokens_sha256, "the server's")
    most, spoken = Quorum(quorum=0.3), []
    made = registration.assign_members(LocalTransport(nodes), "abc", fits, spoken.append, most)
    assert [assignment.name for assignment in made] == ["a"]
    assert any("without b: node b did not say" in text for text in spoken)
    assert any("without c: node c has another tokenizer" in text for text in spoken)
    for all_of_them in (Quorum(), Quorum(quorum=0.5)):
        with pytest.raises(FedlmError, match=r"node [bc] "):
            registration.assign_members(
                LocalTransport(nodes), "abc", fits, spoken.append, all_of_them
            )


def test_a_run_begins_without_who_says_nothing(node):
    nodes, spoken = {"a": hello(node()), "b": hello(node())}, []
    quorum = Quorum(quorum=0.5, deadline=0.5)
    for transport in (LocalTransport(nodes, away=["b"]), LocalTransport(nodes, slow=["b"])):
        made = registration.assign_members(
            transport, "ab", lambda name, hello: None, spoken.append, quorum
        )
        assert [assignment.name for assignment in made] == ["a"]
        assert "without b" in spoken[-1] and any("waiting for b" in text for text in spoken)


def test_a_node_that_moves_the_model_alone_is_named(tmp_path):
    spoken = []
    stats = RoundStats(2, weights={"a": 1.0, "b": 1e6, "c": 2.0}, put_aside={"d": 13}, aside=["e"])
    record_nodes(RunDirectory(tmp_path), stats, None, 5, spoken.append)
    assert "without e" in spoken[0] and "d is put aside until round 13" in spoken[1]
    assert "b says that it has 100.0% of all weight" in spoken[2]
    even = RoundStats(3, weights={"a": 1.0, "b": 2.0, "c": 2.0})
    record_nodes(RunDirectory(tmp_path), even, None, 5, spoken.append)
    assert len(spoken) == 3


def test_without_a_plan_everything_is_told(tmp_path):
    spoken = []
    record_nodes(RunDirectory(tmp_path), stats(0), None, 3, spoken.append)
    assert rounds_of(tmp_path)[0]["answered"] == ["north"]
    assert spoken == ["round 0: south: why", "round 0: without sweden"]
    assert not (tmp_path / "private/nodes.jsonl").exists()


def test_seats_do_not_tell_of_text_by_a_plain_hash(node):
    one, other = node(), node()
    assert one.text != other.text  # the same text, salted by each ledger
    assert Assignment("a", 0, 1, one.text).text == one.text
