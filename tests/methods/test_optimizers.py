"""SGD of learning rate one is FedAvg; every server rule moves downhill; schedules by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.methods import fedavg
from fedlm.methods.optimizers import (
    CLIENT_OPTIMIZERS,
    SERVER_OPTIMIZERS,
    client_optimizer,
    schedule,
    server_optimizer,
)


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


def test_muon_makes_steps_of_inner_matrices_orthogonal_and_is_adamw_elsewhere():
    rng = np.random.default_rng(0)
    shapes = {"embedding": (20, 6), "w_x": (12, 6), "bias": (12,), "taps": (3, 6)}
    params, gradient = (
        {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()} for _ in "ab"
    )
    inner = client_optimizer("muon", 0.1, weight_decay=0.2)
    step, _ = inner.update(gradient, inner.init(params), params)
    turned = (step["w_x"] + 0.1 * 0.2 * params["w_x"]) / -0.1
    # 0.2 per number in the mean square: all singular values near 0.2 sqrt(larger side).
    sizes = np.linalg.svd(np.asarray(turned), compute_uv=False) / (0.2 * 12**0.5)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    plain = optax.adamw(0.1, weight_decay=0.2, nesterov=True)
    wanted, _ = plain.update(gradient, plain.init(params), params)
    for name in ("embedding", "bias", "taps"):
        np.testing.assert_allclose(step[name], wanted[name], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(CLIENT_OPTIMIZERS))
def test_a_client_step_is_proportional_to_its_rate(name):
    """A schedule over rounds multiplies steps, and relies on it."""
    params, gradient = {"w": jnp.eye(3) + 0.1}, {"w": jnp.arange(9.0).reshape(3, 3) - 2}

    def second(rate):
        inner = client_optimizer(name, rate, weight_decay=0.1, clip=0.5)
        _, memory = inner.update(gradient, inner.init(params), params)
        return inner.update(gradient, memory, params)[0]["w"]

    np.testing.assert_allclose(second(0.02), 2 * second(0.01), rtol=1e-5)


def test_a_schedule_warms_up_and_falls():
    rate = schedule("linear", 0.8, rounds=14, warmup=4, end=0.5)
    seen = [float(rate(t)) for t in (0, 1, 3, 4, 14)]
    np.testing.assert_allclose(seen, [0.2, 0.4, 0.8, 0.8, 0.4], rtol=1e-6)
    assert schedule("constant", 0.8, rounds=14, warmup=0, end=0.0) == 0.8
