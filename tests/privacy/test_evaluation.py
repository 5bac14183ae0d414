"""Private evaluation: one client moves what is released by at most one, and errors are as told."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import ConfigError
from fedlm.privacy.evaluation import BINS, PrivateEvaluation

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


@pytest.mark.parametrize("noise", [0.0, -1.0, math.inf, math.nan])
def test_an_evaluation_without_noise_is_refused(noise):
    with pytest.raises(ConfigError, match=r"privacy\.evaluation_noise"):
        PrivateEvaluation(noise_multiplier=noise, tokens=50, most_nats=8.0)
