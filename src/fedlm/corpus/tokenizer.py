"""Text to token numbers and back.

In:       text to fit on; lines to encode; numbers to decode.
Out:      a vocabulary whose first four entries are pad, bos, eos, oov; numbers; text.
Promise:  fitting the same text gives the same vocabulary; `bytes` and `bpe` represent any text.
Not here: which text (`split.py` decides what is training text); a unigram model, because the
          library's trainer sums in hash order and gives another vocabulary each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fedlm.core.errors import CorpusError
from fedlm.core.types import EOS, OOV, SPECIALS
from fedlm.corpus.split import LINE_END

Kind = Literal["words", "bpe", "bytes"]

# A word with inner apostrophes or hyphens, or one other mark.
WORD = r"[\p{L}\p{M}\p{N}_]+(?:['’\-][\p{L}\p{M}\p{N}_]+)*|[^\s\p{L}\p{M}\p{N}_]"


def fit(texts: Iterable[str], kind: Kind, vocabulary: int, lowercase: bool) -> Tokenizer:
    """A tokenizer of at most `vocabulary` entries, specials included."""
    tokenizer, trainer = _MAKERS[kind](vocabulary)
    tokenizer.normalizer = _normalizer(lowercase)
    if trainer is not None:
        tokenizer.train_from_iterator(_pieces(texts), trainer)
    if tokenizer.get_vocab_size() <= len(SPECIALS):
        raise CorpusError("no word was found in the training text: the vocabulary is empty.")
    return tokenizer


def from_words(words: Sequence[str], lowercase: bool) -> Tokenizer:
    """A tokenizer of exactly these words, numbered in their order after the specials."""
    vocab = {name: i for i, name in enumerate([*SPECIALS, *words])}
    tokenizer, _ = _words(len(vocab), vocab)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = _normalizer(lowercase)
    return tokenizer


def _normalizer(lowercase: bool) -> Any:
    steps: list[Any] = [normalizers.NFC()]
    return normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    for text in texts:
        yield text.split("\n")


def _words(vocabulary: int, vocab: dict[str, int] | None = None) -> tuple[Tokenizer, Any]:
    vocab = vocab or {name: i for i, name in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIALS[OOV]))
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


def encode(tokenizer: Tokenizer, text: str, dtype: Any) -> np.ndarray:
    """A client's text as one array: each line that is not blank, ended by EOS."""
    # A client that writes "<pad>" means five letters.
    tokenizer.encode_special_tokens = True
    lines = [line for line in LINE_END.split(text) if line.strip()]
    parts = []
    for coded in tokenizer.encode_batch_fast(lines, add_special_tokens=False):
        if coded.ids:
            parts += [coded.ids, [EOS]]
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The beginning of a text, whose last line is not at its end."""
    return [int(token) for token in encode(tokenizer, text, np.int64)[:-1]]


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Readable text; line ends where EOS stood, an out-of-vocabulary word as <oov>."""
    if tokenizer.decoder is None:
        words = [tokenizer.id_to_token(t) or "" for t in tokens]
        text = " ".join("\n" if t == EOS else w for t, w in zip(tokens, words, strict=True))
        return re.sub(r" ([.,;:!?%)])", r"\1", text)
    line_end = tokenizer.token_to_id("Ċ") or EOS  # the newline of the byte-level alphabet
    tokens = [line_end if t == EOS else t for t in tokens]
    return str(tokenizer.decode([t for t in tokens if t >= len(SPECIALS)]))
