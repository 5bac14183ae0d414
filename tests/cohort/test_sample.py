import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.cohort.sample import check, draw
from fedlm.core.errors import ConfigError
from fedlm.core.types import Sampling

ROUNDS = 4000


def fixed(population, cohort):
    return Sampling(law="fixed", population=population, cohort=cohort)


def poisson(population, cohort):
    return Sampling(law="poisson", population=population, cohort=cohort)


LAWS = (fixed, poisson)


@given(st.integers(1, 300), st.data(), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_fixed_cohort_has_so_many_distinct_members_in_order(population, data, seed):
    cohort = data.draw(st.integers(1, population))
    members = draw(fixed(population, cohort), np.random.default_rng(seed))
    assert len(members) == cohort
    assert (np.diff(members) > 0).all()
    assert members[0] >= 0 and members[-1] < population


@given(st.integers(1, 300), st.data(), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_poisson_cohort_has_distinct_members_in_order(population, data, seed):
    cohort = data.draw(st.integers(1, population))
    members = draw(poisson(population, cohort), np.random.default_rng(seed))
    assert (np.diff(members) > 0).all()
    assert ((members >= 0) & (members < population)).all()
    if cohort == population:
        assert len(members) == population


@pytest.mark.parametrize("law", LAWS)
def test_the_same_generator_gives_the_same_cohort_and_another_one_another(law):
    cohorts = [draw(law(1000, 50), np.random.default_rng(s)).tolist() for s in (7, 7, 8)]
    assert cohorts[0] == cohorts[1] != cohorts[2]


def uniform_p_value(sample, population, cohort, rounds):
    """Chi-square of how often each member is drawn.

    Draws without replacement are less spread than a multinomial: each count has the variance
    `rounds * rate * (1 - rate)`, and the counts have a fixed sum.
    """
    rng = np.random.default_rng(0)
    counts = np.zeros(population)
    for _ in range(rounds):
        counts[sample(rng)] += 1
    rate = cohort / population
    excess = (counts - rounds * rate) ** 2 / (rounds * rate * (1 - rate))
    return scipy.stats.chi2.sf(excess.sum() * (population - 1) / population, population - 1)


# The library takes another algorithm for a large share of a large population.
@pytest.mark.parametrize(("population", "cohort", "rounds"), [(30, 7, ROUNDS), (10_100, 2000, 40)])
def test_every_member_joins_a_fixed_cohort_equally_often(population, cohort, rounds):
    law = fixed(population, cohort)
    p_value = uniform_p_value(lambda rng: draw(law, rng), population, cohort, rounds)
    assert 0.001 < p_value < 0.999


def test_a_sampler_that_likes_some_members_more_is_rejected():
    liked = np.linspace(0.8, 1.2, 30)
    chances = liked / liked.sum()
    p_value = uniform_p_value(
        lambda rng: rng.choice(30, 7, replace=False, p=chances), 30, 7, ROUNDS
    )
    assert p_value < 1e-6


@pytest.mark.parametrize(
    ("claimed", "fits"), [(0.2, True), (0.19, False), (0.21, False)], ids=["right", "low", "high"]
)
def test_poisson_sizes_follow_the_binomial_law_of_their_rate(claimed, fits):
    rng = np.random.default_rng(1)
    sizes = [len(draw(poisson(100, 20), rng)) for _ in range(ROUNDS)]
    law = scipy.stats.binom(100, claimed)
    edges = np.arange(13, 28)  # the tails are one cell each, so that no cell is rare
    cells = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    expected = np.diff([0, *law.cdf(edges), 1]) * ROUNDS
    assert expected.min() > 5
    assert (scipy.stats.chisquare(cells, expected).pvalue > 0.001) == fits


def test_a_fixed_size_does_not_pass_for_a_poisson_one():
    rng = np.random.default_rng(2)
    spread = {law: np.var([len(draw(law(100, 20), rng)) for _ in range(500)]) for law in LAWS}
    assert spread[fixed] == 0
    assert 12 < spread[poisson] < 20  # 100 * 0.2 * 0.8 = 16


def test_poisson_members_join_independently():
    """Two given members meet as often as the product of their rates says; if fixed, less."""
    rng = np.random.default_rng(3)
    meetings = {
        law: sum({0, 1} <= set(draw(law(4, 2), rng).tolist()) for _ in range(ROUNDS))
        for law in LAWS
    }
    assert scipy.stats.binomtest(meetings[poisson], ROUNDS, 1 / 4).pvalue > 0.001
    assert scipy.stats.binomtest(meetings[fixed], ROUNDS, 1 / 6).pvalue > 0.001
    assert scipy.stats.binomtest(meetings[fixed], ROUNDS, 1 / 4).pvalue < 1e-6


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cohort", [-1, 0, 11])
def test_a_cohort_that_the_population_cannot_fill_is_refused(law, cohort):
    wanted = rf"server\.cohort = {cohort}: expected between 1 and the 10 training clients"
    with pytest.raises(ConfigError, match=wanted):
        check(law(10, cohort))


def test_a_cohort_that_fits_is_accepted_and_an_empty_population_is_not():
    check(fixed(10, 1))
    check(poisson(10, 10))
    with pytest.raises(ConfigError, match="at least one client"):
        check(fixed(0, 1))
