"""GGUF files of Llama architecture, as llama.cpp and its friends use them.

In:       the path of a `.gguf` file.
Out:      architecture and sizes, the model in float32, and its tokenizer.
Promise:  every quantised block is made into the numbers that it stands for; rows of queries and
          keys, which the format permutes, are put back; a setting or type that is not read is
          refused by name, and so is a file whose counts lead beyond its end.
Not here: the format itself (PyPI `gguf`, the extra `fedlm[gguf]`).
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fedlm.core.errors import SURPRISES, ConfigError, damaged, either, library_errors, shown
from fedlm.core.types import Params
from fedlm.models import catalog
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import tensors
from fedlm.models.interop.huggingface import Base
from fedlm.models.interop.settings import Settings
from fedlm.models.interop.tensors import Tensor

SUFFIX = ".gguf"
ABOUT = ("general.", "tokenizer.", "quantize.", "GGUF.", "split.")  # nothing about the logits
# How llama.cpp names the splitting of text before byte-level pairs are merged.
PRE = {"default": False, "gpt-2": False, "smollm": True}  # whether digits stand alone
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
# The bytes of a value by its type in the file; texts and lists tell their own length.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, LIST = 8, 9
MOST_DIMENSIONS = 4
_BLOCK = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "feedforward.gate": "ffn_gate",
    "feedforward.up": "ffn_up",
    "feedforward.down": "ffn_down",
}
TABLE = (
    Tensor("token_embd.weight", ("stem.embedding",)),
    *(
        Tensor(f"blk.{{i}}.{theirs}.weight", (f"blocks.{{i}}.{ours}.weight",))
        for ours, theirs in _BLOCK.items()
    ),
    Tensor("blk.{i}.attn_norm.weight", ("blocks.{i}.norm_attention.gain",)),
    Tensor("blk.{i}.ffn_norm.weight", ("blocks.{i}.norm_feedforward.gain",)),
    Tensor("output_norm.weight", ("last.gain",)),
    Tensor("output.weight", ("head",)),
)


def read_base(path: Path) -> Base:
    """Return the sizes of the model in a file."""
    with damaged(str(path), ConfigError):
        return _read_base(path, _open(path))


def _read_base(path: Path, reader: Any) -> Base:
    values = _values(reader)
    settings = Settings(str(path), values)
    settings.choice("general.architecture", {"llama": "llama"})
    found = {
        "vocab": int(_shapes(reader).get("token_embd.weight", (0,))[0]),
        "embedding_size": settings.count("llama.embedding_length"),
        "hidden_size": settings.count("llama.feed_forward_length"),
        "layers": settings.count("llama.block_count"),
        "heads": settings.count("llama.attention.head_count"),
    }
    head = found["embedding_size"] // found["heads"]
    settings.expect(
        **{
            "llama.rope.dimension_count": head,
            "llama.attention.key_length": head,
            "llama.attention.value_length": head,
            "llama.rope.scaling.type": "none",
            "llama.expert_count": 0,
            "llama.expert_used_count": 0,
        }
    )
    settings.ignore(("llama.vocab_size",))
    sizes = {
        **found,
        "key_heads": settings.count("llama.attention.head_count_kv", found["heads"]),
        "head_size": head,
        "length": settings.count("llama.context_length", 2048),
        "rope_theta": _shortest(settings.number("llama.rope.freq_base", 10_000.0)),
        "norm_epsilon": _shortest(settings.number("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "tied": "output.weight" not in _shapes(reader),
    }
    settings.finish({name for name in values if name.startswith(ABOUT)})
    return Base("llama", sizes, str(path))


def load(path: Path, size: Dimensions) -> Params:
    """Return the model in a file, in float32."""
    with damaged(str(path), ConfigError):
        like = catalog.shapes("llama", size)
    return read_weights(path, size, like)


def read_weights(path: Path, size: Dimensions, like: Params) -> Params:
    """Return the model with shapes `like` in a file, in float32."""
    with damaged(str(path), ConfigError):
        return _read_weights(path, size, like, _open(path))


def _read_weights(path: Path, size: Dimensions, like: Params, reader: Any) -> Params:
    found = {tensor.name: tensor for tensor in reader.tensors}
    wanted = tensors.names(TABLE, like)
    for name in sorted(wanted ^ found.keys()):
        fault = "has no tensor" if name in wanted else "has a tensor that fedlm does not know:"
        raise ConfigError(f"{path} {fault} {name!r}.")
    shapes, heads = _shapes(reader), {"attn_q": size.heads, "attn_k": size.key_heads or size.heads}

    def array_of(name: str) -> np.ndarray:
        array = _dequantised(found[name], path)
        part = name.split(".")[-2]
        return unpermuted(array, heads[part]) if part in heads else array

    return tensors.read(TABLE, like, size.heads, shapes.__getitem__, array_of, str(path))


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys in the order of rotary halves.

    The format stores the two numbers that rotary positions turn together side by side; fedlm, like
    Transformers, keeps them half a head apart. Without this the model still speaks, and badly.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tokens_of(path: Path) -> list[str]:
    """Return the vocabulary in a file, in order."""
    with damaged(str(path), ConfigError):
        found: list[str] = list(
            Settings(str(path), _values(_open(path))).value("tokenizer.ggml.tokens")
        )
        return found


def stated_licence(path: Path) -> str | None:
    """Return the licence that a file states."""
    return _text(path, "general.license")


def chat_template_of(path: Path) -> str | None:
    """Return the template that turns a conversation into text."""
    return _text(path, "tokenizer.chat_template")


def _text(path: Path, name: str) -> str | None:
    with damaged(str(path), ConfigError):
        found = _values(_open(path)).get(name)
        return found if isinstance(found, str) else None


def tokenizer_of(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer in a file, and its bos, eos and unk tokens by their usual names."""
    with damaged(str(path), ConfigError):
        return _tokenizer_of(path)


