"""The ways in which a member makes a model its own; one line in `WAYS` adds another.

In:       the federation's model; a member's own text, and text to choose by.
Out:      a `Personal` model per way.
Promise:  a way reads the member's own rows and the rows to choose by, never those of the report; no
          way is worse than the federation's model on the rows that chose, except those that begin
          with `local`, which do not know it.
Not here: whose text that is (`members.py`), which way a member takes (`choose.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.keys import generator_for
from fedlm.core.types import PAD, Params, PyTree
from fedlm.local.train import gradient
from fedlm.methods.optimizers import Optimizer
from fedlm.models import catalog
from fedlm.personal.cache import cache_of
from fedlm.personal.model import Personal, Rows, Scorer, mixture_perplexity, with_cache
from fedlm.training.early_stopping import EarlyStopping

SHARES = (0.25, 0.5, 0.75)  # of a member's own model, between the two
CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


class TrainedModel(NamedTuple):
    """The best model on the way of a member's own steps, and after how many passes it was."""

    params: Params
    passes: float  # a whole number unless looks come between passes


@dataclass
class Workshop:
    """What all members share: the federation's model, the steps, and compiled programs."""

    federated: Params
    fresh: Callable[[], Params]  # the model before any training
    optimizer: Optimizer
    vocabulary: int
    batch_size: int = 16
    passes: int = 10  # the most, over a member's own text
    patience: int = 2  # looks without a better score, after which a member stops
    look_every: int = 0  # steps between two looks at the rows to choose by; 0: after each pass
    seed: int = 0
    scale: float = 1.0  # of every step: workshops that differ in it alone share a program
    scorer: Scorer = field(default_factory=Scorer)

    @cached_property
    def _step(self) -> Callable[..., Any]:
        optimizer = self.optimizer

        def step(params: Params, memory: PyTree, batch: Any, scale: Any) -> tuple[Params, Any]:
            change, _, _ = gradient(catalog.loss, params, batch)
            change, memory = optimizer.update(change, memory, params)
            return jax.tree.map(lambda a, b: a + scale * b, params, change), memory

        return jax.jit(step)

    def at_scale(self, scale: float) -> Workshop:
        """Return the workshop with steps of another size, and the same programs."""
        _ = self._step  # compiled programs are copied only if they are there
        other = copy.copy(self)
        other.scale = scale
        return other

    def train(self, start: Params, own: Rows, choose: Rows, member: int) -> TrainedModel:
        """Train on a member's own rows until the rows to choose by get no better.

        Passes go on from the last model, and the best one is kept; before the first pass it is the
        start itself.
        """
        watch = EarlyStopping(self.patience)
        params, memory = start, self.optimizer.init(start)
        best, pass_steps = TrainedModel(start, 0), max(1, -(-len(own) // self.batch_size))
        every, steps = self.look_every or pass_steps, self.passes * pass_steps
        watch.hear({"round": 0, "perplexity": self.perplexity(start, choose)})
        for step, batch in enumerate(self._walk(own, member), 1):
            params, memory = self._step(params, memory, batch, self.scale)
            if step % every and step < steps:
                continue
            found = self.perplexity(params, choose)
            if watch.hear({"round": step, "perplexity": found}):
                passes = step / pass_steps
                best = TrainedModel(params, int(passes) if passes.is_integer() else passes)
            if watch.exhausted or not np.isfinite(found):
                break
        return best

    def _walk(self, own: Rows, member: int) -> Iterable[Any]:
        """Yield the batches of all passes."""
        for number in range(1, self.passes + 1):
            yield from _batches(own, self.batch_size, self.seed, number, member)

    def perplexity(self, params: Params, rows: Rows) -> float:
        """Return the perplexity of one model on rows."""
        found = mixture_perplexity(self.scorer.nats(params, rows), rows)
        return found if np.isfinite(found) else float("inf")


def _batches(rows: Rows, size: int, seed: int, number: int, member: int) -> Iterable[Any]:
    """Yield a pass over rows in random order, in batches of equal size, the last one padded."""
    order = generator_for(seed, "shuffle", round=number, member=member).permutation(len(rows))
    for at in range(0, len(rows), size):
        block = rows[order[at : at + size]]
        padded = np.pad(block, ((0, size - len(block)), (0, 0)), constant_values=PAD)
        yield jnp.asarray(padded, jnp.int32)


@dataclass
class Attempt:
    """One member at work: what several ways need is made once."""

    shop: Workshop
    own: Rows
    choose: Rows
    member: int = 0

    @cached_property
    def tuned(self) -> TrainedModel:
        """The federation's model after the member's own steps."""
        return self.shop.train(self.shop.federated, self.own, self.choose, self.member)

    @cached_property
    def alone(self) -> TrainedModel:
        """A model that knows nothing but the member's own text."""
        return self.shop.train(self.shop.fresh(), self.own, self.choose, self.member)

    def score(self, model: Personal) -> float:
        """Return the perplexity of a model on the rows to choose by."""
        return mixture_perplexity(model.nats(self.choose, self.shop.scorer), self.choose)

    def best(self, models: Iterable[Personal]) -> Personal:
        """Return the model that scores best on the rows to choose by, the first of equals."""
        return min(models, key=self.score)


Way = Callable[[Attempt], Personal]


def federated(at: Attempt) -> Personal:
    """Take the federation's model as it is."""
    return Personal("federated", at.shop.federated, note="as the federation made it")


def local(at: Attempt) -> Personal:
    """Train a fresh model on the member's own text alone, until it gets no better."""
    return Personal(
        "local", at.alone.params, note=f"{at.alone.passes:.3g} passes from a fresh model"
    )


def finetune(at: Attempt) -> Personal:
    """Go on from the federation's model on the member's own text, until it gets no better."""
    return Personal("finetune", at.tuned.params, note=f"{at.tuned.passes:.3g} passes")


def mix_weights(at: Attempt) -> Personal:
    """Take a point between the weights of the federation's model and the fine-tuned one."""

    def between(share: float) -> Personal:
        mixed = jax.tree.map(lambda a, b: a + share * (b - a), at.shop.federated, at.tuned.params)
        return Personal(
            "weights", mixed, note=f"{share:g} of the way to {at.tuned.passes:.3g} passes"
        )

    ends = (_as("weights", federated(at)), _as("weights", finetune(at)))
    return at.best([*ends, *map(between, SHARES)])


def mix_logits(at: Attempt) -> Personal:
    """Mix the logits of the federation's model with those of a model of the member's own."""
    found = [_as("logits", federated(at))]
    for own in (at.tuned, at.alone):
        if own.passes:
            note = "fine-tuned" if own is at.tuned else "local"
            found += [
                Personal(
                    "logits",
                    at.shop.federated,
                    second=own.params,
                    share=share,
                    note=f"{share:g} of the {note} model, {own.passes:.3g} passes",
                )
                for share in SHARES
            ]
    return at.best(found)


def cache(at: Attempt) -> Personal:
    """Mix in a cache of the member's own words when predicting."""
    return _cached("cache", federated(at), at)


def finetune_and_cache(at: Attempt) -> Personal:
    """Fine-tune, and mix in a cache of the member's own words."""
    return _cached("finetune+cache", finetune(at), at)


def local_and_cache(at: Attempt) -> Personal:
    """Train on the member's own text alone, and mix in a cache of its words."""
    return _cached("local+cache", local(at), at)


def _cached(way: str, model: Personal, at: Attempt) -> Personal:
    counts = cache_of(at.own, at.shop.vocabulary)
    plain = model.nats(at.choose, at.shop.scorer)
    chances = counts.chances(at.choose)

    def score(share: float) -> float:
        return mixture_perplexity(with_cache(plain, chances, share, at.choose), at.choose)

    share = min((0.0, *CACHE_SHARES), key=score)
    note = f"{model.note}, {share:g} of a cache"
    if not share:
        return _as(way, model)
    return replace(model, way=way, cache=counts, cache_share=share, note=note)


def _as(way: str, model: Personal) -> Personal:
    return replace(model, way=way)


WAYS: dict[str, Way] = {
    "federated": federated,
    "local": local,
    "finetune": finetune,
    "weights": mix_weights,
    "logits": mix_logits,
    "cache": cache,
    "finetune+cache": finetune_and_cache,
    "local+cache": local_and_cache,
}


def attempt_all(at: Attempt, names: Sequence[str]) -> dict[str, Personal]:
    """Return the member's model by each way."""
    return {name: WAYS[name](at) for name in names}
