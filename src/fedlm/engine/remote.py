"""A cohort whose members live at nodes: asked over a transport, summed here.

In:       what members begin from, and a cohort whose text is elsewhere.
Out:      the sum of the updates that came back in time, or each of them, with the bytes they took.
Promise:  answers are taken in the order of assignments, so that the sum does not depend on who was
          faster or away for a while; while all are there memory holds one frame at a time, that of
          a question or an answer; no update counts beyond its bound, whoever sent it; a member
          whose node did not answer is left out.
Not here: the server's step, what a node does, whom to wait for (`dispatch.py`).

Members are clients, named by their numbers over the whole federation, where they share one start.
With one start per member they are nodes of a tree: `homes` says which node of the network holds the
text of each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.core.types import (
    Arrived,
    Codec,
    Cohort,
    Gathered,
    Members,
    Params,
    Start,
    Starts,
    Total,
    Update,
)
from fedlm.engine import leaf_frames
from fedlm.engine.bounds import LARGEST_NORM, SLACK, Bounds
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import (
    TRAINING,
    Assignment,
    Dispatch,
    Frames,
    Quorum,
    RoundStats,
    Transport,
)
from fedlm.engine.messages import SUMS, TrainReply, TrainRequest
from fedlm.engine.offenders import Earlier, Offenders
from fedlm.engine.payload_size import own_leaves
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.leaf import LeafRules
from fedlm.federation.member import ClientState, clip_again, model_like


class Answered(NamedTuple):
    """A frame that came back, for one member or as the sum over several."""

    members: tuple[int, ...]
    update: Update | None  # None where the frame could not be used
    size: int


class Leaf(NamedTuple):
    """A node that holds text, connected to the server or behind relays."""

    path: tuple[str, ...]  # its name, after those of the relays before it
    assignment: Assignment  # through which it is asked
    first: int  # the number of its first client
    clients: int
    tokens: int = 0  # that it trains on; 0 where it does not tell


def leaves_of(assignments: Sequence[Assignment]) -> tuple[Leaf, ...]:
    """Return all nodes that hold text, in the order of the numbers of their clients.

    >>> [leaf.path for leaf in leaves_of([Assignment("a", 0, 3, "", (("x", 1), ("y/z", 2)))])]
    [('a', 'x'), ('a', 'y', 'z')]
    """
    found = []
    for assignment in assignments:
        at, here = assignment.first, assignment.leaves or (("", assignment.clients),)
        told = assignment.tokens or (0,) * len(here)
        for (path, clients), tokens in zip(here, told, strict=True):
            below = tuple(path.split("/")) if path else ()
            found.append(Leaf((assignment.name, *below), assignment, at, clients, tokens))
            at += clients
    return tuple(found)


class RemoteEngine:
    """An engine that asks the nodes of a cohort's members, and sums their answers."""

    adds_noise = False

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        assignments: Sequence[Assignment],
        *,
        run: str,
        recipe: str,
        seed: int,
        exact: Codec,
        quorum: Quorum,
        on_stats: Callable[[RoundStats], None] = lambda stats: None,
        homes: Mapping[int, Leaf] | None = None,
        counters: Counters | None = None,
        secret_names: bool = False,
        bounds: Bounds = Bounds(),  # noqa: B008
        say: Callable[[str], None] = lambda text: None,
        earlier: Earlier = tuple,
        at_home: LeafRules | None = None,
    ) -> None:
        """Take `homes`, in a tree: from each node's training number to the holder of its text.

        `at_home` is what leaves these nodes, if they keep their own models.

        `run` names the run to nodes for as long as it lasts; `counters` is what is known of their
        ledgers; with `secret_names` no error tells who was asked; `bounds` are what the recipe
        makes possible for a member to report; `say` tells whom a round waits for; `earlier` gives
        the outcomes of rounds that were played before a restart.
        """
        self.bounds, self.say, self.offenders = bounds, say, Offenders(earlier)
        self.run, self.counters, self.secret_names = run, counters or Counters(), secret_names
        self.algorithm, self.transport, self.assignments = algorithm, transport, tuple(assignments)
        self.recipe, self.seed, self.exact = recipe, seed, exact
        self.quorum, self.on_stats, self.homes = quorum, on_stats, homes or {}
        self.at_home = at_home
        self._sent: dict[int, int] = {}  # bytes that each node with its own model was sent
        self._told = RoundStats(-1)

    @property
    def remembered(self) -> bool:
        """Whether nodes keep something between rounds, and are told which answer last counted."""
        return self.algorithm.memory_at_nodes or self.at_home is not None

    @property
    def by_member(self) -> bool:
        """Whether updates travel one by one, because the codec or members' leaves forbid sums."""
        plain = self.algorithm.upload.name == self.exact.name
        return not plain or self.algorithm.local.draw is not None

    def prepare(self, round: int, members: Members) -> Cohort:
        """Return the cohort by its members alone; its text is elsewhere."""
        return Cohort(round, members)

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Sum the updates of all members whose nodes answered."""
        each = self.by_member or not isinstance(starts, Start)
        stats, total = RoundStats(cohort.round), Sum(self.like_of(starts, cohort.round))
        counted: set[int] = set()
        for members, update, _ in self._round(starts, cohort, each, stats):
            total.add(members, update, weighted=each)
            counted |= set() if update is None else set(members)
            del update  # or it would be held until the next one is there
        whole = total.result()
        if self.algorithm.memory_at_nodes and isinstance(starts, Start):
            last = _last_counted(starts.client_state, cohort, counted)
            whole = replace(whole, client_state=last)
        return Gathered(whole, stats.up_bytes, stats.down_bytes)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Yield the update of each member whose node answered."""
        download = self.algorithm.download.encoded_bytes(model_like(starts))
        answered = self._round(starts, cohort, True, RoundStats(cohort.round))
        if not isinstance(starts, Start):  # these are asked in the order of their assignments
            by_member = {a.members[0]: a for a in answered}
            answered = (by_member.pop(m) for m in map(int, cohort.members) if m in by_member)
        for (member,), update, upload in answered:
            if update is None:
                continue
            if self.remembered:  # what is remembered stays there; it counted now
                last = ClientState(np.asarray(cohort.round, np.int32), None)
                update = replace(update, client_state=last)
            yield Arrived(member, update, upload, self._sent.get(member, download))

    def like_of(self, starts: Starts, round: int) -> Update:
        return update_like(self.algorithm, model_like(starts), round)

    # ---- what is asked -----------------------------------------------------------------

    def to_clients(
        self, start: Start, cohort: Cohort, each: bool, like: Params
    ) -> tuple[dict[str, TrainRequest], Frames]:
        """Return a question for each node with members of the cohort, and a way to make frames."""
        numbers, asked = np.asarray(cohort.members), {}
        for assignment in self.assignments:
            places = np.flatnonzero(
                (numbers >= assignment.first) & (numbers < assignment.first + assignment.clients)
            )
            here = numbers[places]
            last: tuple[int, ...] = ()
            if self.algorithm.memory_at_nodes:
                last = tuple(int(n) for n in np.asarray(start.client_state)[places])
            if len(here):
                asked[assignment.name] = self._question(
                    assignment,
                    like,
                    round=cohort.round,
                    members=tuple(int(n) for n in here),
                    clip_norm=float(start.clip_norm),
                    each=each,
                    remembered=last,
                )

        def frames(names: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
            frame = self.encoded(start, cohort.round)
            yield from ((name, (frame,)) for name in names)

        return asked, frames

    def _to_homes(
        self, starts: Sequence[Start], cohort: Cohort, like: Params
    ) -> tuple[dict[str, TrainRequest], Frames]:
        """Return a request per assignment, and a way to make its frames, one per member."""
        start_of = dict(zip(map(int, cohort.members), starts, strict=True))
        remembers = self.remembered
        by_assignment: dict[Assignment, list[int]] = {}
        for number in sorted(start_of, key=lambda n: self.homes[n].first):
            by_assignment.setdefault(self.homes[number].assignment, []).append(number)
        asked = {
            assignment.name: self._question(
                assignment,
                like,
                round=cohort.round,
                members=tuple(self.homes[n].first for n in here),
                clip_norm=float(min(start_of[n].clip_norm for n in here)),
                each=True,
                numbers=tuple(here),
                remembered=tuple(_last_turn(start_of[n]) for n in here) if remembers else (),
            )
            for assignment, here in by_assignment.items()
        }

        def frames(names: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
            for name in names:
                made = {n: self.encoded(start_of[n], cohort.round) for n in asked[name].numbers}
                self._sent |= {n: len(frame) for n, frame in made.items()}
                yield name, tuple(made.values())

        return asked, frames

    def encoded(self, start: Start, round: int) -> bytes:
        key, download = key_for(self.seed, "download", round=round), self.algorithm.download
        if start.from_above is not None:
            return leaf_frames.encode(start.from_above, download, self.exact, key)
        return download.encode(start.model, key)

    def _question(self, assignment: Assignment, like: Params, **asked: Any) -> TrainRequest:
        """Return the request to a node, with the longest frame it may answer with; no frame yet."""
        codec = self.algorithm.upload if asked["each"] else self.exact
        return TrainRequest(
            run=self.run,
            recipe=self.recipe,
            counter=self.counters.of(assignment.name),
            first=assignment.first,
            population=sum(assignment.clients for assignment in self.assignments),
            text=assignment.text,
            longest=codec.encoded_bytes(like),
            frames=(),
            **asked,
        )

    # ---- what comes back ---------------------------------------------------------------

    def _round(
        self, starts: Starts, cohort: Cohort, each: bool, stats: RoundStats
    ) -> Iterator[Answered]:
        """Ask for a cohort's updates and yield what comes, frame by frame; then report `stats`."""
        like = self.like_of(starts, cohort.round).delta
        if isinstance(starts, Start):
            asked, frames = self.to_clients(starts, cohort, each, like)
        else:
            asked, frames = self._to_homes(starts, cohort, like)
        began = time.monotonic()
        stats.aside = sorted(asked)
        asked = self.offenders.to_ask(asked, cohort.round)
        stats.aside = [name for name in stats.aside if name not in asked]
        dispatch = Dispatch(
            self.transport,
            self.quorum,
            asked,
            stats,
            frames=frames,
            say=self.tell_waiting,
            exchange=TRAINING,
        )
        for name, answer in dispatch.replies():
            self.counters.hear(name, answer.counter)
            yield from self.answers_in(name, asked[name], answer, like, stats)
            del answer
        stats.seconds = time.monotonic() - began
        stats.put_aside = dict(
            self.offenders.judge(stats.round, {*stats.garbage, *stats.late}, stats.answered)
        )
        if not isinstance(starts, Start) and stats.round == self._told.round:
            # The levels of a tree are asked one after another: each tells of those before it too.
            stats = _joined(self._told, stats)
        self._told = stats
        self.on_stats(stats)
        dispatch.check_quorum(names=not self.secret_names)

    def tell_waiting(self, names: Sequence[str], seconds: float) -> None:
        """Say whom a round waits for; under a plan, who was asked is a secret."""
        whom = "" if self.secret_names else f" for {', '.join(names)}"
        self.say(f"waiting{whom}, {seconds:.0f} s")

    def answers_in(
        self, name: str, question: TrainRequest, answer: TrainReply, like: Params, stats: RoundStats
    ) -> Iterator[Answered]:
        """Yield what a node sent, frame by frame; a bad frame spoils its own members only."""
        number = dict(zip(question.members, question.numbers, strict=False))  # of a tree's nodes
        groups = [(m,) for m in answer.members] if question.each else [answer.members]
        good = 0
        for members, frame, sums in zip(groups, answer.frames, answer.sums, strict=True):
            update = None
            try:
                update = self._checked(frame, sums, question, members, like)
                good += 1
                stats.weights[name] = stats.weights.get(name, 0.0) + float(update.weight)
            except WireError as error:
                stats.garbage[name] = str(error)
            yield Answered(tuple(number.get(m, m) for m in members), update, len(frame))
        if good:
            stats.answered.append(name)

    def _checked(
        self,
        frame: bytes,
        sums: Mapping[str, float],
        question: TrainRequest,
        members: tuple[int, ...],
        like: Params,
    ) -> Update:
        """Decode an update, and refuse it if it exceeds its bounds, whoever sent it."""
        codec, keep = self.exact, None
        if question.each:
            codec = self.algorithm.upload
            local = self.algorithm.local_of(question.round)
            keep = own_leaves(local, like, self.seed, question.round, members[0])
        if self.at_home is None:
            delta = tree.fill(codec.decode(frame, tree.thin(like, keep)), like, keep)
        else:
            delta = self.at_home.whole(codec.decode(frame, self.at_home.part(like)), like)
        if not math.isfinite(norm := _norm(delta)):
            raise WireError("update is not finite.")
        if norm > LARGEST_NORM * len(members):
            raise WireError(f"update has length {norm:.4g}: no training leads to that.")
        sums = self.bounds.checked(sums, len(members))
        mask = None if keep is None else jnp.asarray(keep, jnp.float32)
        scalars = {name: jnp.float32(sums[name]) for name in SUMS}
        update = Update(delta=delta, mask=mask, **scalars)
        return update if self.algorithm.plan is None else self._bounded(update, question, members)

    def _bounded(self, update: Update, question: TrainRequest, members: tuple[int, ...]) -> Update:
        """Refuse an update longer than the plan's clip norm for each member it stands for."""
        if question.each:
            update = clip_again(self.algorithm.client_half, update, jnp.float32(question.clip_norm))
        longest = question.clip_norm * len(members) * SLACK
        norm = _norm(update.delta)
        if norm > longest or update.weight > len(members):
            raise WireError(f"update has length {norm:.4g}: the plan allows {longest:.4g}.")
        return update


class Sum:
    """A total that grows in place, with the memory of one payload for any number of answers."""

    def __init__(self, like: Update) -> None:
        leaves, self.structure = jax.tree.flatten(like.delta)
        self.leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        self.sums = dict.fromkeys((*SUMS, "members"), np.float32(0.0))
        self.shares = None if like.mask is None else np.zeros(like.mask.shape, np.float32)

    def add(self, members: tuple[int, ...], update: Update | None, *, weighted: bool) -> None:
        """Add an update, rounded as the loop engine rounds: the product, then the sum."""
        self.sums["members"] += np.float32(len(members))
        if update is None:
            self.sums["refused"] += np.float32(len(members))
            return
        factor = np.asarray(update.weight) if weighted else np.float32(1.0)
        for mine, other in zip(self.leaves, jax.tree.leaves(update.delta), strict=True):
            theirs = np.asarray(other)
            mine += theirs if factor == 1 else factor * theirs
        if self.shares is not None:
            self.shares += factor * np.asarray(update.mask)
        for name in SUMS:
            self.sums[name] += np.float32(getattr(update, name))

    def result(self) -> Total:
        delta = jax.tree.unflatten(self.structure, self.leaves)
        return Total(**tree.from_host({"delta": delta, "shares": self.shares, **self.sums}))


def _last_turn(start: Start) -> int:
    """Return the round in which the answer of a tree's node last counted."""
    return int(start.client_state.own)


def _last_counted(before: Any, cohort: Cohort, counted: set[int]) -> np.ndarray:
    """Return for each member of a cohort the round in which its answer last counted."""
    here = np.array([int(member) in counted for member in cohort.members], bool)
    return np.where(here, np.int32(cohort.round), np.asarray(before, np.int32))


def _norm(delta: Params) -> float:
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(delta)]
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.dot(x, x)) for x in leaves))


def _joined(before: RoundStats, now: RoundStats) -> RoundStats:
    whole = RoundStats(now.round)
    for field in fields(RoundStats):
        one, other = getattr(before, field.name), getattr(now, field.name)
        if field.name == "edges":
            whole.add_edges(before)
            whole.add_edges(now)
        elif isinstance(one, dict):
            setattr(whole, field.name, {**one, **other})
        elif field.name != "round":
            setattr(whole, field.name, one + other)
    return whole
