"""Recurrent models: published equations, fast gradients, scale invariance."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedlm.core.types import PAD
from fedlm.models import catalog
from fedlm.models import recurrent as module
from fedlm.models.cells import MEASURES, RECTIFIERS, Cifg, Lstm, SiCifg
from fedlm.models.recurrent import plain_sequence, recurrent
from tests.oracle import STEPS, plain_cross_entropy

KINDS = {"cifg": Cifg(), "lstm": Lstm(), "si-cifg": SiCifg()}
CELLS = sorted(STEPS)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """Gradients are compared in float64: in float32 a ReLU or a maximum may switch sides."""
    with jax.enable_x64(True):
        yield


# One program for all tests of a cell.
features_of = jax.jit(lambda model, tokens: model.features(tokens))
advance = jax.jit(lambda model, state, token: model.advance(state, token))
loss_and_gradient = jax.jit(jax.value_and_grad(lambda m, t: catalog.loss(m, t).nats))


def model_and_tokens(cell, vocab=40, embed=12, units=33, batch=3, seq=7):
    model = doubled(recurrent(KINDS[cell], vocab, embed, units, key=jr.key(1)))
    return model, np.random.default_rng(0).integers(4, vocab, (batch, seq))


def doubled(tree):
    """The same numbers with twice the digits, on the host: there nothing is compiled."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("cell", CELLS)
def test_features_follow_the_published_equations(cell):
    model, tokens = model_and_tokens(cell)
    features = np.asarray(features_of(model, tokens))
    layer = model.layers[0]
    weights = [np.asarray(w) for w in (layer.w_x, layer.w_h, layer.bias, layer.project)]
    for row in range(tokens.shape[0]):
        h, c = np.zeros(12), np.zeros(33)
        for t in range(tokens.shape[1]):
            h, c = STEPS[cell](np.asarray(model.embedding)[tokens[row, t]], h, c, *weights)
            np.testing.assert_allclose(features[row, t], h, atol=1e-10)


def plain_loss(model, tokens):
    """The loss by the definitions of sequence and cross-entropy, differentiated by JAX."""
    x = model.embedding[tokens[:, :-1].T]
    for layer in model.layers:
        x = plain_sequence(model.cell, x, layer.w_x, layer.w_h, layer.bias, layer.project)
    features = x.transpose(1, 0, 2).reshape(-1, x.shape[2])
    return plain_cross_entropy(features, model.readout, tokens[:, 1:].reshape(-1))


