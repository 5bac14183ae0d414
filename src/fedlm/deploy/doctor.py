"""Finds the usual mistakes, and says what to do.

In:       a federation's folder, or a node's kit.
Out:      checks: what was looked at, whether it is well, what to do.
Promise:  looks and changes nothing; every finding names its way out.
Not here: making things (`workspace.py`).
"""

from __future__ import annotations

import datetime as dt
import email.utils
import socket
import ssl
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedlm.deploy import certificates
from fedlm.deploy.workspace import Kit, Workspace

FLOWER = "1.41."
# Flower refuses signatures that are further ahead of its clock; it tolerates more behind it.
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0
TIMEOUT = 5.0


class DoctorCheck(NamedTuple):
    """The result of one check."""

    what: str
    well: bool
    found: str
    way_out: str = ""


def examine(path: Path) -> list[DoctorCheck]:
    """Run all checks of a federation's workspace or of a node's kit."""
    if (path / "node.toml").is_file():
        kit = Kit.existing(path)
        settings = kit.settings
        checks = [*_kit(kit), *_reach(settings.host, settings.port, kit.authority)]
    else:
        workspace = Workspace.existing(path)
        settings_ = workspace.settings
        authority = workspace.authority.read_bytes()
        checks = [*_workspace(workspace), *_reach(settings_.host, settings_.port, authority)]
    return [_flower(), *checks]


def _flower() -> DoctorCheck:
    try:
        found = version("flwr")
    except PackageNotFoundError:
        return DoctorCheck("flower", False, "not installed", "pip install 'fedlm[federation]'")
    way_out = f"pip install 'flwr=={FLOWER}*', the same at every node"
    return DoctorCheck("flower", found.startswith(FLOWER), f"version {found}", way_out)


def _kit(kit: Kit) -> Iterator[DoctorCheck]:
    yield _private(kit.path / "node.key")
    if kit.ledger.exists():  # there is none before the first answer
        yield _private(kit.ledger)
    public = kit.path / "node.pub"
    fits = public.is_file() and public.read_bytes() == certificates.public_pem(
        certificates.load_private(kit.key)
    )
    yield DoctorCheck("node key", fits, "pair" if fits else "no pair", "ask for the kit again")
    yield _lifetime("authority", kit.authority)


def _workspace(workspace: Workspace) -> Iterator[DoctorCheck]:
    for path in (
        workspace.certificate_key,
        workspace.control_key,
        workspace.counters,
        workspace.path / "authority" / "ca.key",
    ):
        if path.exists():
            yield _private(path)
    certificate = workspace.certificate.read_bytes()
    authority = workspace.authority.read_bytes()
    yield _lifetime("authority", authority)
    yield _lifetime("certificate", certificate)
    signed = certificates.signed_by(certificate, authority)
    way_out = "the authority was changed: make the federation anew"
    yield DoctorCheck("signature", signed, "by the authority" if signed else "by another", way_out)
    yield checked_names(certificate, workspace.settings.host)


def checked_names(certificate: bytes, host: str) -> DoctorCheck:
    """Check that a certificate is valid for the name by which nodes reach the server."""
    names = certificates.names_of(certificate)
    way_out = f"fedlm federation init with --host {host}, or reach it by one of its names"
    return DoctorCheck("name", host in names, f"{host} in {', '.join(names) or 'nothing'}", way_out)


def _private(path: Path) -> DoctorCheck:
    if not path.is_file():
        return DoctorCheck(path.name, False, "missing", "ask for it again, or restore it")
    open_to = stat.S_IMODE(path.stat().st_mode) & 0o077
    way_out = f"chmod 600 {path}"
    return DoctorCheck(
        path.name, not open_to, "private" if not open_to else "others can read", way_out
    )


def _lifetime(what: str, pem: bytes) -> DoctorCheck:
    found = x509.load_pem_x509_certificate(pem)
    now = dt.datetime.now(dt.UTC)
    well = found.not_valid_before_utc <= now <= found.not_valid_after_utc
    until = f"{found.not_valid_before_utc:%Y-%m-%d} to {found.not_valid_after_utc:%Y-%m-%d}"
    return DoctorCheck(f"{what} dates", well, until, "set this machine's clock, or make it anew")


# ---- over the network ----------------------------------------------------------------------


def _reach(host: str, port: int, authority: bytes) -> Iterator[DoctorCheck]:
    """Check port, certificate and clock of the server from this machine."""
    try:
        with socket.create_connection((host, port), TIMEOUT):
            yield DoctorCheck("port", True, f"{host}:{port} answers")
    except OSError as error:
        yield DoctorCheck(
            "port",
            False,
            f"{host}:{port}: {error}",
            "start fedlm federation serve, and open the port in the firewall",
        )
        return
    checks, date = handshake(host, port, authority)
    yield from checks
    if date is not None:
        yield clock(date, dt.datetime.now(dt.UTC))


def handshake(host: str, port: int, authority: bytes) -> tuple[list[DoctorCheck], str | None]:
    """Check the server's certificate as a node does; return the checks and the server's date."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    try:
        with (
            socket.create_connection((host, port), TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            request = f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            secure.sendall(request.encode())
            answer = secure.recv(1 << 14).decode("latin-1")
        return [DoctorCheck("tls", True, "the certificate is good for this name")], _date(answer)
    except ssl.SSLCertVerificationError as error:
        return [_why(error, host)], None
    except (OSError, ssl.SSLError) as error:
        way_out = "something else than fedlm federation serve listens there"
        return [DoctorCheck("tls", False, f"no TLS: {error}", way_out)], None


def _why(error: ssl.SSLCertVerificationError, host: str) -> DoctorCheck:
    said = error.verify_message
    if "match" in said:
        way_out = f"the server's certificate is not for {host}: init with --host {host}"
    elif "expired" in said or "not yet valid" in said:
        way_out = "set this machine's clock, or make the certificate anew"
    else:
        way_out = "another authority signed it: use the kit of this very federation"
    return DoctorCheck("tls", False, said, way_out)


def _date(answer: str) -> str | None:
    for line in answer.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "date":
            return value.strip()
    return None


def clock(date: str, now: dt.datetime) -> DoctorCheck:
    """Check that this machine's clock is close enough to the server's for valid signatures."""
    there = email.utils.parsedate_to_datetime(date)
    ahead = (now - there).total_seconds()
    # The server's date is in whole seconds.
    well = -BEHIND_SECONDS < ahead < AHEAD_SECONDS + 1.0
    found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return DoctorCheck("clock", well, found, "set the clock, by NTP if possible")
