"""A tokenizer made elsewhere, from text to predictions, through the command line."""

import json
import tomllib

import pytest

from fedlm.deploy.local import redacted
from fedlm.recipe.settings import parse
from tests.cli.test_bad_input import refused
from tests.conftest import WORDS
from tests.corpus import made_elsewhere as others

KINDS = {"gpt2": others.like_gpt2, "llama": others.like_llama}


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    """The path of a small tokenizer.json."""
    return others.saved(KINDS[request.param](), tmp_path / request.param)


def stored(recipe, **data):
    """The tiny recipe on a store."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in data.items())
    text = recipe.read_text().replace('source = "tiny.jsonl"\nvocabulary = 60\n', lines)
    recipe.write_text(text)
    return recipe


@pytest.mark.sample(1)
def test_a_store_made_with_a_file_trains_and_predicts_words(run_cli, tiny_recipe, tmp_path, file):
    made = run_cli("prepare", "tiny.jsonl", "--out", "store", "--tokenizer", file, "--json")
    assert made.code == 0, made.stderr
    size = made.json["vocabulary"]
    assert (
        made.json["settings"]["tokenizer"] == "file" and made.json["settings"]["lowercase"] is False
    )
    assert made.json["settings"]["vocabulary"] == size
    stored(tiny_recipe, store="store", sequence_length=16)
    text = tiny_recipe.read_text().replace("sequence_length = 8\n", "")
    tiny_recipe.write_text(text)
    rate = ("--set", "client.learning_rate=2", "--set", "server.learning_rate=0.1")
    done = run_cli("train", tiny_recipe, *rate, "--set", "server.rounds=8", "--json")
    assert done.code == 0, done.stderr
    assert done.json["perplexity"] < done.json["start_perplexity"]

    # From here on, the run alone.
    (tmp_path / "store").rename(tmp_path / "gone")
    file.rename(tmp_path / "gone.json")
    asked = ("predict", "runs/tiny", "the big", "--count", 3, "--length", 12)
    said = run_cli(*asked, "--temperature", 0, "--json").json
    for word in said["next"]:
        assert word["word"].isascii() and not word["word"].startswith(("Ġ", "▁"))
    assert any(word["word"] in WORDS for word in said["next"])
    assert not set(said["continuation"]) & set("Ġ▁Ċ") and "<" not in said["continuation"]
    assert run_cli("export", "runs/tiny", "--out", "there").code == 0
    named = json.loads((tmp_path / "there" / "special_tokens_map.json").read_text())
    assert named["eos_token"] in ("<|endoftext|>", "</s>")


@pytest.mark.slow
def test_a_recipe_names_a_file_beside_it_and_goes_on(run_cli, tiny_recipe, tmp_path, file):
    name = f"{file.parent.name}/tokenizer.json"
    stored(tiny_recipe, source="tiny.jsonl", tokenizer=name)
    short = ("--set", "server.rounds=2", "--out", "run")
    done = run_cli("train", tiny_recipe, *short, "--json")
    assert done.code == 0, done.stderr
    assert [p["prompt"] for p in done.json["predictions"]] == ["the cat"]
    again = run_cli("train", "run/recipe.toml", "--out", "run", "--resume", "--json")
    assert again.code == 0 and again.json["params_sha256"] == done.json["params_sha256"]
    found = run_cli("evaluate", "run", "--json")
    assert found.code == 0 and found.json["perplexity"] == done.json["perplexity"]

    # A changed file makes another store, and the run says so.
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "normalizer": {"type": "Lowercase"}}))
    refused(run_cli("evaluate", "run"), "was begun on another text")
    told["model"]["vocab"]["zzz"] = 999
    file.write_text(json.dumps(told))
    refused(run_cli("evaluate", "run"), "data.vocabulary = ", "which decides it: 1000")


def test_another_end_of_line_can_be_named(run_cli, tiny_text, tmp_path):
    file = others.saved(others.like_bert(), tmp_path / "bert")
    asked = ("prepare", tiny_text, "--tokenizer", file, "--out")
    refused(run_cli(*asked, "store"), "does not say which token ends a line", "--eos TOKEN")
    made = run_cli(*asked, "store", "--bos", "[CLS]", "--eos", "[SEP]", "--json")
    assert made.code == 0, made.stderr
    special = made.json["special_tokens"]
    assert (special["bos"], special["eos"], special["oov"]) == (2, 3, 1)
    like = run_cli("prepare", tiny_text, "--out", "other", "--like", "store", "--json")
    assert like.code == 0, like.stderr
    for name in ("special_tokens", "tokenizer_sha256", "vocabulary", "clients_sha256", "settings"):
        assert like.json[name] == made.json[name], name


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options, words",
    [
        (("--vocabulary", 300), "--vocabulary = 300: expected nothing beside --tokenizer"),
        (("--lowercase",), "--lowercase = True: expected nothing beside --tokenizer"),
        (("--no-lowercase",), "--lowercase = False: expected nothing beside --tokenizer"),
        (("--eos", "zzz"), "has no token 'zzz'"),
    ],
)
def test_options_that_a_file_decides(run_cli, tiny_text, tmp_path, file, options, words):
    asked = ("prepare", tiny_text, "--out", "store", "--tokenizer", file)
    refused(run_cli(*asked, *options), words)
    assert not (tmp_path / "store").exists()


def test_options_of_a_file_without_one(run_cli, tiny_text):
    asked = ("prepare", tiny_text, "--out", "store")
    refused(run_cli(*asked, "--eos", "</s>"), "--eos = '</s>': expected nothing without")
    refused(run_cli(*asked, "--tokenizer", "gpt2"), "data.tokenizer = 'gpt2'", "tokenizer.json'")
    refused(run_cli(*asked, "--tokenizer", "file"), "data.tokenizer = 'file'", "tokenizer.json'")
    refused(run_cli(*asked, "--tokenizer", "no.json"), "no.json is not readable")


@pytest.mark.parametrize("change", ["data.vocabulary=4000", "data.lowercase=true"])
def test_settings_that_a_file_decides(run_cli, tiny_recipe, file, change):
    stored(tiny_recipe, source="tiny.jsonl", tokenizer=str(file))
    done = run_cli("train", tiny_recipe, "--set", change)
    refused(done, change.partition("=")[0], "expected nothing beside data.tokenizer", "Leave")


def test_a_store_does_not_take_a_file_beside_it(run_cli, tiny_recipe, tiny_text, file):
    assert run_cli("prepare", tiny_text, "--out", "store", "--tokenizer", file).code == 0
    stored(tiny_recipe, store="store", tokenizer=str(file))
    refused(run_cli("train", tiny_recipe), "data.tokenizer = ", "was made with 'file'", "Leave")


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", others.BROKEN)
def test_what_is_no_tokenizer(run_cli, tiny_text, tmp_path, case, capfd):
    content, words = others.BROKEN[case]
    (tmp_path / "tokenizer.json").write_bytes(content)
    asked = ("prepare", tiny_text, "--out", "store", "--tokenizer", "tokenizer.json")
    refused(run_cli(*asked), "tokenizer.json", words)
    assert capfd.readouterr().err == "" and not (tmp_path / "store").exists()


def test_nodes_are_not_told_where_the_file_is(file):
    asked = parse({"data": {"source": "sotu", "tokenizer": str(file)}})
    told = redacted(asked)
    assert str(file.parent) not in told and parse(tomllib.loads(told)).data.tokenizer == "file"
