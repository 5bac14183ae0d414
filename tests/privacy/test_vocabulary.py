"""What a vocabulary tells about clients, and what is said of it beside an epsilon."""

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import scipy.stats

from fedlm.core.errors import CorpusError
from fedlm.corpus.store import StoreSettings, _counted
from fedlm.privacy.vocabulary import assumptions, select_words, uncovered, word_selection
from fedlm.recipe.settings import parse
from fedlm.recipe.vocabulary import vocabulary_of

COUNTED = {"kind": "counted"}


@pytest.mark.parametrize(
    "origin, said",
    [
        (COUNTED, "counted on the clients' text without noise: the epsilon does not cover it"),
        (None, "not recorded: the epsilon does not cover it"),
        ({"kind": "like", "store": "s", "of": COUNTED}, "of the store 's'; there, the vocabulary"),
        ({"kind": "file", "name": "t.json", "sha256": "ab" * 32}, "'t.json' (sha256 abababababab"),
    ],
    ids=["counted", "unknown", "like", "file"],
)
def test_a_claim_says_where_the_vocabulary_came_from(origin, said):
    (sentence,) = assumptions({"store": {"tokenizer_from": origin}})
    assert said in sentence and "does not cover it" in sentence
    warned = uncovered({"store": {"tokenizer_from": origin}})
    assert warned == (() if origin and origin["kind"] == "file" else (sentence,))


def test_of_a_public_vocabulary_there_is_nothing_to_say():
    assert assumptions({"store": {"tokenizer_from": {"kind": "public"}}}) == ()


# ---- brute force: every pair of neighbours in a small world --------------------------------------

EPSILON, DELTA = 1.0, 0.05
WIDTH = 0.2  # of a bin of noisy counts; coarser than the grid, so that no divergence is too large
# What others add to a word: nobody, a few clients of one or two words, enough to be released.
OTHERS = (0.0, 2**-0.5, 1.0, 2.0, 4.0, 40.0)


def masses(count, noise, threshold):
    """The exact probabilities of one word: not released, or released with a count in each bin."""
    edges = np.append(np.arange(threshold, threshold + 9 * noise, WIDTH), np.inf)
    below = scipy.stats.norm.cdf((edges - count) / noise)
    above = scipy.stats.norm.sf((edges - count) / noise)
    return np.concatenate([below[:1], above[:-1] - above[1:]])


def joint(counts, noise, threshold):
    """The probabilities of all outcomes of several words; a word that nobody wrote never passes."""
    out = np.ones(1)
    for count in counts:
        one = masses(count or 0.0, noise, threshold)
        if not count:
            one = np.concatenate([[1.0], np.zeros(len(one) - 1)])
        out = np.outer(out, one).ravel()
    return out


def hockey_stick(p, q):
    return np.maximum(p - np.exp(EPSILON) * q, 0).sum()


def worst(noise, threshold, words):
    """The largest divergence, both ways, over every client of so many words among any others."""
    most = 0.0
    for size in range(1, words + 1):
        for others in itertools.combinations_with_replacement(OTHERS, size):
            without = joint(others, noise, threshold)
            with_it = joint([count + size**-0.5 for count in others], noise, threshold)
            most = max(most, hockey_stick(with_it, without), hockey_stick(without, with_it))
    return most


