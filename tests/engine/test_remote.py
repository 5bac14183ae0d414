"""The networked engine returns what the loop engine returns, through nodes that are called."""

from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pytest

from fedlm.core.errors import EngineError
from fedlm.core.keys import key_for
from fedlm.core.types import Start
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.policy import Policy
from fedlm.deploy.relay import Relay
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.server_app import record_nodes
from fedlm.engine.dispatch import Quorum
from fedlm.engine.messages import TrainReply, encode_reply, read_request
from fedlm.federation.round import outgoing
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.run import Hooks, loop
from fedlm.wire.dense import dense
from fedlm.wire.frame import overhead
from tests.deploy.local import LocalTransport, prepared, store_in, workers

MEMBERS = np.array([1, 2, 8, 9, 15])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("federated"))


@pytest.fixture(scope="module")
def store(folder):
    return store_in(folder)


@pytest.fixture(scope="module")
def nodes(store, folder):
    return workers(store, folder / "dealt")


def simulated(folder, store, *changes):
    recipe = load(folder / "tiny.toml", ("run.engine=loop", *changes))
    return flat_run(resolve(recipe, store), store, out=folder)


def deployed(whole, transport, assignments, **more):
    return networked_run(
        whole.recipe, whole.store, assignments, whole.record.path, transport=transport, **more
    )


def round_of(experiment, state, clip_norm=np.inf):
    cohort = experiment.engine.prepare(1, MEMBERS)
    start = Start(outgoing(experiment.algorithm, state), clip_norm)
    return experiment.engine.total(start, cohort).total


def apart(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)


def untold(sums):
    """Return sums without those that stay at a node under a plan."""
    return replace(
        sums, **{name: 0.0 * getattr(sums, name) for name in ("nats", "tokens", "steps")}
    )


CASES = {
    "sums": (),
    "lossy both ways": ("wire.upload=uniform-8", "wire.download=bfloat16"),
    "leaves of their own": ("wire.trainable=member", "wire.trainable_fraction=0.5"),
    "a fixed part": ("wire.trainable=fixed", "wire.trainable_fraction=0.4"),
    "private": (
        "privacy.mechanism=gaussian",
        "privacy.noise_multiplier=1",
        "privacy.clip_norm=0.1",
        "server.sampling=poisson",
        "privacy.delta=0.01",
        "wire.upload=ternary-2.5",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_nodes_give_the_sum_of_the_simulation(name, folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store, *CASES[name])
    over = deployed(whole, LocalTransport(made), assignments)
    state = whole.round.init(whole.start())
    clip_norm = float(state.clip_norm)
    here, there = round_of(whole, state, clip_norm), round_of(over, state, clip_norm)
    if whole.algorithm.plan is not None:  # nodes keep these to themselves
        assert there.nats == there.tokens == there.steps == 0 < here.tokens
        here = untold(here)
    if over.engine.by_member:  # the same programs, and sums in the same order
        assert eqx.tree_equal(there, here)
    else:  # sums of sums
        assert apart(there, here) < 1e-6
    start = Start(outgoing(whole.algorithm, state), clip_norm)
    sums = over.engine.total(start, over.engine.prepare(1, MEMBERS))
    assert min(sums.upload_bytes, sums.download_bytes) > 0
    each = [list(e.updates(start, e.prepare(1, MEMBERS))) for e in (over.engine, whole.engine)]
    if whole.algorithm.plan is not None:
        each[1] = [arrived._replace(update=untold(arrived.update)) for arrived in each[1]]
    assert eqx.tree_equal(*each), "one by one they are the same to the bit, and so are their bytes"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="sums"),
        pytest.param(("wire.upload=uniform-8",), id="frames"),
    ],
)
def test_a_relay_changes_nothing_but_the_address(changes, folder, store, tmp_path):
    made, assignments, _ = workers(store, tmp_path / "dealt", ("a", "b", "c"))
    whole = simulated(folder, store, *changes)
    state = whole.round.init(whole.start())
    flat = round_of(deployed(whole, LocalTransport(made), assignments), state)
    below = LocalTransport({n: made[n] for n in "bc"})
    relay = Relay(tmp_path, below, ["b", "c"], Quorum(), name="r", say=lambda text: None)
    hello = relay.hello()
    above = (
        assignments[0],
        assignments[0]._replace(name="r", first=assignments[0].clients, clients=hello.clients),
    )
    above = (above[0], above[1]._replace(text=hello.text))
    over = deployed(whole, LocalTransport({"a": made["a"], "r": relay}), above)
    assert apart(round_of(over, state), flat) < 1e-6
    asked = len(below.asked)
    assert apart(round_of(over, state), flat) < 1e-6  # asked again, after a kill, it remembers
    assert len(below.asked) == asked


