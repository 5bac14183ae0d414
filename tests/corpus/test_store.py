import itertools
import json
import os
import random
import resource
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fedlm.core.errors import CorpusError
from fedlm.corpus import store as stores
from fedlm.corpus.sources import Document
from fedlm.corpus.split import cut_tail, held_out_clients
from fedlm.corpus.store import Store, StoreSettings, vocabulary_like, write, write_tokens
from fedlm.corpus.tokenizer import OWN, encode, fit
from fedlm.corpus.vocabulary import COUNTED, Vocabulary

SETTINGS = StoreSettings(test_clients=0.25, validation=0.2, split_seed=1)
LETTERS = [
    Document(f"c{i}", ("land", f"town{i % 3}"), f"first{i} and so on\n" * 8 + f"last{i} and so on")
    for i in range(12)
]
TEST = held_out_clients([d.client for d in LETTERS], 0.25, 1)
TOKENIZER = Vocabulary(fit(["a b c"], "words", 50, lowercase=True), COUNTED)


def row(number, train=(4, 5, 2), held=(6, 2), test=False):
    return {
        "client": f"c{number}",
        "groups": [],
        "train": np.array(train, np.uint16),
        "held": np.array(held, np.uint16),
        "test": test,
        "held_bytes": 1,
    }


@pytest.fixture
def store(tmp_path):
    return write(LETTERS, tmp_path / "store", SETTINGS)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("tokenizer", ["words", "bpe", "bytes"])
def test_the_same_text_gives_the_same_bytes(tokenizer, tmp_path):
    settings = StoreSettings(tokenizer=tokenizer, vocabulary=300)
    for name in ("one", "two"):
        write(iter(LETTERS), tmp_path / name, settings)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert set(contents(tmp_path / "one")) == {"clients.arrow", "tokenizer.json", "store.json"}


def test_every_client_keeps_its_name_groups_and_text_in_two_parts(store):
    table = pa.ipc.open_file(store.path / "clients.arrow").read_all().to_pydict()
    assert table["test"] == [d.client in TEST for d in LETTERS]
    for number, letter in enumerate(LETTERS):
        train, held = cut_tail(letter.text, 0.2)
        if letter.client in TEST:
            train, held = "", letter.text
        assert (store.client(number), store.groups(number)) == (letter.client, letter.groups)
        for part, text in ((store.train(number), train), (store.held(number), held)):
            np.testing.assert_array_equal(part, encode(store.tokenizer, text, np.uint16))
        assert table["held_bytes"][number] == len(held.encode())
    test = {store.client(n) for n in store.test_clients}
    assert test == TEST and len(test) == 3
    assert sorted([*store.training_clients, *store.test_clients]) == list(range(12))


def test_the_manifest_counts_what_is_there(store):
    m, numbers = store.manifest, range(len(store))
    assert (m["clients"], m["train_clients"], m["test_clients"]) == (12, 9, 3)
    assert m["train_tokens"] == sum(len(store.train(n)) for n in numbers)
    assert m["held_tokens"] == sum(len(store.held(n)) for n in numbers)
    assert store.vocabulary == store.tokenizer.library.get_vocab_size()
    assert store.special == store.tokenizer.special == OWN
    assert store.settings == SETTINGS


def test_the_vocabulary_knows_training_text_only(store):
    known = store.tokenizer.library.get_vocab()
    for number, letter in enumerate(LETTERS):
        trains = letter.client not in TEST
        assert (f"first{number}" in known) == trains
        assert f"last{number}" not in known
        assert OWN.oov in store.held(number) and OWN.oov not in store.train(number)


def test_a_large_vocabulary_takes_wider_tokens(tmp_path):
    text = "\n".join(" ".join(f"w{i * 100 + j}" for j in range(100)) for i in range(700))
    settings = StoreSettings(vocabulary=100_000, validation=0)
    wide = write([Document("a", (), text)], tmp_path / "s", settings)
    assert wide.train(0).dtype == np.uint32
    assert wide.train(0).max() == wide.vocabulary - 1


