import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.cohort import sampling
from fedlm.cohort.sampling import joined, no_history
from fedlm.core.errors import ConfigError
from fedlm.core.types import Sampling

ROUNDS = 4000


def fixed(population, cohort):
    return Sampling(law="fixed", population=population, cohort=cohort)


def poisson(population, cohort):
    return Sampling(law="poisson", population=population, cohort=cohort)


def cyclic(population, cohort, apart=2):
    return Sampling(
        law="cyclic-poisson", population=population, cohort=cohort, min_separation=apart
    )


LAWS = (fixed, poisson)


def draw(law, rng):
    """A cohort of a law that does not look back."""
    return sampling.draw(law, rng, 0, no_history(law))


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
        law(10, cohort).check()


def test_a_cohort_that_fits_is_accepted_and_an_empty_population_is_not():
    fixed(10, 1).check()
    poisson(10, 10).check()
    with pytest.raises(ConfigError, match="at least one client"):
        fixed(0, 1).check()


# ---- separated: rests in between, and only so many turns -------------------------------


def separated(population, cohort, apart, most=0):
    return Sampling(
        law="spaced",
        population=population,
        cohort=cohort,
        min_separation=apart,
        max_participations=most,
    )


def cohorts(law, rounds, seed=0, pick=sampling.draw):
    """The cohorts of a run, each drawn with a generator of its own."""
    history, met = no_history(law), []
    for r in range(rounds):
        met.append(pick(law, np.random.default_rng([seed, r]), r, history))
        history = joined(history, met[-1], r)
    return met, history


def rests(met, population):
    """Rounds strictly between two turns of a client, over all clients."""
    turns = [[] for _ in range(population)]
    for r, members in enumerate(met):
        for member in members:
            turns[member].append(r)
    return np.concatenate([np.diff(t) - 1 for t in turns])


@given(st.integers(1, 6), st.integers(0, 7), st.integers(0, 20), st.integers(0, 2**32))
def test_every_rest_is_long_enough_and_no_cohort_stays_short(cohort, apart, spare, seed):
    law = separated(cohort * (apart + 1) + spare, cohort, apart)
    met, history = cohorts(law, 60, seed)
    assert all(len(m) == cohort and (np.diff(m) > 0).all() for m in met)
    found = rests(met, law.population)
    assert len(found) == 0 or found.min() >= apart
    assert history.times.sum() == 60 * cohort


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_nobody_comes_more_often_than_allowed_and_all_come_equally_often(cohort, apart, most, seed):
    """As many places as the plan may ask for: population times the most participations."""
    law = separated(cohort * (apart + 1) * 2, cohort, apart, most)
    rounds = law.population * most // cohort
    met, history = cohorts(law, rounds, seed)
    assert history.times.max() <= most
    assert history.times.max() - history.times.min() <= 1
    assert all(len(m) == cohort for m in met), "nobody used up its turns early"
    found = rests(met, law.population)
    assert len(found) == 0 or found.min() >= apart


def test_a_long_run_keeps_to_the_law():
    law = separated(200, 20, 7, 210)
    met, history = cohorts(law, 2000)
    assert rests(met, 200).min() >= 7
    assert history.times.min() == history.times.max() == 200


def test_hundreds_of_thousands_of_clients():
    law = separated(342_477, 1000, 300, 4)
    met, history = cohorts(law, 40)
    assert len(np.unique(np.concatenate(met))) == 40_000 == history.times.sum()
    assert history.last.nbytes + history.times.nbytes == 8 * law.population


def test_who_just_came_and_who_came_often_enough_stays_out():
    law, rng = separated(6, 2, 1, 2), np.random.default_rng(0)
    history = joined(joined(no_history(law), np.array([0, 1]), 0), np.array([2, 3]), 1)
    drawn = {int(m) for _ in range(50) for m in sampling.draw(law, rng, 2, history)}
    assert drawn == {4, 5}, "0 and 1 may come, but those who never came go first"
    tired = history._replace(times=np.array([2, 2, 1, 1, 2, 0], np.int32))
    assert sampling.draw(law, rng, 2, tired).tolist() == [5]
    assert sampling.draw(law, rng, 3, tired).tolist() in ([2, 5], [3, 5])


