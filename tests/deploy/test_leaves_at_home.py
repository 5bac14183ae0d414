"""Leaves that keep their own models: what leaves a node, what the server has, what kills change."""

import json
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pytest

from fedlm.core.errors import ConfigError, EngineError, WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Update
from fedlm.deploy.leaf_worker import own_model
from fedlm.deploy.local import check_deployable
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.engine import leaf_frames
from fedlm.engine.messages import Payload
from fedlm.federation.layer_attention import Residual
from fedlm.federation.leaf import LeafRules, LeafStart, leaving
from fedlm.federation.tree_round import shown_models
from fedlm.training import train
from fedlm.wire.dense import dense
from tests.deploy import test_places
from tests.deploy.local import LocalTransport
from tests.deploy.test_places import (
    MIXED,
    TOWNS,
    TREE,
    direct,
    nested,
    networked,
    recipe_of,
    rounds,
    same,
    simulated,
)

folder, store, parts = test_places.folder, test_places.store, test_places.parts
NOISE = ("federation.clip_norm=0.5", "federation.noise_multiplier=0.3", "federation.delta=1e-3")
SECRET = 12345


class KnownSecret(NodeLedger):
    """A ledger whose noise a simulation can draw too."""

    def leaf_secret(self, run, round, question):
        return SECRET


class Recorded:
    """A node all of whose answers are kept."""

    def __init__(self, worker):
        self.worker, self.said = worker, []

    def __call__(self, payload):
        answer = self.worker(payload)
        self.said.append(answer)
        return answer


def at_home(parts, tmp_path, ledger=KnownSecret, policy=Policy()):  # noqa: B008
    return {
        town: Worker(
            parts[town],
            policy,
            ledger=ledger(tmp_path / town / "ledger.jsonl"),
            memory=NodeMemory(tmp_path / town / "memory"),
            models=tmp_path / town / "models",
            name=town,
        )
        for town in TOWNS
    }


def own_models(run, workers, state):
    """Every leaf's own model, as its node keeps it."""
    names, found = run.round.config.topology.names, {}
    for town in TOWNS:
        worker = workers[town]
        (work,) = worker._kept.values()
        name = worker.memory.runs()
        (run_id,) = name
        model = own_model(work, run_id, 0, int(state.round), worker.memory)
        found[names.index(f"the {town}")] = model
    return found


