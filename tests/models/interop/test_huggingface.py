"""Hugging Face folders: written and read again, and every fault of one in a sentence."""

import json
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import huggingface as hf
from fedlm.models.interop import reader_of
from tests.models.interop.families import FAMILIES, model


def write(folder, name="llama", **changes):
    """A folder with a tiny model; `changes` are settings, or ... to remove one."""
    architecture, size, params = model(name)
    kind = hf.family_of(architecture, size)
    config = {**hf.config_of(kind, size, {"eos_token_id": 2}), **changes}
    config = {k: v for k, v in config.items() if v is not ...}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hf.CONFIG).write_text(json.dumps(config))
    (folder / hf.WEIGHTS).write_bytes(hf.weights_of(kind, size, params))
    return size, params


def change(folder, edit):
    arrays = load_file(folder / hf.WEIGHTS)
    edit(arrays)
    save_file(arrays, folder / hf.WEIGHTS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_to_the_bit(tmp_path, name):
    size, params = write(tmp_path, name)
    base = reader_of(tmp_path).base(tmp_path)
    assert base.architecture == FAMILIES[name][0].replace("transformer", "gpt2")
    for field, value in base.sizes.items():
        wanted = getattr(size, field)
        assert value == wanted or (wanted is None and field in ("key_heads", "head_size")), field
    assert tree.sha256(hf.load(tmp_path, size)) == tree.sha256(params)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("llama", {"model_type": "bert"}, "model_type = 'bert' is not supported: expected 'llama'"),
        ("llama", {"model_type": ["llama"]}, "model_type = ['llama'] is not supported"),
        ("llama", {"model_type": {"a": 1}}, "model_type = {'a': 1} is not supported"),
        ("llama", {"num_key_value_heads": 3}, "config.json: 4 heads share 3 keys"),
        ("llama", {"head_dim": 3}, "config.json: a head of 3 numbers: expected an even number"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: expected 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope scaling of type 'yarn'"),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 0}},
         "factor = 0: expected a positive number"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
         "has no 'low_freq_factor'"),
        ("llama", {"rope_parameters": {"factor": 2.0}}, "factor = '2.0': fedlm does not know"),
        ("llama", {"rope_parameters": {"rope_type": [1]}}, "rope scaling of type [1]"),
        ("llama", {"rope_parameters": 3}, "rope_parameters = 3: expected a table"),
        ("qwen2", {"layer_types": 7}, "layer_types = 7 is not supported"),
        ("mpt", {"attn_config": "alibi"}, "attn_config = 'alibi': expected a table"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": "x"}},
         "partial_rotary_factor = 'x': expected a positive number"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = '30.0'"),
        ("llama", {"hidden_size": ...}, "has no 'hidden_size'"),
        ("llama", {"hidden_size": "16"}, "hidden_size = '16': expected a positive number"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quantised weights"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported"),
        ("gpt2", {"activation_function": "mish"}, "activation_function = 'mish' is not supported"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias = False is not supported"),
        ("gpt_neox", {"num_attention_heads": 4}, "turn 1 numbers of a head"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi = False is not supported"),
        ("mpt", {"attn_config": {"alibi": True, "rope": True}}, "attn_config: rope = 'True'"),
        ("mpt", {"no_bias": False}, "no_bias = False is not supported"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_supported_is_named(tmp_path, name, changes, words):
    write(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=re.escape(words)):
        hf.read_base(tmp_path)


def test_older_names_of_settings_mean_the_same(tmp_path):
    write(tmp_path / "a", rope_parameters=..., rope_theta=500.0, rope_scaling=None, dtype="float32")
    write(tmp_path / "b", rope_theta=...)
    assert hf.read_base(tmp_path / "a") == hf.read_base(tmp_path / "b")
    write(tmp_path / "c", "gpt_neox-serial", rope_parameters=...)
    write(tmp_path / "d", "gpt_neox-serial", rotary_pct=..., rotary_emb_base=...)
    assert hf.read_base(tmp_path / "c") == hf.read_base(tmp_path / "d")


def test_shards_are_read_and_a_missing_one_is_named(tmp_path):
    size, params = write(tmp_path)
    arrays = load_file(tmp_path / hf.WEIGHTS)
    (tmp_path / hf.WEIGHTS).unlink()
    where = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(sorted(arrays))}
    for file in set(where.values()):
        save_file({n: arrays[n] for n, f in where.items() if f == file}, tmp_path / file)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": where}))
    assert tree.sha256(hf.load(tmp_path, size)) == tree.sha256(params)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks the shard 'model-1\.safetensors'"):
        hf.load(tmp_path, size)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"x": f"{'9' * 999}.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks the shard '9{100,}\.\.\."):  # by `make fuzz`
        hf.load(tmp_path, size)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"x": "../model-0.safetensors"}}))
    with pytest.raises(ConfigError, match="expected the name of a safetensors file"):
        hf.load(tmp_path, size)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    size, _ = write(tmp_path)
    arrays = load_file(tmp_path / hf.WEIGHTS)
    (tmp_path / hf.WEIGHTS).unlink()
    twice, files = "model.norm.weight", ("model-0.safetensors", "model-1.safetensors")
    where = {name: files[n % 2] for n, name in enumerate(sorted(arrays))}
    for file in files:
        part = {n: x for n, x in arrays.items() if where[n] == file or n == twice}
        save_file(part, tmp_path / file)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": where}))
    words = f"tensor '{twice}' is in model-0.safetensors and in model-1.safetensors"
    with pytest.raises(ConfigError, match=re.escape(words)):
        hf.load(tmp_path, size)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda a: a.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (lambda a: a.update(extra=np.zeros(3, np.float32)), "a tensor 'extra'"),
        (lambda a: a.update({"model.norm.weight": np.ones(3, np.float32)}), "is [3], but"),
        (lambda a: a.update({"model.norm.weight": np.ones(16, np.int8)}), "is of type I8"),
        (lambda a: a["model.norm.weight"].fill(np.nan), "'model.norm.weight' holds numbers that"),
        (lambda a: a["model.norm.weight"].fill(-np.inf), "are not finite in float32"),
        (lambda a: a.update({"model.norm.weight": np.full(16, 1e300)}), "are not finite"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, edit, words):
    size, _ = write(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ConfigError, match=re.escape(words)):
        hf.load(tmp_path, size)


