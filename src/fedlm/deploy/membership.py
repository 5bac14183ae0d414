"""Who belongs to a federation: nodes come, go, and get new keys and certificates.

In:       a workspace, a node's name, the public half of a key that the node made itself.
Out:      the node's part of the workspace and an invitation for it; at the node, a complete kit.
Promise:  a private key never leaves the node that made it; an invitation is accepted only for the
          key of the kit and from the authority that signed it; every change is in the history;
          a node that is removed is turned away at once.
Not here: making certificates (`certificates.py`), checking signatures (`signing.py`).

    node        fedlm node init KIT --name north             makes node.key and node.pub
    operator    fedlm federation add-node HOME north --key node.pub
    node        fedlm node accept KIT invitation.toml        the kit can join
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlm.core.errors import ConfigError, require
from fedlm.deploy import certificates, history
from fedlm.deploy.policy import POLICY
from fedlm.deploy.signing import Identity, key_id
from fedlm.deploy.tables import read_table, write_table
from fedlm.deploy.workspace import TOKENIZER, Kit, KitSettings, Workspace, check_name, loopback
from fedlm.recipe.settings import Table

INVITATION = "invitation.toml"
NEXT_KEY = "node.key.next"  # made by `rotate`, until the operator has taken its public half


class Invitation(Table):
    """What an operator tells a node: where the server is, and whom to trust."""

    federation: str
    name: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    authority: str  # PEM
    certificate: str  # PEM: the node's public key, signed by the authority


# ---- at the node ---------------------------------------------------------------------------


def init_kit(path: Path, name: str) -> Kit:
    """Create a kit with a key of its own, which waits for an invitation."""
    check_name(name, "--name")
    require(not path.exists(), "KIT", str(path), "a folder that does not exist yet")
    path.mkdir(parents=True, mode=0o700)
    private, public = certificates.node_key()
    certificates.create_private(path / "node.key", private)
    (path / "node.pub").write_bytes(public)
    kit = Kit(path)
    kit.policy.write_text(POLICY, encoding="utf-8")
    return kit


def made_kit(path: Path) -> Kit:
    """Return a kit that has a key, whether it was invited or not."""
    if not (path / "node.key").is_file():
        raise ConfigError(
            f"{path} is not a node's kit: it has no node.key. Make one with fedlm node init."
        )
    return Kit(path)


def rotate_kit(kit: Kit) -> Path:
    """Make another key for a kit beside the one in use; return the file of its public half."""
    fresh, public = kit.path / NEXT_KEY, kit.path / "node.pub.next"
    fresh.unlink(missing_ok=True)
    private, made = certificates.node_key()
    certificates.create_private(fresh, private)
    public.write_bytes(made)
    return public


def accept(kit: Kit, file: Path) -> Invitation:
    """Take an invitation into a kit, if it is for the kit's key, or for the next one.

    A tokenizer that lies beside the invitation goes into the kit too.
    """
    file = file / INVITATION if file.is_dir() else file
    invitation = read_table(file, Invitation)
    authority, certificate = invitation.authority.encode(), invitation.certificate.encode()
    certificates.check_signed(certificate, authority, str(file))
    public = certificates.public_key_of(certificate)
    fresh = kit.path / NEXT_KEY
    if fresh.is_file() and certificates.public_pem(_load(fresh)) == public:
        os.replace(fresh, kit.path / "node.key")
        (kit.path / "node.pub.next").unlink(missing_ok=True)
        (kit.path / "node.pub").write_bytes(public)
    elif certificates.public_pem(certificates.load_private(kit.key)) != public:
        raise ConfigError(
            f"{file} is an invitation for another key than {kit.path / 'node.key'}. Send "
            f"{kit.path / 'node.pub'} to the operator, and accept what comes back."
        )
    (kit.path / "ca.pem").write_bytes(authority)
    (kit.path / "node.pem").write_bytes(certificate)
    if (file.parent / TOKENIZER).is_dir():
        shutil.copytree(file.parent / TOKENIZER, kit.path / TOKENIZER, dirs_exist_ok=True)
    names = ("federation", "name", "host", "port")
    write_table(
        kit.path / "node.toml", KitSettings(**{name: getattr(invitation, name) for name in names})
    )
    return invitation


def _load(path: Path):  # type: ignore[no-untyped-def]
    return certificates.load_private(path.read_bytes())


# ---- at the operator -----------------------------------------------------------------------


def add_node(workspace: Workspace, name: str, public: bytes) -> Path:
    """Let a node join whose public key is given; return the file of its invitation."""
    check_name(name, "NAME")
    folder = workspace.kit(name).path
    require(
        not folder.exists(),
        "NAME",
        name,
        "a name that is not taken",
        f"fedlm federation rotate {workspace.path} {name} --key gives it another key.",
    )
    _check_unused(workspace, public)
    return _enter(workspace, name, public, "add-node")


def rotate_node(workspace: Workspace, name: str, public: bytes) -> Path:
    """Replace a node's key; the old one is turned away at once."""
    _existing(workspace, name)
    _check_unused(workspace, public)
    return _enter(workspace, name, public, "rotate")


