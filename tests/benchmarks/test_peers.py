"""What the comparison with peers rests on: the same data for all, an honest table."""

import sys

import numpy as np
import pytest

from benchmarks.fedavg import fedavg
from benchmarks.peers import agreement, run, turns, workload
from benchmarks.peers.contenders import HERE, Contender, PeerError, Worker
from fedlm.cohort.packing import batches_of
from fedlm.corpus.store import StoreSettings, write
from fedlm.engine.loop import LoopEngine

TINY = workload.Plan(
    architecture="cifg",
    vocab=32,
    embedding_size=4,
    hidden_size=5,
    members=3,
    batch=2,
    length=4,
    max_examples=5,
)
ECHO = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from turns import Turns, load
work = load(Path(sys.argv[1]))
print("a library that prints", flush=True)
turns = Turns(work.params, {{"versions": {{"echo": "1"}}}})
at = 0
while turns.begins():
    print("and goes on printing", flush=True)
    at += 1
    turns.ends(lambda: {{name: value + at for name, value in work.params.items()}})
    if at == 2:
        raise SystemExit("had enough")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("peers")
    texts = [
        (f"c{n}", (), "\n".join("a b c d"[: 2 * n + 1] for _ in range(n + 1))) for n in range(8)
    ]
    settings = StoreSettings(vocabulary=32, test_clients=0.0, validation=0.0)
    store = write(texts, path / "store", settings)
    workload.write(TINY, store, path / "work")
    return path / "work"


def test_the_batches_are_those_of_the_engine(folder):
    with np.load(folder / "rows.npz") as file:
        rows = {int(name): file[name] for name in file.files}
    algorithm = fedavg(len(rows))
    engine = LoopEngine(algorithm, rows.__getitem__, TINY.shape, TINY.seed)
    made = engine.prepare(0, np.array(sorted(rows))).batches
    with np.load(folder / "batches.npz") as file:
        for name, member, (_, order) in zip(sorted(file.files), sorted(rows), made, strict=True):
            batches = np.asarray(list(batches_of(rows[member], order)))
            np.testing.assert_array_equal(file[name], np.maximum(batches, 0))


def test_contenders_read_every_example_once_and_no_padding(folder):
    found = turns.load(folder)
    work = found.settings["work"]
    assert sum(len(rows) for rows in found.rows) == work["examples"]
    assert sum(int(np.sum(rows[:, 1:] != 0)) for rows in found.rows) == work["tokens"]
    assert all(len(rows) <= TINY.max_examples for rows in found.rows)
    assert all(np.all(rows[:, 0] == 1) for rows in found.rows)


def test_processes_share_all_members_evenly():
    sizes = [9, 1, 7, 3, 5, 2]
    lanes = turns.share(sizes, 2)
    assert sorted(m for lane in lanes for m in lane) == list(range(6))
    loads = [sum(sizes[m] for m in lane) for lane in lanes]
    assert abs(loads[0] - loads[1]) <= max(sizes)


def test_a_difference_is_relative_to_the_whole_change():
    ours = {"a": np.array([3.0]), "b": np.array([4.0])}
    assert agreement.relative_difference(ours, {"a": np.array([3.0]), "b": np.array([4.5])}) == 0.1
    assert agreement.relative_difference(ours, {"a": np.array([[3.0]]), "b": ours["b"]}) == np.inf


def test_the_bound_follows_what_rounding_can_move(tmp_path):
    assert agreement.Truth(tmp_path, {}, 1e-6).bound(1e-4) == 1e-4
    assert agreement.Truth(tmp_path, {}, 1e-2).bound(1e-4) == agreement.MARGIN * 1e-2


def test_a_contender_answers_in_turns_and_says_why_it_stops(folder, tmp_path, monkeypatch):
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(here=str(HERE)))
    monkeypatch.setattr("benchmarks.peers.contenders.interpreter", lambda name: sys.executable)
    worker = Worker("echo", Contender("echo", str(script)), folder)
    assert worker.facts["versions"] == {"echo": "1"}
    assert worker.round() >= 0.0
    assert all(np.allclose(change, 1.0) for change in agreement.read(worker.change()).values())
    assert worker.seconds_used() > 0.0
    worker.round()
    with pytest.raises(PeerError, match="had enough"):
        worker.round()
    worker.stop()


def test_ratios_are_taken_turn_by_turn_and_beside_whom_it_ran():
    facts = [
        {"contender": "fedlm", "seconds": [1.0, 2.0], "relative_difference": 0.0},
        {"contender": "slow", "seconds": [3.0, 6.0], "relative_difference": 1e-6},
        {"contender": "apart", "seconds": [8.0, 8.0], "beside": [4.0, 4.0]},
        {"contender": "wrong", "left_out": "differs", "relative_difference": 0.5},
    ]
    rows = run.table(facts, members=6)
    assert [row[3] for row in rows] == ["1 (1-1)", "3 (3-3)", "2 (2-2)", "-"]
    assert rows[1][2] == "1.5 (1-2)"
    assert rows[3][1] == "differs" and rows[3][4] == "5e-01"


def test_a_noisy_machine_is_named():
    def results(strangers):
        contenders = [{"contender": "x", "waiting": [0.0], "strangers": strangers}]
        return {"workloads": {"w": {"contenders": contenders}}}

    assert "not quiet" not in run.weather(results([0.01, 0.02]))
    assert "not quiet" in run.weather(results([0.01, 0.2]))
