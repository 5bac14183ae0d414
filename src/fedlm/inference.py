"""A trained model, asked.

In:       a finished run or a Hugging Face folder, a prompt.
Out:      the likeliest next words; words that complete what is being typed.
Promise:  a word is a word, however many tokens it has; programs are shared between prompts; typing
          costs a step of the model per new token, and going back costs none.
Not here: training (`training`), how a word is found (`evaluate/generate.py`).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import decoders, pre_tokenizers

from fedlm.core.documents import JsonObject
from fedlm.core.types import PAD, Params
from fedlm.corpus import tokenizer as tok
from fedlm.corpus import tokenizer_file
from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.evaluate.generate import LONGEST_WORD, Speaker, next_words, speaker
from fedlm.evaluate.keystrokes import SUGGESTIONS, Keystrokes, TypedWord, keystrokes
from fedlm.models import catalog
from fedlm.models.interop import huggingface
from fedlm.recipe.settings import Model, load
from fedlm.record import checkpoint
from fedlm.record.directory import RunDirectory

# SentencePiece's notation for a byte of a character that is not in the vocabulary.
LETTER_BYTE = re.compile("<0x[89A-F][0-9A-F]>")


def load_params(model: Model, vocabulary: int, weights: Path) -> Params:
    """Read the weights of a finished run."""
    architecture = catalog.NAMED[model.name].architecture
    like = catalog.shapes(architecture, catalog.dimensions(model, vocabulary))
    return checkpoint.from_bytes(weights.read_bytes(), like, str(weights))


def load_models(
    model: Model, vocabulary: int, directory: RunDirectory, names: Iterable[str]
) -> dict[str, Params]:
    """Read the models of a finished run by node; the model of a flat run has the empty name."""
    return {name: load_params(model, vocabulary, directory.weights_of(name)) for name in names}


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
) -> list[JsonObject]:
    """Return the likeliest next words after a prompt, with their probabilities."""
    return words_after(lambda capacity: speak(params, capacity), tokenizer, prompt, count)


def words_after(
    speaker_for: Callable[[int], Speaker], tokenizer: TextTokenizer, prompt: str, count: int = 5
) -> list[JsonObject]:
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


# ---- typing --------------------------------------------------------------------------------

TYPED = re.compile(r"[\w'’\-]*\Z")  # the beginning of a word at the end of a text
CAPACITY = 256  # tokens that a model with a cache looks back on
STATE_BYTES = 64 << 20  # of states to go back to without computing again
NOTHING = np.zeros(0, np.float32)
SEARCH_STEPS = 24  # of the model, for one set of suggestions


class _Step(NamedTuple):
    token: int
    state: Any
    logits: np.ndarray


class Typist:
    """A model that suggests words while a text is being typed.

    It remembers the state after the tokens of the last text. The next text, a key longer or
    shorter, costs one step for each token that is new: none within a word of a vocabulary of words.
    """

    def __init__(self, params: Params, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._model = speak(params, CAPACITY)
        self._words = _Pieces(tokenizer)
        self._path: list[_Step] = []

    def goes_on(self, token: int) -> bool:
        """Return whether a token continues a word."""
        return self._words.goes_on(token)

    def suggest(self, text: str, count: int = 3) -> list[tuple[str, float]]:
        """Return the likeliest words that begin as the text ends, with their probabilities."""
        typed = TYPED.search(text)
        assert typed is not None  # it matches nothing, too
        begun = typed.group().lstrip("'’-")
        before = text[: len(text) - len(begun)]
        return self.complete(self._context(before), begun, count, text_before=before)

    def _context(self, before: str) -> list[int]:
        """Return the tokens of what stands before the word that is being typed."""
        lines = before.rstrip(" ")
        tokens = tok.encode(self.tokenizer, lines, np.int64)
        # The last line goes on, unless it was ended.
        return [int(t) for t in (tokens if lines.endswith("\n") else tokens[:-1])]

    def complete(
        self, context: Sequence[int], begun: str, count: int, *, text_before: str = " "
    ) -> list[tuple[str, float]]:
        """Return the likeliest words after a context that begin with what was typed of them."""
        last = self._after([self.tokenizer.special.bos, *context])
        library = self.tokenizer.library
        if begun and library.normalizer is not None:
            begun = library.normalizer.normalize_str(begun)
        if self._words.whole:
            return self._words.best(last.logits, begun, count)
        spaced = not text_before or text_before[-1].isspace()
        return self._search(last, self._words.target(begun, spaced, not text_before), count)

    def _after(self, tokens: Sequence[int]) -> _Step:
        """Return the state after tokens, going on from the longest beginning that is known."""
        tokens = tokens[-(CAPACITY // 2) :] if len(tokens) > CAPACITY - LONGEST_WORD else tokens
        same = 0
        for step, token in zip(self._path, tokens, strict=False):
            if step.token != token:
                break
            same += 1
        if same and self._path[same - 1].state is None:
            same = 0  # too far back: from the start
        del self._path[same:]
        for token in tokens[same:]:
            state = self._path[-1].state if self._path else self._model.start()
            state, logits = self._model.advance(state, token)
            self._path.append(_Step(token, state, np.asarray(logits)))
            kept = self._kept(self._path[-1])
            if len(self._path) > kept:
                self._path[-kept - 1] = self._path[-kept - 1]._replace(state=None, logits=NOTHING)
        return self._path[-1]

    @staticmethod
    def _kept(step: _Step) -> int:
        """Return how many states fit into the memory that a typist may use."""
        size = step.logits.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(step.state))
        return max(2, STATE_BYTES // size)

    def _search(self, last: _Step, target: str, count: int) -> list[tuple[str, float]]:
        """Return words of several tokens, found by following the likeliest beginnings first."""
        found: dict[str, float] = {}
        order = itertools.count()
        steps = SEARCH_STEPS
        # Beginnings of words: what they cost in nats, their spelling, the step before, the token.
        open_: list[tuple[float, int, str, _Step, int]] = []

        def expand(nats: float, spelling: str, at: _Step) -> None:
            for token, cost in self._words.next(at.logits, target[len(spelling) :], count):
                piece = self._words.pieces[token]
                heapq.heappush(open_, (nats + cost, next(order), spelling + piece, at, token))

        expand(0.0, "", last)
        while open_ and len(found) < count and steps > 0:
            nats, _, spelling, before, token = heapq.heappop(open_)
            state, logits = self._model.advance(before.state, token)
            steps -= 1
            here = _Step(token, state, np.asarray(logits))
            if not spelling.startswith(target):
                expand(nats, spelling, here)
                continue
            for more, cost in self._finish(here):
                spelling, nats, steps = spelling + self._words.pieces[more], nats + cost, steps - 1
            word = self._words.text(spelling)
            if any(letter.isalnum() for letter in word):
                found[word] = max(found.get(word, 0.0), float(np.exp(-nats)))
        return sorted(found.items(), key=lambda pair: -pair[1])

    def _finish(self, at: _Step) -> Iterator[tuple[int, float]]:
        """Yield the tokens that go on with a word, the likeliest each time."""
        for _ in range(LONGEST_WORD):
            token = int(np.argmax(at.logits))
            if not self._words.goes_on(token):
                return
            yield token, float(_log_sum(at.logits) - at.logits[token])
            state, logits = self._model.advance(at.state, token)
            at = _Step(token, state, np.asarray(logits))


MOST_WORDS = 2_000  # whose keys are counted
CLOSING = frozenset(".,;:!?%)")  # marks before which nobody types a blank


def keystrokes_on(params: Params, tokenizer: TextTokenizer, rows: np.ndarray) -> JsonObject:
    """Count the keys that three suggestions save on rows of held-out text, at most 2,000 words.

    A word outside the vocabulary, which a store does not keep, counts as five letters typed in
    full; the end of a line is one key.
    """
    typist, total = Typist(params, tokenizer), Keystrokes()
    every = max(1, len(rows) * int(np.mean((rows != PAD).sum(1))) // MOST_WORDS) if len(rows) else 1
    for row in rows[::every]:
        tokens = [int(t) for t in row if t != PAD]
        begin = tokens[0] == tokenizer.special.bos
        words = list(typed_words(typist, tokens[begin:]))
        starts = [start for start, _ in words]

        def suggest(n: int, typed: str, row: list[int] = tokens[begin:], at: Any = starts) -> Any:
            found = typist.complete(row[: at[n]], typed, SUGGESTIONS)
            return [word for word, _ in found]

        found = keystrokes((word for _, word in words), suggest)
        total = Keystrokes(*(a + b for a, b in zip(total, found, strict=True)))
    return {"saved": total.saved, **total._asdict()}


def typed_words(typist: Typist, tokens: Sequence[int]) -> Iterator[tuple[int, TypedWord]]:
    """Yield the words and marks of tokens as somebody types them, each with its first token."""
    tokenizer, special = typist.tokenizer, typist.tokenizer.special
    starts = [n for n, t in enumerate(tokens) if n == 0 or not typist.goes_on(t)]
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        ends_line = end == len(tokens) or tokens[end] == special.eos
        if tokens[start] == special.eos:
            yield start, TypedWord("\n", False, False)
            continue
        text = tok.decode(tokenizer, tokens[start:end]).strip()
        following = "" if ends_line else tok.decode(tokenizer, tokens[end : end + 1]).strip()
        known = special.oov not in tokens[start:end] and any(c.isalnum() for c in text)
        yield start, TypedWord(text, not ends_line and following[:1] not in CLOSING, known)


def _log_sum(logits: np.ndarray) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits - top).sum()))


class _Pieces:
    """The spellings of a vocabulary, in order, so that those with a beginning are found at once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        library, size = tokenizer.library, tokenizer.vocabulary
        self.goes_on = _goes_on(tokenizer)
        self.whole = library.decoder is None  # a token is a word
        self.byte_level = isinstance(library.decoder, decoders.ByteLevel)
        reserved = frozenset(tokenizer.special.reserved)
        self.pieces = ["" if t in reserved else library.id_to_token(t) or "" for t in range(size)]
        self.mark = "" if self.whole else self._mark()
        usable = [t for t, piece in enumerate(self.pieces) if self._offered(piece)]
        ordered = sorted((self.pieces[t], t) for t in usable)
        self._spellings = [piece for piece, _ in ordered]
        self._tokens = np.asarray([t for _, t in ordered], np.int64)
        self._prefix_space = not self.byte_level or bool(
            getattr(library.pre_tokenizer, "add_prefix_space", True)
        )

    def _mark(self) -> str:
        """Return the sign with which the first token of a word begins."""
        for mark in ("Ġ", "▁"):
            if any(piece.startswith(mark) for piece in self.pieces):
                return mark
        return ""

    def _offered(self, piece: str) -> bool:
        return any(c.isalnum() for c in piece) if self.whole else bool(piece)

    def _range(self, begun: str) -> slice:
        low = bisect.bisect_left(self._spellings, begun)
        high = bisect.bisect_left(self._spellings, begun + chr(0x10FFFF))
        return slice(low, high)

    def best(self, logits: np.ndarray, begun: str, count: int) -> list[tuple[str, float]]:
        """Return the likeliest words of a vocabulary of words with a beginning."""
        tokens = self._tokens[self._range(begun)]
        if not len(tokens):
            return []
        values = logits[tokens]
        few = min(count, len(tokens))
        top = np.argpartition(-values, few - 1)[:few]
        top = top[np.lexsort((tokens[top], -values[top]))]
        total = _log_sum(logits)
        return [(self.pieces[tokens[n]], float(np.exp(values[n] - total))) for n in top]

    def target(self, begun: str, spaced: bool, first: bool) -> str:
        """Return what the spelling of a word must begin with."""
        marked = spaced and (not first or self._prefix_space)
        if self.byte_level:
            cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            begun = "".join(piece for piece, _ in cut.pre_tokenize_str(begun)) if begun else ""
        return (self.mark if marked else "") + begun

    def next(self, logits: np.ndarray, rest: str, count: int) -> list[tuple[int, float]]:
        """Return tokens that spell the rest of a target, or a part of it, and their nats."""
        begun = self._tokens[self._range(rest)]
        parts = [
            int(self._tokens[at])
            for length in range(1, len(rest))
            if (at := bisect.bisect_left(self._spellings, rest[:length])) < len(self._spellings)
            and self._spellings[at] == rest[:length]
        ]
        tokens = np.concatenate([begun, np.asarray(parts, np.int64)])
        few = min(2 * count, len(tokens))
        if not few:
            return []
        top = tokens[np.argpartition(-logits[tokens], few - 1)[:few]]
        total = _log_sum(logits)
        return [(int(t), float(total - logits[t])) for t in top]

    def text(self, spelling: str) -> str:
        """Return a spelling as people read it."""
        if not self.byte_level:
            return spelling.replace(self.mark, " ").replace("##", "").strip(" ")
        return decoders.ByteLevel().decode([spelling]).strip(" ")
