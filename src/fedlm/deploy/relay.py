"""A federation that looks like one node to the federation above.

In:       a payload from above, a transport to the nodes below.
Out:      one reply for the whole subtree: the sum of its sums, or all of its frames.
Promise:  a relay changes nothing but the address: members keep the numbers of the whole
          federation, requests go down as they came, frames go up as they came or summed; what a
          node below replied is on disk before the next one is asked, so a relay that is killed
          asks nobody twice who had replied; a question passes the same gate as at a node, by the
          policy and the ledger of the relay's own kit.
Not here: models and text, of which a relay knows nothing; the gate (`guard.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.errors import EngineError, WireError
from fedlm.core.keys import key_for
from fedlm.deploy import policy as policies
from fedlm.deploy import registration
from fedlm.deploy.guard import Guard, parse_recipe
from fedlm.deploy.limits import within
from fedlm.deploy.local import bounds_of, check_deployable
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.policy import Policy
from fedlm.deploy.question import Asked
from fedlm.deploy.replies import Replies
from fedlm.engine.bounds import LARGEST_NORM, SLACK
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import (
    TRAINING,
    Assignment,
    Dispatch,
    Exchange,
    Quorum,
    RoundStats,
    Transport,
)
from fedlm.engine.evaluate_messages import (
    EVALUATE_REQUEST,
    EVALUATION,
    EvaluateReply,
    EvaluateRequest,
    encode_reply,
    read_request,
)
from fedlm.engine.messages import SUMS, Hello, Payload, TrainReply, TrainRequest, respond
from fedlm.evaluate.held_out import NO_MODEL
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import hides
from fedlm.recipe import privacy_plan
from fedlm.recipe.settings import Recipe
from fedlm.wire.dense import dense
from fedlm.wire.frame import overhead

ASSIGNMENTS = "seats.json"  # never renamed, because resumed runs look for this file
COUNTERS = "counters.json"
ROUNDS_KEPT = 2
MOST_WORDS = 1 << 24  # of any vocabulary; a relay does not know that of its nodes


class Relay:
    """A node of the federation above that answers with the replies of the federation below."""

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        names: list[str],
        quorum: Quorum,
        *,
        name: str,
        say: Callable[[str], None],
        policy: Policy | None = None,
        ledger: NodeLedger | None = None,
    ) -> None:
        """Create a relay, called `name` above, over the nodes `names`, with files in `folder`.

        Without a `ledger` it remembers what it answered only as long as it lives.
        """
        self.folder, self.transport, self.names = folder, transport, names
        self.quorum, self.name, self.say = quorum, name, say
        self.policy = policy or Policy()
        self.ledger = NodeLedger() if ledger is None else ledger
        self.guard = Guard(self.policy, self.ledger, Asked(0))
        self.counters = Counters(folder / COUNTERS)  # of the nodes below

    def __call__(self, payload: Payload) -> Payload:
        """Return the reply to a payload; an error becomes a refusal."""
        others = {EVALUATE_REQUEST: lambda p: encode_reply(self.evaluate(read_request(p)))}
        return respond(payload, hello=self.hello, train=self.train, say=self.say, others=others)

    # ---- who is below ------------------------------------------------------------------

    def hello(self) -> Hello:
        """Describe the subtree as one node, and assign its members anew, because a run begins."""
        heard: dict[str, Hello] = {}

        check = registration.heard(self.counters, heard.__setitem__, self.say)
        below = registration.assign_members(
            self.transport, self.names, check, self.say, self.quorum
        )
        tokenizers = {hello.tokenizer for hello in heard.values()}
        if len(tokenizers) != 1:
            raise EngineError(
                f"the nodes below {self.name} have different tokenizers. Prepare their stores "
                "again, with fedlm prepare --like."
            )
        registration.save_assignments(self.folder / ASSIGNMENTS, below)
        return Hello(
            clients=sum(node.clients for node in below),
            text=_fingerprint(below),
            tokenizer=tokenizers.pop(),
            version=next(iter(heard.values())).version,
            leaves=registration.leaves_below(below),
            tokens=registration.tokens_below(below),
            counter=self.ledger.counter,
        )

    def _assignments(self, request: TrainRequest | EvaluateRequest) -> tuple[Assignment, ...]:
        below = registration.load_assignments(self.folder / ASSIGNMENTS)
        if below is None or _fingerprint(below) != request.text:
            raise EngineError("the nodes below are not those that the run began with.")
        return below

    # ---- a round -----------------------------------------------------------------------

    def train(self, request: TrainRequest) -> TrainReply:
        """Pass a round on to the nodes below, and join their replies."""
        with self.guard.recording(request):
            requests = self._requests(request)
            if not requests:
                raise WireError("none of the members asked for lives here.")
            plan = self._admit(request)
        kept = handover(self.folder / "handover", request)
        missing = {name: below for name, below in requests.items() if name not in kept}
        if missing:
            self._dispatch(missing, kept, of=len(requests), plan=plan, exchange=TRAINING)
        answered = [name for name in requests if name in kept]
        # Who was asked tells of the draw, which a plan keeps secret.
        told = "" if hides(plan) else f": {len(answered)} of {len(requests)} nodes answered"
        self.say(f"round {request.round}{told}")
        reply = join(request, (kept.read(name, TrainReply) for name in answered))
        return replace(reply, counter=self.ledger.counter)

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Pass a question about held-out text on to the nodes below, and join their sums."""
        with self.guard.recording(request):
            below = self._evaluations(request)
            if not below:
                raise WireError("none of the nodes asked for is here.")
            recipe, plan, members = self._allowed(request)
            self.guard.admit_evaluation(request, recipe, plan, Asked(members))
        requests = {name: asked for name, (asked, _) in below.items()}
        kept = handover(self.folder / "evaluations", request)
        missing = {name: asked for name, asked in requests.items() if name not in kept}
        if missing:
            self._dispatch(missing, kept, of=len(requests), plan=plan, exchange=EVALUATION)
        sums: dict[int, Any] = {}
        for name, (_, places) in below.items():
            if name in kept:
                reply = kept.read(name, EvaluateReply)
                sums |= {places[at]: part for at, part in zip(reply.asks, reply.sums, strict=True)}
        asks = tuple(sorted(sums))
        return EvaluateReply(
            round=request.round,
            phase=request.phase,
            asks=asks,
            sums=tuple(sums[at] for at in asks),
            counter=self.ledger.counter,
        )

    def _evaluations(
        self, request: EvaluateRequest
    ) -> dict[str, tuple[EvaluateRequest, list[int]]]:
        """Return the request per node below, with the places of its asks in the whole request."""
        made = {}
        for node in self._assignments(request):
            first = request.first + node.first
            here = [i for i, m in enumerate(request.members) if first <= m < first + node.clients]
            if here:
                made[node.name] = self._part(request, node, first, here), here
        return made

    def _part(
        self, request: EvaluateRequest, node: Assignment, first: int, here: list[int]
    ) -> EvaluateRequest:
        """Return a copy of a request with some of its asks and the models that they need."""
        used = sorted({request.models[i] for i in here} - {NO_MODEL})
        number = {NO_MODEL: NO_MODEL, **{model: at for at, model in enumerate(used)}}
        names = ("members", "numbers", "splits", "rows", "offsets")
        columns: dict[str, Any] = {
            name: tuple(getattr(request, name)[i] for i in here) for name in names
        }
        return replace(
            request,
            first=first,
            text=node.text,
            counter=self.counters.of(node.name),
            frames=tuple(request.frames[model] for model in used),
            models=tuple(number[request.models[i]] for i in here),
            **columns,
        )

    def _admit(self, request: TrainRequest) -> PrivacyPlan | None:
        """Check a request as a node does, but for the size of a model that is not known here."""
        recipe, plan, members = self._allowed(request)
        names = [self.ledger.client(str(member - request.first)) for member in request.members]
        self.guard.admit(request, recipe, plan, names, Asked(members))
        return plan

    def _allowed(
        self, request: TrainRequest | EvaluateRequest
    ) -> tuple[Recipe, PrivacyPlan | None, int]:
        """Return a recipe that the policy allows, its plan, and how many members are below."""
        recipe = parse_recipe(request.recipe)
        check_deployable(recipe)
        seconds = self.policy.longest_seconds
        plan = within(seconds, lambda: _plan(recipe, request.population))
        members = sum(node.clients for node in self._assignments(request))
        policies.check_policy(self.policy, recipe, plan, 0, members)
        return recipe, plan, members

    def _requests(self, request: TrainRequest) -> dict[str, TrainRequest]:
        """Return the request per node below: a copy with the members of that node."""
        made = {}
        for node in self._assignments(request):
            first = request.first + node.first
            here = [i for i, m in enumerate(request.members) if first <= m < first + node.clients]
            if here:
                own: dict[str, Any] = {"members": tuple(request.members[i] for i in here)}
                if request.numbers:  # then every member has a frame of its own
                    own["numbers"] = tuple(request.numbers[i] for i in here)
                    own["frames"] = tuple(request.frames[i] for i in here)
                if request.remembered:
                    own["remembered"] = tuple(request.remembered[i] for i in here)
                own["counter"] = self.counters.of(node.name)
                made[node.name] = replace(request, first=first, text=node.text, **own)
        return made

    def _dispatch(
        self,
        missing: Mapping[str, Any],
        kept: Replies,
        *,
        of: int,
        plan: PrivacyPlan | None,
        exchange: Exchange,
    ) -> None:
        """Ask the nodes whose replies are missing, and write each reply to disk."""
        least = max(1.0, self.quorum.quorum * of - (of - len(missing)))
        quorum = replace(self.quorum, quorum=min(1.0, least / len(missing)))
        stats = RoundStats(next(iter(missing.values())).round)
        # Replies go to disk in order of arrival; `join` reads them in order of nodes.
        dispatch = Dispatch(
            self.transport,
            quorum,
            missing,
            stats,
            in_order=False,
            exchange=exchange,
            say=self._waiting(plan),
        )
        for name, reply in dispatch.replies():
            try:
                if exchange == TRAINING:  # sums of an evaluation were checked when they were read
                    check_reply(missing[name], reply)
            except WireError as error:
                stats.garbage[name] = str(error)
                continue
            stats.answered.append(name)
            self.counters.hear(name, reply.counter)
            kept.write(name, reply)
            del reply  # else it stays in memory until the next reply arrives
        for name, reason in {**stats.refused, **stats.garbage}.items() if not hides(plan) else ():
            self.say(f"round {stats.round}: {name}: {reason}")
        dispatch.check_quorum()

    def _waiting(self, plan: PrivacyPlan | None) -> Callable[[Sequence[str], float], None]:
        def say(names: Sequence[str], seconds: float) -> None:
            whom = "" if hides(plan) else f" for {', '.join(names)}"
            self.say(f"waiting{whom}, {seconds:.0f} s")

        return say