CASES = {
    "noise": (direct, NOISE),
    "noise, relayed": (nested, NOISE),
    "noise, measured from the root": (nested, (*NOISE, "federation.compare=root")),
    "noise, kept optimisers": (
        direct,
        (*NOISE, "client.optimizer=adam", "federation.keep_optimizer=true"),
    ),
    "clip alone": (direct, NOISE[:1]),
    "noise, layers kept": (nested, (*NOISE, "federation.temperature=0")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_noisy_leaves_over_a_network_are_their_simulation_to_the_bit(
    name, folder, store, parts, tmp_path
):
    """Given the same secret: what others know, and what each node keeps."""
    shape, changes = CASES[name]
    seed = (f"federation.noise_seed={SECRET}",) if "noise" in name else ()
    simulation = simulated(folder, store, *changes, *seed)
    here, told = rounds(simulation, 3)
    workers = at_home(parts, tmp_path)
    over = networked(recipe_of(folder, *changes), parts, shape(tmp_path / "relays", workers))
    there, said = rounds(over, 3)
    if "noise" in name:  # otherwise the simulation also tells of the leaves' own models
        assert said == told
    config = over.round.config
    assert same(shown_models(config, there), shown_models(simulation.round.config, here))
    assert same(there.waiting, here.waiting)
    for node, (a, b) in enumerate(zip(there.nodes, here.nodes, strict=True)):
        assert same(a.public_layers, b.public_layers)
        if not config.topology.clients[node]:
            assert same(a.params, b.params) and same(a.server_memory, b.server_memory)
    for node, model in own_models(over, workers, there).items():
        assert same(model, here.nodes[node].params), "the node has its own model"
        assert not same(there.nodes[node].params, here.nodes[node].params), "nobody else has"
    assert not np.any(np.asarray(there.secret)), "the server has no secret of noise"


@pytest.mark.sample(1)
@pytest.mark.parametrize("table", [TREE, MIXED])
def test_layers_kept_at_home_are_their_simulation(table, folder, store, parts, tmp_path):
    """Temperature zero without noise: backbones everywhere, and own models at nodes."""
    cold = ("federation.temperature=0",)
    here, _ = rounds(simulated(folder, store, *cold, table=table), 3)
    workers = at_home(parts, tmp_path)
    over = networked(recipe_of(folder, *cold, table=table), parts, workers)
    there, _ = rounds(over, 3)
    config, began = over.round.config, over.round.config.personal(over.start())
    for a, b in zip(there.nodes, here.nodes, strict=True):
        assert same(config.backbone(a.params), config.backbone(b.params))
        assert same(config.personal(a.params), began), "the server never learned another layer"
    if table is TREE:
        for node, model in own_models(over, workers, there).items():
            assert same(model, here.nodes[node].params)
            assert not same(config.personal(model), began)


# ---- what leaves, and what the server has -----------------------------------------------------


def pieces(vector, length=16):
    """Return bytes of a few runs of numbers in a vector, none of them constant."""
    flat = np.asarray(vector, "<f4").ravel()
    found = []
    for at in np.linspace(0, len(flat) - length, 12).astype(int):
        piece = flat[at : at + length]
        if len(np.unique(piece)) > length // 2:
            found.append(piece.tobytes())
    return found


def secrets_of(over, workers, state):
    """Numbers that may stand at nodes alone: own layers, and their changes, after each round."""
    config, found = over.round.config, {}
    began = config.personal(over.start())
    for town, worker in workers.items():
        (work,) = worker._kept.values()
        (run_id,) = worker.memory.runs()
        for round in range(1, int(state.round) + 1):
            model = own_model(work, run_id, 0, round, worker.memory)
            for layer, values in config.personal(model).items():
                for piece in (*pieces(values), *pieces(values - began[layer])):
                    found[piece] = f"{layer} of {town} before round {round}"
    return found


def leaked(data, secret):
    return sorted({what for piece, what in secret.items() if piece in data})


def files_of(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("noise", [(), NOISE])
def test_personal_layers_and_models_are_nowhere_but_at_their_node(
    noise, folder, store, parts, tmp_path
):
    """All that a node sends, and every file of the server, are searched for its numbers."""
    workers = at_home(parts, tmp_path / "kits", NodeLedger)
    nodes = {town: Recorded(worker) for town, worker in workers.items()}
    recipe = recipe_of(folder, "federation.temperature=0", *noise)
    over = networked(recipe, parts, nodes, out=tmp_path / "server")
    assert train(over)["rounds"] == 3
    state = over.round.init(over.start())
    state = eqx.tree_at(lambda s: s.round, state, np.int32(3))
    secret = secrets_of(over, workers, state)
    assert len(secret) > 100
    sent = [frame for node in nodes.values() for answer in node.said for frame in answer.frames]
    told = [json.dumps(dict(a.facts)).encode() for node in nodes.values() for a in node.said]
    for data in (*sent, *told):
        assert leaked(data, secret) == []
    disk = files_of(tmp_path / "server")
    assert any(path.suffix == ".safetensors" for path in disk)
    for path, data in disk.items():
        assert leaked(data, secret) == [], path
    kept = [data for town in TOWNS for data in files_of(tmp_path / "kits" / town).values()]
    assert any(leaked(data, secret) for data in kept), "the search finds what is there"


def test_the_search_finds_layers_that_travel(folder, parts, tmp_path):
    """Without a clip and above temperature zero the server holds every leaf's model."""
    workers = at_home(parts, tmp_path / "kits", NodeLedger)
    over = networked(recipe_of(folder), parts, workers, out=tmp_path / "server")
    state, _ = rounds(over, 1)
    config = over.round.config
    own = config.personal(state.nodes[config.topology.with_text[0]].params)
    data = b"".join(np.asarray(leaf, "<f4").tobytes() for leaf in jax.tree.leaves(state.params))
    assert all(piece in data for values in own.values() for piece in pieces(values))


def test_under_noise_no_change_leaves_as_it_is(folder, store, parts, tmp_path):
    """Neither the change of a leaf nor the clipped one stands in an answer."""
    workers = at_home(parts, tmp_path)
    nodes = {town: Recorded(worker) for town, worker in workers.items()}
    over = networked(recipe_of(folder, *NOISE), parts, nodes)
    here, _ = rounds(simulated(folder, store, *NOISE, f"federation.noise_seed={SECRET}"), 1)
    began = over.start()
    rounds(over, 1)
    names = over.round.config.topology.names
    for town, node in nodes.items():
        delta = jax.tree.map(np.subtract, here.nodes[names.index(f"the {town}")].params, began)
        norm = np.sqrt(sum(float(np.vdot(x, x)) for x in jax.tree.leaves(delta)))
        answers = [a for a in node.said if a.kind == "train_reply"]
        assert len(answers) == 1
        for leaf in jax.tree.leaves(delta):
            for scale in (1.0, 0.5 / norm):
                flat = np.asarray(leaf * scale, "<f4")
                assert not any(p in answers[0].frames[0] for p in pieces(flat, 4))
        sums = {name: answers[0].facts[name] for name in ("nats", "tokens", "steps", "refused")}
        assert set(map(tuple, sums.values())) == {(0.0,)} and answers[0].facts["weight"] == [1.0]


# ---- the ledger, and kills --------------------------------------------------------------------


def first_question(folder, parts, tmp_path, policy=Policy()):  # noqa: B008
    """A node's kit, and the question of a round with noise that it was asked."""
    workers = at_home(parts, tmp_path, NodeLedger, policy)
    transport = LocalTransport(workers)
    over = networked(recipe_of(folder, *NOISE), parts, workers, transport)
    rounds(over, 2)
    asked = [p for name, p in transport.sent.values() if name == "town-0"]
    return workers["town-0"], [p for p in asked if p.kind == "train_request"]


def again(parts, kit, ledger=NodeLedger):
    """The same node, started again."""
    return Worker(
        parts["town-0"],
        Policy(),
        ledger=ledger(kit / "ledger.jsonl"),
        memory=NodeMemory(kit / "memory"),
    )


def test_the_same_question_has_the_same_bytes_after_a_kill_and_another_is_refused(
    folder, parts, tmp_path
):
    worker, (first, second) = first_question(folder, parts, tmp_path)
    answer, lines = worker(second), (tmp_path / "town-0" / "ledger.jsonl").read_bytes()
    worker.ledger.close()
    restarted = again(parts, tmp_path / "town-0")
    assert restarted(second).frames == answer.frames
    restarted.ledger.close()
    # Killed before its own model was on disk: the next try begins where this one began.
    for file in (tmp_path / "town-0" / "memory").rglob("round-000001*"):
        file.unlink()
    restarted = again(parts, tmp_path / "town-0")
    assert restarted(second).frames == answer.frames
    ledger = tmp_path / "town-0" / "ledger.jsonl"
    assert ledger.read_bytes() == lines, "the same release is not paid for twice"
    other = Payload(second.kind, second.facts, (first.frames[0],))
    refused = restarted(other)
    assert refused.kind == "refusal" and "was answered, to another question" in str(refused.facts)
    told = [json.loads(line) for line in ledger.read_bytes().splitlines()]
    assert [line["round"] for line in told if line["kind"] == "answer"] == [0, 1]
    assert told[1]["plan"]["unit"] == "leaf" and told[1]["plan"]["noise_multiplier"] == 0.3
    # Another ledger would draw other noise, another release of the same change: the answer that
    # left is known by its hash. So is one of which other lanes made other bits.
    strange = Worker(parts["town-0"], Policy(), memory=NodeMemory(tmp_path / "town-0" / "memory"))
    facts = {**second.facts, "text": strange.text, "counter": 0}
    other = strange(Payload(second.kind, facts, second.frames))
    assert other.kind == "refusal" and "with other numbers" in str(other.facts)


def test_noise_of_two_runs_does_not_cancel(folder, parts, tmp_path):
    """Runs that clip differently had one noise at two scales: 2 a - b was the change itself."""
    _, (first, _) = first_question(folder, parts, tmp_path / "seen")
    kit, answers = tmp_path / "kit", []
    policy = Policy(require_privacy=True, largest_epsilon=500.0, largest_delta=0.1)
    worker = Worker(
        parts["town-0"],
        policy,
        ledger=NodeLedger(kit / "ledger.jsonl"),
        memory=NodeMemory(kit / "memory"),
    )
    for run, clip in (("a" * 32, 5.0), ("b" * 32, 10.0)):  # both longer than the change
        recipe = first.facts["recipe"].replace("clip_norm = 0.5", f"clip_norm = {clip}")
        facts = {**first.facts, "run": run, "recipe": recipe, "clip_norm": clip}
        facts |= {"text": worker.text, "counter": 0}
        answer = worker(Payload(first.kind, facts, first.frames))
        assert answer.kind == "train_reply", answer.facts
        shapes = list(worker._kept.values())[-1].sent_like
        like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        leaves = jax.tree.leaves(dense().decode(answer.frames[0], like))
        answers.append(np.concatenate([np.ravel(leaf) for leaf in leaves]))
    a, b = answers
    assert np.linalg.norm(2 * a - b) > np.linalg.norm(b), "noises are independent"


def test_the_ledger_has_a_release_before_anything_is_trained(folder, parts, tmp_path):
    _, (first, _) = first_question(folder, parts, tmp_path / "seen")
    kit, seen = tmp_path / "kit", []

    class Watched(NodeMemory):
        def write(self, *args):
            seen.append((kit / "ledger.jsonl").read_text())
            super().write(*args)

    ledger = NodeLedger(kit / "ledger.jsonl")
    worker = Worker(parts["town-0"], Policy(), ledger=ledger, memory=Watched(kit / "memory"))
    facts = {**first.facts, "text": worker.text, "counter": 0}
    assert worker(Payload(first.kind, facts, first.frames)).kind == "train_reply"
    assert len(seen) == 1 and '"kind": "answer"' in seen[0]


def test_a_policy_counts_the_noise_of_its_own_leaf(folder, parts, tmp_path):
    needs = Policy(require_privacy=True, largest_epsilon=1.0, largest_delta=0.1)
    with pytest.raises(EngineError, match=r"would spend epsilon .* this node allows 1"):
        first_question(folder, parts, tmp_path / "little", needs)
    enough = Policy(require_privacy=True, largest_epsilon=500.0, largest_delta=0.1)
    first_question(folder, parts, tmp_path / "much", enough)


def test_an_answer_that_did_not_count_changes_nothing(folder, parts, tmp_path):
    """A node that was late in a round goes on from the round before, as the server does."""
    workers = at_home(parts, tmp_path)
    transport = LocalTransport(workers)
    over = networked(recipe_of(folder, *NOISE), parts, workers, transport)
    before, _ = rounds(over, 1)
    after, _ = rounds(over, 1, before)  # the server is killed before it keeps this round
    again, _ = rounds(over, 1, before)
    assert same(after.params, again.params)


# ---- what is sent to a leaf -------------------------------------------------------------------

RULES = LeafRules(
    personal_layers=(None, "top"), temperature=0.5, clip_norm=1.0, noise_multiplier=1.0
)
LIKE = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
TOP = {"top": np.arange(4, dtype=np.float32)}
ABOVE = LeafStart(
    (np.ones((2, 3), np.float32),), TOP, TOP, None, (Residual("top", 2, [2 * TOP["top"]]),)
)


@pytest.mark.parametrize("other", [{"clip_norm": 2.0}, {"noise_multiplier": 2.0}])
def test_a_fixed_secret_draws_other_noise_at_other_limits(other):
    delta = {"a": np.full((40, 3), 0.01, np.float32), "b": np.zeros(40, np.float32)}
    update = Update(delta, *[np.float32(1)] * 6)
    drawn = []
    for rules in (RULES, replace(RULES, **other)):
        noise = jax.tree.map(np.subtract, leaving(rules, update, SECRET, 0, 0), delta)
        scale = rules.clip_norm * rules.noise_multiplier
        drawn.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(noise)]) / scale)
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.5


