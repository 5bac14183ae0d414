"""The fast loss is the plain loss."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedlm.core.types import PAD
from fedlm.models import loss
from fedlm.models.loss import cross_entropy, plain_cross_entropy, scores, token_loss


def example(rows=23, embed=8, vocab=31, pads=5, scale=1.0):
    features = scale * jr.normal(jr.key(0), (rows, embed))
    readout = jr.normal(jr.key(1), (vocab, embed))
    targets = jr.randint(jr.key(2), (rows,), 0, vocab).at[:pads].set(PAD)
    return features, readout, targets


def test_value_and_gradient_equal_the_definition():
    features, readout, targets = example()
    fast = jax.value_and_grad(lambda f, r: 3 * cross_entropy(f, r, targets), (0, 1))
    plain = jax.value_and_grad(lambda f, r: 3 * plain_cross_entropy(f, r, targets), (0, 1))
    (value, grads), (wanted, wanted_grads) = fast(features, readout), plain(features, readout)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for a, b in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("pads", [0, 1, 20, 100, 199, 200])
def test_leaving_out_the_padding_changes_nothing(pads):
    """Enough rows to be sorted; every share of padding, none and all included."""
    features, readout, targets = example(rows=200, pads=pads)
    targets = jr.permutation(jr.key(3), targets)
    fast = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))(features, readout, targets)
    plain = jax.value_and_grad(plain_cross_entropy, (0, 1))(features, readout, targets)
    for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [23, 200])
def test_few_logits_at_a_time_give_the_same(monkeypatch, rows):
    features, readout, targets = example(rows=rows)
    found = []
    for most in (1 << 25, 31 * 9):
        monkeypatch.setattr(loss, "MOST_LOGITS", most)
        fast = jax.value_and_grad(lambda f, r: cross_entropy(f, r, targets), (0, 1))
        found.append((fast(features, readout), scores(features, readout, targets)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def sizes(jaxpr):
    """The sizes of all arrays that a program makes, also in its loops."""
    for line in jaxpr.eqns:
        yield from (var.aval.size for var in line.outvars)
        for inner in jax.tree.leaves(line.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from sizes(inner.jaxpr)


def test_a_large_vocabulary_never_makes_more_logits_than_stated(monkeypatch):
    """Of 64 rows by 500 words no array holds more than 5,000, with the output matrix frozen."""
    monkeypatch.setattr(loss, "MOST_LOGITS", 5_000)
    features, readout, targets = example(rows=64, vocab=500)
    grad = jax.make_jaxpr(jax.grad(lambda f: cross_entropy(f, readout, targets)))(features)
    assert max(sizes(grad.jaxpr)) <= 5_000
    monkeypatch.setattr(loss, "MOST_LOGITS", 1 << 25)
    whole = jax.make_jaxpr(jax.grad(lambda f: cross_entropy(f, readout, targets)))(features)
    assert max(sizes(whole.jaxpr)) >= 64 * 500


@pytest.mark.slow
def test_a_frozen_output_matrix_costs_no_gradient():
    features, readout, targets = example(rows=200)
    both = jax.grad(cross_entropy, (0, 1))(features, readout, targets)
    alone = jax.grad(cross_entropy)(features, readout, targets)
    np.testing.assert_allclose(alone, both[0], rtol=1e-6)
    frozen = jax.make_jaxpr(jax.grad(cross_entropy))(features, readout, targets)
    trained = jax.make_jaxpr(jax.grad(cross_entropy, (0, 1)))(features, readout, targets)
    assert str(frozen).count("dot_general") < str(trained).count("dot_general")


def test_huge_logits_stay_finite():
    features, readout, targets = example(scale=1e4)
    value, grads = jax.value_and_grad(cross_entropy, (0, 1))(features, readout, targets)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_padding_is_inert():
    features, readout, targets = example(pads=0)
    nothing = jnp.full((7,), PAD)
    more = jnp.concatenate([features, jnp.ones((7, 8))])
    longer = jnp.concatenate([targets, nothing])
    np.testing.assert_allclose(
        cross_entropy(more, readout, longer), cross_entropy(features, readout, targets), rtol=1e-6
    )
    grad = jax.grad(cross_entropy)(more, readout, longer)
    np.testing.assert_array_equal(grad[-7:], 0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [23, 200])
def test_padding_gives_no_gradient_to_the_last_word(rows):
    """An array looked up at -1 gives its last entry: that word must not notice."""
    features, readout, targets = example(rows=rows, pads=rows)
    d_features, d_readout = jax.grad(cross_entropy, (0, 1))(features, readout, targets)
    np.testing.assert_array_equal(d_features, 0.0)
    np.testing.assert_array_equal(d_readout, 0.0)


def test_every_word_of_a_vocabulary_counts():
    features, readout, _ = example(rows=31, vocab=31)
    assert float(token_loss(features, readout, jnp.arange(31)).tokens) == 31


def test_a_batch_counts_its_real_targets():
    features = jr.normal(jr.key(0), (6, 4))
    targets = jnp.array([5, 6, PAD, 7, PAD, PAD])
    loss = token_loss(features, jr.normal(jr.key(1), (9, 4)), targets)
    assert float(loss.tokens) == 3


def test_scores_add_up_to_the_loss_and_name_the_likeliest():
    features, readout, targets = example()
    nats, right = scores(features, readout, targets)
    np.testing.assert_allclose(jnp.sum(nats), cross_entropy(features, readout, targets), rtol=1e-6)
    np.testing.assert_array_equal(right, np.argmax(features @ readout.T, axis=1) == targets)
    np.testing.assert_array_equal(nats[:5], 0.0)
