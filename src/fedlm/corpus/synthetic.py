"""Made-up clients in any number, for tests of scale.

In:       a `SyntheticPopulation`: how many clients, how much they wrote, from how many words.
Out:      a store as `fedlm prepare` makes it, whose tokens decode to made-up words.
Promise:  sizes, sentences and words follow the laws below; the same settings give the same
          bytes; a smaller population is the beginning of a larger one; memory holds one block
          of clients and the names of all clients, however much they wrote.
Not here: language. The words of a sentence are independent, and all clients draw from one law:
          a model can learn how frequent words are, and nothing else.

The laws:
    sentences of a client   lognormal, rounded up, at most `most`
    words of a sentence     equally likely from `shortest` to `longest`
    a word                  rank r with probability proportional to r ** -exponent (Zipf)
    path of a client        each level equally likely and independent, if there are `groups`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fedlm.core.errors import CorpusError, nearest, require
from fedlm.core.keys import generator_for
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.split import held_out_clients
from fedlm.corpus.store import Progress, Store, StoreSettings, write_tokens
from fedlm.corpus.tokenizer import OWN, SPECIALS
from fedlm.corpus.vocabulary import PUBLIC, Vocabulary

PREFIX = "synthetic:"
# The number of clients drawn together; they have a few hundred thousand tokens.
BLOCK = 256
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


@dataclass(frozen=True, kw_only=True)
class SyntheticPopulation:
    """The number of made-up clients, and the laws of their text."""

    clients: int
    median: float  # sentences of a client, before rounding and capping
    spread: float  # standard deviation of the logarithm of that number
    most: int
    shortest: int
    longest: int
    exponent: float
    groups: tuple[int, ...] = ()  # the number of groups per level, from coarse to fine


# As many clients as Stack Overflow has. The cap of 256 sentences is usual in training on it; a
# sentence of 19 words and its end fill a row of 20. These numbers do not claim to match the laws
# of the real text.
POPULATIONS = {
    "stackoverflow": SyntheticPopulation(
        clients=342_477,
        median=66.7,
        spread=0.9,
        most=256,
        shortest=3,
        longest=19,
        exponent=1.0,
    )
}


def population(source: str, clients: int | None = None, groups: str = "") -> SyntheticPopulation:
    """Return the population `synthetic:NAME`, with `clients` and `groups` (as `8,50`) if given."""
    name = source.removeprefix(PREFIX)
    if name not in POPULATIONS:
        raise CorpusError(
            f"source {source!r}: no such made-up population. {nearest(name, POPULATIONS)}"
        )
    found = POPULATIONS[name]
    if clients is not None:
        require(clients >= 1, "--clients", clients, "at least one client")
        found = replace(found, clients=clients)
    if groups:
        parts = groups.split(",")
        fine = all(p.strip().isdecimal() and 0 < int(p) < 1 << 31 for p in parts)
        require(fine, "--groups", groups, "how many groups on each level, as in 8,50")
        found = replace(found, groups=tuple(int(p) for p in parts))
    return found


def write_synthetic(
    laws: SyntheticPopulation,
    out: Path,
    settings: StoreSettings,
    progress: Progress = lambda stage, done: None,
) -> Store:
    """Write a store of made-up clients and open it; `settings.split_seed` also seeds the text."""
    require(
        settings.tokenizer == "words",
        "--tokenizer",
        settings.tokenizer,
        "words: made-up text has no other tokens",
    )
    words = made_up_words(settings.vocabulary - len(SPECIALS))
    tokenizer = tok.from_words(words, settings.lowercase)
    dtype = tok.token_dtype(settings.vocabulary)
    rows = _rows(laws, words, settings, dtype, progress)
    return write_tokens(rows, out, Vocabulary(tokenizer, PUBLIC), settings, dtype)


def made_up_words(count: int) -> list[str]:
    """Return distinct words made of open syllables, short words first.

    >>> made_up_words(71)[:3], made_up_words(71)[-1]
    (['ba', 'be', 'bi'], 'baba')
    """
    words = []
    for number in range(1, count + 1):
        syllables = ""
        while number:  # bijective numeration: one word per number, one number per word
            number, last = divmod(number - 1, len(SYLLABLES))
            syllables = SYLLABLES[last] + syllables
        words.append(syllables)
    return words


def word_chances(laws: SyntheticPopulation, words: int) -> np.ndarray:
    """Return the probability of each word, by rank."""
    weights = np.arange(1, words + 1, dtype=np.float64) ** -laws.exponent
    return weights / weights.sum()


class Sentences(NamedTuple):
    """The text of `BLOCK` clients, one client after the other."""

    sentences: np.ndarray  # number of sentences per client
    lengths: np.ndarray  # words per sentence
    tokens: np.ndarray  # the tokens of all sentences, each ended by EOS
    paths: np.ndarray  # clients levels


def draw_block(laws: SyntheticPopulation, summed: np.ndarray, seed: int, number: int) -> Sentences:
    """Draw one block of clients; `summed` holds the cumulative probabilities of the words."""
    rng = generator_for(seed, "synthetic", member=number)
    paths = rng.integers(0, np.array(laws.groups, np.int64), (BLOCK, len(laws.groups)))
    drawn = rng.lognormal(np.log(laws.median), laws.spread, BLOCK)
    sentences = np.minimum(np.ceil(drawn), laws.most).astype(np.int64)
    lengths = rng.integers(laws.shortest, laws.longest + 1, int(sentences.sum()))
    ends = np.cumsum(lengths + 1) - 1
    tokens = np.searchsorted(summed, rng.random(int(ends[-1]) + 1), side="right")
    tokens += len(SPECIALS)
    tokens[ends] = OWN.eos
    return Sentences(sentences, lengths, tokens, paths)


def _rows(
    laws: SyntheticPopulation,
    words: list[str],
    settings: StoreSettings,
    dtype: DTypeLike,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield the clients in the form that `write_tokens` takes."""
    summed = np.cumsum(word_chances(laws, len(words)))
    summed[-1] = 1.0  # every draw is below one, so that no draw falls beyond the last word
    sizes = np.array([*(0 for _ in SPECIALS), *(len(word) for word in words)])
    names = (_name(number) for number in range(laws.clients))
    test = held_out_clients(names, settings.test_clients, settings.split_seed)
    for first in range(0, laws.clients, BLOCK):
        progress("clients", first)
        block = draw_block(laws, summed, settings.split_seed, first // BLOCK)
        tokens = block.tokens.astype(dtype)
        last_sentence = np.cumsum(block.sentences)
        ends = np.concatenate([[0], np.cumsum(block.lengths + 1)])
        for place in range(min(BLOCK, laws.clients - first)):
            name, count = _name(first + place), int(block.sentences[place])
            kept = 0 if name in test else _kept(count, settings.validation)
            stop = last_sentence[place]
            begin, middle, end = ends[stop - count], ends[stop - count + kept], ends[stop]
            held = tokens[middle:end]
            yield {
                "client": name,
                "groups": _path(block.paths[place]),
                "train": tokens[begin:middle],
                "held": held,
                "test": name in test,
                "held_bytes": _text_bytes(held, sizes, count - kept),
            }


def _name(number: int) -> str:
    return f"client-{number:06d}"


def _path(groups: np.ndarray) -> list[str]:
    """Name each group by its whole path, so that a fine group is in one coarse group only."""
    return ["group-" + "-".join(str(g) for g in groups[: n + 1]) for n in range(len(groups))]


def _kept(sentences: int, share: float) -> int:
    """Count the sentences that a training client learns from, at least one."""
    return max(1, sentences - round(share * sentences))


def _text_bytes(held: np.ndarray, sizes: np.ndarray, sentences: int) -> int:
    """Return the bytes of the decoded text: words, and the blanks and line ends between them."""
    words = len(held) - sentences
    return int(sizes[held].sum()) + words - 1 if words else 0
