"""More patience for a leaf alone: a table of kept cells."""

from benchmarks import patience, pays
from benchmarks.cells import Cells
from benchmarks.clones import cell_of, name_of
from benchmarks.pays import Size


def test_a_table_is_made_of_kept_cells_alone(tmp_path):
    cells, kept = Cells(tmp_path / "patience"), Cells(tmp_path / "pays")
    assert "No cell" in patience.tell(cells, kept, Size())
    told = {"share": 1.0, "leaf": "web", "patient": 6.5, "passes": [4.0, 3.0, 1.0]}
    cells.write(name_of(1.0, "web"), patience.digest_of(1.0, Size()), told)
    assert "| 100% | web | - | 6.5 | - |" in patience.tell(cells, kept, Size())
    for side, way, found in (("local", "chosen", 7.0), (patience.SIDE, pays.TRAINED_ON, 6.0)):
        cell = cell_of(1.0, side)
        facts = {"leaves": {"web": {way: found}}}
        kept.write(cell.name, pays.digest_of(cell, Size()), facts)
    assert "| 100% | web | 7.0 | 6.5 | 6.0 |" in patience.tell(cells, kept, Size())


def test_another_local_side_is_another_cell():
    assert len({patience.digest_of(share, Size()) for share in pays.SHARES}) == len(pays.SHARES)
    assert patience.digest_of(1.0, Size(rounds=8)) != patience.digest_of(1.0, Size())
