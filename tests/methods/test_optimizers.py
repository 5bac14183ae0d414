"""SGD of learning rate one is FedAvg; every server rule moves downhill; schedules by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.methods import fedavg
from fedlm.methods.optimizers import SERVER_OPTIMIZERS, schedule, server_optimizer


def test_sgd_of_rate_one_adds_the_change():
    params, change = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([0.25, -0.5])}
    outer = optax.sgd(1.0)
    moved, _ = fedavg.fedavg_server(outer).step(params, outer.init(params), change)
    np.testing.assert_array_equal(moved["w"], [1.25, 1.5])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(SERVER_OPTIMIZERS))
def test_every_rule_reaches_the_minimum_of_a_bowl(name):
    """Members report a step towards (3, -2); every server rule must arrive there."""
    rate = {"fedavg": 1.0, "fedavgm": 0.3, "nesterov": 0.3}.get(name, 0.2)
    outer = server_optimizer(name, rate, momentum=0.9, beta2=0.99, epsilon=1e-5)
    goal = jnp.array([3.0, -2.0])
    params = {"w": jnp.zeros(2)}
    memory = outer.init(params)
    for _ in range(500):
        params, memory = fedavg.fedavg_server(outer).step(
            params, memory, {"w": 0.1 * (goal - params["w"])}
        )
    np.testing.assert_allclose(params["w"], goal, atol=0.1)


def test_nesterov_by_hand():
    """m <- mu m + g; w <- w - eta (g + mu m), with g the negated change."""
    outer = server_optimizer("nesterov", 0.7, momentum=0.9, beta2=0.0, epsilon=1.0)
    params, memory = {"w": jnp.float32(0.0)}, outer.init({"w": jnp.float32(0.0)})
    m = w = 0.0
    for change in (1.0, -2.0, 0.5):
        params, memory = fedavg.fedavg_server(outer).step(
            params, memory, {"w": jnp.float32(change)}
        )
        m = 0.9 * m - change
        w -= 0.7 * (-change + 0.9 * m)
        np.testing.assert_allclose(params["w"], w, rtol=1e-5)


def test_a_schedule_warms_up_and_falls():
    rate = schedule("linear", 0.8, rounds=14, warmup=4, end=0.5)
    seen = [float(rate(t)) for t in (0, 1, 3, 4, 14)]
    np.testing.assert_allclose(seen, [0.2, 0.4, 0.8, 0.8, 0.4], rtol=1e-6)
    assert schedule("constant", 0.8, rounds=14, warmup=0, end=0.0) == 0.8