def ragged_rows(batch, seq, vocab, seed):
    """Rows of all lengths, whole rows of PAD among them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(4, vocab, (batch, seq + 1))
    rows[np.arange(seq + 1) > rng.integers(0, seq + 1, batch)[:, None]] = PAD
    return rows


@pytest.mark.sample(1)
# 16 rows have stages of several widths, 16 x 12 columns have several sizes of products.
@pytest.mark.parametrize("batch, seq, layers", [(16, 5, 1), (3, 7, 1), (16, 5, 2), (16, 12, 1)])
@pytest.mark.parametrize("cell", CELLS)
def test_the_fast_loss_has_the_gradients_of_the_plain_one(cell, batch, seq, layers):
    model = recurrent(KINDS[cell], 40, 12, 33, layers=layers, key=jr.key(1))
    model = doubled(model)
    plain = jax.jit(jax.value_and_grad(plain_loss))
    for seed in range(4):
        rows = ragged_rows(batch, seq, 40, seed)
        (a, d_a), (b, d_b) = loss_and_gradient(model, rows), plain(model, rows)
        np.testing.assert_allclose(a, b, rtol=1e-12)
        for x, y in zip(jax.tree.leaves(d_a), jax.tree.leaves(d_b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("loss", [catalog.loss, catalog.loss_of_full_rows])
def test_rows_with_slots_to_themselves_have_the_same_gradients(loss, cell, monkeypatch):
    """A layer that no cache holds, where ragged rows share slots; and rows said to be full."""
    monkeypatch.setattr(module, "CACHED", 0)
    model = doubled(recurrent(KINDS[cell], 40, 12, 33, key=jr.key(1)))
    fast = jax.jit(jax.value_and_grad(lambda m, t: loss(m, t).nats))
    plain = jax.jit(jax.value_and_grad(plain_loss))
    full = np.random.default_rng(0).integers(4, 40, (16, 6))
    nearly = full.copy()
    nearly[[3, 9], 4:] = PAD
    for rows in (full, nearly, ragged_rows(16, 5, 40, 0)):
        (a, d_a), (b, d_b) = fast(model, rows), plain(model, rows)
        np.testing.assert_allclose(a, b, rtol=1e-12)
        for x, y in zip(jax.tree.leaves(d_a), jax.tree.leaves(d_b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cell", CELLS)
def test_one_token_at_a_time_equals_the_whole_row(cell):
    model, tokens = model_and_tokens(cell)
    whole = features_of(model, tokens)
    state = doubled(model.start(tokens.shape[0]))
    for t in range(tokens.shape[1]):
        state, features = advance(model, state, tokens[:, t])
        np.testing.assert_allclose(features, whole[:, t], atol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_a_later_token_never_changes_an_earlier_feature(cell):
    model, tokens = model_and_tokens(cell)
    changed = tokens.copy()
    changed[:, 4] = (tokens[:, 4] + 1) % 40
    before, after = features_of(model, tokens), features_of(model, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-6


def rescaled(model, factors, gates=3):
    """The weights of each gate, bias included, times that gate's factor."""
    layer = model.layers[0]
    column = np.repeat(np.asarray(factors), layer.bias.shape[0] // gates)
    new = type(layer)(
        layer.w_x * column[:, None], layer.w_h * column[:, None], layer.bias * column, layer.project
    )
    return type(model)(model.embedding, (new,), model.cell)


def test_rescaling_each_gate_of_si_cifg_changes_nothing():
    model, tokens = model_and_tokens("si-cifg")
    for seed in range(5):
        factors = np.exp(np.random.default_rng(seed).normal(0, 2, 3))
        moved = features_of(rescaled(model, factors), tokens)
        np.testing.assert_allclose(moved, features_of(model, tokens), atol=1e-6)


def test_rescaling_the_gates_of_plain_cifg_does_change_it():
    """The law above could not fail for a cell that ignores its weights."""
    model, tokens = model_and_tokens("cifg")
    moved = features_of(rescaled(model, [3.0, 0.5, 2.0]), tokens)
    assert np.abs(moved - features_of(model, tokens)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("cell, orthogonal", [("si-cifg", True), ("cifg", False)])
def test_the_gradient_is_orthogonal_to_the_weights_of_each_invariant_gate(cell, orthogonal):
    model, tokens = model_and_tokens(cell)
    rows = np.concatenate([tokens, tokens[:, :1]], axis=1)
    _, grad = loss_and_gradient(model, rows)
    layer, d = model.layers[0], grad.layers[0]
    along = layer.bias * d.bias + jnp.sum(layer.w_x * d.w_x + layer.w_h * d.w_h, axis=1)
    per_gate = np.abs([jnp.sum(part) for part in jnp.split(along, 3)])
    length = np.sqrt(float(jnp.sum(d.w_x**2) + jnp.sum(d.w_h**2)))
    assert length > 1e-3
    assert (per_gate.max() < 1e-9) == orthogonal


def test_an_all_negative_gate_gives_no_nan():
    model, tokens = model_and_tokens("si-cifg")
    layer = model.layers[0]
    dead = type(layer)(
        np.zeros_like(layer.w_x), np.zeros_like(layer.w_h), layer.bias - 1.0, layer.project
    )
    model = type(model)(model.embedding, (dead,), model.cell)
    rows = np.concatenate([tokens, tokens[:, :1]], axis=1)
    value, grad = loss_and_gradient(model, rows)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad))


