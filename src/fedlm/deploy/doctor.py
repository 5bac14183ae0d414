"""Finds the usual mistakes, and says what to do.

In:       a federation's folder, or a node's kit.
Out:      checks: what was looked at, whether it is well, what to do.
Promise:  looks and changes nothing; every finding names its way out.
Not here: making things (`workspace.py`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import http.client
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from fedlm.core.documents import json_value, read_json
from fedlm.core.errors import ConfigError, RecordError, WireError, damaged, library_errors
from fedlm.deploy import certificates, history, signing
from fedlm.deploy.workspace import Kit, Workspace
from fedlm.engine.messages import COMPATIBLE, printable

FLOWER = "1.41."
EXPIRING_DAYS = 30
LEAST_FREE = 2 << 30  # bytes of disk
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
        if checks[-1].well:  # the server was reached, and is the right one
            checks += registered(kit)
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
    certificate = kit.path / "node.pem"
    if certificate.is_file():
        yield _lifetime("certificate", certificate.read_bytes(), "fedlm federation renew HOME NAME")
    yield disk(kit.path)


def registered(kit: Kit) -> Iterator[DoctorCheck]:
    """Check that the server knows the kit's key, and runs a fedlm that fits."""
    private = certificates.load_private(kit.key)
    public = certificates.public_pem(private)
    signed = signing.sign(private, public, "GET", signing.WHO_AM_I, b"", signing.new_process())
    context = _trusting(kit.authority)
    settings = kit.settings
    line = http.client.HTTPSConnection(
        settings.host, settings.port, timeout=TIMEOUT, context=context
    )
    try:
        line.request("GET", signing.WHO_AM_I, headers=signed)
        answer = line.getresponse()
        known = read_answer(answer.status, answer.read(1 << 14))
    except (OSError, http.client.HTTPException, WireError) as e:
        yield DoctorCheck("registration", False, str(e), _remedy(str(e), kit))
        return
    finally:
        line.close()
    yield DoctorCheck("registration", True, f"known as {known.name}")
    own = version("fedlm")
    fits = known.protocol in COMPATIBLE
    yield DoctorCheck(
        "version",
        fits,
        f"fedlm {own} here, {known.fedlm} at the server; messages of version {known.protocol}",
        "install the same fedlm at the server and at all nodes",
    )


class KnownAs(NamedTuple):
    """What a server tells a node: its name there, and the version of the server."""

    name: str
    fedlm: str
    protocol: int


def read_answer(status: int, raw: bytes) -> KnownAs:
    """Return what a server tells of a node's key, or raise `WireError` with its reason."""
    told = json_value(raw, "the answer", WireError)
    with damaged("the answer", WireError):
        if status != 200:
            raise WireError(printable(str(told["reason"]))[:200])
        name, fedlm = printable(str(told["name"]))[:64], printable(str(told["fedlm"]))[:40]
        return KnownAs(name, fedlm, int(told["protocol"]))


def _remedy(reason: str, kit: Kit) -> str:
    if "clock" in reason:
        return "set the clock, by NTP if possible"
    if "expired" in reason:
        return "the operator: fedlm federation renew HOME NAME; then fedlm node accept here"
    return (
        f"send {kit.path / 'node.pub'} to the operator: fedlm federation add-node HOME NAME --key; "
        "or, if there is another kit of this node, use that"
    )


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
    with contextlib.suppress(ConfigError):  # no certificate, as was found above
        signed = certificates.signed_by(certificate, authority)
        found = "by the authority" if signed else "by another"
        way_out = "the authority was changed: make the federation anew"
        yield DoctorCheck("signature", signed, found, way_out)
        yield checked_names(certificate, workspace.settings.host)
    for name in workspace.nodes():
        file = workspace.kit(name).path / "node.pem"
        if file.is_file():
            way_out = f"fedlm federation renew {workspace.path} {name}"
            yield _lifetime(f"certificate of {name}", file.read_bytes(), way_out)
    yield _used_twice(workspace)
    yield _history(workspace)
    yield disk(workspace.database.parent)


def _used_twice(workspace: Workspace) -> DoctorCheck:
    """Check that no kit was seen in use by two processes at a time."""
    found = {}
    if workspace.sightings.is_file():
        found = read_json(workspace.sightings, str(workspace.sightings), RecordError)
    names = ", ".join(sorted(found)) if isinstance(found, dict) else "unreadable"
    way_out = (
        f"two processes used the kit of {names}: find the copy, give the node another key (fedlm "
        f"federation rotate), and remove {workspace.sightings}"
    )
    return DoctorCheck("kits", not names, names or "each used by one process", way_out)


def _history(workspace: Workspace) -> DoctorCheck:
    try:
        found = f"{len(history.read(workspace.history))} actions on record"
        return DoctorCheck("history", True, found)
    except RecordError as error:
        return DoctorCheck(
            "history", False, str(error), "find out who changed it, and bring it back"
        )


def disk(path: Path) -> DoctorCheck:
    """Check that there is room for messages and records."""
    free = shutil.disk_usage(path).free
    return DoctorCheck(
        "disk", free >= LEAST_FREE, f"{free / 1e9:.1f} GB free", f"make room where {path} is"
    )


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


def _lifetime(what: str, pem: bytes, renew: str = "fedlm federation renew HOME") -> DoctorCheck:
    try:
        found = certificates.load_certificate(pem, what)
    except ConfigError as error:
        return DoctorCheck(what, False, str(error), renew)
    now = dt.datetime.now(dt.UTC)
    well = found.not_valid_before_utc <= now <= found.not_valid_after_utc
    until = f"{found.not_valid_before_utc:%Y-%m-%d} to {found.not_valid_after_utc:%Y-%m-%d}"
    left = (found.not_valid_after_utc - now).days
    if well and left < EXPIRING_DAYS:
        return DoctorCheck(f"{what} dates", False, f"{until}: it ends in {left} days", renew)
    return DoctorCheck(f"{what} dates", well, until, f"set this machine's clock, or {renew}")


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
    try:
        context = _trusting(authority)
        with (
            socket.create_connection((host, port), TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            request = f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            secure.sendall(request.encode())
            answer = secure.recv(1 << 14).decode("latin-1")
        return [DoctorCheck("tls", True, "the certificate is good for this name")], _date(answer)
    except ConfigError as error:
        return [DoctorCheck("tls", False, str(error), "ask for the authority again")], None
    except ssl.SSLCertVerificationError as error:
        return [_why(error, host)], None
    except (OSError, ssl.SSLError) as error:
        way_out = "something else than fedlm federation serve listens there"
        return [DoctorCheck("tls", False, f"no TLS: {error}", way_out)], None


def _trusting(authority: bytes) -> ssl.SSLContext:
    """Return the settings of a TLS client that trusts this authority, PEM, and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with library_errors("the authority is not a certificate", "", ConfigError):
        context.load_verify_locations(cadata=authority.decode("ascii", "ignore"))
    return context


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
