"""Methods in which members send, or remember, more than a change.

In:       a loss, rates, what the server sent beside its model.
Out:      `ClientMethod`s: MimeLite, SCAFFOLD, FedDyn.
Promise:  each is the published rule for a member; what it sends beside the change is part of what
          it sends, so that its bytes are counted.
Not here: what the server does with it (`server/step.py`).

A member that was refused remembers what it remembered before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from fedlm.core import tree
from fedlm.core.types import ClientMethod, LossFn, Params, Tokens, Update
from fedlm.local.train import WEIGHTS, Carry, Weigh, begin, gradient, update_of, went_on

Scalar = Float[Array, ""]


def mimelite(
    loss: LossFn,
    base: optax.GradientTransformation,
    rate: float,
    weigh: Weigh = WEIGHTS["examples"],
) -> ClientMethod:
    """Steps of the server's optimiser with its statistics held still (Karimireddy et al. 2020).

    A member gets `{"params", "statistics"}` and sends `{"params", "gradient"}`: its change, and the
    gradient of its whole text at the parameters it was sent. `base` has rate one.
    """

    def init(shared: Any, key: PRNGKeyArray, client_state: Any) -> Carry:
        params = shared["params"]
        like = jax.eval_shape(base.init, params)
        frozen = jax.tree.map(lambda x, y: x.astype(y.dtype), shared["statistics"], like)
        return begin(params, frozen, extra=tree.zeros_like(params))

    def step(shared: Any, carry: Carry, tokens: Tokens) -> Carry:
        change, nats, count = gradient(loss, _same, carry.params, tokens)
        full, _, _ = gradient(loss, _same, shared["params"], tokens)
        moved, _ = base.update(change, carry.memory, carry.params)
        params = tree.add_scaled(carry.params, moved, rate)
        # Batches differ in tokens: what is summed is the gradient of the summed loss.
        seen = tree.add_scaled(carry.extra, full, count)
        return went_on(carry, params, carry.memory, nats, count, seen)

    def finish(shared: Any, carry: Carry, examples: Scalar) -> Update:
        delta = {
            "params": tree.sub(carry.params, shared["params"]),
            "gradient": tree.scale(carry.extra, 1.0 / jnp.maximum(carry.tokens, 1.0)),
        }
        return update_of(carry, delta, weigh(examples, carry.tokens))

    return ClientMethod(_make_shared_jit, init, step, finish, _spread)


def scaffold(loss: LossFn, rate: float, weigh: Weigh = WEIGHTS["examples"]) -> ClientMethod:
    """SGD corrected by the difference of two drifts: the member's own and everybody's.

    (Karimireddy et al. 2020, the cheaper of the two ways to renew a member's drift.) A member gets
    and sends `{"params", "control"}`, and remembers its own control.
    """

    def init(shared: Any, key: PRNGKeyArray, client_state: Any) -> Carry:
        return begin(shared["params"], (), extra=client_state)

    def step(shared: Any, carry: Carry, tokens: Tokens) -> Carry:
        change, nats, count = gradient(loss, _same, carry.params, tokens)
        straight = tree.add(change, tree.sub(shared["control"], carry.extra))
        params = tree.add_scaled(carry.params, straight, -rate)
        return went_on(carry, params, (), nats, count, carry.extra)

    def finish(shared: Any, carry: Carry, examples: Scalar) -> Update:
        moved = tree.sub(carry.params, shared["params"])
        pace = -1.0 / (rate * jnp.maximum(carry.steps, 1.0))
        turn = tree.add_scaled(tree.scale(shared["control"], -1.0), moved, pace)
        sent = update_of(carry, {"params": moved, "control": turn}, weigh(examples, carry.tokens))
        # The turn is zero where the update was refused.
        return replace(sent, client_state=tree.add(carry.extra, sent.delta["control"]))

    return ClientMethod(
        _make_shared_jit,
        init,
        step,
        finish,
        _spread,
        lambda shared: tree.zeros_like(shared["params"]),
    )


def feddyn(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    alpha: float,
    weigh: Weigh = WEIGHTS["examples"],
) -> ClientMethod:
    """A loss bent so that members agree where they stop (Acar et al. 2021).

    A member descends on its loss less <g, w> plus alpha / 2 |w - w_server|^2, sends its change, and
    remembers g, which moves against the change.
    """

    def init(shared: Any, key: PRNGKeyArray, client_state: Any) -> Carry:
        return begin(shared, optimizer.init(shared), extra=client_state)

    def step(shared: Any, carry: Carry, tokens: Tokens) -> Carry:
        change, nats, count = gradient(loss, _same, carry.params, tokens)
        change = tree.add_scaled(change, tree.sub(carry.params, shared), alpha)
        change, memory = optimizer.update(tree.sub(change, carry.extra), carry.memory, carry.params)
        params = optax.apply_updates(carry.params, change)
        return went_on(carry, params, memory, nats, count, carry.extra)

    def finish(shared: Any, carry: Carry, examples: Scalar) -> Update:
        moved = tree.sub(carry.params, shared)
        sent = update_of(carry, moved, weigh(examples, carry.tokens))
        return replace(sent, client_state=tree.add_scaled(carry.extra, sent.delta, -alpha))

    return ClientMethod(_make_shared_jit, init, step, finish, _spread, tree.zeros_like)


def _same(params: Params) -> Params:
    return params


def _make_shared_jit(sent: Any, key: PRNGKeyArray) -> Any:
    return sent


def _spread(params: Params, key: PRNGKeyArray, delta: Any) -> Any:
    return delta
