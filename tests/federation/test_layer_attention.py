"""Attention over peers: its limits are laws; a residual never goes home."""

import math

import numpy as np
import pytest

from fedlm.federation import layer_attention
from fedlm.federation.layer_attention import (
    LayersOf,
    Residual,
    attend,
    attention_weights,
    cosine,
    cosine_matrix,
    entropy,
    mean_change,
    mean_layers,
    route,
    worst,
)

RNG = np.random.default_rng(0)
ORIGIN = {"a": RNG.normal(size=40).astype(np.float32), "b": np.zeros(7, np.float32)}


def moved(direction, size=1.0):
    rng = np.random.default_rng(direction)
    return {k: (v + size * rng.normal(size=v.size)).astype(np.float32) for k, v in ORIGIN.items()}


def test_an_infinite_temperature_is_the_mean():
    bank = [moved(i) for i in range(4)]
    found = attend(bank[0], bank[1:], ORIGIN, math.inf)
    for layer in ORIGIN:
        np.testing.assert_allclose(
            found.layers[layer], np.mean([k[layer] for k in bank], axis=0), atol=1e-6
        )
    assert entropy(found.attention_weights) == pytest.approx(1.0)


def test_temperature_zero_keeps_self_to_the_byte():
    own = moved(0)
    found = attend(own, [moved(1), moved(2)], ORIGIN, 0.0)
    assert all(np.array_equal(found.layers[layer], own[layer]) for layer in own)
    assert entropy(found.attention_weights) == 0.0


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, math.inf])
def test_peers_equal_to_self_change_nothing(temperature):
    own = moved(0)
    found = attend(own, [own, own], ORIGIN, temperature)
    assert all(np.array_equal(found.layers[layer], own[layer]) for layer in own)


def test_attention_prefers_who_moved_alike_however_far():
    own, alike, other = moved(0), moved(0, size=5.0), moved(1)
    assert cosine([own["a"]], [alike["a"]], ORIGIN["a"]) == pytest.approx(1.0)
    share = attend(own, [alike, other], ORIGIN, 0.1).attention_weights["a"]
    assert share[0] == pytest.approx(share[1]) and share[2] < 0.01 * share[1]
    assert sum(share) == pytest.approx(1.0)
    cold, warm = (attend(own, [other], ORIGIN, t).attention_weights["a"][1] for t in (0.1, 1.0))
    assert cold < warm < 0.5


def test_before_anyone_moved_nobody_is_alike_and_nothing_is_nan():
    found = attend(ORIGIN, [ORIGIN, moved(3)], ORIGIN, 0.1)
    assert all(np.all(np.isfinite(v)) for v in found.layers.values())
    assert cosine([ORIGIN["a"]], [moved(1)["a"]], ORIGIN["a"]) == 0.0
    huge = {k: np.full_like(v, 3e38) for k, v in ORIGIN.items()}
    assert cosine([huge["a"]], [ORIGIN["a"]], ORIGIN["a"]) == 0.0


def test_residuals_join_the_bank_of_their_layer_only():
    own, peer = moved(0), moved(1)
    came = [Residual("a", 5, [moved(2)["a"]])]
    found = attend(own, [peer], ORIGIN, 1.0, came)
    assert len(found.attention_weights["a"]) == 3 and len(found.attention_weights["b"]) == 2


def test_the_mean_is_weighted():
    a, b = moved(0), moved(1)
    found = mean_layers([a, b], [3.0, 1.0])
    np.testing.assert_allclose(found["a"], 0.75 * a["a"] + 0.25 * b["a"], atol=1e-6)


def test_what_fits_worst_goes_up_and_never_back_to_its_own_subtree():
    own = moved(0)
    fits, not_at_all = moved(0, 2.0), {k: 2 * ORIGIN[k] - v for k, v in own.items()}
    candidates = [Residual(k, n, [key[k]]) for n, key in ((3, fits), (4, not_at_all)) for k in own]
    chosen = worst(candidates, own, ORIGIN, 1)
    assert [(r.layer, r.origin) for r in chosen] == [("a", 4), ("b", 4)]
    homes = {1: (not_at_all, frozenset({1, 4})), 2: (own, frozenset({2, 3}))}
    routed = route(chosen, homes, ORIGIN)
    assert [r.to for r in routed] == [2, 2], "home would be most alike"
    assert all(set(r.likeness) == {2} and r.likeness[2] < -0.99 for r in routed)
    assert route(chosen, {1: homes[1]}, ORIGIN) == []


def test_weights_are_a_distribution():
    for temperature in (0.001, 0.1, 10.0):
        share = attention_weights([1.0, -1.0, 0.3], temperature)
        assert np.all(share >= 0) and share.sum() == pytest.approx(1.0) and share[0] == share.max()


