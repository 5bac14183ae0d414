"""A federation makes its own tokenizer: noisy words of nodes, joined, carried by kits."""

import json
import shutil
import stat

import pytest

from fedlm.core.errors import CorpusError
from fedlm.corpus.store import LEDGER, Store
from fedlm.deploy.guard import store_releases
from fedlm.deploy.word_counts import join_words
from fedlm.privacy.ledger import Ledger
from fedlm.recipe.parts import tokenizer_store
from fedlm.recipe.settings import parse

LANGUAGES = {
    "english": "the cat sat on the mat\nand the dog ran home\n",
    "norsk": "katten satt på matten\nog hunden løp hjem\n",
}
BUDGET = ("--epsilon", "40", "--delta", "0.001", "--words", "12", "--validation", "0")


@pytest.fixture(scope="module")
def made(tmp_path_factory, run_in):
    """The documented commands, one after the other."""
    folder = tmp_path_factory.mktemp("words")
    for name, text in LANGUAGES.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number in range(30):
                own = f"secret{name}{number} " if number == 3 else ""
                file.write(json.dumps({"client": f"{name}-{number}", "text": own + text * 2}))
                file.write("\n")
        told = run_in(folder, "node", "words", f"{name}.jsonl", "--out", f"{name}-words", *BUDGET)
        assert told["words"] >= 5
    files = [f"{name}-words/words.json" for name in LANGUAGES]
    run_in(folder, "federation", "tokenizer", *files, "--out", "tokenizer", "--vocabulary", "400")
    start = ("federation", "init", "fed", "--host", "127.0.0.1", "--nodes", "english,norsk")
    run_in(folder, *start, "--tokenizer", "tokenizer/tokenizer.json")
    for name in LANGUAGES:
        like = ("--like", f"fed/nodes/{name}/tokenizer/tokenizer.json", "--validation", "0.2")
        words = ("--words", f"{name}-words")
        run_in(folder, "prepare", f"{name}.jsonl", "--out", f"{name}-store", *like, *words)
    return folder


@pytest.fixture(scope="module")
def run_in():
    from tests.conftest import call

    def run(folder, *args):
        done = call(folder, *args, "--json")
        assert done.code == 0, done.stderr
        return done.json

    return run


def test_both_languages_are_in_the_tokenizer_and_no_secret(made):
    tokenizer = Store(made / "english-store").tokenizer.library
    pieces = set(tokenizer.get_vocab())
    assert {"Ġcat", "Ġhunden"} <= pieces
    for name in LANGUAGES:
        text = (made / f"{name}-words" / "words.json").read_text()
        assert "secret" not in text
    assert not any("secret" in piece for piece in pieces)


def test_nodes_and_server_agree_on_tokens_without_a_word_between_them(made):
    data = parse({"data": {"tokenizer": str(made / "fed" / "tokenizer" / "tokenizer.json")}}).data
    server = tokenizer_store(data, made / "cache")
    assert len(server) == 0
    stores = [Store(made / f"{name}-store") for name in LANGUAGES]
    assert {store.tokens_sha256 for store in (*stores, server)} == {server.tokens_sha256}


def test_what_the_words_cost_is_in_the_store_and_counts_at_the_node(made):
    for name in LANGUAGES:
        store = Store(made / f"{name}-store")
        origin = store.manifest["tokenizer_from"]
        assert (origin["kind"], origin["epsilon"], origin["nodes"]) == ("private", 40.0, 2)
        own = made / f"{name}-words" / LEDGER
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
        assert Ledger(store.path / LEDGER).entries() == Ledger(own).entries()
        (release,) = store_releases(store.path)
        assert release.noise_multiplier == origin["noise_multiplier"]


def test_attempts_in_which_no_word_passed_count_at_the_node_too(made, tmp_path):
    store = Store(shutil.copytree(made / f"{next(iter(LANGUAGES))}-store", tmp_path / "store"))
    (tried,) = store_releases(store.path)
    for name in ("1", "2"):
        (store.path / f"ledger-{name}.jsonl").write_bytes((store.path / LEDGER).read_bytes())
    assert store_releases(store.path) == (tried,) * 3


def test_another_tokenizer_does_not_take_over_the_origin(made, tmp_path):
    for file in (made / "tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    data = parse({"data": {"tokenizer": str(tokenizer)}}).data
    with pytest.raises(CorpusError, match="does not say where"):
        tokenizer_store(data, tmp_path / "cache")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"kind": "bytes"},
        {"words": [["a", "1"]]},
        {"words": [["a", float("nan")]]},
        {"words": [["\x1b[2J", 1.0]]},
        {"words": [["", 1.0]]},
        {"words": [["a" * 5000, 1.0]]},
        {"origin": {}},
        {"more": 1},
    ],
)
def test_words_that_were_tampered_with_are_refused(made, tmp_path, change):
    told = json.loads((made / "english-words" / "words.json").read_text())
    (tmp_path / "words.json").write_text(json.dumps({**told, **change}))
    with pytest.raises(CorpusError, match=r"not what fedlm node words writes"):
        join_words([tmp_path / "words.json"], tmp_path / "out", 300)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "9" * 5000, "\xff"])
def test_any_file_in_place_of_words_is_refused(tmp_path, text):
    (tmp_path / "words.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorpusError, match=r"not what fedlm node words writes"):
        join_words([tmp_path / "words.json"], tmp_path / "out", 300)


def test_the_text_may_lie_in_a_field_of_another_name(run_in, tmp_path):
    lines = [json.dumps({"client": f"c{n}", "body": LANGUAGES["english"] * 2}) for n in range(30)]
    (tmp_path / "letters.jsonl").write_text("\n".join(lines))
    field = ("--text-field", "body")
    told = run_in(tmp_path, "node", "words", "letters.jsonl", "--out", "words", *BUDGET, *field)
    assert told["words"] >= 5
