"""A tokenizer together with where it came from.

In:       a tokenizer: counted on a text, read from a file, taken from another store, or made of
          nobody's text.
Out:      a `Vocabulary`: the tokenizer, its origin as facts for `store.json`, and a way to write
          down what finding it cost the clients.
Promise:  no store is written without the origin of its tokenizer.
Not here: counting with noise (`privacy/vocabulary.py`), what an origin means for a privacy claim
          (the same file), the tokenizers themselves (`tokenizer.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlm.core.errors import CorpusError
from fedlm.corpus.tokenizer import TextTokenizer

Origin = dict[str, Any]
COUNTED: Origin = {"kind": "counted"}  # on the training text of the store, without noise
PUBLIC: Origin = {"kind": "public"}  # made of nobody's text: bytes, made-up words
KINDS = ("counted", "private", "public", "file", "like")


class Vocabulary(NamedTuple):
    """A tokenizer and where it came from."""

    tokenizer: TextTokenizer
    origin: Origin
    # Writes `ledger.jsonl` into the folder of a store; None: finding the vocabulary cost nothing.
    write_ledger: Callable[[Path], None] | None = None


class NoVocabularyError(CorpusError):
    """No word passed the threshold, which has cost the clients as much as if some had."""

    def __init__(self, message: str, write_ledger: Callable[[Path], None]) -> None:
        super().__init__(message)
        self.write_ledger = write_ledger  # writes `ledger.jsonl` into a folder


# Makes a vocabulary from the training text of each training client.
Counting = Callable[[Iterable[str]], Vocabulary]


def from_file(tokenizer: TextTokenizer, path: Path) -> Vocabulary:
    """Return a tokenizer that was read from a file, with the name and the hash of the file."""
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return Vocabulary(tokenizer, {"kind": "file", "name": Path(path).name, "sha256": digest})


def check_origin(origin: Any) -> Origin:
    """Return an origin read from a manifest, or raise `CorpusError`: a file may hold anything."""
    inner = origin.get("of") if isinstance(origin, dict) else None
    if not isinstance(origin, dict) or origin.get("kind") not in KINDS:
        raise CorpusError("tokenizer_from is not an origin")
    if origin["kind"] == "like" and (
        not isinstance(inner, dict) or inner.get("kind") not in KINDS or inner["kind"] == "like"
    ):
        raise CorpusError("tokenizer_from is not an origin")
    return origin


def weakest(origins: Sequence[Origin]) -> Origin:
    """Return the origin that says most about clients' text, for stores that are read as one."""

    def rank(origin: Origin) -> int:
        order = ("counted", "private", "file", "public")
        return order.index(origin["of"]["kind"] if origin["kind"] == "like" else origin["kind"])

    return min(origins, key=rank)
