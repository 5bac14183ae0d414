"""Every method builds both halves, and says itself which settings it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.keys import key_for
from fedlm.core.types import Loss, TrainablePart
from fedlm.methods import fedadamw
from fedlm.methods.catalog import METHODS, RelatedSettings, check_method_settings, method_names
from fedlm.methods.method import MethodOptions

PARAMS = {"w": jnp.array([1.0, -2.0])}
OPTIONS = MethodOptions(
    loss=lambda params, tokens: Loss(jnp.sum(params["w"] ** 2) * tokens.size, tokens.size),
    inner=optax.sgd(0.1),
    outer=optax.sgd(1.0),
    base=optax.sgd(1.0),
    client_learning_rate=0.1,
    server_learning_rate=1.0,
    proximal=0.5,
    participation=0.5,
)
PLAIN = RelatedSettings(
    optimizer="sgd",
    gradient_clip_norm=0.0,
    proximal=0.0,
    schedule="constant",
    warmup_rounds=0,
    client_schedule="constant",
    client_warmup_rounds=0,
    trainable="all",
    error_feedback=False,
    private=False,
)


def related(name, **changes):
    """Settings that go with a method, changed."""
    proximal = 0.5 if METHODS[name].needs_proximal else 0.0
    usual = {"proximal": proximal, "optimizer": METHODS[name].needs_optimizer or "sgd"}
    return dataclasses.replace(PLAIN, **(usual | changes))


@pytest.mark.parametrize("name", METHODS)
def test_one_client_takes_the_server_downhill(name):
    method = METHODS[name]
    (client,), server = method.build(OPTIONS)
    assert (client.init_memory is not None) == method.keeps_client_state
    memory, key = server.init(PARAMS), key_for(0, "partial")
    shared = client.shared(server.send(PARAMS, memory), key)
    kept = None if client.init_memory is None else client.init_memory(shared)
    carry = client.step(shared, client.init(shared, key, kept, jnp.ones(())), jnp.ones((2, 3)))
    update = client.finish(shared, carry, jnp.float32(2.0))
    after, _ = server.step(PARAMS, memory, client.expand(PARAMS, key, update.delta))
    assert jax.tree.structure(after) == jax.tree.structure(PARAMS)
    assert float(jnp.sum(after["w"] ** 2)) < float(jnp.sum(PARAMS["w"] ** 2))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.trains_parts])
def test_there_is_a_client_half_per_trainable_part(name):
    parts = (TrainablePart(), TrainablePart())
    clients, _ = METHODS[name].build(dataclasses.replace(OPTIONS, parts=parts))
    assert len(clients) == 2


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_says_of_itself_is_what_is_refused(name):
    method = METHODS[name]
    check_method_settings(name, related(name))
    for fits, change, setting in (
        (method.trains_parts, {"trainable": "fixed"}, "client.method"),
        (method.trains_parts, {"error_feedback": True}, "client.method"),
        (bool(method.proximal), {"proximal": 0.1}, "client.proximal"),
        (not method.needs_proximal, {"proximal": 0.0}, "client.proximal"),
        (not method.needs_optimizer, {"optimizer": "adam"}, "client.optimizer"),
        (method.needs_optimizer != "sgd", {"gradient_clip_norm": 1.0}, "client.gradient_clip_norm"),
        (not method.needs_constant_schedule, {"schedule": "cosine"}, "server.schedule"),
        (not method.needs_constant_schedule, {"warmup_rounds": 2}, "server.warmup_rounds"),
        (method.takes_rate, {"client_schedule": "linear"}, "client.schedule"),
        (method.takes_rate, {"client_warmup_rounds": 1}, "client.warmup_rounds"),
        (method.may_be_private, {"private": True}, "client.method"),
    ):
        if fits:
            check_method_settings(name, related(name, **change))
        else:
            with pytest.raises(ConfigError, match=f"^{setting} = .*: expected "):
                check_method_settings(name, related(name, **change))


def test_the_names_in_an_error_are_those_of_the_registry():
    assert method_names(lambda method: method.may_be_private) == "'fedavg'"


def test_fedadamw_by_hand():
    """Two rounds of one client with two steps each: the second begins with what the first left."""
    rate, decay, alpha, a, b = 0.1, 0.2, 0.5, fedadamw.BETA1, fedadamw.BETA2
    client = fedadamw.fedadamw_client(OPTIONS.loss, rate, weight_decay=decay, alpha=alpha)
    server, key = fedadamw.fedadamw_server(optax.sgd(1.0), rate), key_for(0, "partial")
    params, memory = PARAMS, server.init(PARAMS)
    x, block, direction, t = np.array([1.0, -2.0]), 0.0, np.zeros(2), 0
    for _ in range(2):
        shared = client.shared(server.send(params, memory), key)
        carry = client.init(shared, key, None, jnp.ones(()))
        m, v, start = np.zeros(2), np.full(2, block), x
        for k in (1, 2):
            carry = client.step(shared, carry, jnp.ones((2, 3)))
            g = 2 * x  # of the summed loss over its tokens
            m, v = a * m + (1 - a) * g, b * v + (1 - b) * g * g
            own = m / (1 - a**k) / (np.sqrt(v / (1 - b ** (t + k))) + fedadamw.EPSILON)
            x = x - rate * (own + alpha * direction + decay * x)
        update = client.finish(shared, carry, jnp.float32(2.0))
        params, memory = server.step(params, memory, update.delta)
        block, direction, t = v.mean(), (start - x) / (2 * rate), t + 2
        np.testing.assert_allclose(params["w"], x, rtol=1e-5)
    np.testing.assert_allclose(memory["second"]["w"], [block], rtol=1e-5)
    np.testing.assert_allclose(memory["direction"]["w"], direction, rtol=1e-5)
    assert float(memory["steps"][0]) == 4


def test_a_round_without_members_leaves_moments_of_fedadamw_alone():
    """Zero second moments after many steps made the next step up to thirty times too long."""
    server = fedadamw.fedadamw_server(optax.sgd(1.0), 0.1)
    memory = server.init(PARAMS) | {
        "second": {"w": jnp.full(1, 0.5)},
        "direction": {"w": jnp.full(2, 0.25)},
        "steps": jnp.full(1, 24.0),
    }
    nothing = {"params": tree.zeros_like(PARAMS), "second": {"w": jnp.zeros(1)}}
    params, after = server.step(PARAMS, memory, nothing | {"steps": jnp.zeros(1)})
    np.testing.assert_array_equal(params["w"], PARAMS["w"])
    for name in ("second", "direction"):
        np.testing.assert_array_equal(after[name]["w"], memory[name]["w"])
    assert float(after["steps"][0]) == 24
