"""A federation that looks like one node to the federation above.

In:       a payload from above, a transport to the nodes below.
Out:      one reply for the whole subtree: the sum of its sums, or all of its frames.
Promise:  a relay changes nothing but the address: members keep the numbers of the whole
          federation, requests go down as they came, frames go up as they came or summed; what a
          node below replied is on disk before the next one is asked, so a relay that is killed
          asks nobody twice who had replied; a question passes the same gate as at a node, by the
          policy and the ledger of the relay's own kit; under secure sums it opens the sum of its
          nodes, of which it sees nothing else, and adds that to the sum above as a node does.
Not here: models and text, of which a relay knows nothing; the gate (`guard.py`), the questions of a
          secure sum (`engine/secure_attempts.py`).

A relay in a secure sum. Its answer to the step in which a node masks its vector is the masked sum
of its nodes: it then asks them the five questions, by the list of members below. That sum is opened
once per round, as any is, and is the same in every attempt above; it is kept in memory until the
next round, and never on the disk. A relay that was killed asks its nodes again, who give the same
bytes. If too few nodes are left below, the relay refuses, and the sum above goes on without it.
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
from fedlm.deploy.policy import Policy, Refusal
from fedlm.deploy.question import Asked, check_part
from fedlm.deploy.replies import Replies
from fedlm.deploy.secure_worker import SecureAnswers
from fedlm.engine.bounds import LARGEST_NORM, SLACK
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import (
    TRAINING,
    Assignment,
    Dispatch,
    Quorum,
    RequestKind,
    RoundStats,
    Transport,
)
from fedlm.engine.evaluate_messages import (
    EVALUATE_REQUEST,
    EVALUATION,
    EvaluateReply,
    EvaluateRequest,
    encode_evaluate_reply,
    read_evaluate_request,
)
from fedlm.engine.messages import (
    SECURE_REQUEST,
    SUMS,
    Hello,
    Payload,
    TrainReply,
    TrainRequest,
    respond,
)
from fedlm.engine.secure_attempts import Opened, SecureSums, SumQuestion
from fedlm.engine.secure_messages import (
    SecureReply,
    SecureRequest,
    encode_secure_reply,
    read_secure_request,
)
from fedlm.evaluate.held_out import NO_MODEL
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import hides
from fedlm.recipe import privacy_plan
from fedlm.recipe.secure_sums import terms_of
from fedlm.recipe.settings import Recipe
from fedlm.recipe.tree import leaf_plan
from fedlm.secure.members import MemberList
from fedlm.secure.terms import Terms
from fedlm.wire.dense import dense
from fedlm.wire.frame import overhead

COUNTERS = "counters.json"
ROUNDS_KEPT = 2
RUNS_KEPT = 8  # whose secure sums go on after a kill
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
        secure: SecureAnswers | None = None,
        members_below: Callable[[], MemberList | None] = lambda: None,
    ) -> None:
        """Create a relay, called `name` above, over the nodes `names`, with files in `folder`.

        Without a `ledger` it remembers what it answered only as long as it lives. `secure` is its
        half of secure sums above, `members_below` the list that its own nodes approved.
        """
        self.secure, self.members_below = secure, members_below
        self._last: tuple[str, Opened] | None = None  # the digest of a question, and its sum
        self.folder, self.transport, self.names = folder, transport, names
        self.quorum, self.name, self.say = quorum, name, say
        self.policy = policy or Policy()
        self.ledger = NodeLedger() if ledger is None else ledger
        self.guard = Guard(self.policy, self.ledger, Asked(0))
        self.counters = Counters(folder / COUNTERS)  # of the nodes below

    def __call__(self, payload: Payload) -> Payload:
        """Return the reply to a payload; an error becomes a refusal."""
        others = {
            EVALUATE_REQUEST: lambda p: encode_evaluate_reply(
                self.evaluate(read_evaluate_request(p))
            ),
            SECURE_REQUEST: lambda p: encode_secure_reply(self.secure_sum(read_secure_request(p))),
        }
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
        registration.save_assignments(self._seats(_fingerprint(below)), below)
        return Hello(
            clients=sum(node.clients for node in below),
            text=_fingerprint(below),
            tokenizer=tokenizers.pop(),
            version=next(iter(heard.values())).version,
            leaves=registration.leaves_below(below),
            tokens=registration.tokens_below(below),
            counter=self.ledger.counter,
        )

    def _seats(self, fingerprint: str) -> Path:
        """Return the file of assignments: a run that goes on has others than one that began later.

        Among the nodes below there are few ways to be there when a run begins.
        """
        name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        return self.folder / f"seats-{name}.json"

    def _assignments(
        self, request: TrainRequest | EvaluateRequest | SecureRequest
    ) -> tuple[Assignment, ...]:
        below = registration.load_assignments(self._seats(request.text))
        if below is None or _fingerprint(below) != request.text:
            raise EngineError("the nodes below are not those that the run began with.")
        return below

    # ---- a secure sum ------------------------------------------------------------------

    def secure_sum(self, request: SecureRequest) -> SecureReply:
        """Answer one step of the sum above; its vector is the opened sum of the nodes below."""
        with self.guard.recording(request):
            if self.secure is None:
                raise Refusal("this relay takes part in no secure sums: it has no identity key.")
            recipe, plan, members = self._allowed(request)
            if any(member - request.first >= members for member in request.members):
                raise WireError(f"there are {members} members below: others were asked for.")
            session = self.secure.session(request, recipe, request.size)
            check_part(self.policy, request, recipe, plan, session.terms.threshold, Asked(members))
            terms = self._terms_below(recipe, request.size)
            if request.step == "mask":
                self._admit(request.training, recipe, plan, members)
        found: list[Opened] = []

        def words(seed: bytes) -> np.ndarray:
            found.append(self._opened(request, terms))
            return found[0].words

        frame = self.secure.answer(request, session, words)
        return SecureReply(
            round=request.round,
            attempt=request.attempt,
            step=request.step,
            frames=(frame,),
            nodes=sum(below.nodes for below in found),
            members=sum(below.members for below in found),
            counter=self.ledger.counter,
        )

    def _terms_below(self, recipe: Recipe, size: int) -> Terms:
        """Return the terms of the sum below, by the list that its nodes approved."""
        listed = self.members_below()
        if listed is None:
            raise Refusal(
                f"the federation below {self.name} has no list of members, so that its nodes "
                "cannot add up under masks: make one there with fedlm federation members HOME "
                "--propose, and let each node approve it."
            )
        return terms_of(recipe, listed.members, size)

    def _opened(self, request: SecureRequest, terms: Terms) -> Opened:
        """Return the sum of the nodes below, opened now or in an earlier attempt above."""
        digest = request.training.digest
        if self._last is not None and self._last[0] == digest:
            return self._last[1]
        below = [a._replace(first=request.first + a.first) for a in self._assignments(request)]
        stats = RoundStats(request.round)
        sums = SecureSums(
            self.transport,
            below,
            terms.members,
            run=request.run,
            recipe=request.recipe,
            population=request.population,
            quorum=self.quorum,
            counters=self.counters,
            say=self.say,
            file=self._attempt_file(request.run),
            waits=False,
        )
        asked = SumQuestion(
            terms=terms,
            round=request.round,
            members=sums.members_by_node(request.members),
            clip_norm=request.clip_norm,
            frame=request.frames[1],
        )
        found = sums.opened(asked, stats)
        if found is None:
            why = {**stats.refused, **stats.garbage}
            said = " ".join(f"{name}: {reason}" for name, reason in sorted(why.items())[:4])
            raise EngineError(f"the sum below {self.name} is lost: {stats.lost} {said}")
        self.say(f"round {request.round}: a secure sum of {found.nodes} nodes")
        self._last = digest, found
        return found

    def _attempt_file(self, run: str) -> Path:
        """Return the file of the attempt under way in a run; those of old runs are removed."""
        folder, found = self.folder / "sums", f"{run}.json"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [path for path in folder.glob("*.json") if path.name != found]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-RUNS_KEPT]:
            old.unlink()
        return folder / found

    # ---- a round -----------------------------------------------------------------------

    def train(self, request: TrainRequest) -> TrainReply:
        """Pass a round on to the nodes below, and join their replies."""
        with self.guard.recording(request):
            requests = self._requests(request)
            if not requests:
                raise WireError("none of the members asked for lives here.")
            recipe, plan, members = self._allowed(request)
            if recipe.wire.secure_nodes:
                raise Refusal(
                    "a sum without masks is asked for: this recipe has secure sums "
                    "(wire.secure_nodes)."
                )
            self._admit(request, recipe, plan, members)
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
            if request.phase == "noisy":  # a release about the clients below, who are at nodes
                self.guard.noisy_figures(request, recipe, plan, asked=Asked(members))
            else:
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

    def _admit(
        self, request: TrainRequest, recipe: Recipe, plan: PrivacyPlan | None, members: int
    ) -> None:
        """Check a request as a node does, but for the size of a model that is not known here."""
        names = [self.ledger.client(str(member - request.first)) for member in request.members]
        self.guard.admit(request, recipe, plan, names, Asked(members))

    def _allowed(
        self, request: TrainRequest | EvaluateRequest | SecureRequest
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
        exchange: RequestKind,
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
    """Raise `WireError` if a reply would spoil a sum, by the same checks as the server's."""
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
        return leaf_plan(recipe, population)
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
