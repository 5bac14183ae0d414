"""What a node does with a question: check it, train its members, answer with frames.

In:       a message from the server, the node's store and policy.
Out:      an answer: frames of updates, or the sentence why not.
Promise:  a recipe is carried out only if it is well-formed, fits this store and is allowed by the
          policy; text never leaves: an answer holds frames and sums over members, nothing else;
          the same question gives the same answer.
Not here: fetching and sending (`fleet.py`), training itself (`engine`).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedlm.cohort.packing import count_batches
from fedlm.core.errors import FedlmError, WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Codec, Total, Update
from fedlm.corpus.store import Store
from fedlm.deploy import policy as policies
from fedlm.deploy.local import Local, LocalPlace, check_deployable
from fedlm.deploy.policy import Policy
from fedlm.engine.messages import SUMS, TrainReply, TrainRequest, read_request, tell
from fedlm.engine.payload_size import kept_leaves
from fedlm.federation.tree import StartsEngine
from fedlm.recipe.settings import Recipe, parse
from fedlm.wire.dense import dense

HELLO = "query.fedlm"
MOST_KEPT = 2  # experiments with compiled programs


class Worker:
    """A node at work on its store."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        name: str,
        whole: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.policy, self.name, self.whole, self.say = store, policy, name, whole, say
        self._kept: dict[str, Local | LocalPlace] = {}

    @property
    def clients(self) -> int:
        """How many members this node answers for."""
        return 1 if self.whole else len(self.store.training_clients)

    def __call__(self, message: Message) -> Message:
        """The answer to a message; whatever goes wrong is an answer too."""
        if message.metadata.message_type == HELLO:
            return Message(RecordDict({"hello": ConfigRecord(self.hello())}), reply_to=message)
        try:
            question = read_request(message.content)
        except WireError as error:
            self.say(f"refused a message: {error}")
            refusal = TrainReply(round=0, members=(), refusal=str(error))
            return Message(tell(refusal), reply_to=message)
        try:
            answer = self.answer(question)
        except FedlmError as error:
            self.say(f"refused round {question.round}: {error}")
            answer = TrainReply(round=question.round, members=question.members, refusal=str(error))
        return Message(tell(answer), reply_to=message)

    def hello(self) -> dict[str, Any]:
        """What the server may know of this node before it asks for work."""
        return {
            "name": self.name,
            "version": version("fedlm"),
            "clients": self.clients,
            "tokenizer": self.store.tokens_sha256,
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """Tells whether the text is still the same, not what it is."""
        held = f"{self.whole}|{self.store.manifest['clients_sha256']}"
        return hashlib.sha256(held.encode()).hexdigest()

    def answer(self, question: TrainRequest) -> TrainReply:
        """A round, carried out."""
        if question.text != self.text:
            raise WireError("the text of this node is not the one that the run began with.")
        if any(m - question.first >= self.clients for m in question.members):
            raise WireError(f"this node has {self.clients} members: it was asked for others.")
        experiment = self._experiment(question)
        self.say(f"round {question.round}: {len(question.members)} members")
        if isinstance(experiment, LocalPlace):
            return _answer_place(experiment, question)
        return _answer_members(experiment, question)

    def _experiment(self, question: TrainRequest) -> Local | LocalPlace:
        """The experiment of a question: checked once, then kept with its compiled programs."""
        address = f"{question.first}|{question.population}|{question.recipe}"
        if address not in self._kept:
            made = self._check(_parse(question.recipe), question)
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[address] = made
        experiment = self._kept[address]
        for member in question.members:
            rows = len(experiment._rows_of(member)) if self.policy.largest_steps else 0
            policies.check_steps(self.policy, count_batches(rows, experiment.shape))
        return experiment

    def _check(self, recipe: Recipe, question: TrainRequest) -> Local | LocalPlace:
        made: Local | LocalPlace
        if recipe.federation is not None:
            made = LocalPlace(recipe, self.store)
        else:
            made = Local(
                recipe,
                self.store,
                first=question.first,
                population=question.population,
                whole=self.whole,
            )
        check_deployable(recipe)
        policies.check(self.policy, recipe, made.plan, made.parameters)
        return made


def _answer_members(experiment: Local, question: TrainRequest) -> TrainReply:
    """The sum over members, or the update of each."""
    if question.numbers:
        raise WireError("the question is one to a place of a tree: the recipe has no tree.")
    engine, algorithm = experiment.engine, experiment.algorithm
    sent = algorithm.download.decode(question.frames[0], experiment.sent_like)
    cohort = engine.prepare(question.round, np.asarray(question.members))
    if question.each:
        return _each(experiment, question, engine.collect(sent, cohort, question.clip_norm))
    total = engine.gather(sent, cohort, question.clip_norm)
    frame = dense().encode(total.delta, key_for(0, "upload"))
    return TrainReply(
        round=question.round, members=question.members, frames=(frame,), sums=(_sums(total),)
    )


def _answer_place(experiment: LocalPlace, question: TrainRequest) -> TrainReply:
    """What all text of this node makes of the parameters that were sent for it."""
    if len(question.numbers) != 1:
        raise WireError("this node is one place of a tree: it was asked for another number.")
    codec: Codec = experiment.algorithm.download
    start = codec.decode(question.frames[0], experiment.sent_like)
    engine: StartsEngine = experiment.engine  # type: ignore[assignment]
    number = np.asarray(question.numbers)
    found = engine.collect_from(lambda member: (start, None), question.round, number)
    return _each(experiment, question, ((question.members[0], update) for _, update in found))


def _each(
    experiment: Local | LocalPlace, question: TrainRequest, updates: Iterable[tuple[int, Update]]
) -> TrainReply:
    """A frame for each member's update, in the order of the members."""
    frames, sums = {}, {}
    for member, update in updates:
        address = {"round": question.round, "member": member}
        key = key_for(experiment.recipe.run.seed, "upload", **address)
        keep = kept_leaves(update.mask)
        frames[int(member)] = experiment.algorithm.upload.encode(update.delta, key, keep)
        sums[int(member)] = _sums(update)
    return TrainReply(
        round=question.round,
        members=question.members,
        frames=tuple(frames[m] for m in question.members),
        sums=tuple(sums[m] for m in question.members),
    )


def _parse(text: str) -> Recipe:
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise WireError(f"the recipe is not valid TOML: {error}.") from None


def _sums(of: Update | Total) -> dict[str, float]:
    found = jax.device_get({name: getattr(of, name) for name in SUMS})
    return {name: float(value) for name, value in found.items()}
