"""GGUF files of Llama architecture: the same model as the folder it was made from."""

import os
import re
import struct

import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.corpus.tokenizer_file import load_tokenizer
from fedlm.models.interop import gguf as ours
from fedlm.models.interop import huggingface as hf
from fedlm.models.interop import reader_of, tensors
from fedlm.publish.formats import convert_gguf
from tests.models.interop.families import model

gguf = pytest.importorskip("gguf", reason="needs pip install 'fedlm[gguf]'")


def permuted(weight, heads):
    """As llama.cpp's converter permutes rows of queries and keys."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def write(path, name="llama", kind=None, tokenizer=False, **changes):
    """A tiny model as llama.cpp's converter writes it."""
    _, size, params = model(name)
    file = gguf.GGUFWriter(path, "llama")
    told = {
        "llama.block_count": size.layers, "llama.context_length": size.length,
        "llama.embedding_length": size.embedding_size,
        "llama.feed_forward_length": size.hidden_size,
        "llama.attention.head_count": size.heads,
        "llama.attention.head_count_kv": size.key_heads or size.heads,
        "llama.rope.dimension_count": size.embedding_size // size.heads, **changes,
    }  # fmt: skip
    for key, value in told.items():
        file.add_uint32(key, value)
    file.add_float32("llama.attention.layer_norm_rms_epsilon", size.norm_epsilon)
    file.add_float32("llama.rope.freq_base", size.rope_theta)
    first = ["<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1", "2"]
    file.add_token_list([*first, *(f"t{n}" for n in range(8, size.vocab))])
    if tokenizer:
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("smollm")
        file.add_token_types([3, 3] + [1] * (size.vocab - 2))
        file.add_token_merges(["a b"])
        file.add_bos_token_id(0)
        file.add_eos_token_id(1)
    heads = {"attn_q": size.heads, "attn_k": size.key_heads or size.heads}
    for tensor, array in tensors.write(ours.TABLE, params, size.heads).items():
        part = tensor.split(".")[-2]
        if part in heads:
            array = permuted(array, heads[part])
        if kind and array.ndim == 2:
            packed = gguf.quants.quantize(array, kind)
            file.add_tensor(tensor, packed, raw_dtype=kind)
        else:
            file.add_tensor(tensor, array)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return size, params


def test_a_file_gives_the_model_it_was_made_from(tmp_path):
    path = tmp_path / "tiny.gguf"
    size, params = write(path)
    base = reader_of(path).base(path)
    assert base.architecture == "llama"
    for field, value in base.sizes.items():
        wanted = getattr(size, field)
        assert value == (4 if wanted is None and field != "rope_scaling" else wanted), field
    assert tree.sha256(ours.load(path, size)) == tree.sha256(params)
    assert ours.tokens_of(path)[39] == "t39"


def test_a_file_becomes_a_folder(tmp_path):
    path = tmp_path / "tiny.gguf"
    size, params = write(path, tokenizer=True)
    convert_gguf(path, tmp_path / "folder")
    assert tree.sha256(hf.load(tmp_path / "folder", size)) == tree.sha256(params)
    told = load_tokenizer(tmp_path / "folder" / "tokenizer.json")
    assert (told.special.bos, told.special.eos, told.vocabulary) == (0, 1, 40)
    assert told.library.encode("ab 12").tokens == ["ab", "Ġ", "1", "2"]
    assert told.library.decode(told.library.encode("ab 12").ids) == "ab 12"


def test_faults_are_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, **{"llama.expert_count": 8})
    with pytest.raises(ConfigError, match=r"llama\.expert_count = 8 is not supported"):
        ours.read_base(path)
    write(path, **{"llama.logit_scale": 2})
    with pytest.raises(ConfigError, match=r"llama\.logit_scale = '2': fedlm does not know"):
        ours.read_base(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="is not a whole GGUF file"):
        ours.read_base(path)
    with pytest.raises(ConfigError, match="is not readable"):
        ours.read_base(tmp_path / "none.gguf")


def test_a_type_that_is_not_read_is_named(tmp_path):
    class Strange:
        name, data, tensor_type = "x", np.zeros(4), gguf.GGMLQuantizationType.Q8_1

    with pytest.raises(ConfigError, match=re.escape("quantisation type Q8_1, which is not read")):
        ours._dequantised(Strange, tmp_path)


@pytest.mark.slow
def test_transformers_reads_the_same_logits_from_the_same_file(tmp_path):
    """And rows that are not put back move them: the mistake would be silent otherwise."""
    import jax.numpy as jnp

    torch = pytest.importorskip("torch", reason="needs pip install 'fedlm[oracle]'")
    transformers = pytest.importorskip("transformers", reason="needs pip install 'fedlm[oracle]'")
    from fedlm.models import catalog

    path = tmp_path / "tiny.gguf"
    size, _ = write(path)
    tokens = np.random.default_rng(0).integers(3, 40, (2, 10))
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=size.norm_epsilon,
        rope_theta=size.rope_theta, tie_word_embeddings=False,
    )  # fmt: skip
    there = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, config=config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        wanted = there(torch.tensor(tokens)).logits.numpy()
    mine = ours.load(path, size)
    np.testing.assert_allclose(catalog.logits(mine, jnp.asarray(tokens)), wanted, atol=1e-4)
    kept, ours.unpermuted = ours.unpermuted, lambda weight, heads: weight
    try:
        wrong = catalog.logits(ours.load(path, size), jnp.asarray(tokens))
    finally:
        ours.unpermuted = kept
    assert np.abs(wrong - wanted).max() > 1e-2


def change_offset(path, tensor, offset):
    """Write another beginning of a tensor into the head."""
    data = path.read_bytes()
    at = data.index(tensor.encode()) + len(tensor)
    (dimensions,) = struct.unpack_from("<I", data, at)
    at += 8 + 8 * dimensions  # behind the number of dimensions, these, and the type
    path.write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        ((1 << 64) - 1, "begins beyond its end"),
        ((1 << 64) - 4096, "begins beyond its end"),
        (1 << 40, "begins beyond its end"),
        (7, "begins within another one"),
        (0, "begins within another one"),
    ],
)
def test_a_tensor_that_begins_elsewhere_is_refused(tmp_path, offset, words):
    """An offset that wraps around would read numbers out of the head."""
    path = tmp_path / "tiny.gguf"
    write(path)
    change_offset(path, "output_norm.weight", offset)
    with pytest.raises(ConfigError, match=rf"{words}\. Fetch the model again"):
        ours.read_base(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match="is no regular file: expected a GGUF file"):
        ours.read_base(tmp_path / "pipe.gguf")


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    size, _ = write(path)
    data = bytearray(path.read_bytes())
    data[-64:-60] = struct.pack("<f", float("nan"))
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"tensor '[\w.]+' holds numbers that are not finite"):
        ours.load(path, size)


@pytest.mark.parametrize("number", [-1, 40])
def test_a_special_token_that_is_none_is_named(tmp_path, monkeypatch, number):
    """Counted from the end, -1 would be the last token."""
    path = tmp_path / "tiny.gguf"
    write(path, tokenizer=True)
    values = ours._values
    told = {"tokenizer.ggml.bos_token_id": number}
    monkeypatch.setattr(ours, "_values", lambda reader: {**values(reader), **told})
    with pytest.raises(ConfigError, match=rf"bos_token_id = {number}: expected the number of one"):
        ours.tokenizer_of(path)
