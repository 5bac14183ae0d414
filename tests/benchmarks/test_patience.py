"""More patience for a leaf alone: a table of kept cells."""

from benchmarks import patience, pays
from benchmarks.cells import Cells
from benchmarks.clones import cell_of, name_of
from benchmarks.pays import Size


def test_a_table_is_made_of_kept_cells_alone(tmp_path):
    cells, kept = Cells(tmp_path / "patience"), Cells(tmp_path / "pays")
    assert "No cell" in patience.tell(cells, kept, Size())
    told = {"share": 1.0, "leaf": "web", "patient": 6.5, "passes": [4.0, 3.0, 1.0]}
    cells.write(f"{name_of(1.0, 'web')} local", patience.digest_of(1.0, "local", Size()), told)
    assert "| 100% | web | - | 6.5 | - | - |" in patience.tell(cells, kept, Size())
    for side, way, found in (("local", "chosen", 7.0), (patience.SIDE, pays.TRAINED_ON, 6.0)):
        cell = cell_of(1.0, side)
        kept.write(cell.name, pays.digest_of(cell, Size()), {"leaves": {"web": {way: found}}})
    assert "| 100% | web | 7.0 | 6.5 | 6.0 | - |" in patience.tell(cells, kept, Size())


def test_another_local_side_is_another_cell():
    sides = ("local", patience.SIDE)
    digests = {patience.digest_of(x, side, Size()) for x in pays.SHARES for side in sides}
    assert len(digests) == len(pays.SHARES) * len(sides)
    assert patience.digest_of(1.0, "local", Size(rounds=8)) not in digests
