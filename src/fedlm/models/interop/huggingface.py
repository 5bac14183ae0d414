"""Models of Hugging Face's Transformers: a folder in, a folder out.

In:       a folder with `config.json` and safetensors files; or a fedlm model and its sizes.
Out:      architecture and sizes, and the model; or the files of such a folder.
Promise:  the logits are those of Transformers' own class; a setting that would change them and is
          not supported is refused by name; nothing is unpickled; one line in `FAMILIES` adds a
          family.
Not here: GGUF files (`gguf.py`), adapters (`peft.py`), tokenizers (`corpus`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  bfloat16 for NumPy, which safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_tensors

from fedlm.core.documents import json_value
from fedlm.core.errors import ConfigError, either
from fedlm.core.types import Params
from fedlm.models import catalog
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import tensors
from fedlm.models.interop.settings import Settings
from fedlm.models.interop.tensors import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON = 64 << 20
FLOATS = ("F64", "F32", "F16", "BF16")
# Settings that say nothing about the logits of a model in use.
SILENT = (
    *("architectures", "auto_map", "_name_or_path", "problem_type", "task_specific_params"),
    *("id2label", "label2id", "tokenizer_class", "transformers_version", "transformers.js_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("dtype", "torch_dtype", "initializer_range", "gradient_checkpointing", "use_cache"),
    *("chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "return_dict"),
    *("output_attentions", "output_hidden_states", "attention_dropout", "attn_pdrop"),
    *("classifier_dropout", "emb_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    "summary_use_proj",
)
# Buffers that older versions saved beside the weights; they hold no weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
GELUS = {"gelu": "gelu-exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
NO_WINDOW = "full_attention"


@dataclass(frozen=True)
class Base:
    """A model made elsewhere: its architecture here, and the sizes that its settings give."""

    architecture: str
    sizes: Mapping[str, Any]  # fields of `Dimensions`


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of Transformers: how its settings and arrays are read and written."""

    architecture: str
    model: str  # the class in Transformers
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[Dimensions], dict[str, Any]]
    table: tuple[Tensor, ...]
    fits: Callable[[Dimensions], bool] = field(default=lambda size: True)  # a model to be written
    prefix: str = ""  # of names, which some folders leave out
    fan_in_fan_out: bool = False  # matrices are (in, out)


# ---- Llama, Mistral, Qwen2 -------------------------------------------------------------------


def _rope(settings: Settings, theta: float = 10_000.0) -> tuple[float, float | None]:
    """Return the base of rotary periods and the turned fraction; refuse scaled positions."""
    told = settings.value("rope_parameters", None) or settings.value("rope_scaling", None) or {}
    settings.ignore(("rope_parameters", "rope_scaling"))
    if not isinstance(told, dict):
        raise ConfigError(f"{settings.where}: rope_parameters = {told!r}: expected a table.")
    kind = told.get("rope_type", told.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"{settings.where}: rope scaling of type {kind!r} is not supported: expected none."
        )
    inner = Settings(f"{settings.where}: rope_parameters", told)
    inner.ignore(("rope_type", "type"))
    theta = inner.number("rope_theta", settings.number("rope_theta", theta))
    part = inner.value("partial_rotary_factor", None)
    inner.finish()
    return theta, part


