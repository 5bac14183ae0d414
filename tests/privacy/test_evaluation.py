"""Private evaluation: one client moves what is released by at most one, and errors are as told."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import ConfigError, WireError
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.evaluation import BINS, PrivateEvaluation, is_due, releases, together

CHOSEN = PrivateEvaluation(noise_multiplier=3.0, tokens=50, most_nats=8.0)


def people(count=4000, seed=0):
    """Clients of heavy-tailed sizes: nats, tokens, right guesses."""
    rng = np.random.default_rng(seed)
    tokens = np.ceil(rng.lognormal(3.5, 1.0, count))
    mean = np.clip(rng.normal(4.5, 0.6, count), 0.5, 8.0)
    return mean * tokens, tokens, np.floor(rng.beta(2, 8, count) * tokens)


anything = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(anything, anything, anything), min_size=1, max_size=30))
def test_no_client_adds_a_vector_longer_than_one(clients):
    """Whatever its model and text give: nothing, infinity, or what is no number."""
    nats, tokens, right = np.array(clients).T
    with np.errstate(all="ignore"):
        made = CHOSEN.vectors(nats, tokens, right)
    assert made.shape == (len(clients), 3 + BINS)
    assert np.all(np.linalg.norm(made, axis=1) <= 1 + 1e-12)


def test_the_corners_of_what_a_client_can_add_have_norm_one():
    """So the sensitivity is not only bounded by one: it is one."""
    corners = [(nats * 50, 50.0, right) for nats in (0.0, 8.0) for right in (0.0, 50.0)]
    lengths = np.linalg.norm(CHOSEN.vectors(*np.array(corners).T), axis=1)
    np.testing.assert_allclose(lengths, 1.0)
    assert not CHOSEN.vectors(*np.zeros((3, 1))).any()  # without text: as if it was not there


def test_the_noise_on_the_released_numbers_is_that_of_the_multiplier():
    """Through the perplexity, which is a function of the noisy sums, against its own error."""
    nats, tokens, right = people()
    short = np.minimum(tokens, 50) / tokens
    truth = math.exp((nats * short).sum() / (tokens * short).sum())
    share = (right * short).sum() / (tokens * short).sum()
    found = [CHOSEN.release(nats, tokens, right, bytes([n, 1] * 8)) for n in range(200)]
    off = {
        name: np.array([(f[name] - exact) / f[f"{name}_error"] for f in found])
        for name, exact in (("perplexity", truth), ("accuracy", share))
    }
    for name, z in off.items():
        assert abs(z.mean()) < 0.3, name
        assert 0.85 < z.std() < 1.15, name  # 200 draws: three standard errors


def test_quantiles_are_near_those_of_the_clients():
    nats, tokens, right = people(20_000)
    exact = np.exp(np.quantile(nats / tokens, [0.1, 0.5, 0.9]))
    found = CHOSEN.release(nats, tokens, right, b"q" * 16)["clients"]
    for name, truth in zip(("p10", "p50", "p90"), exact, strict=True):
        assert abs(found[name] - truth) < 3 * found[f"{name}_error"], name
        assert found[f"{name}_error"] < truth / 2


def test_figures_that_the_noise_hides_are_not_told():
    few = CHOSEN.release(*(column[:3] for column in people()), b"f" * 16)
    assert few["perplexity"] is None and few["clients"]["p50"] is None


def test_the_errors_of_several_noisy_sums_are_those_of_their_total():
    """Four places with a quarter of the clients each: twice the noise of one, and told so."""
    columns = [np.array_split(column, 4) for column in people(8000)]
    exact = CHOSEN.vectors(*people(8000)).sum(axis=0)
    truth = math.exp(4 * (1 + exact[0] / math.sqrt(0.4) / (exact[1] / math.sqrt(0.2))))
    one = CHOSEN.release(*people(8000), b"o" * 16)
    z, ratio = [], []
    for n in range(60):
        sums = {
            str(place): CHOSEN.noisy_sum(*(c[place] for c in columns), bytes([n, place] * 8))
            for place in range(4)
        }
        for noisy in sums.values():
            CHOSEN.check_noisy(noisy, 2000)
        told = CHOSEN.figures_of(sums)
        z.append((told["perplexity"] - truth) / told["perplexity_error"])
        ratio.append(told["perplexity_error"] / one["perplexity_error"])
    assert abs(np.mean(z)) < 0.4 and 0.73 < np.std(z) < 1.27  # three standard errors
    assert np.mean(ratio) == pytest.approx(2, rel=0.05)
    assert told["nodes"].keys() == sums.keys() and CHOSEN.figures_of({}) is None
    assert told["nodes"]["0"]["perplexity_error"] > told["perplexity_error"]


@pytest.mark.parametrize("place, value", [(0, -2000.0), (1, -30.0), (1, 930.0), (5, np.nan)])
def test_numbers_that_no_noisy_sum_can_have_are_refused(place, value):
    noisy = np.zeros(3 + BINS)
    CHOSEN.check_noisy(noisy, 2000)
    noisy[place] = value
    with pytest.raises(WireError, match="2000 clients cannot have"):
        CHOSEN.check_noisy(noisy, 2000)
    with pytest.raises(WireError):
        CHOSEN.check_noisy(np.zeros(3), 2000)


def test_several_releases_amount_to_one():
    """By the accountant, which knows nothing of the formula."""
    separate = compose([gaussian_event(2.0)] * 3 + [gaussian_event(5.0)], 1e-6)[0]
    assert compose([gaussian_event(together([2.0] * 3 + [5.0]))], 1e-6)[0] == pytest.approx(
        separate, rel=1e-3
    )
    assert together([1e-200] * 2) < 1e-199


def test_releases_are_counted_as_they_fall_due():
    for rounds in range(1, 12):
        for every in range(5):
            due = sum(is_due(every, played, rounds) for played in range(1, rounds + 1))
            assert releases(rounds, every) == due


@pytest.mark.parametrize("noise", [0.0, -1.0, math.inf, math.nan])
def test_an_evaluation_without_noise_is_refused(noise):
    with pytest.raises(ConfigError, match=r"privacy\.evaluation_noise"):
        PrivateEvaluation(noise_multiplier=noise, tokens=50, most_nats=8.0)
