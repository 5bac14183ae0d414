"""Tokenizers: from text to token numbers and back.

In:       text to fit on, or counted words; lines to encode; numbers to decode.
Out:      a `TextTokenizer`: a vocabulary and its special tokens; numbers; text.
Promise:  fitting the same text gives the same vocabulary, whose first four entries are special;
          `bytes` and `bpe` represent any text; a client's text never becomes a special token.
Not here: the choice of training text (`split.py`); tokenizers made elsewhere
          (`tokenizer_file.py`); a unigram model, because the library's trainer sums in hash order
          and gives another vocabulary each time.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fedlm.core.errors import CorpusError, library_errors
from fedlm.core.types import SpecialTokens
from fedlm.corpus.split import lines_of

# The first entries of every vocabulary that is fitted here. No text and no row holds <pad>, which
# stays so that words keep their numbers.
SPECIALS = ("<pad>", "<bos>", "<eos>", "<oov>")
KINDS = ("words", "bpe", "bytes")
FILE = "file"  # the kind that a store records for a tokenizer made elsewhere
OWN = SpecialTokens(bos=1, eos=2, oov=3, reserved=(0, 1, 2, 3))

# A word, which may have inner apostrophes or hyphens, or one other mark.
WORD = r"[\p{L}\p{M}\p{N}_]+(?:['’\-][\p{L}\p{M}\p{N}_]+)*|[^\s\p{L}\p{M}\p{N}_]"
# The same in text of ASCII alone, for Python, which cuts many short pieces faster.
ASCII_WORD = re.compile(r"[A-Za-z0-9_]+(?:['\-][A-Za-z0-9_]+)*|[^\sA-Za-z0-9_]", re.ASCII)
MOST_PIECES = 1 << 18  # that are known at a time: about 50 MB
OOV = SPECIALS.index("<oov>")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of the `tokenizers` library, and its special tokens."""

    library: Tokenizer
    special: SpecialTokens

    @cached_property
    def vocabulary(self) -> int:
        """The largest token number plus one; the numbers may have gaps."""
        return max(self.library.get_vocab().values(), default=-1) + 1

    @cached_property
    def pieces(self) -> Pieces | None:
        """The tokens of pieces between blanks; None if a token may reach over a blank.

        Words and BPE as they are fitted here never do, and case and composition of a letter do not
        depend on what is beyond a blank. So the tokens of a line are those of its pieces.
        """
        told, found = json.loads(self.library.to_str()), None
        for kind, lowercase in itertools.product(("words", "bpe"), (True, False)):
            own = _MAKERS[kind](len(SPECIALS))[0]
            own.add_special_tokens(list(SPECIALS))
            own.normalizer = _normalizer(lowercase)
            if _without_words(told) == _without_words(json.loads(own.to_str())):
                found = Pieces(self.library, kind, lowercase)
        return found


def _without_words(told: dict[str, Any]) -> dict[str, Any]:
    """Return the file of a tokenizer without the words of its vocabulary."""
    model = {k: v for k, v in told["model"].items() if k not in ("vocab", "merges")}
    return {**told, "model": model, "added_tokens": [t["content"] for t in told["added_tokens"]]}


class Pieces(dict[str, tuple[int, ...]]):
    """The tokens of pieces of text without a blank, found when a piece is first met."""

    def __init__(self, library: Tokenizer, kind: str, lowercase: bool) -> None:
        self._library, self._kind, self._lowercase = library, kind, lowercase
        self._number = library.get_vocab()

    def __missing__(self, piece: str) -> tuple[int, ...]:
        if len(self) >= MOST_PIECES:
            self.clear()
        if self._kind == "words" and piece.isascii():
            words = ASCII_WORD.findall(piece.lower() if self._lowercase else piece)
            ids = [self._number.get(word, OOV) for word in words]
        else:
            ids = self._library.encode(piece, add_special_tokens=False).ids
        self[piece] = made = tuple(ids)
        return made

    def tokens(self, line: str) -> list[int]:
        """Return the tokens of a line."""
        parts = line.split(" ")
        # BPE puts one blank before each piece, and makes tokens of any others.
        if self._kind == "bpe" and parts != line.split():
            ids: list[int] = self._library.encode(line, add_special_tokens=False).ids
            return ids
        return list(itertools.chain.from_iterable(map(self.__getitem__, parts)))


