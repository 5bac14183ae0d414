"""`fedlm new` explains every setting, and what it writes is a recipe; recipes come with fedlm."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from fedlm.core.errors import ConfigError, CorpusError
from fedlm.corpus import sources
from fedlm.recipe import shipped
from fedlm.recipe.settings import Recipe, load, parse
from fedlm.recipe.template import template
from fedlm.search import sweep
from tests.cli.test_bad_input import refused
from tests.conftest import call

GIVEN = {"data": {"source": "sotu"}, "server": {"rounds": 7}}
TEXT = template(GIVEN, "A title.", "fedlm train x.toml")


def test_the_template_is_a_recipe_with_the_given_values():
    made = parse(tomllib.loads(TEXT))
    assert made == parse({"data": {"source": "sotu"}, "server": {"rounds": 7}})


def test_every_setting_stands_there_with_its_description_in_eighty_columns():
    words = " ".join(TEXT.replace("\n# ", " ").split())
    for name, field in Recipe.model_fields.items():
        assert f"[{name}]" in TEXT
        kind = type(field.default) if field.default is not None else None
        for setting, inner in kind.model_fields.items() if kind else ():
            assert re.search(rf"^(# )?{setting}( = | is not set)", TEXT, re.M)
            assert " ".join(inner.description.split()) in words
    assert max(map(len, TEXT.splitlines())) <= 80


def test_defaults_are_what_they_are_said_to_be():
    flat = TEXT[: TEXT.index("# [federation]")] + TEXT[TEXT.index("\n[run]") :]
    whole = re.sub(r"^# (?=[a-z_0-9]+ = )", "", flat, flags=re.M)
    assert parse(tomllib.loads(whole)) == parse(
        {"data": {"source": "sotu"}, "server": {"rounds": 7}}
    )


def test_a_recipe_is_written_for_a_text_and_trains(run_cli, tiny_text, tmp_path):
    done = run_cli("new", tiny_text, "--out", "mine.toml", "--json")
    assert done.code == 0, done.stderr
    assert done.json == {"recipe": "mine.toml", "clients": 18, "cohort": 9}
    assert load(tmp_path / "mine.toml").data.source == str(tiny_text)
    refused(run_cli("new", tiny_text, "--out", "mine.toml"), "--out = 'mine.toml'")
    refused(run_cli("new", "nowhere.jsonl", "--out", "other.toml"), "neither a file nor")
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize("name", ["sotu", "sotu.toml", "recipes/sotu.toml"])
def test_a_shipped_recipe_is_found_by_its_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(Path(name)) == load(shipped.recipes_folder() / "sotu.toml")
    (tmp_path / "sotu").write_text("[server]\nrounds = 3\n")
    assert load(Path("sotu")).server.rounds == 3  # a file that is there is taken
    with pytest.raises(ConfigError, match="is not readable: No such file"):
        load(Path("none"))


def test_every_shipped_recipe_and_sweep_is_one():
    names = shipped.recipe_names()
    assert {"sotu", "chitchat-private", "chitchat-tree", "chitchat-traffic"} <= set(names)
    assert "sweeps/chitchat-codecs" in names
    for name in names:
        if name.startswith("sweeps/"):
            found = sweep.read_sweep(Path(name))
            for point in found.points:
                sweep.recipe_of(found, point)
        else:
            load(Path(name))


def test_text_that_is_not_shipped_is_asked_for_by_name():
    path = load(Path("irc")).data.source
    if Path(path).exists():
        path = path.replace("irc-ubuntu", "irc-elsewhere")
    with pytest.raises(CorpusError, match=r"put irc-[a-z]+\.jsonl\.gz there, or set data\.source"):
        sources.read(path)


HERE = [
    name
    for name in shipped.recipe_names()
    if not name.startswith("sweeps/") and load(Path(name)).data.source in sources.CORPORA
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", sorted({n for n in shipped.recipe_names() if "/" not in n} - {"advise", *HERE})
)
def test_a_recipe_without_its_text_says_which_text_it_wants(name, tmp_path):
    (tmp_path / "clone" / "recipes").mkdir(parents=True)
    shutil.copy(shipped.recipes_folder() / f"{name}.toml", tmp_path / "clone" / "recipes")
    told = call(tmp_path / "clone", "train", f"recipes/{name}.toml", "--set", "run.devices=2")
    wanted = Path(load(Path(name)).data.source).name
    assert f"put {wanted} there, or set data.source to a file of yours" in told.stderr
    assert told.code == 2 and "Traceback" not in told.stderr


def test_a_recipe_for_any_store_asks_for_one(tmp_path):
    told = call(tmp_path, "train", "advise", "--set", "run.devices=2")
    assert told.code == 2 and "data.store = None" in told.stderr and "expected" in told.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder in which recipes of the same text share its prepared stores."""
    return tmp_path_factory.mktemp("clone")


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_recipes_on_text_that_can_be_installed_train_on_a_clone(clone, name):
    if load(Path(name)).data.source == "chitchat":
        pytest.importorskip("chitchat_dataset", reason="needs pip install 'fedlm[chitchat]'")
    less = ("server.rounds=2", "server.evaluate_rows=10", "run.baselines=false", "run.devices=2")
    changes = [part for setting in less for part in ("--set", setting)]
    done = call(clone, "train", name, *changes, "--out", f"runs/{name}", "--json")
    assert done.code == 0, done.stderr
    assert done.json["rounds"] == 2 and done.json["perplexity"] > 1