def _llama(settings: Settings) -> dict[str, Any]:
    theta, part = _rope(settings)
    heads = settings.count("num_attention_heads")
    embed = settings.count("hidden_size")
    if part not in (None, 1.0):
        raise ConfigError(f"{settings.where}: partial_rotary_factor = {part!r}: expected 1.")
    settings.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
    settings.expect(
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
        sliding_window=None,
        rope_interleaved=False,
        is_llama_config=True,
    )
    head = settings.count("head_dim", embed // heads)
    groups = settings.count("num_key_value_heads", heads)
    return {
        "vocab": settings.count("vocab_size"),
        "embedding_size": embed,
        "hidden_size": settings.count("intermediate_size"),
        "layers": settings.count("num_hidden_layers"),
        "heads": heads,
        "key_heads": groups,
        "head_size": head,
        "length": settings.count("max_position_embeddings", 2048),
        "rope_theta": theta,
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "qkv_bias": False,
        "tied": settings.flag("tie_word_embeddings", False),
    }


def _mistral(settings: Settings) -> dict[str, Any]:
    found = settings.value("sliding_window", None)
    if found is not None:
        raise ConfigError(
            f"{settings.where}: sliding_window = {found!r} is not supported: expected null."
        )
    return _llama(settings)


def _qwen2(settings: Settings) -> dict[str, Any]:
    settings.expect(use_sliding_window=False)
    kinds = settings.value("layer_types", [])
    if any(kind != NO_WINDOW for kind in kinds):
        raise ConfigError(
            f"{settings.where}: layer_types = {kinds!r} is not supported: expected "
            f"{NO_WINDOW!r} in every layer."
        )
    # A window that is switched off.
    settings.values.pop("sliding_window", None)
    settings.ignore(("max_window_layers",))
    return {**_llama(settings), "qkv_bias": True}


def _write_llama(size: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.embedding_size,
        "intermediate_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads or size.heads,
        "head_dim": size.head_size or size.embedding_size // size.heads,
        "hidden_act": "silu",
        "max_position_embeddings": size.length,
        "rms_norm_eps": size.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
        "rope_theta": size.rope_theta,
        "tie_word_embeddings": size.tied,
    }


def _pairs(block: str, pairs: Mapping[str, str], kinds: tuple[str, ...]) -> list[Tensor]:
    """Return entries for weights and biases of layers that both sides have alike."""
    return [
        Tensor(f"{block}.{theirs}.{kind}", (f"blocks.{{i}}.{ours}.{kind}",))
        for ours, theirs in pairs.items()
        for kind in kinds
    ]


_LLAMA = (
    Tensor("model.embed_tokens.weight", ("stem.embedding",)),
    *_pairs(
        "model.layers.{i}",
        {
            "attention.query": "self_attn.q_proj",
            "attention.key": "self_attn.k_proj",
            "attention.value": "self_attn.v_proj",
            "attention.out": "self_attn.o_proj",
            "feedforward.gate": "mlp.gate_proj",
            "feedforward.up": "mlp.up_proj",
            "feedforward.down": "mlp.down_proj",
        },
        ("weight", "bias"),
    ),
    Tensor("model.layers.{i}.input_layernorm.weight", ("blocks.{i}.norm_attention.gain",)),
    Tensor(
        "model.layers.{i}.post_attention_layernorm.weight", ("blocks.{i}.norm_feedforward.gain",)
    ),
    Tensor("model.norm.weight", ("last.gain",)),
    Tensor("lm_head.weight", ("head",)),
)


# ---- GPT-2, GPT-NeoX, MPT --------------------------------------------------------------------


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"blocks.{{i}}.attention.{part}.{kind}" for part in ("query", "key", "value"))


def _norms(block: str, first: str, second: str, last: str) -> list[Tensor]:
    found = [
        Tensor(f"{theirs}.{there}", (f"{ours}.{here}",))
        for ours, theirs in (
            ("blocks.{i}.norm_attention", f"{block}.{first}"),
            ("blocks.{i}.norm_feedforward", f"{block}.{second}"),
            ("last", last),
        )
        for here, there in (("gain", "weight"), ("shift", "bias"))
    ]
    return found