def test_a_history_decides_and_another_one_decides_otherwise():
    law = separated(40, 4, 3)
    met, history = cohorts(law, 5)
    forgotten = no_history(law)
    assert history.last.max() == 4 and (history.last < 0).any()
    agree = [
        np.array_equal(
            sampling.draw(law, np.random.default_rng(s), 5, history),
            sampling.draw(law, np.random.default_rng(s), 5, forgotten),
        )
        for s in range(20)
    ]
    assert not any(agree[:1]) or not all(agree)
    # Without a history separation is lost: the law looks back or it is another law.
    met, _ = cohorts(law, 60, pick=lambda law, rng, r, h: sampling.draw(law, rng, r, forgotten))
    assert rests(met, 40).min() < 3


def free_p_value(pick):
    """Chi-square of how often each of the free ones is drawn, the others never."""
    law = separated(40, 7, 1)
    history = joined(no_history(law), np.arange(10), 4)
    counts = np.zeros(40)
    for s in range(ROUNDS):
        counts[pick(law, np.random.default_rng(s), 5, history)] += 1
    assert counts[:10].sum() == 0
    rate = 7 / 30
    excess = (counts[10:] - ROUNDS * rate) ** 2 / (ROUNDS * rate * (1 - rate))
    return scipy.stats.chi2.sf(excess.sum() * 29 / 30, 29)


def test_the_free_ones_are_drawn_alike():
    assert 0.001 < free_p_value(sampling.draw) < 0.999


def test_a_law_that_prefers_some_of_the_free_ones_is_rejected():
    def unfair(law, rng, round, history):
        return 10 + np.argpartition(rng.random(30) * np.linspace(1, 1.2, 30), 7)[:7]

    assert free_p_value(unfair) < 1e-6


def test_laws_that_do_not_look_back_remember_nothing():
    for law in (fixed(10, 3), poisson(10, 3)):
        history = joined(no_history(law), np.array([1, 2]), 0)
        assert len(history.last) == len(history.times) == 0


# ---- cyclic Poisson: groups take turns, coins decide ---------------------------------------------


