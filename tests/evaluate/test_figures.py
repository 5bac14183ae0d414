"""Reported numbers agree with cases done by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core.types import PAD, SpecialTokens
from fedlm.evaluate.clients import client_figures, group_figures
from fedlm.evaluate.held_out import HeldOutEvaluation, HeldOutText
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import Evaluator, figures, perplexity_of, total_sums

OWN = SpecialTokens(bos=1, eos=2, oov=3, reserved=(0, 1, 2, 3))
EOS, OOV = OWN.eos, OWN.oov
ROWS = np.array([[1, 5, 6, EOS, PAD], [1, OOV, 5, 5, EOS], [1, 6, EOS, PAD, PAD]], dtype=np.int16)


def score(params, rows):
    """A model that pays `params` nats a target and always says 5."""
    targets = rows[:, 1:]
    return params * jnp.ones(targets.shape), targets == 5


def sums(batch=2, special=OWN):
    return Evaluator(score, special, batch=batch)(jnp.float32(0.5), ROWS)


def test_figures_by_hand():
    found = figures(sums())
    assert found["tokens"] == 9
    assert found["perplexity"] == pytest.approx(math.exp(0.5))
    assert found["accuracy"] == pytest.approx(3 / 9)
    assert found["accuracy_known_words"] == pytest.approx(3 / 5)
    assert found["perplexity_known_words"] == pytest.approx(math.exp(0.5))


def test_without_a_token_for_unknown_words_all_are_known():
    found = figures(sums(special=SpecialTokens(bos=2, eos=2, oov=None, reserved=(2,))))
    assert found["perplexity_known_words"] == found["perplexity"]
    assert found["accuracy_known_words"] == pytest.approx(3 / 6)


def test_the_batch_of_evaluation_changes_nothing():
    for batch in (2, 4, 100):
        np.testing.assert_allclose(total_sums(sums(batch)), total_sums(sums()))


def test_perplexity_at_the_edges():
    assert math.isnan(perplexity_of(0.0, 0.0))
    assert perplexity_of(1e6, 1.0) == math.inf


def test_clients_count_once_each_whatever_their_size():
    each = client_figures(sums(), [7, 9, 9])
    assert each["clients"] == 2
    assert each["p50"] == pytest.approx(math.exp(0.5))
    assert client_figures(sums(), [7, 9, 9])["mean_of_worst_10_percent"] == pytest.approx(
        math.exp(0.5)
    )


def test_groups_partition_the_rows():
    found = group_figures(sums(), [("a", "x"), ("a", "y"), ("b", "x")])
    assert {name: f["tokens"] for name, f in found.items()} == {"a": 7, "b": 2}
    assert group_figures(sums(), [("a",), (), ("b",)])["(none)"]["tokens"] == 4


@pytest.fixture(scope="module")
def counted():
    rng = np.random.default_rng(0)
    rows = rng.integers(4, 12, (50, 9))
    rows[:, :2] = 1
    return NGrams([rows], 12, OWN), rows


def test_probabilities_of_every_context_sum_to_one(counted):
    model, _ = counted
    targets = np.arange(2, 12)
    for first, second in ((1, 1), (4, 5), (11, 2), (3, 3)):
        same = np.full(10, first), np.full(10, second)
        for chances in model.probabilities(*same, targets).values():
            assert chances.sum() == pytest.approx(1.0)
            assert (chances > 0).all()


def test_the_uniform_law_is_over_all_tokens_that_can_be_targets():
    rows = np.random.default_rng(0).integers(0, 12, (50, 9))
    rows[:, :2] = 11
    model = NGrams([rows], 12, SpecialTokens(bos=11, eos=11, oov=None, reserved=(11,)))
    for chances in model.probabilities(*(np.full(12, 11),) * 2, np.arange(12)).values():
        assert chances.sum() == pytest.approx(1.0)


def test_the_unigram_is_the_counted_share():
    rows = np.array([[1, 1, 4, 4, 4, 5]])
    chance = NGrams([rows], 6, OWN).probabilities(*(np.array([v]) for v in (1, 1, 4)))["unigram"]
    # Four tokens, 4 three times: discount n1 / (n1 + 2 n2) = 1, spread over the four real tokens.
    assert chance[0] == pytest.approx((3 - 1) / 4 + (2 / 4) * (1 / 4))


def test_more_context_helps_where_there_is_structure():
    rows = np.tile(np.array([[1, 1, 4, 5, 6, 4, 7, 8, 4, 5]]), (20, 1))
    found = NGrams([rows], 10, OWN).perplexities(rows)
    assert found["trigram"] < found["bigram"] < found["unigram"]


def test_bits_per_byte_of_all_text_and_of_each_language():
    """One bit per token: six tokens in 24 bytes, four of them in 8 bytes and two in 16."""
    rows = np.array([[1, 5, 6, 7], [1, 8, -1, -1], [1, 5, 6, -1]], np.int16)
    owners = np.array([0, 0, 1])
    sizes = {0: 8, 1: 16}
    text = HeldOutText(
        rows=lambda context: (rows, owners),
        groups=lambda owner: ("norsk" if owner else "english",),
        bytes=24,
        bytes_of=sizes.__getitem__,
    )
    judged = HeldOutEvaluation(
        score=score,
        special=OWN,
        models=lambda state: {"": jnp.float32(math.log(2.0))},
        text={"test": text},
        vocabulary=10,
        watch_split=("test",),
    )
    found = judged.final({}, "test")
    assert found["bits_per_byte"] == pytest.approx(6 / 24)
    bits = {name: of["bits_per_byte"] for name, of in found["groups"][0].items()}
    assert bits == pytest.approx({"english": 4 / 8, "norsk": 2 / 16})
    rows[0, 1] = 3  # an unknown word hides bytes
    found = judged.final({}, "test")
    assert "bits_per_byte" not in found and "bits_per_byte" not in found["groups"][0]["english"]
    assert found["groups"][0]["norsk"]["bits_per_byte"] == pytest.approx(2 / 16)