def test_a_matrix_of_cosines_has_the_cosine_of_each_pair(monkeypatch):
    monkeypatch.setattr(layer_attention, "ENTRIES_OF_A_SUM", 7)
    monkeypatch.setattr(layer_attention, "PRODUCTS_OF_ONE_THREAD", (2, 3, 4))
    rows, columns = [moved(n)["a"] for n in range(3)], [moved(n, 2.0)["a"] for n in range(2, 6)]
    rows.append(ORIGIN["a"])  # has not moved
    parts = [[column[:11], column[11:]] for column in columns]
    found = cosine_matrix(rows, parts, ORIGIN["a"])
    wanted = [[cosine([row], [column], ORIGIN["a"]) for column in columns] for row in rows]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert not found[-1].any() and found[2, 0] == pytest.approx(1.0)


def test_layers_in_parts_are_mixed_as_whole_ones_to_the_byte(monkeypatch):
    """A node that holds a model and one that was told its layers must come to the same mixture."""
    models = [{"x": values[:11], "y": values[11:]} for values in (moved(n)["a"] for n in (1, 2))]
    parts = [LayersOf(("a", "a"), model) for model in models]
    whole = [dict(layers) for layers in parts]
    own, origin = {"a": moved(0)["a"]}, {"a": ORIGIN["a"]}
    once = attend(own, whole, origin, 0.5)
    for entries in (7, 1 << 13):
        monkeypatch.setattr(layer_attention, "ENTRIES_OF_A_SUM", entries)
        one, two = (attend(own, peers, origin, 0.5) for peers in (parts, whole))
        assert np.array_equal(one.layers["a"], two.layers["a"])
        assert one.attention_weights["a"].tolist() == two.attention_weights["a"].tolist()
        np.testing.assert_allclose(one.layers["a"], once.layers["a"], rtol=1e-6)
        means = [mean_layers(peers, [3.0, 1.0])["a"] for peers in (parts, whole)]
        assert np.array_equal(*means)


def test_sums_do_not_depend_on_the_threads_of_this_machine():
    """BLAS adds up in one thread what is not longer than this, and multiplies what is no more."""
    assert layer_attention.ENTRIES_OF_A_SUM <= 10_000
    assert math.prod(layer_attention.PRODUCTS_OF_ONE_THREAD) <= 1 << 18


def in_one_thread(size, work, step=0):
    return work([slice(first, min(first + 7, size)) for first in range(0, size, 7)])


def test_two_threads_make_what_one_makes_to_the_byte(monkeypatch):
    """Their blocks are four sums long here, and those of one thread one sum."""
    monkeypatch.setattr(layer_attention, "ENTRIES_OF_A_SUM", 7)
    rng = np.random.default_rng(3)
    origin, own, *peers = ({"a": rng.normal(size=200).astype(np.float32)} for _ in range(5))
    backbones = [[(x["a"].reshape(4, 50),) for x in some] for some in (peers, [own] * 3)]

    def made():
        mixed, share = attend(own, peers, origin, 0.5)
        change, agreement = mean_change(*backbones, [1.0, 2.0, 0.5])
        return mixed["a"].tobytes(), share["a"].tobytes(), change[0].tobytes(), agreement

    in_two = made()
    monkeypatch.setattr(layer_attention, "_in_two_threads", in_one_thread)
    assert made() == in_two


def test_what_goes_wrong_in_the_second_thread_is_raised(monkeypatch):
    monkeypatch.setattr(layer_attention, "ENTRIES_OF_A_SUM", 7)
    seen = []

    def work(blocks):
        seen.append([(here.start, here.stop) for here in blocks])
        if blocks[-1].stop == 100:
            raise OSError("the second half")
        return []

    with pytest.raises(OSError, match="the second half"):
        layer_attention._in_two_threads(100, work)
    assert sorted(seen) == [[(0, 28), (28, 56)], [(56, 84), (84, 100)]]


def test_a_mean_change_is_that_of_whole_changes():
    ends, begins = ([tuple(moved(n, size).values()) for n in range(4)] for size in (1.0, 0.3))
    share = [1.0, 2.0, 0.5, 4.0]
    changes = [
        [new - old for new, old in zip(a, b, strict=True)]
        for a, b in zip(ends, begins, strict=True)
    ]
    found = mean_change(ends, begins, share)
    for leaf, mean in enumerate(found.change):
        wanted = np.average([change[leaf] for change in changes], axis=0, weights=share)
        np.testing.assert_allclose(mean, wanted, atol=1e-6)
    norms = [math.sqrt(sum(float(x @ x) for x in change)) for change in changes]
    norm = math.sqrt(sum(float(x @ x) for x in found.change))
    assert found.agreement == pytest.approx(norm / np.average(norms, weights=share))
    assert mean_change(ends[:1], ends[:1], [1.0]).agreement == 1.0


def test_layers_of_a_model_are_made_when_they_are_asked_for():
    model = (np.arange(6.0).reshape(2, 3), np.ones(2), np.zeros(1))
    layers = LayersOf(("a", None, "a"), model)
    assert list(layers) == ["a"] and layers["a"].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert np.shares_memory(layers.parts("a")[0], model[0])
    assert {k: (v.shape, v.dtype) for k, v in layers.shapes().items()} == {
        "a": (layers["a"].shape, layers["a"].dtype)
    }
