import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from fedlm.core.errors import ConfigError, CorpusError
from fedlm.corpus import synthetic
from fedlm.corpus.store import StoreSettings
from fedlm.corpus.synthetic import (
    POPULATIONS,
    draw_block,
    made_up_words,
    population,
    word_chances,
    write_synthetic,
)
from fedlm.corpus.tokenizer import OWN, SPECIALS, decode, encode

EOS, OOV = OWN.eos, OWN.oov
LAWS = POPULATIONS["stackoverflow"]
SETTINGS = StoreSettings(vocabulary=300, test_clients=0.2, validation=0.1, split_seed=3)
WORDS = 996


@pytest.fixture(scope="module")
def blocks():
    summed = np.cumsum(word_chances(LAWS, WORDS))
    return [draw_block(LAWS, summed, 0, number) for number in range(8)]


@pytest.fixture(scope="module")
def sizes():
    """Sentences of ten thousand clients, each sentence a word."""
    short = replace(LAWS, shortest=1, longest=1)
    return np.concatenate([draw_block(short, np.ones(1), 0, n).sentences for n in range(40)])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    laws = replace(LAWS, clients=300, groups=(2, 3))
    return write_synthetic(laws, tmp_path_factory.mktemp("made") / "store", SETTINGS)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def fits(observed, expected, least=10):
    """Chi-square; neighbours are joined to cells that are expected about `least` times or more."""
    cells = np.minimum(np.cumsum(expected) // least, expected.sum() // least - 1).astype(int)
    seen, wanted = np.bincount(cells, observed), np.bincount(cells, expected)
    return scipy.stats.chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue > 0.001


@pytest.mark.parametrize(
    "median, spread, right", [(66.7, 0.9, True), (60.0, 0.9, False), (66.7, 0.8, False)]
)
def test_sentences_of_a_client_are_lognormal_and_capped(sizes, median, spread, right):
    law = scipy.stats.lognorm(spread, scale=median)
    # Rounded up: n sentences stand for draws in (n - 1, n]; the cap takes all above.
    chances = np.diff([*law.cdf(np.arange(LAWS.most)), 1.0])
    assert sizes.min() >= 1 and sizes.max() == LAWS.most
    observed = np.bincount(sizes - 1, minlength=LAWS.most)
    assert fits(observed, chances * len(sizes), least=300) == right


@pytest.mark.parametrize("longest, right", [(19, True), (20, False), (18, False)])
def test_sentences_are_of_every_length_equally_often(blocks, longest, right):
    lengths = np.concatenate([block.lengths for block in blocks])
    assert (lengths.min(), lengths.max()) == (3, 19)
    expected = np.zeros(21)
    expected[3 : longest + 1] = len(lengths) / (longest - 2)
    observed = np.bincount(lengths, minlength=21)
    known = expected > 0
    same = observed[known].sum() == len(lengths)
    assert (same and fits(observed[known], expected[known])) == right


@pytest.mark.parametrize("exponent, right", [(1.0, True), (1.01, False), (0.99, False)])
def test_words_follow_zipf(blocks, exponent, right):
    tokens = np.concatenate([block.tokens for block in blocks])
    words = tokens[tokens != EOS] - len(SPECIALS)
    chances = word_chances(replace(LAWS, exponent=exponent), WORDS)
    observed = np.bincount(words, minlength=WORDS)
    assert fits(observed, chances * len(words)) == right


def test_every_sentence_ends_and_a_client_is_its_sentences(store):
    summed = np.cumsum(word_chances(LAWS, 296))
    laws = replace(LAWS, groups=(2, 3))
    parts = [draw_block(laws, summed, SETTINGS.split_seed, number) for number in range(2)]
    sentences = np.concatenate([part.sentences for part in parts])
    for number in range(len(store)):
        whole = np.concatenate([store.train(number), store.held(number)])
        assert (whole == EOS).sum() == sentences[number] and whole[-1] == EOS
        assert whole.min() >= EOS and OOV not in whole and whole.max() < 300
        kept = (store.train(number) == EOS).sum()
        if number in store.test_clients:
            assert kept == 0
        else:
            assert kept == max(1, sentences[number] - round(0.1 * sentences[number]))
    assert len(store.test_clients) == 60


def test_tokens_decode_to_words_that_encode_to_the_tokens(store):
    for number in (0, 17, 299):
        held = store.held(number)
        text = decode(store.tokenizer, held).strip()
        np.testing.assert_array_equal(encode(store.tokenizer, text, np.uint16), held)
        lines = [line.strip() for line in text.split("\n")]
        assert store.held_bytes(number) == len("\n".join(lines).encode())
    assert store.vocabulary == 300
    assert [store.tokenizer.library.id_to_token(i) for i in range(4)] == list(SPECIALS)


def test_made_up_words_are_distinct_and_short_ones_come_first():
    words = made_up_words(9996)
    assert len(set(words)) == 9996 and words == sorted(words, key=len)
    assert all(word.isalpha() and word.islower() for word in words)


def test_groups_are_paths_of_the_asked_width(store):
    paths = {store.groups(number) for number in range(len(store))}
    assert {path[0] for path in paths} == {"group-0", "group-1"}
    assert len(paths) == 6 and all(fine.startswith(coarse) for coarse, fine in paths)


def test_the_same_settings_give_the_same_bytes_and_another_seed_others(tmp_path):
    laws = replace(LAWS, clients=30)
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        write_synthetic(laws, tmp_path / name, replace(SETTINGS, split_seed=seed))
    one, two, other = (contents(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two and one["clients.arrow"] != other["clients.arrow"]


def test_a_small_population_is_the_beginning_of_a_large_one(store, tmp_path):
    small = write_synthetic(
        replace(LAWS, clients=5, groups=(2, 3)), tmp_path / "small", replace(SETTINGS)
    )
    for number in range(5):
        whole, same = (np.concatenate([s.train(number), s.held(number)]) for s in (small, store))
        np.testing.assert_array_equal(whole, same)
        assert small.client(number) == store.client(number)


def test_one_client_is_a_population(tmp_path):
    settings = replace(SETTINGS, test_clients=0)
    assert len(write_synthetic(replace(LAWS, clients=1), tmp_path / "s", settings)) == 1


def test_what_cannot_be_made_is_named():
    with pytest.raises(CorpusError, match="Did you mean 'stackoverflow'"):
        population("synthetic:stackoverflaw")
    with pytest.raises(ConfigError, match="--clients = 0: expected at least one"):
        population("synthetic:stackoverflow", 0)
    for bad in ("8,", "0", "a", "-3", "9" * 12):
        with pytest.raises(ConfigError, match="--groups"):
            population("synthetic:stackoverflow", 5, bad)


def test_only_words_can_be_made_up(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer = 'bpe': expected words"):
        write_synthetic(LAWS, tmp_path / "s", replace(SETTINGS, tokenizer="bpe"))


MAKE = """
import json, re, sys
from pathlib import Path
from fedlm.corpus.store import Store, StoreSettings
from fedlm.corpus.synthetic import population, write_synthetic

def peak():  # of this program: getrusage also remembers the process that started it
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024 / 1e6

path, before = Path(sys.argv[2]), peak()
if sys.argv[1] == "make":
    write_synthetic(population("synthetic:stackoverflow"), path, StoreSettings())
    print(json.dumps({"before": before, "peak": peak()}))
else:
    store = Store(path)
    store.train(300_000).sum()
    found = {"members": len(store.training_clients), "clients": len(store)}
    print(json.dumps({**found, "before": before, "peak": peak()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read as on Linux")
def test_342_477_clients_are_made_and_opened_in_little_memory(tmp_path):
    """Each in a process of its own, because a peak never falls."""

    def run(what):
        command = [sys.executable, "-c", MAKE, what, str(tmp_path / "store")]
        return json.loads(subprocess.check_output(command, text=True, timeout=1800))

    made = run("make")
    assert made["peak"] < 1000
    opened = run("open")
    assert opened["clients"] == 342_477 and opened["members"] == 342_477 - 34_248
    assert opened["peak"] < 1000 and opened["peak"] - opened["before"] < 100
    assert (tmp_path / "store" / "clients.arrow").stat().st_size > 500e6


def test_the_block_is_no_setting():
    """It decides which draws belong together, so another value would be another text."""
    assert synthetic.BLOCK == 256
