"""A trained model as ONNX, for programs that know nothing of fedlm.

In:       a model's functions, with its parameters inside.
Out:      an ONNX file. Of a model that reads one token at a time: `token` and the state before it
          in, `logits` and the state after it out; all zeros are the state before the first token,
          and the size of a batch is free. Of any other: whole rows in, their logits out.
Promise:  the file gives the function's logits; it is whole or not there; int8 weights are a
          quarter of the size, and no weight moves by more than half a step of its row.
Not here: safetensors (`checkpoint.py` writes them with every run), metadata (`publish/formats.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.documents import JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.types import PAD, PyTree

TOKEN, LOGITS, STATE, NEXT = "token", "logits", "state_", "next_"
LEAST_PACKED = 1024  # numbers of a matrix; smaller ones stay float32
STEPS = 127  # of int8, on either side of zero
EXTRA = "ONNX needs an extra: run pip install 'fedlm[onnx]'."


def to_onnx(logits: Callable[[PyTree], PyTree], length: int) -> bytes:
    """Return ONNX bytes with input `tokens` of shape (batch, length) and output `logits`."""
    rows = jax.ShapeDtypeStruct(("batch", length), jnp.int32)
    return bytes(_converted(logits, [rows], ["tokens"], [LOGITS]).SerializeToString())


def step_to_onnx(
    advance: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    start: Callable[[int], PyTree],
    metadata: Mapping[str, str],
    *,
    int8: bool = False,
) -> bytes:
    """Return ONNX bytes of one step: a token per row and the state, to logits and the next state.

    Args:
      advance: state and tokens to the next state and logits.
      start: the state before the first token, for a number of rows.
      metadata: what the file says of itself, by name.
      int8: whether matrices are kept as int8 with a scale per row.
    """
    shape = jax.eval_shape(lambda: start(2))
    pairs = zip(
        *(jax.tree.leaves(jax.eval_shape(lambda n=n: start(n))) for n in (2, 3)), strict=True
    )
    # The dimension that grows with the number of rows is free.
    states = [
        jax.ShapeDtypeStruct(
            tuple("batch" if a != b else a for a, b in zip(two.shape, three.shape, strict=True)),
            two.dtype,
        )
        for two, three in pairs
    ]
    structure = jax.tree.structure(shape)

    def step(token: Any, *leaves: Any) -> tuple[PyTree, ...]:
        state, logits = advance(jax.tree.unflatten(structure, leaves), token)
        return (logits, *jax.tree.leaves(state))

    token = jax.ShapeDtypeStruct(("batch",), jnp.int32)
    before, after = ([f"{name}{i}" for i in range(len(states))] for name in (STATE, NEXT))
    model = _converted(step, [token, *states], [TOKEN, *before], [LOGITS, *after])
    if int8:
        pack_weights(model)
    for name, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = name, value
    return bytes(model.SerializeToString())


def states_of(data: bytes) -> list[JsonObject]:
    """Return the names, shapes and types of the state of an ONNX file of one step, for one row."""
    import onnx  # an extra

    graph = onnx.load_from_string(data).graph
    kinds = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT32: "int32"}
    found = []
    for one in graph.input:
        if one.name == TOKEN:
            continue
        made = one.type.tensor_type
        shape = [1 if d.dim_param else int(d.dim_value) for d in made.shape.dim]
        after = NEXT + one.name.removeprefix(STATE)
        found.append(
            {"name": one.name, "next": after, "shape": shape, "type": kinds[made.elem_type]}
        )
    return found


def _converted(
    function: Callable[..., PyTree], inputs: Sequence[PyTree], before: list[str], after: list[str]
) -> Any:
    try:
        import jax2onnx  # an extra, and seconds to load
    except ImportError:
        raise RecordError(EXTRA) from None
    return jax2onnx.to_onnx(
        function,
        inputs=list(inputs),
        model_name="fedlm",
        input_names=before,
        output_names=after,
    )


def pack_weights(model: Any) -> int:
    """Keep the matrices of an ONNX model as int8 with a scale per row; return how many."""
    from onnx import TensorProto, helper, numpy_helper  # an extra

    graph, nodes, packed = model.graph, [], 0
    for tensor in list(graph.initializer):
        many = int(np.prod(tensor.dims)) >= LEAST_PACKED
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2 or not many:
            continue
        matrix = numpy_helper.to_array(tensor)
        largest = np.abs(matrix).max(axis=1)
        scale = np.where(largest > 0, largest / STEPS, 1.0).astype(np.float32)
        steps = np.rint(matrix / scale[:, None]).astype(np.int8)
        names = [f"{tensor.name}_int8", f"{tensor.name}_scale"]
        made: list[np.ndarray] = [steps, scale]
        for name, array in zip(names, made, strict=True):
            graph.initializer.append(numpy_helper.from_array(array, name))
        nodes.append(helper.make_node("DequantizeLinear", names, [tensor.name], axis=0))
        graph.initializer.remove(tensor)
        packed += 1
    for node in reversed(nodes):
        graph.node.insert(0, node)
    return packed


def write_onnx(logits: Callable[[PyTree], PyTree], length: int, path: Path) -> None:
    """Write the ONNX file of a model that takes whole rows."""
    write_atomically(path, to_onnx(logits, length))


def perplexity_by_onnx(data: bytes, rows: np.ndarray) -> float:
    """Return the perplexity of rows of tokens under an ONNX file of one step, by onnxruntime."""
    try:
        import onnxruntime  # an extra
    except ImportError:
        raise RecordError(EXTRA) from None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
    state = {
        one.name: np.zeros(
            [len(rows) if isinstance(d, str) else d for d in one.shape], kinds[one.type]
        )
        for one in session.get_inputs()
        if one.name != TOKEN
    }
    nats, count = 0.0, 0
    for at in range(rows.shape[1] - 1):
        token, target = np.maximum(rows[:, at], 0).astype(np.int32), rows[:, at + 1]
        logits, *after = session.run(None, {TOKEN: token, **state})
        state = dict(zip(state, after, strict=True))
        largest = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
        real = target != PAD
        taken = logits[np.arange(len(rows)), np.maximum(target, 0)]
        nats += float((total - taken)[real].sum())
        count += int(real.sum())
    return float(np.exp(nats / max(count, 1)))