def _gpt2(settings: Settings) -> dict[str, Any]:
    settings.expect(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    settings.ignore(("n_ctx",))
    embed = settings.count("n_embd")
    return {
        "vocab": settings.count("vocab_size"),
        "embedding_size": embed,
        "hidden_size": settings.count("n_inner", 4 * embed),
        "layers": settings.count("n_layer"),
        "heads": settings.count("n_head"),
        "length": settings.count("n_positions", 1024),
        "activation": settings.choice("activation_function", GELUS, "gelu_new"),
        "norm_epsilon": settings.number("layer_norm_epsilon", 1e-5),
    }


def _write_gpt2(size: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "n_embd": size.embedding_size,
        "n_inner": size.hidden_size,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_positions": size.length,
        "activation_function": _gelu(size.activation),
        "layer_norm_epsilon": size.norm_epsilon,
        "tie_word_embeddings": True,
    }


def _gelu(activation: str) -> str:
    return {"gelu-exact": "gelu", "gelu": "gelu_new", "relu": "relu"}[activation]


_H = "transformer.h.{i}"
_GPT2 = (
    Tensor("transformer.wte.weight", ("stem.embedding",)),
    Tensor("transformer.wpe.weight", ("stem.places",)),
    *_norms(_H, "ln_1", "ln_2", "transformer.ln_f"),
    Tensor(f"{_H}.attn.c_attn.weight", _qkv("weight"), transposed=True),
    Tensor(f"{_H}.attn.c_attn.bias", _qkv("bias")),
    *(
        Tensor(
            f"{_H}.{theirs}.{kind}", (f"blocks.{{i}}.{ours}.{kind}",), transposed=kind == "weight"
        )
        for ours, theirs in (
            ("attention.out", "attn.c_proj"),
            ("feedforward.up", "mlp.c_fc"),
            ("feedforward.down", "mlp.c_proj"),
        )
        for kind in ("weight", "bias")
    ),
)


def _neox(settings: Settings) -> dict[str, Any]:
    theta, part = _rope(settings, settings.number("rotary_emb_base", 10_000.0))
    part = settings.number("rotary_pct", 0.25) if part is None else float(part)
    settings.ignore(("rotary_pct",))
    settings.expect(attention_bias=True)
    embed, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    turned = int(part * (embed // heads))
    if turned < 2 or turned % 2:
        raise ConfigError(
            f"{settings.where}: rotary positions turn {turned} numbers of a head: expected an even "
            "number."
        )
    return {
        "vocab": settings.count("vocab_size"),
        "embedding_size": embed,
        "hidden_size": settings.count("intermediate_size"),
        "layers": settings.count("num_hidden_layers"),
        "heads": heads,
        "activation": settings.choice("hidden_act", GELUS, "gelu"),
        "norm_epsilon": settings.number("layer_norm_eps", 1e-5),
        "rope_theta": theta,
        "rotary_fraction": part,
        "length": settings.count("max_position_embeddings", 2048),
        "parallel": settings.flag("use_parallel_residual", True),
        "tied": settings.flag("tie_word_embeddings", False),
    }


def _write_neox(size: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.embedding_size,
        "intermediate_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "hidden_act": _gelu(size.activation),
        "layer_norm_eps": size.norm_epsilon,
        "max_position_embeddings": size.length,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": size.rope_theta,
            "partial_rotary_factor": size.rotary_fraction,
        },
        "rotary_emb_base": size.rope_theta,
        "rotary_pct": size.rotary_fraction,
        "use_parallel_residual": size.parallel,
        "tie_word_embeddings": size.tied,
    }


_L = "gpt_neox.layers.{i}"
_NEOX = (
    Tensor("gpt_neox.embed_in.weight", ("stem.embedding",)),
    *_norms(_L, "input_layernorm", "post_attention_layernorm", "gpt_neox.final_layer_norm"),
    *(
        Tensor(f"{_L}.attention.query_key_value.{kind}", _qkv(kind), interleaved=True)
        for kind in ("weight", "bias")
    ),
    *_pairs(
        _L,
        {
            "attention.out": "attention.dense",
            "feedforward.up": "mlp.dense_h_to_4h",
            "feedforward.down": "mlp.dense_4h_to_h",
        },
        ("weight", "bias"),
    ),
    Tensor("embed_out.weight", ("head",)),
)


def _mpt(settings: Settings) -> dict[str, Any]:
    settings.expect(
        no_bias=True,
        expansion_ratio=4,
        logit_scale=None,
        embedding_fraction=1.0,
        tie_word_embeddings=True,
    )
    settings.choice("norm_type", {"low_precision_layernorm": 1, "layernorm": 1}, "layernorm")
    settings.ignore(("init_device", "learned_pos_emb", "init_config", "tokenizer_name", "verbose"))
    attention = Settings(f"{settings.where}: attn_config", settings.value("attn_config", {}))
    attention.expect(
        alibi=True,
        alibi_bias_max=8,
        attn_type="multihead_attention",
        attn_uses_sequence_id=False,
        prefix_lm=False,
        qk_ln=False,
        clip_qkv=None,
        softmax_scale=None,
    )
    attention.ignore((*SILENT, "attn_impl", "model_type"))
    if "alibi" not in attention.values:
        raise ConfigError(f"{attention.where} has no 'alibi': expected true.")
    attention.finish()
    embed = settings.count("d_model")
    return {
        "vocab": settings.count("vocab_size"),
        "embedding_size": embed,
        "hidden_size": 4 * embed,
        "layers": settings.count("n_layers"),
        "heads": settings.count("n_heads"),
        "length": settings.count("max_seq_len", 2048),
        "activation": "gelu-exact",
        "norm_epsilon": settings.number("layer_norm_epsilon", 1e-5),
    }


def _write_mpt(size: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "d_model": size.embedding_size,
        "n_layers": size.layers,
        "n_heads": size.heads,
        "expansion_ratio": 4,
        "max_seq_len": size.length,
        "layer_norm_epsilon": size.norm_epsilon,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "model_type": ""},
        "tie_word_embeddings": True,
    }


_MPT = (
    Tensor("transformer.wte.weight", ("stem.embedding",)),
    Tensor("transformer.blocks.{i}.norm_1.weight", ("blocks.{i}.norm_attention.gain",)),
    Tensor("transformer.blocks.{i}.norm_2.weight", ("blocks.{i}.norm_feedforward.gain",)),
    Tensor("transformer.norm_f.weight", ("last.gain",)),
    Tensor("transformer.blocks.{i}.attn.Wqkv.weight", _qkv("weight")),
    *_pairs(
        "transformer.blocks.{i}",
        {
            "attention.out": "attn.out_proj",
            "feedforward.up": "ffn.up_proj",
            "feedforward.down": "ffn.down_proj",
        },
        ("weight",),
    ),
)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="llama",
        model="LlamaForCausalLM",
        read=_llama,
        write=_write_llama,
        table=_LLAMA,
        fits=lambda size: not size.qkv_bias,
    ),
    "mistral": Family(
        architecture="llama",
        model="MistralForCausalLM",
        read=_mistral,
        write=lambda size: {**_write_llama(size), "sliding_window": None},
        table=_LLAMA,
        fits=lambda size: False,  # written as Llama, which is the same
    ),
    "qwen2": Family(
        architecture="llama",
        model="Qwen2ForCausalLM",
        read=_qwen2,
        write=_write_llama,
        table=_LLAMA,
        fits=lambda size: size.qkv_bias,
    ),
    "gpt2": Family(
        architecture="gpt2",
        model="GPT2LMHeadModel",
        read=_gpt2,
        write=_write_gpt2,
        table=_GPT2,
        prefix="transformer.",
        fan_in_fan_out=True,
    ),
    "gpt_neox": Family(
        architecture="gpt-neox",
        model="GPTNeoXForCausalLM",
        read=_neox,
        write=_write_neox,
        table=_NEOX,
    ),
    "mpt": Family(
        architecture="mpt",
        model="MptForCausalLM",
        read=_mpt,
        write=_write_mpt,
        table=_MPT,
        fits=lambda size: (
            size.activation == "gelu-exact" and size.hidden_size == 4 * size.embedding_size
        ),
    ),
}


