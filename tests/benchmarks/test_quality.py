"""Quality beside peers: equal care for all contenders, a table of kept cells alone."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cells import Cells
from benchmarks.peers import given, quality
from benchmarks.peers.contenders import HERE, OURS
from benchmarks.peers.quality import METHODS, PEERS, SEEDS, Cell, Size
from fedlm.core.errors import ConfigError
from fedlm.core.keys import generator_for
from fedlm.recipe import parts
from fedlm.recipe.build import build

IDLE = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from given import Record, load
given = load(Path(sys.argv[1]))
assert len(given.rounds) == 2 and all(len(members) == 2 for members in given.rounds)
record = Record(given, {{"versions": {{"idle": "1"}}}})
for number in (1, 2):
    record.after(number, lambda: given.params)
record.close()
"""


def keep(cells, cell, last):
    facts = {"curve": [[10, 300.0], [50, 200.0], [100, last]], "seconds": 1.0}
    cells.write(cell.name, quality.digest_of(cell, Size()), facts)


def lines(cells):
    rows = [line.strip("| \n").split(" | ") for line in quality.tell(cells, Size()).splitlines()]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_every_contender_follows_the_recipe_of_its_method():
    for cell in quality.ordered():
        ours = Cell(OURS, cell.method, cell.seed)
        assert quality.recipe_of(cell, Size()) == quality.recipe_of(ours, Size())
    cells = quality.ordered()
    methods = [2 * len(METHODS), *(len(peer.methods) for peer in PEERS.values())]
    assert len(set(cells)) == len(cells) == len(SEEDS) * sum(methods)
    assert [cell.contender for cell in cells[:2]] == [OURS, "fedjax"]


@pytest.mark.parametrize(
    "contender, method", [("tff", "FedAvg"), (OURS, "FedSGD"), ("pfl", "MimeLite")]
)
def test_unknown_names_are_refused(contender, method):
    with pytest.raises(ConfigError, match="expected"):
        Cell(contender, method, 0)


def test_a_digest_knows_all_that_decides_a_cell():
    cells = quality.ordered()
    digests = {quality.digest_of(cell, Size()) for cell in cells}
    assert len(digests | {quality.digest_of(cells[0], Size(8))}) == len(cells) + 1


def test_the_table_is_made_of_kept_cells(tmp_path):
    cells = Cells(tmp_path)
    assert "No cell" in quality.tell(cells, Size())
    for seed, last in enumerate((100.0, 102.0, 104.0)):
        keep(cells, Cell(OURS, "FedAvg", seed), last)
        keep(cells, Cell("fedjax", "FedAvg", seed), last + 0.5)
        keep(cells, Cell("pfl", "FedAvg", seed), last - seed * 2)
    keep(cells, Cell("pfl", "FedAdam", 0), 7.0)
    found = lines(cells)
    assert found["FedAvg", OURS] == [
        "3", "300.00 ± 0.00", "200.00 ± 0.00", "102.00 ± 2.00", "-", "-"
    ]  # fmt: skip
    assert found["FedAvg", "fedjax"][3:] == ["102.50 ± 2.00", "+0.5, +0.5, +0.5", "yes (2)"]
    assert found["FedAvg", "pfl"][3:] == ["100.00 ± 0.00", "+0, -2, -4", "no (2)"]
    assert found["FedAdam", "pfl"][3:] == ["7.00", "-", "-"], "fedlm's cell is not there"
    assert ("MimeLite", OURS) not in found


def test_one_seed_says_nothing_about_a_spread_and_divergence_is_not_within(tmp_path):
    cells = Cells(tmp_path)
    keep(cells, Cell(OURS, "FedProx", 1), 50.0)
    keep(cells, Cell("pfl", "FedProx", 1), 50.25)
    assert lines(cells)["FedProx", "pfl"][-2:] == ["+0.25", "-"]
    keep(cells, Cell(OURS, "FedProx", 2), 52.0)
    keep(cells, Cell("pfl", "FedProx", 2), math.inf)
    assert lines(cells)["FedProx", "pfl"][-1] == "no (1.4)"


