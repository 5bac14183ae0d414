"""Nodes score models on their own held-out text: the figures of a simulation, without its text."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from fedlm.core.errors import ConfigError, WireError
from fedlm.corpus.shard import deal, deal_parts
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.deploy import node_evaluation, registration
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.relay import Relay
from fedlm.deploy.server_app import server_store
from fedlm.engine import evaluate_messages as messages
from fedlm.engine.dispatch import Quorum
from fedlm.evaluate.held_out import Held
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from fedlm.recipe.tree import tree_run
from tests.conftest import write_tiny
from tests.deploy.local import LocalTransport
from tests.deploy.test_places import TOWNS, TREE

SMALL = (
    "model.name=cifg",
    "server.rounds=2",
    "run.prompts=[]",
    "run.engine=loop",
    "data.test_clients=0.5",
    "data.tokenizer=bpe",
    "data.vocabulary=270",
    "data.layout=windows",
)
NAMES = ("north", "south")
PRIVATE = (
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1",
    "privacy.clip_norm=0.1",
    "privacy.delta=0.01",
    "privacy.seed=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation")
    write_tiny(path)
    build(load(path / "tiny.toml", SMALL), path / "stores", lambda stage, done: None)
    return path


@pytest.fixture(scope="module")
def store(folder):
    """All text, with its tokenizer and its tree in files beside it."""
    whole = Store(next((folder / "stores").iterdir()))
    (folder / "special_tokens_map.json").write_bytes(special_tokens_map(whole.tokenizer))
    (folder / "tokenizer.json").write_bytes((whole.path / "tokenizer.json").read_bytes())
    return whole


@pytest.fixture(scope="module")
def parts(store, folder):
    return deal(store, NAMES, folder / "dealt", held=None)


@pytest.fixture(scope="module")
def towns(store, folder):
    of = {t: [n for n in range(len(store)) if t in store.groups(n)] for t in TOWNS}
    of = {town: np.array(numbers) for town, numbers in of.items()}
    return deal_parts(store, of, folder / "towns", held=None)


def workers(parts, policy=Policy()):  # noqa: B008
    return {name: Worker(parts[name], policy) for name in sorted(parts)}


def recipe_of(folder, *changes, table=""):
    """The server's recipe: a tokenizer and no text."""
    text = (folder / "tiny.toml").read_text()
    text = text.replace('source = "tiny.jsonl"', 'tokenizer = "tokenizer.json"')
    (folder / "server.toml").write_text(text.replace("vocabulary = 60\n", "") + table)
    kept = [change for change in SMALL if not change.startswith("data.t") and "vocab" not in change]
    return load(folder / "server.toml", (*kept, *changes))


def simulated(folder, store, *changes, table="", out=None):
    recipe = resolve(load_with(folder, table, *changes), store)
    kind = tree_run if table else flat_run
    return kind(recipe, store, out=out or folder / "none")


def load_with(folder, table, *changes):
    (folder / "here.toml").write_text((folder / "tiny.toml").read_text() + table)
    return load(folder / "here.toml", (*SMALL, *changes))


def networked(folder, nodes, *changes, table="", transport=None, **more):
    assignments = registration.assign_members(
        LocalTransport(nodes), sorted(nodes), lambda n, h: None, lambda text: None
    )
    recipe = recipe_of(folder, *changes, table=table)
    held = server_store(recipe, folder / "cache")
    assert len(held) == 0
    transport = transport or LocalTransport(nodes)
    return networked_run(
        resolve(recipe, held), held, assignments, folder / "nowhere", transport=transport, **more
    )


@pytest.fixture(autouse=True)
def fresh_survey(folder):
    (folder / "nowhere" / "held_out.json").unlink(missing_ok=True)
    (folder / "nowhere").mkdir(exist_ok=True)


def relayed(folder, nodes):
    (folder / "relay").mkdir()
    quiet = {"name": "relay", "say": lambda text: None}
    below = Relay(folder / "relay", LocalTransport(nodes), sorted(nodes), Quorum(), **quiet)
    return {"relay": below}


def same(here, there):
    """Whether figures are the same, but for the order in which float64 numbers were added."""
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert there[name] == pytest.approx(value, rel=1e-12), name


