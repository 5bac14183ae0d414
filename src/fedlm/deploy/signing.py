"""Signed requests: a node's key covers all of a request, and each signature counts once.

In:       a node's private key and a request; at the server, the keys that are registered.
Out:      headers; the name of the node that signed, or the reason why not.
Promise:  a signature covers method, path, time, nonce, process, length and hash of the body (or of
          its table, which has the hash of each of its parts), so that no part of a request can be
          changed or used again; it is checked from the headers alone, before any of the body is
          read; a key that is removed from the workspace counts no more.
Not here: what a request may ask (`flower/superlink.py`), keys and certificates (`certificates.py`).

Nonces are kept in memory for as long as a signature's time is accepted. A file has, per key, a time
that no accepted signature has passed: after a restart of the server only later ones count, so that
whoever broke the TLS before cannot repeat a request either.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError

SCHEME = "fedlm-1"  # the form of what is signed; an unknown one is refused
# Seconds by which a request's time may differ from the server's clock; Flower accepts the same.
WHO_AM_I = "/fedlm/who-am-i"  # where a server tells a node what it knows of it
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0
# Seconds by which the file of times runs ahead: how often it is written, and how long a node may be
# turned away after a restart.
MARK_SECONDS = 5.0
MOST_NONCES = 200_000  # of one node in that time: 600 requests a second
NAMES = ("scheme", "key", "time", "nonce", "process", "body", "signature")
HEADERS = {name: f"fedlm-{name}" for name in NAMES}
_FORMS = {
    "key": re.compile(r"[0-9a-f]{64}"),
    "time": re.compile(r"[0-9]{1,12}\.[0-9]{3}"),
    "nonce": re.compile(r"[0-9a-f]{32}"),
    "process": re.compile(r"[0-9a-f]{32}"),
    "body": re.compile(r"[0-9a-f]{64}"),
    "signature": re.compile(r"[A-Za-z0-9+/=]{8,200}"),
}


class Unsigned(Exception):
    """A request that no registered node signed, with the reason."""


class Identity(NamedTuple):
    """A node that may sign: its public key, and the end of its certificate."""

    name: str
    public: bytes  # PEM
    until: float  # seconds since 1970


class Signer(NamedTuple):
    """Who signed a request, and the hash that its body must have."""

    identity: Identity
    process: str
    body: str


def key_id(public: bytes) -> str:
    """Return the name of a public key, PEM, in headers and logs: its SHA-256."""
    return hashlib.sha256(public).hexdigest()


def new_process() -> str:
    """Return a name for this process, by which a server notices a key that two processes use."""
    return secrets.token_hex(16)


def _signed(facts: Mapping[str, str], method: str, path: str, length: int) -> bytes:
    parts = (facts["key"], facts["time"], facts["nonce"], facts["process"], facts["body"])
    return "\n".join((SCHEME, method, path, *parts, str(length))).encode()


def sign(
    private: ec.EllipticCurvePrivateKey,
    public: bytes,
    method: str,
    path: str,
    body: bytes,
    process: str,
    length: int | None = None,
) -> dict[str, str]:
    """Return the headers that sign a request.

    `length` is that of a body which only begins with `body`: a table that has the hashes of all
    that follows.
    """
    facts = {
        "scheme": SCHEME,
        "key": key_id(public),
        "time": f"{time.time():.3f}",
        "nonce": secrets.token_hex(16),
        "process": process,
        "body": hashlib.sha256(body).hexdigest(),
    }
    text = _signed(facts, method, path, len(body) if length is None else length)
    made = private.sign(text, ec.ECDSA(hashes.SHA256()))
    facts["signature"] = base64.b64encode(made).decode("ascii")
    return {HEADERS[name]: value for name, value in facts.items()}


class Marks:
    """For each key, a time on disk that no accepted signature is later than.

    Times are by each node's own clock, moved on with the server's: one write covers all keys for a
    few seconds, however many there are and however seldom each is used.
    """

    def __init__(self, file: Path | None, now: Callable[[], float]) -> None:
        """Read the times of the processes before; of a damaged file, take the present."""
        self.file, self.now = file, now
        self.floor, self.otherwise = dict[str, float](), -math.inf
        self._marks: dict[str, float] = {}
        self._ahead: dict[str, float] = {}  # of each key's clock, before the server's, in seconds
        if file is None or not file.exists():
            return
        try:
            found = read_json(file, str(file), RecordError)
            self.floor = {str(key): float(at) for key, at in found.items()}
        except (RecordError, AttributeError, TypeError, ValueError):
            self.otherwise = now()
        self._marks = dict(self.floor)

    def check(self, key: str, signed_at: float) -> None:
        """Raise `Unsigned` for a time that an earlier process may have accepted."""
        if signed_at <= self.floor.get(key, self.otherwise):
            raise Unsigned("the request was signed before the server was started again")
        now = self.now()
        self._ahead[key] = max(signed_at - now, self._ahead.get(key, -math.inf))
        if self.file is not None and signed_at > self._marks.get(key, -math.inf):
            self._marks |= {k: now + ahead + MARK_SECONDS for k, ahead in self._ahead.items()}
            with contextlib.suppress(RecordError):  # a full disk turns nobody away
                write_atomically(self.file, json.dumps(self._marks).encode(), private=True)


class Verifier:
    """Checks signatures against the keys that are registered now."""

    def __init__(
        self,
        identities: Callable[[], Mapping[str, Identity]],
        now: Callable[[], float] = time.time,
        marks: Path | None = None,
    ) -> None:
        """Take a function that returns the registered identities by the id of their key.

        `marks` is the file of times; without one a restart forgets which signatures were used.
        """
        self.identities, self.now, self.marks = identities, now, Marks(marks, now)
        self._seen: dict[str, dict[str, float]] = {}  # times of nonces by key

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes], length: int) -> Signer:
        """Return who signed a request, or raise `Unsigned`; the body is not needed yet."""
        facts = _facts(headers)
        identity = self.identities().get(facts["key"])
        if identity is None:
            raise Unsigned("the key is not registered here")
        signed_at, now = float(facts["time"]), self.now()
        if not -AHEAD_SECONDS < now - signed_at < BEHIND_SECONDS:
            raise Unsigned(f"the clock of the node differs by {signed_at - now:.0f} seconds")
        if now > identity.until:
            raise Unsigned("the certificate of the node has expired")
        try:
            key = serialization.load_pem_public_key(identity.public)
            assert isinstance(key, ec.EllipticCurvePublicKey)
            signature = base64.b64decode(facts["signature"], validate=True)
            text = _signed(facts, method, path, length)
            key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, binascii.Error, ValueError, AssertionError):
            raise Unsigned("the signature is not of this request") from None
        self._count(facts["key"], facts["nonce"], signed_at, now)
        self.marks.check(facts["key"], signed_at)
        return Signer(identity, facts["process"], facts["body"])

    def _count(self, key: str, nonce: str, signed_at: float, now: float) -> None:
        """Raise `Unsigned` if a signature was used before; remember it as long as it is valid."""
        seen = self._seen.setdefault(key, {})
        for old, at in list(seen.items())[:16]:  # the oldest come first
            if now - at > BEHIND_SECONDS + AHEAD_SECONDS:
                del seen[old]
        if nonce in seen:
            raise Unsigned("the signature was used before")
        if len(seen) >= MOST_NONCES:
            raise Unsigned("the node makes too many requests")
        seen[nonce] = signed_at


def _facts(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    found = {}
    for name, header in HEADERS.items():
        value = headers.get(header.encode(), b"").decode("latin-1")
        if name == "scheme":
            if value != SCHEME:
                how = "as this server wants it" if value else "(messages of version 4 or before)"
                raise Unsigned(
                    f"the request is not signed {how}: install the same fedlm at the server and at "
                    "all nodes"
                )
        elif not _FORMS[name].fullmatch(value):
            raise Unsigned(f"the request has no {header}")
        found[name] = value
    return found
