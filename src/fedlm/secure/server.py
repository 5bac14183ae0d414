"""The server's half of a secure sum.

In:       the answers of nodes, step by step.
Out:      the next questions; in the end the sum modulo 2^bits of the survivors' vectors.
Promise:  pure functions on a frozen state; one vector is held however many nodes there are; a node
          whose answer is bad is left out and named; with fewer nodes than the threshold `TooFew` is
          raised and nothing is opened; a secret from shares is used only if it fits what its owner
          committed to.
Not here: how questions travel, who is waited for, the node's half (`node.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedlm.core.errors import WireError
from fedlm.secure import messages, shamir
from fedlm.secure.keys import add_mask, public_of, verified, word
from fedlm.secure.messages import NodeKeys, Places
from fedlm.secure.node import (
    add_pair_mask,
    commitment,
    enough,
    graph,
    keys_are_signed,
    lowest,
    self_mask_key,
)
from fedlm.secure.terms import Session, TooFew

Messages = Iterable[tuple[int, bytes]]
"""The place of a node and its answer, for the nodes that answered."""
MOST_TRIES = 2000  # sets of shares that are tried where some do not fit


@dataclass(frozen=True, repr=False)
class ServerState:
    """What the server knows of one attempt; `faults` says of nodes why they were left out."""

    session: Session
    keys: Mapping[int, NodeKeys]
    shared: Places = ()
    survivors: Places = ()
    total: np.ndarray | None = None  # the sum of masked vectors
    faults: tuple[tuple[int, str], ...] = ()

    def fault(self, place: int, why: str) -> ServerState:
        """Return the state with one more node left out."""
        return replace(self, faults=(*self.faults, (place, why)))


def take_keys(session: Session, answers: Messages) -> tuple[ServerState, bytes]:
    """Return the state and the question with all keys, the same for every node."""
    state, found = ServerState(session, {}), dict[int, NodeKeys]()
    for place, answer in answers:
        try:
            keys = messages.read_keys(session, answer)
            if keys.place != place or not keys_are_signed(session, keys):
                raise WireError("keys that another node signed, or nobody.")
        except WireError as error:
            state = state.fault(place, str(error))
            continue
        found[place] = keys
    enough(session, len(found), "sent keys")
    return replace(state, keys=found), messages.encode_key_list(session, found.values())


def take_shares(state: ServerState, answers: Messages) -> tuple[ServerState, dict[int, bytes]]:
    """Return the state and, for each node that shared, the shares that are for it."""
    session, near = state.session, graph(state.session, dict(state.keys))
    by_giver: dict[int, dict[int, bytes]] = {}
    for place, answer in answers:
        try:
            sender, sealed = messages.read_shares(session, answer)
            if sender != place or place not in near or set(sealed) != set(near[place]):
                raise WireError("shares that are not one for each neighbor.")
        except WireError as error:
            state = state.fault(place, str(error))
            continue
        by_giver[place] = sealed
    enough(session, len(by_giver), "shared")
    shared = tuple(sorted(by_giver))
    questions = {
        taker: messages.encode_share_list(
            session,
            shared,
            {giver: by_giver[giver][taker] for giver in near[taker] if giver in by_giver},
        )
        for taker in shared
    }
    return replace(state, shared=shared), questions


def take_masked(state: ServerState, answers: Messages) -> tuple[ServerState, bytes]:
    """Add up masked vectors as they come; return the state and the list of survivors."""
    terms = state.session.terms
    total, survivors = np.zeros(terms.size, word(terms.bits)), set[int]()
    for place, answer in answers:
        try:
            sender, vector = messages.read_masked(state.session, answer)
            if sender != place or place not in state.shared or place in survivors:
                raise WireError("a masked vector of a node that did not share, or a second one.")
        except WireError as error:
            state = state.fault(place, str(error))
            continue
        total += vector
        survivors.add(place)
    enough(state.session, len(survivors), "sent masked vectors")
    state = replace(state, survivors=tuple(sorted(survivors)), total=total)
    return state, messages.encode_survivors(state.session, state.survivors)


def take_signatures(state: ServerState, answers: Messages) -> tuple[ServerState, bytes]:
    """Return the state and the question with the signatures, for those who signed."""
    session, found = state.session, dict[int, bytes]()
    listed = messages.encode_key_list(session, state.keys.values())
    view = messages.view_to_sign(session, listed, state.shared, state.survivors)
    for place, answer in answers:
        try:
            sender, signature = messages.read_signed(session, answer)
            public = session.terms.members[sender].public
            if sender != place or place not in state.survivors:
                raise WireError("a signature of a node that is no survivor.")
            if not verified(public, signature, view):
                raise WireError("a signature of another list of survivors than the server's.")
        except WireError as error:
            state = state.fault(place, str(error))
            continue
        found[place] = signature
    enough(session, len(found), "signed the list of survivors")
    return state, messages.encode_signatures(session, found)


def take_revealed(state: ServerState, answers: Messages) -> tuple[ServerState, np.ndarray]:
    """Remove all masks by the shares that nodes revealed; return the sum modulo 2^bits."""
    session, near = state.session, graph(state.session, dict(state.keys))
    shares: dict[int, dict[int, bytes]] = {owner: {} for owner in state.shared}
    answered = 0
    for place, answer in answers:
        try:
            sender, revealed = messages.read_revealed(session, answer)
            wanted = {place, *(set(near.get(place, ())) & set(state.shared))}
            if sender != place or place not in state.survivors or set(revealed) != wanted:
                raise WireError("revealed shares that are not one per neighbor and its own.")
        except WireError as error:
            state = state.fault(place, str(error))
            continue
        answered += 1
        for owner, share in revealed.items():
            shares[owner][place] = share
    enough(session, answered, "revealed shares")
    assert state.total is not None
    total = state.total.copy()
    for owner in state.shared:
        if owner in state.survivors:
            state, seed = _opened(state, owner, shares[owner], _fits_commitment(state, owner))
            add_mask(total, self_mask_key(session, owner, seed), subtract=True)
            continue
        left = [peer for peer in near[owner] if peer in state.survivors]
        if not left:
            continue
        state, key = _opened(state, owner, shares[owner], _fits_mask_key(state, owner))
        # What survivors added for the absent node is the opposite of what it would have added.
        for peer in left:
            add_pair_mask(session, total, key, owner, state.keys[peer])
    return state, lowest(total, session.terms.bits)


def _fits_commitment(state: ServerState, owner: int) -> Callable[[bytes], bool]:
    wanted = state.keys[owner].commitment
    return lambda seed: commitment(state.session, owner, seed) == wanted


def _fits_mask_key(state: ServerState, owner: int) -> Callable[[bytes], bool]:
    return lambda key: public_of(key) == state.keys[owner].mask


def _opened(
    state: ServerState, owner: int, shares: Mapping[int, bytes], fits: Callable[[bytes], bool]
) -> tuple[ServerState, bytes]:
    """Return the secret of a node that its shares give; name the holders of wrong shares."""
    session, threshold = state.session, state.session.terms.share_threshold
    enough(session, len(shares), f"hold shares of {session.name(owner)}", threshold)
    sets = itertools.combinations(sorted(shares), threshold)
    for places in itertools.islice(sets, MOST_TRIES):
        chosen = {place: shares[place] for place in places}
        secret = shamir.combine(chosen)
        if secret is not None and fits(secret):
            for place in shares.keys() - chosen.keys():
                if shamir.share_at(chosen, place) != shares[place]:
                    state = state.fault(place, f"its share of {session.name(owner)} does not fit.")
            return state, secret
    raise TooFew(
        f"the shares of {session.name(owner)} do not fit what it committed to in round "
        f"{session.round}, attempt {session.attempt}: it shared wrongly, or too many holders "
        "changed their shares. No sum was opened."
    )
