"""A member's own model, as it is asked: one model or two, perhaps with a memory of its text.

In:       parameters, a share of a second model's logits; a cache or neighbours, and their share.
Out:      nats of targets, next-token logits one token at a time, files.
Promise:  token by token it gives the chances that rows are scored by; what is saved is loaded
          equal.
Not here: how a member finds it (`ways.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.types import PAD, Params, PyTree
from fedlm.evaluate.generate import Speaker, speaker
from fedlm.inference import load_params, speak
from fedlm.models import catalog
from fedlm.personal.cache import WordCache, cache_from
from fedlm.personal.neighbours import Neighbours, neighbours_from
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import dumps

FACTS, SECOND, CACHE = "personal.json", "second.safetensors", "cache.safetensors"
NEIGHBOURS = "neighbours.safetensors"
MOST_MEMORY_BYTES = 1 << 30
ROWS = 16  # scored at once: all logits of so many rows are in memory
FEATURE_ROWS = 512  # whose features are in memory at a time

T = TypeVar("T")
Nats = Float[np.ndarray, "rows targets"]
Rows = Int[np.ndarray, "rows width"]
Features = Float[np.ndarray, "rows targets embed"]


@dataclass(frozen=True)
class Personal:
    """What one member predicts with."""

    way: str
    params: Params
    second: Params | None = None  # a model whose logits are mixed in
    share: float = 0.0  # of the second model's logits
    cache: WordCache | None = None
    cache_share: float = 0.0  # of the cache's chances
    neighbours: Neighbours | None = None  # by the features of the first model
    neighbour_share: float = 0.0  # of their chances
    note: str = ""  # how it was made, in words

    def nats(self, rows: Rows, scorer: Scorer) -> Nats:
        """Return the nats of every target; zero where a target is PAD."""
        if self.second is None:
            found = scorer.nats(self.params, rows)
        else:
            found = scorer.mixed(self.params, self.second, rows, [self.share])[0]
        if self.cache is not None:
            found = mixed_in(found, self.cache.chances(rows), self.cache_share, rows)
        if self.neighbours is not None:
            (own,) = chances_of(self.neighbours, self.params, rows, scorer)
            found = mixed_in(found, own, self.neighbour_share, rows)
        return found

    def speaker(self, capacity: int) -> Speaker:
        """Return the model as a predictor of the next token, for up to `capacity` tokens."""
        first = speak_with_features if self.neighbours is not None else speak
        parts = [first(self.params, capacity)]
        parts += [] if self.second is None else [speak(self.second, capacity)]

        def advance(state: PyTree, token: int) -> tuple[PyTree, Array]:
            both = [part.advance(s, token) for part, s in zip(parts, state, strict=True)]
            logits = both[0][1]
            if len(both) > 1:
                logits = (1 - self.share) * logits + self.share * both[1][1]
            if self.cache is not None:
                logits = _blended(logits, self.cache.next(token), self.cache_share)
            if self.neighbours is not None:
                (_, features), _ = both[0]
                own = self.neighbours.next(np.asarray(features[0], np.float32))
                logits = _blended(logits, own, self.neighbour_share)
            return tuple(s for s, _ in both), logits

        return Speaker(lambda: tuple(part.start() for part in parts), advance)


def speak_with_features(params: Params, capacity: int) -> Speaker:
    """Return a model as a predictor of the next token, whose state ends with its features."""

    def start(batch: int) -> PyTree:
        return params.start(batch, capacity), jnp.zeros((batch, params.readout.shape[1]))

    return speaker(params, start, _advance_with_features)


def _advance_with_features(model: Params, state: PyTree, token: Array) -> tuple[PyTree, Array]:
    inner, features = model.advance(state[0], token)
    return (inner, features), jnp.matmul(features, model.readout.T)


def _blended(logits: Array, own: np.ndarray, share: float) -> Array:
    """Return the logits of a mixture of a model's chances and those of a memory."""
    padded = np.pad(own, (0, logits.shape[0] - len(own)))
    chances = (1 - share) * jax.nn.softmax(logits) + share * jnp.asarray(padded, logits.dtype)
    return jnp.log(jnp.maximum(chances, 1e-30))


