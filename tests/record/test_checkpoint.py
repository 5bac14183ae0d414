"""A checkpoint is whole or not there; a damaged one is passed over, and that is said."""

import math
import os
import stat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlm.core import tree
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.record import checkpoint


class Inner(eqx.Module):
    weight: jax.Array
    bias: jax.Array


class Outer(eqx.Module):
    cells: tuple[Inner, ...]
    memory: dict[str, jax.Array]
    round: jax.Array
    name: str = eqx.field(static=True, default="outer")


def state_of(number=0):
    rng = np.random.default_rng(number)
    cells = tuple(
        Inner(jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), jnp.zeros(n)) for n in (2, 0)
    )
    memory = {"count": jnp.int32(number), "odd": jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-45])}
    return Outer(cells, memory, jnp.int32(number))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert tree.sha256(a) == tree.sha256(b)  # names, shapes, types and bytes


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of rounds 0, 2 and 4."""
    for number in (0, 2, 4):
        checkpoint.save(tmp_path, number, state_of(number))
    return tmp_path


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def newest(folder, like=None):
    said = []
    found = checkpoint.load_newest(folder, like or state_of(), said.append)
    return None if found is None else found.state, said


def test_a_nested_module_comes_back_to_the_byte(folder):
    found, said = newest(folder)
    same(found, state_of(4))
    assert found.round.shape == () and said == []


def test_shapes_are_enough_to_load_into(folder):
    found, _ = newest(folder, eqx.filter_eval_shape(state_of))
    same(found, state_of(4))


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, min_side=0), elements=st.floats(width=32)),
    hnp.arrays(np.int32, hnp.array_shapes(min_dims=0, min_side=0)),
)
def test_any_float32_and_int32_leaf_survives(floats, integers):
    state = {"floats": floats, "deep": [integers, floats.T]}
    same(checkpoint.from_bytes(checkpoint.to_bytes(state), state, "it"), state)


def test_a_folder_without_checkpoints_gives_none(tmp_path):
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "missing") == (None, [])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_few_are_kept(tmp_path, keep):
    for number in range(6):
        checkpoint.save(tmp_path, number, state_of(number), keep)
    assert names(tmp_path) == [f"round-{n:06d}.safetensors" for n in range(6 - keep, 6)]


def test_rounds_with_a_digit_more_are_newer(tmp_path):
    for number in (999_999, 1_000_000):
        checkpoint.save(tmp_path, number, state_of(number), keep=1)
    assert names(tmp_path) == ["round-1000000.safetensors"]


def positions(size):
    """Bytes of the length, the header and the data."""
    return sorted({*range(24), *range(24, size, 37), size - 1})


def test_a_truncated_checkpoint_is_passed_over_and_that_is_said(folder):
    path = folder / "round-000004.safetensors"
    whole = path.read_bytes()
    for end in positions(len(whole)):
        path.write_bytes(whole[:end])
        found, said = newest(folder)
        same(found, state_of(2))
        assert len(said) == 1 and "round-000004" in said[0] and "is damaged" in said[0]
        assert "Going back to the checkpoint before it" in said[0]


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_anywhere_is_noticed(folder, mask):
    path = folder / "round-000004.safetensors"
    whole = path.read_bytes()
    for at in positions(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        found, said = newest(folder)
        same(found, state_of(2))
        assert len(said) == 1


@given(data=st.binary(max_size=200))
def test_no_bytes_from_anywhere_are_taken_for_a_checkpoint(data):
    with pytest.raises(RecordError, match=r"^it is damaged"):
        checkpoint.from_bytes(data, state_of(), "it")


def test_a_checkpoint_that_cannot_be_read_is_passed_over(folder):
    (folder / "round-000006.safetensors").mkdir()
    found, said = newest(folder)
    same(found, state_of(4))
    assert "is not readable" in said[0]


def test_when_all_are_damaged_it_is_an_error(folder):
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match=r"none of the 3 checkpoints in .* is whole"):
        newest(folder)


def other(change):
    return eqx.tree_at(lambda s: s.memory, state_of(), change)


@pytest.mark.parametrize(
    "like, words",
    [
        (other({"odd": jnp.zeros(4)}), r"has an unknown leaf 'memory\.count'"),
        (
            other({"count": jnp.int32(0), "odd": jnp.zeros(4), "z": jnp.zeros(1)}),
            r"lacks leaf 'memory\.z'",
        ),
        (
            other({"count": jnp.int32(0), "odd": jnp.zeros(5)}),
            r"leaf 'memory\.odd' is float32\[4\], this recipe wants float32\[5\]",
        ),
        (
            other({"count": jnp.float32(0), "odd": jnp.zeros(4)}),
            r"leaf 'memory\.count' is int32\[\], this recipe wants float32\[\]",
        ),
    ],
)
def test_a_tree_of_another_structure_is_refused_by_its_leaf(folder, like, words):
    with pytest.raises(RecordError, match=words):
        newest(folder, like)


def test_damage_is_told_from_another_tree_whatever_the_folder_is_called(tmp_path):
    folder = tmp_path / "another recipe"
    for number in (0, 1):
        path = checkpoint.save(folder, number, state_of(number))
    path.write_bytes(path.read_bytes()[:-1])
    found, said = newest(folder)
    same(found, state_of(0))
    assert len(said) == 1


def full_disk(descriptor):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_checkpoints_before_whole(folder, monkeypatch):
    before = {p: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RecordError) as caught:
        checkpoint.save(folder, 6, state_of(6))
    assert "round-000006.safetensors could not be written: No space left" in str(caught.value)
    assert "repeat with --resume" in str(caught.value)
    assert {p: p.read_bytes() for p in folder.iterdir()} == before  # and no .part is left
    monkeypatch.undo()
    same(newest(folder)[0], state_of(4))


def test_overwriting_a_checkpoint_fails_without_harm_to_it(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RecordError):
        checkpoint.save(folder, 4, state_of(5))
    monkeypatch.undo()
    same(newest(folder)[0], state_of(4))


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_folder_that_cannot_be_made_is_an_error_with_a_sentence(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match=r"could not be written: (Not a directory|File exists)"):
        checkpoint.save(tmp_path / below, 0, state_of())
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_an_error_with_a_sentence(folder):
    folder.chmod(0o500)
    with pytest.raises(RecordError, match="could not be written: Permission denied"):
        checkpoint.save(folder, 6, state_of(6))
    folder.chmod(0o700)
    same(newest(folder)[0], state_of(4))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keep=st.integers(1, 4), rounds=st.lists(st.integers(0, 20), min_size=1, unique=True))
def test_the_highest_round_is_what_is_loaded(tmp_path_factory, keep, rounds):
    folder = tmp_path_factory.mktemp("rounds")
    for number in rounds:
        checkpoint.save(folder, number, {"round": jnp.int32(number)}, keep)
    found, _ = newest(folder, {"round": jnp.int32(0)})
    assert int(found["round"]) == max(rounds)
    assert len(names(folder)) == min(keep, len(rounds))


# ---- who may read ------------------------------------------------------------------------------


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_checkpoint_is_its_owners_alone(tmp_path, open_umask, monkeypatch):
    """It holds the secret from which noise can be made again; also while it is written."""
    folder, during = tmp_path / "run" / "checkpoints", []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda part, path: (during.append(mode(part)), replace(part, path))
    )
    path = checkpoint.save(folder, 0, state_of(0))
    assert (mode(path), mode(folder), during) == (0o600, 0o700, [0o600])
    assert mode(folder.parent) == 0o777
    folder.chmod(0o755)  # as an older version left it
    path.chmod(0o644)
    checkpoint.save(folder, 0, state_of(0))
    assert (mode(path), mode(folder)) == (0o600, 0o700)


def test_what_is_not_private_is_as_open_as_the_user_wants(tmp_path, open_umask):
    write_atomically(tmp_path / "page" / "report.html", b"x")
    assert mode(tmp_path / "page" / "report.html") == 0o666
    assert mode(tmp_path / "page") == 0o777


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("round-000000.safetensors", "round-000000.safetensors.part"):
        (folder / name).symlink_to(precious)
    checkpoint.save(folder, 0, state_of(0))
    assert precious.read_bytes() == b"precious"
    assert not (folder / "round-000000.safetensors").is_symlink()


def test_leftovers_of_killed_writes_are_swept(tmp_path):
    (tmp_path / "round-000003.safetensors.0123.part").write_bytes(b"half")
    (tmp_path / "kept").write_bytes(b"x")
    checkpoint.sweep(tmp_path)
    checkpoint.sweep(tmp_path / "missing")
    assert names(tmp_path) == ["kept"]


def test_facts_come_back_with_the_state(tmp_path):
    checkpoint.save(tmp_path, 3, state_of(3), facts={"told": {"loss": math.inf}})
    found = checkpoint.load_newest(tmp_path, state_of(), print)
    assert found is not None and found.facts == {"told": {"loss": math.inf}, "round": 3}


def test_a_leaf_that_is_empty_at_first_may_have_grown():
    """Such as the history of a large population, which has an entry per client who came."""
    like = {"members": np.zeros(0, np.int32), "weights": np.zeros(2, np.float32)}
    grown = {**like, "members": np.array([3, 5], np.int32)}
    found = checkpoint.from_bytes(checkpoint.to_bytes(grown), like, "it")
    assert found["members"].tolist() == [3, 5]
    for wrong in (np.zeros((2, 2), np.int32), np.array([3, 5], np.int64)):
        with pytest.raises(RecordError, match="members"):
            checkpoint.from_bytes(checkpoint.to_bytes({**like, "members": wrong}), like, "it")
    with pytest.raises(RecordError, match="weights"):
        longer = {**like, "weights": np.zeros(3, np.float32)}
        checkpoint.from_bytes(checkpoint.to_bytes(longer), like, "it")
