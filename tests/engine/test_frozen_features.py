"""What frozen blocks give is computed once, kept on disk, and the same when it is read."""

import json
import os
import stat

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core import tree
from fedlm.core.errors import ConfigError, EngineError
from fedlm.core.types import PAD
from fedlm.engine.frozen_features import HEAD, FrozenFeatures
from fedlm.models import catalog
from fedlm.models.adapters import Adapters, adapt
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import adapter_beside
from fedlm.training import Watcher, train
from tests.laws.test_adapter_runs import LORA

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=8, hidden_size=12, layers=3, heads=2, key_heads=1
)
ROWS = {
    member: np.random.default_rng(member).integers(4, 31, (5 + member, 7)).astype(np.int16)
    for member in range(3)
}


def model(seed=0):
    made = catalog.make("llama", SIZE, jax.random.key(seed))
    return adapt(made, Adapters(rank=2, last_blocks=1), jax.random.key(1))


def features(folder, most_bytes=1 << 20, of=None):
    whole = of or model()
    return FrozenFeatures(lambda: whole.frozen, 8, ROWS.__getitem__, folder, most_bytes)


def files(folder):
    return sorted(folder.glob("*.features"))


def test_rows_are_computed_once_and_read_again(tmp_path):
    order = np.array([[0, 3], [4, PAD]])
    first = features(tmp_path)
    found = first.batches([(1, order)])[0]
    assert model().frozen_depth == 2 and first.computed == 3
    whole = jax.jit(lambda frozen, tokens: frozen.features(tokens))
    wanted = whole(model().frozen, ROWS[1][[0, 3, 4], :-1].astype(np.int32))
    np.testing.assert_allclose(found.reshape(4, 6, 8)[:3], wanted, rtol=1e-4, atol=1e-5)
    assert not found[1, 1].any()
    again = features(tmp_path)
    np.testing.assert_array_equal(again.batches([(1, order)])[0], found)
    assert again.computed == 0
    again.batches([(1, np.array([[0, 1]]))])[0]
    assert again.computed == 1
    (file,) = files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_the_folder_keeps_to_its_bound(tmp_path):
    record = 4 + 16 + 4 * 6 * 8
    bounded = features(tmp_path, HEAD.size + 2 * record + 5)
    for member in ROWS:
        bounded.batches([(member, np.arange(4)[None])])[0]
    assert sum(file.stat().st_size for file in files(tmp_path)) == HEAD.size + 2 * record
    again = features(tmp_path, HEAD.size + 2 * record + 5)
    again.batches([(0, np.arange(4)[None])])[0]
    again.batches([(1, np.arange(4)[None])])[0]
    assert again.computed == 2 + 4


def damage_a_number(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-7])


def exchange_two_rows(file):
    data, record = file.read_bytes(), 4 + 16 + 4 * 6 * 8
    first, second = (data[HEAD.size + i * record : HEAD.size + (i + 1) * record] for i in (0, 1))
    mixed = first[:20] + second[20:] + second[:20] + first[20:]
    file.write_bytes(data[: HEAD.size] + mixed + data[HEAD.size + 2 * record :])


def name_a_row_that_is_not_there(file):
    data = bytearray(file.read_bytes())
    data[HEAD.size : HEAD.size + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(data)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("harm", "computed"),
    [
        (damage_a_number, 1),
        (cut_short, 1),
        (exchange_two_rows, 2),
        (name_a_row_that_is_not_there, 4),
        (lambda file: file.chmod(0o644), 4),  # others may have written it
        (lambda file: file.write_bytes(b"\0" * 3), 4),
    ],
)
def test_what_is_not_sound_is_computed_again(tmp_path, harm, computed):
    order = np.arange(4)[None]
    wanted = features(tmp_path).batches([(0, order)])[0]
    (file,) = files(tmp_path)
    harm(file)
    again = features(tmp_path)
    np.testing.assert_array_equal(again.batches([(0, order)])[0], wanted)
    assert again.computed == computed
    last = features(tmp_path)
    np.testing.assert_array_equal(last.batches([(0, order)])[0], wanted)
    assert last.computed == 0


def test_another_model_or_other_rows_are_never_served(tmp_path, monkeypatch):
    order = np.arange(4)[None]
    one = features(tmp_path).batches([(0, order)])[0]
    other = features(tmp_path, of=model(5))
    assert not np.allclose(other.batches([(0, order)])[0], one) and other.computed == 4
    monkeypatch.setitem(ROWS, 0, ROWS[0] + 1 - 1)
    assert features(tmp_path, of=model(5)).batches([(0, order)])[0].shape == one.shape
    monkeypatch.setitem(ROWS, 0, ROWS[0][::-1].copy())
    turned = features(tmp_path, of=model(5))
    turned.batches([(0, order)])[0]
    assert turned.computed == 4


