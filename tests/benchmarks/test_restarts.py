"""One more turn of both rates on a leaf's own model: a table of kept cells."""

from benchmarks import pays, restarts
from benchmarks.cells import Cells
from benchmarks.clones import cell_of, name_of
from benchmarks.pays import Size


def test_a_table_is_made_of_kept_cells_alone(tmp_path):
    cells, kept = Cells(tmp_path / "restarts"), Cells(tmp_path / "pays")
    assert "No cell" in restarts.tell(cells, kept, Size())
    told = {"share": 1.0, "leaf": "web", pays.TRAINED_ON: 6.5, "passes": [4.0, 3.0]}
    cells.write(name_of(1.0, "web"), restarts.digest_of(1.0, Size()), told)
    assert "| 100% | web | - | 6.5 | - |" in restarts.tell(cells, kept, Size())
    for side, way, found in (("local", "chosen", 7.0), (restarts.SIDE, pays.TRAINED_ON, 6.0)):
        cell = cell_of(1.0, side)
        facts = {"leaves": {"web": {way: found}}}
        kept.write(cell.name, pays.digest_of(cell, Size()), facts)
    assert "| 100% | web | 7.0 | 6.5 | 6.0 |" in restarts.tell(cells, kept, Size())


def test_another_local_side_is_another_cell():
    assert len({restarts.digest_of(share, Size()) for share in pays.SHARES}) == len(pays.SHARES)
    assert restarts.digest_of(1.0, Size(rounds=8)) != restarts.digest_of(1.0, Size())
