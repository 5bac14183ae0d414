"""A model in a web page gives our tokens, our logits and our suggestions."""

import json
import shutil
import subprocess

import jax
import numpy as np
import pytest

from fedlm.core.errors import ConfigError
from fedlm.core.keys import key_for
from fedlm.corpus import tokenizer as tok
from fedlm.inference import Typist, open_model
from fedlm.models import catalog
from fedlm.models.interop import web
from fedlm.publish.finished_run import FinishedRun
from fedlm.publish.formats import (
    RUNTIME_PROGRAM,
    RUNTIME_WASM,
    _check_tokenizer,
    _runtime,
    write_export,
)
from fedlm.record.directory import RunDirectory

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript with")
SIZE = catalog.Dimensions(vocab=31, embedding_size=6, hidden_size=10, layers=2)
TEXTS = ["", "the ca", "The cat", "the cat ", "the cat\n", "the cat\nthe ", "a dog, a ", "naïve Ş "]
SCRIPT = """
const fs = require("fs"), folder = process.argv[1];
const { Model, Tokenizer, Typist } = require(folder + "/model.js");
const window = {};
eval(fs.readFileSync(folder + "/config.js", "utf8"));
const bytes = fs.readFileSync(folder + "/model.bin");
const model = new Model(window.FEDLM, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
const asked = JSON.parse(fs.readFileSync(0, "utf8")), said = {};
(async () => {
if (asked.tokens) {
  let state = model.start(), logits;
  said.logits = asked.tokens.map((token) => {
    ({ state, logits } = model.advance(state, token));
    return Array.from(logits);
  });
}
if (asked.texts) {
  const tokenizer = new Tokenizer(window.FEDLM.tokenizer, window.FEDLM.special), typist = new Typist(model, tokenizer);
  said.context = asked.texts.map((text) => tokenizer.context(text));
  said.words = [];
  for (const text of asked.texts) said.words.push(await typist.suggest(text));
}
console.log(JSON.stringify(said));
})();
"""  # noqa: E501


logits_of = jax.jit(catalog.logits)


def run_js(folder, **asked):
    done = subprocess.run(
        [NODE, "-e", SCRIPT, str(folder)], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def page_of(folder, model, int8):
    """The part of an exported page that computes."""
    config, data = web.pack(model, int8=int8)
    (folder / "model.bin").write_bytes(data)
    (folder / "config.js").write_text(f"window.FEDLM = {json.dumps(config)};")
    shutil.copy(web.__file__.replace("models/interop/web.py", "web/model.js"), folder)
    return folder


CELLS = [
    ("lstm", {}), ("cifg", {}), ("cifg", {"cell_layer_norm": True}), ("si-cifg", {}),
    ("si-cifg", {"si_measure": "l2", "si_state": False}),
    ("si-cifg", {"si_measure": "rms", "si_candidate": False, "cell_layer_norm": True}),
    ("si-cifg", {"si_measure": "p8", "si_rectifier": "soft"}),
    ("si-cifg", {"si_measure": "p16", "si_scaled_floor": 0.9}),
]  # fmt: skip


@needs_node
@pytest.mark.parametrize("name, more", CELLS)
@pytest.mark.sample(1)
def test_a_page_gives_our_logits(tmp_path, name, more):
    size = catalog.Dimensions(**{**vars(SIZE), **more})
    model = catalog.make(name, size, key_for(1, "init"))
    tokens = [1, 7, 30, 7, 4]
    for int8 in (False, True):
        found = run_js(page_of(tmp_path, model, int8), tokens=tokens)["logits"]
        ours = web.rounded(model) if int8 else model
        wanted = logits_of(ours, np.asarray([tokens]))[0]
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-4)
    moved = np.abs(np.asarray(web.rounded(model).embedding) - np.asarray(model.embedding))
    assert 0 < moved.max() < np.abs(np.asarray(model.embedding)).max() / 127


def test_only_recurrent_models_fit_into_a_page():
    with pytest.raises(ConfigError, match="recurrent"):
        web.pack(catalog.shapes("transformer", SIZE_OF_HEADS), int8=False)


def test_a_folder_without_onnxruntime_web_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--onnxruntime.*npm install onnxruntime-web"):
        _runtime(tmp_path)
    for name in (RUNTIME_PROGRAM, RUNTIME_WASM):
        (tmp_path / name).write_bytes(b"\x00" + name.encode())
    (name, script), *_ = _runtime(tmp_path).items()
    assert name == "runtime.js" and script.startswith(b"window.FEDLM_RUNTIME = {")


SIZE_OF_HEADS = catalog.Dimensions(vocab=31, embedding_size=8, hidden_size=10, layers=1, heads=2)


@needs_node
def test_an_exported_page_types_as_we_do(trained, tmp_path):
    directory = RunDirectory(trained / "runs" / "tiny")
    main = write_export(directory, "web", tmp_path)
    assert main == tmp_path / "index.html"
    for name in ("README.md", "style.css", "page.js", "weights.js"):
        assert (tmp_path / name).is_file()
    _compare(tmp_path, *open_model(directory.path))


def _compare(folder, params, tokenizer):
    found = run_js(folder, texts=TEXTS)
    typist = Typist(params, tokenizer)
    assert found["context"] == [typist._context(text) for text in TEXTS]
    for text, words in zip(TEXTS, found["words"], strict=True):
        ours = typist.suggest(text)
        assert [w for w, _ in words] == [w for w, _ in ours], text
        np.testing.assert_allclose([p for _, p in words], [p for _, p in ours], rtol=1e-3)


@pytest.mark.sample(1)
@needs_node
@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_a_page_knows_pieces_of_words(tmp_path, kind):
    lines = ["the cat sat on the mat", "a naïve caterpillar sat", "cats and dogs, said the cat"]
    tokenizer = tok.fit(lines * 3, kind, 330, True)
    size = catalog.Dimensions(**{**vars(SIZE), "vocab": tokenizer.vocabulary})
    model = catalog.make("cifg", size, key_for(3, "init"))
    config, data = web.pack(model, int8=False)
    library = json.loads(tokenizer.library.to_str())
    _check_tokenizer(library)
    special = tokenizer.special
    config |= {"tokenizer": library, "special": {
        "bos": special.bos, "eos": special.eos, "oov": special.oov,
        "reserved": list(special.reserved)}}  # fmt: skip
    page_of(tmp_path, model, False)
    (tmp_path / "model.bin").write_bytes(data)
    (tmp_path / "config.js").write_text(f"window.FEDLM = {json.dumps(config)};")
    _compare(tmp_path, model, tokenizer)


def test_a_tokenizer_that_the_page_does_not_know_is_refused(trained):
    library = json.loads(
        FinishedRun(RunDirectory(trained / "runs" / "tiny")).tokenizer.library.to_str()
    )
    _check_tokenizer(library)
    for change in ({"normalizer": {"type": "BertNormalizer"}}, {"pre_tokenizer": None}):
        with pytest.raises(ConfigError, match="format = 'web'"):
            _check_tokenizer({**library, **change})
