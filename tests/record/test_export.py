"""The exported model gives the same logits elsewhere."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.models import catalog
from fedlm.record.export import pack_weights, step_to_onnx

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=16, hidden_size=40, layers=2, heads=4, kernel_size=5
)


def session_of(data):
    onnxruntime = pytest.importorskip("onnxruntime")
    onnxruntime.set_default_logger_severity(3)
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(catalog.ARCHITECTURES))
def test_onnxruntime_gives_the_same_logits_step_by_step(name):
    """State and key-value cache are inputs and outputs; zeros are the state before the start."""
    pytest.importorskip("jax2onnx", reason="ONNX is an extra: pip install 'fedlm[onnx]'")
    model = catalog.make(name, SIZE, key_for(1, "init"))
    data = step_to_onnx(
        lambda state, token: catalog.advance(model, state, token),
        lambda batch: model.start(batch, 12),
        {"card": "a card"},
    )
    session = session_of(data)
    assert session.get_modelmeta().custom_metadata_map == {"card": "a card"}
    for batch in (1, 3):
        tokens = np.random.default_rng(batch).integers(4, 31, (batch, 9)).astype(np.int32)
        wanted = np.asarray(jax.jit(lambda t: catalog.logits(model, t))(tokens))
        kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
        state = {
            one.name: np.zeros([batch if isinstance(d, str) else d for d in one.shape],
                               kinds[one.type])
            for one in session.get_inputs()[1:]
        }  # fmt: skip
        for at in range(9):
            found, *after = session.run(None, {"token": tokens[:, at], **state})
            state = dict(zip(state, after, strict=True))
            np.testing.assert_allclose(found, wanted[:, at], atol=1e-4)


def test_int8_weights_move_by_half_a_step_at_most():
    """The packed file is smaller, and multiplies by matrices near the old ones, row by row."""
    onnx = pytest.importorskip("onnx")
    matrix = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    matrix[1], matrix[2] = 0.0, 1000 * matrix[2]  # a row of its own scale each
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 64])],
        [helper.make_tensor_value_info("y", kind, ["n", 32])],
        [onnx.numpy_helper.from_array(matrix, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    before = len(model.SerializeToString())
    assert pack_weights(model) == 1
    data = model.SerializeToString()
    assert len(data) < 0.4 * before
    (found,) = session_of(data).run(None, {"x": np.eye(64, dtype=np.float32)})
    step = np.abs(matrix).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - matrix) <= 0.5001 * step).all() and np.abs(found - matrix).max() > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_example_suggests_the_words_of_predict(trained, tmp_path, run_cli):
    pytest.importorskip("jax2onnx", reason="ONNX is an extra: pip install 'fedlm[onnx]'")
    run = trained / "runs" / "tiny"
    done = run_cli("export", run, "--format", "onnx-int8", "--out", tmp_path / "int8", "--json")
    assert done.code == 0, done.stderr
    assert done.json["perplexity_int8"] == pytest.approx(done.json["perplexity_float32"], rel=0.05)
    done = run_cli("export", run, "--format", "onnx", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.stderr
    assert "language model" in (tmp_path / "out" / "README.md").read_text()
    script = Path(__file__).parents[2] / "examples" / "onnx_keyboard.py"
    said = subprocess.run(
        [sys.executable, script, done.json["model"], "the cat"], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    wanted = run_cli("predict", run, "the cat", "--json").json
    words = [each["word"] for each in (wanted.get("next") or wanted["predictions"])]
    assert said.stdout.split() == words[:5]


def test_safetensors_are_written_with_their_tokenizer(trained, tmp_path, run_cli):
    done = run_cli("export", trained / "runs" / "tiny", "--out", tmp_path / "there", "--json")
    assert done.code == 0, done.stderr
    arrays = load_file(done.json["model"])
    assert "embedding" in arrays and arrays["embedding"].dtype == np.float32
    assert (tmp_path / "there" / "tokenizer.json").is_file()
    card = (tmp_path / "there" / "README.md").read_text()
    assert "A `si-cifg` language model" in card and "- Privacy: no privacy plan" in card
    assert "Perplexity on held-out clients:" in card and "library_name: fedlm" in card


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
