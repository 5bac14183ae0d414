"""What a node does with a request: check it, train its members, reply with frames.

In:       a payload from the server, the node's store and policy.
Out:      a payload: frames of updates, or the sentence why not.
Promise:  a recipe is carried out only if it is well-formed, fits this store and is allowed by the
          policy; text never leaves: a reply holds frames and sums over members, nothing else; the
          same request gives the same reply.
Not here: receiving and sending (`flower/supernode.py`), training itself (`engine`).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import version

import jax
import numpy as np

from fedlm.cohort.packing import count_batches
from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Arrived, Codec, Cohort, Start, Total, Update
from fedlm.corpus.store import Store
from fedlm.deploy import policy as policies
from fedlm.deploy.local import NodeWork, check_deployable, leaf_work, members_work
from fedlm.deploy.policy import Policy
from fedlm.engine.messages import SUMS, Hello, Payload, TrainReply, TrainRequest, respond
from fedlm.engine.payload_size import kept_leaves
from fedlm.recipe.settings import Recipe, parse
from fedlm.wire.dense import dense

MOST_KEPT = 2  # runs with compiled programs


class Worker:
    """Trains the members of a store as a server asks."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        whole: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Takes a store; if `whole`, all of it is one member, else each of its clients is one."""
        self.store, self.policy, self.whole, self.say = store, policy, whole, say
        self._kept: dict[str, NodeWork] = {}

    @property
    def clients(self) -> int:
        """The number of members that this node answers for."""
        return 1 if self.whole else len(self.store.training_clients)

    def __call__(self, payload: Payload) -> Payload:
        """Returns the reply to a payload; anything that goes wrong becomes a refusal."""
        return respond(payload, hello=self.hello, train=self.train, say=self.say)

    def hello(self) -> Hello:
        """Returns what the server may know of this node before it asks for work."""
        return Hello(self.clients, self.text, self.store.tokens_sha256, version("fedlm"))

    @property
    def text(self) -> str:
        """A fingerprint that tells whether the text is still the same, not what it is."""
        held = f"{self.whole}|{self.store.manifest['clients_sha256']}"
        return hashlib.sha256(held.encode()).hexdigest()

    def train(self, request: TrainRequest) -> TrainReply:
        """Carries out this node's part of a round."""
        if request.text != self.text:
            raise WireError("the text of this node is not the one that the run began with.")
        if any(m - request.first >= self.clients for m in request.members):
            raise WireError(f"this node has {self.clients} members: it was asked for others.")
        work = self._work(request)
        self.say(f"round {request.round}: {len(request.members)} members")
        if work.leaf:
            return _train_leaf(work, request)
        return _train_members(work, request)

    def _work(self, request: TrainRequest) -> NodeWork:
        """Returns the work of a request: checked once, then kept with its programs."""
        address = f"{request.first}|{request.population}|{request.recipe}"
        if address not in self._kept:
            made = self._check(_parse(request.recipe), request)
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[address] = made
        work = self._kept[address]
        for member in request.members:
            rows = len(work.rows_of(member)) if self.policy.largest_steps else 0
            policies.check_steps(self.policy, count_batches(rows, work.batches))
        return work

    def _check(self, recipe: Recipe, request: TrainRequest) -> NodeWork:
        check_deployable(recipe)
        if recipe.federation is not None:
            made = leaf_work(recipe, self.store)
        else:
            made = members_work(
                recipe,
                self.store,
                first=request.first,
                population=request.population,
                whole=self.whole,
            )
        policies.check_policy(self.policy, recipe, made.algorithm.plan, made.parameters)
        return made


def _train_members(work: NodeWork, request: TrainRequest) -> TrainReply:
    """Returns the sum over members, or the update of each."""
    if request.numbers:
        raise WireError("the request is for a leaf of a tree: its recipe has no tree.")
    engine, algorithm = work.engine, work.algorithm
    sent = algorithm.download.decode(request.frames[0], work.sent_like)
    start = Start(sent, request.clip_norm)
    cohort = engine.prepare(request.round, np.asarray(request.members))
    if request.each:
        return _each(work, request, engine.updates(start, cohort))
    total = engine.total(start, cohort).total
    frame = dense().encode(total.delta, key_for(0, "upload"))
    return TrainReply(
        round=request.round, members=request.members, frames=(frame,), sums=(_sums(total),)
    )


def _train_leaf(work: NodeWork, request: TrainRequest) -> TrainReply:
    """Returns what all text of this node makes of the parameters that were sent for it."""
    if len(request.numbers) != 1:
        raise WireError("this node is one leaf of a tree: it was asked for another number.")
    codec: Codec = work.algorithm.download
    start = codec.decode(request.frames[0], work.sent_like)
    cohort = Cohort(request.round, np.asarray(request.numbers))
    found = work.engine.updates([Start(start)], cohort)
    return _each(work, request, (one._replace(member=request.members[0]) for one in found))


def _each(work: NodeWork, request: TrainRequest, updates: Iterable[Arrived]) -> TrainReply:
    """Returns a frame for each member's update, in the order of the members."""
    frames, sums = {}, {}
    for member, update, *_ in updates:
        address = {"round": request.round, "member": member}
        key = key_for(work.seed, "upload", **address)
        keep = kept_leaves(update.mask)
        frames[int(member)] = work.algorithm.upload.encode(update.delta, key, keep)
        sums[int(member)] = _sums(update)
    return TrainReply(
        round=request.round,
        members=request.members,
        frames=tuple(frames[m] for m in request.members),
        sums=tuple(sums[m] for m in request.members),
    )


def _parse(text: str) -> Recipe:
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise WireError(f"the recipe is not valid TOML: {error}.") from None


def _sums(of: Update | Total) -> dict[str, float]:
    found = jax.device_get({name: getattr(of, name) for name in SUMS})
    return {name: float(value) for name, value in found.items()}
