"""A node's half of a secure sum: five questions, five answers.

In:       the node's identity, its state, a question of the server.
Out:      the next state, and the answer.
Promise:  pure functions: the same state and question give the same bytes; a state answers one
          question per step and refuses another one; of each peer at most one kind of share is ever
          revealed in one attempt. Whoever keeps states writes the new one down before the answer
          leaves (`store.py`).
Not here: the server's half (`server.py`), formats (`messages.py`).

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning", CCS 2017, in its version for servers that may lie:

    keys     make a key for shares, a key for masks and a seed for a self mask; sign them
    share    check that all keys are members'; share the mask key and the seed among neighbors
    mask     add to the vector the self mask and, with one sign or the other, a mask per neighbor
    sign     sign the list of those whose vectors arrived
    reveal   having seen the signatures of t nodes on one list: of each survivor reveal the share of
             its seed, of each absent node the share of its mask key

All secrets of an attempt come from one seed of 32 bytes, so that a state is small and an answer can
be made again. The seed is drawn anew for each attempt and forgotten with it.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedlm.secure import messages, shamir
from fedlm.secure.keys import (
    IdentityKey,
    add_mask,
    agreed,
    derive,
    digest,
    public_of,
    seal,
    unseal,
    verified,
    word,
)
from fedlm.secure.messages import NodeKeys, Places
from fedlm.secure.terms import SecureError, Session, TooFew, neighborhoods


@dataclass(frozen=True, repr=False)
class SecureNode:
    """What a node knows of one attempt: its seed, and the questions that it answered."""

    session: Session
    place: int
    seed: bytes
    keys: bytes = b""  # the list of keys, as it came
    shares: bytes = b""  # the shares for this node, as they came
    vector: bytes = b""  # the digest of the vector that was masked
    survivors: bytes = b""  # the list that was signed
    signatures: bytes = b""  # on which shares were revealed


def begin(session: Session, identity: IdentityKey) -> SecureNode:
    """Return the state before the first answer, with a new secret seed."""
    public = identity.public
    for place, member in enumerate(session.terms.members):
        if member.public == public:
            return SecureNode(session, place, secrets.token_bytes(32))
    raise SecureError("this node is not in the federation's list of members.")


# ---- keys ----------------------------------------------------------------------------------------


def _secret(state: SecureNode, purpose: str, length: int = 32) -> bytes:
    return derive(state.seed, state.session.digest, b"fedlm secure " + purpose.encode(), length)


def commitment(session: Session, place: int, seed: bytes) -> bytes:
    """Return the commitment of a node to the seed of its self mask."""
    return digest(b"fedlm secure self mask 1", session.digest, place.to_bytes(2, "big"), seed)


def keys(identity: IdentityKey, state: SecureNode) -> bytes:
    """Answer with this node's public keys."""
    session, place = state.session, state.place
    cipher = public_of(_secret(state, "cipher key"))
    mask = public_of(_secret(state, "mask key"))
    committed = commitment(session, place, _secret(state, "self mask"))
    signature = identity.sign(messages.keys_to_sign(session, place, (cipher, mask, committed)))
    return messages.encode_keys(session, NodeKeys(place, cipher, mask, committed, signature))


# ---- share ---------------------------------------------------------------------------------------


def share(state: SecureNode, question: bytes) -> tuple[SecureNode, bytes]:
    """Answer a list of keys with sealed shares for each neighbor."""
    state = _once(state, "keys", question)
    session, place = state.session, state.place
    listed = messages.read_key_list(session, question)
    _check_keys(state, listed)
    near = _neighbors(state, listed)
    by_kind = _own_shares(state, near)
    sealed = {}
    for peer in near:
        shares = b"".join(kind[peer] for kind in by_kind)
        key, about = _share_key(state, listed[peer], place, peer)
        sealed[peer] = seal(key, shares, about)
    return state, messages.encode_shares(session, place, sealed)


def _check_keys(state: SecureNode, listed: dict[int, NodeKeys]) -> None:
    session = state.session
    enough(session, len(listed), "sent keys")
    own = messages.read_key_list(session, state.keys).get(state.place)
    mine = public_of(_secret(state, "mask key"))
    if own is None or own.mask != mine:
        raise SecureError("the list of keys does not hold the keys that this node sent.")
    check_signatures(session, listed)
    seen = [key for entry in listed.values() for key in (entry.cipher, entry.mask)]
    if len(set(seen)) != len(seen):
        raise SecureError("the list of keys holds one key twice.")


