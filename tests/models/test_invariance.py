"""Every architecture with `si` in its name: rescaling what is invariant changes nothing."""

import fnmatch
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.models import catalog
from fedlm.models.layers import relu_weights

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=16, hidden_size=40, layers=2, heads=4, kernel_size=5
)
INVARIANT = sorted(name for name in catalog.ARCHITECTURES if "si" in name.split("-"))
# What may be multiplied by a positive number: each pattern alone, part by part along axis 0.
ALONE = {
    "si-cifg": [(("layers.?.w_x", "layers.?.w_h", "layers.?.bias"), 3)],
    "si-transformer": [(("*.query.*",), 4), (("*.key.*",), 4)],
    "si-conformer": [(("*.query.*",), 4), (("*.key.*",), 4)],
}
TOGETHER = ("blocks.*", "stem.norm.*", "stem.lift.*")


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def fresh(name, positions="sinusoidal"):
    model = catalog.make(name, replace(SIZE, positions=positions), key_for(2, "init"))
    # Biases and shifts start at zero, where a wrong degree could not be seen.
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.1 * rng.normal(size=x.shape), model)


def matches(leaf, patterns):
    return any(fnmatch.fnmatch(leaf, p) for p in patterns)


logits_of = jax.jit(lambda model, tokens: model.features(tokens) @ model.readout.T)
loss_and_gradient = jax.jit(jax.value_and_grad(lambda m, t: catalog.loss(m, t).nats))


def logits(model):
    return logits_of(model, np.random.default_rng(0).integers(4, 31, (3, 9)))


def scaled(model, patterns, parts, rng):
    """Each part along axis 0 of the matching leaves of one layer, times its own factor."""
    layers: dict[str, np.ndarray] = {}

    def change(name, leaf):
        if not matches(name, patterns):
            return leaf
        layer = ".".join(name.split(".")[:2])
        factors = layers.setdefault(layer, np.exp(rng.normal(0, 1.5, parts)))
        column = np.repeat(factors, leaf.shape[0] // parts)
        return leaf * column.reshape(-1, *[1] * (leaf.ndim - 1))

    return tree.with_leaves(model, {n: change(n, x) for n, x in tree.named_leaves(model).items()})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", INVARIANT)
def test_rescaling_each_part_changes_no_logit(name):
    model, rng = fresh(name), np.random.default_rng(1)
    for patterns, parts in ALONE[name]:
        for _ in range(3):
            moved = logits(scaled(model, patterns, parts, rng))
            np.testing.assert_allclose(moved, logits(model), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", INVARIANT)
def test_the_gradient_is_orthogonal_to_each_invariant_part(name):
    model = fresh(name)
    tokens = np.random.default_rng(0).integers(4, 31, (3, 10))
    grad = tree.named_leaves(loss_and_gradient(model, tokens)[1])
    for patterns, parts in ALONE[name]:
        along = np.zeros(parts)
        length = 0.0
        for leaf, value in tree.named_leaves(model).items():
            if matches(leaf, patterns):
                product = np.asarray(value * grad[leaf]).reshape(parts, -1)
                along += product.sum(axis=1)
                length += float(np.sum(np.square(grad[leaf])))
        assert length > 1e-6
        assert np.abs(along).max() < 1e-7 * max(1.0, length)


@pytest.mark.sample(1)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "alibi"])
@pytest.mark.parametrize("name", [name for name in INVARIANT if name != "si-cifg"])
def test_everything_between_embedding_and_readout_scales_together(name, positions):
    model = fresh(name, positions)
    for factor in (0.2, 3.0, 11.0):
        named = tree.named_leaves(model)
        moved = {n: x * factor if matches(n, TOGETHER) else x for n, x in named.items()}
        np.testing.assert_allclose(logits(tree.with_leaves(model, moved)), logits(model), atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["transformer", "conformer"])
def test_the_plain_architectures_are_not_invariant(name):
    """The suite could not fail if logits did not depend on the weights."""
    model = fresh(name)
    moved = scaled(model, ("*.query.*",), 4, np.random.default_rng(1))
    assert np.abs(logits(moved) - logits(model)).max() > 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", INVARIANT)
def test_degenerate_rows_give_no_nan(name):
    """All weights zero: no gate is positive, no score is, and every norm divides by its floor."""
    model = jax.tree.map(np.zeros_like, fresh(name))
    tokens = np.random.default_rng(0).integers(4, 31, (3, 10))
    value, grad = loss_and_gradient(model, tokens)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad))


def test_a_nearly_empty_row_of_attention_is_steady():
    """One score crosses zero by rounding while the others are negative: no weight may jump."""
    largest, allowed = jnp.ones((1, 4)), jnp.ones((1, 4), bool)
    above, below = jnp.array([[1e-7, -1.0, -1, -1]]), jnp.array([[-1e-7, -1.0, -1, -1]])

    def jump(floor):
        a, b = (
            relu_weights(scores, allowed, None, largest=largest, floor=floor)
            for scores in (above, below)
        )
        return float(jnp.abs(a - b).max())

    assert jump(0.1) < 1e-6
    assert jump(0.0) == 1.0  # the published rule: all or nothing
