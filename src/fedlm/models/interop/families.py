"""Families of Hugging Face's Transformers: what their settings and arrays are called.

In:       a `config.json` as `Settings`, or sizes of a fedlm model.
Out:      sizes, or the entries of a `config.json`; a table of array names.
Promise:  one table per family drives reading and writing, so that one undoes the other; a setting
          that would change the logits and is not supported is refused by name.
Not here: files (`huggingface.py`), layouts of arrays (`tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlm.core.errors import ConfigError, shown
from fedlm.models.catalog import Dimensions
from fedlm.models.interop.settings import Settings
from fedlm.models.interop.tensors import Tensor

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
GELUS = {"gelu": "gelu-exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
THEIR_GELUS = {"gelu-exact": "gelu", "gelu": "gelu_new", "relu": "relu"}
NO_WINDOW = "full_attention"
# Numbers of a rope scaling, in the order of `model.rope_scaling`.
SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
ModelSizes = dict[str, Any]  # fields of `Dimensions`
NEEDED: Any = object()


@dataclass(frozen=True)
class ConfigEntry:
    """A setting of a `config.json`, and the field of `Dimensions` that it decides."""

    theirs: str
    ours: str
    kind: str = "count"  # a method of `Settings`, or gelu
    default: Any = NEEDED  # a value of theirs, or a function of the sizes that were read before

    def read(self, settings: Settings, sizes: ModelSizes) -> Any:
        """Return the value of our field."""
        default = self.default(sizes) if callable(self.default) else self.default
        more = () if default is NEEDED else (default,)
        if self.kind == "gelu":
            return settings.choice(self.theirs, GELUS, *more)
        return getattr(settings, self.kind)(self.theirs, *more)

    def write(self, size: Dimensions) -> Any:
        """Return the value of their setting; a size that is not set is what it defaults to."""
        value = getattr(size, self.ours)
        if value is None:
            value = self.default(vars(size))
        return THEIR_GELUS[value] if self.kind == "gelu" else value


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A `model_type` of Transformers: how its settings and arrays are read and written."""

    architecture: str
    model: str  # the class in Transformers
    entries: tuple[ConfigEntry, ...]
    table: tuple[Tensor, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the only values that are supported
    ignored: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)  # beside the entries
    check: Callable[[Settings], None] = lambda settings: None
    rope: str = ""  # "whole" or "partial": how much of a head rotary positions turn
    also: Callable[[ModelSizes], ModelSizes] = lambda sizes: {}  # sizes that follow from others
    fits: Callable[[Dimensions], bool] = lambda size: True  # a model to be written
    prefix: str = ""  # of names, which some folders leave out
    fan_in_fan_out: bool = False  # matrices are (in, out)

    def read(self, settings: Settings) -> ModelSizes:
        """Return the sizes that the settings give."""
        self.check(settings)
        settings.expect(**self.fixed)
        settings.ignore(self.ignored)
        sizes: ModelSizes = {}
        for entry in self.entries:
            sizes[entry.ours] = entry.read(settings, sizes)
        if self.rope:
            sizes |= _read_rope(settings, partial=self.rope == "partial")
        sizes |= self.also(sizes)
        if self.rope == "partial":
            _check_turned(settings.where, sizes)
        return sizes

    def write(self, size: Dimensions) -> dict[str, Any]:
        """Return the entries of a `config.json`."""
        made = {entry.theirs: entry.write(size) for entry in self.entries}
        rope = _write_rope(size, partial=self.rope == "partial") if self.rope else {}
        return {**made, **rope, **self.written}


# ---- rotary positions ------------------------------------------------------------------------


def _read_rope(settings: Settings, *, partial: bool) -> ModelSizes:
    """Return base, scaling and turned fraction of rotary positions.

    Newer files have all of it in `rope_parameters`, older ones in several settings.
    """
    told = settings.value("rope_parameters", None) or settings.value("rope_scaling", None) or {}
    settings.ignore(("rope_parameters", "rope_scaling"))
    inner = _inner(settings.where, "rope_parameters", told)
    sizes: ModelSizes = {"rope_scaling": _read_scaling(settings.where, inner)}
    theta = settings.number("rotary_emb_base", 10_000.0) if partial else 10_000.0
    sizes["rope_theta"] = inner.number("rope_theta", settings.number("rope_theta", theta))
    part = inner.value("partial_rotary_factor", None)
    inner.finish()
    if partial:
        older = settings.number("rotary_pct", 0.25)
        sizes["rotary_fraction"] = older if part is None else inner.number("partial_rotary_factor")
    elif part not in (None, 1.0):
        raise ConfigError(f"{settings.where}: partial_rotary_factor = {shown(part)}: expected 1.")
    return sizes


