"""The benchmark of published sizes asks for the sizes that its table names."""

import argparse
from pathlib import Path

import pytest

from benchmarks.sizes import CELLS, HEAD, row, settings
from fedlm.models import catalog
from fedlm.recipe.parts import dimensions
from fedlm.recipe.settings import load

ROOT = Path(__file__).parents[2]
ASKED = argparse.Namespace(rounds=50, cohort=10, examples=64, rows=500)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_has_the_published_count(cell):
    recipe = load(ROOT / "recipes" / "irc.toml", tuple(settings(cell, ASKED)))
    entry = catalog.NAMED[cell.name]
    size = dimensions(recipe.model, recipe.data.vocabulary)
    assert catalog.count(entry.architecture, size) == catalog.count(entry.architecture, entry.size)
    assert recipe.server.learning_rate == 0.001 and recipe.client.optimizer == "sgd"


def test_a_size_that_has_not_run_is_a_line_of_dashes(tmp_path):
    assert len(row(CELLS[0], tmp_path)) == len(HEAD)
