"""A node's half of secure sums over a network.

In:       questions of the server, the recipe's work, the kit's list of members and identity key.
Out:      answers of the protocol: keys, shares, a masked vector, a signature, revealed shares.
Promise:  a question is answered only if the server's session is the one that this node makes of its
          own list of members and of the recipe; the state after an answer is on the disk before the
          answer leaves; nothing but a masked vector leaves of what members trained.
Not here: the protocol (`secure/node.py`), policy and ledger (`guard.py`), training
          (`node_worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from fedlm.core.types import Start
from fedlm.deploy.local import NodeWork
from fedlm.deploy.policy import Refusal
from fedlm.engine.secure_messages import SecureRequest
from fedlm.engine.secure_vector import COUNTS, NodeSum, SumVector
from fedlm.federation.algorithm import update_like
from fedlm.privacy.release import release
from fedlm.recipe.secure_sums import integers_of, shares_of, terms_of
from fedlm.recipe.settings import Recipe
from fedlm.secure.members import MemberList
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Session


@dataclass(frozen=True)
class SecureAnswers:
    """What a node needs for secure sums: its durable state, and the list that it approved."""

    store: NodeStore
    members: Callable[[], MemberList | None]

    def session(self, request: SecureRequest, recipe: Recipe, size: int) -> Session:
        """Return the session of a question by this node's own list, or raise `Refusal`."""
        listed, told = self.members(), recipe.wire.secure_nodes
        if not told or recipe.federation is not None:
            raise Refusal("a secure sum is asked for: this recipe has none (wire.secure_nodes).")
        if listed is None:
            raise Refusal(
                "this node has no list of members, so that it cannot know with whom it would add "
                "up: its owner takes one with fedlm node approve KIT members.json."
            )
        if told < len(listed.members):
            raise Refusal(
                f"wire.secure_nodes = {told}: the list of members of this node, number "
                f"{listed.number}, has {len(listed.members)}."
            )
        terms = terms_of(recipe, listed.members, size)
        session = Session(terms, request.run, request.round, request.attempt)
        if session.digest.hex() != request.session:
            raise Refusal(
                "the server means another sum: its list of members or its terms are not those of "
                f"this node, whose list has the number {listed.number} and the fingerprint "
                f"{listed.fingerprint}."
            )
        return session

    def answer(
        self, request: SecureRequest, session: Session, words: Callable[[bytes], np.ndarray]
    ) -> bytes:
        """Return the answer to a question.

        `words` makes the vector from the secret of this node's noise, and is called only where the
        vector is masked.
        """
        store, step = self.store, request.step
        if step == "keys":
            return store.keys(session)
        question = request.frames[0]
        if step == "share":
            return store.share(session, question)
        if step == "sign":
            return store.sign(session, question)
        if step == "reveal":
            return store.reveal(session, question)
        return store.mask(session, question, words(store.noise_seed(session)))


def vector_of(work: NodeWork, round: int) -> SumVector:
    """Return what the nodes of a round add up."""
    recipe, algorithm = work.recipe, work.algorithm
    like = update_like(algorithm, work.sent_like, round).delta
    shares = shares_of(recipe, algorithm)
    return SumVector(
        integers=integers_of(recipe, algorithm),
        nodes=recipe.wire.secure_nodes,
        like=like,
        shares=None if shares is None else shares(like),
    )


def node_sum(work: NodeWork, request: SecureRequest, vector: SumVector) -> NodeSum:
    """Train this node's members of a round, and add up their rounded updates."""
    total = NodeSum(vector, request.round)
    if not request.members:
        return total
    engine, algorithm = work.engine, work.algorithm
    sent = algorithm.download.decode(request.frames[1], work.sent_like)
    cohort = engine.prepare(request.round, np.asarray(request.members))
    for member, update, *_ in engine.updates(Start(sent, request.clip_norm), cohort):
        total.add(int(member), jax.device_get(update), request.clip_norm)
    told = release(algorithm.plan, "reply", total.counts)
    total.counts = {name: float(told.get(name, 0.0)) for name in COUNTS}
    return total
