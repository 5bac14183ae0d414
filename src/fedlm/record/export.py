"""A trained model for programs that know nothing of fedlm.

In:       a function from tokens to logits, with its parameters inside.
Out:      an ONNX file whose batch is free and whose length is fixed.
Promise:  the file gives the function's logits; it is whole or not there.
Not here: safetensors (`checkpoint.py` writes them with every run).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError


def to_onnx(logits: Callable[[Any], Any], length: int) -> bytes:
    """Return ONNX bytes with input `tokens` of shape (batch, length) and output `logits`."""
    try:
        import jax2onnx  # an extra
    except ImportError:
        raise RecordError("ONNX needs an extra: run pip install 'fedlm[onnx]'.") from None
    rows = jax.ShapeDtypeStruct(("batch", length), jnp.int32)
    model = jax2onnx.to_onnx(
        logits,
        inputs=[rows],
        model_name="fedlm",
        input_names=["tokens"],
        output_names=["logits"],
    )
    return bytes(model.SerializeToString())


def write_onnx(logits: Callable[[Any], Any], length: int, path: Path) -> None:
    """Write the ONNX file of a model."""
    write_atomically(path, to_onnx(logits, length))