def _inner(where: str, name: str, told: Any) -> Settings:
    """Return the settings of a table within a `config.json`."""
    if not isinstance(told, dict):
        raise ConfigError(f"{where}: {name} = {shown(told)}: expected a table.")
    return Settings(f"{where}: {name}", told)


def _read_scaling(where: str, inner: Settings) -> str | None:
    """Return a scaling of positions as `model.rope_scaling` has it; None without one."""
    kind = inner.value("rope_type", inner.value("type", "default"))
    inner.ignore(("rope_type", "type"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(
            f"{where}: rope scaling of type {shown(kind)} is not supported: expected none, "
            f"{', '.join(map(repr, SCALINGS))}."
        )
    return " ".join([kind, *(repr(inner.number(name)) for name in SCALINGS[kind])])


def _write_rope(size: Dimensions, *, partial: bool) -> dict[str, Any]:
    kind, *numbers = (size.rope_scaling or "default").split()
    names = SCALINGS.get(kind, ())
    told: dict[str, Any] = {"rope_type": kind, "rope_theta": size.rope_theta}
    told |= dict(zip(names, map(float, numbers), strict=True))
    if "original_max_position_embeddings" in told:
        told["original_max_position_embeddings"] = int(told["original_max_position_embeddings"])
    if not partial:
        return {"rope_parameters": told, "rope_theta": size.rope_theta}
    told["partial_rotary_factor"] = size.rotary_fraction
    older = {"rotary_emb_base": size.rope_theta, "rotary_pct": size.rotary_fraction}
    return {"rope_parameters": told, **older}


def _check_turned(where: str, sizes: ModelSizes) -> None:
    turned = int(sizes["rotary_fraction"] * (sizes["embedding_size"] // sizes["heads"]))
    if turned < 2 or turned % 2:
        raise ConfigError(
            f"{where}: rotary positions turn {turned} numbers of a head: expected an even number."
        )


# ---- arrays that families name alike -----------------------------------------------------------


def _layers(
    block: str, pairs: Mapping[str, str], *, bias: bool = True, transposed: bool = False
) -> list[Tensor]:
    """Return the arrays of linear layers that are single on both sides."""
    return [
        Tensor(
            f"{block}.{theirs}.{kind}",
            (f"blocks.{{i}}.{ours}.{kind}",),
            transposed=transposed and kind == "weight",
        )
        for ours, theirs in pairs.items()
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


def _qkv(theirs: str, *, bias: bool = True, **layout: bool) -> list[Tensor]:
    """Return the arrays that hold queries, keys and values together."""
    turned = layout.pop("transposed", False)
    return [
        Tensor(
            f"{theirs}.{kind}",
            tuple(f"blocks.{{i}}.attention.{part}.{kind}" for part in ("query", "key", "value")),
            transposed=turned and kind == "weight",
            **layout,
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


def _norms(block: str, first: str, second: str, last: str) -> list[Tensor]:
    """Return the arrays of the norms; those without a shift have no second array."""
    return [
        Tensor(f"{theirs}.{there}", (f"{ours}.{here}",))
        for ours, theirs in (
            ("blocks.{i}.norm_attention", f"{block}.{first}"),
            ("blocks.{i}.norm_feedforward", f"{block}.{second}"),
            ("last", last),
        )
        for here, there in (("gain", "weight"), ("shift", "bias"))
    ]


# ---- Llama, Mistral, Qwen2 ---------------------------------------------------------------------


def _llama(**changes: Any) -> ModelFamily:
    """Return a family with Llama's arrays and settings."""
    common: dict[str, Any] = {
        "architecture": "llama",
        "entries": (
            ConfigEntry("vocab_size", "vocab"),
            ConfigEntry("hidden_size", "embedding_size"),
            ConfigEntry("intermediate_size", "hidden_size"),
            ConfigEntry("num_hidden_layers", "layers"),
            ConfigEntry("num_attention_heads", "heads"),
            ConfigEntry("num_key_value_heads", "key_heads", default=lambda sizes: sizes["heads"]),
            ConfigEntry("head_dim", "head_size", default=_head_size),
            ConfigEntry("max_position_embeddings", "length", default=2048),
            ConfigEntry("rms_norm_eps", "norm_epsilon", "number", 1e-6),
            ConfigEntry("tie_word_embeddings", "tied", "flag", False),
        ),
        "fixed": {
            "pretraining_tp": 1,
            "sliding_window": None,
            "rope_interleaved": False,
            "is_llama_config": True,
        },
        "written": {"hidden_act": "silu"},
        "check": _gated_by_silu,
        "rope": "whole",
        "table": (
            Tensor("model.embed_tokens.weight", ("stem.embedding",)),
            *_layers(
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
            ),
            *_norms(
                "model.layers.{i}", "input_layernorm", "post_attention_layernorm", "model.norm"
            ),
            Tensor("lm_head.weight", ("head",)),
        ),
    }
    for name in ("entries", "fixed", "written"):
        if name in changes:
            more = changes.pop(name)
            common[name] = common[name] + more if name == "entries" else {**common[name], **more}
    return ModelFamily(**{**common, **changes})


def _head_size(sizes: ModelSizes) -> int:
    size: int = sizes["embedding_size"] // sizes["heads"]
    return size


def _gated_by_silu(settings: Settings) -> None:
    settings.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")


def _mistral(settings: Settings) -> None:
    _gated_by_silu(settings)
    found = settings.value("sliding_window", None)
    if found is not None:
        raise ConfigError(
            f"{settings.where}: sliding_window = {found!r} is not supported: expected null."
        )


def _qwen2(settings: Settings) -> None:
    _gated_by_silu(settings)
    settings.expect(use_sliding_window=False)
    kinds = settings.value("layer_types", [])
    if not isinstance(kinds, list) or any(kind != NO_WINDOW for kind in kinds):
        raise ConfigError(
            f"{settings.where}: layer_types = {shown(kinds)} is not supported: expected "
            f"{NO_WINDOW!r} in every layer."
        )
    settings.values.pop("sliding_window", None)  # a window that is switched off


# ---- MPT ---------------------------------------------------------------------------------------


def _mpt(settings: Settings) -> None:
    settings.choice("norm_type", {"low_precision_layernorm": 1, "layernorm": 1}, "layernorm")
    attention = _inner(settings.where, "attn_config", settings.value("attn_config", {}))
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


# ---- all ---------------------------------------------------------------------------------------


FAMILIES: dict[str, ModelFamily] = {
    "llama": _llama(
        model="LlamaForCausalLM",
        entries=(
            ConfigEntry("attention_bias", "qkv_bias", "flag", False),
            ConfigEntry("mlp_bias", "mlp_bias", "flag", False),
        ),
        also=lambda sizes: {"out_bias": sizes["qkv_bias"]},
        fits=lambda size: size.qkv_bias == size.out_bias,
    ),
    "mistral": _llama(
        model="MistralForCausalLM",
        check=_mistral,
        fixed={"attention_bias": False, "mlp_bias": False},
        also=lambda sizes: {"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        fits=lambda size: False,  # written as Llama, which is the same
    ),
    "qwen2": _llama(
        model="Qwen2ForCausalLM",
        check=_qwen2,
        fixed={"attention_bias": False, "mlp_bias": False},
        ignored=("max_window_layers",),
        also=lambda sizes: {"qkv_bias": True, "out_bias": False, "mlp_bias": False},
        fits=lambda size: size.qkv_bias and not (size.out_bias or size.mlp_bias),
    ),
    "gpt2": ModelFamily(
        architecture="gpt2",
        model="GPT2LMHeadModel",
        entries=(
            ConfigEntry("vocab_size", "vocab"),
            ConfigEntry("n_embd", "embedding_size"),
            ConfigEntry(
                "n_inner", "hidden_size", default=lambda sizes: 4 * sizes["embedding_size"]
            ),
            ConfigEntry("n_layer", "layers"),
            ConfigEntry("n_head", "heads"),
            ConfigEntry("n_positions", "length", default=1024),
            ConfigEntry("activation_function", "activation", "gelu", "gelu_new"),
            ConfigEntry("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
        ),
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        ignored=("n_ctx",),
        written={"tie_word_embeddings": True},
        prefix="transformer.",
        fan_in_fan_out=True,
        table=(
            Tensor("transformer.wte.weight", ("stem.embedding",)),
            Tensor("transformer.wpe.weight", ("stem.places",)),
            *_norms("transformer.h.{i}", "ln_1", "ln_2", "transformer.ln_f"),
            *_qkv("transformer.h.{i}.attn.c_attn", transposed=True),
            *_layers(
                "transformer.h.{i}",
                {
                    "attention.out": "attn.c_proj",
                    "feedforward.up": "mlp.c_fc",
                    "feedforward.down": "mlp.c_proj",
                },
                transposed=True,
            ),
        ),
    ),
    "gpt_neox": ModelFamily(
        architecture="gpt-neox",
        model="GPTNeoXForCausalLM",
        entries=(
            ConfigEntry("vocab_size", "vocab"),
            ConfigEntry("hidden_size", "embedding_size"),
            ConfigEntry("intermediate_size", "hidden_size"),
            ConfigEntry("num_hidden_layers", "layers"),
            ConfigEntry("num_attention_heads", "heads"),
            ConfigEntry("hidden_act", "activation", "gelu", "gelu"),
            ConfigEntry("layer_norm_eps", "norm_epsilon", "number", 1e-5),
            ConfigEntry("max_position_embeddings", "length", default=2048),
            ConfigEntry("use_parallel_residual", "parallel", "flag", True),
            ConfigEntry("tie_word_embeddings", "tied", "flag", False),
        ),
        fixed={"attention_bias": True},
        ignored=("rotary_pct",),
        rope="partial",
        table=(
            Tensor("gpt_neox.embed_in.weight", ("stem.embedding",)),
            *_norms(
                "gpt_neox.layers.{i}",
                "input_layernorm",
                "post_attention_layernorm",
                "gpt_neox.final_layer_norm",
            ),
            *_qkv("gpt_neox.layers.{i}.attention.query_key_value", interleaved=True),
            *_layers(
                "gpt_neox.layers.{i}",
                {
                    "attention.out": "attention.dense",
                    "feedforward.up": "mlp.dense_h_to_4h",
                    "feedforward.down": "mlp.dense_4h_to_h",
                },
            ),
            Tensor("embed_out.weight", ("head",)),
        ),
    ),
    "mpt": ModelFamily(
        architecture="mpt",
        model="MptForCausalLM",
        entries=(
            ConfigEntry("vocab_size", "vocab"),
            ConfigEntry("d_model", "embedding_size"),
            ConfigEntry("n_layers", "layers"),
            ConfigEntry("n_heads", "heads"),
            ConfigEntry("max_seq_len", "length", default=2048),
            ConfigEntry("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
        ),
        fixed={
            "no_bias": True,
            "expansion_ratio": 4,
            "logit_scale": None,
            "embedding_fraction": 1.0,
            "tie_word_embeddings": True,
        },
        ignored=("init_device", "learned_pos_emb", "init_config", "tokenizer_name", "verbose"),
        written={
            "expansion_ratio": 4,
            "no_bias": True,
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "model_type": ""},
            "tie_word_embeddings": True,
        },
        check=_mpt,
        also=lambda sizes: {
            "hidden_size": 4 * sizes["embedding_size"],
            "activation": "gelu-exact",
        },
        fits=lambda size: (
            size.activation == "gelu-exact" and size.hidden_size == 4 * size.embedding_size
        ),
        table=(
            Tensor("transformer.wte.weight", ("stem.embedding",)),
            *_norms("transformer.blocks.{i}", "norm_1", "norm_2", "transformer.norm_f"),
            *_qkv("transformer.blocks.{i}.attn.Wqkv", bias=False),
            *_layers(
                "transformer.blocks.{i}",
                {
                    "attention.out": "attn.out_proj",
                    "feedforward.up": "ffn.up_proj",
                    "feedforward.down": "ffn.down_proj",
                },
                bias=False,
            ),
        ),
    ),
}
