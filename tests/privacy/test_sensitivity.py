"""The worst placement of a client, against trying every one."""

import itertools

import numpy as np
import pytest

from fedlm.privacy import sensitivity
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.sensitivity import (
    of_released_tree,
    of_restarted,
    of_strategy,
    of_tree,
)
from tests.oracle import sensitivity_of_matrix
from tests.privacy.plans import (
    CORRELATED,
    PLANS,
    ROUNDS,
    plan,
    strategy,
    strategy_of,
    tree_factor,
    tree_strategy,
)


def by_trying(matrix, apart, most):
    """Every subset of rounds that is allowed; the longest sum of its columns."""
    best = 0.0
    for chosen in itertools.product([0, 1], repeat=matrix.shape[1]):
        at = np.flatnonzero(chosen)
        if (np.diff(at) > apart).all() and len(at) <= (most or ROUNDS):
            best = max(best, float(((matrix @ chosen) ** 2).sum()))
    return best


@pytest.mark.sample(4)
@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize(  # the matrix of blt takes seconds to find
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "blt" else []) for n in CORRELATED]
)
def test_every_mechanism_against_every_placement(name, most):
    chosen = CORRELATED[name]
    for rounds in (1, 5, ROUNDS):
        if chosen.mechanism == "tree":
            released = tree_strategy(rounds, chosen.restart_every)
            found = of_tree(rounds, 2, most, restart_every=chosen.restart_every)
            assert found.exact
            value = found.value
        else:
            released = strategy(chosen)[:rounds, :rounds]
            found = of_restarted(strategy_of(chosen), rounds, 2, most)
            value = found.value
            assert found.exact or chosen.restart_every
            if not found.exact:
                assert value * (1 + 1e-9) >= by_trying(released, 2, most)
                continue
        assert np.isclose(value, by_trying(released, 2, most), rtol=1e-6)
        assert np.isclose(value, sensitivity_of_matrix(released, 2, most), rtol=1e-6)
        if most == 0:
            assert MECHANISMS[chosen.mechanism].sensitivity(chosen, rounds).value == value


@pytest.mark.sample(12)
@pytest.mark.parametrize("apart", [0, 1, 3, 5])
@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("restart_every", [0, 4, 7])
def test_trees_of_odd_sizes(apart, most, restart_every):
    for rounds in (1, 2, 3, 5, 7, 9, 11, 12):
        found = of_tree(rounds, apart, most, restart_every=restart_every)
        assert found.exact
        assert found.value == sensitivity_of_matrix(
            tree_strategy(rounds, restart_every), apart, most
        )


def test_even_spacing_is_not_always_the_worst():
    """Why a programme is needed: with pairs pushed into the same blocks, 57 instead of 55."""
    matrix, even = tree_strategy(16), np.zeros(16)
    even[range(0, 15, 3)] = 1
    assert ((matrix @ even) ** 2).sum() == 55
    assert of_tree(16, 2, 5).value == sensitivity_of_matrix(matrix, 2, 5) == 57


@pytest.mark.parametrize(
    "rounds, apart, most, squared",
    [(2000, 313, 6, 79), (100, 19, 5, 50), (200, 39, 5, 55), (500, 99, 5, 50), (500, 19, 25, 547)],
)
def test_published_trees(rounds, apart, most, squared):
    assert of_tree(rounds, apart, most) == (squared, True)


def test_one_participation_is_the_height_of_the_tree():
    for rounds in (1, 7, 8, 1000):
        assert of_tree(rounds, rounds, 1).value == rounds.bit_length()


def test_a_search_that_is_too_long_ends_in_a_bound(monkeypatch):
    exact = of_tree(300, 9, 0)
    of_tree.cache_clear()
    sensitivity._tables.cache_clear()
    monkeypatch.setattr(sensitivity, "WORK", 1000)
    bound = of_tree(300, 9, 0)
    of_tree.cache_clear()
    assert exact.exact and not bound.exact and exact.value <= bound.value <= 1.1 * exact.value


