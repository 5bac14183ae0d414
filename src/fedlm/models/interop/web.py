"""A recurrent model as bytes and settings that a web page computes with.

In:       a recurrent model.
Out:      its arrays one after the other, as float32 or int8; where each lies; its cell in words.
Promise:  `web/model.js` gives the logits of the model that the bytes stand for; an int8 matrix has
          one scale for each row, and no weight moves by more than half a step of its row.
Not here: the page (`web/`), the tokenizer (`publish/formats.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.types import Params
from fedlm.models.cells import Cifg, Lstm, SiCifg
from fedlm.models.recurrent import Recurrent

KINDS = {Lstm: "lstm", Cifg: "cifg", SiCifg: "si-cifg"}
STEPS = 127  # of an int8 row, on either side of zero


def is_plain(params: Params) -> bool:
    """Return whether the page computes a model by itself: a recurrent one."""
    return isinstance(params, Recurrent) and type(params.cell) in KINDS


def pack(params: Params, *, int8: bool) -> tuple[dict[str, Any], bytes]:
    """Return the settings and the bytes of a recurrent model; matrices are int8 on request."""
    if not is_plain(params):
        raise ConfigError(
            "format = 'web': expected a recurrent model (lstm, cifg or si-cifg), which a page can "
            "compute by itself; others need onnxruntime-web: run npm install onnxruntime-web, and "
            "add --onnxruntime node_modules/onnxruntime-web/dist."
        )
    assert isinstance(params, Recurrent)
    places, parts, offset = [], [], 0
    for name, leaf in tree.named_leaves(params).items():
        array = np.asarray(leaf, np.float32)
        packed = int8 and array.ndim == 2
        data = _int8(array) if packed else array.astype("<f4").tobytes()
        kind = "int8" if packed else "float32"
        places.append({"name": name, "shape": list(array.shape), "type": kind, "offset": offset})
        data += bytes(-len(data) % 4)  # floats begin at multiples of four
        parts.append(data)
        offset += len(data)
    made: Any = params.cell  # a dataclass of settings
    cell = {"kind": KINDS[type(made)], **dataclasses.asdict(made)}
    config = {
        "cell": cell,
        "gates": cell.pop("gates"),
        "units": int(params.layers[0].project.shape[1]),
        "layers": len(params.layers),
        "arrays": places,
    }
    return config, b"".join(parts)


def _int8(matrix: np.ndarray) -> bytes:
    """Return the scale of each row, then the rows in steps of it."""
    scales = _scales(matrix)
    steps = np.rint(matrix / scales[:, None]).astype(np.int8)
    return bytes(scales.astype("<f4").tobytes() + steps.tobytes())


def _scales(matrix: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(matrix).max(axis=1) / STEPS, np.float32(1e-30)).astype(np.float32)


def rounded(params: Params) -> Params:
    """Return the model that the int8 bytes of a model stand for."""

    def round_rows(leaf: Any) -> Any:
        array = np.asarray(leaf, np.float32)
        if array.ndim != 2:
            return jnp.asarray(array)
        scales = _scales(array)[:, None]
        return jnp.asarray(np.rint(array / scales) * scales)

    leaves = tree.named_leaves(params)
    return tree.with_leaves(params, {name: round_rows(leaf) for name, leaf in leaves.items()})