def chances_of(
    neighbours: Neighbours,
    params: Params,
    rows: Rows,
    scorer: Scorer,
    widths: Sequence[float] = (1.0,),
) -> Float[np.ndarray, "widths rows targets"]:
    """Return the chances that neighbours give to targets, by multiples of their width.

    They are zero where a target is PAD. Features are those of a few rows at a time.
    """
    found = np.zeros((len(widths), *rows[:, 1:].shape))
    for first in range(0, len(rows), FEATURE_ROWS):
        here = slice(first, first + FEATURE_ROWS)
        targets = rows[here, 1:]
        real = targets != PAD
        features = scorer.features(params, rows[here])[real]
        found[:, here][:, real] = neighbours.chances_by_width(features, targets[real], widths)
    return found


def mixed_in(nats: Nats, chances: Nats, share: float, rows: Rows) -> Nats:
    """Return the nats of a mixture of a model's chances and those of a memory."""
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

    @cached_property
    def _features(self) -> Callable[..., Array]:
        return jax.jit(lambda params, rows: params.features(jnp.maximum(rows[:, :-1], 0)))

    def features(self, params: Params, rows: Rows) -> Features:
        """Return what a model makes of each position, before its output matrix."""
        found = [np.asarray(self._features(params, block)) for block, _ in _blocks(rows)]
        return np.concatenate(found)[: len(rows)].astype(np.float32, copy=False)

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
        (NEIGHBOURS, None if model.neighbours is None else model.neighbours.to_bytes()),
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
        "neighbour_share": model.neighbour_share,
        "note": model.note,
    }
    write_atomically(directory.path / FACTS, (dumps(facts) + "\n").encode(), private=True)


def open_personal(directory: RunDirectory, vocabulary: int) -> Personal:
    """Read a member's model, or raise `RecordError`."""
    file = directory.path / FACTS
    facts = read_json(file, str(file), RecordError)
    names = ("share", "cache_share", "neighbour_share")
    before = {"neighbour_share": 0}  # of models that were kept before there were neighbours
    shares: list[Any] = (
        [facts.get(name, before.get(name)) for name in names] if _is_table(facts) else [None]
    )
    if not all(type(x) in (int, float) and 0 <= x <= 1 for x in shares):
        raise RecordError(f"{file} is damaged: personalize the member again.")
    settings = load(directory.recipe).model
    second, cache, near = (directory.path / name for name in (SECOND, CACHE, NEIGHBOURS))
    for share, part in zip(shares, (second, cache, near), strict=True):
        if (share > 0) != part.is_file():
            there = "is missing" if share > 0 else "is not meant to be here"
            raise RecordError(f"{part} {there}: personalize the member again.")
    params = load_params(settings, vocabulary, directory.finished().weights)
    counts = _memory(cache, lambda data: cache_from(data, vocabulary, str(cache)))
    embed = params.readout.shape[1]
    kept = _memory(near, lambda data: neighbours_from(data, vocabulary, embed, str(near)))
    return Personal(
        way=str(facts.get("way", "")),
        params=params,
        second=load_params(settings, vocabulary, second) if second.is_file() else None,
        share=float(shares[0]),
        cache=counts,
        cache_share=float(shares[1]),
        neighbours=kept,
        neighbour_share=float(shares[2]),
        note=str(facts.get("note", "")),
    )


def _memory(file: Path, parse: Callable[[bytes], T]) -> T | None:
    if not file.is_file():
        return None
    if file.stat().st_size > MOST_MEMORY_BYTES:
        raise RecordError(f"{file} is damaged: it is too large.")
    return parse(file.read_bytes())


def _is_table(facts: object) -> bool:
    return isinstance(facts, dict)


def mixture_of(path: Path) -> str | None:
    """Say what a saved model has that its weights alone do not hold; None if nothing."""
    parts = [
        said
        for name, said in (
            (SECOND, "a second model"),
            (CACHE, "a cache of its words"),
            (NEIGHBOURS, "features of its text"),
        )
        if (path / name).is_file()
    ]
    return " and ".join(parts) or None