def test_the_bound_is_never_below_the_maximum():
    for rounds, apart, most in itertools.product((5, 9, 12), (0, 1, 3), (0, 1, 2, 4)):
        count = sensitivity.participations(rounds, apart, most)
        bound = sensitivity._bound(list(sensitivity.forest(rounds)), apart + 1, count)
        assert bound >= of_tree(rounds, apart, most).value


def test_separation_counts_the_rounds_in_between():
    """With two rounds in between, 0 and 3 are allowed and 0 and 2 are not."""
    two_apart = np.array([[1.0, 0, 1.0]])
    assert (
        sensitivity_of_matrix(two_apart, 1, 0) == 4 and sensitivity_of_matrix(two_apart, 2, 0) == 1
    )


def test_the_matrices_are_as_they_say():
    for name in ("banded", "toeplitz", "blt"):
        chosen = strategy_of(PLANS[name])
        matrix = chosen.matrix()
        assert (np.triu(matrix, 1) == 0).all() and (matrix >= 0).all()
        norms = np.linalg.norm(matrix[:5, :5], axis=0)
        np.testing.assert_allclose(chosen.column_norms(5), norms, rtol=1e-12)
    assert np.allclose(np.linalg.norm(strategy_of(PLANS["banded"]).matrix(), axis=0), 1)
    root = strategy_of(plan("toeplitz", bands=ROUNDS)).matrix()
    np.testing.assert_allclose(root @ root, np.tri(ROUNDS), atol=1e-6)


def test_a_normalised_matrix_wider_than_the_separation_is_not_accounted():
    with pytest.raises(ValueError, match="wider"):
        of_strategy(strategy_of(PLANS["banded"]), ROUNDS, 0, 0)
    with pytest.raises(ValueError, match="negative"):
        sensitivity_of_matrix(np.array([[1.0, -1.0]]), 0, 0)


# ---- what a tree releases ------------------------------------------------------------------------


@pytest.mark.parametrize("rounds, restart_every", [(1, 0), (7, 0), (16, 0), (13, 5), (12, 4)])
def test_the_releases_of_a_tree_have_the_covariance_of_its_noise(rounds, restart_every):
    matrix = sensitivity.released_tree(rounds, restart_every)
    noise = tree_factor(rounds, restart_every)
    np.testing.assert_allclose(matrix.T @ matrix @ noise @ noise.T, np.eye(rounds), atol=1e-9)
    assert (matrix >= 0).all()


@pytest.mark.sample(6)
@pytest.mark.parametrize("apart", [0, 1, 3, 5])
@pytest.mark.parametrize("most", [1, 3, 4])
@pytest.mark.parametrize("restart_every", [0, 4, 7])
def test_the_sensitivity_of_releases_is_the_maximum_over_placements(apart, most, restart_every):
    for rounds in (1, 3, 8, 11, 13):
        found = of_released_tree(rounds, apart, most, restart_every=restart_every)
        matrix = sensitivity.released_tree(rounds, restart_every)
        assert found.exact and np.isclose(
            found.value, sensitivity_of_matrix(matrix, apart, most), rtol=1e-9
        )
        nodes = of_tree(rounds, apart, most, restart_every=restart_every)
        assert found.value <= nodes.value * (1 + 1e-12), "releases are made from the nodes"


def test_a_search_over_releases_that_is_cut_short_ends_in_a_bound(monkeypatch):
    exact = of_released_tree(100, 19, 5)
    of_released_tree.cache_clear()
    monkeypatch.setattr(sensitivity, "MOST_CELLS", 1)
    bound = of_released_tree(100, 19, 5)
    of_released_tree.cache_clear()
    assert exact.exact and not bound.exact and exact.value <= bound.value <= 50
    assert of_released_tree(300, 9, 0) == of_tree(300, 9, 0)._replace(exact=False)
