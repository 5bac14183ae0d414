"""The fast loss is the plain loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core.types import PAD
from fedlm.models import loss
from fedlm.models.loss import cross_entropy, scores, token_loss
from tests.oracle import plain_cross_entropy


def example(rows=23, embed=8, vocab=31, pads=5, scale=1.0):
    rng = np.random.default_rng(0)
    features = np.float32(scale) * rng.normal(size=(rows, embed)).astype(np.float32)
    readout = rng.normal(size=(vocab, embed)).astype(np.float32)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[:pads] = PAD
    return features, readout, targets


# One program each for all tests with rows of the same number. Three times the loss: what comes back
# through the rest of a model is not always one.
fast = jax.jit(jax.value_and_grad(lambda f, r, t: 3 * cross_entropy(f, r, t), (0, 1)))
plain = jax.jit(jax.value_and_grad(lambda f, r, t: 3 * plain_cross_entropy(f, r, t), (0, 1)))
scored = jax.jit(scores)


def by_hand(features, readout, targets):
    """The loss in float64, without JAX."""
    logits = np.asarray(features, np.float64) @ np.asarray(readout, np.float64).T
    real = np.flatnonzero(np.asarray(targets) != PAD)
    right = logits[real, np.asarray(targets)[real]]
    return np.sum(np.logaddexp.reduce(logits[real], axis=1) - right)


def test_value_and_gradient_equal_the_definition():
    (value, grads), (wanted, wanted_grads) = fast(*example()), plain(*example())
    np.testing.assert_allclose(value, 3 * by_hand(*example()), rtol=1e-6)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for a, b in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("pads", [0, 1, 20, 100, 199, 200])
def test_leaving_out_the_padding_changes_nothing(pads):
    """Enough rows to be sorted; every share of padding, none and all included."""
    features, readout, targets = example(rows=200, pads=pads)
    targets = np.random.default_rng(3).permutation(targets)
    both = (f(features, readout, targets) for f in (fast, plain))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pads", [0, 13, 19])
def test_few_rows_may_have_several_sizes(pads):
    """Sorted too: real targets stand anywhere."""
    features, readout, targets = example(rows=20, pads=pads)
    targets = np.random.default_rng(3).permutation(targets)
    sized = jax.grad(lambda f: cross_entropy(f, readout, targets, (5, 10, 20)))
    whole = jax.grad(lambda f: plain_cross_entropy(f, readout, targets))
    np.testing.assert_allclose(sized(features), whole(features), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [23, 200])
def test_few_logits_at_a_time_give_the_same(monkeypatch, rows):
    features, readout, targets = map(jnp.asarray, example(rows=rows))
    found = []
    for most in (1 << 25, 31 * 9):
        monkeypatch.setattr(loss, "MOST_LOGITS", most)

        @jax.jit
        def both(f, r):
            loss = jax.value_and_grad(lambda f, r: cross_entropy(f, r, targets), (0, 1))
            return loss(f, r), scores(f, r, targets)

        found.append(both(features, readout))
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
    both = fast(features, readout, targets)[1]
    alone = jax.jit(jax.grad(cross_entropy))(features, readout, targets)
    # Two programs round a difference of probabilities each in its own way: by the largest entry.
    np.testing.assert_allclose(3 * alone, both[0], atol=1e-6 * np.abs(both[0]).max())
    frozen = jax.make_jaxpr(jax.grad(cross_entropy))(features, readout, targets)
    trained = jax.make_jaxpr(jax.grad(cross_entropy, (0, 1)))(features, readout, targets)
    assert str(frozen).count("dot_general") < str(trained).count("dot_general")


def test_huge_logits_stay_finite():
    features, readout, targets = example(scale=1e4)
    value, grads = fast(features, readout, targets)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_padding_is_inert():
    features, readout, targets = example(pads=0)
    padded = np.where(np.arange(len(targets)) < len(targets) - 7, targets, PAD)
    value, (grad, _) = fast(features, readout, padded)
    wanted = 3 * by_hand(features[:-7], readout, targets[:-7])
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_array_equal(grad[-7:], 0.0)
    assert np.all(np.any(grad[:-7], axis=1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [23, 200])
def test_padding_gives_no_gradient_to_the_last_word(rows):
    """An array looked up at -1 gives its last entry: that word must not notice."""
    features, readout, targets = example(rows=rows, pads=rows)
    _, (d_features, d_readout) = fast(features, readout, targets)
    np.testing.assert_array_equal(d_features, 0.0)
    np.testing.assert_array_equal(d_readout, 0.0)


def test_every_word_of_a_vocabulary_counts():
    features, readout, _ = example(rows=31, vocab=31)
    count = jax.jit(lambda *given: token_loss(*given).tokens)
    assert float(count(features, readout, jnp.arange(31))) == 31


def test_a_batch_counts_its_real_targets():
    features, readout, targets = example()
    count = jax.jit(lambda *given: token_loss(*given).tokens)
    assert float(count(features, readout, targets)) == 23 - 5


def test_a_model_that_tells_nothing_finds_nothing():
    """Where all logits were equal every target counted as the likeliest: 100% right."""
    readout = jnp.ones((31, 4))
    nats, right = scored(jnp.zeros((6, 4)), readout, jnp.array([1, 2, 3, 4, 5, 6]))
    assert not np.any(right) and np.allclose(nats, np.log(31))


def test_scores_add_up_to_the_loss_and_name_the_likeliest():
    features, readout, targets = example()
    nats, right = scored(features, readout, targets)
    np.testing.assert_allclose(3 * np.sum(nats), fast(features, readout, targets)[0], rtol=1e-6)
    np.testing.assert_array_equal(right, np.argmax(features @ readout.T, axis=1) == targets)
    np.testing.assert_array_equal(nats[:5], 0.0)