FIGURES = ("perplexity", "perplexity_known_words", "accuracy", "accuracy_known_words", "tokens")


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [0, 7])
@pytest.mark.parametrize("through", ["directly", "a relay"])
def test_figures_of_nodes_are_those_of_a_simulation(folder, store, parts, tmp_path, rows, through):
    change = f"server.evaluate_rows={rows}"
    alone = simulated(folder, store, change)
    nodes = workers(parts) if through == "directly" else relayed(tmp_path, workers(parts))
    over = networked(folder, nodes, change)
    state = alone.round.init(alone.start())
    same(alone.evaluation.watch(state), over.evaluation.watch(state))
    assert over.evaluation.splits() == alone.evaluation.splits() == ["test", "validation"]
    for split in over.evaluation.splits():
        here, there = (run.evaluation.final(state, split) for run in (alone, over))
        wanted = (*FIGURES, "bits_per_byte")
        same({name: here[name] for name in wanted}, {name: there[name] for name in wanted})
        tokens = [of["tokens"] for of in there["groups"][0].values()]
        assert len(tokens) == 2 and sum(tokens) == here["tokens"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("through", ["directly", "a relay"])
def test_a_tree_without_text_at_the_server_is_its_simulation(
    folder, store, towns, tmp_path, through
):
    change = "server.evaluate_rows=5"
    alone = simulated(folder, store, change, table=TREE)
    nodes = workers(towns) if through == "directly" else relayed(tmp_path, workers(towns))
    over = networked(folder, nodes, change, table=TREE)
    state = alone.round.init(alone.start())
    here, there = alone.evaluation.watch(state), over.evaluation.watch(state)
    assert here["places"].keys() == there["places"].keys()
    np.testing.assert_allclose(
        *([run["places"][n] for n in here["places"]] for run in (here, there)), rtol=1e-12
    )
    split = over.evaluation.splits()[0]
    ends = [run.evaluation.final(state, split) for run in (alone, over)]
    for a, b in zip(*(end["nodes"] for end in ends), strict=True):
        assert a.pop("bits_per_byte") == pytest.approx(b.pop("bits_per_byte"), rel=1e-12)
        assert a.pop("perplexity") == pytest.approx(b.pop("perplexity"), rel=1e-12)
        both = [end.pop("personal") for end in (a, b)]
        assert both == [None, None] or both[0] == pytest.approx(both[1], rel=1e-12)
        assert a == b
    np.testing.assert_allclose(*(end["matrix"]["perplexity"] for end in ends), rtol=1e-12)
    assert ends[0]["bits_per_byte"] == pytest.approx(ends[1]["bits_per_byte"], rel=1e-12)


def test_a_tree_says_which_place_holds_out_no_text(folder, towns):
    nodes = workers(towns)
    nodes["town-1"] = Worker(towns["town-1"], Policy(smallest_evaluation=100))
    with pytest.raises(ConfigError, match="the town-1 hold out no text"):
        networked(folder, nodes, table=TREE)


def test_a_resumed_run_does_not_ask_again_how_much_text_there_is(folder, parts):
    nodes = workers(parts)
    first = networked(folder, nodes)
    state = first.round.init(first.start())
    figures = first.evaluation.watch(state)
    transport = LocalTransport(nodes)
    again = networked(folder, nodes, transport=transport)
    assert again.evaluation.watch(state) == figures
    assert len(transport.asked) == 2  # one question each


# ---- what nodes tell -----------------------------------------------------------------------


def test_under_a_plan_only_held_out_clients_have_figures(folder, parts):
    over = networked(folder, workers(parts), *PRIVATE)
    state = over.round.init(over.start())
    assert over.evaluation.splits() == ["test"]
    assert over.evaluation.watch(state)["perplexity"] > 1


def question(folder, parts, *changes, **more):
    """A node, and a question that a server asks it."""
    worker = Worker(parts["north"], Policy())
    seen = []

    def north(payload):
        if payload.kind == messages.EVALUATE_REQUEST:
            seen.append(messages.read_evaluate_request(payload))
        return worker(payload)

    over = networked(folder, {"north": north, "south": Worker(parts["south"], Policy())}, *changes)
    over.evaluation.watch(over.round.init(over.start()))
    asked = next(request for request in seen if request.phase == "watch")
    return worker, replace(asked, **more)


def reason(worker, request):
    payload = worker(messages.encode_evaluate_request(request))
    return payload.facts.get("reason", "") if payload.kind == "refusal" else ""


def test_a_node_refuses_what_its_recipe_does_not_lead_to(folder, parts):
    worker, asked = question(folder, parts, *PRIVATE)
    assert reason(worker, asked) == ""
    many = len(asked.members)
    refused = {
        "held-out clients only": {"splits": ("validation",) * many},
        "the recipe has 2 rounds": {"round": 3},
        "this node alone has": {"population": asked.first + worker.clients - 1},
        "text of others": {"members": (asked.first + 1,) * many},
        "not the one that the run began with": {"text": "another"},
        "to another question": {"frames": tuple(f[::-1] for f in asked.frames)},
        "began here with another recipe": {"recipe": asked.recipe.replace("clip_norm = 0.1", "")},
        "disagree on whether there is a tree": {"numbers": (asked.population,) * many, "round": 1},
        "first rows that its recipe does not lead to": {"rows": (1,) * many, "round": 2},
    }
    for words, change in refused.items():
        assert words in reason(worker, replace(asked, **change)), words


def test_the_same_question_has_the_same_answer_and_one_line(folder, parts, tmp_path):
    _, asked = question(folder, parts)
    worker = Worker(parts["north"], Policy(), ledger=NodeLedger(tmp_path / "ledger.jsonl"))
    asked = replace(asked, text=worker.text)
    first = worker(messages.encode_evaluate_request(asked))
    counter = worker.ledger.counter
    assert worker(messages.encode_evaluate_request(asked)) == first
    assert worker.ledger.counter == counter
    worker.ledger.close()
    again = NodeLedger(tmp_path / "ledger.jsonl")  # a node that was killed and came back
    assert (
        Worker(parts["north"], Policy(), ledger=again)(messages.encode_evaluate_request(asked))
        == first
    )
    assert again.counter == counter
    again.close()


def test_few_clients_have_no_figure_of_their_own(folder, parts):
    held = len(parts["north"].test_clients)
    for least, told in ((held, True), (held + 1, False)):
        nodes = workers(parts, Policy(smallest_evaluation=least))
        over = networked(folder, {"north": nodes["north"], "south": workers(parts)["south"]})
        assert (0 in over.evaluation.held_out.survey["test"]) is told
        (folder / "nowhere" / "held_out.json").unlink()


def test_no_difference_of_two_figures_is_of_one_row(folder, parts, tmp_path):
    """A server that moved the draw by a row had two figures of many clients, and one line's."""
    for kept in (None, tmp_path / "memory"):
        worker, asked = question(folder, parts, "server.evaluate_rows=20")
        worker.memory = NodeMemory(kept)
        assert asked.total > 20
        for _ in range(2):
            assert reason(worker, asked) == "", "the same question may be asked again"
        moved = {"offsets": tuple(offset + 1 for offset in asked.offsets)}
        for other in (moved, {"total": asked.total + 1}):
            assert "figures of other rows" in reason(worker, replace(asked, **other, round=1))


@pytest.mark.parametrize("least, told", [(1, True), (2, False)])
def test_a_figure_that_leaves_out_few_clients_is_not_told(folder, parts, least, told):
    """Whoever has the figure of all rows, too, has theirs."""
    worker, asked = question(folder, parts)
    work = worker._work(asked)
    _, owners = work.held_out["test"].rows(1)
    assert len(np.unique(owners)) > 2
    kept = np.flatnonzero(owners != owners[0])
    params = node_evaluation.whole_model(work, asked.frames[0])
    found = node_evaluation._scored(work, params, "test", kept, least)
    assert (found["clients"] > 0) is told


# ---- what the server believes --------------------------------------------------------------

GOOD = {
    "nats": 20.0,
    "tokens": 10.0,
    "correct": 3.0,
    "words": 8.0,
    "correct_words": 2.0,
    "known_nats": 19.0,
    "known": 9.0,
    "rows": 2.0,
    "bytes": 40.0,
    "clients": 1.0,
}
HELD = Held(rows=2, tokens=10, bytes=40, clients=1)


ASKED = messages.EvaluateRequest(
    run="0" * 32,
    recipe="",
    round=1,
    phase="final",
    first=0,
    population=5,
    text="",
    total=9,
    members=(0,),
    numbers=(0,),
    splits=("test",),
    models=(0,),
    rows=(0,),
    offsets=(0,),
    frames=(b"model",),
)


def reply_of(**change):
    sums = ({**GOOD, **change},)
    sent = messages.EvaluateReply(round=1, phase="final", asks=(0,), sums=sums)
    return messages.read_evaluate_reply(messages.encode_evaluate_reply(sent), ASKED)


def test_sums_are_bounded_by_what_text_can_have():
    assert reply_of().sums[0] == GOOD
    for change in (
        {"nats": 1e300},
        {"nats": 10 * 700.1},
        {"nats": -1.0},
        {"nats": float("nan")},
        {"correct": 11.0},
        {"correct": 2.5},
        {"words": 10.0},
        {"correct_words": 4.0},
        {"known_nats": 21.0},
        {"tokens": 1e300},
        {"rows": 11.0},
        {"clients": 3.0},
    ):
        with pytest.raises(WireError, match=r"no text can have|not a size"):
            reply_of(**change)


def test_a_question_arrives_as_it_was_or_not_at_all():
    assert messages.read_evaluate_request(messages.encode_evaluate_request(ASKED)) == ASKED
    for change in (
        {"members": (5,)},
        {"members": (0, 0)},
        {"models": (1,)},
        {"models": (messages.NO_MODEL,)},
        {"frames": (b"model", b"unused")},
        {"phase": "other"},
        {"splits": ("train",)},
        {"numbers": (4,)},
        {"rows": (-1,)},
        {"total": 1 << 41},
        {"run": "run"},
    ):
        with pytest.raises(WireError):
            messages.read_evaluate_request(
                messages.encode_evaluate_request(replace(ASKED, **change))
            )


def test_sums_are_bounded_by_what_the_node_announced():
    messages.check_announced(GOOD, HELD, all_rows=True)
    messages.check_announced(GOOD, HELD._replace(tokens=12), all_rows=False)
    for held in (HELD._replace(tokens=9), HELD._replace(rows=1), HELD._replace(tokens=11)):
        with pytest.raises(WireError, match="announced"):
            messages.check_announced(GOOD, held, all_rows=True)


def test_a_lying_node_is_left_out_and_named_and_ends_nothing(folder, parts):
    honest = workers(parts)
    said = []

    def lying(payload):
        reply = honest["south"](payload)
        if payload.kind == messages.EVALUATE_REQUEST and payload.facts["phase"] != "survey":
            return replace(reply, facts={**reply.facts, "nats": [1e300] * len(reply.facts["nats"])})
        return reply

    nodes = {"north": honest["north"], "south": lying}
    over = networked(folder, nodes, say=said.append, quorum=Quorum(quorum=0.5))
    state = over.round.init(over.start())
    found = over.evaluation.final(state, "test")
    assert list(found["groups"][0]) == ["north"]
    assert np.isfinite(found["perplexity"])
    assert any("south" in line for line in said)


def test_an_absent_node_is_left_out(folder, parts):
    nodes, said = workers(parts), []
    over = networked(folder, nodes, say=said.append, quorum=Quorum(quorum=0.5))
    assert over.evaluation.splits()  # all were there when the run began
    over.evaluation.held_out.transport.away.add("south")
    state = over.round.init(over.start())
    assert over.evaluation.watch(state)["perplexity"] > 1
    assert any("without south" in line for line in said)


def test_a_model_that_is_not_a_number_is_as_bad_as_can_be_told(folder, parts):
    over = networked(folder, workers(parts))
    state = over.round.init(over.start())
    broken = jax.tree.map(lambda x: x * np.nan, state.params)
    found = over.evaluation.final(replace(state, params=broken), "test")
    assert found["perplexity"] == float("inf")
