"""Shipped comparisons can be begun, with equal budgets; cells are made once, tables of them."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cells import Cells, claimed, recipe_digest
from benchmarks.comparison import (
    FILES,
    HEAD,
    Work,
    epsilons,
    hurt,
    read_comparison,
    row,
    smoke,
    tell,
)
from fedlm.core.errors import ConfigError
from fedlm.recipe.build import build
from fedlm.search.tune_plan import cost


@pytest.mark.parametrize("name", sorted(file.stem for file in FILES.glob("*.toml")))
def test_all_sides_get_the_same_care(name):
    made = read_comparison(FILES / f"{name}.toml")
    searches = [made.search(side) for side in made.sides]
    assert len({s and (cost(s.rungs), len(s.points)) for s in searches}) == 1
    finals = [made.final(side, {}, seed) for side in made.sides for seed in made.seeds]
    assert len({(r.server.rounds, r.server.cohort, r.server.patience) for r in finals}) == 1
    assert len({r.data.model_dump_json() for r in finals}) == 1
    assert len({side.name for side in made.sides}) == len(made.sides)


@pytest.mark.parametrize(
    "text, said",
    [
        ('sidse = 1\nquestion = "?"', "Did you mean 'sides'"),
        ('question = "?"\nhours = 1\nrecipe = "x.toml"', "expected sides"),
        (
            'question = "?"\nhours = 1\nrecipe = "x"\n[[sides]]\nname = "a"\nsets = 1',
            "Did you mean 'set'",
        ),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = 3', "sides = 3: "),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = ["a"]', "sides.0 = 'a': "),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = [{}]', "expected sides.0.name"),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = []', "at least one of"),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}]\nseeds = []', "seeds = "),
        (
            'question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}]\nseeds = 0',
            "seeds = 0: ",
        ),
        (
            'question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}]\nseeds = [1, 1]',
            "one stands twice",
        ),
        (
            'question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}, {name = "A"}]',
            "would be kept in one file",
        ),
        (
            'question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}]\npublic = 3',
            "public = 3",
        ),
        ('question = "?"\nhours = 1\nrecipe = "x"\nsides = [{name = "a"}]\npath = "x"', "'path'"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_comparison(tmp_path / "c.toml")


@pytest.fixture
def small(tmp_path):
    """A comparison of two sides, tuned over two rates, on twelve clients."""
    rows = [
        {"client": f"c{n}", "text": " ".join(f"w{(n * 7 + i * i) % 23}" for i in range(90))}
        for n in range(12)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "base.toml").write_text(
        '[data]\nsource = "text.jsonl"\nvocabulary = 40\nvalidation = 0.2\nsequence_length = 6\n'
        '[model]\nname = "cifg"\nembedding_size = 8\nhidden_size = 16\n'
        "[client]\nbatch_size = 4\n[run]\ntrackers = []\nbaselines = false\n"
    )
    (tmp_path / "c.toml").write_text(
        """
        question = "Which?"
        hours = 0.1
        recipe = "base.toml"
        set = ["server.rounds=4", "server.evaluate_every=2", "server.cohort=4"]
        over = ["client.learning_rate=0.5,1.0"]
        tune_rounds = 4
        tune_length = 2
        seeds = [0, 1]
        [[sides]]
        name = "cifg"
        [[sides]]
        name = "si-cifg, wide"
        set = ["model.name=si-cifg", "model.hidden_size=24"]
        """
    )
    return tmp_path / "c.toml"


def test_the_best_settings_go_to_the_end(small):
    made = read_comparison(small)
    final = made.final(made.sides[1], {"client.learning_rate": 3.0}, 2)
    assert (final.server.rounds, final.run.seed, final.run.devices) == (4, 2, 1)
    assert (final.client.learning_rate, final.model.hidden_size) == (3.0, 24)


def test_cells_are_made_once_and_the_table_is_made_of_them_alone(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = read_comparison(small)
    work = Work(made, Cells(tmp_path / "results"), tmp_path / "runs")
    names = [name for name, _, _ in work.missing(())]
    assert names[:2] == ["cifg tuning", "si-cifg, wide tuning"] and len(names) == 6
    assert "No cell" in tell(work)
    with claimed(work.folder("cifg seed 0")) as mine:
        assert mine
        work.make_all((), lambda: False)
    assert [name for name, _, _ in work.missing(())] == ["cifg seed 0"], "somebody is at that one"
    work.make_all(["cifg"], lambda: True)
    assert len(work.missing(())) == 1, "no cell is begun when the time is over"
    work.make_all(["cifg"], lambda: False)
    assert work.missing(()) == []
    cell = json.loads((tmp_path / "results" / "si-cifg-wide-seed-1.json").read_text())
    assert cell["curve"][-1][0] == 4 and cell["last"] > 1 and cell["commit"] and cell["jax"]
    assert [point[1] > 0 for point in cell["curve"]] == [True, True]
    assert cell["settings"][:2] == ["model.name=si-cifg", "model.hidden_size=24"]

    (tmp_path / "text.jsonl").unlink()
    shutil.rmtree(tmp_path / "runs")
    elsewhere = Work(made, Cells(tmp_path / "results"), tmp_path / "nowhere")
    table = tell(elsewhere)
    first, tried = table.split("While tuning:")
    assert first.count("\n| ") == 4 and "| si-cifg, wide | 2 |" in first
    assert "| cifg | client.learning_rate = 1.0 | 0 of 1 |" in tried, tried
    assert "missing" not in table
    assert (tmp_path / "results" / "curves.svg").read_text().startswith("<svg xmlns")


def test_a_run_of_other_settings_is_not_taken_for_a_cell(small, tmp_path, monkeypatch):
    """Whoever removes a kept file after a change, as the error says, gets new figures."""
    monkeypatch.chdir(tmp_path)
    asked, kept = read_comparison(small), Cells(tmp_path / "results")
    side, seed = asked.sides[0], asked.seeds[0]
    found = []
    for rounds in (4, 2):
        made = replace(asked, set=(*asked.set, f"server.rounds={rounds}"), tune_rounds=0)
        work = Work(made, kept, tmp_path / "runs")
        work.play(side, seed)
        found.append(work.kept_run(side, seed)["rounds"])
        kept.file(work.run_name(side, seed)).unlink()
    assert found == [4, 2]


@pytest.fixture
def warm(small, tmp_path):
    """The same, where every second client is public; one side begins with their text."""
    rows = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    with gzip.open(tmp_path / "text.jsonl.gz", "wt") as out:
        for n, each in enumerate(rows):
            group, word = ("open", "spoken") if n % 2 else ("closed", "kept")
            told = {**each, "groups": [group], "text": f"{word} " * 30 + each["text"]}
            out.write(json.dumps(told) + "\n")
    base = (tmp_path / "base.toml").read_text().replace("text.jsonl", "text.jsonl.gz")
    base = base.replace("vocabulary = 40", "vocabulary = 20")
    (tmp_path / "base.toml").write_text(base)
    opened = base.replace("[data]", '[server]\nrounds = 2\n[data]\ngroups = ["open"]')
    opened = opened.replace("[client]", "[client]\nmax_steps = 2")
    opened = opened.replace('name = "cifg"', 'name = "lstm"\nlayers = 2')  # sides bring their own
    (tmp_path / "open.toml").write_text(opened)
    asked = small.read_text().replace("[[sides]]", '[public]\nrecipe = "open.toml"\n[[sides]]', 1)
    small.write_text(asked.replace('name = "cifg"', 'name = "cifg"\npublic_start = true'))
    return small


def test_a_public_start_is_of_public_text_alone(warm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = read_comparison(warm)
    work = Work(made, Cells(tmp_path / "results"), tmp_path / "runs")
    begun, fresh = (made.final(side, {}, 0, *work.paths(side)) for side in made.sides)
    assert begun.model.init_from and not fresh.model.init_from
    for side, recipe in zip(made.sides, (begun, fresh), strict=True):
        same = recipe.model.model_copy(update={"init_from": None})
        assert made.pretraining(side).model == same
    for recipe in (begun, fresh):
        words = Path(recipe.data.tokenizer).read_text()
        assert "spoken" in words and "kept" not in words, "the vocabulary is public"
        private = [json.loads(line) for line in Path(recipe.data.source).read_text().splitlines()]
        assert {row["groups"][0] for row in private} == {"closed"}
    side = made.sides[0]
    work.tune(side)
    work.play(side, 0)
    assert work.kept_run(side, 0)["last"] > 1
    same = replace(side, public_start=False)
    assert work.search_digest(same) != work.search_digest(side)
    assert work.run_digest(same, {}, 0) != work.run_digest(side, {}, 0)
    assert build(begun, tmp_path / "stores", out=tmp_path / "x").store.vocabulary == 20
    longer = replace(made, public=replace(made.public, set=("server.rounds=3",)))
    assert replace(work, comparison=longer).run_digest(side, {}, 0) != work.run_digest(side, {}, 0)


def test_a_public_start_needs_public_text(small):
    text = small.read_text()
    small.write_text(text.replace('name = "cifg"', 'name = "cifg"\npublic_start = true'))
    with pytest.raises(ConfigError, match="side 'cifg' has public_start = true, which needs"):
        read_comparison(small)
    for table, said in (
        ('recipe = "x"\nsets = []', "no setting 'public.sets'. Did you mean 'set'"),
        ("set = []", "expected public.recipe"),
        ("recipe = 3", "public.recipe = 3"),
        ('recipe = "base.toml"', "expected data.groups"),
    ):
        small.write_text(text.replace("[[sides]]", f"[public]\n{table}\n[[sides]]", 1))
        with pytest.raises(ConfigError, match=said):
            read_comparison(small)


def test_a_result_of_other_settings_is_not_taken(small, tmp_path):
    made = read_comparison(small)
    one, other = (made.final(made.sides[0], {"client.learning_rate": v}, 0) for v in (1.0, 2.0))
    cells = Cells(tmp_path / "results")
    cells.write("a", recipe_digest(one), {"last": 3.0})
    assert cells.read("a", recipe_digest(one))["last"] == 3.0
    assert cells.read("b", recipe_digest(one)) is None
    with pytest.raises(ConfigError, match="other settings"):
        cells.read("a", recipe_digest(other))
    moved = one.model_copy(
        update={
            "data": one.data.model_copy(update={"source": "/elsewhere/text.jsonl"}),
            "run": one.run.model_copy(update={"devices": 7}),
        }
    )
    assert recipe_digest(moved) == recipe_digest(one), "where text lies decides no figure"


def test_leaves_that_a_side_hurts_are_counted():
    alone = {"side": "local", "runs": [{"seed": 0, "leaves": {"a": 5.0, "b": 4.0}}]}
    other = {"side": "flat", "runs": [{"seed": 0, "leaves": {"a": 4.0, "b": 4.5}}, {"seed": 1}]}
    assert hurt(other, alone) == 0.5
    assert hurt(alone, alone) is None and hurt(other, None) is None


@pytest.mark.parametrize("name", sorted(file.stem for file in FILES.glob("*.toml")))
def test_a_smoke_test_of_every_comparison_is_short(name):
    made = smoke(read_comparison(FILES / f"{name}.toml"))
    for side in made.sides:
        assert made.final(side, {}, 0).server.rounds == 2
        assert made.search(side) is None or cost(made.search(side).rungs) <= 2


def test_perplexity_is_drawn_over_epsilon_where_a_model_has_several():
    def side(name, epsilon, last):
        return {"side": name, "runs": [{"epsilon": epsilon, "last": last}]}

    found = [side("CIFG, no noise", None, 80.0), side("CIFG, epsilon 8", 8.0, 90.0)]
    found += [side("CIFG, epsilon 8, banded", 8.0, 95.0)]
    assert epsilons(found) is None
    drawn = epsilons([*found, side("CIFG, epsilon 4", 4.0, 100.0), side("X, epsilon 4", 4.0, None)])
    assert "CIFG" in drawn and "banded" not in drawn and ">X<" not in drawn


def test_a_row_has_a_column_for_each_head():
    run = {
        "seed": 0, "start": 20.0, "last": 9.0, "best": 8.0, "rounds": 5, "reached": None,
        "member_bytes": 1e6, "epsilon": 8.0, "diverged": False, "seconds": 3600.0,
    }  # fmt: skip
    found = row({"side": "a", "tuned": ["x = 1"], "runs": [run, {**run, "last": 11.0}]})
    assert len(found) == len(HEAD) and found[8] == "8.00"
    assert found[2:4] == ["20.0 ± 0.0", "10.0 ± 1.4"]
