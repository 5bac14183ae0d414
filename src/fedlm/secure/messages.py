"""The nine messages of a secure sum.

In:       records; or bytes from anywhere, with the session that they should belong to.
Out:      bytes; or records.
Promise:  a record has one encoding, and bytes that are not exactly that encoding are a `WireError`;
          lengths are compared with what the terms allow before anything is allocated; a message of
          another session is refused.
Not here: whether a signature or a share is right (`node.py`, `server.py`).

    offset  size  field
    0       4     magic "FLS1"
    4       1     kind, 1 to 9
    5       32    digest of the session
    37      ...   body; numbers are big-endian, places in the members' list take two bytes

    kind  from    body
    1     node    place, cipher key (32), mask key (32), commitment (32), signature (96)
    2     server  count, then bodies of kind 1 in the order of places
    3     node    place, count, then for each neighbor: place, sealed shares (82)
    4     server  places of those who shared, count, then for each of them that is a neighbor:
                  place, sealed shares (82)
    5     node    place, the masked vector, packed
    6     server  places of those whose masked vector arrived
    7     node    place, signature (96)
    8     server  places of those who signed, then their signatures (96 each)
    9     node    place, count, then for itself and each neighbor that shared: place, share (33)

A list of places is a row of bits, one per member, the first in the highest bit of the first byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedlm.core.errors import WireError
from fedlm.secure.keys import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES, digest, word
from fedlm.secure.shamir import SHARE_BYTES, is_share
from fedlm.secure.terms import Session, Terms
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack

MAGIC = b"FLS1"
HEAD = len(MAGIC) + 1 + 32
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
KEYS, KEY_LIST, SHARES, SHARE_LIST, MASKED, SURVIVORS, SIGNED, SIGNATURES, REVEALED = range(1, 10)
WORDS = {
    KEYS: "keys of a node",
    KEY_LIST: "list of keys",
    SHARES: "shares of a node",
    SHARE_LIST: "shares for a node",
    MASKED: "masked vector",
    SURVIVORS: "list of survivors",
    SIGNED: "signature of a list of survivors",
    SIGNATURES: "signatures of a list of survivors",
    REVEALED: "revealed shares",
}
Places = tuple[int, ...]


class NodeKeys(NamedTuple):
    """A node's keys for one attempt, signed by its identity."""

    place: int
    cipher: bytes  # public, for the shares that peers send to this node
    mask: bytes  # public, for the masks that it agrees on with peers
    commitment: bytes  # to the seed of its self mask
    signature: bytes


class Sealed(NamedTuple):
    """The sealed shares that one node gives its neighbors, or gets from them."""

    shared: Places  # nodes that shared; empty in a node's own message
    by_place: Mapping[int, bytes]


