"""Noisy figures of training clients' text at nodes: the noise is added where the text is."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.core.types import Sampling
from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import registration
from fedlm.deploy.lifetime import GoingOn, lifetime, summary
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_evaluation import whole_model
from fedlm.deploy.node_ledger import NodeLedger, ToldFigures
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, believed
from fedlm.deploy.relay import Relay
from fedlm.deploy.versions import VersionedTransport
from fedlm.engine import evaluate_messages as messages
from fedlm.engine.dispatch import Quorum
from fedlm.engine.messages import REFUSAL, Payload
from fedlm.evaluate.clients import by_owner
from fedlm.privacy import account
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.evaluation import BINS
from fedlm.privacy.ledger import Ledger, round_entry
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.private_evaluation import noisy_figures, planned_figures
from fedlm.recipe.settings import load
from fedlm.record.facts import facts_of
from fedlm.record.journal import Journal
from fedlm.training import train
from fedlm.training.write_ahead import WriteAhead
from tests.deploy.local import LocalTransport, prepared, store_in
from tests.deploy.secure import federation
from tests.privacy.plans import plan

SMALL = ("model.name=cifg", "server.rounds=4", "run.prompts=[]", "run.engine=loop")
PRIVATE = (
    "server.sampling=poisson",
    "server.evaluate_every=2",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1",
    "privacy.clip_norm=0.1",
    "privacy.delta=0.001",
    "privacy.evaluation_tokens=8",
    "privacy.evaluation_every=2",
)
NOISE = 0.05
NOISY = (*PRIVATE, f"privacy.evaluation_noise={NOISE}")
NAMES = ("north", "south")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = prepared(tmp_path_factory.mktemp("noisy"), *SMALL)
    deal(store_in(path), NAMES, path / "dealt")
    return path


@pytest.fixture(scope="module")
def parts(folder):
    return {name: Store(folder / "dealt" / name) for name in NAMES}


@pytest.fixture(scope="module")
def server_text(folder):
    return Store(folder / "dealt" / "server")


@pytest.fixture
def network(folder, parts, server_text):
    """Make the run of a server whose nodes are called."""

    def make(*changes, nodes=None, transport=None, out=None, **more):
        nodes = nodes or workers(parts)
        say = lambda text: None  # noqa: E731
        assignments = registration.assign_members(
            LocalTransport(nodes), sorted(nodes), lambda n, h: None, say
        )
        recipe = resolve(load(folder / "tiny.toml", (*SMALL, *NOISY, *changes)), server_text)
        return networked_run(
            recipe,
            server_text,
            assignments,
            out or folder / "nowhere",
            transport=transport or LocalTransport(nodes),
            **more,
        )

    return make


def workers(parts, **more):
    return {name: Worker(parts[name], Policy(), **more) for name in sorted(parts)}


def state_of(run, round=2):
    return replace(run.round.init(run.start()), round=round)


@pytest.fixture
def asked(network, parts):
    """Make a node with a policy, and the question that a server asks it."""

    def make(*changes, policy=None, round=2, **more):
        worker = Worker(parts["north"], policy or Policy(), **more)
        seen = []

        def north(payload):
            if payload.kind == messages.EVALUATE_REQUEST:
                seen.append(messages.read_evaluate_request(payload))
                return Payload(REFUSAL, {"version": 5, "reason": "only looking"})
            return worker(payload)

        nodes = {"north": north, "south": Worker(parts["south"], Policy())}
        over = network(*changes, nodes=nodes, quorum=Quorum(quorum=0.5), run_id="a" * 32)
        over.private_evaluation.figures(state_of(over, round))
        (found,) = seen
        return worker, replace(found, text=worker.text)

    return make


def answer(worker, request):
    return worker(messages.encode_evaluate_request(request))


def reason(worker, request):
    payload = answer(worker, request)
    return payload.facts.get("reason", "") if payload.kind == REFUSAL else ""


def vector(worker, request):
    reply = messages.read_evaluate_reply(answer(worker, request), request)
    (part,) = reply.sums
    return np.array([part[name] for name in messages.NOISY])


def exact_vector(worker, request):
    """What a node would send without noise."""
    work = worker._work(request)
    rows, owners = work.held_out["validation"].rows(1)
    params = whole_model(work, request.frames[0])
    each = by_owner(work.evaluator()(params, rows), owners).values()
    nats, tokens, right = np.array([(s.nats, s.tokens, s.correct) for s in each]).T
    return noisy_figures(work.recipe, work.vocabulary).vectors(nats, tokens, right).sum(axis=0)


# ---- the figures ---------------------------------------------------------------------------


def test_figures_are_those_of_the_simulation_within_the_errors_told(folder, network):
    """Many releases, so that errors which are told too small or too large show."""
    quiet = (*SMALL, *PRIVATE, "privacy.evaluation_noise=1e-6")
    store = store_in(folder)
    alone = flat_run(resolve(load(folder / "tiny.toml", quiet), store), store, out=folder / "x")
    exact = alone.private_evaluation.figures(state_of(alone))
    off, over = {"perplexity": [], "accuracy": []}, network("server.rounds=80")
    state = over.round.init(over.start())
    for round in range(2, 82, 2):
        told = over.private_evaluation.figures(replace(state, round=round))
        for name, z in off.items():
            z.append((told[name] - exact[name]) / told[f"{name}_error"])
    assert told["noise_multiplier"] == NOISE and set(told["nodes"]) == set(NAMES)
    for name, z in off.items():
        assert abs(np.mean(z)) < 0.5, name
        assert 0.66 < np.std(z) < 1.34, name  # three standard errors; half the noise gives 0.5


@pytest.mark.slow
def test_through_a_relay_they_are_the_same_bytes(network, parts, tmp_path):
    ledgers = {name: NodeLedger() for name in NAMES}

    def nodes():
        return {name: Worker(parts[name], Policy(), ledger=ledgers[name]) for name in NAMES}

    quiet = {"name": "relay", "say": lambda text: None}
    below = Relay(tmp_path, LocalTransport(nodes()), sorted(NAMES), Quorum(), **quiet)
    through = network(nodes={"relay": below}, run_id="a" * 32)
    told = through.private_evaluation.figures(state_of(through))
    assert set(told["nodes"]) == {"relay/north", "relay/south"}
    direct = network(nodes=nodes(), run_id="a" * 32)
    again = direct.private_evaluation.figures(state_of(direct))
    same = {name: value for name, value in told.items() if name != "nodes"}
    assert same == {name: value for name, value in again.items() if name != "nodes"}
    assert list(told["nodes"].values()) == list(again["nodes"].values())
    entry = below.ledger.runs["a" * 32]
    assert [told.noise_multiplier for told in entry.figures.values()] == [NOISE]


def test_the_noise_of_a_node_is_that_of_the_recipe(asked):
    """Over questions that differ in the run alone; half the noise, or twice, would show."""
    worker, request = asked()
    exact = exact_vector(worker, request)
    drawn = [vector(worker, replace(request, run=f"{number:032x}")) - exact for number in range(50)]
    z = np.array(drawn) / NOISE
    assert z.shape == (50, 3 + BINS)
    assert abs(z.mean()) < 3 / math.sqrt(z.size)
    assert abs(z.std() - 1) < 3 / math.sqrt(2 * z.size)
    assert np.all(np.abs(np.corrcoef(z.T) - np.eye(27)) < 0.65)  # five standard errors


def test_a_store_that_is_one_member_counts_as_one_client(asked, parts):
    """The plan promises the member, so all its text moves the sum by at most one."""
    worker, request = asked(whole=True)
    found = vector(worker, request)
    assert np.linalg.norm(found) < 1 + 10 * NOISE * math.sqrt(27)
    assert found[3:].sum() / math.sqrt(0.2) == pytest.approx(1, abs=10 * NOISE * math.sqrt(24 * 5))
    several, request = asked()
    counted = exact_vector(several, request)[3:].sum() / math.sqrt(0.2)
    assert counted == pytest.approx(len(parts["north"].training_clients))


def test_an_answer_holds_the_noisy_sum_and_nothing_else(asked):
    worker, request = asked()
    reply = answer(worker, request)
    assert not reply.frames
    assert set(reply.facts) == {"version", "round", "phase", "asks", "counter", *messages.NOISY}
    steps = np.array([reply.facts[name] for name in messages.NOISY]) * 1024
    np.testing.assert_array_equal(steps, np.round(steps))  # low bits tell nothing


def test_secure_sums_and_noise_at_nodes_have_noisy_figures_too(folder, tmp_path):
    made = federation(
        store_in(folder),
        folder / "tiny.toml",
        tmp_path,
        *NOISY,
        "server.sampling=fixed",
        "privacy.mechanism=distributed",
        "privacy.noise_multiplier=2",
        "privacy.honest_nodes=2",
    )
    over = made.run(made.transport())
    told = over.private_evaluation.figures(state_of(over))
    assert set(told["nodes"]) == set(made.names) and told["perplexity"] > 1


# ---- once, and on record -------------------------------------------------------------------


def test_the_same_question_has_the_same_bytes_and_one_line_after_a_kill_too(asked, parts, tmp_path):
    file = tmp_path / "ledger.jsonl"
    worker, request = asked(ledger=NodeLedger(file))
    first = answer(worker, request)
    counter = worker.ledger.counter
    assert answer(worker, request) == first and worker.ledger.counter == counter
    worker.ledger.close()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["begin", "run", "figures"]
    again = Worker(parts["north"], Policy(), ledger=NodeLedger(file))
    assert answer(again, request) == first and again.ledger.counter == counter
    other = replace(request, frames=tuple(frame[::-1] for frame in request.frames))
    assert "told once" in reason(again, other)
    again.ledger.close()


def test_an_answer_that_was_told_leaves_again_as_it_was(asked, tmp_path, monkeypatch):
    """Also at a node that would add up other numbers by now; no noise is used for two sums."""
    worker, request = asked()
    first = answer(worker, request)
    monkeypatch.setattr("fedlm.deploy.node_worker.noisy_sum", lambda *args, **more: [1.0] * 27)
    assert answer(worker, request) == first
    assert answer(worker, replace(request, round=4)).facts["noisy_03"] == [1.0]


def test_an_answer_that_cannot_be_written_down_does_not_leave(asked, tmp_path):
    worker, request = asked(ledger=NodeLedger(tmp_path / "ledger.jsonl"))
    worker.ledger.close()  # its disk is gone
    assert answer(worker, request).kind == REFUSAL
    assert not worker.ledger.runs


def test_different_questions_never_share_noise(asked):
    worker, request = asked()
    exact = exact_vector(worker, request)
    first = vector(worker, request) - exact
    for change in ({"run": "b" * 32}, {"round": 4}):
        other = vector(worker, replace(request, **change)) - exact
        assert np.abs(other - first).max() > NOISE, change


def test_a_node_refuses_noisy_figures_that_its_recipe_does_not_lead_to(asked):
    worker, request = asked()
    quiet = request.recipe.replace(f"evaluation_noise = {NOISE}\n", "")
    revealed = request.recipe.replace("reveal = false", "reveal = true")
    assert quiet != request.recipe != revealed
    refused = {
        "the recipe has none (privacy.evaluation_noise": {"recipe": quiet},
        "without privacy.reveal": {"recipe": revealed},
        "before the first round": {"round": 0},
        "the recipe has 4 rounds": {"round": 5},
        "the text of others": {"members": (request.first + 1,)},
        "not the one that the run began with": {"text": "another"},
    }
    for words, change in refused.items():
        assert words in reason(worker, replace(request, **change)), words
    assert not worker.ledger.runs
    few = Worker(worker.store, Policy(smallest_evaluation=worker.clients + 1))
    assert "behind a figure (smallest_evaluation" in reason(few, replace(request, text=few.text))


def test_a_run_tells_no_more_figures_than_its_recipe_plans(asked):
    """After rounds 2 and 4; one round of its own is that of a run that ends early."""
    worker, request = asked()
    assert reason(worker, replace(request, round=1)) == ""
    assert "told some after round 1" in reason(worker, replace(request, round=3))
    assert reason(worker, replace(request, round=2)) == ""
    assert "2 such answers in a run" in reason(worker, replace(request, round=4))
    assert list(worker.ledger.runs[request.run].figures) == [1, 2]
    other = replace(request, run="b" * 32)
    assert [reason(worker, replace(other, round=round)) for round in (2, 4)] == ["", ""]


def test_the_lifetime_of_a_client_counts_noisy_figures(asked):
    """Also of clients that were never drawn, and those of the run that are still to come."""
    loud = f"privacy.evaluation_noise={4.0}"
    worker, request = asked(loud)
    for number in range(2):
        for round in (2, 4):
            assert reason(worker, replace(request, run=f"{number:032x}", round=round)) == ""
    four = compose([gaussian_event(4.0)] * 4, 0.001)[0]
    found = lifetime(worker.ledger)
    assert found.epsilon == pytest.approx(four, rel=1e-6) and found.delta == 0.001
    told = summary(worker.ledger)
    assert [run["noisy_figures"] for run in told["runs"]] == [2, 2]
    two = compose([gaussian_event(4.0)] * 2, 0.001)[0]
    assert told["runs"][0]["epsilon"] == pytest.approx(two, rel=1e-6)
    # A node that allows a little more than the rounds cost refuses before the first figures.
    planned = lifetime(Worker(worker.store, Policy()).ledger, now=going_on(worker, request))
    limited = Worker(worker.store, Policy(largest_lifetime_epsilon=0.99 * planned.epsilon))
    request = replace(request, text=limited.text)
    assert "over all runs" in reason(limited, request)
    enough = Worker(worker.store, Policy(largest_lifetime_epsilon=1.01 * planned.epsilon))
    assert reason(enough, replace(request, text=enough.text)) == ""


def test_a_question_for_no_client_costs_what_was_told_before():
    """A step of a secure sum in which a node has no member ended in a ValueError there."""
    drawn = Sampling(law="poisson", population=100, cohort=10)
    promised, ledger = plan("gaussian", drawn), NodeLedger()
    ledger.begin_run("a" * 32, promised, "ab")
    ledger.tell_figures("a" * 32, 3, ToldFigures("ab", 5.0, (1.0,)))
    found = lifetime(ledger, [], GoingOn("b" * 32, promised))
    assert 0 < found.epsilon < lifetime(ledger, ["c"], GoingOn("b" * 32, promised)).epsilon


def going_on(worker, request):
    work = worker._work(request)
    plan = believed(Policy(), work.plan, worker.clients)
    return GoingOn("c" * 32, plan, planned_figures(work.recipe, work.plan))


def test_the_largest_epsilon_of_a_policy_counts_planned_figures(asked):
    worker, request = asked("privacy.noise_multiplier=4", "privacy.evaluation_noise=1.0")
    plan = going_on(worker, request).plan
    rounds = account.spent(plan, plan.rounds).epsilon
    strict = Worker(worker.store, Policy(largest_epsilon=1.2 * rounds))
    assert "with its noisy figures" in reason(strict, replace(request, text=strict.text))
    without = [line for line in request.recipe.splitlines() if "evaluation_noise" not in line]
    bare = replace(request, text=strict.text, recipe="\n".join(without))
    assert "the recipe has none" in reason(strict, bare)  # its rounds alone are allowed


def test_a_damaged_line_of_figures_is_refused(asked, tmp_path):
    file = tmp_path / "ledger.jsonl"
    worker, request = asked(ledger=NodeLedger(file))
    vector(worker, request)
    worker.ledger.close()
    good = file.read_text()
    noise = f'"noise_multiplier": {NOISE}'
    assert noise in good
    for before, after in (
        (noise, '"noise_multiplier": 0.0'),
        (noise, '"noise_multiplier": -1.0'),
        (noise, '"noise_multiplier": NaN'),
        ('"round": 2', '"round": "2"'),
        ('"numbers": [', '"numbers": ["a", '),
        ('"numbers": [', '"numbers": [Infinity, '),
    ):
        file.write_text(good.replace(before, after))
        with pytest.raises(RecordError, match="makes no sense"):
            NodeLedger(file, read_only=True)
    lines = good.splitlines(keepends=True)
    file.write_text(lines[0] + lines[2].replace('"counter": 2', '"counter": 1'))
    with pytest.raises(RecordError, match="a run that did not begin"):
        NodeLedger(file, read_only=True)


class Killed(BaseException):
    """The server is gone."""


def paid(out):
    lines = Ledger(out / "ledger.jsonl").entries()
    return [line for line in lines if line["kind"] == "gaussian"]


def test_a_server_pays_once_per_round(network, tmp_path):
    ahead = WriteAhead(network(out=tmp_path))
    ahead.begin()
    for entry in (round_entry(0, "a" * 64), round_entry(1, "b" * 64)):
        ahead._append(entry)
        for _ in range(2):
            ahead.pay_once(entry["round"] + 1, "evaluation", NOISE)
    ahead.pay_once(1, "evaluation", NOISE)  # its line is there, though others follow
    assert len(paid(tmp_path)) == 2
    ahead._append(round_entry(2, "c" * 64))
    ahead.pay_once(3, "evaluation", NOISE)
    ahead._append(round_entry(1, "d" * 64))  # released again, and no figures since
    ahead.pay_once(2, "evaluation", NOISE)
    assert len(paid(tmp_path)) == 4


@pytest.mark.slow
def test_a_server_pays_before_it_asks_and_once_however_often_it_dies(
    network, parts, tmp_path, monkeypatch
):
    honest, out, seen, told = workers(parts), tmp_path / "run", [], []

    def north(payload):
        reply = honest["north"](payload)
        if payload.facts.get("phase") == "noisy":
            seen.append((payload.facts["round"], len(paid(out))))
            told.append(reply)
            if len(seen) == 1:
                raise Killed  # the answer is on its way
        return reply

    def go_on():
        nodes = {**honest, "north": north}
        return train(network(nodes=nodes, out=out, run_id="a" * 32), resume=True)

    with pytest.raises(Killed):
        go_on()
    assert seen == [(2, 1)]
    append = Journal.append

    def dies(journal, facts):
        if facts.get("round") == 1:
            raise Killed  # the figures are here, and in no file
        append(journal, facts)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "append", dies)
        go_on()
    go_on()
    assert seen == [(2, 1)] * 3 + [(4, 2)] and len(paid(out)) == 2
    assert told[0].facts == told[1].facts == told[2].facts
    lines = [line for line in facts_of(out).rounds if "private_validation" in line]
    assert [line["round"] for line in lines] == [1, 3]
    assert all(set(line["private_validation"]["nodes"]) == set(NAMES) for line in lines)
    assert list(honest["north"].ledger.runs["a" * 32].figures) == [2, 4]
    claim = facts_of(out).final["privacy"]
    assert "2 noisy figures of training clients' held-out text" in claim["covers"]


# ---- what the server believes --------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [1e300, 1e12, float("nan"), float("inf"), -1e12, 100.0, "1", None, True],
)
def test_garbage_is_left_out_and_named_and_ends_nothing(network, parts, lie):
    honest, said = workers(parts), []

    def south(payload):
        reply = honest["south"](payload)
        if payload.kind == messages.EVALUATE_REQUEST:
            return replace(reply, facts={**reply.facts, "noisy_01": [lie]})
        return reply

    nodes = {"north": honest["north"], "south": south}
    over = network(nodes=nodes, say=said.append, quorum=Quorum(quorum=0.5))
    told = over.private_evaluation.figures(state_of(over))
    assert set(told["nodes"]) == {"north"} and math.isfinite(told["perplexity"])
    assert any(line.startswith("evaluation (noisy): south") for line in said)


def test_who_is_away_is_left_out_and_without_anybody_there_are_no_figures(network, parts):
    nodes, said = workers(parts), []
    transport = LocalTransport(nodes)
    quorum = Quorum(quorum=0.5, deadline=0.2, gives_up=True)
    over = network(nodes=nodes, transport=transport, say=said.append, quorum=quorum)
    transport.away.add("south")
    told = over.private_evaluation.figures(state_of(over))
    assert set(told["nodes"]) == {"north"} and "evaluation (noisy): without south" in said
    transport.away.add("north")
    assert over.private_evaluation.figures(state_of(over, 4)) is None


def test_a_node_of_the_version_before_is_told_the_way_out(network, parts):
    honest, said = workers(parts), []

    def before(payload):
        if payload.facts["version"] != 4:
            return Payload(REFUSAL, {"version": 4, "reason": "expected another version."})
        raise AssertionError("a question that it does not know")

    nodes = {"north": honest["north"], "south": before}
    transport = VersionedTransport(LocalTransport(nodes))
    half = Quorum(quorum=0.5)
    over = network(nodes=honest, transport=transport, say=said.append, quorum=half)
    told = over.private_evaluation.figures(state_of(over))
    assert set(told["nodes"]) == {"north"}
    assert any("south: this node has an older fedlm" in line and "Install" in line for line in said)


def test_a_question_for_noisy_sums_is_one_per_node(asked):
    _, request = asked()
    read = lambda r: messages.read_evaluate_request(messages.encode_evaluate_request(r))  # noqa: E731
    assert read(request) == request
    twice = {
        name: getattr(request, name) * 2
        for name in ("members", "numbers", "splits", "rows", "offsets")
    }
    for change in (
        {**twice, "models": (0, 1), "frames": request.frames * 2},
        {"rows": (1,)},
        {"offsets": (1,)},
        {"total": 1},
        {"numbers": (request.population,)},
        {"splits": ("test",)},
        {"frames": (), "models": (messages.NO_MODEL,)},
    ):
        with pytest.raises(messages.WireError):
            read(replace(request, **change))


def test_a_tree_over_a_network_refuses_noisy_figures(network):
    with pytest.raises(ConfigError, match=r"evaluation_noise = .*let relays make the tree"):
        network("federation.levels=[0]")
