"""The exported model gives the same logits elsewhere."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.models import catalog
from fedlm.record.export import to_onnx

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=16, hidden_size=40, layers=2, heads=4, kernel_size=5
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(catalog.ARCHITECTURES))
def test_onnxruntime_gives_the_same_logits(name):
    pytest.importorskip("jax2onnx", reason="ONNX is an extra: pip install 'fedlm[onnx]'")
    onnxruntime = pytest.importorskip("onnxruntime")
    onnxruntime.set_default_logger_severity(3)
    model = catalog.make(name, SIZE, key_for(1, "init"))
    data = to_onnx(lambda tokens: catalog.logits(model, tokens), length=9)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        tokens = np.random.default_rng(batch).integers(4, 31, (batch, 9)).astype(np.int32)
        (found,) = session.run(["logits"], {"tokens": tokens})
        wanted = jax.jit(lambda t: catalog.logits(model, t))(tokens)
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_safetensors_are_written_with_their_tokenizer(trained, tmp_path, run_cli):
    done = run_cli("export", trained / "runs" / "tiny", "--out", tmp_path / "there", "--json")
    assert done.code == 0, done.stderr
    arrays = load_file(done.json["model"])
    assert "embedding" in arrays and arrays["embedding"].dtype == np.float32
    assert (tmp_path / "there" / "tokenizer.json").is_file()


def test_a_run_can_start_from_another(trained, tmp_path, run_cli):
    """`model.init_from` takes the weights of a finished run."""
    recipe, begun = trained / "tiny.toml", trained / "runs" / "tiny"
    start = ("--set", f"model.init_from={begun}", "--set", "server.rounds=1", "--json")
    done = run_cli("train", recipe, *start, "--out", tmp_path / "warm")
    assert done.code == 0, done.stderr
    cold = run_cli(
        "train", recipe, "--set", "server.rounds=1", "--json", "--out", tmp_path / "cold"
    )
    assert done.json["start_perplexity"] < cold.json["start_perplexity"]


@pytest.mark.parametrize(
    "change, words",
    [
        ("model.hidden_size=13", "this recipe wants float32[39"),
        ("model.layers=2", "lacks leaf 'layers.1.bias'"),
        ("data.vocabulary=16", "its tokenizer is not that of the store"),
    ],
)
def test_weights_of_another_shape_are_refused_by_name(trained, tmp_path, run_cli, change, words):
    begun = trained / "runs" / "tiny"
    asked = ("--set", f"model.init_from={begun}", "--set", change, "--out", tmp_path / "x")
    done = run_cli("train", trained / "tiny.toml", *asked)
    assert done.code == 2
    assert words in done.stderr and "model.init_from" in done.stderr


def test_starting_from_nothing_is_refused(trained, tmp_path, run_cli):
    asked = ("--set", "model.init_from=nowhere", "--out", tmp_path / "x")
    done = run_cli("train", trained / "tiny.toml", *asked)
    assert done.code == 2 and "model.init_from" in done.stderr


def test_named_leaves_are_the_names_in_the_file(trained):
    arrays = load_file(trained / "runs" / "tiny" / "model.safetensors")
    shapes = catalog.shapes(
        "si-cifg", catalog.Dimensions(vocab=17, embedding_size=8, hidden_size=12)
    )
    assert sorted(arrays) == sorted(tree.named_leaves(shapes))
