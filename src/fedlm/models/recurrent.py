"""Recurrent language models with a recurrent projection and tied embeddings.

In:       rows of tokens.
Out:      features of every position, of the width of the embedding.
Promise:  the fast sequence equals the plain one in value and gradient.
Not here: the arithmetic inside a cell (`cells.py`), the loss (`loss.py`).

    z_t = W_x e(x_t) + W_h h_{t-1} + b;   m_t, c_t = cell(z_t, c_{t-1});   h_t = P m_t
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedlm.models.cells import Cell

Sequence = Float[Array, "seq embed batch"]


def plain_sequence(cell: Cell, inputs: Sequence, w_x, w_h, bias, project) -> Sequence:  # type: ignore[no-untyped-def]
    """The definition, differentiated by JAX: the oracle of `sequence`."""
    step = cell.step

    def advance(carry, x):  # type: ignore[no-untyped-def]
        h, c = carry
        m, c = step(w_x @ x + w_h @ h + bias[:, None], c)
        h = project @ m
        return (h, c), h

    return jax.lax.scan(advance, _start(inputs, project), inputs)[1]


def _start(inputs, project):  # type: ignore[no-untyped-def]
    batch = inputs.shape[-1]
    embed, units = project.shape
    return jnp.zeros((embed, batch), inputs.dtype), jnp.zeros((units, batch), inputs.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sequence(cell: Cell, inputs: Sequence, w_x, w_h, bias, project) -> Sequence:  # type: ignore[no-untyped-def]
    """A whole sequence through one cell, with the matrix products gathered.

    The products with the inputs are one product before the time loop, and the gradients of
    the weights are one product each after it; only what truly recurs stays in the loop.
    """
    return _forward(cell, inputs, w_x, w_h, bias, project)[0]


def _gate_inputs(inputs, w_x, bias):  # type: ignore[no-untyped-def]
    seq, embed, batch = inputs.shape
    flat = inputs.transpose(1, 0, 2).reshape(embed, seq * batch)
    z = (w_x @ flat + bias[:, None]).reshape(-1, seq, batch)
    return z.transpose(1, 0, 2)


def _forward(cell, inputs, w_x, w_h, bias, project):  # type: ignore[no-untyped-def]
    step = cell.step

    def advance(carry, z_x):  # type: ignore[no-untyped-def]
        h, c = carry
        z = z_x + w_h @ h
        m, c_next = step(z, c)
        h_next = project @ m
        return (h_next, c_next), (h_next, m, z, c)

    start = _start(inputs, project)
    _, (hs, ms, zs, cs) = jax.lax.scan(advance, start, _gate_inputs(inputs, w_x, bias))
    return hs, (inputs, w_x, w_h, project, hs, ms, zs, cs)


def _backward(cell, saved, d_hs):  # type: ignore[no-untyped-def]
    inputs, w_x, w_h, project, hs, ms, zs, cs = saved
    w_h_t, project_t = w_h.T, project.T  # transposed once, not in every step

    def retreat(carry, at):  # type: ignore[no-untyped-def]
        d_h, d_c = carry
        d_out, z, c = at
        d_h = d_h + d_out
        # The cell is computed again: its arithmetic is cheaper than storing what it would save.
        _, pull = jax.vjp(cell.step, z, c)
        d_z, d_c = pull((project_t @ d_h, d_c))
        return (w_h_t @ d_z, d_c), (d_z, d_h)

    start = _start(inputs, project)
    _, (d_zs, d_h_all) = jax.lax.scan(retreat, start, (d_hs, zs, cs), reverse=True)
    h_before = jnp.concatenate([start[0][None], hs[:-1]])
    d_w_x = jnp.einsum("tgb,teb->ge", d_zs, inputs)
    d_w_h = jnp.einsum("tgb,teb->ge", d_zs, h_before)
    d_project = jnp.einsum("teb,tub->eu", d_h_all, ms)
    d_inputs = jnp.einsum("ge,tgb->teb", w_x, d_zs)
    return d_inputs, d_w_x, d_w_h, jnp.sum(d_zs, axis=(0, 2)), d_project


sequence.defvjp(_forward, _backward)


class Layer(eqx.Module):
    """The weights of one recurrent layer."""

    w_x: Float[Array, "gates_times_units embed"]
    w_h: Float[Array, "gates_times_units embed"]
    bias: Float[Array, " gates_times_units"]
    project: Float[Array, "embed units"]


class Recurrent(eqx.Module):
    """An embedding, recurrent layers, and the embedding again as output matrix."""

    embedding: Float[Array, "vocab embed"]
    layers: tuple[Layer, ...]
    cell: Cell = eqx.field(static=True)

    def features(self, inputs: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """What each position knows of its past; times the embedding it gives logits."""
        x = self.embedding[inputs.T].transpose(0, 2, 1)
        for layer in self.layers:
            x = sequence(self.cell, x, layer.w_x, layer.w_h, layer.bias, layer.project)
        return x.transpose(2, 0, 1)

    def start(self, batch: int, capacity: int = 0) -> tuple[tuple[Array, Array], ...]:
        """The state before the first token; its size does not depend on how many will follow."""
        width = self.embedding.shape[1]
        return tuple(
            (jnp.zeros((width, batch)), jnp.zeros((layer.project.shape[1], batch)))
            for layer in self.layers
        )

    def advance(self, state: Any, token: Int[Array, " batch"]) -> tuple[Any, Array]:
        """The state and the features after one more token of each row."""
        x, after = self.embedding[token].T, []
        for layer, (h, c) in zip(self.layers, state, strict=True):
            z = layer.w_x @ x + layer.w_h @ h + layer.bias[:, None]
            m, c = self.cell.step(z, c)
            x = layer.project @ m
            after.append((x, c))
        return tuple(after), x.T

    @property
    def readout(self) -> Float[Array, "vocab embed"]:
        return self.embedding


def recurrent(
    cell: Cell, vocab: int, embed: int, units: int, *, layers: int = 1, key: PRNGKeyArray
) -> Recurrent:
    """A fresh model: Glorot matrices, zero biases, embeddings of unit expected length."""
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