@pytest.mark.parametrize("words", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_pair_of_neighbours_is_further_apart_than_claimed(words):
    made = word_selection(EPSILON, DELTA, words)
    found = worst(made.noise_multiplier, made.threshold, words)
    # Half of delta belongs to words of the client alone, half to words that others wrote too.
    assert 0.49 * DELTA < found <= DELTA


@pytest.mark.parametrize("noise, threshold", [(1.0, 0.6), (0.6, 1.0)], ids=["threshold", "noise"])
def test_a_lower_threshold_or_less_noise_is_caught(noise, threshold):
    made = word_selection(EPSILON, DELTA, 2)
    assert worst(noise * made.noise_multiplier, threshold * made.threshold, 2) > DELTA


def test_a_client_with_too_many_words_is_a_mixture_of_its_draws():
    """Two words, of which one is drawn; another client wrote the first."""
    made = word_selection(EPSILON, DELTA, 1)
    noise, threshold = made.noise_multiplier, made.threshold
    without = joint([1, 0], noise, threshold)
    with_it = (joint([2, 0], noise, threshold) + joint([1, 1], noise, threshold)) / 2
    assert max(hockey_stick(with_it, without), hockey_stick(without, with_it)) <= DELTA


def test_noise_and_threshold_are_those_of_the_theorem():
    made = word_selection(0.7, 1e-6, 50)
    assert dp_accounting.get_epsilon_gaussian(made.noise_multiplier, 5e-7) <= 0.7
    for words in (1, 2, 7, 50):
        seen = scipy.stats.norm.logcdf((made.threshold - words**-0.5) / made.noise_multiplier)
        assert -math.expm1(words * seen) <= made.threshold_delta * (1 + 1e-9)
    tightest = max(
        -math.expm1(m * scipy.stats.norm.logcdf((made.threshold - m**-0.5) / made.noise_multiplier))
        for m in range(1, 51)
    )
    assert tightest == pytest.approx(made.threshold_delta, rel=1e-6)


# ---- the mechanism as it runs --------------------------------------------------------------------


def test_what_is_released_has_the_noise_and_the_threshold_that_were_claimed():
    """A hundred words that each of forty clients wrote: each counts 40 / sqrt(100)."""
    made = word_selection(4.0, 1e-2, 100)
    shared = [f"s{n}" for n in range(100)]
    found = select_words([shared] * 40, replace(made, threshold=-1e6), b"0" * 16)
    values = np.array([count for _, count in found])
    assert len(found) == 100 and [w.noisy_count for w in found] == sorted(values, reverse=True)
    assert scipy.stats.kstest((values - 4) / made.noise_multiplier, "norm").pvalue > 1e-4
    assert np.all(values * 1024 == np.round(values * 1024))


def test_one_client_has_at_most_so_many_words_and_no_norm_above_one():
    made = replace(word_selection(1.0, 1e-2, 7), noise_multiplier=0.0, threshold=0.0)
    found = select_words([[f"w{n}" for n in range(500)]], made, b"1" * 16)
    assert len(found) == 7
    assert sum(count**2 for _, count in found) <= 1
    again = select_words([[f"w{n}" for n in range(500)]], made, b"2" * 16)
    assert {w.word for w in found} != {w.word for w in again}
    assert select_words([[], ()], made, b"3" * 16) == []


# ---- an attacker who looks for a planted word ----------------------------------------------------

CROWD = ["the cat"] * 9 + ["the dog"] * 4


def shares(make, texts, trials):
    """The share of preparations of the same text in whose vocabulary each word was."""
    seen = Counter()
    for _ in range(trials):
        with contextlib.suppress(CorpusError):  # no word passed
            seen.update(make(texts).tokenizer.library.get_vocab().keys())
    return Counter({word: count / trials for word, count in seen.items()})


def caught(make, epsilon, delta, trials):
    """Whether an event of one word disproves the claim, with a chance of 1e-6 to be wrong."""
    with_it = shares(make, [*CROWD, "xylograph dog"], trials)
    without = shares(make, [*CROWD, "."], trials)
    margin = math.sqrt(math.log(16 / 1e-6) / (2 * trials)) * (1 + math.exp(epsilon))
    for word in ("xylograph", "dog", "cat", "the"):
        for p, q in ((with_it[word], without[word]), (without[word], with_it[word])):
            for more, less in ((p, q), (1 - p, 1 - q)):
                if more - math.exp(epsilon) * less > delta + margin:
                    return True
    return False


def private(epsilon, delta):
    tables = {"data": {"vocabulary_epsilon": epsilon, "vocabulary_delta": delta}}
    return vocabulary_of(parse(tables).data, None)


@pytest.mark.parametrize("trials", [240, pytest.param(1000, marks=pytest.mark.slow)])
def test_who_looks_for_a_planted_word_cannot_disprove_the_claim(trials):
    assert not caught(private(1.0, 0.2), 1.0, 0.2, trials)


def test_a_vocabulary_without_noise_is_caught_by_the_same_attacker():
    assert caught(lambda texts: _counted(texts, StoreSettings()), 1.0, 0.2, 240)


def test_a_threshold_that_is_too_low_is_caught_by_the_same_attacker(monkeypatch):
    monkeypatch.setattr("fedlm.privacy.vocabulary.word_threshold", lambda noise, delta, words: -9.0)
    assert caught(private(1.0, 0.2), 1.0, 0.2, 240)
