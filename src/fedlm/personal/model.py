"""A member's own model, as it is asked: one model or two, perhaps with a cache of its words.

In:       parameters, a share of a second model's logits, a cache and its share.
Out:      nats of targets, next-token logits one token at a time, files.
Promise:  token by token it gives the chances that rows are scored by; what is saved is loaded
          equal.
Not here: how a member finds it (`ways.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.types import PAD, Params, PyTree
from fedlm.evaluate.generate import Speaker
from fedlm.inference import load_params, speak
from fedlm.models import catalog
from fedlm.personal.cache import WordCache, cache_from
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import dumps

FACTS, SECOND, CACHE = "personal.json", "second.safetensors", "cache.safetensors"
MOST_CACHE_BYTES = 1 << 30
ROWS = 16  # scored at once: all logits of so many rows are in memory

Nats = Float[np.ndarray, "rows targets"]
Rows = Int[np.ndarray, "rows width"]


@dataclass(frozen=True)
class Personal:
    """What one member predicts with."""

    way: str
    params: Params
    second: Params | None = None  # a model whose logits are mixed in
    share: float = 0.0  # of the second model's logits
    cache: WordCache | None = None
    cache_share: float = 0.0  # of the cache's chances
    note: str = ""  # how it was made, in words

    def nats(self, rows: Rows, scorer: Scorer) -> Nats:
        """Return the nats of every target; zero where a target is PAD."""
        if self.second is None:
            found = scorer.nats(self.params, rows)
        else:
            found = scorer.mixed(self.params, self.second, rows, [self.share])[0]
        if self.cache is None:
            return found
        return with_cache(found, self.cache.chances(rows), self.cache_share, rows)

    def speaker(self, capacity: int) -> Speaker:
        """Return the model as a predictor of the next token, for up to `capacity` tokens."""
        parts = [speak(p, capacity) for p in (self.params, self.second) if p is not None]

        def advance(state: PyTree, token: int) -> tuple[PyTree, Array]:
            both = [part.advance(s, token) for part, s in zip(parts, state, strict=True)]
            logits = both[0][1]
            if len(both) > 1:
                logits = (1 - self.share) * logits + self.share * both[1][1]
            if self.cache is not None:
                own = jnp.asarray(self.cache.next(token), logits.dtype)
                own = jnp.pad(own, (0, logits.shape[0] - own.shape[0]))
                chances = (1 - self.cache_share) * jax.nn.softmax(logits) + self.cache_share * own
                logits = jnp.log(jnp.maximum(chances, 1e-30))
            return tuple(s for s, _ in both), logits

        return Speaker(lambda: tuple(part.start() for part in parts), advance)


def with_cache(nats: Nats, chances: Nats, share: float, rows: Rows) -> Nats:
    """Return the nats of a mixture of a model's chances and a cache's."""
    mixed = (1 - share) * np.exp(-nats) + share * chances
    return np.where(rows[:, 1:] != PAD, -np.log(np.maximum(mixed, 1e-300)), 0.0)


class Scorer:
    """Nats of targets under models of one shape, with one compiled program for all of them."""

    @cached_property
    def _nats(self) -> Callable[..., Array]:
        return jax.jit(lambda params, rows: catalog.score(params, rows)[0])

    @cached_property
    def _mixed(self) -> Callable[..., Array]:
        def of(first: Params, second: Params, rows: Array, shares: Array) -> Array:
            inputs = jnp.maximum(rows[:, :-1], 0)
            targets = jnp.maximum(rows[:, 1:], 0)[..., None]
            one, two = (catalog.logits(params, inputs) for params in (first, second))

            def at(share: Array) -> Array:
                logs = jax.nn.log_softmax((1 - share) * one + share * two)
                return -jnp.take_along_axis(logs, targets, -1)[..., 0]

            return jax.lax.map(at, shares)

        return jax.jit(of)

    def nats(self, params: Params, rows: Rows) -> Nats:
        """Return the nats of every target; zero where a target is PAD."""
        found = [np.asarray(self._nats(params, block)) for block, _ in _blocks(rows)]
        return self._joined(found, rows, 0)

    def mixed(self, first: Params, second: Params, rows: Rows, shares: list[float]) -> list[Nats]:
        """Return the nats under a mixture of two models' logits, for each share of the second."""
        at = jnp.asarray(shares, jnp.float32)
        found = [np.asarray(self._mixed(first, second, block, at)) for block, _ in _blocks(rows)]
        return list(self._joined(found, rows, 1))

    def _joined(self, found: list[np.ndarray], rows: Rows, axis: int) -> np.ndarray:
        whole = np.concatenate(found, axis=axis).astype(np.float64)
        whole = whole[: len(rows)] if axis == 0 else whole[:, : len(rows)]
        return np.where(rows[:, 1:] != PAD, whole, 0.0)