def test_reading_copies_nothing(store):
    before = pa.total_allocated_bytes()
    store = Store(store.path)
    once, twice = store.train(0), store.train(0)
    assert not once.flags.owndata and not once.flags.writeable
    assert np.shares_memory(once, twice)
    assert pa.total_allocated_bytes() == before


def test_the_size_of_a_batch_on_disk_does_not_show(store, tmp_path, monkeypatch):
    """Long clients close a batch early: offsets are 32 bits wide."""
    monkeypatch.setattr(stores, "TOKENS_A_BATCH", 100)
    other = write(LETTERS, tmp_path / "other", SETTINGS)
    assert pa.ipc.open_file(other.path / "clients.arrow").num_record_batches > 3
    for n in range(len(store)):
        assert other.client(n) == store.client(n)
        np.testing.assert_array_equal(other.train(n), store.train(n))
        np.testing.assert_array_equal(other.held(n), store.held(n))
    np.testing.assert_array_equal(other.training_clients, store.training_clients)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CorpusError])
def test_a_store_is_whole_or_not_there(error, tmp_path):
    def rows():
        yield from map(row, range(5000))  # more than a batch
        assert list(tmp_path.iterdir()), "half a store is being written"
        raise error("half way")

    with pytest.raises(error, match="half way"):
        write_tokens(rows(), tmp_path / "out", TOKENIZER, SETTINGS, np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_refused_and_left_alone(store):
    before = contents(store.path)
    with pytest.raises(CorpusError, match="exists already"):
        write(LETTERS[:3], store.path, SETTINGS)
    assert contents(store.path) == before


def test_a_store_is_as_open_to_others_as_the_umask_says(tmp_path):
    before = os.umask(0o077)
    try:
        made = write(LETTERS, tmp_path / "store", SETTINGS)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o077 for p in (made.path, *made.path.iterdir())} == {0}


def test_a_place_that_cannot_hold_a_store_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="could not be written"):
        write(LETTERS, tmp_path / "file" / "store", SETTINGS)


def test_pieces_of_a_client_are_joined_line_by_line(tmp_path):
    pieces = [Document("a", ("g",), "b c\nd"), Document("z", (), "e"), Document("a", (), "f g")]
    settings = StoreSettings(test_clients=0, validation=0)
    joined = write(pieces, tmp_path / "s", settings)
    assert [(joined.client(n), joined.groups(n)) for n in range(2)] == [("a", ("g",)), ("z", ())]
    expected = encode(joined.tokenizer, "b c\nd\nf g", np.uint16)
    np.testing.assert_array_equal(joined.train(0), expected)


def test_clients_without_text_are_left_out(tmp_path):
    blank = [Document("blank", (), " \n"), Document("none", (), "")]
    assert len(write([*blank, *LETTERS], tmp_path / "s", SETTINGS)) == len(LETTERS)
    with pytest.raises(CorpusError, match="none of the 2 clients"):
        write(blank, tmp_path / "t", SETTINGS)
    with pytest.raises(CorpusError, match="no client"):
        write([], tmp_path / "u", SETTINGS)


def test_a_store_without_training_text_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"data\.test_clients"):
        write_tokens([row(0, train=(), test=True)], tmp_path / "s", TOKENIZER, SETTINGS, np.uint16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 3}', '{"format": 99}', "\xff"])