def renew_node(workspace: Workspace, name: str) -> Path:
    """Give a node's key a certificate with a new date; return the file of its invitation."""
    return _enter(workspace, name, _existing(workspace, name), "renew")


def remove_node(workspace: Workspace, name: str) -> Path:
    """Turn a node away from now on; return where its part of the workspace went."""
    public = _existing(workspace, name)
    gone = workspace.path / "removed" / f"{name}-{time.time_ns()}"
    gone.parent.mkdir(mode=0o700, exist_ok=True)
    history.note(workspace.history, "remove-node", node=name, key=key_id(public))
    os.rename(workspace.kit(name).path, gone)
    return gone


def renew_server(workspace: Workspace, hosts: Sequence[str] = ()) -> None:
    """Make the server another key and certificate, for new names or for those that it had."""
    issuer = _issuer(workspace)
    names = certificates.names_of(workspace.certificate.read_bytes())
    if hosts:
        names = [*hosts, *loopback(hosts)]
    made = certificates.server(issuer, names)
    history.note(workspace.history, "renew", server=names)
    _replace(workspace.certificate_key, made.key, private=True)
    _replace(workspace.certificate, made.certificate)
    if hosts:
        settings = workspace.settings.model_copy(update={"host": hosts[0]})
        write_table(workspace.path / "federation.toml", settings)


def rotate_control(workspace: Workspace) -> None:
    """Replace the control key; the server must be started again."""
    history.note(workspace.history, "rotate", control=True)
    _replace(workspace.control_key, secrets.token_hex(32).encode(), private=True)


def _existing(workspace: Workspace, name: str) -> bytes:
    known = workspace.nodes()
    if name not in known:
        raise ConfigError(
            f"{name} is no node of {workspace.path}: it has {', '.join(known) or 'none'}."
        )
    return known[name]


def _check_unused(workspace: Workspace, public: bytes) -> None:
    certificates.check_public(public)
    for name, key in workspace.nodes().items():
        require(key != public, "--key", key_id(public)[:16], f"a key of its own: {name} has it")


def _enter(workspace: Workspace, name: str, public: bytes, action: str) -> Path:
    """Sign a node's key and write all that the workspace holds of the node."""
    certificate = certificates.node(_issuer(workspace), name, public)
    settings = workspace.settings
    history.note(workspace.history, action, node=name, key=key_id(public))
    folder = workspace.kit(name).path
    made = folder.with_name(f".{name}.{time.time_ns()}")
    shutil.copytree(folder, made) if folder.exists() else made.mkdir(parents=True)
    authority = workspace.authority.read_bytes()
    invitation = Invitation(
        federation=settings.name,
        name=name,
        host=settings.host,
        port=settings.port,
        authority=authority.decode("ascii"),
        certificate=certificate.decode("ascii"),
    )
    write_table(made / INVITATION, invitation)
    (made / "ca.pem").write_bytes(authority)
    (made / "node.pem").write_bytes(certificate)
    (made / "node.pub").write_bytes(public)
    if workspace.tokenizer.is_file():
        shutil.copytree(workspace.tokenizer.parent, made / TOKENIZER, dirs_exist_ok=True)
    if action == "rotate":
        (made / "node.key").unlink(missing_ok=True)  # of a kit that the operator made
    if folder.exists():
        old = workspace.path / "removed" / f"{name}-{time.time_ns()}"
        old.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(folder, old)
    os.rename(made, folder)
    return folder / INVITATION


def _issuer(workspace: Workspace) -> certificates.Signed:
    key = workspace.path / "authority" / "ca.key"
    try:
        return certificates.Signed(workspace.authority.read_bytes(), key.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{key} is not readable ({error.strerror}): bring the authority's key back from where "
            "it is kept, for as long as certificates are made."
        ) from None


def _replace(path: Path, data: bytes, *, private: bool = False) -> None:
    fresh = path.with_name(f"{path.name}.{time.time_ns()}")
    certificates.create_private(fresh, data) if private else fresh.write_bytes(data)
    os.replace(fresh, path)


# ---- at the server -------------------------------------------------------------------------


class Identities:
    """The nodes whose signatures count, read again when the workspace changed."""

    def __init__(self, workspace: Workspace, seconds: float = 1.0) -> None:
        self.workspace, self.seconds = workspace, seconds
        self._read, self._seen, self._known = -1e9, -2, dict[str, Identity]()

    def __call__(self) -> dict[str, Identity]:
        """Return the identities by the id of their key, at most `seconds` old."""
        changed = self._changed()
        if changed != self._seen or time.monotonic() - self._read > self.seconds:
            self._seen = changed
            self._known = {
                key_id(public): Identity(name, public, self._until(name))
                for name, public in self.workspace.nodes().items()
            }
            self._read = time.monotonic()
        return self._known

    def _changed(self) -> int:
        """Return when a node was last added or removed, in nanoseconds."""
        try:
            return os.stat(self.workspace.path / "nodes").st_mtime_ns
        except OSError:
            return -1

    def _until(self, name: str) -> float:
        try:
            return certificates.until((self.workspace.kit(name).path / "node.pem").read_bytes())
        except FileNotFoundError:  # of a federation that was made before there were any
            return math.inf
        except (OSError, ConfigError):
            return 0.0