def test_a_node_below_a_relay_spoils_its_own_members_only(folder, store, tmp_path):
    made, assignments, _ = workers(store, tmp_path / "dealt", ("a", "b", "c"))
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    for spoiled in (reporting(made["c"], nats=1e300, weight=1e300), endless(made["c"])):
        below = LocalTransport({"b": made["b"], "c": spoiled})
        folder_ = tmp_path / str(id(spoiled))
        relay = Relay(folder_, below, ["b", "c"], Quorum(), name="r", say=lambda text: None)
        folder_.mkdir()
        hello, (a, b, _) = relay.hello(), assignments
        above = (a, b._replace(name="r", clients=hello.clients, text=hello.text))
        over = deployed(whole, LocalTransport({"a": made["a"], "r": relay}), above)
        flat = deployed(whole, LocalTransport(made), assignments[:2])
        assert apart(round_of(over, state).delta, round_of(flat, state).delta) < 1e-6


def endless(worker):
    """Return a node that sends what is not finite."""

    def answer(payload):
        reply = worker(payload)
        if not reply.frames:
            return reply
        (frame,) = reply.frames
        size = (len(frame) - overhead(dense().name)) // 4
        wrong = np.full(size, 1e38, np.float32)  # every number is finite, their sum is not
        return replace(reply, frames=(dense().encode(wrong, key_for(0, "upload")),))

    return answer


def test_a_policy_refuses_and_the_server_is_told(folder, store, tmp_path):
    made, assignments, _ = workers(store, tmp_path, policy=Policy(smallest_cohort=100))
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    with pytest.raises(EngineError, match=r"north refused: server\.cohort = 4"):
        round_of(deployed(whole, LocalTransport(made), assignments), state)


