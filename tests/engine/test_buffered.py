"""Buffered rounds over nodes: the synchronous round if all are waited for, and their simulation."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.errors import EngineError, RecordError
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.engine.dispatch import Quorum
from fedlm.engine.messages import read_request
from fedlm.federation.buffered_round import EMPTY, Landed, Landing
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from fedlm.record import checkpoint
from tests.deploy.local import LocalTransport, prepared, store_in, workers

NAMES = ("a", "b", "c")
FRAMES = ("run.engine=loop", "wire.upload=uniform-8", "server.cohort=9")
BUFFERED = (*FRAMES, "server.mode=buffered")


class Paced(LocalTransport):
    """Nodes that reply as many rounds later as `pace` says of a node and a round."""

    def __init__(self, nodes, pace=lambda name, began: 0):
        super().__init__(nodes)
        self.pace, self.now, self.idle = pace, 0, 0

    def fetch(self, message_id, max_bytes):
        name, payload = self.sent[message_id]
        began = read_request(payload).round
        if self.now < began + self.pace(name, began):
            self.idle += 1
            self.now += self.idle % 9 == 0  # nobody else is in flight: time passes
            return None
        self.idle = 0
        return super().fetch(message_id, max_bytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("buffered"))


@pytest.fixture(scope="module")
def store(folder):
    return store_in(folder)


@pytest.fixture(scope="module")
def nodes(store, folder):
    return workers(store, folder / "dealt", NAMES)


def simulated(folder, store, *changes):
    return flat_run(resolve(load(folder / "tiny.toml", changes), store), store, out=folder)


def deployed(whole, transport, assignments, out, **more):
    run = hashlib.sha256(str(out).encode()).hexdigest()[:32]  # the same when it goes on
    return networked_run(
        whole.recipe, whole.store, assignments, out, transport=transport, run_id=run, **more
    )


def played(run, state, rounds, transport=None):
    told, states = [], [state]
    for round in rounds:
        if transport is not None:
            transport.now = max(transport.now, round)
        one = next(run.round.play(states[-1], range(round, round + 1)))
        states.append(one.state)
        told.append({k: v for k, v in one.metrics.items() if k not in ("seconds", "clock")})
    return states, told


def begun(run):
    return run.round.init(run.start())


def model(state):
    return tree.sha256((state.params, state.server_memory))


def test_waiting_for_all_nodes_is_the_synchronous_round_to_the_bit(folder, store, nodes, tmp_path):
    """Whoever comes first: the last node is asked last, and answers first."""
    made, assignments, _ = nodes
    flat = simulated(folder, store, *FRAMES)
    here, _ = played(flat, begun(flat), range(3))
    backwards = Paced(made)
    backwards.numbers = dict(reversed(backwards.numbers.items()))
    over = deployed(simulated(folder, store, *BUFFERED), backwards, assignments, tmp_path)
    there, told = played(over, begun(over), range(3), backwards)
    assert [model(s) for s in there] == [model(s) for s in here]
    assert all(m["in_flight"] == 0 and len(m["answers"]) == 1 for m in told)


def pace(name, began):
    """One node is always on time, one sometimes, one never."""
    return {"a": 0, "b": began % 2, "c": 2}[name]


def scripted(whole, told):
    """The same run in simulation, in which the same answers come as over the network."""

    def wait(round, flying, enough, clock):
        groups = []
        for one in flying:
            here = np.array(told[round]["answers"].get(str(one.began), []), np.int64)
            if len(here):
                assert set(here) <= set(one.members)
                cohort = whole.engine.prepare(one.began, here)
                groups.append(Landed(one.began, here, whole.engine.total(one.start, cohort)))
        return Landing(groups, (), 0.0)

    return replace(whole, round=replace(whole.round, waiting=wait))


SOME = (*BUFFERED, "server.buffer=1", "server.largest_staleness=3", "server.rounds=9")


def test_late_nodes_count_as_in_the_simulation_to_the_bit(folder, store, nodes, tmp_path):
    made, assignments, _ = nodes
    whole = simulated(folder, store, *SOME)
    transport = Paced(made, pace)
    over = deployed(whole, transport, assignments, tmp_path)
    there, told = played(over, begun(over), range(6), transport)
    ages = {m["round"] - int(began) for m in told for began in m["answers"]}
    assert {0, 1, 2} <= ages
    again = scripted(whole, told)
    here, said = played(again, begun(again), range(6))
    assert [model(s) for s in here] == [model(s) for s in there]
    assert [m["answers"] for m in said] == [m["answers"] for m in told]


def test_a_killed_server_goes_on_with_the_answers_that_it_took(folder, store, nodes, tmp_path):
    """To the byte, though nodes now answer at another pace, and it asks nobody who answered."""
    made, assignments, _ = nodes
    whole = simulated(folder, store, *SOME)
    transport = Paced(made, pace)
    over = deployed(whole, transport, assignments, tmp_path)
    states, told = played(over, begun(over), range(5), transport)
    assert np.any(np.asarray(states[2].flight.members) != EMPTY)
    checkpoint.save(tmp_path / "checkpoints", 2, states[2])
    saved = checkpoint.load_newest(tmp_path / "checkpoints", begun(over), print)
    transport = Paced(made)  # everybody answers at once
    over = deployed(whole, transport, assignments, tmp_path)
    again, said = played(over, saved.state, range(2, 5), transport)
    assert [tree.sha256(s) for s in again[1:]] == [tree.sha256(s) for s in states[3:]]
    assert said == told[2:]
    taken = {(began, m) for t in told for began, here in t["answers"].items() for m in here}
    asked = [read_request(payload) for _, payload in transport.sent.values()]
    assert not {(str(r.round), m) for r in asked for m in r.members} & taken


@pytest.mark.parametrize("named", [[9, "a"], [0, "nobody"], None])
def test_a_record_that_names_other_requests_is_damaged(folder, store, nodes, tmp_path, named):
    made, assignments, _ = nodes
    transport = Paced(made)
    over = deployed(simulated(folder, store, *SOME), transport, assignments, tmp_path)
    played(over, begun(over), range(1), transport)
    (file,) = (tmp_path / "answers").glob("taken-*.json")
    kept = json.loads(file.read_text())
    kept["landed"].append(kept["landed"][0] if named is None else named)
    file.write_text(json.dumps(kept))
    over = deployed(simulated(folder, store, *SOME), transport, assignments, tmp_path)
    with pytest.raises(RecordError, match="is damaged: it names answers"):
        played(over, begun(over), range(1), transport)


@pytest.mark.slow
def test_answers_are_kept_as_long_as_the_server_can_go_back(folder, store, nodes, tmp_path):
    made, assignments, _ = nodes
    short = ("run.checkpoint_every=1", "run.keep_checkpoints=1", "server.largest_staleness=1")
    whole = simulated(folder, store, *BUFFERED, "server.buffer=1", "server.rounds=9", *short)
    transport = Paced(made)
    played(
        over := deployed(whole, transport, assignments, tmp_path), begun(over), range(5), transport
    )
    held = sorted(path.name[:8] for path in (tmp_path / "answers").glob("0*"))
    assert held == ["00000002", "00000003", "00000004"]
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "answers").rglob("*.json")} == {0o600}


@pytest.mark.slow
def test_a_node_that_refuses_frees_its_places(folder, store, nodes, tmp_path):
    made, assignments, _ = nodes
    refusing = {**made, "b": Worker(made["b"].store, Policy(smallest_cohort=100))}
    here = tuple(a._replace(text=refusing[a.name].text) for a in assignments)
    whole = simulated(folder, store, *BUFFERED, "server.rounds=9")
    stats = []
    over = deployed(whole, Paced(refusing), here, tmp_path, on_stats=stats.append)
    _, told = played(over, begun(over), range(2))
    for facts, round_stats in zip(told, stats, strict=True):
        assert facts["in_flight"] == 0 and facts["lost"] + facts["members"] == 9
        assert facts["lost"] > 0 and "at least 100" in round_stats.refused["b"]


def test_nobody_who_answers_ends_the_run(folder, store, nodes, tmp_path):
    made, assignments, _ = nodes
    refusing = {n: Worker(w.store, Policy(smallest_cohort=100)) for n, w in made.items()}
    here = tuple(a._replace(text=refusing[a.name].text) for a in assignments)
    over = deployed(simulated(folder, store, *BUFFERED), Paced(refusing), here, tmp_path)
    with pytest.raises(EngineError, match="no node in flight answered"):
        played(over, begun(over), range(1))


@pytest.mark.slow
def test_a_deadline_ends_a_round_with_a_quorum(folder, store, nodes, tmp_path):
    made, assignments, _ = nodes
    whole = simulated(folder, store, *BUFFERED, "server.rounds=9")
    transport = Paced(made, lambda name, began: 999 if name == "c" else 0)
    quorum = Quorum(quorum=0.3, deadline=0.5)
    over = deployed(whole, transport, assignments, tmp_path, quorum=quorum)
    _, (facts,) = played(over, begun(over), range(1))
    assert facts["in_flight"] > 0 and facts["members"] + facts["in_flight"] == 9