def _blocks(rows: Rows) -> list[tuple[Array, int]]:
    blocks = []
    for at in range(0, max(1, len(rows)), ROWS):
        block = rows[at : at + ROWS]
        padded = np.pad(block, ((0, ROWS - len(block)), (0, 0)), constant_values=PAD)
        blocks.append((jnp.asarray(padded, jnp.int32), len(block)))
    return blocks


def mixture_perplexity(nats: Nats, rows: Rows) -> float:
    """Return the perplexity of rows, infinity where it overflows."""
    tokens = int(np.count_nonzero(rows[:, 1:] != PAD))
    mean = float(nats.sum()) / max(1, tokens)
    return math.exp(mean) if mean < 700 else math.inf


# ---- files ---------------------------------------------------------------------------------


def write_mixture(directory: RunDirectory, model: Personal, second: bytes | None) -> None:
    """Write what a personal model has besides the weights of a run, for its owner's eyes alone."""
    for name, data in (
        (SECOND, second),
        (CACHE, None if model.cache is None else model.cache.to_bytes()),
    ):
        file = directory.path / name
        if data is None:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, data, private=True)
    facts = {
        "way": model.way,
        "share": model.share,
        "cache_share": model.cache_share,
        "note": model.note,
    }
    write_atomically(directory.path / FACTS, (dumps(facts) + "\n").encode(), private=True)


def open_personal(directory: RunDirectory, vocabulary: int) -> Personal:
    """Read a member's model, or raise `RecordError`."""
    file = directory.path / FACTS
    facts = read_json(file, str(file), RecordError)
    names = ("share", "cache_share")
    shares: list[Any] = [facts.get(name) for name in names] if _is_table(facts) else [None]
    if not all(type(x) in (int, float) and 0 <= x <= 1 for x in shares):
        raise RecordError(f"{file} is damaged: personalize the member again.")
    settings = load(directory.recipe).model
    second, cache = directory.path / SECOND, directory.path / CACHE
    counts = None
    if cache.is_file():
        if cache.stat().st_size > MOST_CACHE_BYTES:
            raise RecordError(f"{cache} is damaged: it is too large.")
        counts = cache_from(cache.read_bytes(), vocabulary, str(cache))
    return Personal(
        way=str(facts.get("way", "")),
        params=load_params(settings, vocabulary, directory.finished().weights),
        second=load_params(settings, vocabulary, second) if second.is_file() else None,
        share=float(facts["share"]),
        cache=counts,
        cache_share=float(facts["cache_share"]),
        note=str(facts.get("note", "")),
    )


def _is_table(facts: object) -> bool:
    return isinstance(facts, dict)


def mixture_of(path: Path) -> str | None:
    """Say what a saved model has that its weights alone do not hold; None if nothing."""
    parts = [
        said
        for name, said in ((SECOND, "a second model"), (CACHE, "a cache of its words"))
        if (path / name).is_file()
    ]
    return " and ".join(parts) or None
