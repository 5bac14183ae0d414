"""A federation's own tokenizer: nodes count words with noise, the operator joins the counts.

In:       at a node, its text; at the operator's, the files that nodes handed over.
Out:      `words.json` to hand over and a ledger that stays; a tokenizer and where it came from.
Promise:  what leaves a node is the release of `privacy/vocabulary.py` and nothing else, and its
          cost is on disk before it; whatever is in a file that was handed over, joining it ends in
          a tokenizer or in a `CorpusError`.
Not here: the mechanism (`privacy/vocabulary.py`), preparing a store with the tokenizer
          (`corpus/store.py`).

A client is a client of one node, so the cost of the joint tokenizer for a client is that of its
node's release; the origin of the tokenizer states the dearest of them. Each node's own noise and
threshold hold: nobody else is trusted, and a word must be shared by enough clients of one node.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedlm.core.durable import write_atomically
from fedlm.core.errors import CorpusError, require
from fedlm.corpus.gather import gather_clients
from fedlm.corpus.sources import Document
from fedlm.corpus.store import StoreSettings, training_texts
from fedlm.corpus.tokenizer import from_counts, word_finder
from fedlm.corpus.tokenizer_file import write_tokenizer
from fedlm.corpus.vocabulary import Vocabulary
from fedlm.privacy.vocabulary import WordSelection, select_words, word_selection
from fedlm.recipe.vocabulary import (
    COUNTED_WITH_NOISE,
    private_origin,
    write_origin,
    write_vocabulary_ledger,
)

FORMAT = 1
WORDS = "words.json"
MOST_FILE, MOST_WORDS, LONGEST_WORD = 1 << 28, 1 << 22, 1 << 12
_FACTS: dict[str, type] = {
    "format": int,
    "kind": str,
    "lowercase": bool,
    "origin": dict,
    "words": list,
}
_ORIGIN = ("epsilon", "delta", "noise_multiplier", "threshold", "threshold_delta")


def count_words(
    documents: Iterable[Document],
    out: Path,
    settings: StoreSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Count the words of the training text with noise, and write `words.json` and a ledger.

    The settings are those of a store: which text trains, the kind of tokenizer, epsilon, delta and
    the words per client. Each call costs its epsilon once more.
    """
    require(not out.exists(), "--out", str(out), "a folder that does not exist yet")
    require(
        settings.tokenizer in COUNTED_WITH_NOISE,
        "--tokenizer",
        settings.tokenizer,
        f"one of {', '.join(COUNTED_WITH_NOISE)}, which are fitted to words",
    )
    assert settings.vocabulary_epsilon is not None
    selection = word_selection(
        settings.vocabulary_epsilon, settings.vocabulary_delta, settings.vocabulary_words
    )
    words_of = word_finder(settings.tokenizer, settings.lowercase)
    texts = training_texts(gather_clients(documents), settings)
    found = select_words(map(words_of, texts), selection, os.urandom(16), progress)
    out.mkdir(parents=True, mode=0o700)
    write_vocabulary_ledger(out, private_origin(selection, len(found)))
    told = {
        "format": FORMAT,
        "kind": settings.tokenizer,
        "lowercase": settings.lowercase,
        "origin": private_origin(selection, len(found)),
        "words": [[word, count] for word, count in found],
    }
    write_atomically(out / WORDS, json.dumps(told, ensure_ascii=False).encode())
    return {"words": len(found), "file": str(out / WORDS), **_costs(selection)}


def _costs(selection: WordSelection) -> dict[str, float]:
    return {"epsilon": selection.epsilon, "delta": selection.delta}


def join_words(files: Sequence[Path], out: Path, vocabulary: int) -> Vocabulary:
    """Make a tokenizer from the words that nodes handed over, and write it into a new folder."""
    require(not out.exists(), "--out", str(out), "a folder that does not exist yet")
    told = [read_words(file) for file in files]
    kinds = {(facts["kind"], facts["lowercase"]) for facts in told}
    require(len(kinds) == 1, "words.json", len(kinds), "the same tokenizer and case at all nodes")
    sums: dict[str, float] = defaultdict(float)
    for facts in told:
        for word, count in facts["words"]:
            sums[word] += count
    if not sums:
        raise CorpusError(
            "no node has a word that enough of its clients share. Raise epsilon there, or bring a "
            "tokenizer.json made elsewhere."
        )
    counts = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    (kind, lowercase), origins = kinds.pop(), [facts["origin"] for facts in told]
    made = from_counts(counts, kind, vocabulary, lowercase)
    origin = {
        "kind": "private",
        **{name: max(origin[name] for origin in origins) for name in _ORIGIN},
        "noise_multiplier": min(origin["noise_multiplier"] for origin in origins),
        "words_per_client": max(origin["words_per_client"] for origin in origins),
        "words_passed": len(sums),
        "nodes": len(told),
    }
    write_origin(write_tokenizer(made, out), origin)
    return Vocabulary(made, origin)


def read_words(file: Path) -> dict[str, Any]:
    """Read a file that somebody handed over; it may hold anything."""
    try:
        if file.stat().st_size > MOST_FILE:
            raise ValueError(f"it is larger than {MOST_FILE >> 20} MiB")
        told = json.loads(file.read_bytes())
        _check(told)
        return dict(told)
    except OSError as error:
        raise CorpusError(f"{file} is not readable: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise CorpusError(f"{file} is not what fedlm node words writes: {reason}.") from None


def _check(told: Any) -> None:
    if not isinstance(told, dict) or told.keys() != _FACTS.keys():
        raise ValueError(f"expected exactly {', '.join(_FACTS)}")
    for name, kind in _FACTS.items():
        if type(told[name]) is not kind:
            raise ValueError(f"{name} has another type")
    if told["format"] != FORMAT or told["kind"] not in COUNTED_WITH_NOISE:
        raise ValueError(f"format {str(told['format'])[:20]}, kind {told['kind'][:20]!r}")
    origin = told["origin"]
    for name in (*_ORIGIN, "words_per_client"):
        if type(origin.get(name)) not in (int, float) or not 0 < origin[name] < math.inf:
            raise ValueError(f"origin.{name} is no positive number")
    if len(told["words"]) > MOST_WORDS:
        raise ValueError(f"more than {MOST_WORDS:,} words")
    for pair in told["words"]:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_count(*pair):
            raise ValueError("a word has no count")


def _is_count(word: Any, count: Any) -> bool:
    good = isinstance(word, str) and 0 < len(word) <= LONGEST_WORD and word.isprintable()
    return good and type(count) is float and 0 < count < 1e12