def test_the_published_size_of_the_benchmark_model():
    size = catalog.Dimensions(vocab=10_000, embedding_size=96, hidden_size=670)
    assert catalog.count("si-cifg", size) == catalog.count("cifg", size) == 1_412_250


@pytest.mark.sample(2)
@pytest.mark.parametrize("measure", sorted(MEASURES.keys() - {"none"}))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_norm": True},
        *({"rectifier": name} for name in RECTIFIERS),
        {"scaled_floor": 0.3},
    ],
)
def test_every_measure_in_place_of_the_maximum_is_invariant_too(measure, options):
    cell = SiCifg(measure=measure, **options)
    step = jax.jit(cell.step)
    z, c = jr.normal(jr.key(0), (3, 5, 33)), jr.normal(jr.key(1), (5, 33))
    factors = jnp.array([0.1, 7.0, 3.0])[:, None, None]
    for a, b in zip(step(z, c), step(factors * z, c), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("power", [8, 16])
def test_a_power_norm_is_the_p_norm_and_lies_between_the_maximum_and_its_multiple(power):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 33)))
    norm, wanted = MEASURES[f"p{power}"], np.sum(np.abs(x) ** power, axis=1) ** (1 / power)
    np.testing.assert_allclose(x[:, 0] / norm(x, 1e-6)[:, 0], wanted, rtol=1e-6)
    largest = np.abs(x).max(axis=1)
    assert (wanted >= largest).all() and (wanted <= 33 ** (1 / power) * largest).all()
    by_hand = jax.grad(lambda v: jnp.sum(jnp.abs(v) ** power) ** (1 / power))(x[0])
    found = jax.grad(lambda v: v[0] / norm(v[None], 1e-6)[0, 0])(x[0])
    np.testing.assert_allclose(found, by_hand, atol=1e-5)
    for hard in (1e30, 1e-30, 0.0):  # powers neither overflow nor make nan
        slope = jax.grad(lambda v, hard=hard: norm(hard * v[None], 1e-6).sum())(x[0])
        assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    "options, most",
    [({}, None), ({"scaled_floor": 0.1}, 40), ({"measure": "p8", "rectifier": "soft"}, 40)],
)
def test_a_gate_with_hardly_anything_positive_has_a_bounded_gradient(options, most):
    """One unit just above zero: the published rule makes it one, whatever it is."""
    z = -jnp.abs(jr.normal(jr.key(0), (1, 33)))
    z = z.at[0, 3].set(1e-4)
    gate = SiCifg(**options)._open
    steepest = np.abs(jax.jacobian(lambda v: gate(v[None])[0])(z[0])).max()
    assert float(gate(z).max()) <= 1
    if most is None:
        near = gate(z.at[0, 5].set(1e-4))  # a second unit as small: it opens fully, at once
        assert float(near[0, 5]) == 1
    else:
        assert steepest < most


def test_the_soft_rectifier_is_relu_far_from_its_corner():
    x = jnp.array([[-30.0, -1.0, 0.0, 1.0, 30.0]])
    soft = RECTIFIERS["soft"](x)
    assert (soft > 0).all() and float(soft[0, 2]) > 0.5
    np.testing.assert_allclose(soft[0, -1], 30, rtol=0.01)
    np.testing.assert_allclose(RECTIFIERS["soft"](7 * x), 7 * soft, rtol=1e-6)


def test_a_relu_gate_without_a_measure_is_not_invariant():
    z, c = jr.normal(jr.key(0), (3, 5, 33)), jr.normal(jr.key(1), (5, 33))
    bare = SiCifg(measure="none")
    assert np.abs(bare.step(z, c)[0] - bare.step(2 * z, c)[0]).max() > 1e-3


@pytest.mark.parametrize("option", ["candidate", "state"])
def test_the_options_the_paper_leaves_open_change_the_cell(option):
    z, c = jr.normal(jr.key(0), (3, 5, 33)), jr.normal(jr.key(1), (5, 33))
    changed = SiCifg(**{option: False})
    assert np.abs(changed.step(z, c)[0] - SiCifg().step(z, c)[0]).max() > 1e-3
