"""Perplexity and accuracy on held-out rows.

In:       parameters, rows of tokens, and which tokens are special.
Out:      sums per row, and the figures made of them.
Promise:  perplexity is exp(nats / targets); PAD never counts; batching changes nothing.
Not here: which rows (`recipe/build.py` cuts them), per-client figures (`clients.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fedlm.core.program_cache import kept_programs
from fedlm.core.types import PAD, Batch, Params, Precomputed, ScoreFn, SpecialTokens

# Nats per token from which on a perplexity counts as infinite.
MOST_NATS = 700.0


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
    """Score rows in equal batches, spread over this process's devices, with one program."""

    def __init__(
        self,
        score: ScoreFn,
        special: SpecialTokens,
        *,
        batch: int = 32,
        features: Callable[[np.ndarray], Any] | None = None,
    ) -> None:
        """Score rows by `score`; `features` gives what frozen blocks make of rows."""
        self._features = features
        devices = tuple(jax.local_devices())
        self._batch = -(-batch // len(devices)) * len(devices)
        mesh = Mesh(np.array(devices), ("rows",))
        self._rows, self._shared = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())
        self._sums = _program(score, special, devices)

    def __call__(self, params: Params, rows: Int[np.ndarray, "rows width"]) -> Sums:
        """Return the sums of every row, as float64 on the host."""
        params = jax.device_put(params, self._shared)
        parts = []
        for at in range(0, len(rows), self._batch):
            block = rows[at : at + self._batch]
            short = self._batch - len(block)
            block = np.pad(block, ((0, short), (0, 0)), constant_values=PAD)
            parts.append(self._sums(params, jax.device_put(self._batch_of(block), self._rows)))
        if not parts:
            return Sums(*(np.zeros(0) for _ in Sums._fields))
        joined = [
            np.concatenate([np.asarray(p, np.float64) for p in f]) for f in zip(*parts, strict=True)
        ]
        return Sums(*(column[: len(rows)] for column in joined))

    def _batch_of(self, rows: np.ndarray) -> Batch:
        tokens: Any = rows.astype(np.int32)
        return tokens if self._features is None else Precomputed(tokens, self._features(tokens))


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