@given(st.integers(1, 200), st.integers(0, 6), st.integers(0, 2**32))
def test_only_the_group_whose_turn_it_is_joins(population, apart, seed):
    law = cyclic(population, max(population // (apart + 1) // 2, 1), apart)
    met, history = cohorts(law, 4 * (apart + 1), seed)
    assert all((np.diff(m) > 0).all() and m.dtype == np.int64 for m in met)
    found = rests(met, population)
    assert (found % (apart + 1) == apart).all(), "a client comes back in rounds of its group only"
    assert len(history.last) == 0, "and nobody has to remember when it came last"


@pytest.mark.parametrize(("claimed", "fits"), [(0.3, True), (0.27, False), (0.33, False)])
def test_cyclic_cohorts_have_the_sizes_of_their_coins(claimed, fits):
    """300 clients in three groups, ten expected: each of a group's hundred joins with 0.3."""
    law = cyclic(300, 30)
    sizes = [len(sampling.draw(law, np.random.default_rng(s), s, ())) for s in range(ROUNDS)]
    binomial = scipy.stats.binom(100, claimed)
    edges = np.arange(20, 41)
    cells = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    expected = np.diff([0, *binomial.cdf(edges), 1]) * ROUNDS
    assert (scipy.stats.chisquare(cells, expected).pvalue > 0.001) == fits


def test_every_client_has_a_turn_and_clients_of_one_group_join_independently():
    law, met = cyclic(6, 1), np.zeros((6, 6))
    for s in range(3 * ROUNDS):
        members = sampling.draw(law, np.random.default_rng(s), s, ())
        met[np.ix_(members, members)] += 1
    for i in range(6):
        assert scipy.stats.binomtest(int(met[i, i]), ROUNDS, 1 / 2).pvalue > 0.001
        (mate,) = [j for j in range(6) if j != i and met[i, j]]
        assert scipy.stats.binomtest(int(met[i, mate]), ROUNDS, 1 / 4).pvalue > 0.001


# ---- balls in bins: one secret draw, then turns --------------------------------------------------


def bins(population, cohort, apart=2):
    return Sampling(law="balls-in-bins", population=population, cohort=cohort, min_separation=apart)


@given(st.integers(1, 200), st.integers(0, 6), st.integers(0, 2**32))
def test_a_client_joins_every_round_of_its_bin_and_no_other(population, apart, seed):
    law = bins(population, max(population // (apart + 1), 1), apart)
    met, _ = cohorts(law, 3 * (apart + 1), seed)
    assert all((np.diff(m) > 0).all() for m in met)
    for first, later in zip(met, met[apart + 1 :], strict=False):
        assert first.tolist() == later.tolist()
    everybody = np.concatenate(met[: apart + 1])
    assert len(set(everybody.tolist())) == len(everybody), "nobody is in two bins"
    if population % (apart + 1) == 0:
        assert len(everybody) == population, "and everybody is in one"


@pytest.mark.parametrize(
    ("claimed", "fits"), [((1, 1, 1, 1), True), ((1, 1, 1, 1.2), False), ((1, 1, 1, 0), False)]
)
def test_bins_are_equally_likely_and_so_is_none(claimed, fits):
    """With 8 clients, 3 bins and 2 expected in each, a client is in none with chance 1/4."""
    law, found = bins(8, 2), np.zeros((8, 4))
    for seed in range(ROUNDS // 2):
        met, _ = cohorts(law, 3, seed)
        where = np.full(8, 3)
        for number, members in enumerate(met):
            where[members] = number
        found[np.arange(8), where] += 1
    share = np.array(claimed) / sum(claimed)
    with np.errstate(divide="ignore"):
        statistic = ((found.sum(0) - found.sum() * share) ** 2 / (found.sum() * share)).sum()
    assert (scipy.stats.chi2(3).sf(statistic) > 0.001) == fits


def test_bins_of_two_clients_are_independent():
    law, both = bins(6, 2), np.zeros((3, 3))
    for seed in range(ROUNDS // 2):
        met, _ = cohorts(law, 3, seed)
        where = [next(n for n, m in enumerate(met) if client in m) for client in (1, 4)]
        both[tuple(where)] += 1
    assert scipy.stats.chi2_contingency(both).pvalue > 0.001


# ---- large populations: the same laws, without a pass over everybody -----------------------------


@pytest.fixture
def many(monkeypatch):
    """Every population is a large one."""
    monkeypatch.setattr(sampling, "MANY", 0)


def test_rests_and_turns_are_kept_by_those_who_took_part_alone(many):
    for seed, (cohort, apart, third) in enumerate([(1, 0, 1), (3, 4, 5), (6, 7, 0), (5, 2, 6)]):
        test_every_rest_is_long_enough_and_no_cohort_stays_short.hypothesis.inner_test(
            cohort, apart, third, seed
        )
        test_nobody_comes_more_often_than_allowed_and_all_come_equally_often.hypothesis.inner_test(
            cohort, apart, third or 1, seed
        )
    test_who_just_came_goes_last_of_many()
    test_a_long_run_keeps_to_the_law()


def test_who_just_came_goes_last_of_many():
    """A short cohort is everybody who may come, in a large population as in a small one."""
    law, rng = separated(6, 4, 1, 2), np.random.default_rng(0)
    history = joined(joined(no_history(law), np.array([0, 1]), 0), np.array([2, 3]), 1)
    assert sampling.draw(law, rng, 2, history).tolist() == [0, 1, 4, 5]


def test_laws_of_large_populations_are_those_of_small_ones(many):
    assert 0.001 < free_p_value(sampling.draw) < 0.999
    for claimed, fits in ((0.2, True), (0.19, False), (0.21, False)):
        test_poisson_sizes_follow_the_binomial_law_of_their_rate(claimed, fits)
    test_poisson_members_join_independently()
    law = poisson(30, 7)
    assert 0.001 < uniform_p_value(lambda rng: draw(law, rng), 30, 7, ROUNDS) < 0.999


def test_bins_of_large_populations_are_those_of_small_ones(many):
    inner = test_a_client_joins_every_round_of_its_bin_and_no_other.hypothesis.inner_test
    for population, apart, seed in ((1, 0, 0), (14, 6, 1), (200, 3, 2), (99, 2, 3)):
        inner(population, apart, seed)
    test_bins_are_equally_likely_and_so_is_none((1, 1, 1, 1), True)
    test_bins_of_two_clients_are_independent()


def test_a_history_of_many_has_an_entry_per_client_who_came():
    law = separated(10_000_000, 1000, 30)
    met, history = cohorts(law, 50)
    assert rests_of(met) >= 30
    assert history.members.tolist() == sorted(set(np.concatenate(met).tolist()))
    assert history.times.sum() == 50_000 and history.last.max() == 49
    assert all(part.dtype == np.int32 for part in history)
    assert sum(part.nbytes for part in history) <= 12 * 50_000
    assert sampling._dealt(1000).tolist() == (
        sampling.generator_for(0, "deal", member=1000).permutation(1000).tolist()
    )


def rests_of(met):
    """The shortest rest, without an entry per client."""
    last, least = {}, len(met)
    for r, members in enumerate(met):
        for member in members.tolist():
            least = min(least, r - last.get(member, -len(met)) - 1)
            last[member] = r
    return least
