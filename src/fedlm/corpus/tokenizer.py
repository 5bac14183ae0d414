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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fedlm.core.errors import CorpusError, library_errors
from fedlm.core.types import SpecialTokens
from fedlm.corpus.byte_pairs import learn_merges
from fedlm.corpus.pieces import pieces_of_line
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
        self._library, self._words = library, PieceWords(kind, lowercase)
        self._number = library.get_vocab()
        library.encode_special_tokens = True  # as `encode` does
        self.byte_pairs = kind == "bpe"

    def __missing__(self, piece: str) -> tuple[int, ...]:
        if len(self) >= MOST_PIECES:
            self.clear()
        self[piece] = made = tuple(self.tokens_of([piece])[0])
        return made

    def tokens_of(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each of many pieces."""
        if self.byte_pairs:
            coded = self._library.encode_batch_fast(list(pieces), add_special_tokens=False)
            return [line.ids for line in coded]
        number = self._number
        return [[number.get(word, OOV) for word in words] for words in self._words.of(pieces)]

    def tokens(self, line: str) -> list[int]:
        """Return the tokens of a line."""
        parts = pieces_of_line(line, self.byte_pairs)
        return list(itertools.chain.from_iterable(map(self.__getitem__, parts)))


class PieceWords:
    """Cuts pieces into the words that a tokenizer counts.

    For `words` they are the words of its vocabulary; for `bpe` they are the pieces of text within
    which it merges, written in its byte alphabet.
    """

    def __init__(self, kind: str, lowercase: bool) -> None:
        self._lowercase, self._of_words = lowercase, kind == "words"
        self._cut = _MAKERS[kind](len(SPECIALS))[0].pre_tokenizer
        self._normalizer = _normalizer(lowercase)

    def of(self, pieces: Iterable[str]) -> Iterator[list[str]]:
        """Yield the words of each piece."""
        for piece in pieces:
            if self._of_words and piece.isascii():
                folded = piece.lower() if self._lowercase else piece
                yield [folded] if folded.isalnum() else ASCII_WORD.findall(folded)
            else:
                found = self._cut.pre_tokenize_str(self._normalizer.normalize_str(piece))
                yield [word for word, _ in found]


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
    counts: Counter[str] = Counter()
    for text in texts if kind != "bytes" else ():
        for line in text.split("\n"):
            counts.update(pieces_of_line(line, kind == "bpe"))
    return fit_pieces(counts, kind, vocabulary, lowercase)


def fit_pieces(
    counts: Mapping[str, int], kind: str, vocabulary: int, lowercase: bool
) -> TextTokenizer:
    """Fit a tokenizer to the pieces of a text, each as often as its count says."""
    if kind == "bytes":
        tokenizer, _ = _bytes(vocabulary)
        tokenizer.normalizer = _normalizer(lowercase)
        return TextTokenizer(tokenizer, OWN)
    words = _word_counts(counts, kind, lowercase)
    if not words:
        raise CorpusError("no word was found in the training text: the vocabulary is empty.")
    if kind == "words":
        ordered = sorted(words, key=lambda word: (-words[word], word.encode()))
        return from_words(ordered[: vocabulary - len(SPECIALS)], lowercase)
    return _from_byte_words(words, vocabulary, lowercase)


def _word_counts(counts: Mapping[str, int], kind: str, lowercase: bool) -> Counter[str]:
    """Count the words of pieces.

    >>> sorted(_word_counts({"The": 1, "cat,": 1, "the": 1}, "words", True).items())
    [(',', 1), ('cat', 1), ('the', 2)]
    """
    words: Counter[str] = Counter()
    found = PieceWords(kind, lowercase).of(counts)
    for times, cut in zip(counts.values(), found, strict=True):
        for word in cut:
            words[word] += times
    return words


def _from_byte_words(words: Mapping[str, int], vocabulary: int, lowercase: bool) -> TextTokenizer:
    """Make a BPE tokenizer whose merges are learned from words in the byte alphabet."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    entries, merges = learn_merges(words, SPECIALS, alphabet, vocabulary)
    tokenizer, _ = _bpe(vocabulary)
    tokenizer.model = models.BPE(entries, merges)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = _normalizer(lowercase)
    return TextTokenizer(tokenizer, OWN)


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
    finder, known = PieceWords(kind, lowercase), dict[str, list[str]]()

    def words(text: str) -> set[str]:
        pieces: set[str] = set()
        for line in text.split("\n"):
            pieces.update(pieces_of_line(line, kind == "bpe"))
        if len(known) >= MOST_PIECES:
            known.clear()
        new = pieces.difference(known)
        known.update(zip(new, finder.of(new), strict=True))
        return set(itertools.chain.from_iterable(known[piece] for piece in pieces))

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
    times: Counter[str] = Counter()
    for word, count in counts:
        for part in word.split():  # whoever handed the words over: the byte alphabet has no blank
            times[part] += max(1, round(count))
    return _from_byte_words(times, vocabulary, lowercase)


def _normalizer(lowercase: bool) -> Any:
    steps: list[Any] = [normalizers.NFC()]
    return normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)


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
