"""Recurrent language models with a recurrent projection and tied embeddings.

In:       rows of tokens.
Out:      features of every position, of the width of the embedding.
Promise:  the fast sequence, which learns, equals the plain one in value and gradient.
Not here: the arithmetic inside a cell (`cells.py`), the loss (`loss.py`).

    z_t = W_x e(x_t) + W_h h_{t-1} + b;   m_t, c_t = cell(z_t, c_{t-1});   h_t = P m_t
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.core.types import Loss, PyTree
from fedlm.models.cells import Cell
from fedlm.models.layers import in_dtype, tied, weight_gradient
from fedlm.models.loss import LOSSES, count_targets, cross_entropy
from fedlm.models.packing import (
    FULL_ROW_LOSSES,
    FULL_ROW_PRODUCTS,
    Packing,
    choices,
    enough,
    gather,
    leading,
    nats_of_enough,
    pack,
    widths,
)

SIZES = 16  # compiled sizes of the products before and after the loop
CACHED = 2 << 20  # bytes of a second-level cache: a time step that reads more waits for memory


class Layer(eqx.Module):
    """The weights of one recurrent layer."""

    w_x: Float[Array, "gates_times_units embed"]
    w_h: Float[Array, "gates_times_units embed"]
    bias: Float[Array, " gates_times_units"]
    project: Float[Array, "embed units"]


Columns = Float[Array, "columns embed"]


class Slots(NamedTuple):
    """How a packing is computed."""

    widths: tuple[int, ...]  # of the stages (`packing.widths`)
    sizes: int = SIZES  # of the products around the time loop that are compiled


def plain_sequence(cell: Cell, inputs: Float[Array, "seq batch embed"], w_x, w_h, bias, project):  # type: ignore[no-untyped-def]
    """Compute `sequence` by its definition, as a plain loop over time; tests compare against it."""
    batch = inputs.shape[1]
    start = tuple(jnp.zeros((batch, size), inputs.dtype) for size in project.shape)

    def advance(carry, x):  # type: ignore[no-untyped-def]
        h, c = carry
        z = x @ w_x.T + h @ w_h.T + bias[None]
        m, c = cell.step(_by_gate(cell, z), c)
        h = m @ project.T
        return (h, c), h

    return jax.lax.scan(advance, start, inputs)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sequence(cell: Cell, slots: Slots, packing: Packing, inputs: Columns, layer: Layer) -> Columns:
    """Run all rows of a batch through one recurrent layer, over the columns of a packing.

    The inputs are multiplied by `w_x` in one product before the time loop, and each weight
    gradient is one product after it; only the recurrence itself stays in the loop. The loop runs
    as long as the fullest slot, and each step is as wide as the slots that still run.

        forward    before the loop   a = W_x x + b                   all columns at once
                   for t = 0, 1, ..  z_t = a_t + W_h h_{t-1}
                                     m_t, c_t = cell(z_t, c_{t-1});  h_t = P m_t
                   keeps per column: z_t, c_{t-1}, m_t, h_{t-1}; and x, the weights, the packing

        backward   for t = T, T-1 .. d_h_t  = d_out_t + W_h^T d_z_{t+1}
                                     d_z_t, d_c_{t-1} = cell's vjp at (z_t, c_{t-1})
                                                        applied to (P^T d_h_t, d_c_t)
                   after the loop    d_x   = W_x^T d_z               all columns at once
                                     d_W_x = sum d_z_t x_t^T         d_b = sum d_z_t
                                     d_W_h = sum d_z_t h_{t-1}^T     d_P = sum d_h_t m_t^T

    Where a new row begins in a slot, h_{t-1} and c_{t-1} are zero and no gradient flows back.
    """
    return _forward(cell, slots, packing, inputs, layer)[0]


def _stages(packing: Packing, slots: Slots):  # type: ignore[no-untyped-def]
    """Yield width, first column and end column (exclusive) of each stage."""
    step, column = jnp.int32(0), jnp.int32(0)
    for place, width in enumerate(slots.widths):
        end = packing.ends[place]
        after = column + (end - step) * width
        yield width, column, after
        step, column = end, after


def _by_gate(cell, z):  # type: ignore[no-untyped-def]
    return jnp.split(z, cell.gates, axis=1)


def _follows(packing, like):  # type: ignore[no-untyped-def]
    """Return one for columns that continue a row and zero for the first column of a row.

    At a zero the state of the previous row in the slot is dropped.
    """
    return (packing.time > 0).astype(like.dtype)[:, None]


def _cut(x, at, width, axis=0):  # type: ignore[no-untyped-def]
    return jax.lax.dynamic_slice_in_dim(x, at, width, axis, allow_negative_indices=False)


def _put(x, part, at):  # type: ignore[no-untyped-def]
    return jax.lax.dynamic_update_slice_in_dim(x, part, at, axis=0, allow_negative_indices=False)


def _forward(cell, slots, packing, inputs, layer):  # type: ignore[no-untyped-def]
    columns = inputs.shape[0]
    embed, units = layer.project.shape
    used = packing.used.astype(inputs.dtype)
    # Multiples of `units` that XLA does not know: one kernel per size then cuts out every gate.
    zero = jnp.minimum(packing.size, 0)
    gates = [zero + gate * units for gate in range(cell.gates)]

    def gate_inputs(n):  # type: ignore[no-untyped-def]
        z = leading(inputs, used, n) @ layer.w_x.T + layer.bias[None]
        return [jnp.pad(_cut(z, gate, units, axis=1), ((0, columns - n), (0, 0))) for gate in gates]

    # One array per gate: XLA makes scalar code of a loop that reads two parts of one slice.
    # Read only: a buffer that a step both reads and writes would be copied in every step.
    from_inputs = enough(packing.size, choices(columns, slots.sizes), gate_inputs)
    sizes = (units,) * cell.gates + (units, units, embed, embed)
    kept = tuple(jnp.zeros((columns, size), inputs.dtype) for size in sizes)
    h, c = (jnp.zeros((slots.widths[0], size), inputs.dtype) for size in (embed, units))
    follows = _follows(packing, inputs)
    w_h_t, project_t = layer.w_h.T, layer.project.T  # transposed once, not in every step
    for width, column, after in _stages(packing, slots):

        def advance(carry, width=width):  # type: ignore[no-untyped-def]
            at, h, c, kept = carry
            h, c = (state * _cut(follows, at, width) for state in (h, c))
            from_state = _by_gate(cell, h @ w_h_t)
            z = [_cut(x, at, width) + y for x, y in zip(from_inputs, from_state, strict=True)]
            m, c_next = cell.step(z, c)
            h_next = m @ project_t
            parts = zip(kept, (*z, c, m, h, h_next), strict=True)
            kept = tuple(_put(whole, part, at) for whole, part in parts)
            return at + width, h_next, c_next, kept

        _, h, c, kept = jax.lax.while_loop(
            lambda carry, after=after: carry[0] < after,  # type: ignore[misc]
            advance,
            (column, h[:width], c[:width], kept),
        )
    return kept[-1], (packing, inputs, layer, kept[:-1])


def _backward(cell, slots, saved, d_hs):  # type: ignore[no-untyped-def]
    packing, inputs, layer, (*zs, cs, ms, before) = saved
    columns = inputs.shape[0]
    follows = _follows(packing, inputs)
    d_h, d_c = None, None
    # The gradients of the gates and of h, per column. They have buffers of their own: a buffer
    # that a step both reads and writes would be copied in every step.
    kept = [jnp.zeros((columns, len(layer.bias)), d_hs.dtype), jnp.zeros_like(d_hs)]
    for width, column, after in reversed(list(_stages(packing, slots))):

        def retreat(carry, width=width):  # type: ignore[no-untyped-def]
            at, d_h, d_c, kept = carry
            d_h = d_h + _cut(d_hs, at, width)
            # Computing the cell again is cheaper than storing its intermediate values.
            _, pull = jax.vjp(cell.step, [_cut(z, at, width) for z in zs], _cut(cs, at, width))
            by_gate, d_c = pull((d_h @ layer.project, d_c))
            d_z = jnp.concatenate(by_gate, axis=1)  # one product for all gates
            kept = [_put(whole, d, at) for whole, d in zip(kept, (d_z, d_h), strict=True)]
            d_h = d_z @ layer.w_h
            d_h, d_c = (d * _cut(follows, at, width) for d in (d_h, d_c))
            return at - width, d_h, d_c, kept

        d_h, d_c = (_widen(d, width, like) for d, like in ((d_h, d_hs), (d_c, cs)))
        _, d_h, d_c, kept = jax.lax.while_loop(
            lambda carry, column=column: carry[0] >= column,  # type: ignore[misc]
            retreat,
            (after - width, d_h, d_c, kept),
        )
    d_z, d_all = kept
    used = packing.used.astype(inputs.dtype)

    def products(n):  # type: ignore[no-untyped-def]
        first = d_z[:n]
        d_inputs = jnp.pad(first @ layer.w_x, ((0, columns - n), (0, 0)))
        return d_inputs, Layer(
            weight_gradient(first, leading(inputs, used, n)),
            weight_gradient(first, leading(before, used, n)),
            jnp.ones(n, first.dtype) @ first,
            weight_gradient(leading(d_all, used, n), ms[:n]),
        )

    return (None, *enough(packing.size, choices(columns, slots.sizes), products))


def _widen(d, width, like):  # type: ignore[no-untyped-def]
    """Pad the gradient with zeros for the slots that join in a wider stage."""
    if d is None:
        return jnp.zeros((width, like.shape[1]), like.dtype)
    return jnp.pad(d, ((0, width - d.shape[0]), (0, 0)))


sequence.defvjp(_forward, _backward)


def _step_bytes(layer: Layer) -> int:
    """Return how much of a layer every time step reads."""
    return (layer.w_h.size + layer.project.size) * layer.w_h.dtype.itemsize


class Recurrent(eqx.Module):
    """An embedding, recurrent layers, and the same embedding as output matrix."""

    embedding: Float[Array, "vocab embed"]
    layers: tuple[Layer, ...]
    cell: Cell = eqx.field(static=True)
    dtype: str = eqx.field(static=True, default="float32")  # of products, where it is trained

    @property
    def in_training(self) -> Recurrent:
        """The model as it is trained, with products of its `dtype`."""
        if self.dtype == "float32":
            return self
        return in_dtype(self, self.dtype)

    def features(self, inputs: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Return the features of each position; their product with the embedding gives logits."""
        x = self.embedding[inputs.T]
        for layer in self.layers:
            x = plain_sequence(self.cell, x, layer.w_x, layer.w_h, layer.bias, layer.project)
        return x.transpose(1, 0, 2)

    def loss(
        self,
        inputs: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        full_rows: bool = False,
    ) -> Loss:
        """Return the next-token loss of a batch, without the gaps of short rows."""
        alone = any(_step_bytes(layer) > CACHED for layer in self.layers)
        packing = pack(targets, alone, full_rows)
        sizes = FULL_ROW_PRODUCTS if full_rows else SIZES
        slots = Slots(widths(inputs.shape[0], alone, full_rows), sizes)
        losses = choices(targets.size, FULL_ROW_LOSSES if full_rows else LOSSES)

        def nats(_: int, model: Recurrent, batch: tuple[Packing, Array, Array]) -> Array:
            packing, given, wanted = batch
            found, readout = tied(model.embedding, given)
            features = model._through(packing, slots, found)
            return cross_entropy(features, readout, wanted, losses)

        batch = (packing, gather(packing, inputs), gather(packing, targets))
        # One size: the loop over time has lengths of its own, and products before and after it.
        found = nats_of_enough(nats, (targets.size,), packing.size, self, batch)
        return Loss(found, count_targets(targets, self.readout.dtype))

    def _through(
        self, packing: Packing, slots: Slots, found: Float[Array, "columns embed"]
    ) -> Columns:
        x = jnp.where(packing.used[:, None], found, 0.0)
        for layer in self.layers:
            x = sequence(self.cell, slots, packing, x, layer)
        return x

    def start(self, batch: int, capacity: int = 0) -> tuple[tuple[Array, Array], ...]:
        """Return the state before the first token; its size does not depend on `capacity`."""
        width = self.embedding.shape[1]
        return tuple(
            (jnp.zeros((batch, width)), jnp.zeros((batch, layer.project.shape[1])))
            for layer in self.layers
        )

    def advance(self, state: PyTree, token: Int[Array, " batch"]) -> tuple[PyTree, Array]:
        """Return the state and the features after one more token per row."""
        x, after = self.embedding[token], []
        for layer, (h, c) in zip(self.layers, state, strict=True):
            z = x @ layer.w_x.T + h @ layer.w_h.T + layer.bias[None]
            m, c = self.cell.step(_by_gate(self.cell, z), c)
            x = m @ layer.project.T
            after.append((x, c))
        return tuple(after), x

    @property
    def readout(self) -> Float[Array, "vocab embed"]:
        return self.embedding


def recurrent(
    cell: Cell, vocab: int, embed: int, units: int, *, layers: int = 1, key: PRNGKeyArray
) -> Recurrent:
    """Make a fresh model: Glorot matrices, zero biases, embeddings of unit expected length."""
    e_key, *keys = jr.split(key, 1 + 3 * layers)
    embedding = jr.normal(e_key, (vocab, embed)) * embed**-0.5
    gates = cell.gates
    made = []
    for k_x, k_h, k_p in zip(keys[0::3], keys[1::3], keys[2::3], strict=True):
        spread = (6.0 / (2 * embed + units)) ** 0.5
        w_x = jr.uniform(k_x, (gates * units, embed), minval=-spread, maxval=spread)
        w_h = jr.uniform(k_h, (gates * units, embed), minval=-spread, maxval=spread)
        reach = (6.0 / (embed + units)) ** 0.5
        project = jr.uniform(k_p, (embed, units), minval=-reach, maxval=reach)
        made.append(Layer(w_x, w_h, jnp.zeros(gates * units), project))
    return Recurrent(embedding, tuple(made), cell)
