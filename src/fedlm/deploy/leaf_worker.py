"""A leaf of a tree at home: it keeps its own model, and lets a part of its change leave.

In:       a request that was admitted, what this node kept of the run, the node's secret.
Out:      a reply with the part of its change that may leave, clipped and noisy as the recipe says.
Promise:  the model is on this node's disk before the reply leaves, and never in a reply: under a
          clip nothing leaves that was not clipped, with noise nothing without it; at temperature
          zero no personal layer leaves. The same request gives the same bytes, also after a kill,
          because the model that it begins from, and the noise, depend on it alone; where a node
          has come to compute other ones, its noise would be drawn twice, and it refuses.
Not here: whether the request may be answered (`guard.py`), what leaves (`federation/leaf.py`),
          rounds (`federation/tree_round.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Cohort, Params, Start, Update
from fedlm.deploy.local import NodeWork
from fedlm.deploy.node_memory import NEVER, NodeMemory
from fedlm.engine import leaf_frames
from fedlm.engine.messages import TrainReply, TrainRequest
from fedlm.federation import layer_attention
from fedlm.federation.layer_attention import Layers, attend
from fedlm.federation.leaf import LeafRules, LeafStart, leaving
from fedlm.federation.round import init_memory
from fedlm.recipe.tree import settings_of
from fedlm.wire.dense import dense

Sums = Callable[[Update], Any]
"""From an update to the sums of it that may leave."""


class LeafMemory(NamedTuple):
    """What a leaf keeps between rounds."""

    model: Params  # its own, after its last steps
    origin: Layers  # the personal layers that all began with
    optimizer: Any  # of its training, where that is kept


def train_at_home(
    work: NodeWork, request: TrainRequest, memory: NodeMemory, secret: int, sums: Sums
) -> TrainReply:
    """Train this node's own model on all its text; reply with what leaves of its change."""
    rules = work.at_home
    assert rules is not None
    if len(request.numbers) != 1 or len(request.remembered) != 1:
        raise WireError("this node is one leaf of a tree: it was asked for another number.")
    (number,), (member,) = request.numbers, request.members
    before, above = _before(work, rules, request, memory)
    start = _start(work, rules, before, above)
    cohort = Cohort(request.round, np.asarray([number]))
    begun = Start(start, client_state=before.optimizer)
    ((_, update, *_),) = list(work.engine.updates([begun], cohort))
    place = number - request.population
    part = leaving(rules, update, secret, request.round, place)
    key = key_for(work.seed, "upload", round=request.round, member=number)
    frame, mine = work.algorithm.upload.encode(part, key), member - request.first
    if rules.noise_multiplier:
        memory.check_answer(request.run, mine, request.round, frame)
    after = LeafMemory(
        model=jax.tree.map(np.add, start, jax.device_get(update.delta)),
        origin=before.origin,
        optimizer=jax.device_get(update.client_state),
    )
    run = work.recipe.run
    memory.write(request.run, mine, request.round, after)
    window = run.checkpoint_every * run.keep_checkpoints
    memory.forget(request.run, mine, request.remembered[0], request.round, window)
    return TrainReply(
        round=request.round,
        members=request.members,
        frames=(frame,),
        sums=(sums(update),),
    )


def own_model(work: NodeWork, run: str, member: int, round: int, memory: NodeMemory) -> Any:
    """Return this node's own model before a round, or None if it has trained none by then."""
    rounds = [r for r in memory.rounds(run, member) if r < round]
    if not rounds:
        return None
    return memory.read(run, member, max(rounds), _zeros(work)).model


def with_own_layers(rules: LeafRules, model: Params, own: Params | None) -> Params:
    """Return a model with the personal layers of this node's own, if it has one."""
    if own is None:
        return model
    backbone = layer_attention.backbone_of(rules.personal_layers, model)
    personal = layer_attention.personal_of(rules.personal_layers, own)
    return layer_attention.join_layers(rules.personal_layers, model, backbone, personal)


def _before(
    work: NodeWork, rules: LeafRules, request: TrainRequest, memory: NodeMemory
) -> tuple[LeafMemory, LeafStart]:
    """Load this leaf's state after its last counted round, and decode the server's message."""
    codec, last = work.algorithm.download, request.remembered[0]
    above = leaf_frames.decode(request.frames[0], rules, work.sent_like, codec, dense())
    if (above.own is not None) != (last == NEVER):
        raise WireError("the start of a leaf has the layers that all began with, or lacks them.")
    first = _zeros(work)
    if above.own is not None:
        model = layer_attention.join_layers(
            rules.personal_layers, first.model, above.backbone, dict(above.own)
        )
        first = first._replace(model=model, origin=dict(above.own))
        if work.algorithm.remembers:
            first = first._replace(optimizer=init_memory(work.algorithm, model))
    kept = memory.read(request.run, request.members[0] - request.first, last, first)
    # On the host, as in a tree that is simulated: likeness is computed in 64 bits there.
    return kept._replace(**jax.device_get({"model": kept.model, "origin": kept.origin})), above


def _start(work: NodeWork, rules: LeafRules, before: LeafMemory, above: LeafStart) -> Params:
    """Return the model that this node trains: the backbone from above, its own layers mixed."""
    own = layer_attention.personal_of(rules.personal_layers, before.model)
    if above.parent is not None and own:
        from_root = settings_of(work.recipe).compare == "root"
        if from_root != (above.origin is not None):
            raise WireError("the start of a leaf does not fit federation.compare.")
        origin = above.origin if above.origin is not None else before.origin
        own, _ = attend(own, [above.parent], origin, rules.temperature, above.residuals)
    return layer_attention.join_layers(rules.personal_layers, before.model, above.backbone, own)


def _zeros(work: NodeWork) -> LeafMemory:
    """Return a leaf's memory in the right shapes, with a model of zeros."""
    assert work.at_home is not None
    model = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), work.sent_like)
    origin = layer_attention.personal_of(work.at_home.personal_layers, model)
    optimizer = init_memory(work.algorithm, model) if work.algorithm.remembers else None
    return LeafMemory(model, origin, optimizer)
