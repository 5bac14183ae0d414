"""Objects in files: whole or not there, shared, and gone with the last message that names them."""

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.object_store import NoObjectInStoreError

from fedlm.deploy.flower.store import TREE, FileStore


def content(kind, body, children=()):
    """An object as Flower writes it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


CHUNK = content("ArrayChunk", b"shared" * 1000)
ONE = content("Array", b"one", [get_object_id(CHUNK)])
TWO = content("Array", b"two", [get_object_id(CHUNK)])
NAMES = {raw: get_object_id(raw) for raw in (CHUNK, ONE, TWO)}


def tree(parent):
    return ObjectTree(object_id=NAMES[parent], children=[ObjectTree(object_id=NAMES[CHUNK])])


def full(folder, *parents):
    store = FileStore(folder / "objects")
    for run, parent in enumerate(parents):
        for name in store.preregister(run, tree(parent)):
            store.put(name, next(raw for raw in NAMES if NAMES[raw] == name))
    return store


def files(store):
    return {path.name for path in store.folder.iterdir()}


def test_an_object_that_two_messages_name_goes_with_the_last(tmp_path):
    store = full(tmp_path, ONE, TWO)
    assert store.preregister(1, tree(TWO)) == [] and len(store) == 3
    store.delete(NAMES[CHUNK])  # it is named
    store.delete(NAMES[ONE])
    assert files(store) == {NAMES[TWO], NAMES[TWO] + TREE, NAMES[CHUNK]}
    assert store.get(NAMES[CHUNK]) == CHUNK and store.get(NAMES[ONE]) is None
    store.delete(NAMES[TWO])
    assert files(store) == set() and len(store) == 0


def test_a_run_takes_its_messages_with_it(tmp_path):
    store = full(tmp_path, ONE, TWO)
    store.delete_objects_in_run(0)
    assert NAMES[ONE] not in store and store.get(NAMES[CHUNK]) == CHUNK
    store.delete_objects_in_run(1)
    assert files(store) == set()


def test_an_object_is_stored_under_its_own_name_and_only_if_it_was_announced(tmp_path):
    store = FileStore(tmp_path / "objects")
    with pytest.raises(NoObjectInStoreError):
        store.put(NAMES[CHUNK], CHUNK)
    with pytest.raises(NoObjectInStoreError):
        store.get_object_tree(NAMES[ONE])
    assert store.preregister(0, tree(ONE)) == [NAMES[CHUNK], NAMES[ONE]]
    with pytest.raises(ValueError, match="hash"):
        store.put(NAMES[CHUNK], ONE)
    assert store.get(NAMES[CHUNK]) == b"" and store.sizes([NAMES[CHUNK], "x"]) == {NAMES[CHUNK]: 0}
    no_object = b"no object"
    store.preregister(0, ObjectTree(object_id=get_object_id(no_object)))
    with pytest.raises(ValueError):
        store.put(get_object_id(no_object), no_object)
    store.put(NAMES[CHUNK], CHUNK)
    assert store.sizes([NAMES[CHUNK]]) == {NAMES[CHUNK]: len(CHUNK)}
    assert (store.folder / NAMES[CHUNK]).stat().st_mode & 0o777 == 0o600
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "hostile",
    [
        ObjectTree(object_id="../../etc/passwd"),
        ObjectTree(object_id=""),
        ObjectTree(object_id=NAMES[ONE]),  # known with a child
        ObjectTree(object_id=NAMES[TWO], children=[ObjectTree(object_id=NAMES[CHUNK])] * 2),
        ObjectTree(object_id=NAMES[TWO], children=[ObjectTree(object_id=NAMES[TWO])]),
        ObjectTree(object_id=NAMES[CHUNK], children=[ObjectTree(object_id=NAMES[TWO])]),
    ],
    ids=["path", "empty", "other children", "twice", "itself", "turned round"],
)
def test_a_tree_that_contradicts_is_refused_and_changes_nothing(hostile, tmp_path):
    store = full(tmp_path, ONE)
    before = files(store)
    with pytest.raises(ValueError):
        store.preregister(9, hostile)
    assert files(store) == before and len(store) == 2
    store.delete(NAMES[ONE])
    assert files(store) == set()


def test_messages_on_their_way_outlive_the_process(tmp_path):
    full(tmp_path, ONE)
    again = FileStore(tmp_path / "objects")
    assert again.get_object_tree(NAMES[ONE]) == tree(ONE)
    assert again.get(NAMES[CHUNK]) == CHUNK and again.get(NAMES[ONE]) == ONE
    again.delete_objects_in_run(0)
    assert files(again) == set()


@pytest.mark.parametrize("left", [CHUNK[:-1], b"", bytes(len(CHUNK))], ids=["cut", "empty", "zero"])
def test_a_file_that_a_crash_damaged_is_not_there(left, tmp_path):
    (full(tmp_path, ONE).folder / NAMES[CHUNK]).write_bytes(left)
    assert FileStore(tmp_path / "objects").get(NAMES[CHUNK]) in (None, b"")


@pytest.mark.parametrize("left", [b"", b"\xff" * 50, bytes(9)], ids=["empty", "garbage", "zero"])
def test_files_that_no_tree_names_are_removed(left, tmp_path):
    store = full(tmp_path, ONE)
    (store.folder / (NAMES[ONE] + TREE)).write_bytes(left)
    (store.folder / "unfinished.1234").write_bytes(b"x")
    again = FileStore(tmp_path / "objects")
    assert files(again) == set() and len(again) == 0