# ---- a folder in -----------------------------------------------------------------------------


def read_base(folder: Path) -> Base:
    """Return architecture and sizes of the model in a folder, from its `config.json`."""
    family, settings = _open(folder)
    sizes = family.read(settings)
    settings.ignore(("model_type",))
    if settings.values.get("quantization_config") is not None:
        raise ConfigError(
            f"{settings.where}: quantization_config: quantised weights are not read from a folder: "
            "take the model in float32, float16 or bfloat16, or a GGUF file."
        )
    settings.finish(SILENT)
    return Base(family.architecture, sizes)


def load(folder: Path, size: Dimensions) -> Params:
    """Return the model in a folder, in float32."""
    family, _ = _open(folder)
    like = catalog.shapes(family.architecture, size)
    with _Shards(folder) as shards:
        wanted = tensors.names(family.table, like)
        shards.drop_prefix(family.prefix, wanted)
        shards.check(wanted, tied=getattr(like, "head", None) is None)
        return tensors.read(
            family.table, like, size.heads, shards.shape_of, shards.array_of, str(folder)
        )


def _open(folder: Path) -> tuple[Family, Settings]:
    file = folder / CONFIG
    told = _json(file)
    kind = told.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{file}: model_type = {kind!r} is not supported: expected "
            f"{either(map(repr, FAMILIES))}."
        )
    return FAMILIES[kind], Settings(str(file), told)


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise ConfigError(f"{file} is larger than {LARGEST_JSON >> 20} MiB.")
        told = json_value(file.read_bytes(), str(file), ConfigError)
    except OSError as error:
        raise ConfigError(f"{file} is not readable: {error.strerror}.") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{file}: expected a JSON object.")
    return told


