"""Models of Hugging Face's Transformers: a folder in, a folder out.

In:       a folder with `config.json` and safetensors files; or a fedlm model and its sizes.
Out:      architecture and sizes, and the model; or the files of such a folder.
Promise:  the logits are those of Transformers' own class; a setting that would change them and is
          not supported is refused by name; nothing is unpickled.
Not here: families (`families.py`), GGUF files (`gguf.py`), adapters (`peft.py`), tokenizers
          (`corpus`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  bfloat16 for NumPy, which safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_tensors

from fedlm.core.documents import json_value
from fedlm.core.errors import ConfigError, damaged, either, shown
from fedlm.core.types import Params
from fedlm.models import catalog
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import tensors
from fedlm.models.interop.families import FAMILIES, SILENT, ModelFamily
from fedlm.models.interop.settings import Settings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON = 64 << 20
MOST_LAYERS, MOST_SIZE = 512, 1 << 24
FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that older versions saved beside the weights; they hold no weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True)
class Base:
    """A model made elsewhere: its architecture here, and the sizes that its settings give."""

    architecture: str
    sizes: Mapping[str, Any]  # fields of `Dimensions`
    where: str = field(default="the model", compare=False)  # the file that says so

    def __post_init__(self) -> None:
        """Refuse sizes of no model: already the shapes of a billion layers take for ever."""
        for name, size in self.sizes.items():
            most = MOST_LAYERS if name == "layers" else MOST_SIZE
            if type(size) is int and size > most:
                raise ConfigError(f"{self.where}: {name} = {size:,}: expected at most {most:,}.")
        heads, keys, width = (self.sizes.get(n) for n in ("heads", "key_heads", "head_size"))
        if heads and keys and heads % keys:
            raise ConfigError(
                f"{self.where}: {heads} heads share {keys} keys: expected as many or a divisor. "
                f"{tensors.AGAIN}"
            )
        if width and width % 2:
            raise ConfigError(
                f"{self.where}: a head of {width} numbers: expected an even number, because "
                f"rotary positions turn pairs. {tensors.AGAIN}"
            )


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
    return Base(family.architecture, sizes, str(folder / CONFIG))


def load(folder: Path, size: Dimensions) -> Params:
    """Return the model in a folder, in float32."""
    family, _ = _open(folder)
    with damaged(str(folder), ConfigError):
        like = catalog.shapes(family.architecture, size)
    return read_weights(folder, family, like, size)


def read_weights(folder: Path, family: ModelFamily, like: Params, size: Dimensions) -> Params:
    """Return the model with shapes `like` in a folder, in float32."""
    with _Shards(folder) as shards:
        wanted = tensors.names(family.table, like)
        shards.drop_prefix(family.prefix, wanted)
        shards.check(wanted, tied=getattr(like, "head", None) is None)
        return tensors.read(
            family.table, like, size.heads, shards.shape_of, shards.array_of, str(folder)
        )


def _open(folder: Path) -> tuple[ModelFamily, Settings]:
    file = folder / CONFIG
    told = _json(file)
    kind = told.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{file}: model_type = {shown(kind)} is not supported: expected "
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
        raise ConfigError(f"{self.folder} has no {WEIGHTS} and no {INDEX}. {tensors.AGAIN}")

    def _index(self) -> dict[str, str]:
        """Open all files; return the file of each array."""
        found: dict[str, str] = {}
        for name in self.files:
            path = self.folder / name
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(
                    f"{self.folder / INDEX}: shard {shown(name)}: expected the name of a "
                    "safetensors file in the same folder."
                )
            if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
                raise ConfigError(
                    f"{self.folder} lacks the shard {shown(name)}, which its index names. "
                    f"{tensors.AGAIN}"
                )
            try:
                self.handles[name] = safe_open(path, framework="np").__enter__()
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is damaged: {error}. {tensors.AGAIN}") from None
            here = self.handles[name].keys()
            for twice in sorted(found.keys() & here):
                raise ConfigError(
                    f"{self.folder}: tensor {shown(twice)} is in {found[twice]} and in {name}: "
                    f"nobody can tell which one counts. {tensors.AGAIN}"
                )
            found.update(dict.fromkeys(here, name))
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
                raise ConfigError(
                    f"{self.folder} has no tensor {name!r}, which its model needs. {tensors.AGAIN}"
                )
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
        with np.errstate(over="ignore"):  # what is beyond float32 is refused as not finite
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
