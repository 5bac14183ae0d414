"""A trained model, asked.

In:       a finished run or a Hugging Face folder, a prompt.
Out:      the likeliest next words.
Promise:  a word is a word, however many tokens it has; programs are shared between prompts.
Not here: training (`training.py`), how a word is found (`evaluate/generate.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import decoders

from fedlm.core.types import Params
from fedlm.corpus import tokenizer as tok
from fedlm.corpus import tokenizer_file
from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.evaluate.generate import LONGEST_WORD, Speaker, next_words, speaker
from fedlm.models import catalog
from fedlm.models.interop import huggingface
from fedlm.recipe.parts import dimensions
from fedlm.recipe.settings import Model, load
from fedlm.record import checkpoint
from fedlm.record.directory import RunDirectory

# SentencePiece's notation for a byte of a character that is not in the vocabulary.
LETTER_BYTE = re.compile("<0x[89A-F][0-9A-F]>")


def load_params(model: Model, vocabulary: int, weights: Path) -> Params:
    """Read the weights of a finished run."""
    architecture = catalog.NAMED[model.name].architecture
    like = catalog.shapes(architecture, dimensions(model, vocabulary))
    return checkpoint.from_bytes(weights.read_bytes(), like, str(weights))


def open_model(path: Path, node: str = "", *, best: bool = False) -> tuple[Params, TextTokenizer]:
    """Read the model and the tokenizer of a finished run, or of a Hugging Face folder.

    Of a run: the model of a node where one is named, or the best where it is asked for.
    """
    if (path / huggingface.CONFIG).is_file() and not (path / "recipe.toml").is_file():
        sizes = catalog.Dimensions(**huggingface.read_base(path).sizes)
        tokenizer = tokenizer_file.load_tokenizer(path / "tokenizer.json")
        return huggingface.load(path, sizes), tokenizer
    directory = RunDirectory.existing(path).of_node(node)
    weights = directory.weights_to_use(best=best)
    tokenizer = tokenizer_file.load_tokenizer(directory.tokenizer)
    model = load(directory.recipe).model
    return load_params(model, tokenizer.vocabulary, weights), tokenizer


def speak(params: Params, capacity: int) -> Speaker:
    """Return the model as a predictor of the next token, for up to `capacity` tokens."""
    return speaker(params, lambda batch: params.start(batch, capacity), catalog.advance)


def room_for(tokens: Sequence[int], further: int = 0) -> int:
    """Return the capacity in tokens for a prompt, a power of two so that programs are shared."""
    return 1 << (len(tokens) + further + LONGEST_WORD).bit_length()


def predict(
    params: Params, tokenizer: TextTokenizer, prompt: str, count: int = 5
) -> list[dict[str, Any]]:
    """Return the likeliest next words after a prompt, with their probabilities."""
    return words_after(lambda capacity: speak(params, capacity), tokenizer, prompt, count)


def words_after(
    speaker_for: Callable[[int], Speaker], tokenizer: TextTokenizer, prompt: str, count: int = 5
) -> list[dict[str, Any]]:
    """Return the likeliest next words by a predictor that is made for a number of tokens."""
    tokens = tok.encode_prompt(tokenizer, prompt)
    model, special = speaker_for(room_for(tokens)), tokenizer.special
    found = next_words(model, tokens, count, special, _goes_on(tokenizer))
    return [
        {"word": tok.decode(tokenizer, word).strip(), "probability": chance}
        for word, chance in found
    ]


def _goes_on(tokenizer: TextTokenizer) -> Callable[[int], bool]:
    """Return a function that tells whether a token continues a word.

    Most subword tokenizers mark the first token of a word with a blank.
    """
    library, reserved = tokenizer.library, frozenset(tokenizer.special.reserved)
    if library.decoder is None:
        return lambda token: False
    marked = library.decoder.prefix if isinstance(library.decoder, decoders.WordPiece) else None

    def goes_on(token: int) -> bool:
        piece = library.id_to_token(token) or ""
        if marked is not None:
            return piece.startswith(marked)
        letters = piece.isalpha() or LETTER_BYTE.fullmatch(piece) is not None
        return letters and token not in reserved and not piece.startswith(("Ġ", "▁"))

    return goes_on
