"""The private vocabulary: words that enough clients share, by noisy counts over a threshold.

In:       the distinct words of each client; an epsilon, a delta and a bound on words per client.
Out:      the words that passed, with noisy counts; what they cost; what a claim must say of them.
Promise:  what leaves here is (epsilon, delta)-private for one client replaced by a client without
          words, and costs what its ledger line says when it is composed with other releases.
Not here: words of a text (`corpus/tokenizer.py`), what is recorded (`corpus/vocabulary.py`).

The mechanism is the Gaussian mechanism on the union of sets (Korolova et al., WWW 2009; Gopi et
al., "Differentially Private Set Union", ICML 2020). A client with m distinct words, at most k of
them chosen at random, adds 1/sqrt(m) to each: its vector has L2 norm 1. Every word that somebody
wrote gets Gaussian noise of standard deviation sigma, and the words whose noisy counts reach a
threshold t are released with these counts.

Theorem. Let delta_g be the delta of the Gaussian mechanism of sensitivity 1 and noise sigma at
epsilon, alone or composed with other releases, and let

    t >= 1/sqrt(m) + sigma * Phi^-1((1 - delta_t)^(1/m))    for every m from 1 to k.

Then the release is (epsilon, delta_g + delta_t)-private in both directions.

Proof. Fix the words that clients draw; a mixture over draws keeps the bound, because the draw of
one client does not depend on the others. Let M be the release with a client of m words, and M' the
one without it. Call B those b <= m words that nobody else wrote, and M* the release with the client
in which B is left out.

1. M* against M': both have the same set of words, and their exact counts differ by 1/sqrt(m) in at
   most m places, an L2 distance of at most 1. Choosing and ordering words by noisy counts is
   post-processing. So P(M* in E) <= exp(epsilon) P(M' in E) + delta_g, and the other way round.
2. M against M*: the count of a word in B is exactly 1/sqrt(m) before noise, so none of them is
   released with probability Phi((t - 1/sqrt(m)) / sigma)^b >= 1 - delta_t. Call this event N, and
   p <= delta_t the probability of its opposite. N does not depend on the noise of other words, and
   under N the releases M and M* are equal.
3. P(M in E) <= P(M* in E) + p <= exp(epsilon) P(M' in E) + delta_g + delta_t.
4. P(M in E) >= P(M in E and N) = (1 - p) P(M* in E), hence
   (1 - p) P(M' in E) <= (1 - p) (exp(epsilon) P(M* in E) + delta_g)
                      <= exp(epsilon) P(M in E) + delta_g,
   and P(M' in E) <= (1 - p) P(M' in E) + p <= exp(epsilon) P(M in E) + delta_g + delta_t.

With later releases appended to M, M* and M', which use the same data, steps 1 to 4 hold word for
word: that is why the ledger has one line of a Gaussian release with delta_t on top.

Numbers on a computer: weights are rounded down to multiples of 2^-20 and summed as integers, so
that no norm exceeds 1 and no order of clients shows. The noise is made of ChaCha20 under a 128-bit
secret of the system's entropy, in 64-bit floating point (`host_noise.py`); noisy counts are rounded
to multiples of 2^-10, which hides the low bits of floating-point noise, and must exceed the
threshold after it was rounded up to that grid. The noise itself is not a discrete distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from fedlm.core.documents import JsonMapping
from fedlm.core.errors import require
from fedlm.core.keys import generator_for
from fedlm.core.late import late
from fedlm.privacy.host_noise import STEPS, on_grid, standard_normal

dp_accounting = late("dp_accounting")  # over a second

NOT_COVERED = "the epsilon does not cover it"
WEIGHT_STEPS = 1 << 20  # steps per unit of a weight


@dataclass(frozen=True, kw_only=True)
class WordSelection:
    """A mechanism that releases the words that enough clients share.

    Attributes:
      epsilon, delta: what one release costs one client.
      words: the most distinct words of one client that are counted.
      noise_multiplier: standard deviation of the noise; one client moves the counts by an L2 norm
        of at most one.
      threshold: the least noisy count of a released word.
      threshold_delta: the probability that a word of one client alone is released.
    """

    epsilon: float
    delta: float
    words: int
    noise_multiplier: float
    threshold: float
    threshold_delta: float


class NoisyWord(NamedTuple):
    """A released word; a client of m words added 1/sqrt(m) to its noisy count."""

    word: str
    noisy_count: float


def word_selection(epsilon: float, delta: float, words: int) -> WordSelection:
    """Find the noise and the threshold for a budget; half of delta goes to each.

    >>> made = word_selection(1.0, 1e-7, 1000)
    >>> round(made.noise_multiplier, 2), round(made.threshold, 1)
    (4.81, 31.1)
    """
    require(0 < epsilon < math.inf, "data.vocabulary_epsilon", epsilon, "a positive number")
    require(0 < delta < 1, "data.vocabulary_delta", delta, "between 0 and 1")
    require(words >= 1, "data.vocabulary_words", words, "at least one word per client")
    # A little more than the library's sigma, which is exact up to its tolerance.
    noise = dp_accounting.get_sigma_gaussian(epsilon, delta / 2) * (1 + 1e-9)
    return WordSelection(
        epsilon=epsilon,
        delta=delta,
        words=words,
        noise_multiplier=noise,
        threshold=word_threshold(noise, delta / 2, words),
        threshold_delta=delta / 2,
    )


def word_threshold(noise: float, delta: float, words: int) -> float:
    """Return the least threshold of the theorem: the largest over all numbers of words."""
    # The quantile at (1 - delta)^(1/m), written with the small tail so that no digit is lost.
    tails = (-math.expm1(math.log1p(-delta) / m) for m in range(1, words + 1))
    normal = NormalDist()
    return max(
        1 / math.sqrt(m) - noise * normal.inv_cdf(tail) for m, tail in enumerate(tails, start=1)
    )


def select_words(
    clients: Iterable[Collection[str]],
    selection: WordSelection,
    secret: bytes,
    progress: Callable[[int], None] = lambda done: None,
) -> list[NoisyWord]:
    """Release the words that enough clients share, the largest noisy count first.

    Args:
      clients: the distinct words of each client.
      selection: noise, threshold and the bound on words.
      secret: the seed of draws and noise, 16 bytes of the system's entropy, to be forgotten.
      progress: told how many clients have been counted.
    """
    seed = int.from_bytes(secret, "little")
    counts: Counter[str] = Counter()
    for number, words in enumerate(clients, start=1):
        progress(number)
        kept = sorted(set(words))
        if len(kept) > selection.words:
            rng = generator_for(seed, "vocabulary", member=number)
            kept = [kept[i] for i in rng.choice(len(kept), selection.words, replace=False)]
        if kept:
            counts.update(dict.fromkeys(kept, math.floor(WEIGHT_STEPS / math.sqrt(len(kept)))))
    names = sorted(counts)
    exact = np.array([counts[name] for name in names]) / WEIGHT_STEPS
    drawn = standard_normal(seed, "vocabulary", len(names))
    noisy = on_grid(exact + selection.noise_multiplier * drawn).tolist()
    least = (math.ceil(selection.threshold * STEPS) + 1) / STEPS
    found = [
        NoisyWord(name, count) for name, count in zip(names, noisy, strict=True) if count >= least
    ]
    return sorted(found, key=lambda word: (-word.noisy_count, word.word))


# ---- what a claim must say -----------------------------------------------------------------------


def assumptions(header: JsonMapping) -> tuple[str, ...]:
    """Return what a claim must say about the preparation of the text, from a journal's header.

    That is who counts as one client, if a field of the source decides it, and where the vocabulary
    came from.
    """
    store = header.get("store")
    if not isinstance(store, Mapping):
        return ()
    field, origin = store.get("user_field"), store.get("tokenizer_from")
    joined = (
        f"a client is all text with one value of the field {field!r}: a person, not a device",
    )
    unit = () if field is None else joined
    if not isinstance(origin, Mapping):
        return (*unit, f"where the vocabulary came from is not recorded: {NOT_COVERED}")
    if origin.get("kind") == "like":
        of = origin.get("of")
        found = _said(of) if isinstance(of, Mapping) else f"its origin is not known: {NOT_COVERED}"
        said = f"the vocabulary is that of the store {origin.get('store')!r}; there, {found}"
        return (*unit, said)
    return unit if origin.get("kind") == "public" else (*unit, _said(origin))


def uncovered(header: JsonMapping) -> tuple[str, ...]:
    """Return those assumptions that say of clients' text that a claim does not cover it."""
    return tuple(said for said in assumptions(header) if said.endswith(f": {NOT_COVERED}"))


def _said(origin: JsonMapping) -> str:
    kind = origin.get("kind")
    if kind == "public":
        return "the vocabulary was made of nobody's text"
    if kind == "file":
        digest = str(origin.get("sha256"))[:12]
        return (
            f"the vocabulary is that of the file {origin.get('name')!r} (sha256 {digest}...), "
            f"assumed public: if clients' text is in it, {NOT_COVERED}"
        )
    if kind == "private":
        return (
            "the vocabulary was counted on the clients' text with noise: "
            f"epsilon {origin.get('epsilon')} at delta {origin.get('delta')} by itself, at most "
            f"{origin.get('words_per_client')} distinct words of each client"
        )
    return f"the vocabulary was counted on the clients' text without noise: {NOT_COVERED}"
