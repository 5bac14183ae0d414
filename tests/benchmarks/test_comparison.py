"""The comparisons that are shipped can be begun: every setting is known, all budgets are equal."""

import pytest

from benchmarks.comparison import FILES, HEAD, Comparison, Side, read_comparison, row
from fedlm.core.errors import ConfigError
from fedlm.search.tune_plan import cost


@pytest.mark.parametrize("name", sorted(file.stem for file in FILES.glob("*.toml")))
def test_all_sides_get_the_same_care(name):
    made = read_comparison(FILES / f"{name}.toml")
    searches = [made.search(side) for side in made.sides]
    assert len({cost(s.rungs) for s in searches}) == 1
    assert len({len(s.points) for s in searches}) == 1
    finals = [made.final(side, None, seed) for side in made.sides for seed in made.seeds]
    assert len({(r.server.rounds, r.server.cohort, r.server.patience) for r in finals}) == 1
    assert len({r.data.model_dump_json() for r in finals}) == 1
    assert len({side.name for side in made.sides}) == len(made.sides)


@pytest.mark.parametrize(
    "text, said",
    [
        ('sidse = 1\nquestion = "?"', "no setting 'sidse'. Did you mean 'sides'?"),
        ('question = "?"\nhours = 1\nrecipe = "x.toml"', "expected sides"),
        ('question = "?"\nhours = 1\nrecipe = "x"\n[[sides]]\nsets = 1', "a side has no 'sets'"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_comparison(tmp_path / "c.toml")


def test_the_best_settings_go_to_the_end(tmp_path):
    (tmp_path / "base.toml").write_text('[data]\nsource = "sotu"\n[server]\nrounds = 90\n')
    best = tmp_path / "best.toml"
    best.write_text(
        '[data]\nsource = "sotu"\n[client]\nlearning_rate = 3.0\n[server]\nrounds = 9\n'
    )
    side = Side(name="a", set=("server.cohort=7",))
    made = Comparison(
        path=tmp_path / "c.toml", question="?", hours=1, recipe="base.toml", sides=(side,),
        patience=4,
    )  # fmt: skip
    final = made.final(side, best, 2)
    assert (final.server.rounds, final.server.patience, final.run.seed) == (90, 4, 2)
    assert final.client.learning_rate == 3.0


def test_a_row_has_a_column_for_each_head():
    run = {
        "seed": 0, "last": 9.0, "best": 8.0, "rounds": 5, "reached": None, "member_bytes": 1e6,
        "epsilon": 8.0, "diverged": False, "seconds": 3600.0,
    }  # fmt: skip
    found = row({"side": "a", "tuned": ["x = 1"], "runs": [run, {**run, "last": 11.0}]})
    assert len(found) == len(HEAD) and found[2] == "10.0 ± 1.4" and found[7] == "8.00"