def kind_of(setting: str) -> str:
    """Return the kind of tokenizer that a setting asks for; the path of a file has the kind `file`.

    >>> kind_of("bpe"), kind_of("gpt2/tokenizer.json")
    ('bpe', 'file')
    """
    return FILE if setting.endswith(".json") else setting


def token_dtype(vocabulary: int) -> Any:
    """Choose the narrowest unsigned integer that holds every token.

    >>> token_dtype(65_536).__name__, token_dtype(65_537).__name__
    ('uint16', 'uint32')
    """
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def fit(texts: Iterable[str], kind: str, vocabulary: int, lowercase: bool) -> TextTokenizer:
    """Fit a `words`, `bpe` or `bytes` tokenizer of at most `vocabulary` entries with specials."""
    if kind == "words":
        counts = word_counts(texts, lowercase)
        ordered = sorted(counts, key=lambda word: (-counts[word], word.encode()))
        if not ordered:
            raise CorpusError("no word was found in the training text: the vocabulary is empty.")
        return from_words(ordered[: vocabulary - len(SPECIALS)], lowercase)
    tokenizer, trainer = _MAKERS[kind](vocabulary)
    tokenizer.normalizer = _normalizer(lowercase)
    if trainer is not None:
        tokenizer.train_from_iterator(_pieces(texts), trainer)
    if tokenizer.get_vocab_size() <= len(SPECIALS):
        raise CorpusError("no word was found in the training text: the vocabulary is empty.")
    return TextTokenizer(tokenizer, OWN)


def word_counts(texts: Iterable[str], lowercase: bool) -> Counter[str]:
    """Count the words of texts: pieces between blanks first, then the words of each piece once.

    >>> sorted(word_counts(["The cat, the mat"], True).items())
    [(',', 1), ('cat', 1), ('mat', 1), ('the', 2)]
    """
    pieces: Counter[str] = Counter()
    for text in texts:
        pieces.update(text.replace("\n", " ").split(" "))
    tokenizer, normalizer = _words(len(SPECIALS))[0], _normalizer(lowercase)
    cut = tokenizer.pre_tokenizer
    words: Counter[str] = Counter()
    for piece, times in pieces.items():
        if piece.isascii():
            found = ASCII_WORD.findall(piece.lower() if lowercase else piece)
        else:
            found = [word for word, _ in cut.pre_tokenize_str(normalizer.normalize_str(piece))]
        for word in found:
            words[word] += times
    return words


def from_words(words: Sequence[str], lowercase: bool) -> TextTokenizer:
    """Make a tokenizer of exactly these words, numbered in their order after the specials."""
    vocab = {name: i for i, name in enumerate([*SPECIALS, *words])}
    tokenizer, _ = _words(len(vocab), vocab)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = _normalizer(lowercase)
    return TextTokenizer(tokenizer, OWN)


def word_finder(kind: str, lowercase: bool) -> Callable[[str], set[str]]:
    """Return a function that lists the distinct words of a text.

    For `words` they are the words that the tokenizer would count; for `bpe` they are the pieces of
    text within which it merges, written in its byte alphabet.

    >>> sorted(word_finder("words", True)("The cat\\nthe mat"))
    ['cat', 'mat', 'the']
    """
    tokenizer, _ = _MAKERS[kind](len(SPECIALS))
    normalizer, cut = _normalizer(lowercase), tokenizer.pre_tokenizer

    def words(text: str) -> set[str]:
        found: set[str] = set()
        for line in text.split("\n"):
            found.update(word for word, _ in cut.pre_tokenize_str(normalizer.normalize_str(line)))
        return found

    return words


