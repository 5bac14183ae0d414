"""Transformers itself as the oracle: the same logits, in both directions, for every family.

Needs the extra `fedlm[oracle]` (torch on the CPU, transformers, peft); skips without it.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.models import catalog
from fedlm.models.interop import huggingface as hf
from tests.models.interop.families import FAMILIES, model
from tests.models.interop.test_huggingface import change, write

torch = pytest.importorskip("torch", reason="needs pip install 'fedlm[oracle]'")
transformers = pytest.importorskip("transformers", reason="needs pip install 'fedlm[oracle]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of other libraries
]
TOKENS = np.random.default_rng(0).integers(3, 40, (3, 12))


def theirs(folder):
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return made.eval()


def their_logits(loaded):
    with torch.no_grad():
        return loaded(torch.tensor(TOKENS)).logits.numpy()


def our_logits(params):
    return np.asarray(catalog.logits(params, jnp.asarray(TOKENS)))


def distance(folder, params):
    return np.abs(their_logits(theirs(folder)) - our_logits(params)).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_fedlm_writes_gives_the_same_logits_there(tmp_path, name):
    _, params = write(tmp_path, name)
    assert distance(tmp_path, params) < 1e-4


CONFIGS = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "hidden_act": "silu"}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
    ),
    "llama-long": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", {"num_attention_heads": 2}),
    "gpt2": ("GPT2Config", {}),
    "mpt": ("MptConfig", {"n_heads": 3, "d_model": 24}),
}
SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24},
    "mpt": {"n_layers": 2},
}
USUAL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip


def random_there(folder, name):
    kind, more = CONFIGS[name]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 40}
    settings = {**tokens, **SIZES.get(name, USUAL), **more}
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**settings)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # biases begin at zero and gains at one
            parameter.add_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_gives_the_same_logits_and_tokens_here(tmp_path, name):
    made = random_there(tmp_path, name)
    base = hf.read_base(tmp_path)
    params = hf.load(tmp_path, catalog.Dimensions(**base.sizes))
    np.testing.assert_allclose(our_logits(params), their_logits(made), atol=1e-4)
    prompt = TOKENS[:1, :4]
    said = made.generate(
        torch.tensor(prompt), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    state, tokens = params.start(1, 16), list(prompt[0])
    for place in range(12):
        state, logits = catalog.advance(params, state, jnp.asarray([tokens[place]]))
        if place + 1 == len(tokens):
            tokens.append(int(np.argmax(logits[0])))
    assert tokens[:12] == said[0].tolist()


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight"),
        ("gpt2", "transformer.h.1.attn.c_proj.weight"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight"),
        ("mpt", "transformer.blocks.1.attn.Wqkv.weight"),
    ],
)
def test_a_permuted_or_transposed_matrix_shows(tmp_path, name, tensor):
    """The oracle must be able to fail: what is wrong in one matrix moves the logits."""
    _, params = write(tmp_path, name)
    kept = (tmp_path / hf.WEIGHTS).read_bytes()

    def permuted(arrays):
        x = arrays[tensor]
        arrays[tensor] = np.ascontiguousarray(
            x.reshape(4, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        )

    change(tmp_path, permuted)
    assert distance(tmp_path, params) > 1e-3
    (tmp_path / hf.WEIGHTS).write_bytes(kept)
    change(tmp_path, lambda a: a.update({tensor: _turned(a[tensor])}))
    assert distance(tmp_path, params) > 1e-3
    (tmp_path / hf.WEIGHTS).write_bytes(kept)
    assert distance(tmp_path, params) < 1e-4


def _turned(x):
    """The first square of a matrix, transposed."""
    n = min(x.shape)
    x = x.copy()
    x[:n, :n] = x[:n, :n].T.copy()
    return x


def test_a_forgotten_setting_shows(tmp_path):
    """Exact GELU in place of the tangent's: small, and seen."""
    _, params = write(tmp_path, "gpt2")
    config = json.loads((tmp_path / hf.CONFIG).read_text())
    (tmp_path / hf.CONFIG).write_text(json.dumps({**config, "activation_function": "gelu"}))
    assert distance(tmp_path, params) > 1e-4


def test_families_here_have_a_model_of_each_kind():
    kinds = {hf.family_of(*model(name)[:2]) for name in FAMILIES}
    assert kinds | {"mistral"} == set(hf.FAMILIES)
