"""What a node does with a request: check it, train its members or score models, reply.

In:       a payload from the server, the node's store and policy.
Out:      a payload: frames of updates, sums over held-out text, or the sentence why not.
Promise:  a recipe is carried out only if it is well-formed, fits this store and is allowed by the
          policy, and a question is answered only if its recipe leads to it and the node's ledger
          has room for it; the ledger has an answer before it leaves; text never leaves: a reply
          holds frames and sums over members, under a plan only those that `privacy/release.py`
          lists; the same request gives the same reply.
Not here: receiving and sending (`flower/supernode.py`), training itself (`engine`), the checks
          (`policy.py`, `question.py`, `node_ledger.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import ConfigError, WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Arrived, Codec, Cohort, Start, Total, Update
from fedlm.core.words import count
from fedlm.corpus.store import Store
from fedlm.deploy import policy as policies
from fedlm.deploy.delivery import keep_models
from fedlm.deploy.guard import Guard, parse_recipe, store_releases
from fedlm.deploy.leaf_worker import own_model, train_at_home, with_own_layers
from fedlm.deploy.limits import within
from fedlm.deploy.local import NodeWork, check_deployable, leaf_work, members_work
from fedlm.deploy.node_evaluation import node_sums, noisy_sum
from fedlm.deploy.node_ledger import WHOLE, NodeLedger
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.policy import Policy, Refusal
from fedlm.deploy.question import Asked, check_part
from fedlm.deploy.secure_worker import SecureAnswers, node_sum, vector_of
from fedlm.engine.evaluate_messages import (
    EVALUATE_REQUEST,
    NOISY,
    EvaluateReply,
    EvaluateRequest,
    encode_evaluate_reply,
    read_evaluate_request,
)
from fedlm.engine.evaluate_messages import SUMS as EVALUATION_SUMS
from fedlm.engine.messages import (
    SECURE_REQUEST,
    SUMS,
    Hello,
    Payload,
    TrainReply,
    TrainRequest,
    respond,
)
from fedlm.engine.payload_size import kept_leaves
from fedlm.engine.secure_messages import (
    SecureReply,
    SecureRequest,
    encode_secure_reply,
    read_secure_request,
)
from fedlm.federation.member import left_out, start_of
from fedlm.federation.round import init_memory
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import hides, own_models_stay, release
from fedlm.recipe import parts
from fedlm.recipe.memory import most_bytes, training_cost
from fedlm.recipe.settings import Recipe
from fedlm.wire.dense import dense

Request = TrainRequest | EvaluateRequest | SecureRequest
MOST_KEPT = 2  # runs whose compiled programs are kept


class Worker:
    """A node's answers to a server: it trains the members of a store."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        whole: bool = False,
        say: Callable[[str], None] = lambda text: None,
        ledger: NodeLedger | None = None,
        memory: NodeMemory | None = None,
        models: Path | None = None,
        name: str = "",
        base: Path | None = None,
        secure: SecureAnswers | None = None,
    ) -> None:
        """Create a worker for a store, whose members are its clients, or one if `whole`.

        Without a `ledger` and a `memory`, its answers and the state of its members are lost with
        the process. Models that it is given at the end of a run go to the folder `models`, its
        own under its `name`. `base` is the model on which it lets adapters be trained; `secure`
        is its half of secure sums.
        """
        self.secure = secure
        self.models, self.name = models, name
        self.store, self.policy, self.whole, self.say = store, policy, whole, say
        # Models that are kept name it, wherever they are opened from.
        self.base = None if base is None else base.absolute()
        self.ledger = NodeLedger() if ledger is None else ledger
        self.memory = NodeMemory() if memory is None else memory
        per_member = len(store.training_clients) if whole else 1
        self.guard = Guard(
            policy, self.ledger, Asked(self.clients, per_member), store_releases(store.path)
        )
        self._kept: dict[str, NodeWork] = {}

    @property
    def clients(self) -> int:
        """The number of members that this node answers for."""
        return 1 if self.whole else len(self.store.training_clients)

    def __call__(self, payload: Payload) -> Payload:
        """Return the reply to a payload; an error becomes a refusal."""
        others = {
            EVALUATE_REQUEST: lambda p: encode_evaluate_reply(
                self.evaluate(read_evaluate_request(p))
            ),
            SECURE_REQUEST: lambda p: encode_secure_reply(self.secure_sum(read_secure_request(p))),
        }
        return respond(payload, hello=self.hello, train=self.train, say=self.say, others=others)

    def hello(self) -> Hello:
        """Return the facts that the server may know of this node before it asks for work."""
        facts = (self.clients, self.text, self.store.tokens_sha256, version("fedlm"))
        return Hello(*facts, counter=self.ledger.counter, tokens=self.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens this node trains on, if its policy lets it tell; otherwise nothing."""
        if not self.policy.tell_tokens:
            return ()
        return (sum(len(self.store.train(int(n))) for n in self.store.training_clients),)

    @property
    def text(self) -> str:
        """A salted fingerprint of the text: it shows changes, and nobody can test a guess."""
        return self.ledger.fingerprint(f"{self.whole}|{self.store.manifest['clients_sha256']}")

    def train(self, request: TrainRequest) -> TrainReply:
        """Train this node's members of a round."""
        self._check_members(request)
        with self.guard.recording(request):
            work = within(self.policy.longest_seconds, lambda: self._work(request))
            recipe, plan = work.recipe, work.plan
            if recipe.wire.secure_nodes:
                raise Refusal(
                    "a sum without masks is asked for: this recipe has secure sums "
                    "(wire.secure_nodes)."
                )
            self.guard.admit(request, recipe, plan, self._names(request, leaf=work.leaf))
        # How many members a node has in a round tells of the draw, which a plan keeps secret.
        self.say(
            f"round {request.round}"
            + (f": {count(len(request.members), 'member')}" * (plan is None))
        )
        reply = within(self.policy.longest_seconds, lambda: self._trained(work, request))
        return replace(reply, counter=self.ledger.counter)

    def _trained(self, work: NodeWork, request: TrainRequest) -> TrainReply:
        """Return the reply to a request that was admitted."""
        if work.at_home is not None:
            secret = self.ledger.leaf_secret(request.run, request.round, request.digest)
            return train_at_home(work, request, self.memory, secret, partial(_sums, work.plan))
        train = _train_leaf if work.leaf else _train_members
        return train(work, request, MemberMemories(self.memory, work, request))

    def secure_sum(self, request: SecureRequest) -> SecureReply:
        """Answer one step of a secure sum; the members train in the step that masks their sum."""
        self._check_members(request)
        with self.guard.recording(request):
            if self.secure is None:
                raise Refusal("this node takes part in no secure sums: it has no identity key.")
            work = within(self.policy.longest_seconds, lambda: self._work(request))
            if work.leaf:
                raise Refusal("a secure sum is asked for: this node is a place of a tree.")
            vector = vector_of(work, request.round)
            session = self.secure.session(request, work.recipe, vector.size)
            plan = work.algorithm.plan
            threshold = session.terms.threshold
            check_part(self.policy, request, work.recipe, plan, threshold, self.guard.asked)
            if request.step == "mask":
                names = self._names(request, leaf=False) if request.members else []
                self.guard.admit(request.training, work.recipe, plan, names)
                self.say(f"round {request.round}")

        def words(seed: bytes) -> np.ndarray:
            seconds = self.policy.longest_seconds
            return within(seconds, lambda: node_sum(work, request, vector)).words(seed)

        frame = self.secure.answer(request, session, words)
        masked = request.step == "mask"
        return SecureReply(
            round=request.round,
            attempt=request.attempt,
            step=request.step,
            frames=(frame,),
            nodes=int(masked),
            members=len(request.members) * masked,
            counter=self.ledger.counter,
        )

    def _check_members(self, request: TrainRequest | SecureRequest) -> None:
        """Raise `WireError` for a question about another text, or members of others."""
        if request.text != self.text:
            raise WireError("the text of this node is not the one that the run began with.")
        if any(m - request.first >= self.clients for m in request.members):
            raise WireError(
                f"this node has {count(self.clients, 'member')}: it was asked for others."
            )

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Score models on this node's held-out text, and reply with sums, or with noisy ones."""
        if request.text != self.text:
            raise WireError("the text of this node is not the one that the run began with.")
        if set(request.members) != {request.first}:
            raise WireError("this node was asked for the text of others.")
        with self.guard.recording(request):
            work = within(self.policy.longest_seconds, lambda: self._work(request))
            if request.phase == "noisy":
                sums = self._noisy(work, request)
            else:
                self.guard.admit_evaluation(request, work.recipe, work.plan)
        if request.phase == "keep":
            return self._keep(work, request)
        self.say(f"evaluation after round {request.round}")
        if request.phase != "noisy":
            self._check_rows(work, request)
            least, own = self.policy.least_evaluated, self._own_layers(work, request)
            sums = within(self.policy.longest_seconds, lambda: node_sums(work, request, least, own))
        return EvaluateReply(
            round=request.round,
            phase=request.phase,
            asks=tuple(range(len(sums))),
            sums=sums,
            counter=self.ledger.counter,
        )

    def _check_rows(self, work: NodeWork, request: EvaluateRequest) -> None:
        """Refuse figures of other rows than before: their difference would be of few clients."""
        if work.leaf or not request.total:
            return
        for split, offset in dict.fromkeys(zip(request.splits, request.offsets, strict=True)):
            said = f"{request.total} {offset}"
            if self.memory.first(request.run, f"rows-{split}", said) != said:
                raise Refusal(
                    f"figures of other rows of {split} are asked for than before in this run: a "
                    "difference of two figures would be of the rows that one of them lacks."
                )

    def _noisy(self, work: NodeWork, request: EvaluateRequest) -> tuple[Mapping[str, float], ...]:
        """Return the noisy sum over all clients here, which is in the ledger."""
        secret = self.ledger.figures_secret(request.run, request.round, request.digest)
        make = partial(noisy_sum, work, request, secret, whole=self.whole)
        numbers = self.guard.noisy_figures(request, work.recipe, work.plan, make)
        return (dict(zip(NOISY, numbers, strict=True)),)

    def _own_layers(self, work: NodeWork, request: EvaluateRequest) -> Callable[[Any], Any] | None:
        """Return how models to score get this node's own layers; None if they are taken as sent.

        Personal layers that stay are nowhere else. Under a plan figures of them stay too.
        """
        if work.at_home is None or not work.at_home.layers_stay or hides(work.plan):
            return None
        return partial(self._with_own, work, request)

    def _with_own(self, work: NodeWork, request: EvaluateRequest, model: Any) -> Any:
        """Return a model with the personal layers of this node's own."""
        assert work.at_home is not None
        own = own_model(work, request.run, 0, request.round, self.memory)
        return with_own_layers(work.at_home, model, own)

    def _keep(self, work: NodeWork, request: EvaluateRequest) -> EvaluateReply:
        """Keep the models that a request carries."""
        if self.models is None:
            raise Refusal("this node has no folder for models.")
        own = None if work.at_home is None else partial(self._with_own, work, request)
        for path in keep_models(self.models, self.name, work, self.store, request, own):
            rounds = count(request.round, "round")
            self.say(f"a model of run {request.run[:8]} after {rounds} is in {path}")
        return EvaluateReply(
            round=request.round,
            phase=request.phase,
            asks=tuple(range(len(request.members))),
            sums=(dict.fromkeys(EVALUATION_SUMS, 0.0),) * len(request.members),
            counter=self.ledger.counter,
        )

    def _names(self, request: TrainRequest | SecureRequest, *, leaf: bool) -> list[str]:
        """Return the clients of a request by their names in the ledger."""
        if leaf or self.whole:
            return [WHOLE]
        numbers = self.store.training_clients
        clients = (int(numbers[member - request.first]) for member in request.members)
        return [self.ledger.client(self.store.client(number)) for number in clients]

    def _work(self, request: Request) -> NodeWork:
        """Return the work of a recipe, checked once and then kept with its compiled programs."""
        address = f"{request.first}|{request.population}|{request.recipe}"
        if address not in self._kept:
            recipe = parse_recipe(request.recipe)
            self._check_cost(recipe, request)  # before anything of that size is made
            made = self._check(recipe, request)
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[address] = made
        else:
            self._check_cost(self._kept[address].recipe, request)
        return self._kept[address]

    def _check_cost(self, recipe: Recipe, request: Request) -> None:
        """Raise `Refusal` if a request would take more steps or memory than is allowed."""
        numbers = [int(number) for number in self.store.training_clients]
        members = [[numbers[member - request.first]] for member in sorted(set(request.members))]
        if self.whole or recipe.federation is not None:
            members = [numbers]
        spec = parts.model_spec(recipe, self.store.vocabulary)
        steps, memory = training_cost(recipe, spec, self.store, members)
        policies.check_cost(self.policy, steps, memory, most_bytes())

    def _check(self, recipe: Recipe, request: Request) -> NodeWork:
        check_deployable(recipe)
        base = recipe.model.base_sha256
        recipe = self._on_own_base(recipe)
        if recipe.federation is not None:
            made = leaf_work(recipe, self.store, population=request.population)
        else:
            made = members_work(
                recipe,
                self.store,
                first=request.first,
                population=request.population,
                whole=self.whole,
            )
        self._check_base(recipe, made, base)
        plan, parameters = made.plan, made.parameters
        policies.check_policy(self.policy, recipe, plan, parameters, self.clients)
        return made

    def _on_own_base(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this node's own model, if it trains a part of one."""
        model = recipe.model
        if model.init_from is not None:
            raise WireError("the recipe names a file of this node (model.init_from).")
        if model.base_sha256 is None:
            return recipe
        if self.base is None:
            raise Refusal(
                f"model.base_sha256 = {model.base_sha256[:12]}...: this node has no model to train "
                "adapters on. Its owner gives one with fedlm node join --base."
            )
        own = model.model_copy(update={"init_from": str(self.base), "base_sha256": None})
        return recipe.model_copy(update={"model": own})

    def _check_base(self, recipe: Recipe, work: NodeWork, wanted: str | None) -> None:
        """Refuse a run on another frozen model than this node has."""
        if wanted is None:
            return
        try:
            parts.with_base_sizes(recipe.model)
            found = parts.base_sha256(work.algorithm)
        except ConfigError as error:  # whose words are about files of this node
            self.say(f"--base: {error}")
            found = "another kind of model"
        if found != wanted:
            raise Refusal(
                f"model.base_sha256 = {wanted[:12]}...: the model of this node is {found[:12]}..., "
                "and adapters of one model do not fit another. Give the same to all."
            )


class MemberMemories:
    """What the members of one request remember, if their method has them remember anything."""

    def __init__(self, memory: NodeMemory, work: NodeWork, request: TrainRequest) -> None:
        self.memory, self.work, self.request = memory, work, request
        if work.algorithm.remembers != bool(request.remembered):
            raise WireError("the request does not fit what the members of its recipe remember.")

    def before(self, sent: Any) -> Any:
        """Return the memories from which the members begin, one row each; None without any."""
        if not self.work.algorithm.remembers:
            return None
        first, request = init_memory(self.work.algorithm, sent), self.request
        rows = [
            self.memory.read(request.run, member - request.first, last, first)
            for member, last in zip(request.members, request.remembered, strict=True)
        ]
        return jax.tree.map(lambda *row: np.stack([np.asarray(x) for x in row]), *rows)

    def after(self, place: int, memory: Any) -> None:
        """Keep what the member at a place of the request remembers now, before its answer leaves.

        What only an older question could ask for is removed.
        """
        request, run = self.request, self.work.recipe.run
        member, last = request.members[place] - request.first, request.remembered[place]
        self.memory.write(request.run, member, request.round, jax.device_get(memory))
        window = run.checkpoint_every * run.keep_checkpoints
        self.memory.forget(request.run, member, last, request.round, window)


def _train_members(work: NodeWork, request: TrainRequest, memories: MemberMemories) -> TrainReply:
    """Train the members of a request; reply with the sum of their updates, or with each."""
    if request.numbers:
        raise WireError("the request is for a leaf of a tree: its recipe has no tree.")
    engine, algorithm = work.engine, work.algorithm
    sent = algorithm.download.decode(request.frames[0], work.sent_like)
    start = Start(sent, request.clip_norm, memories.before(sent))
    cohort = engine.prepare(request.round, np.asarray(request.members))
    if request.each:
        return _each(work, request, engine.updates(start, cohort), memories, start)
    total = engine.total(start, cohort).total
    for place in range(len(request.members)) if algorithm.remembers else ():
        memories.after(place, tree.take(total.client_state, place))
    frame = dense().encode(total.delta, key_for(0, "upload"))
    sums = (_sums(algorithm.plan, total),)
    return TrainReply(round=request.round, members=request.members, frames=(frame,), sums=sums)


def _train_leaf(work: NodeWork, request: TrainRequest, memories: MemberMemories) -> TrainReply:
    """Train the sent parameters on all text of this node, and reply with the result."""
    if len(request.numbers) != 1:
        raise WireError("this node is one leaf of a tree: it was asked for another number.")
    codec: Codec = work.algorithm.download
    start = codec.decode(request.frames[0], work.sent_like)
    cohort = Cohort(request.round, np.asarray(request.numbers))
    begun = Start(start, client_state=memories.before(start))
    found = work.engine.updates([start_of(begun, 0)], cohort)
    return _each(work, request, found, memories, begun)


def _each(
    work: NodeWork,
    request: TrainRequest,
    updates: Iterable[Arrived],
    memories: MemberMemories,
    start: Start,
) -> TrainReply:
    """Return a reply with a frame per member's update, in the order of members."""
    frames, sums, algorithm = {}, {}, work.algorithm
    numbers = request.numbers or request.members  # under which they train
    for member, update, *_ in updates:
        key = key_for(work.seed, "upload", round=request.round, member=member)
        keep, place = kept_leaves(update.mask), numbers.index(int(member))
        frame = algorithm.upload.encode(update.delta, key, keep)
        frames[place], sums[place] = frame, _sums(algorithm.plan, update)
        if algorithm.remembers:
            memory = update.client_state
            if algorithm.feedback:  # the engine here sends plain numbers, and leaves nothing out
                arrived = algorithm.upload.decode(frame, update.delta)
                before = start_of(start, place).client_state.residual
                memory = memory._replace(residual=left_out(update, arrived, before))
            memories.after(place, memory)
    return TrainReply(
        round=request.round,
        members=request.members,
        frames=tuple(frames[place] for place in range(len(numbers))),
        sums=tuple(sums[place] for place in range(len(numbers))),
    )


def _sums(plan: PrivacyPlan | None, of: Update | Total) -> Mapping[str, float]:
    """Return the sums that may accompany a frame; the others are zero."""
    found = jax.device_get({name: getattr(of, name) for name in SUMS})
    exact = {name: float(value) for name, value in found.items()}
    # Under noise of its own a leaf always counts as one: how much it trained on stays there.
    counted = {"weight": 1.0} if own_models_stay(plan) else {}
    return {**dict.fromkeys(SUMS, 0.0), **counted, **release(plan, "reply", exact)}
