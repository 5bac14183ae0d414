"""Where the vocabulary of a store comes from: `[data]` to a tokenizer and its origin.

In:       the `[data]` table, perhaps a tokenizer that was read from the file it names.
Out:      a `Vocabulary`, or the function that makes one from the clients' training text.
Promise:  a store records the origin of its tokenizer; with `data.vocabulary_epsilon` nothing of the
          clients' text enters the tokenizer but noisy counts, and their cost is in the store's
          ledger before anybody can see it.
Not here: the noisy counts (`privacy/vocabulary.py`), reading a tokenizer file (`parts.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedlm.core.errors import CorpusError, require
from fedlm.corpus.store import LEDGER, Progress
from fedlm.corpus.tokenizer import TextTokenizer, from_counts, word_finder
from fedlm.corpus.vocabulary import Counting, Vocabulary, from_file
from fedlm.privacy.ledger import Ledger, begin_entry, gaussian_entry
from fedlm.privacy.vocabulary import assumptions, select_words, word_selection
from fedlm.recipe.settings import Data

COUNTED_WITH_NOISE = ("words", "bpe")  # kinds of tokenizers that are fitted to words


def vocabulary_of(
    data: Data, given: TextTokenizer | None, progress: Progress = lambda stage, done: None
) -> Vocabulary | Counting | None:
    """Return the vocabulary that `[data]` asks for; None: counted on the text without noise.

    `given` is the tokenizer of the file that `data.tokenizer` names, if it names one.
    """
    check_vocabulary(data)
    if given is not None:
        return from_file(given, Path(data.tokenizer))
    return None if data.vocabulary_epsilon is None else _private(data, progress)


def check_vocabulary(data: Data) -> None:
    """Raise `ConfigError` if settings of a private vocabulary stand beside others they exclude."""
    if data.vocabulary_epsilon is None:
        for name in ("vocabulary_delta", "vocabulary_words"):
            value = getattr(data, name)
            require(
                value == type(data).model_fields[name].default,
                f"data.{name}",
                value,
                "data.vocabulary_epsilon beside it: without one the vocabulary has no noise",
            )
        return
    require(
        data.tokenizer in COUNTED_WITH_NOISE,
        "data.vocabulary_epsilon",
        data.vocabulary_epsilon,
        f"nothing beside data.tokenizer = {data.tokenizer!r}, which counts no text",
        "Leave it out, or set data.tokenizer to 'words' or 'bpe'.",
    )


def _private(data: Data, progress: Progress) -> Counting:
    """Return a function that counts words with noise."""
    assert data.vocabulary_epsilon is not None
    selection = word_selection(
        data.vocabulary_epsilon, data.vocabulary_delta, data.vocabulary_words
    )
    words_of = word_finder(data.tokenizer, data.lowercase)

    def count(texts: Sequence[str]) -> Vocabulary:
        words = select_words(
            (words_of(text) for text in texts),
            selection,
            os.urandom(16),
            lambda done: progress("words of client", done),
        )
        if not words:
            raise CorpusError(
                f"data.vocabulary_epsilon = {selection.epsilon:g}: no word is shared by enough "
                "clients to be seen above the noise. Raise it, or take data.tokenizer = 'bytes', "
                "which counts no text. This attempt has cost the same epsilon."
            )
        made = from_counts(words, data.tokenizer, data.vocabulary, data.lowercase)
        origin = {
            "kind": "private",
            "epsilon": selection.epsilon,
            "delta": selection.delta,
            "words_per_client": selection.words,
            "noise_multiplier": selection.noise_multiplier,
            "threshold": selection.threshold,
            "words_passed": len(words),
        }

        def write_ledger(folder: Path) -> None:
            said = assumptions({"store": {"tokenizer_from": origin}})
            ledger = Ledger(folder / LEDGER)
            ledger.begin(begin_entry({}, tokenizer=origin, assumes=said))
            noise, delta = selection.noise_multiplier, selection.threshold_delta
            ledger.append(gaussian_entry("vocabulary", noise, delta))

        return Vocabulary(made, origin, write_ledger)

    return count
