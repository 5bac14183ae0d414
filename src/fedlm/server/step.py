"""What the server sends, and what it does with a mean change.

In:       parameters, what the server remembers, the members' mean change.
Out:      new parameters and memory.
Promise:  SGD of rate 1 gives exactly `params + change`; each method is the published rule.
Not here: choosing the optimiser (`federation/optimizers.py`), members' halves (`local/methods.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedlm.core import tree
from fedlm.core.types import OptState, Params, ServerMethod


def plain(optimizer: optax.GradientTransformation) -> ServerMethod:
    """The outer optimiser descends along the negated change, the pseudo-gradient."""

    def step(params: Params, memory: OptState, change: Params) -> tuple[Params, OptState]:
        moved, memory = optimizer.update(tree.scale(change, -1.0), memory, params)
        return optax.apply_updates(params, moved), memory

    return ServerMethod(optimizer.init, _params_alone, step)


def mimelite(base: optax.GradientTransformation, rate: float) -> ServerMethod:
    """Adds the mean change; its statistics follow the mean gradient at the old parameters."""

    def send(params: Params, memory: OptState) -> dict[str, Any]:
        return {"params": params, "statistics": _numbers(memory)}

    def step(params: Params, memory: OptState, change: Any) -> tuple[Params, OptState]:
        _, memory = base.update(change["gradient"], memory, params)
        return tree.add_scaled(params, change["params"], rate), memory

    return ServerMethod(base.init, send, step)


def scaffold(optimizer: optax.GradientTransformation, share: float) -> ServerMethod:
    """The plain step, and a drift that moves by the mean turn of the `share` that took part."""
    outer = plain(optimizer)

    def init(params: Params) -> dict[str, Any]:
        return {"outer": outer.init(params), "control": tree.zeros_like(params)}

    def send(params: Params, memory: dict[str, Any]) -> dict[str, Any]:
        return {"params": params, "control": memory["control"]}

    def step(params: Params, memory: dict[str, Any], change: Any) -> tuple[Params, dict[str, Any]]:
        params, kept = outer.step(params, memory["outer"], change["params"])
        control = tree.add_scaled(memory["control"], change["control"], share)
        return params, {"outer": kept, "control": control}

    return ServerMethod(init, send, step)


def feddyn(alpha: float, share: float) -> ServerMethod:
    """The mean model, moved on by the drift that members have shown so far."""

    def step(params: Params, memory: Params, change: Params) -> tuple[Params, Params]:
        memory = tree.add_scaled(memory, change, -alpha * share)
        return tree.add_scaled(tree.add(params, change), memory, -1.0 / alpha), memory

    return ServerMethod(tree.zeros_like, _params_alone, step)


def _params_alone(params: Params, memory: OptState) -> Params:
    return params


def _numbers(memory: OptState) -> OptState:
    """Statistics as float32, counts too: what travels is numbers of one kind."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), memory)