def check_signatures(session: Session, listed: dict[int, NodeKeys]) -> None:
    """Refuse keys that no member of the federation signed."""
    for place, entry in listed.items():
        if not keys_are_signed(session, entry):
            raise SecureError(
                f"the keys in the name of {session.name(place)} are not signed by the identity "
                "that the federation's list holds for it: a foreign key, or another attempt's."
            )


def keys_are_signed(session: Session, entry: NodeKeys) -> bool:
    """Tell whether the member at an entry's place signed its keys for this session."""
    public = session.terms.members[entry.place].public
    wanted = messages.keys_to_sign(
        session, entry.place, (entry.cipher, entry.mask, entry.commitment)
    )
    return verified(public, entry.signature, wanted)


def _neighbors(state: SecureNode, listed: dict[int, NodeKeys]) -> Places:
    return graph(state.session, listed)[state.place]


def graph(session: Session, listed: dict[int, NodeKeys]) -> dict[int, Places]:
    """Return the neighbors of each node, in an order that all keys decide."""
    seed = digest(b"fedlm secure graph 1", messages.encode_key_list(session, listed.values()))
    return neighborhoods(session.terms, sorted(listed), seed)


def _own_shares(state: SecureNode, near: Places) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the shares of this node's seed and of its mask key, for itself and its neighbors."""
    threshold, holders = state.session.terms.share_threshold, sorted((*near, state.place))
    enough(state.session, len(holders), "can hold shares", threshold)

    def of(purpose: str) -> dict[int, bytes]:
        drawn = itertools.count()

        def draw(size: int) -> bytes:
            return _secret(state, f"polynomial of {purpose} {next(drawn)}", size)

        return shamir.split(_secret(state, purpose), threshold, holders, draw)

    return of("self mask"), of("mask key")


def _share_key(state: SecureNode, peer: NodeKeys, giver: int, taker: int) -> tuple[bytes, bytes]:
    """Return the key that seals shares from one node to another, and what is sealed with them."""
    secret = agreed(_secret(state, "cipher key"), peer.cipher)
    if secret is None:
        raise SecureError(f"the key of {state.session.name(peer.place)} leaves no secret.")
    way = giver.to_bytes(2, "big") + taker.to_bytes(2, "big")
    about = state.session.digest + way
    return derive(secret, state.session.digest, b"fedlm secure shares" + way), about


# ---- mask ----------------------------------------------------------------------------------------


def mask(state: SecureNode, question: bytes, vector: np.ndarray) -> tuple[SecureNode, bytes]:
    """Answer the shares of neighbors with this node's masked vector.

    The vector holds unsigned integers below 2^bits. One attempt masks one vector: two of them under
    the same masks would show their difference.
    """
    _after(state.keys, "keys")
    state = _once(state, "shares", question)
    session = state.session
    dtype = word(session.terms.bits)
    plain = np.asarray(vector)
    if plain.shape != (session.terms.size,) or plain.dtype.kind != "u":
        raise SecureError(
            f"the vector has shape {plain.shape} and type {plain.dtype}: expected "
            f"{session.terms.size} unsigned integers."
        )
    if int(plain.max()) >> session.terms.bits:
        raise SecureError(f"the vector holds a number of more than {session.terms.bits} bits.")
    total = plain.astype(dtype)
    state = _once(state, "vector", digest(total.data.cast("B")))
    listed = messages.read_key_list(session, state.keys)
    shared = _check_shares(state, listed, question)
    add_mask(total, self_mask_key(session, state.place, _secret(state, "self mask")))
    secret = _secret(state, "mask key")
    for peer in _neighbors(state, listed):
        if peer in shared:
            add_pair_mask(session, total, secret, state.place, listed[peer])
    return state, messages.encode_masked(session, state.place, lowest(total, session.terms.bits))


def _check_shares(state: SecureNode, listed: dict[int, NodeKeys], question: bytes) -> Places:
    """Return who shared; refuse shares that are missing, foreign or do not open."""
    session = state.session
    sealed = messages.read_share_list(session, question)
    enough(session, len(sealed.shared), "shared")
    near = set(_neighbors(state, listed))
    if not set(sealed.shared) <= listed.keys() or state.place not in sealed.shared:
        raise SecureError("the list of those who shared names a node that sent no keys, or not us.")
    if set(sealed.by_place) != near & set(sealed.shared):
        raise SecureError("the shares for this node are not those of its neighbors that shared.")
    for peer in sealed.by_place:
        _opened(state, listed[peer], sealed.by_place[peer])
    return sealed.shared