def test_what_is_written_for_contenders_is_what_they_read(tmp_path):
    rounds = [{"7": np.array([[1, 5, 0]])}, {"3": np.array([[1, 6, 2], [1, 2, 0]])}]
    given.write(tmp_path, {"marks": [2]}, {"a.b": np.ones(3)}, rounds)
    found = given.load(tmp_path)
    np.testing.assert_equal((found.params, found.rounds), ({"a.b": np.ones(3)}, rounds))
    record = given.Record(found, {"versions": {}})
    for number in (1, 2):
        record.after(number, lambda: {"a.b": np.zeros(3)})
    record.close()
    assert not given.file_after(tmp_path, 1).exists()
    np.testing.assert_equal(given.arrays(given.file_after(tmp_path, 2)), {"a.b": np.zeros(3)})
    assert json.loads((tmp_path / given.FACTS).read_text())["seconds"] >= 0


def test_a_peer_without_an_environment_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = Cells(tmp_path / "results")
    quality.work([Cell("pfl", "FedAvg", s) for s in SEEDS], Size(), cells, tmp_path / "out")
    assert capsys.readouterr().out.count("pfl: no environment") == 1
    assert "No cell" in quality.tell(cells, Size())


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A size of two rounds on a little text."""
    text = tmp_path / "text.jsonl"
    words = ["the cat sat on the mat", "a dog ran", "the cat ran", "on the mat sat a dog"]
    said = [{"client": f"c{n}", "text": "\n".join(words[: n % 4 + 1] * 3)} for n in range(20)]
    text.write_text("".join(json.dumps(each) + "\n" for each in said))
    (tmp_path / "tiny.toml").write_text(f'[data]\nsource = "{text}"\n')
    monkeypatch.setattr(quality, "STORES", tmp_path / "stores")
    more = ("data.vocabulary=32", "model.embedding_size=4", "model.hidden_size=5")
    shape = ("server.cohort=2", "client.batch_size=4", "client.max_examples=6")
    return Size(2, (*more, *shape), tmp_path / "tiny.toml")


def test_contenders_are_given_the_rows_of_the_batches_that_fedlm_makes(tiny, tmp_path):
    recipe = quality.recipe_of(Cell("fedjax", "FedProx", 1), tiny)
    run = build(recipe, quality.STORES, out=tmp_path / "run")
    rows = parts.people_of(run.recipe, run.store, None).rows.train
    rounds = list(quality.rounds_of(run))
    assert [len(members) for members in rounds] == [2, 2]
    for number, members in enumerate(rounds):
        for name, found in members.items():
            rng = generator_for(1, "shuffle", round=number, member=int(name))
            chosen = rng.permutation(len(rows(int(name))))[:6]
            np.testing.assert_array_equal(found, np.maximum(rows(int(name))[chosen], 0))
    told = quality.settings_of(run, (2,))
    assert (told["proximal"], told["rate"], told["server_optimizer"]) == (0.1, 1.0, "fedavg")
    assert (told["batch"], told["seed"], told["marks"]) == (4, 1, [2])


def test_other_batches_are_of_the_same_members(tiny, tmp_path):
    recipe = quality.recipe_of(Cell(quality.OTHER, "FedAvg", 1), tiny)
    run = build(recipe, quality.STORES, out=tmp_path / "run")
    other = quality.with_other_batches(run)
    assert other.algorithm is run.algorithm and other.start is run.start
    assert other.round.seed == run.round.seed == 1, "members are drawn by it"
    assert other.round.engine.seed == 1001 and run.round.engine.seed == 1


@pytest.mark.slow
def test_two_rounds_of_fedlm_beside_a_peer_that_stays_at_the_start(tiny, tmp_path, monkeypatch):
    script = tmp_path / "idle.py"
    script.write_text(IDLE.format(here=str(HERE)))
    monkeypatch.setitem(PEERS, "pfl", quality.Peer("idle", str(script), tuple(METHODS)))
    monkeypatch.setattr(quality, "interpreter", lambda name: Path(sys.executable))
    cells, both = Cells(tmp_path / "results"), [Cell(who, "MimeLite", 0) for who in (OURS, "pfl")]
    quality.work(both, tiny, cells, tmp_path / "out")
    ours, idle = (cells.read(cell.name, quality.digest_of(cell, tiny)) for cell in both)
    assert ours["curve"][0][1] < idle["curve"][0][1] < 40, "fedlm learns, the other stays"
    assert idle["versions"] == {"idle": "1"} and not list((tmp_path / "out").iterdir())