def _tokenizer_of(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    settings = Settings(str(path), _values(_open(path)))
    settings.choice("tokenizer.ggml.model", {"gpt2": "gpt2"})
    digits = settings.choice("tokenizer.ggml.pre", PRE, "default")
    tokens = list(settings.value("tokenizer.ggml.tokens"))
    merges = [tuple(line.split(" ", 1)) for line in settings.value("tokenizer.ggml.merges")]
    kinds = list(settings.value("tokenizer.ggml.token_type", [1] * len(tokens)))
    what = f"the tokenizer of {path} is not one that the tokenizers library can use"
    with library_errors(what, "Take another file.", ConfigError):
        made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
        first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        made.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_]) if digits else bytes_
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
    names = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    found: dict[str, str | None] = {}
    for name, key in names.items():
        number = settings.value(key, None)
        if number is not None and number not in range(len(tokens)):  # -1 would be the last one
            raise ConfigError(
                f"{path}: {key} = {shown(number)}: expected the number of one of its "
                f"{len(tokens)} tokens. {tensors.AGAIN}"
            )
        found[name] = None if number is None else tokens[number]
    return made, found


def _open(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise ConfigError(f"{path} is no regular file: expected a GGUF file.")
        check_bounds(path)
        import gguf  # an extra

        reader = gguf.GGUFReader(path)
        _check_apart(reader)
        return reader
    except ImportError:
        raise ConfigError(f"{path}: GGUF needs an extra: run pip install 'fedlm[gguf]'.") from None
    except OSError as error:
        raise ConfigError(f"{path} is not readable: {error.strerror}.") from None
    except (*SURPRISES, struct.error) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is not a whole GGUF file: {reason}. {tensors.AGAIN}") from None


def check_bounds(path: Path) -> None:
    """Raise `ValueError` if a count or length in a file's head leads beyond the end of the file.

    The library follows such a count for ever, and takes memory as it goes.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Head(data).check()


def _check_apart(reader: Any) -> None:
    """Raise `ValueError` if a tensor begins within another one."""
    at = int(reader.data_offset)
    for begin, size, name in sorted(
        (int(t.data_offset), int(t.n_bytes), t.name) for t in reader.tensors
    ):
        if begin < at:
            raise ValueError(f"tensor {name!r} begins within another one")
        at = begin + size


class _Head:
    """The head of a GGUF file, walked from value to value."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.order = data, 4, "<"

    def number(self, kind: str) -> int:
        (found,) = struct.unpack_from(self.order + kind, self.data, self.at)
        self.at += struct.calcsize(self.order + kind)
        return int(found)

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise ValueError("a length leads beyond its end")
        self.at += size

    def check(self) -> None:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0:  # written on a machine with the other order of bytes
            self.order = ">"
        arrays, values = self.number("Q"), self.number("Q")
        for _ in range(values):
            self.skip(self.number("Q"))
            self.value(self.number("I"))
        for _ in range(arrays):
            self.skip(self.number("Q"))
            dimensions = self.number("I")
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            if math.prod(self.number("Q") for _ in range(dimensions)) > 64 * len(self.data):
                raise ValueError("a tensor is larger than the file")
            self.skip(4)  # its type
            # Offsets are unsigned: a large one would wrap around, to before the data.
            if self.number("Q") > len(self.data):
                raise ValueError("a tensor begins beyond its end")

    def value(self, kind: int) -> None:
        if kind == TEXT:
            self.skip(self.number("Q"))
        elif kind == LIST:
            kind, count = self.number("I"), self.number("Q")
            if kind == TEXT:
                for _ in range(count):
                    self.skip(self.number("Q"))
            else:
                self.skip(count * VALUE_BYTES[kind])
        else:
            self.skip(VALUE_BYTES[kind])


def _shortest(value: float) -> float:
    """Return the number that was meant by a float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _values(reader: Any) -> dict[str, Any]:
    return {name: part.contents() for name, part in reader.fields.items()}


def _shapes(reader: Any) -> dict[str, tuple[int, ...]]:
    # The format names the fastest dimension first.
    return {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}


def _dequantised(tensor: Any, path: Path) -> np.ndarray:
    from gguf import quants  # an extra

    try:
        return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError:
        known = either(kind.name for kind in (*quants._type_traits,))
        raise ConfigError(
            f"{path}: tensor {tensor.name!r} has the quantisation type {tensor.tensor_type.name}, "
            f"which is not read: expected F32, F16, {known}."
        ) from None