def test_who_is_away_late_or_talks_nonsense_is_counted(folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    only = round_of(
        deployed(whole, LocalTransport(made), assignments[:1]), state
    )  # north's members alone
    stats = []

    def nonsense(payload):
        frames = (b"FLM1 and what not",)
        sums = ({n: 1.0 for n in ("weight", "nats", "tokens", "steps", "refused", "unclipped")},)
        return encode_reply(TrainReply(round=1, members=(9, 15), frames=frames, sums=sums))

    for what, transport in {
        "away": LocalTransport(made, away=["south"]),
        "late": LocalTransport(made, slow=["south"]),
        "garbage": LocalTransport({**made, "south": nonsense}),
    }.items():
        more = {"quorum": Quorum(quorum=0.5, deadline=0.3), "on_stats": stats.append}
        total = round_of(deployed(whole, transport, assignments, **more), state)
        assert "south" in getattr(stats[-1], what) and stats[-1].answered == ["north"]
        assert apart(total.delta, only.delta) == 0.0
        assert float(total.members) == (5 if what == "garbage" else 3)


def test_a_node_that_came_back_is_asked_again(folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    transport = LocalTransport(made, slow=["south"])  # it lost the question when it was killed
    looks = []
    see = transport.presence

    def presence():
        looks.append(1)
        if len(looks) == 2:
            transport.since["south"] = "second"
            transport.slow.clear()
        return see()

    transport.presence = presence
    total = round_of(deployed(whole, transport, assignments), state)
    assert transport.asked.count("south") == 2 and transport.asked.count("north") == 1
    assert float(total.members) == 5


def test_no_update_counts_beyond_its_bound(folder, store, nodes):
    """Nodes that do not keep to the limit they are told."""
    made, assignments, _ = nodes
    whole = simulated(folder, store, *CASES["private"][:-1])
    state = whole.round.init(whole.start())
    loud = {name: louder(worker) for name, worker in made.items()}
    stats = []
    over = deployed(whole, LocalTransport(loud), assignments, on_stats=stats.append)
    total = round_of(over, state, float(state.clip_norm))
    assert float(total.members) == float(total.refused) == 5 and float(total.weight) == 0
    assert "plan allows 0.3" in stats[0].garbage["north"] and "south" in stats[0].garbage


def reporting(worker, **sums):
    """Return a node that reports other sums than it has."""

    def answer(payload):
        reply = worker(payload)
        told = {n: [v] for n, v in sums.items() if n in reply.facts}
        return replace(reply, facts={**reply.facts, **told})

    return answer


@pytest.mark.parametrize("settings", [(), CASES["private"][:-1]], ids=["plain", "private"])
@pytest.mark.parametrize("sums", [{"weight": 1e300}, {"tokens": 1e300}, {"steps": 1e300}], ids=str)
def test_an_impossible_report_is_garbage(settings, sums, folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store, *settings)
    state = whole.round.init(whole.start())
    clip_norm, stats = float(state.clip_norm), []
    hostile = {**made, "south": reporting(made["south"], **sums)}
    over = deployed(whole, LocalTransport(hostile), assignments, on_stats=stats.append)
    total = round_of(over, state, clip_norm)
    assert "report of" in stats[0].garbage["south"]
    assert float(total.refused) == 2 and np.isfinite(float(total.weight + total.tokens))
    alone = deployed(whole, LocalTransport(made), assignments[:1])
    assert apart(total.delta, round_of(alone, state, clip_norm).delta) == 0.0


def test_a_loss_beyond_all_sense_is_cut(folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    honest = round_of(deployed(whole, LocalTransport(made), assignments), state)
    hostile = {**made, "south": reporting(made["south"], nats=1e300)}
    total = round_of(deployed(whole, LocalTransport(hostile), assignments), state)
    assert float(honest.nats) < float(total.nats) <= 100 * np.log(60) * float(total.tokens)
    assert apart(total.delta, honest.delta) == 0.0, "it is a figure, and moves no model"


def test_who_sends_garbage_again_and_again_is_put_aside(folder, store, nodes):
    made, assignments, _ = nodes
    whole = simulated(folder, store)
    state = whole.round.init(whole.start())
    transport, stats = LocalTransport({**made, "south": reporting(made["south"], steps=1e9)}), []
    over = deployed(whole, transport, assignments, on_stats=stats.append)
    start = Start(outgoing(over.algorithm, state), np.inf)
    for round in range(5):
        over.engine.total(start, over.engine.prepare(round, MEMBERS))
    assert [sorted(t.garbage) for t in stats] == [["south"]] * 3 + [[]] * 2
    assert stats[2].put_aside == {"south": 13} and stats[3].aside == ["south"]
    assert transport.asked.count("south") == 3


@pytest.mark.parametrize("rule", ["server.aggregate=median", "server.update_norm=0.05"])
def test_robust_rules_over_nodes_are_those_of_the_simulation_and_bound_a_liar(
    rule, folder, store, nodes
):
    made, assignments, _ = nodes
    whole = simulated(folder, store, "wire.upload=float32", rule)
    plain = simulated(folder, store, "wire.upload=float32")
    state = whole.round.init(whole.start())
    wanted = round_of(whole, state)
    got = round_of(deployed(whole, LocalTransport(made), assignments), state)
    assert apart(got.delta, wanted.delta) < 1e-6 and float(got.members) == 5

    def liar(payload):
        asked = read_request(payload)
        reply = made["south"].train(asked)
        like = made["south"]._work(asked).sent_like
        huge = [jax.tree.map(lambda x: -1e4 * x, dense().decode(f, like)) for f in reply.frames]
        frames = tuple(dense().encode(one, key_for(0, "upload")) for one in huge)
        return encode_reply(replace(reply, frames=frames))

    lying = LocalTransport({**made, "south": liar})
    norm = lambda total: float(np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(total.delta))))  # noqa: E731
    bounded = norm(round_of(deployed(whole, lying, assignments), state))
    free = norm(round_of(deployed(plain, lying, assignments), state))
    assert free > 1e3 * norm(wanted) and bounded < 5 * norm(wanted)


def test_who_never_answers_is_put_aside_and_stays_so_after_a_restart(
    folder, store, nodes, tmp_path
):
    made, assignments, _ = nodes
    whole, said = simulated(folder, store, "server.rounds=8"), []
    state = whole.round.init(whole.start())
    for first in (0, 4):  # the second process knows the rounds of the first from the record alone
        transport = LocalTransport(made, slow=["south"])
        over = networked_run(
            whole.recipe,
            store,
            assignments,
            tmp_path,
            transport=transport,
            quorum=Quorum(quorum=0.5, deadline=0.05),
            on_stats=lambda t: record_nodes(RunDirectory(tmp_path), t, None, 2, said.append),
        )
        start = Start(outgoing(over.algorithm, state), np.inf)
        for round in range(first, first + 4):
            over.engine.total(start, over.engine.prepare(round, MEMBERS))
    stats = rounds_of(tmp_path)
    assert [t["late"] for t in stats] == [["south"]] * 3 + [[]] * 5
    assert [t["aside"] for t in stats] == [[]] * 3 + [["south"]] * 5
    assert "south" not in transport.asked and any("aside until round 13" in s for s in said)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sums", [{"nats": 1e300}, {"weight": 1e300}, {"refused": 2.0}], ids=str)
def test_no_report_ends_a_run(sums, folder, store, nodes):
    """Not even if all nodes lie; nor does it keep checkpoints from being written."""
    made, assignments, _ = nodes
    whole = simulated(folder, store)
    hostile = {name: reporting(worker, **sums) for name, worker in made.items()}
    over = deployed(whole, LocalTransport(hostile), assignments)
    kept = []
    hooks = Hooks(
        commit=lambda state, told: None,
        record=lambda told: told,
        keep=kept.append,
        evaluate=lambda state: {},
    )
    state = loop(over, over.round.init(over.start()), hooks)
    assert int(state.round) == 6 and len(kept) == 3


def louder(worker):
    """Return a node that sends a hundred times what it may."""

    def answer(payload):
        reply = worker(payload)
        (frame,) = reply.frames
        like = np.zeros((len(frame) - overhead(dense().name)) // 4, np.float32)
        sent = dense().decode(frame, like)
        return replace(reply, frames=(dense().encode(100 * sent, key_for(0, "upload")),))

    return answer


def test_who_was_away_for_a_while_is_added_in_its_place(folder, store, tmp_path):
    made, assignments, _ = workers(store, tmp_path / "dealt", ("a", "b", "c"))
    whole = simulated(folder, store, "wire.upload=uniform-8")
    state = whole.round.init(whole.start())
    wanted = round_of(whole, state)
    transport, looks = LocalTransport(made, away=["a"]), []
    see = transport.presence

    def presence():
        looks.append(1)
        if len(looks) == 3:
            transport.away.clear()
        return see()

    transport.presence = presence
    assert eqx.tree_equal(round_of(deployed(whole, transport, assignments), state), wanted)
    assert transport.asked == ["b", "c", "a"]
