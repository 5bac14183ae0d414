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
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import PAD, LossFn, Params, PyTree
from fedlm.local.train import gradient
from fedlm.methods.optimizers import Optimizer
from fedlm.models import catalog
from fedlm.personal import adapters
from fedlm.personal.cache import cache_of
from fedlm.personal.model import (
    Personal,
    Rows,
    Scorer,
    chances_of,
    mixed_in,
    mixture_perplexity,
)
from fedlm.personal.neighbours import MOST, neighbours_of
from fedlm.training.early_stopping import EarlyStopping

SHARES = (0.25, 0.5, 0.75)  # of a member's own model, between the two
CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
NEIGHBOUR_WIDTHS = (0.1, 0.3, 1.0)  # in units of `neighbours_of`
# A pass of so many steps is looked at in about so many parts: the best model of a leaf with much
# text may be within its first pass.
LONG_PASS, PARTS = 32, 4


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
    most_steps: int = 0  # of all passes together; 0: as many as they have
    patience: int = 2  # passes without a better score that end a walk; looks, with `look_every`
    look_every: int = 0  # steps between two looks at the rows to choose by; 0: by passes
    seed: int = 0
    scale: float = 1.0  # of every step: workshops that differ in it alone share a program
    shape: Callable[[float], float] = lambda _: 1.0  # of the scale, by the part of steps before
    loss: LossFn = catalog.loss
    scorer: Scorer = field(default_factory=Scorer)

    @cached_property
    def _step(self) -> Callable[..., Any]:
        return self._step_of(lambda params, _: params)

    @cached_property
    def _adapter_step(self) -> Callable[..., Any]:
        return self._step_of(adapters.adapted)

    def _step_of(self, whole: Callable[[Params, PyTree], Params]) -> Callable[..., Any]:
        """Return a compiled step of what is trained; `whole` joins it with what is fixed."""
        optimizer, loss = self.optimizer, self.loss

        def step(
            params: Params, fixed: PyTree, memory: PyTree, batch: Any, scale: Any
        ) -> tuple[Params, Any]:
            change, _, _ = gradient(loss, params, batch, lambda p: whole(p, fixed))
            change, memory = optimizer.update(change, memory, params)
            return jax.tree.map(lambda a, b: a + scale * b, params, change), memory

        return jax.jit(step)

    def at_scale(self, scale: float) -> Workshop:
        """Return the workshop with steps of another size, and the same programs."""
        _ = self._step, self._adapter_step  # programs are copied only if they are there
        other = copy.copy(self)
        other.scale = scale
        return other

    def train(
        self, start: Params, own: Rows, choose: Rows, member: int, after: float = 0.0
    ) -> TrainedModel:
        """Train on a member's own rows until the rows to choose by get no better.

        Passes go on from the last model, and the best one is kept; before the first pass it is the
        start itself. A start that was trained on the same rows says `after` how many passes: the
        rows come in another order then.
        """
        return self._walk_on(
            self._step, start, None, lambda params: params, own, choose, member, math.ceil(after)
        )

    def adapt(self, start: Params, own: Rows, choose: Rows, member: int) -> TrainedModel:
        """Train low-rank changes of a model's matrices in the same way; the model stays."""
        factors, fixed = adapters.begin(start, key_for(self.seed, "partial", member=member))
        whole = partial(adapters.adapted, fixed=fixed)
        return self._walk_on(self._adapter_step, factors, fixed, whole, own, choose, member)

    def _walk_on(
        self,
        take: Callable[..., Any],
        params: Params,
        fixed: PyTree,
        whole: Callable[[Params], Params],
        own: Rows,
        choose: Rows,
        member: int,
        after: int = 0,
    ) -> TrainedModel:
        pass_steps = max(1, -(-len(own) // self.batch_size))
        every, patience = self._looks(pass_steps)
        watch = EarlyStopping(patience)
        start, memory = whole(params), self.optimizer.init(params)
        best, steps = TrainedModel(start, 0), self.passes * pass_steps
        steps = min(steps, self.most_steps or steps)
        watch.hear({"round": 0, "perplexity": self.perplexity(start, choose)})
        for step, batch in enumerate(itertools.islice(self._walk(own, member, after), steps), 1):
            scale = self.scale * self.shape((step - 1) / steps)
            params, memory = take(params, fixed, memory, batch, scale)
            if step % every and step < steps:
                continue
            model = whole(params)
            found = self.perplexity(model, choose)
            if watch.hear({"round": step, "perplexity": found}):
                passes = step / pass_steps
                best = TrainedModel(model, int(passes) if passes.is_integer() else passes)
            if watch.exhausted or not np.isfinite(found):
                break
        return best

    def _looks(self, pass_steps: int) -> tuple[int, int]:
        """Return the steps between two looks, and after how many without a better one to stop."""
        if self.look_every:
            return self.look_every, self.patience
        parts = PARTS if pass_steps >= LONG_PASS else 1
        return -(-pass_steps // parts), self.patience * parts

    def _walk(self, own: Rows, member: int, after: int) -> Iterable[Any]:
        """Yield the batches of all passes."""
        for number in range(after + 1, after + self.passes + 1):
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
    def adapted(self) -> TrainedModel:
        """The federation's model with the member's own low-rank changes."""
        return self.shop.adapt(self.shop.federated, self.own, self.choose, self.member)

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
    return Personal("local", at.alone.params, note=f"{at.alone.passes:.3g} passes from the start")


def finetune(at: Attempt) -> Personal:
    """Go on from the federation's model on the member's own text, until it gets no better."""
    return Personal("finetune", at.tuned.params, note=f"{at.tuned.passes:.3g} passes")


def own_adapters(at: Attempt) -> Personal:
    """Train a low-rank change of every matrix on the member's own text, and nothing else."""
    note = f"rank {adapters.RANK}, {at.adapted.passes:.3g} passes"
    return Personal("adapters", at.adapted.params, note=note)


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
        note = "fine-tuned" if own is at.tuned else "local"
        found += _mixtures("logits", at.shop.federated, own, note)
    return at.best(found)


def finetune_and_local(at: Attempt) -> Personal:
    """Fine-tune, and mix in the logits of a model of the member's own text alone."""
    way = "finetune+local"
    return at.best([_as(way, finetune(at)), *_mixtures(way, at.tuned.params, at.alone, "local")])


def _mixtures(way: str, params: Params, own: TrainedModel, note: str) -> list[Personal]:
    """Return mixtures of a model's logits with those of one that the member trained, if it did."""
    if not own.passes:
        return []
    return [
        Personal(
            way,
            params,
            second=own.params,
            share=share,
            note=f"{share:g} of the {note} model, {own.passes:.3g} passes",
        )
        for share in SHARES
    ]


def cache(at: Attempt) -> Personal:
    """Mix in a cache of the member's own words when predicting."""
    return _cached("cache", federated(at), at)


def finetune_and_cache(at: Attempt) -> Personal:
    """Fine-tune, and mix in a cache of the member's own words."""
    return _cached("finetune+cache", finetune(at), at)


def finetune_local_and_cache(at: Attempt) -> Personal:
    """Fine-tune, mix in a model of the member's own text alone, and a cache of its words."""
    return _cached("finetune+local+cache", finetune_and_local(at), at)


def neighbours(at: Attempt) -> Personal:
    """Mix in what followed in the member's own text where features are near (kNN-Per)."""
    return _with_neighbours("neighbours", federated(at), at)


def finetune_and_neighbours(at: Attempt) -> Personal:
    """Fine-tune, and mix in what followed in the member's own text where features are near."""
    return _with_neighbours("finetune+neighbours", finetune(at), at)


def local_and_cache(at: Attempt) -> Personal:
    """Train on the member's own text alone, and mix in a cache of its words."""
    return _cached("local+cache", local(at), at)


def local_and_neighbours(at: Attempt) -> Personal:
    """Train on the member's own text alone, and mix in what followed where features are near."""
    return _with_neighbours("local+neighbours", local(at), at)


def _cached(way: str, model: Personal, at: Attempt) -> Personal:
    counts = cache_of(at.own, at.shop.vocabulary)
    plain = model.nats(at.choose, at.shop.scorer)
    chances = counts.chances(at.choose)

    def score(share: float) -> float:
        return mixture_perplexity(mixed_in(plain, chances, share, at.choose), at.choose)

    share = min((0.0, *CACHE_SHARES), key=score)
    note = f"{model.note}, {share:g} of a cache"
    if not share:
        return _as(way, model)
    return replace(model, way=way, cache=counts, cache_share=share, note=note)


def _with_neighbours(way: str, model: Personal, at: Attempt) -> Personal:
    scorer, own = at.shop.scorer, _last(at.own, MOST)
    real = own[:, 1:] != PAD
    features = scorer.features(model.params, own)[real]
    kept = neighbours_of(features, own[:, 1:][real], at.shop.vocabulary)
    if kept is None:  # too little text
        return _as(way, model)
    plain = model.nats(at.choose, scorer)
    found = [(mixture_perplexity(plain, at.choose), 0.0, kept)]
    every = chances_of(kept, model.params, at.choose, scorer, NEIGHBOUR_WIDTHS)
    for width, chances in zip(NEIGHBOUR_WIDTHS, every, strict=True):
        near = replace(kept, width=width * kept.width)
        for share in CACHE_SHARES:
            mixed = mixed_in(plain, chances, share, at.choose)
            found.append((mixture_perplexity(mixed, at.choose), share, near))
    _, share, near = min(found, key=lambda entry: entry[0])
    if not share:
        return _as(way, model)
    note = f"{model.note}, {share:g} of neighbours, width {near.width / kept.width:g}"
    return replace(model, way=way, neighbours=near, neighbour_share=share, note=note)


def _last(rows: Rows, tokens: int) -> Rows:
    """Return the last rows that hold so many targets, or all."""
    held = np.cumsum(np.count_nonzero(rows[::-1, 1:] != PAD, axis=1))
    return rows[max(0, len(rows) - 1 - int(np.searchsorted(held, tokens))) :]


def _as(way: str, model: Personal) -> Personal:
    return replace(model, way=way)


WAYS: dict[str, Way] = {
    "federated": federated,
    "local": local,
    "finetune": finetune,
    "adapters": own_adapters,
    "weights": mix_weights,
    "logits": mix_logits,
    "cache": cache,
    "neighbours": neighbours,
    "finetune+cache": finetune_and_cache,
    "finetune+local": finetune_and_local,
    "finetune+local+cache": finetune_local_and_cache,
    "finetune+neighbours": finetune_and_neighbours,
    "local+cache": local_and_cache,
    "local+neighbours": local_and_neighbours,
}


def attempt_all(at: Attempt, names: Sequence[str]) -> dict[str, Personal]:
    """Return the member's model by each way."""
    return {name: WAYS[name](at) for name in names}