def test_a_link_is_not_followed(tmp_path):
    folder, aim = tmp_path / "kept", tmp_path / "aim"
    folder.mkdir()
    aim.write_bytes(b"mine")
    features(folder).batches([(0, np.arange(4)[None])])
    (file,) = files(folder)
    file.unlink()
    os.symlink(aim, file)
    features(folder).batches([(0, np.arange(4)[None])])
    assert aim.read_bytes() == b"mine" and not file.is_symlink()


@pytest.mark.slow
def test_held_out_rows_are_kept_too(tmp_path):
    rows = ROWS[2].astype(np.int32)
    first, again = features(tmp_path), features(tmp_path)
    np.testing.assert_array_equal(first.of(rows), again.of(rows))
    assert first.computed == len(rows) and again.computed == 0
    wanted = model().frozen.features(rows[:, :-1])
    np.testing.assert_allclose(first.of(rows), wanted, rtol=1e-4, atol=1e-5)


def test_clients_with_the_same_text_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, 1, ROWS[0])
    made = features(tmp_path)
    made.batches([(0, np.arange(4)[None])])
    made.batches([(1, np.arange(5)[None])])
    assert made.computed == 5 and len(files(tmp_path)) == 1


def test_runs_at_the_same_time_share_a_folder(tmp_path):
    def sharing(most_bytes=1 << 20):
        frozen = model().frozen
        return FrozenFeatures(lambda: frozen, 8, ROWS.get, tmp_path, most_bytes, shared=True)

    first, second = sharing(), sharing()
    for run in (first, second):
        run.batches([(0, np.arange(1)[None])])  # both have opened the file
    wanted = first.batches([(0, np.arange(3)[None])])[0]
    second.batches([(0, np.array([[3, 4]]))])
    third = sharing()
    np.testing.assert_array_equal(third.batches([(0, np.arange(5)[None])])[0][:, :3], wanted)
    assert first.computed == 3 and second.computed == 2 and third.computed == 0
    (file,) = files(tmp_path)
    full = sharing(file.stat().st_size)
    full.batches([(1, np.arange(2)[None])])
    assert files(tmp_path) == [file]


@pytest.mark.parametrize("name", ["file/below", "a\0b"])
def test_a_folder_that_cannot_be_is_named(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match=r"could not be kept there: .*run\.frozen_folder"):
        features(tmp_path / name).batches([(0, np.arange(1)[None])])


# ---- whole runs ---------------------------------------------------------------------------------


CACHED = ("run.cache_frozen=1", "client.epochs=2", "server.rounds=3")


@pytest.fixture
def made(tiny_recipe, tmp_path):
    return lambda *changes, out="run": build(
        load(tiny_recipe, (*LORA, *changes)), tmp_path / "stores", out=tmp_path / out
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mesh", "loop"])
@pytest.mark.parametrize("batch", [4, 32])  # rows as they are, and packed
def test_a_run_ends_as_without_it(made, engine, batch):
    changes = (*CACHED, f"run.engine={engine}", f"client.batch_size={batch}")
    kept = made(*changes, out="kept")
    plain = made(*changes, "run.cache_frozen=0", out="plain")
    train(kept)
    train(plain)
    used = kept.engine.frozen
    assert used is not None and used.computed > 0 and plain.engine.frozen is None
    assert not kept.record.frozen.exists()
    told = [json.loads(run.record.summary.read_text())["perplexity"] for run in (kept, plain)]
    assert told[0] == pytest.approx(told[1], rel=1e-4)
    # A finished run is looked at without it.
    assert made(*changes, out="kept").evaluation.features is None
    a, b = (load_file(adapter_beside(run.record.weights)) for run in (kept, plain))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_uses_what_was_kept(made):
    seen = []
    first = made(*CACHED)
    assert train(first, watcher=Watcher(round=seen.append, stop=lambda: bool(seen))) is None
    assert any(first.record.frozen.rglob("*.features"))
    resumed = made(*CACHED)
    assert (
        train(resumed, resume=True)["params_sha256"]
        == train(made(*CACHED, out="whole"))["params_sha256"]
    )
    assert first.engine.frozen.computed > 0


@pytest.mark.slow
def test_runs_share_what_frozen_blocks_give(made, tmp_path):
    kept = tmp_path / "shared"
    first, second = (made(*CACHED, f"run.frozen_folder={kept}", out=out) for out in "ab")
    told = train(first)
    assert first.engine.frozen.computed > 0
    assert train(second)["params_sha256"] == told["params_sha256"]
    assert second.engine.frozen.computed == 0
    assert any(kept.rglob("*.features")) and not second.record.frozen.exists()
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept.rglob("*.*")} == {0o600}


def test_a_shared_folder_needs_a_size(made, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.frozen_folder = .*: expected no folder, unless"):
        made(f"run.frozen_folder={tmp_path}")


def test_settings_without_frozen_blocks_are_refused(made):
    for changes in (
        ("wire.trainable=all", "wire.last_blocks=0", "run.cache_frozen=1"),
        ("wire.last_blocks=0", "run.cache_frozen=1"),
    ):
        with pytest.raises(ConfigError, match=r"run\.cache_frozen = 1: expected 0, unless"):
            made(*changes)
    assert tree.size(made().model.shapes()) > 0
