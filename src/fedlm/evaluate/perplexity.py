"""Perplexity and accuracy on held-out rows.

In:       parameters, rows of tokens, and which tokens are special.
Out:      sums per row, and the figures made of them.
Promise:  perplexity is exp(nats / targets); PAD never counts; neither batches nor lanes nor the
          order in which rows are scored change anything.
Not here: which rows (`recipe/build.py` cuts them), per-client figures (`clients.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fedlm.core import tree
from fedlm.core.program_cache import kept_programs
from fedlm.core.types import PAD, Batch, Params, Precomputed, ScoreFn, SpecialTokens
from fedlm.evaluate.progress import Scored

# Nats per token from which on a perplexity counts as infinite.
MOST_NATS = 700.0
# Targets per device in a batch, by default; the fewer the larger a model is than so many
# parameters, so that a batch takes seconds, and progress is told as often.
TOKENS, LARGE = 2048, 8_000_000
FEW = 16  # rows per device where there are few
# From so many rows on they are sorted by length, and cut where that saves so much of all places.
FEWEST_SORTED, NARROW = 256, 0.1


class Sums(NamedTuple):
    """The sums behind the figures; each is an array over rows, or a number after `total_sums`."""

    nats: Any
    tokens: Any
    correct: Any
    words: Any  # targets that are neither OOV nor EOS
    correct_words: Any
    known_nats: Any  # nats of targets that are not OOV
    known: Any


def row_sums(score: ScoreFn, special: SpecialTokens, params: Params, batch: Batch) -> Sums:
    """Return the sums of each row."""
    rows = batch.tokens if isinstance(batch, Precomputed) else batch
    targets = rows[:, 1:]
    nats, right = score(params, batch)
    real = targets != PAD
    known = real if special.oov is None else real & (targets != special.oov)
    word = known & (targets != special.eos)

    def count(x: Array) -> Float[Array, " batch"]:
        return jnp.sum(x, axis=1, dtype=jnp.float32)

    return Sums(
        nats=count(jnp.where(real, nats, 0.0)),
        tokens=count(real),
        correct=count(right & real),
        words=count(word),
        correct_words=count(right & word),
        known_nats=count(jnp.where(known, nats, 0.0)),
        known=count(known),
    )


class Evaluator:
    """Score rows in equal batches, spread over this process's devices."""

    def __init__(
        self,
        score: ScoreFn,
        special: SpecialTokens,
        *,
        batch: int = 0,
        features: Callable[[np.ndarray], Any] | None = None,
        any_width: bool = False,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        """Score rows by `score`; `features` gives what frozen blocks make of rows.

        A batch has `batch` rows, or by default up to `TOKENS` targets per device. `any_width`: what
        `score` gives for a target does not depend on the places after it, so that rows of similar
        length may be scored together and cut where the longest of them ends.
        """
        self._features, self._any_width = features, any_width and features is None
        self._devices = tuple(devices or jax.local_devices())
        # Features are kept on disk by batch, so their batches have one size.
        self._wanted = batch or (0 if features is None else 32)
        mesh = Mesh(np.array(self._devices), ("rows",))
        self._rows, self._shared = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())
        self._sums = _program(score, special, self._devices)

    def __call__(self, params: Params, rows: Int[np.ndarray, "rows width"]) -> Sums:
        """Return the sums of every row, in the order of the rows, as float64 on the host."""
        params, scored = jax.device_put(params, self._shared), Scored(len(rows))
        parameters = tree.size(params)
        out = np.zeros((len(Sums._fields), len(rows)))
        waiting: tuple[np.ndarray, Sums] | None = None
        for numbers, width in self._batches(rows, parameters):
            block = rows[numbers, :width]
            short = self._size(len(rows), width, parameters) - len(block)
            block = np.pad(block, ((0, short), (0, 0)), constant_values=PAD)
            made = self._sums(params, jax.device_put(self._batch_of(block), self._rows))
            if waiting is not None:  # the devices have the next batch while this one is fetched
                scored.add(_put(out, *waiting))
            waiting = numbers, made
        if waiting is not None:
            scored.add(_put(out, *waiting))
        return Sums(*out)

    def _size(self, rows: int, width: int, parameters: int) -> int:
        """Return the rows of a batch, as many for each device; few where there are few rows."""
        lanes = len(self._devices)
        if self._wanted:
            return -(-self._wanted // lanes) * lanes
        targets = TOKENS * LARGE // max(LARGE, parameters)
        many = max(FEW if parameters <= LARGE else 1, targets // max(1, width - 1))
        many = many // 8 * 8 or many
        return lanes * (many if rows > 2 * lanes * FEW else min(FEW, many))

    def _batches(self, rows: np.ndarray, parameters: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the numbers of the rows of each batch, and the width to which they are cut."""
        full, every = rows.shape[1], np.arange(len(rows))
        if not self._any_width or len(rows) < FEWEST_SORTED:
            size = self._size(len(rows), full, parameters)
            yield from ((part, full) for part in _cut(every, size))
            return
        lengths = row_lengths(rows)
        ends = narrow_ends(lengths, full)
        for after, end in zip((0, *ends[:-1]), ends, strict=True):
            own = every[(lengths > after) & (lengths <= end) if after else lengths <= end]
            # The longest first: every device has rows of about one length at a time.
            own = own[np.argsort(-lengths[own], kind="stable")]
            size = self._size(len(rows), end, parameters)
            yield from ((part, end) for part in _cut(own, size))

    def _batch_of(self, rows: np.ndarray) -> Batch:
        tokens: Any = rows.astype(np.int32)
        return tokens if self._features is None else Precomputed(tokens, self._features(tokens))


def row_lengths(rows: Int[np.ndarray, "rows width"]) -> Int[np.ndarray, " rows"]:
    """Return how many places of each row come before its last token, that one included.

    >>> row_lengths(np.array([[1, 5, 6, -1], [1, -1, 7, -1], [-1, -1, -1, -1]])).tolist()
    [3, 3, 0]
    """
    real = rows != PAD
    last = rows.shape[1] - np.argmax(real[:, ::-1], axis=1)
    return np.where(real.any(axis=1), last, 0)


def narrow_ends(lengths: Int[np.ndarray, " rows"], full: int) -> tuple[int, ...]:
    """Return the widths to which rows are cut, rising, the full one last.

    A width is a program more to compile: a quarter, a half or three quarters of the full width are
    used only if they save a tenth of all places each.

    >>> narrow_ends(np.array([9, 9, 9, 9, 33]), 33), narrow_ends(np.array([33, 33, 33, 9]), 33)
    ((9, 17, 33), (17, 33))
    >>> narrow_ends(np.full(1000, 33), 33)
    (33,)
    """
    chosen = [full]
    for quarters in (2, 1, 3):
        end = 1 + -(-(full - 1) * quarters // 4)
        above = min(width for width in chosen if width > end) if end < full else end
        below = max((width for width in chosen if width < end), default=0)
        saved = np.count_nonzero((lengths > below) & (lengths <= end)) * (above - end)
        if saved >= NARROW * full * len(lengths):
            chosen.append(end)
    return tuple(sorted(set(chosen)))


def _cut(numbers: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))


def _put(out: np.ndarray, numbers: np.ndarray, made: Sums) -> int:
    """Write the sums of a batch to the places of its rows, and return how many they are."""
    for column, part in zip(out, made, strict=True):
        column[numbers] = np.asarray(part, np.float64)[: len(numbers)]
    return len(numbers)


@kept_programs  # evaluators of one process share it
def _program(
    score: ScoreFn, special: SpecialTokens, devices: tuple[jax.Device, ...]
) -> Callable[[Params, Batch], Sums]:
    """Return the compiled sums of rows that are spread over devices."""
    block = jax.shard_map(
        partial(row_sums, score, special),
        mesh=Mesh(np.array(devices), ("rows",)),
        in_specs=(P(), P("rows")),
        out_specs=P("rows"),
        check_vma=False,
    )
    return jax.jit(block)


def total_sums(sums: Sums) -> Sums:
    """Add the sums of all rows."""
    return Sums(*(float(np.sum(column)) for column in sums))


def perplexity_of(nats: float, tokens: float) -> float:
    """Return `exp(nats / tokens)`, infinity on overflow, or NaN without tokens."""
    if tokens <= 0:
        return math.nan
    return math.exp(nats / tokens) if nats / tokens < MOST_NATS else math.inf


def figures(sums: Sums) -> dict[str, float]:
    """Return the reported figures, by name."""
    s = total_sums(sums)
    return {
        "perplexity": perplexity_of(s.nats, s.tokens),
        "perplexity_known_words": perplexity_of(s.known_nats, s.known),
        "accuracy": s.correct / s.tokens if s.tokens else math.nan,
        "accuracy_known_words": s.correct_words / s.words if s.words else math.nan,
        "tokens": s.tokens,
    }


def bits_per_byte(sums: Sums, tokens: float, size: float) -> dict[str, float]:
    """Return the bits that a model needs per byte of a text, under that name; nothing if unknown.

    It is comparable between tokenizers and languages. `tokens` and `size` are of the whole text:
    bits per token are those of the rows that were scored, tokens per byte those of all text.
    Unknown tokens hide bytes, so that with them there is no figure.
    """
    s = total_sums(sums)
    if not size or not s.tokens or s.known != s.tokens:
        return {}
    return {"bits_per_byte": s.nats / s.tokens / math.log(2) * tokens / size}