def check_reply(request: TrainRequest, reply: TrainReply) -> None:
    """Raise `WireError` if a reply would spoil the sum of the others: as the server checks it."""
    bounds = bounds_of(parse_recipe(request.recipe), MOST_WORDS)
    for sums in reply.sums:
        bounds.checked(sums, 1 if request.each else len(reply.members))
    if request.each:
        return  # frames go up as they came, and a bad one spoils its own member
    (frame,), members = reply.frames, len(reply.members)
    if len(frame) != request.longest:
        raise WireError(f"sum has {len(frame)} bytes: expected {request.longest}.")
    norm = float(np.linalg.norm(add_frame(None, frame).astype(np.float64)))
    longest = min(request.clip_norm * SLACK, LARGEST_NORM) * members
    if not norm <= longest:
        raise WireError(f"sum has length {norm:.4g}: expected at most {longest:.4g}.")


def _plan(recipe: Recipe, population: int) -> PrivacyPlan | None:
    if recipe.federation is not None:
        return None
    found = privacy_plan.participation_of(recipe, population)
    return found if isinstance(found, PrivacyPlan) else None


def join(request: TrainRequest, replies: Iterable[TrainReply]) -> TrainReply:
    """Join replies to one with all frames, or with their sum, added one frame at a time."""
    if request.each:
        kept = list(replies)
        members = sorted(m for reply in kept for m in reply.members)
        frames = tuple(frame for reply in kept for frame in reply.frames)
        sums = tuple(part for reply in kept for part in reply.sums)
        return TrainReply(round=request.round, members=tuple(members), frames=frames, sums=sums)
    members, counts, total = [], dict.fromkeys(SUMS, np.float32(0.0)), None
    for reply in replies:
        members += reply.members
        counts = {name: counts[name] + np.float32(reply.sums[0][name]) for name in SUMS}
        total = add_frame(total, reply.frames[0])
    return TrainReply(
        round=request.round,
        members=tuple(sorted(members)),
        frames=(dense().encode(total, key_for(0, "upload")),),
        sums=({name: float(count) for name, count in counts.items()},),
    )


def add_frame(total: np.ndarray | None, frame: bytes) -> np.ndarray:
    """Add a frame of plain numbers to a sum of such frames, for any model."""
    if total is None:
        size, rest = divmod(len(frame) - overhead(dense().name), 4)
        if size < 0 or rest:
            raise WireError("frame is not one of plain numbers.")
        total = np.zeros(size, np.float32)
    total += dense().decode(frame, total)
    return total


def handover(folder: Path, request: TrainRequest | EvaluateRequest) -> Replies:
    """Return the replies of the nodes below to a request; delete those of old rounds."""
    path = folder / f"{request.round:08d}-{request.digest[:32]}"
    for old in sorted(p for p in folder.glob("*") if p != path)[: -ROUNDS_KEPT or None]:
        shutil.rmtree(old)
    return Replies(path)


def _fingerprint(assignments: tuple[Assignment, ...]) -> str:
    return hashlib.sha256(json.dumps([list(node) for node in assignments]).encode()).hexdigest()
