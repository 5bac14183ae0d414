"""Low-rank adapters on a frozen model (LoRA, Hu et al. 2022).

In:       a model, a rank, patterns of its linear layers, a key.
Out:      the same model with adapters in these layers; a model with its adapters merged.
Promise:  a fresh adapter changes nothing; A follows from the key and is never trained or sent, so
          the mean of members' B is exactly the mean of their changes; merging changes the logits
          by rounding alone.
Not here: how the frozen part is held (`Algorithm.base`), files (`interop/peft.py`).
"""

from __future__ import annotations

import fnmatch
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PRNGKeyArray

from fedlm.core import tree
from fedlm.core.errors import ConfigError, require
from fedlm.core.types import Params
from fedlm.models.embedding import Dtype
from fedlm.models.layers import Adapted, Linear
from fedlm.models.split import layer_of

TRAINED = "*.lora_b"
QUERIES_AND_VALUES = ("*.attention.query", "*.attention.value")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which linear layers have an adapter, of which rank; the change is `alpha / rank` B A."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = QUERIES_AND_VALUES  # patterns of names
    last_blocks: int = 0  # only in so many blocks, from the end; 0: in all
    base_dtype: Dtype = "float32"  # of what is frozen


def linear_layers(model: Params) -> dict[str, Linear]:
    """Return the linear layers of a model by dotted name.

    >>> from fedlm.models import catalog
    >>> shapes = catalog.shapes("llama", catalog.Dimensions(layers=1))
    >>> list(linear_layers(shapes))[:2]
    ['blocks.0.attention.query', 'blocks.0.attention.key']
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_linear)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in flat}
    return {name: x for name, x in found.items() if _is_linear(x)}


def _is_linear(x: object) -> bool:
    return isinstance(x, Linear)


def targets_of(model: Params, adapters: Adapters) -> list[str]:
    """Return the names of the layers that have an adapter."""
    layers = linear_layers(model)
    for pattern in adapters.targets:
        if not fnmatch.filter(layers, pattern):
            some = ", ".join(list(layers)[:4]) or "none"
            raise ConfigError(
                f"wire.targets = {pattern!r}: this model has no such linear layer; it has {some}, "
                "..."
            )
    blocks = list(dict.fromkeys(layer_of(name) for name in layers))
    require(
        adapters.last_blocks <= len(blocks),
        "wire.last_blocks",
        adapters.last_blocks,
        f"at most {len(blocks)}, the number of blocks",
    )
    last = blocks[-adapters.last_blocks :]
    found = [
        name
        for name in layers
        if layer_of(name) in last and any(fnmatch.fnmatchcase(name, p) for p in adapters.targets)
    ]
    for name in found:
        least = min(layers[name].weight.shape)
        require(
            adapters.rank <= least,
            "wire.rank",
            adapters.rank,
            f"at most {least}, the smaller side of {name}",
        )
    return found


def adapt(model: Params, adapters: Adapters, key: PRNGKeyArray) -> Params:
    """Return the model with fresh adapters: A drawn from the key, B zero."""
    chosen = set(targets_of(model, adapters))
    dtype = jnp.dtype(adapters.base_dtype)

    def put(path: Any, layer: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        held = jax.tree.map(lambda x: x.astype(dtype), layer)
        if name not in chosen:
            return held
        outputs, inputs = layer.weight.shape
        own = jr.fold_in(key, zlib.crc32(name.encode()))
        return Adapted(
            held.weight,
            held.bias,
            jr.normal(own, (adapters.rank, inputs)) * inputs**-0.5,
            jnp.zeros((outputs, adapters.rank)),
            adapters.alpha / adapters.rank,
        )

    return jax.tree_util.tree_map_with_path(put, model, is_leaf=_is_linear)


def merged(model: Params) -> Params:
    """Return the model in float32, with the change of each adapter added to its layer."""

    def merge(layer: Any) -> Any:
        if not isinstance(layer, Adapted):
            return jax.tree.map(_float32, layer)
        change = layer.scale * (layer.lora_b @ layer.lora_a)
        bias = None if layer.bias is None else _float32(layer.bias)
        return Linear(_float32(layer.weight) + change, bias)

    return jax.tree.map(merge, model, is_leaf=_is_linear)


def _float32(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def factors(model: Params) -> dict[str, Any]:
    """Return the A and B of every adapter, by leaf name; empty without adapters."""
    leaves = tree.named_leaves(model)
    return {n: x for n, x in leaves.items() if n.endswith((".lora_a", ".lora_b"))}


def without_adapters(model: Params) -> Params:
    """Return the frozen model alone, as it is held."""
    return jax.tree.map(
        lambda x: Linear(x.weight, x.bias) if isinstance(x, Adapted) else x,
        model,
        is_leaf=_is_linear,
    )
