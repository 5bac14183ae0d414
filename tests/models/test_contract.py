"""What every architecture owes; a new one joins by being in the catalog."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.core.types import PAD
from fedlm.models import catalog
from fedlm.models.layers import Rotary
from fedlm.record.checkpoint import from_bytes, to_bytes
from tests.oracle import plain_cross_entropy

SIZE = catalog.Dimensions(
    vocab=31, embedding_size=16, hidden_size=40, layers=2, heads=4, kernel_size=5
)
ALL = [
    *((name, SIZE) for name in catalog.ARCHITECTURES),
    *(
        (name, replace(SIZE, positions=positions))
        for name in ("transformer", "si-transformer", "conformer", "si-conformer")
        for positions in ("learned", "alibi")
    ),
    ("mpt", replace(SIZE, activation="gelu-exact")),
    ("gpt-neox", replace(SIZE, parallel=False, rotary_fraction=1.0, tied=False)),
    ("llama", replace(SIZE, key_heads=2, head_size=6, qkv_bias=True, tied=False)),
]
every = pytest.mark.parametrize(
    "name, size",
    [pytest.param(name, size, id=f"{name}-{n}") for n, (name, size) in enumerate(ALL)],
)


def fresh(name, size):
    return catalog.make(name, size, key_for(1, "init"))


TRACES = []


def nats_of(model, tokens):
    TRACES.append(1)
    return catalog.loss(model, tokens).nats


# One program for all tests of an architecture, and of the loss another one for rows that are packed
# (16 x 13). All cases have the same names in all tests, so that the same ones are drawn.
features_of = jax.jit(lambda model, tokens: model.features(tokens))
loss_and_gradient = jax.jit(jax.value_and_grad(nats_of))
scores_of = jax.jit(catalog.score)


def rows(batch=3, width=10, seed=0):
    return np.random.default_rng(seed).integers(4, 31, (batch, width)).astype(np.int32)


@pytest.mark.sample(1)
@every
def test_shapes_and_type(name, size):
    model = fresh(name, size)
    features = features_of(model, rows())
    assert features.shape == (3, 10, size.embedding_size)
    assert model.readout.shape == (size.vocab, size.embedding_size)
    assert {leaf.dtype for leaf in jax.tree.leaves((model, features))} == {jnp.dtype("float32")}


@pytest.mark.sample(1)
@every
def test_a_fresh_model_guesses(name, size):
    nats, _ = loss_and_gradient(fresh(name, size), rows(batch=16, width=13))
    assert abs(nats / (16 * 12) - np.log(size.vocab)) < 0.8


@pytest.mark.sample(1)
@every
@pytest.mark.parametrize("batch", [3, 30])  # rows as they are, and packed
def test_products_in_bfloat16_change_loss_and_gradient_little(name, size, batch):
    """The loss by less than a hundredth, the direction of the gradient by less than a tenth.

    Scale-invariant ones by more, on some processors.
    """
    tokens = rows(batch=batch, width=12)
    model, short = (fresh(name, replace(size, dtype=d)) for d in ("float32", "bfloat16"))
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.tree.leaves, (model, short))))
    (nats, grad), (other, short_grad) = (loss_and_gradient(m, tokens) for m in (model, short))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(short_grad)]
    assert other.dtype == jnp.float32 and {leaf.dtype for leaf in leaves} == {np.dtype("float32")}
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    assert abs(float(other - nats)) < 0.01 * float(nats)
    one, two = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (grad, short_grad)
    )
    # A maximum, or a sum of few positive numbers, that divides a whole row amplifies rounding.
    least = 0.9 if name.startswith("si-") else 0.995
    assert one @ two > least * np.linalg.norm(one) * np.linalg.norm(two)


@every
def test_a_loss_has_a_value_without_a_gradient(name, size):
    """By shapes: the way of a layer that nobody differentiates is another one."""
    model = jax.eval_shape(lambda: fresh(name, size))
    found = jax.eval_shape(catalog.loss, model, jax.ShapeDtypeStruct((16, 12), jnp.int32))
    assert found.nats.shape == found.tokens.shape == ()


def kinds_of_products(jaxpr):
    """The types that a program multiplies matrices of, also in its loops and branches."""
    for line in jaxpr.eqns:
        if line.primitive.name == "dot_general":
            yield tuple(str(var.aval.dtype) for var in line.invars)
        for inner in jax.tree.leaves(line.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from kinds_of_products(inner.jaxpr)


@pytest.mark.sample(3)
@every
def test_products_in_bfloat16_are_that_and_counts_are_not(name, size):
    """More targets than bfloat16 can count."""
    model = jax.eval_shape(lambda: fresh(name, replace(size, dtype="bfloat16")))
    tokens = jax.ShapeDtypeStruct((30, 12), jnp.int32)
    program = jax.make_jaxpr(jax.grad(lambda m, t: catalog.loss(m, t).nats))(model, tokens)
    assert set(kinds_of_products(program.jaxpr)) == {("bfloat16", "bfloat16")}
    loss = jax.eval_shape(catalog.loss, model, tokens)
    assert loss.nats.dtype == loss.tokens.dtype == jnp.float32
    nats, _ = jax.eval_shape(catalog.score, model, tokens)
    assert nats.dtype == jnp.float32, "evaluation is that of the parameters"


def additions(name, size, tokens):
    """How many additions the kernels of a gradient have, repeated ones too."""
    gradient = jax.jit(jax.grad(lambda model, tokens: catalog.loss(model, tokens, True).nats))
    return gradient.lower(fresh(name, size), tokens).compile().as_text().count(" add(")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [n for n, made in catalog.ARCHITECTURES.items() if made.attends])
@pytest.mark.parametrize("batch", [3, 16])  # rows as they are, and packed in few sizes
def test_what_blocks_add_to_is_not_added_up_again_by_all_kernels_that_read_it(name, batch):
    """Two blocks more cost the same whatever is below them."""
    tokens = rows(batch, width=9)
    one, three, five = (
        additions(name, replace(SIZE, layers=layers), tokens) for layers in (1, 3, 5)
    )
    assert five - three <= 1.1 * (three - one)


def _above_guessing(architecture, size):
    """How many nats per token a fresh model costs above guessing, on words without an order."""
    model = catalog.make(architecture, size, key_for(0, "init"))
    tokens = np.random.default_rng(0).integers(4, size.vocab, (32, 21)).astype(np.int32)
    nats, _ = scores_of(model, tokens)
    return float(np.asarray(nats).mean() - np.log(size.vocab))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [n for n, made in catalog.ARCHITECTURES.items() if made.attends])
def test_a_fresh_model_can_begin_at_guessing(name):
    size = replace(catalog.NAMED[name].size, vocab=500, embedding_size=64, guessing=True)
    assert abs(_above_guessing(name, size)) < 0.1
    assert _above_guessing(name, replace(size, guessing=False)) > 0.25


@pytest.mark.parametrize("guessing", [False, True])
def test_no_type_of_a_fresh_model_is_weak(guessing):
    """JAX would compile all programs of a run again, once a step has made such types strong."""
    for name in catalog.ARCHITECTURES:
        size = replace(SIZE, guessing=guessing and catalog.ARCHITECTURES[name].attends)
        made = jax.eval_shape(lambda name=name, size=size: fresh(name, size))
        weak = [path for path, leaf in tree.named_leaves(made).items() if leaf.weak_type]
        assert not weak, (name, weak)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_so_can_a_wide_one_whose_head_is_its_own(name):
    size = replace(catalog.NAMED[name].size, vocab=500, embedding_size=1024, tied=False)
    assert abs(_above_guessing(name, replace(size, guessing=True))) < 0.1
    assert _above_guessing(name, size) > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", list(catalog.PUBLISHED))
def test_a_fresh_model_of_a_published_size_begins_at_guessing(name):
    named = catalog.PUBLISHED[name]
    assert abs(_above_guessing(named.architecture, named.size)) < 0.1


@pytest.mark.slow
def test_a_head_of_ones_own_is_trained_apart_from_the_embedding():
    model = fresh("llama", replace(SIZE, tied=False))
    _, grad = loss_and_gradient(model, rows())
    assert np.any(grad.head) and np.any(grad.stem.embedding)
    assert model.readout is model.head


def test_grouped_queries_keep_a_smaller_cache():
    model = fresh("llama", replace(SIZE, key_heads=2))
    assert model.start(3, 16)[1][0].keys.shape == (3, 2, 16, 4)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 16])  # rows as they are, and packed
def test_many_blocks_as_a_loop_are_the_same_model(monkeypatch, batch):
    size = replace(SIZE, layers=3, key_heads=2)
    tokens = jnp.asarray(rows(batch=batch, width=12))

    def found(fewest, **more):
        # By its full name: `fedlm.models.transformer` is also a function.
        monkeypatch.setattr(sys.modules["fedlm.models.transformer"], "FEWEST_SCANNED", fewest)
        model = fresh("llama", replace(size, **more))
        return jax.jit(jax.value_and_grad(lambda m: catalog.loss(m, tokens).nats))(model)

    plain = found(99)
    for other in (found(3), found(3, remat=True), found(99, remat=True)):
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_that_are_computed_again_keep_less():
    """Outside of a loop XLA finds the second computation, and keeps the first after all."""

    def scratch(remat):
        size = replace(SIZE, embedding_size=64, hidden_size=256, layers=8, remat=remat)
        shapes = catalog.shapes("llama", size)
        tokens = jax.ShapeDtypeStruct((16, 65), jnp.int32)
        program = jax.jit(jax.grad(lambda m, t: catalog.loss(m, t).nats))
        return program.lower(shapes, tokens).compile().memory_analysis().temp_size_in_bytes

    assert scratch(remat=True) < 0.5 * scratch(remat=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "si-transformer"])
def test_long_rows_one_by_one_are_the_same_model(monkeypatch, name):
    tokens = jnp.asarray(rows(batch=3, width=12))
    size = replace(SIZE, layers=1, key_heads=2 if name == "llama" else SIZE.key_heads)

    def found(most):
        monkeypatch.setattr(sys.modules["fedlm.models.attention"], "MOST_SCORES", most)
        program = jax.jit(jax.value_and_grad(lambda m: catalog.loss(m, tokens).nats))
        made = program.lower(fresh(name, size))
        return "while" in made.as_text(), made.compile()(fresh(name, size))

    (_, plain), (looped, other) = found(1 << 24), found(1)
    assert looped
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rotary_positions_depend_on_distance_alone():
    turn = jax.jit(Rotary(6, 100.0))
    q, k = (np.random.default_rng(n).normal(size=(1, 1, 1, 8)).astype(np.float32) for n in (0, 1))

    def score(at_q, at_k):
        return np.vdot(turn(q, np.array([at_q])), turn(k, np.array([at_k])))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
    np.testing.assert_array_equal(turn(q, np.array([3]))[..., 6:], q[..., 6:])


@pytest.mark.sample(4)
@every
def test_the_stated_count_is_the_real_count(name, size):
    assert catalog.count(name, size) == tree.size(fresh(name, size))


@pytest.mark.sample(1)
@every
def test_a_later_token_never_changes_an_earlier_feature(name, size):
    model, tokens = fresh(name, size), rows()
    changed = tokens.copy()
    changed[:, 6] = 4 + (tokens[:, 6] - 3) % 27
    before, after = features_of(model, tokens), features_of(model, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-6


@pytest.mark.sample(1)
@every
def test_padding_is_inert(name, size):
    model, tokens = fresh(name, size), rows()
    wide = np.pad(tokens, ((0, 13), (0, 3)), constant_values=PAD)
    (a, grad_a), (b, grad_b) = (loss_and_gradient(model, t) for t in (tokens, wide))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4 * max(1.0, float(np.abs(x).max())))


@pytest.mark.sample(1)
@every
def test_padding_gives_no_gradient_to_any_word(name, size):
    """An array looked up at -1 gives its last entry: no row of the embedding may notice."""
    for shape in ((3, 10), (16, 13)):  # rows as they are, and packed
        nothing = np.full(shape, PAD, np.int32)
        nothing[:, 0] = 4
        _, grad = loss_and_gradient(fresh(name, size), nothing)
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(grad)), shape


@pytest.mark.sample(1)
@every
def test_a_few_steps_of_sgd_lower_the_loss_with_one_compilation(name, size):
    model, seen = fresh(name, size), []
    tokens = (4 + (np.arange(10) + np.arange(3)[:, None]) % 5).astype(np.int32)
    rate = np.float32(0.3 / (3 * 9))
    traced = 0
    for step in range(25):
        nats, grad = loss_and_gradient(model, tokens)
        traced = traced if step else len(TRACES)
        seen.append(float(nats) / (3 * 9))
        model = jax.tree.map(lambda x, d: np.asarray(x) - rate * np.asarray(d), model, grad)
    assert seen[-1] < seen[0] - 0.2
    assert len(TRACES) == traced


@pytest.mark.slow
@pytest.mark.parametrize("loss", [catalog.loss, catalog.loss_of_full_rows])
@every
def test_leaving_out_what_short_rows_do_not_hold_changes_nothing(name, size, loss):
    """Enough columns to be packed, rows of all lengths: the loss of `features`, and its gradient.

    In float64: a ReLU or a maximum may switch sides on rounding.
    """
    with jax.enable_x64(True):
        model = jax.tree.map(lambda x: x.astype(jnp.float64), fresh(name, size))
        tokens = np.asarray(rows(batch=16, width=13))
        ends = np.random.default_rng(1).integers(0, 13, 16)
        tokens = jnp.asarray(np.where(np.arange(13) <= ends[:, None], tokens, PAD))

        def plain(model):
            features = model.features(tokens[:, :-1])
            targets = tokens[:, 1:].reshape(-1)
            return plain_cross_entropy(features.reshape(len(targets), -1), model.readout, targets)

        fast = jax.jit(jax.value_and_grad(lambda m: loss(m, tokens).nats))
        both = fast(model), jax.jit(jax.value_and_grad(plain))(model)
        for a, b in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.sample(1)
@every
def test_one_token_at_a_time_equals_the_whole_row(name, size):
    model, tokens = fresh(name, size), rows()
    whole = features_of(model, tokens)
    state = model.start(3, 16)
    advance = jax.jit(lambda s, t: model.advance(s, t))
    for t in range(tokens.shape[1]):
        state, features = advance(state, tokens[:, t])
        np.testing.assert_allclose(features, whole[:, t], atol=2e-5)


@pytest.mark.sample(4)
@every
def test_saved_and_loaded_it_is_the_same(name, size):
    model = fresh(name, size)
    again = from_bytes(to_bytes(model), catalog.shapes(name, size), "bytes")
    assert tree.sha256(again) == tree.sha256(model)
    assert jax.tree.structure(again) == jax.tree.structure(model)


def test_named_sizes_match_what_was_published():
    """To the precision of the quoted figure; the MPT names are nominal."""
    for name, entry in catalog.NAMED.items():
        if entry.published is None:
            continue
        found = catalog.count(entry.architecture, entry.size) / 1e6
        quoted = float(entry.published.removesuffix("M"))
        room = 0.05 * quoted if name.startswith("mpt") else 0.05
        assert abs(found - quoted) <= room, name
