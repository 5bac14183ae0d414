"""Adapters on a frozen model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.keys import key_for
from fedlm.models import catalog
from fedlm.models.adapters import Adapters, adapt, factors, merged, targets_of, without_adapters
from fedlm.models.partial import leaves_by_name

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=16, hidden_size=28, layers=3, heads=4, key_heads=2
)
SMALL = Adapters(rank=2, alpha=6.0)


def plain(name="llama", layers=3):
    return catalog.make(name, replace(SIZE, layers=layers), key_for(1, "init"))


def moved(model, amount=0.3):
    """The model with adapters that have learned something."""
    leaves = {
        name: x + amount * np.random.default_rng(3).normal(size=x.shape).astype(np.float32)
        if name.endswith("lora_b")
        else x
        for name, x in tree.named_leaves(model).items()
    }
    return tree.with_leaves(model, leaves)


# One program for all models of a structure; eagerly every operation is a program of its own.
features = jax.jit(lambda model, tokens: model.features(tokens))
loss = jax.jit(catalog.loss)


def rows(batch=3, width=10):
    return np.random.default_rng(0).integers(4, 31, (batch, width)).astype(np.int32)


def test_a_fresh_adapter_changes_nothing_and_follows_from_its_key():
    model = plain()
    fresh = adapt(model, SMALL, jax.random.key(0))
    np.testing.assert_array_equal(features(fresh, rows()), features(model, rows()))
    assert tree.sha256(without_adapters(fresh)) == tree.sha256(model) == tree.sha256(merged(fresh))
    again = factors(adapt(model, SMALL, jax.random.key(0)))
    other = factors(adapt(model, SMALL, jax.random.key(1)))
    for name, x in factors(fresh).items():
        np.testing.assert_array_equal(x, again[name])
        assert name.endswith("lora_b") == (not np.any(x)) == np.array_equal(x, other[name])


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [1, 3])
# Rows as they are, and packed, which takes four times as long to compile.
@pytest.mark.parametrize("batch", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_merged_it_is_the_same_function(batch, layers):
    base = plain(layers=layers)
    model = moved(adapt(base, replace(SMALL, targets=("*",)), jax.random.key(0)))
    both = [loss(m, rows(batch, 13)).nats for m in (model, merged(model))]
    np.testing.assert_allclose(*both, rtol=1e-5)
    assert abs(both[0] - loss(base, rows(batch, 13)).nats) > 1e-3


def test_layers_are_chosen_by_pattern_and_depth():
    model = catalog.shapes("llama", SIZE)
    assert targets_of(model, replace(SMALL, last_blocks=1)) == [
        "blocks.2.attention.query",
        "blocks.2.attention.value",
    ]
    assert len(targets_of(model, replace(SMALL, targets=("*.feedforward.*",)))) == 9
    with pytest.raises(ConfigError, match=r"wire\.targets = 'q_proj': this model has no such"):
        targets_of(model, replace(SMALL, targets=("q_proj",)))
    with pytest.raises(ConfigError, match=r"wire\.last_blocks = 4: expected at most 3"):
        targets_of(model, replace(SMALL, last_blocks=4))
    with pytest.raises(ConfigError, match=r"wire\.rank = 9: expected at most 8"):
        targets_of(model, replace(SMALL, rank=9))


def gradient_program(adapters, batch, layers=3):
    model = adapt(plain(layers=layers), adapters, jax.random.key(0))
    trained, base = tree.split(model, leaves_by_name(model, ["*.lora_b"]))
    tokens = jnp.asarray(rows(batch, 13))

    def nats(trained):
        return catalog.loss(tree.join(trained, base), tokens).nats

    return jax.make_jaxpr(jax.grad(nats))(trained)


def count_products(program):
    """Products of a program, those of a function as often as it is called."""
    inside = [
        inner
        for equation in program.eqns
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "jaxpr"))
        if (inner := getattr(value, "jaxpr", value)) is not value or hasattr(value, "eqns")
    ]
    own = sum(equation.primitive.name == "dot_general" for equation in program.eqns)
    return own + sum(map(count_products, inside))


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", [3, 16])
def test_blocks_below_the_first_adapter_need_no_backward_pass(batch):
    def products(adapters):
        return count_products(gradient_program(adapters, batch).jaxpr)

    none = products(replace(SMALL, last_blocks=1))
    each = products(replace(SMALL, last_blocks=2)) - none
    assert products(replace(SMALL, last_blocks=3)) - none == pytest.approx(2 * each, rel=0.2)
    assert each > 0


def test_no_gradient_of_a_frozen_matrix_is_computed():
    """Rows of 3 x 12 and matrices of 16 x 16 or 28: no array of the program has such a shape."""
    made = str(gradient_program(SMALL, 16, layers=1))
    assert "f32[31,16] = dot_general" not in made
    for shape in ("f32[16,16]", "f32[28,16]", "f32[16,28]", "f32[8,16]"):
        assert f":{shape} = dot_general" not in made, shape


@pytest.mark.slow
def test_a_frozen_model_in_bfloat16_is_nearly_the_same():
    model = moved(adapt(plain(), SMALL, jax.random.key(0)))
    short = moved(adapt(plain(), replace(SMALL, base_dtype="bfloat16"), jax.random.key(0)))
    held = tree.named_leaves(without_adapters(short))
    assert {x.dtype for x in held.values()} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in factors(short).values()} == {jnp.dtype("float32")}
    a, b = (loss(m, rows(16, 13)) for m in (model, short))
    assert a.nats.dtype == b.nats.dtype == jnp.float32
    np.testing.assert_allclose(a.nats, b.nats, rtol=0.01)
    assert {x.dtype for x in jax.tree.leaves(merged(short))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss(merged(short), rows(16, 13)).nats, b.nats, rtol=1e-5)
