"""Text as people have it: numbered clients, columns of any name, pictures, copies."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedlm.core.errors import ConfigError, CorpusError
from fedlm.corpus import sources
from fedlm.corpus.sources import Document
from fedlm.corpus.store import StoreSettings, gather_clients, write
from tests.cli.test_bad_input import refused

NAMES = {"user_field": "author", "text_field": "body", "groups_field": "land"}


def one(path, fields):
    return list(sources.read(path, **fields))


@pytest.mark.parametrize("fields", [{}, NAMES])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_columns_have_any_name_and_clients_may_be_numbers(tmp_path, ending, fields):
    client, text, groups = fields.values() if fields else ("client", "text", "groups")
    path = tmp_path / f"t.{ending}"
    rows = {client: [7, 12], text: ["one", "two"], groups: ["north", "south > town"]}
    if ending == "jsonl":
        pairs = zip(rows[client], rows[text], [["north"], ["south", "town"]], strict=True)
        lines = [json.dumps(dict(zip(rows, pair, strict=True))) for pair in pairs]
        path.write_text("\n".join(lines))
    elif ending == "csv":
        path.write_text(f"{client},{text},{groups}\n7,one,north\n12,two,south > town\n")
    else:
        pq.write_table(pa.table(rows), path)
    assert one(path, fields) == [
        Document("7", ("north",), "one"),
        Document("12", ("south", "town"), "two"),
    ]


@pytest.mark.parametrize("client", [1.5, True, None, [1]])
def test_what_is_no_name_is_refused(tmp_path, client):
    (tmp_path / "t.jsonl").write_text(json.dumps({"client": client, "text": "a"}))
    with pytest.raises(CorpusError, match="expected a string in 'client'"):
        one(tmp_path / "t.jsonl", {})


def test_a_missing_column_is_named_with_the_options_for_others(tmp_path):
    (tmp_path / "t.csv").write_text("author,body\na,b\n")
    with pytest.raises(CorpusError, match=r"no column 'client'.*author, body.*--text-field"):
        one(tmp_path / "t.csv", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"data\.text_field = 'body': expected nothing for"):
        one(tmp_path / "folder", {"text_field": "body"})


def test_pictures_in_a_folder_are_left_out_and_told(tmp_path):
    (tmp_path / "ann.txt").write_text("hello")
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "bob" / "letter.txt").write_text("dear")
    said = []
    assert [d.client for d in sources.read(tmp_path, say=said.append)] == ["ann", "bob"]
    assert len(said) == 1 and "1 files" in said[0] and "bob/cat.png" in said[0]
    (tmp_path / "latin.txt").write_bytes("köln".encode("latin-1"))  # text, and not to be lost
    with pytest.raises(CorpusError, match="not valid UTF-8"):
        list(sources.read(tmp_path))


def test_joined_and_copied_clients_are_told():
    said = []
    twice = [Document("a", (), "x"), Document("a", (), "y"), Document("b", (), "z")]
    gather_clients([*twice, Document("c", (), "z")], said.append)
    assert any("1 clients have several documents" in line for line in said)
    assert any("1 clients have exactly the text of another" in line for line in said)
    said.clear()
    gather_clients(twice[1:], said.append)
    assert said == []


def test_a_vocabulary_smaller_than_asked_is_told(tmp_path):
    letters, said = [Document("a", (), "one two"), Document("b", (), "one three")], []
    few = StoreSettings(vocabulary=6, test_clients=0, validation=0)
    write(letters, tmp_path / "s", few, vocabulary=None, say=said.append)
    assert said == []
    many = StoreSettings(vocabulary=50, test_clients=0, validation=0)
    write(letters, tmp_path / "t", many, vocabulary=None, say=said.append)
    assert said == ["The vocabulary has 7 entries, not 50: the text gives no more."]


def test_options_that_contradict_like_are_refused(run_cli, tiny_text):
    asked = ("prepare", tiny_text, "--vocabulary", 15)
    assert run_cli(*asked, "--out", "one").code == 0
    like = ("prepare", tiny_text, "--like", "one", "--out", "two")
    refused(run_cli(*like, "--vocabulary", 20), "--vocabulary = 20: expected 15 or nothing")
    refused(run_cli(*like, "--tokenizer", "bpe"), "--tokenizer = 'bpe': expected 'words'")
    refused(run_cli(*like, "--no-lowercase"), "--no-lowercase = False: expected True")
    same = run_cli(*like, "--vocabulary", 15, "--tokenizer", "words", "--lowercase")
    assert same.code == 0, same.stderr


def test_parquet_whose_text_is_not_utf8_is_refused(tmp_path):
    """Found by `make fuzz`."""
    column = pa.array([b"a\xe0"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"client": column, "text": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(CorpusError, match="not a whole Parquet file"):
        one(tmp_path / "t.parquet", {})
