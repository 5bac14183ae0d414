"""The table of a sweep says no less than its runs have cost."""

import datetime as dt
from pathlib import Path

import pytest

from fedlm.core.errors import ConfigError
from fedlm.search.sweep import SEED, Result, Sweep, literal, sweep_table


def result(seed, epsilon, diverged=None):
    return Result(
        point={"client.learning_rate": 0.5, SEED: seed},
        path=Path("run"),
        perplexity=None if diverged else 90.0,
        validation=None,
        reached=None,
        best=95.0,
        upload_bytes=100.0,
        personal=None,
        epsilon=epsilon,
        diverged=diverged,
    )


def test_the_epsilon_of_a_line_is_that_of_the_seed_that_cost_most():
    found = [result(0, None, diverged=3), result(1, 7.25), result(2, 8.0)]
    head, (row,) = sweep_table(Sweep(Path("x.toml"), [r.point for r in found], None), found)
    assert row[head.index("epsilon")] == "8", "the first seed diverged, and has none"
    assert row[head.index("diverged")] == "1 of 3"


def test_an_infinite_value_is_written_as_recipes_have_it():
    assert [literal(x) for x in (float("inf"), 0.5, "a")] == ["inf", "0.5", '"a"']
    with pytest.raises(ConfigError, match="1979-05-27: expected text, a number"):
        literal(dt.date(1979, 5, 27))
