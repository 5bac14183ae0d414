"""Where the vocabulary of a store comes from: `[data]` to a tokenizer and its origin.

In:       the `[data]` table, perhaps a tokenizer that was read from the file it names.
Out:      a `Vocabulary`, or the function that makes one from the clients' training text.
Promise:  a store records the origin of its tokenizer; with `data.vocabulary_epsilon` nothing of the
          clients' text enters the tokenizer but noisy counts, and their cost is in the store's
          ledger before anybody can see it.
Not here: the noisy counts (`privacy/vocabulary.py`), reading a tokenizer file (`parts.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from fedlm.core.errors import CorpusError, require
from fedlm.corpus.store import LEDGER, Progress
from fedlm.corpus.tokenizer import TextTokenizer, from_counts, word_finder
from fedlm.corpus.vocabulary import (
    Counting,
    NoVocabularyError,
    Origin,
    Vocabulary,
    check_origin,
    from_file,
)
from fedlm.privacy.ledger import Ledger, begin_entry, gaussian_entry
from fedlm.privacy.vocabulary import WordSelection, assumptions, select_words, word_selection
from fedlm.recipe.settings import Data

ORIGIN = "tokenizer_from.json"  # beside a tokenizer.json that a federation made
COUNTED_WITH_NOISE = ("words", "bpe")  # kinds of tokenizers that are fitted to words


def vocabulary_of(
    data: Data, given: TextTokenizer | None, progress: Progress = lambda stage, done: None
) -> Vocabulary | Counting | None:
    """Return the vocabulary that `[data]` asks for; None: counted on the text without noise.

    `given` is the tokenizer of the file that `data.tokenizer` names, if it names one.
    """
    check_vocabulary(data)
    if given is not None:
        return _given(given, Path(data.tokenizer))
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

    def count(texts: Iterable[str]) -> Vocabulary:
        words = select_words(
            (words_of(text) for text in texts),
            selection,
            os.urandom(16),
            lambda done: progress("words of client", done),
        )
        origin = private_origin(selection, len(words))

        def write_ledger(folder: Path) -> None:
            write_vocabulary_ledger(folder, origin)

        if not words:
            raise NoVocabularyError(
                f"data.vocabulary_epsilon = {selection.epsilon:g}: no word is shared by enough "
                "clients to be seen above the noise. Raise it, or take data.tokenizer = 'bytes', "
                "which counts no text. This attempt has cost the same epsilon, which the next "
                "store in its place will count.",
                write_ledger,
            )
        made = from_counts(words, data.tokenizer, data.vocabulary, data.lowercase)
        return Vocabulary(made, origin, write_ledger)

    return count


def private_origin(selection: WordSelection, passed: int) -> Origin:
    """Return the origin of a vocabulary that was counted with noise."""
    return {
        "kind": "private",
        "epsilon": selection.epsilon,
        "delta": selection.delta,
        "words_per_client": selection.words,
        "noise_multiplier": selection.noise_multiplier,
        "threshold": selection.threshold,
        "threshold_delta": selection.threshold_delta,
        "words_passed": passed,
    }


def write_vocabulary_ledger(folder: Path, origin: Origin) -> None:
    """Write the ledger of a vocabulary that was counted with noise into a folder."""
    said = assumptions({"store": {"tokenizer_from": origin}})
    ledger = Ledger(folder / LEDGER)
    ledger.begin(begin_entry({}, tokenizer=origin, assumes=said))
    noise, delta = origin["noise_multiplier"], origin["threshold_delta"]
    ledger.append(gaussian_entry("vocabulary", noise, delta))


# ---- a tokenizer file that says where it came from -----------------------------------------------


def write_origin(file: Path, origin: Origin) -> None:
    """Write down, beside a tokenizer file, where it came from."""
    told = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "origin": origin}
    (file.parent / ORIGIN).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _given(tokenizer: TextTokenizer, file: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer file, with the origin that stands beside it."""
    beside = file.parent / ORIGIN
    if not beside.is_file():
        return from_file(tokenizer, file)
    try:
        told = json.loads(beside.read_text(encoding="utf-8"))
        origin = check_origin(told["origin"])
        same = told["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        costs = [float(origin[n]) for n in ("epsilon", "noise_multiplier", "threshold_delta")]
        if not same or origin["kind"] != "private" or not all(0 < c < math.inf for c in costs):
            raise ValueError("it is of another tokenizer, or of no private one")
    except (OSError, ValueError, KeyError, TypeError, CorpusError, RecursionError) as error:
        raise CorpusError(
            f"{beside} does not say where {file.name} came from ({str(error)[:200]}). Take both "
            "files as they were made, or remove it: the tokenizer then counts as public."
        ) from None
    return Vocabulary(tokenizer, origin, lambda folder: write_vocabulary_ledger(folder, origin))
