"""Local training that goes on with the optimiser state of the round before.

In:       local training, and a start that holds a model and what its optimiser remembers.
Out:      local training whose start and change are both of that form.
Promise:  from a fresh memory it is the local training it was made of; the memory after a round is
          the memory before plus the change, up to rounding.
Not here: who keeps the memory between rounds (`federation/tree.py`).
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedlm.core import tree
from fedlm.core.types import Local, Params, Update

MODEL, MEMORY = "model", "memory"


def fresh(local: Local, params: Params) -> dict[str, Any]:
    """A start with an optimiser that remembers nothing; counts become floats, to be changed."""
    memory = local.init(params).memory
    return {MODEL: params, MEMORY: jax.tree.map(lambda x: x.astype(jnp.float32), memory)}


def keeping(local: Local) -> Local:
    """Local training that begins with the memory of its start, and sends how it changed."""

    def init(start: dict[str, Any]) -> Any:
        carry = local.init(start[MODEL])
        told = jax.tree.map(lambda x, like: x.astype(like.dtype), start[MEMORY], carry.memory)
        return carry._replace(memory=told)

    def finish(start: dict[str, Any], carry: Any, examples: Float[Array, ""]) -> Update:
        update = local.finish(start[MODEL], carry, examples)
        moved = jax.tree.map(lambda x, y: x.astype(jnp.float32) - y, carry.memory, start[MEMORY])
        sound = (update.refused == 0) & jnp.isfinite(tree.squared_norm(moved))
        moved = tree.where(sound, moved, tree.zeros_like(moved))
        return eqx.tree_at(lambda u: u.delta, update, {MODEL: update.delta, MEMORY: moved})

    return Local(init, local.step, finish)
