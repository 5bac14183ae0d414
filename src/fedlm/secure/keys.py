"""Keys and ciphers of secure sums, all of them from `cryptography`.

In:       a node's identity key, seeds, public keys of peers.
Out:      signatures, agreed keys, sealed shares, masks.
Promise:  everything is a function of its arguments, so that a question asked again gets the same
          bytes; a mask is the key stream of ChaCha20 under 256 bits that HKDF made, never the
          output of a statistical generator.
Not here: which key is for what (`node.py`), what is signed (`messages.py`).

Identity keys are those of a node's kit, on the curve P-384. Signatures are ECDSA with SHA-384 and
the deterministic nonce of RFC 6979, written as r and s of 48 bytes each.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlm.core.errors import ConfigError

KEY_BYTES = 32
SIGNATURE_BYTES = 96
TAG_BYTES = 16
CHUNK = 1 << 18  # words of a mask that are made at a time: they stay in the processor's cache


@dataclass(frozen=True, repr=False)
class IdentityKey:
    """A node's identity key, which the other members know."""

    private: ec.EllipticCurvePrivateKey

    @classmethod
    def from_pem(cls, pem: bytes) -> IdentityKey:
        """Read the private key of a kit."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):
            raise ConfigError("the private key of the node is not readable.") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
            raise ConfigError("the private key of the node is of another kind: expected P-384.")
        return cls(key)

    @classmethod
    def generate(cls) -> IdentityKey:
        """Make a new identity, for simulations."""
        return cls(ec.generate_private_key(ec.SECP384R1()))

    @property
    def public(self) -> bytes:
        """The public key as a compressed point of 49 bytes."""
        return point(self.private.public_key())

    def sign(self, message: bytes) -> bytes:
        """Sign a message; the same message has the same signature."""
        how = ec.ECDSA(hashes.SHA384(), deterministic_signing=True)
        r, s = decode_dss_signature(self.private.sign(message, how))
        return r.to_bytes(48, "big") + s.to_bytes(48, "big")


def point(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as a compressed point."""
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


def public_from_pem(pem: bytes) -> bytes:
    """Read the public key of a member, as a compressed point."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError):
        raise ConfigError("the public key of a member is not readable.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise ConfigError("the public key of a member is of another kind: expected P-384.")
    return point(key)


def is_public(public: bytes) -> bool:
    """Tell whether bytes are a point of the curve."""
    try:
        ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), public)
    except ValueError:
        return False
    return len(public) == 49


@functools.lru_cache(maxsize=4096)  # nodes of one process check the same signatures
def verified(public: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether the owner of an identity signed a message."""
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), public)
    r, s = (int.from_bytes(part, "big") for part in (signature[:48], signature[48:]))
    try:
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return len(signature) == SIGNATURE_BYTES


def derive(secret: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """Return the bytes that HKDF with SHA-256 makes of a secret for one purpose."""
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt, info=info).derive(secret)


def public_of(private: bytes) -> bytes:
    """Return the X25519 public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes) -> bytes | None:
    """Return the secret of two X25519 keys; None if the public one leaves no secret."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:  # a point of small order
        return None


def seal(key: bytes, data: bytes, about: bytes) -> bytes:
    """Encrypt data under a key that is used for nothing else."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), data, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Decrypt what `seal` made; None if it was not made with this key and description."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def word(bits: int) -> np.dtype:
    """Return the least unsigned type of at least 32 bits that holds numbers of so many bits."""
    return np.dtype("<u4" if bits <= 32 else "<u8")


def add_mask(total: np.ndarray, key: bytes, *, subtract: bool = False) -> None:
    """Add the key stream of a mask to a vector of unsigned words, or subtract it, in place.

    Words wrap around. For sums modulo 2^b the lowest b bits of a word are used: they are uniform.
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    size, most = total.dtype.itemsize, min(CHUNK, len(total))
    zeros = bytes(most * size)
    raw = bytearray(most * size)
    made = np.frombuffer(raw, total.dtype)
    for at in range(0, len(total), CHUNK):
        part = total[at : at + CHUNK]
        stream.update_into(zeros[: len(part) * size], raw)
        if subtract:
            part -= made[: len(part)]
        else:
            part += made[: len(part)]


def digest(*parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 of parts, each with its length before it."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
