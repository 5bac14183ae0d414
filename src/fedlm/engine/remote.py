"""The sum of a cohort's updates, over a network.

In:       what the server sends, and a cohort whose members live at nodes.
Out:      the sum of the updates that came back in time, or each of them.
Promise:  answers are taken in the order of the seats, so that the sum does not depend on who was
          faster or away for a while; while all are there memory holds one frame at a time, that of
          a question or an answer; no update counts beyond its bound, whoever sent it.
Not here: the server's step, what a node does, whom to wait for (`dispatch.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Codec, Members, Params, Prepared, Total, Update
from fedlm.engine.dispatch import Assignment, Dispatch, Frames, Quorum, RoundStats, Transport
from fedlm.engine.messages import SUMS, TrainReply, TrainRequest
from fedlm.engine.payload_size import own_leaves
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import clip_again

Arrived = tuple[tuple[int, ...], Update | None]
"""Members, and what arrived from them; None where it could not be used."""

# What float32 rounding can add to a norm.
SLACK = 1 + 1e-5


class FlowerEngine:
    """Asks the nodes where a cohort's members live, and sums what they answer."""

    def __init__(
        self,
        algorithm: Algorithm,
        post: Transport,
        seats: Sequence[Assignment],
        *,
        recipe: str,
        seed: int,
        exact: Codec,
        patience: Quorum,
        tell: Callable[[RoundStats], None] = lambda tally: None,
    ) -> None:
        self.algorithm, self.post, self.seats = algorithm, post, tuple(seats)
        self.recipe, self.seed, self.exact = recipe, seed, exact
        self.patience, self.tell = patience, tell
        self.upload_bytes = self.download_bytes = 0

    @property
    def by_member(self) -> bool:
        """Whether updates travel one by one: a sum would spoil a codec or a member's leaves."""
        plain = self.algorithm.upload.name == self.exact.name
        return not plain or self.algorithm.local.draw is not None

    def prepare(self, round: int, members: Members) -> Prepared:
        """The cohort, seated; its text is elsewhere."""
        numbers = np.asarray(members)
        seated = []
        for seat in self.seats:
            here = (numbers >= seat.first) & (numbers < seat.first + seat.clients)
            if here.any():
                seated.append((seat, tuple(int(n) for n in numbers[here])))
        return Prepared(round, members, seated)

    def gather(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Total:
        """The sum of the updates of all who answered."""
        total = Sum(update_like(self.algorithm, sent, cohort.round))
        for members, update in self._round(sent, cohort, clip_norm, self.by_member):
            total.add(members, update, weighted=self.by_member)
            del update  # or it would be held until the next one is there
        return total.result()

    def collect(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Iterator[tuple[int, Update]]:
        """Each update of those who answered, by member."""
        for members, update in self._round(sent, cohort, clip_norm, True):
            if update is not None:
                yield members[0], update

    # ---- one round ---------------------------------------------------------------------

    def _round(
        self, sent: Any, cohort: Prepared, clip_norm: float, each: bool
    ) -> Iterator[Arrived]:
        key = key_for(self.seed, "download", round=cohort.round)
        like = update_like(self.algorithm, sent, cohort.round).delta
        asked = {
            seat.name: self.question(
                seat,
                like,
                round=cohort.round,
                members=members,
                clip_norm=float(clip_norm),
                each=each,
            )
            for seat, members in cohort.batches
        }

        def frames(names: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
            frame = self.algorithm.download.encode(sent, key)
            yield from ((name, (frame,)) for name in names)

        yield from self.ask(cohort.round, asked, like, frames)

    def question(self, seat: Assignment, like: Params, **asked: Any) -> TrainRequest:
        """What a node is asked, with the longest frame that it can answer with; no frame yet."""
        codec = self.algorithm.upload if asked["each"] else self.exact
        return TrainRequest(
            recipe=self.recipe,
            first=seat.first,
            population=sum(seat.clients for seat in self.seats),
            text=seat.text,
            longest=codec.encoded_bytes(like),
            frames=(),
            **asked,
        )

    def ask(
        self, round: int, asked: dict[str, TrainRequest], like: Params, frames: Frames
    ) -> Iterator[Arrived]:
        """What arrives for the questions of a round; who answered is told at its end."""
        tally = RoundStats(round)
        began = time.monotonic()
        dispatch = Dispatch(self.post, self.patience, asked, tally, frames=frames)
        for name, answer in dispatch.replies():
            yield from self._updates(name, asked[name], answer, like, tally)
            del answer
        self.download_bytes += tally.down_bytes
        tally.seconds = time.monotonic() - began
        self.tell(tally)
        dispatch.check_quorum()

    def _updates(
        self, name: str, question: TrainRequest, answer: TrainReply, like: Params, tally: RoundStats
    ) -> Iterator[Arrived]:
        """What a node sent, frame by frame; a bad frame spoils its own members only."""
        self.upload_bytes += sum(map(len, answer.frames))
        groups = [(m,) for m in answer.members] if question.each else [answer.members]
        good = 0
        for members, frame, sums in zip(groups, answer.frames, answer.sums, strict=True):
            update = None
            try:
                update = self._arrived(frame, sums, question, members, like)
                good += 1
            except WireError as error:
                tally.garbage[name] = str(error)
            yield members, update
        if good:
            tally.answered.append(name)

    def _arrived(
        self,
        frame: bytes,
        sums: Mapping[str, float],
        question: TrainRequest,
        members: tuple[int, ...],
        like: Params,
    ) -> Update:
        """Law 7: no update changes the model beyond its bound, whoever sent it."""
        codec, keep = self.exact, None
        if question.each:
            codec = self.algorithm.upload
            local = self.algorithm.local_of(question.round)
            keep = own_leaves(local, like, self.seed, question.round, members[0])
        delta = tree.fill(codec.decode(frame, tree.thin(like, keep)), like, keep)
        if not math.isfinite(_norm(delta)):
            raise WireError("update is not finite.")
        if max(sums["refused"], sums["unclipped"]) > len(members):
            raise WireError("update counts more members than were asked.")
        mask = None if keep is None else jnp.asarray(keep, jnp.float32)
        scalars = {name: jnp.float32(sums[name]) for name in SUMS}
        update = Update(delta=delta, mask=mask, **scalars)
        return update if self.algorithm.plan is None else self._bounded(update, question, members)

    def _bounded(self, update: Update, question: TrainRequest, members: tuple[int, ...]) -> Update:
        """An update within the plan's clip_norm, for each of the members it stands for."""
        if question.each:
            update = clip_again(self.algorithm, update, jnp.float32(question.clip_norm))
        longest = question.clip_norm * len(members) * SLACK
        norm = _norm(update.delta)
        if norm > longest or update.weight > len(members):
            raise WireError(f"update has length {norm:.4g}: the plan allows {longest:.4g}.")
        return update


class Sum:
    """A total that grows in place: one payload of memory, whatever the number of answers."""

    def __init__(self, like: Update) -> None:
        leaves, self.structure = jax.tree.flatten(like.delta)
        self.leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        self.sums = dict.fromkeys((*SUMS, "members"), np.float32(0.0))
        self.shares = None if like.mask is None else np.zeros(like.mask.shape, np.float32)

    def add(self, members: tuple[int, ...], update: Update | None, *, weighted: bool) -> None:
        """Rounds as the loop engine does: the product, then the sum."""
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
        delta = jax.tree.unflatten(self.structure, [jnp.asarray(leaf) for leaf in self.leaves])
        shares = None if self.shares is None else jnp.asarray(self.shares)
        return Total(delta=delta, shares=shares, **jax.tree.map(jnp.asarray, self.sums))


def _norm(delta: Params) -> float:
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(delta)]
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.dot(x, x)) for x in leaves))
