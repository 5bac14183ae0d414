"""Who is who: an authority, the server's certificate, the nodes' keys.

In:       names and addresses.
Out:      PEM bytes.
Promise:  a certificate is valid for exactly the names and addresses it was asked for; a federation
          has an authority of its own and trusts no other; a private key is written for its owner
          alone.
Not here: where the files lie (`workspace.py`), finding mistakes in them (`doctor.py`).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlm.core.errors import ConfigError, library_errors, require

AUTHORITY_DAYS, SERVER_DAYS, NODE_DAYS = 3650, 825, 825
# Clocks differ: a certificate that begins today must hold on a machine that is a little behind.
SLACK = dt.timedelta(hours=1)


class Signed(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def authority(federation: str) -> Signed:
    """Return a new certificate authority for one federation."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name(f"{federation} authority")
    made = _begin(name, name, key.public_key(), AUTHORITY_DAYS)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(_usage(signs_certificates=True), critical=True)
    made = made.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return Signed(_pem(made.sign(key, hashes.SHA384())), private_pem(key))


def server(issuer: Signed, names: Sequence[str]) -> Signed:
    """Return a server certificate for the names and addresses by which nodes reach the server."""
    require(len(names) > 0, "--host", list(names), "at least one name or address")
    require(all(names), "--host", list(names), "names or addresses, none of them empty")
    above = x509.load_pem_x509_certificate(issuer.certificate)
    signer = load_private(issuer.key)
    key = ec.generate_private_key(ec.SECP384R1())
    made = _begin(_name(names[0]), above.subject, key.public_key(), SERVER_DAYS)
    alternatives = x509.SubjectAlternativeName([_general(name) for name in names])
    made = made.add_extension(alternatives, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(signs_certificates=False), critical=True)
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    made = made.add_extension(purpose, critical=False)
    made = made.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    return Signed(_pem(made.sign(signer, hashes.SHA384())), private_pem(key))


def node(issuer: Signed, name: str, public: bytes) -> bytes:
    """Return a certificate in which the authority signs a node's public key, for a time."""
    above = x509.load_pem_x509_certificate(issuer.certificate)
    made = _begin(_name(name), above.subject, check_public(public), NODE_DAYS)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(signs_certificates=False), critical=True)
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    made = made.add_extension(purpose, critical=False)
    return _pem(made.sign(load_private(issuer.key), hashes.SHA384()))


def check_public(pem: bytes) -> ec.EllipticCurvePublicKey:
    """Read a node's public key, PEM; raise `ConfigError` if it is none."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError("--key: expected the file node.pub of a node's kit.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError("--key: the key is of another kind than fedlm node init makes.")
    return key


def load_certificate(pem: bytes, what: str = "the certificate") -> x509.Certificate:
    """Read a certificate from PEM; raise `ConfigError` about `what` if it is none."""
    way_out = "Bring it back, or make another with fedlm federation renew."
    with library_errors(f"{what} is not a certificate", way_out, ConfigError):
        found = x509.load_pem_x509_certificate(pem)
        # Read now: what is wrong inside shows only when it is asked for.
        _ = found.not_valid_before_utc, found.not_valid_after_utc, found.extensions
        found.public_key()
        return found


def until(certificate: bytes) -> float:
    """Return when a certificate expires, in seconds since 1970."""
    return load_certificate(certificate).not_valid_after_utc.timestamp()


def public_key_of(certificate: bytes) -> bytes:
    """Return the public key of a certificate, PEM."""
    key = load_certificate(certificate).public_key()
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def check_signed(certificate: bytes, authority: bytes, where: str) -> None:
    """Raise `ConfigError` unless an authority signed a certificate, and both can be read."""
    try:
        good = signed_by(certificate, authority)
    except ConfigError:
        good = False
    if not good:
        raise ConfigError(f"{where}: the certificate in it is not signed by the authority in it.")


def node_key() -> tuple[bytes, bytes]:
    """Return a new private and public key of a node, which signs all its messages."""
    key = ec.generate_private_key(ec.SECP384R1())
    return private_pem(key), public_pem(key)


def check_current(file: Path) -> None:
    """Raise `ConfigError` unless a file holds a certificate that is valid today."""
    try:
        found = load_certificate(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"{file} is not readable: {error.strerror}.") from None
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    now = dt.datetime.now(dt.UTC)
    if not first <= now <= last:
        raise ConfigError(
            f"{file} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}, and today is "
            f"{now:%Y-%m-%d}: nodes would refuse it. Look at this machine's clock, or make a new "
            "certificate with fedlm federation renew."
        )


def names_of(certificate: bytes) -> list[str]:
    """Return the names and addresses for which a certificate is valid."""
    found = load_certificate(certificate)
    try:
        held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    names: list[str] = held.get_values_for_type(x509.DNSName)
    return names + [str(a) for a in held.get_values_for_type(x509.IPAddress)]


def signed_by(certificate: bytes, issuer: bytes) -> bool:
    """Tell whether the authority `issuer` signed a certificate."""
    found = load_certificate(certificate)
    try:
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(issuer))
    except Exception:  # a wrong name, a wrong kind of key, a wrong signature
        return False
    return True


def load_private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Read an elliptic-curve private key from PEM."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the private key is not readable: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the private key is of another kind: expected an elliptic curve.")
    return key


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def create_private(path: Path, data: bytes) -> None:
    """Create a file that only its owner may read, from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    # At most 64 bytes, by the standard; what a certificate is good for stands in its other names.
    short = common.encode()[:64].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError(f"--host = {name!r}: expected a host name or an address.") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