def test_a_pickle_and_a_damaged_file_are_refused(tmp_path):
    size, _ = write(tmp_path)
    (tmp_path / hf.WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        hf.load(tmp_path, size)
    (tmp_path / hf.WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle \(pytorch_model\.bin\)"):
        hf.load(tmp_path, size)


def test_bfloat16_is_read(tmp_path):
    size, params = write(tmp_path)
    change(tmp_path, lambda a: a.update({n: x.astype(ml_dtypes.bfloat16) for n, x in a.items()}))
    for a, b in zip(*(tree.named_leaves(x).values() for x in (hf.load(tmp_path, size), params)),
                    strict=True):  # fmt: skip
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0.01)


def test_names_without_prefix_and_saved_buffers_are_read(tmp_path):
    size, params = write(tmp_path, "gpt2")

    def older(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))
        arrays["lm_head.weight"] = arrays["wte.weight"].copy()

    change(tmp_path, older)
    assert tree.sha256(hf.load(tmp_path, size)) == tree.sha256(params)


def test_a_model_that_transformers_lacks_is_refused():
    for name, size in (("si-cifg", Dimensions()), ("transformer", Dimensions()),
                       ("mpt", replace(Dimensions(), hidden_size=384))):  # fmt: skip
        with pytest.raises(ConfigError, match="Transformers has no class"):
            hf.family_of(name, size)
