"""Adapters for Hugging Face's PEFT.

In:       the A and B of a model's adapters, and the sizes of the model.
Out:      `adapter_config.json` and `adapter_model.safetensors`.
Promise:  loaded on the same base, PEFT gives the logits of the merged model.
Not here: the base (`huggingface.py`).

Where Transformers holds queries, keys and values in one matrix, the adapters of its parts become
one adapter: the A's one below the other, the B's in the rows of their parts, zero elsewhere. Its
rank is the sum of theirs, and its alpha grows alike, so that the change is the same.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

from fedlm.models import catalog
from fedlm.models.adapters import Adapters
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import tensors
from fedlm.models.interop.families import FAMILIES
from fedlm.models.interop.tensors import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def files_of(
    kind: str,
    size: Dimensions,
    adapters: Adapters,
    factors: Mapping[str, np.ndarray],
    base: str,
) -> dict[str, bytes]:
    """Return the files of an adapter of a `model_type`; `base` is where its model is found."""
    family = FAMILIES[kind]
    modules = tensors.modules(family.table, catalog.shapes(family.architecture, size))
    groups: dict[Tensor, list[str]] = defaultdict(list)
    for name in factors:
        if name.endswith(".lora_b"):
            layer = name.removesuffix(".lora_b")
            groups[modules[layer]].append(layer)
    arrays, ranks = {}, {}
    for entry, layers in groups.items():
        module = entry.theirs.removesuffix(".weight")
        a, b = _fused(entry, layers, factors, size)
        arrays[f"base_model.model.{module}.lora_A.weight"] = a
        arrays[f"base_model.model.{module}.lora_B.weight"] = b
        ranks[module] = len(a)
    scale = adapters.alpha / adapters.rank
    other = {module: rank for module, rank in ranks.items() if rank != adapters.rank}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": family.fan_in_fan_out,
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        "alpha_pattern": {module: scale * rank for module, rank in other.items()},
        "inference_mode": True,
    }
    return {
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        WEIGHTS: bytes(save_tensors(arrays, {"format": "pt"})),
    }


def _fused(
    entry: Tensor, layers: list[str], factors: Mapping[str, np.ndarray], size: Dimensions
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of the matrix that holds these layers, and perhaps others."""
    parts = [name.removesuffix(".weight") for name in entry.ours]
    adapted = [part for part in parts if part in layers]
    a = np.concatenate([np.asarray(factors[f"{part}.lora_a"]) for part in adapted])
    own = {part: np.asarray(factors[f"{part}.lora_b"]) for part in adapted}
    rank, at, blocks = len(a), 0, []
    rows = next(iter(own.values())).shape[0]  # parts of one matrix are queries, keys, values
    for part in parts:
        block = np.zeros((own[part].shape[0] if part in own else rows, rank), np.float32)
        if part in own:
            block[:, at : at + own[part].shape[1]] = own[part]
            at += own[part].shape[1]
        blocks.append(block)
    b = replace(entry, transposed=False).join(blocks, size.heads)
    return np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