class _Shards:
    """The arrays of a folder, by name, in one file or several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._files()
        self.handles: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        self.at = self._index()
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles.values():
            handle.__exit__(None, None, None)

    def _files(self) -> list[str]:
        """Return the names of the files with weights."""
        if (self.folder / INDEX).is_file():
            told = _json(self.folder / INDEX).get("weight_map")
            if not isinstance(told, dict) or not all(isinstance(v, str) for v in told.values()):
                raise ConfigError(f"{self.folder / INDEX}: expected names of files in weight_map.")
            return sorted(set(told.values()))
        if (self.folder / WEIGHTS).is_file():
            return [WEIGHTS]
        pickles = sorted(p.name for p in self.folder.glob("*.bin"))
        if pickles:
            raise ConfigError(
                f"{self.folder} has its weights in a pickle ({pickles[0]}), which can run any "
                "program when it is read: expected safetensors. Save the model again with "
                "save_pretrained."
            )
        raise ConfigError(f"{self.folder} has no {WEIGHTS} and no {INDEX}.")

    def _index(self) -> dict[str, str]:
        """Open all files; return the file of each array."""
        found: dict[str, str] = {}
        for name in self.files:
            path = self.folder / name
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(
                    f"{self.folder / INDEX}: shard {name!r}: expected the name of a safetensors "
                    "file in the same folder."
                )
            if not path.is_file():
                raise ConfigError(f"{self.folder} lacks the shard {name!r}, which its index names.")
            try:
                self.handles[name] = safe_open(path, framework="np").__enter__()
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is damaged: {error}.") from None
            found.update(dict.fromkeys(self.handles[name].keys(), name))
        return found

    def drop_prefix(self, prefix: str, wanted: set[str]) -> None:
        """Find arrays also under names without the family's prefix."""
        self.alias = {
            name: name if name in self.at else name.removeprefix(prefix) for name in wanted
        }

    def check(self, wanted: set[str], *, tied: bool) -> None:
        """Refuse missing and unknown arrays, and arrays that hold no plain numbers."""
        for name in sorted(wanted):
            if self.alias[name] not in self.at:
                raise ConfigError(f"{self.folder} has no tensor {name!r}, which its model needs.")
        known = set(self.alias.values())
        heads = {"lm_head.weight", "embed_out.weight"} if tied else set()
        for name in sorted(self.at.keys() - known - heads):
            if not name.endswith((*BUFFERS, ".rotary_emb.inv_freq")):
                raise ConfigError(
                    f"{self.folder} has a tensor {name!r}, which its model has no place for."
                )
        for name in known:
            kind = self._slice(name).get_dtype()
            if kind not in FLOATS:
                raise ConfigError(
                    f"{self.folder}: tensor {name!r} is of type {kind}: expected "
                    f"{either(FLOATS)}; quantised weights are not read from a folder."
                )

    def _slice(self, name: str) -> Any:
        return self.handles[self.at[name]].get_slice(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(self.alias[name]).get_shape())

    def array_of(self, name: str) -> np.ndarray:
        found = self.alias[name]
        array: np.ndarray = self.handles[self.at[found]].get_tensor(found)
        return array.astype(np.float32)


# ---- a folder out ----------------------------------------------------------------------------


def family_of(architecture: str, size: Dimensions) -> str:
    """Return the `model_type` that such a model is written as, or refuse.

    GPT-2 is a Transformer with learned positions.
    """
    if architecture == "transformer" and size.positions == "learned":
        architecture = "gpt2"
    for kind, family in FAMILIES.items():
        if family.architecture == architecture and family.fits(size):
            return kind
    raise ConfigError(
        f"model.name = {architecture!r}: Transformers has no class that computes the same. "
        "Expected a model of 'llama', 'gpt2' or 'gpt-neox'; 'transformer' with model.positions = "
        "'learned'; or 'mpt' with model.activation = 'gelu-exact' and model.hidden_size four times "
        "model.embedding_size. Or export as safetensors or onnx."
    )


def config_of(kind: str, size: Dimensions, tokens: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the `config.json` of a model; `tokens` are numbers of special tokens by name."""
    family = FAMILIES[kind]
    return {
        "model_type": kind,
        "architectures": [family.model],
        **family.write(size),
        "torch_dtype": "float32",
        **tokens,
    }


def weights_of(kind: str, size: Dimensions, params: Params) -> bytes:
    """Return the `model.safetensors` of a model."""
    arrays = tensors.write(FAMILIES[kind].table, params, size.heads)
    return bytes(save_tensors(arrays, {"format": "pt"}))
