"""Local training equals a plain training loop."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from fedlm.core.types import Loss
from fedlm.local.train import WEIGHTS, local_training
from tests.oracle import quadratic_descent


def quadratic(params, tokens):
    """A loss with a closed form: half the squared distance to the first token, one target."""
    return Loss(0.5 * (params["w"] - tokens[0, 0]) ** 2, jnp.float32(1.0))


def trained(weight="examples", rate=0.3, targets=(3.0, -1.0, 5.0)):
    local = local_training(quadratic, optax.sgd(rate), WEIGHTS[weight])
    params = {"w": jnp.float32(2.0)}
    carry = local.init(params, jr.key(0), None, jnp.ones(()))
    for target in targets:
        carry = local.step(params, carry, jnp.full((1, 1), target))
    return local.finish(params, carry, jnp.float32(7.0))


def test_a_round_multiplies_the_rate():
    """Of every optimiser, also with weight decay and a memory of earlier steps."""
    params = {"w": jnp.float32(2.0)}

    def after(rate, factor):
        local = local_training(quadratic, optax.adamw(rate, weight_decay=0.3))
        carry = local.init(params, jr.key(0), None, jnp.float32(factor))
        for target in (3.0, -1.0, 5.0):
            carry = local.step(params, carry, jnp.full((1, 1), target))
        return local.finish(params, carry, jnp.float32(7.0)).delta["w"]

    np.testing.assert_allclose(after(0.2, 0.5), after(0.1, 1.0), rtol=1e-6)
    assert float(after(0.2, 0.5)) != float(after(0.2, 1.0))


def test_sgd_ends_where_the_closed_form_says():
    wanted = quadratic_descent(2.0, (3.0, -1.0, 5.0), 0.3) - 2.0
    np.testing.assert_allclose(trained().delta["w"], wanted, rtol=1e-6)


@pytest.mark.parametrize("weight, value", [("examples", 7), ("tokens", 3), ("uniform", 1)])
def test_weights_are_what_they_are_called(weight, value):
    assert float(trained(weight).weight) == value


@pytest.mark.parametrize("target", [np.nan, np.inf, 1e30])
def test_a_malformed_update_is_refused(target):
    update = trained(targets=(target,))
    assert float(update.delta["w"]) == 0 and float(update.weight) == 0
    assert float(update.refused) == 1
