"""The benchmark of published sizes asks for the sizes that its table names."""

import argparse
from pathlib import Path

import pytest

from benchmarks.cells import Cells
from benchmarks.sizes import CELLS, HEAD, keep, row, settings
from fedlm.models import catalog
from fedlm.recipe.settings import load

ROOT = Path(__file__).parents[2]
ASKED = argparse.Namespace(rounds=50, cohort=10, examples=64, rows=500)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_has_the_published_count(cell):
    recipe = load(ROOT / "recipes" / "irc.toml", tuple(settings(cell, ASKED)))
    entry = catalog.NAMED[cell.name]
    size = catalog.dimensions(recipe.model, recipe.data.vocabulary)
    assert catalog.count(entry.architecture, size) == catalog.count(entry.architecture, entry.size)
    rates = {"sgd": 0.001, "adamw": 1.0}  # FedAdam's; averaging is FedAvg with one
    assert recipe.server.learning_rate == rates[recipe.client.optimizer]


def test_a_size_that_has_not_run_is_a_line_of_dashes(tmp_path):
    asked = argparse.Namespace(**{**vars(ASKED), "out": tmp_path, "recipe": Path("irc.toml")})
    assert keep(CELLS[0], asked, Cells(tmp_path)) is None
    assert len(row(CELLS[0], None)) == len(HEAD) and row(CELLS[0], None)[2] == "-"


def test_a_kept_size_is_a_line_without_its_run():
    facts = {
        "vocabulary": 4000, "start": 4000.0, "curve": [[10, 900.0], [20, 500.0]],
        "seconds": [9.0, 2.0, 4.0], "peak_bytes": 2_500_000_000,
    }  # fmt: skip
    wanted = ["8.29", "8.29", "6.80", "6.21", "-", "6.21 (20)", "3.0", "2.5"]
    assert row(CELLS[0], facts)[2:] == wanted