@dataclass
class _Body:
    """A reader of a body from front to back."""

    rest: memoryview
    what: str

    def take(self, size: int) -> bytes:
        if len(self.rest) < size:
            raise WireError(f"a {self.what} ends too early.")
        part, self.rest = bytes(self.rest[:size]), self.rest[size:]
        return part

    def number(self) -> int:
        return int.from_bytes(self.take(2), "big")

    def place(self, terms: Terms, after: int = -1) -> int:
        found = self.number()
        if not after < found < len(terms.members):
            raise WireError(f"a {self.what} names place {found}, which is not a member in order.")
        return found

    def places(self, terms: Terms) -> Places:
        n = len(terms.members)
        bits = np.unpackbits(np.frombuffer(self.take(-(-n // 8)), np.uint8))
        if bits[n:].any():
            raise WireError(f"a {self.what} holds places beyond the last member.")
        return tuple(int(i) for i in np.flatnonzero(bits))

    def entries(self, size: int) -> int:
        """Read a count that must fill the rest of the body exactly."""
        count = self.number()
        if len(self.rest) != count * size:
            raise WireError(f"a {self.what} holds {len(self.rest)} bytes for {count} entries.")
        return count

    def end(self) -> None:
        if len(self.rest):
            raise WireError(f"a {self.what} has {len(self.rest)} bytes too many.")


def _open(kind: int, session: Session, payload: bytes, most: int) -> _Body:
    """Check the head and the length of a message; return its body."""
    what = WORDS[kind]
    if len(payload) > HEAD + most:
        raise WireError(f"a {what} has {len(payload)} bytes: at most {HEAD + most} are possible.")
    if len(payload) < HEAD or payload[:4] != MAGIC:
        raise WireError(f"the payload is not a {what} of a secure sum.")
    if payload[4] != kind:
        found = WORDS.get(payload[4], "message of an unknown kind")
        raise WireError(f"expected a {what}, and a {found} came.")
    if payload[5:HEAD] != session.digest:
        raise WireError(
            f"a {what} belongs to another sum: its members, terms, run, round or attempt are not "
            f"those of round {session.round}, attempt {session.attempt}."
        )
    return _Body(memoryview(payload)[HEAD:], what)


def _seal(kind: int, session: Session, *parts: bytes) -> bytes:
    return b"".join([MAGIC, bytes([kind]), session.digest, *parts])


def _two(number: int) -> bytes:
    return number.to_bytes(2, "big")


def places_bytes(terms: Terms, places: Iterable[int]) -> bytes:
    """Return a list of places as a row of bits."""
    bits = np.zeros(len(terms.members), np.uint8)
    bits[list(places)] = 1
    return np.packbits(bits).tobytes()


# ---- what is signed ------------------------------------------------------------------------------


def keys_to_sign(session: Session, place: int, keys: tuple[bytes, bytes, bytes]) -> bytes:
    """Return what a node signs to make keys its own in one attempt."""
    return digest(b"fedlm secure keys 1", session.digest, _two(place), *keys)


def view_to_sign(session: Session, key_list: bytes, shared: Places, survivors: Places) -> bytes:
    """Return what a node signs to confirm its view: keys, who shared, who survived."""
    lists = (places_bytes(session.terms, places) for places in (shared, survivors))
    return digest(b"fedlm secure survivors 1", session.digest, key_list, *lists)


# ---- keys ----------------------------------------------------------------------------------------

_KEYS_BYTES = 2 + 3 * KEY_BYTES + SIGNATURE_BYTES


def encode_keys(session: Session, keys: NodeKeys) -> bytes:
    """Write the keys of a node."""
    return _seal(KEYS, session, _keys_body(keys))


def _keys_body(keys: NodeKeys) -> bytes:
    return b"".join([_two(keys.place), *keys[1:]])


def _read_keys(body: _Body, terms: Terms, after: int = -1) -> NodeKeys:
    place = body.place(terms, after)
    cipher, mask, commitment = (body.take(KEY_BYTES) for _ in range(3))
    return NodeKeys(place, cipher, mask, commitment, body.take(SIGNATURE_BYTES))


def read_keys(session: Session, payload: bytes) -> NodeKeys:
    """Read the keys of a node."""
    body = _open(KEYS, session, payload, _KEYS_BYTES)
    found = _read_keys(body, session.terms)
    body.end()
    return found


def encode_key_list(session: Session, keys: Iterable[NodeKeys]) -> bytes:
    """Write the keys of all present nodes."""
    bodies = [_keys_body(entry) for entry in sorted(keys)]
    return _seal(KEY_LIST, session, _two(len(bodies)), *bodies)


def read_key_list(session: Session, payload: bytes) -> dict[int, NodeKeys]:
    """Read the keys of all present nodes."""
    most = 2 + len(session.terms.members) * _KEYS_BYTES
    body = _open(KEY_LIST, session, payload, most)
    found: dict[int, NodeKeys] = {}
    after = -1
    for _ in range(body.entries(_KEYS_BYTES)):
        keys = _read_keys(body, session.terms, after)
        found[keys.place] = keys
        after = keys.place
    return found


# ---- shares --------------------------------------------------------------------------------------


def _sealed_bytes(by_place: Mapping[int, bytes]) -> bytes:
    entries = [_two(place) + by_place[place] for place in sorted(by_place)]
    return _two(len(entries)) + b"".join(entries)


def _read_sealed(body: _Body, terms: Terms) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    after = -1
    for _ in range(body.entries(2 + SEALED_BYTES)):
        after = body.place(terms, after)
        found[after] = body.take(SEALED_BYTES)
    return found


def encode_shares(session: Session, place: int, by_place: Mapping[int, bytes]) -> bytes:
    """Write the sealed shares that a node gives each neighbor."""
    return _seal(SHARES, session, _two(place), _sealed_bytes(by_place))


def read_shares(session: Session, payload: bytes) -> tuple[int, dict[int, bytes]]:
    """Read a node's place and the sealed shares that it gives each neighbor."""
    most = 4 + len(session.terms.members) * (2 + SEALED_BYTES)
    body = _open(SHARES, session, payload, most)
    return body.place(session.terms), _read_sealed(body, session.terms)


def encode_share_list(session: Session, shared: Places, by_place: Mapping[int, bytes]) -> bytes:
    """Write who shared, and the sealed shares that are for one node."""
    listed = places_bytes(session.terms, shared)
    return _seal(SHARE_LIST, session, listed, _sealed_bytes(by_place))


def read_share_list(session: Session, payload: bytes) -> Sealed:
    """Read who shared, and the sealed shares that are for one node."""
    n = len(session.terms.members)
    body = _open(SHARE_LIST, session, payload, -(-n // 8) + 2 + n * (2 + SEALED_BYTES))
    return Sealed(body.places(session.terms), _read_sealed(body, session.terms))


# ---- vectors -------------------------------------------------------------------------------------


def masked_bytes(terms: Terms) -> int:
    """Return the size of a masked vector's message."""
    return HEAD + 2 + packed_bytes(terms.size, terms.bits)


def encode_masked(session: Session, place: int, vector: np.ndarray) -> bytes:
    """Write a masked vector: `bits` bits per value."""
    return _seal(MASKED, session, _two(place), pack(vector, session.terms.bits))


def read_masked(session: Session, payload: bytes) -> tuple[int, np.ndarray]:
    """Read a node's place and its masked vector."""
    terms = session.terms
    wanted = masked_bytes(terms) - HEAD
    body = _open(MASKED, session, payload, wanted)
    place = body.place(terms)
    found = unpack(Reader(body.rest, wanted - 2), terms.size, terms.bits)
    return place, found.astype(word(terms.bits), copy=False)


def answer_bytes(terms: Terms) -> dict[str, int]:
    """Return the largest size of a node's answer in each step."""
    n = len(terms.members)
    return {
        "keys": HEAD + _KEYS_BYTES,
        "share": HEAD + 4 + n * (2 + SEALED_BYTES),
        "mask": masked_bytes(terms),
        "sign": HEAD + 2 + SIGNATURE_BYTES,
        "reveal": HEAD + 4 + n * (2 + SHARE_BYTES),
    }


# ---- survivors -----------------------------------------------------------------------------------


def encode_survivors(session: Session, survivors: Places) -> bytes:
    """Write the list of those whose masked vector arrived."""
    return _seal(SURVIVORS, session, places_bytes(session.terms, survivors))


def read_survivors(session: Session, payload: bytes) -> Places:
    """Read the list of those whose masked vector arrived."""
    body = _open(SURVIVORS, session, payload, -(-len(session.terms.members) // 8))
    found = body.places(session.terms)
    body.end()
    return found


def encode_signed(session: Session, place: int, signature: bytes) -> bytes:
    """Write a node's signature of its view."""
    return _seal(SIGNED, session, _two(place), signature)


def read_signed(session: Session, payload: bytes) -> tuple[int, bytes]:
    """Read a node's place and its signature."""
    body = _open(SIGNED, session, payload, 2 + SIGNATURE_BYTES)
    found = body.place(session.terms), body.take(SIGNATURE_BYTES)
    body.end()
    return found


def encode_signatures(session: Session, signatures: Mapping[int, bytes]) -> bytes:
    """Write the signatures of those who confirmed the list of survivors."""
    listed = places_bytes(session.terms, signatures)
    return _seal(SIGNATURES, session, listed, *(signatures[i] for i in sorted(signatures)))


def read_signatures(session: Session, payload: bytes) -> dict[int, bytes]:
    """Read the signatures of those who confirmed the list of survivors."""
    n = len(session.terms.members)
    body = _open(SIGNATURES, session, payload, -(-n // 8) + n * SIGNATURE_BYTES)
    places = body.places(session.terms)
    found = {place: body.take(SIGNATURE_BYTES) for place in places}
    body.end()
    return found


# ---- shares in the open --------------------------------------------------------------------------


def encode_revealed(session: Session, place: int, shares: Mapping[int, bytes]) -> bytes:
    """Write the revealed shares: of survivors' self masks, and of the others' mask keys."""
    entries = [_two(owner) + shares[owner] for owner in sorted(shares)]
    return _seal(REVEALED, session, _two(place), _two(len(entries)), *entries)


def read_revealed(session: Session, payload: bytes) -> tuple[int, dict[int, bytes]]:
    """Read a node's place and the shares that it reveals, by the node that they are of."""
    most = 4 + len(session.terms.members) * (2 + SHARE_BYTES)
    body = _open(REVEALED, session, payload, most)
    place = body.place(session.terms)
    found: dict[int, bytes] = {}
    after = -1
    for _ in range(body.entries(2 + SHARE_BYTES)):
        after = body.place(session.terms, after)
        found[after] = body.take(SHARE_BYTES)
        if not is_share(found[after]):
            raise WireError("a message of revealed shares holds a number outside the field.")
    return place, found