def _opened(state: SecureNode, peer: NodeKeys, sealed: bytes) -> tuple[bytes, bytes]:
    """Return a neighbor's two shares for this node: of its seed and of its mask key."""
    key, about = _share_key(state, peer, peer.place, state.place)
    shares = unseal(key, sealed, about)
    half = shamir.SHARE_BYTES
    if shares is None or not all(map(shamir.is_share, (shares[:half], shares[half:]))):
        raise SecureError(
            f"the share that {state.session.name(peer.place)} gave to this node does not fit: it "
            "was changed on the way, or made wrongly."
        )
    return shares[:half], shares[half:]


def self_mask_key(session: Session, place: int, seed: bytes) -> bytes:
    """Return the key of a node's self mask."""
    return derive(seed, session.digest, b"fedlm secure self mask" + place.to_bytes(2, "big"))


def add_pair_mask(
    session: Session, total: np.ndarray, secret: bytes, place: int, peer: NodeKeys
) -> None:
    """Add the mask of a node and a neighbor: one of the two adds it, the other one subtracts it."""
    found = agreed(secret, peer.mask)
    if found is None:
        raise SecureError(f"the key of {session.name(peer.place)} leaves no secret.")
    pair = b"".join(i.to_bytes(2, "big") for i in sorted((place, peer.place)))
    key = derive(found, session.digest, b"fedlm secure pair mask" + pair)
    add_mask(total, key, subtract=place > peer.place)


def lowest(total: np.ndarray, bits: int) -> np.ndarray:
    """Return words modulo 2^bits."""
    if bits < 8 * total.dtype.itemsize:
        total &= total.dtype.type(2**bits - 1)
    return total


# ---- sign, reveal --------------------------------------------------------------------------------


def sign(identity: IdentityKey, state: SecureNode, question: bytes) -> tuple[SecureNode, bytes]:
    """Answer a list of survivors with a signature of it."""
    _after(state.vector, "a masked vector")
    state = _once(state, "survivors", question)
    session = state.session
    survivors = messages.read_survivors(session, question)
    shared = messages.read_share_list(session, state.shares).shared
    enough(session, len(survivors), "sent masked vectors")
    if not set(survivors) <= set(shared):
        raise SecureError("the list of survivors names a node that did not share.")
    if state.place not in survivors:
        raise SecureError("the list of survivors leaves out this node, which sent its vector.")
    signature = identity.sign(_view(state))
    return state, messages.encode_signed(session, state.place, signature)


def _view(state: SecureNode) -> bytes:
    session = state.session
    shared = messages.read_share_list(session, state.shares).shared
    survivors = messages.read_survivors(session, state.survivors)
    return messages.view_to_sign(session, state.keys, shared, survivors)


def reveal(state: SecureNode, question: bytes) -> tuple[SecureNode, bytes]:
    """Answer the signatures of t nodes on one list with one share per neighbor."""
    _after(state.survivors, "a signature")
    state = _once(state, "signatures", question)
    session = state.session
    signatures, view = messages.read_signatures(session, question), _view(state)
    survivors = set(messages.read_survivors(session, state.survivors))
    for place, signature in signatures.items():
        public = session.terms.members[place].public
        if place not in survivors or not verified(public, signature, view):
            raise SecureError(
                f"{session.name(place)} did not sign the list of survivors that this node was "
                "shown: nodes were told different lists."
            )
    enough(session, len(signatures), "signed the list of survivors")
    listed = messages.read_key_list(session, state.keys)
    sealed = messages.read_share_list(session, state.shares).by_place
    own = _own_shares(state, _neighbors(state, listed))
    shares = {state.place: own[0][state.place]}
    for peer, data in sealed.items():
        of_seed, of_key = _opened(state, listed[peer], data)
        shares[peer] = of_seed if peer in survivors else of_key
    return state, messages.encode_revealed(session, state.place, shares)


# ---- order ---------------------------------------------------------------------------------------


def _once(state: SecureNode, step: str, question: bytes) -> SecureNode:
    """Enter the question of a step; refuse another question than the one that was answered."""
    held: bytes = getattr(state, step)
    if held and held != question:
        raise SecureError(
            f"attempt {state.session.attempt} of round {state.session.round} was answered with "
            f"other {step}: another question needs another attempt."
        )
    changed: dict[str, Any] = {step: question}
    return state if held else replace(state, **changed)


def _after(held: bytes, what: str) -> None:
    if not held:
        raise SecureError(f"the question came before this node had answered with {what}.")


def enough(session: Session, count: int, did: str, wanted: int | None = None) -> None:
    """Raise `TooFew` unless as many nodes are left as the threshold wants."""
    wanted = session.terms.threshold if wanted is None else wanted
    if count < wanted:
        raise TooFew(
            f"{count} nodes {did} in round {session.round}, attempt {session.attempt}: the "
            f"threshold is {wanted}. No sum was opened."
        )
