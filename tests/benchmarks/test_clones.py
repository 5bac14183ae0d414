"""A leaf with copies of itself: nothing but the order of its rows differs."""

import numpy as np

from benchmarks import clones
from benchmarks.cells import Cells
from benchmarks.pays import Size
from fedlm.corpus.store import Store
from tests.conftest import call, write_tiny


def test_copies_have_the_text_of_the_leaf_and_no_other(tmp_path):
    write_tiny(tmp_path)
    done = call(tmp_path, "prepare", "tiny.jsonl", "--out", "store", "--validation", "0.4")
    assert done.code == 0, done.stderr
    store = Store(tmp_path / "store")
    own = [n for n in map(int, store.training_clients) if store.groups(n)[0] == "north"]
    rows = list(clones.copied(store, "north"))
    assert len(rows) == clones.COPIES * len(own) and len({row["client"] for row in rows}) == len(
        rows
    )
    for place, row in enumerate(rows):
        copy, n = place // len(own), own[place % len(own)]
        assert row["groups"] == [clones.copy_name("north", copy)]
        np.testing.assert_array_equal(row["train"], store.train(n))
        np.testing.assert_array_equal(row["held"], store.held(n))


def test_a_table_is_made_of_kept_cells_alone(tmp_path):
    cells, kept = Cells(tmp_path / "clones"), Cells(tmp_path / "pays")
    assert "No cell" in clones.tell(cells, kept, Size())
    ways = {"federated": 9.0, "finetune": 8.0, "chosen": 7.0}
    told = {"share": 0.1, "leaf": "web", "leaves": {"web": ways}}
    cells.write(clones.name_of(0.1, "web"), clones.digest_of(0.1, Size()), told)
    assert "| 10% | web | - | - | 9.0 | 8.0 | 7.0 | - | - | - |" in clones.tell(cells, kept, Size())