def test_a_damaged_manifest_is_refused(text, store):
    (store.path / "store.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorpusError, match=r"store\.json is damaged|has format 99"):
        Store(store.path)


@pytest.mark.parametrize(
    "damage",
    [
        None,
        {},
        {"bos": 1, "eos": 2, "oov": 3},
        {"bos": 1, "eos": 2, "oov": 3, "reserved": [0, 10_000]},
        {"bos": -1, "eos": 2, "oov": 3, "reserved": [0]},
        {"bos": 1, "eos": "2", "oov": 3, "reserved": [0]},
        {"bos": 1, "eos": 2, "oov": 3, "reserved": [0], "pad": 0},
    ],
)
def test_damaged_special_tokens_are_refused(damage, store):
    manifest = {**store.manifest, "special_tokens": damage}
    (store.path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"store\.json is damaged \(special_tokens\)"):
        Store(store.path)


@pytest.mark.parametrize(
    "damage", [None, [], {}, {"kind": "guessed"}, {"kind": "like"}, {"kind": "like", "of": {}}]
)
def test_a_damaged_origin_of_the_tokenizer_is_refused(damage, store):
    manifest = {**store.manifest, "tokenizer_from": damage}
    (store.path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"store\.json is damaged \(tokenizer_from\)"):
        Store(store.path)


def test_a_store_tells_where_its_tokenizer_came_from(store, tmp_path):
    assert store.manifest["tokenizer_from"] == {"kind": "counted"}
    letters = write(LETTERS, tmp_path / "b", StoreSettings(tokenizer="bytes"))
    assert letters.manifest["tokenizer_from"] == {"kind": "public"}
    other = write(LETTERS[:4], tmp_path / "o", SETTINGS, vocabulary=vocabulary_like(store))
    origin = {"kind": "like", "store": "store", "of": {"kind": "counted"}}
    assert other.manifest["tokenizer_from"] == origin
    third = write(LETTERS[:4], tmp_path / "t", SETTINGS, vocabulary=vocabulary_like(other))
    assert third.manifest["tokenizer_from"] == origin
    assert not store.ledgers and not third.ledgers


def test_a_store_of_an_older_format_is_to_be_prepared_again(store):
    manifest = {**store.manifest, "format": 1}
    del manifest["special_tokens"]
    (store.path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"has format 1: this fedlm reads 3\. Prepare it again"):
        Store(store.path)


def test_damaged_clients_are_refused(store):
    file = store.path / "clients.arrow"
    whole = file.read_bytes()
    for size in (0, 8, len(whole) // 2, len(whole) - 1, None):
        file.unlink()  # the old bytes are still mapped
        if size is not None:
            file.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=r"clients\.arrow is not readable"):
            Store(store.path)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_store_of_compressed_batches_is_refused_before_they_are_inflated(store, codec):
    """A file of 34 kB made the process a gigabyte larger by being opened."""
    file = store.path / "clients.arrow"
    table = pa.ipc.open_file(file).read_all()
    file.unlink()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(str(file), table.schema, options=options) as writer:
        writer.write_table(table)
    before = pa.total_allocated_bytes()
    with pytest.raises(CorpusError, match="a compressed batch, which no fedlm writes"):
        Store(store.path)
    assert pa.total_allocated_bytes() == before


def test_files_of_another_store_are_refused(store, tmp_path):
    other = write(LETTERS[:5], tmp_path / "other", SETTINGS)
    shutil.copy(other.path / "tokenizer.json", store.path)
    with pytest.raises(CorpusError, match=r"tokenizer\.json is not the one"):
        _ = Store(store.path).tokenizer
    (store.path / "clients.arrow").unlink()
    shutil.copy(other.path / "clients.arrow", store.path)
    with pytest.raises(CorpusError, match=r"holds 5 clients, store\.json says 12"):
        Store(store.path)
    with pytest.raises(CorpusError, match="is not a store"):
        Store(tmp_path)


def test_verifying_notices_any_flipped_byte(store):
    store.verify()
    whole = (store.path / "clients.arrow").read_bytes()
    for at in range(0, len(whole), len(whole) // 7):
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        (store.path / "clients.arrow").write_bytes(flipped)
        with pytest.raises(CorpusError, match="not what was written"):
            store.verify()


def resident_megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_opening_does_not_read_the_tokens_of_342_477_clients(tmp_path):
    clients = 342_477  # as many as Stack Overflow has
    tokens = np.resize(np.array([4, 5, 6], np.uint16), 128)
    rows = (row(n, train=tokens) for n in range(clients))
    write_tokens(rows, tmp_path / "s", TOKENIZER, SETTINGS, np.uint16)
    before = resident_megabytes()
    store = Store(tmp_path / "s")
    assert len(store.training_clients) == len(store) == clients
    assert store.client(clients - 1) == f"c{clients - 1}"
    assert resident_megabytes() - before < 50
    for number in range(0, clients, 16):  # one client per page: now the tokens are read
        store.train(number).sum()
    assert resident_megabytes() - before > 50


def flipped(raw, seed, count):
    rng = random.Random(f"{seed} {count}")
    found = bytearray(raw)
    for _ in range(count):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def test_a_store_of_flipped_bits_is_read_or_refused_and_never_crashes(store):
    """Offsets that point outside of the file ended the process with signal 11."""
    file = store.path / "clients.arrow"
    whole, ends = file.read_bytes(), Counter()
    for seed, count in itertools.product(range(25), (1, 30, 300)):
        file.unlink()  # the old bytes are still mapped
        file.write_bytes(flipped(whole, seed, count))
        try:
            damaged = Store(store.path)
            for n in range(len(damaged)):
                tokens = [*damaged.train(n), *damaged.held(n)]
                assert max(tokens) < damaged.vocabulary
                _ = damaged.client(n), damaged.groups(n), damaged.held_bytes(n)
            _ = damaged.training_clients, damaged.test_clients
        except CorpusError:
            ends["refused"] += 1
            continue
        ends["read"] += 1
        with pytest.raises(CorpusError, match="not what was written"):
            damaged.verify()
    assert ends["refused"] >= 50 and ends["read"] > 0


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(store):
    file = store.path / "clients.arrow"
    tokens = store.train(int(store.training_clients[0])).tobytes()
    raw = file.read_bytes()
    at = raw.index(tokens)
    file.unlink()
    file.write_bytes(raw[:at] + b"\xff\xff" + raw[at + 2 :])
    with pytest.raises(CorpusError, match="has a token that is not in the vocabulary"):
        Store(store.path).train(int(store.training_clients[0]))


@pytest.mark.parametrize(
    "schema, columns",
    [
        ({"client": pa.string()}, {"client": ["a"] * 12}),
        ({"client": pa.int64(), "train": pa.float64()}, {"client": [1] * 12, "train": [0.5] * 12}),
    ],
)
def test_columns_of_another_file_are_refused(store, schema, columns):
    file = store.path / "clients.arrow"
    file.unlink()
    schema = pa.schema(schema)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    with pytest.raises(CorpusError, match="its columns are not those of a store"):
        Store(store.path)


@pytest.mark.parametrize(
    "name, value",
    [
        ("clients", "12"),
        ("clients", -1),
        ("clients", 10**400),
        ("vocabulary", 0),
        ("vocabulary", [30]),
        ("train_tokens", None),
        ("settings", []),
        ("settings", {"tokeniser": "words"}),
        ("settings", {"vocabulary": "many"}),
        ("tokenizer_sha256", "0"),
        ("clients_sha256", 7),
    ],
)
def test_a_manifest_with_a_wrong_type_is_refused_by_name(store, name, value):
    manifest = {**store.manifest, name: value}
    (store.path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"store\.json is damaged"):
        Store(store.path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}"])
def test_a_manifest_that_no_parser_likes_is_refused(store, text):
    (store.path / "store.json").write_text(text)
    with pytest.raises(CorpusError, match=r"store\.json is damaged"):
        Store(store.path)


def test_folders_of_killed_preparations_are_swept_and_living_ones_are_not(tmp_path):
    seen = []

    def rows():
        seen.extend(tmp_path.iterdir())
        yield row(0)
        # A second process prepares a store of the same name while this one is at work.
        write_tokens([row(0)], tmp_path / "out", TOKENIZER, SETTINGS, np.uint16)
        assert sorted(at_work()) == sorted(seen)

    def at_work():
        return [folder for folder in tmp_path.iterdir() if folder.name.startswith(".out")]

    killed, other = tmp_path / ".out-1234.unfinished", tmp_path / ".outer-1234.unfinished"
    for folder in (killed, other):
        folder.mkdir()
        (folder / "clients.arrow").write_bytes(b"half")
    with pytest.raises(CorpusError, match="could not be written"):
        write_tokens(rows(), tmp_path / "out", TOKENIZER, SETTINGS, np.uint16)
    assert killed not in seen and other in seen
    seen.remove(other)
    assert at_work() == [other], "the folder of another store"
    assert Store(tmp_path / "out")