def encoded(above):
    return leaf_frames.encode(above, dense(), dense(), key_for(0, "download"))


def decoded(data, rules=RULES):
    return leaf_frames.decode(data, rules, LIKE, dense(), dense())


def test_a_leaf_reads_what_it_is_sent_and_nothing_else():
    data = encoded(ABOVE)
    assert eqx.tree_equal(tuple(decoded(data)), tuple(ABOVE)) is not False
    found = decoded(data)
    assert same(found.backbone, ABOVE.backbone) and same(found.own, TOP) and found.origin is None
    assert found.residuals[0].origin == 2 and same(found.residuals[0].values, 2 * TOP["top"])
    for cut in range(0, len(data), 7):
        with pytest.raises(WireError):
            decoded(data[:cut])
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            decoded(flipped)
        except WireError:
            continue
        assert b'"residual", "top", 2' in data and flipped != data  # a number of the head
    for bad in (b"", data + b"x", data.replace(b'"top"', b'"pot"')):
        with pytest.raises(WireError):
            decoded(bad)
    cold = LeafRules(
        personal_layers=(None, "top"), temperature=0.0, clip_norm=1.0, noise_multiplier=1.0
    )
    with pytest.raises(WireError, match="temperature"):
        decoded(data, cold)
    assert decoded(encoded(LeafStart(ABOVE.backbone)), cold).parent is None


@pytest.mark.parametrize(
    "change, words",
    [
        ("federation.noise_seed=1", "federation.noise_seed = 1.*a secret of its own"),
        ("wire.upload=uniform-8", "wire.upload = 'uniform-8'.*'float32'"),
        ("wire.download=bfloat16", "wire.download = 'bfloat16'.*'float32'"),
    ],
)
def test_what_a_noisy_leaf_cannot_do_over_a_network_is_refused(folder, change, words):
    with pytest.raises(ConfigError, match=words):
        check_deployable(recipe_of(folder, *NOISE, change))