def from_counts(
    counts: Sequence[tuple[str, float]], kind: str, vocabulary: int, lowercase: bool
) -> TextTokenizer:
    """Make a tokenizer from words of `word_finder` and their counts, and from nothing else.

    `words` takes the first words, in their order. `bpe` learns its merges from the words, each as
    often as its count says; its alphabet is that of all bytes.
    """
    if kind == "words":
        return from_words([word for word, _ in counts[: vocabulary - len(SPECIALS)]], lowercase)
    tokenizer, trainer = _MAKERS[kind](vocabulary)
    tokenizer.normalizer = _normalizer(lowercase)
    usual = tokenizer.pre_tokenizer
    # The words are cut and written in the byte alphabet already, which has no blank.
    tokenizer.normalizer, folded = normalizers.Sequence([]), tokenizer.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_repeated(counts), trainer)
    tokenizer.normalizer, tokenizer.pre_tokenizer = folded, usual
    return TextTokenizer(tokenizer, OWN)


def _repeated(counts: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Yield every word as often as its count says, in pieces of bounded size."""
    for word, count in counts:
        left = max(1, round(count))
        while left:
            now = min(left, 1000)
            left -= now
            yield " ".join([word] * now)


def _normalizer(lowercase: bool) -> Any:
    steps: list[Any] = [normalizers.NFC()]
    return normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    for text in texts:
        yield text.split("\n")


def _words(vocabulary: int, vocab: dict[str, int] | None = None) -> tuple[Tokenizer, Any]:
    vocab = vocab or {name: i for i, name in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<oov>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIALS), show_progress=False
    )
    return tokenizer, trainer


def _bpe(vocabulary: int) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return tokenizer, trainer


def _bytes(vocabulary: int) -> tuple[Tokenizer, Any]:
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, None


_MAKERS = {"words": _words, "bpe": _bpe, "bytes": _bytes}


def encode(tokenizer: TextTokenizer, text: str, dtype: DTypeLike) -> np.ndarray:
    """Encode a client's text as one array, in which every line that is not blank ends with EOS."""
    library, special = tokenizer.library, tokenizer.special
    # A client that writes "<pad>" means five characters; if the tokenizer still makes a special
    # token of them, that token is left out.
    library.encode_special_tokens = True
    barred = frozenset(special.reserved) - {special.oov}
    lines = lines_of(text)
    found: Iterable[list[int]]
    with library_errors("the tokenizer cannot encode this text", "Take another tokenizer."):
        if tokenizer.pieces is not None:
            found = list(map(tokenizer.pieces.tokens, lines))
        else:
            coded = library.encode_batch_fast(lines, add_special_tokens=False)
            found = (line.ids for line in coded)
    out: list[int] = []
    for ids in found:
        if not barred.isdisjoint(ids):
            ids = [token for token in ids if token not in barred]
        if ids:
            out += ids
            out.append(special.eos)
    return np.array(out, dtype)


def encode_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Encode the beginning of a text without the last EOS, because its last line goes on."""
    return [int(token) for token in encode(tokenizer, text, np.int64)[:-1]]


def decode(tokenizer: TextTokenizer, tokens: Sequence[int]) -> str:
    """Decode tokens to readable text, with a line end for EOS and the name of the OOV token."""
    library, special = tokenizer.library, tokenizer.special
    hidden = frozenset(special.reserved) - {special.eos, special.oov}
    tokens = [token for token in tokens if token not in hidden]
    if library.decoder is None:
        words = ("\n" if t == special.eos else library.id_to_token(t) or "" for t in tokens)
        return re.sub(r" ([.,;:!?%)])", r"\1", " ".join(words))
    lines: list[list[int]] = [[]]
    for token in tokens:
        if token == special.eos:
            lines.append([])
        else:
            lines[-1].append(token)
    return "\n".join(library.decode(line, skip_special_tokens=False) for line in lines)
