"""Where a federation keeps its files, and what it hands to each node.

In:       a folder.
Out:      settings, certificates, keys.
Promise:  what is private stays in files that only their owner can read; a node's kit holds what
          that node needs and nothing of the others; settings are read strictly.
Not here: making certificates (`certificates.py`).

    WORKSPACE/federation.toml    name, address, how long a round waits and for how many
    WORKSPACE/authority/         ca.pem, ca.key: the key is needed only to make certificates
    WORKSPACE/server/            cert.pem, cert.key, control.key, link.db (the SuperLink's),
                                 counters.json (how far nodes' ledgers had come), signed.json
                                 (how far the times of their signatures had)
    WORKSPACE/tokenizer/         tokenizer.json and what belongs to it, if the federation has one
    WORKSPACE/nodes/NAME/        a kit: node.toml, ca.pem, node.key, node.pub, node.pem (the public
                                 key, signed by the authority), policy.toml, tokenizer/; at the
                                 node also ledger.jsonl, what it answered. Of a node that made its
                                 own key: its public files and invitation.toml. For secure sums
                                 also members.json, the list that this node approved, and secure/,
                                 its state of the last sum
    WORKSPACE/members.json       the list of members of secure sums; members.proposed.json, the next
    WORKSPACE/history.jsonl      who did what
    WORKSPACE/removed/           nodes that were removed, and older certificates
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlm.core.documents import read_text
from fedlm.core.errors import ConfigError, require
from fedlm.corpus.tokenizer_file import load_tokenizer, write_tokenizer
from fedlm.deploy import certificates, history
from fedlm.deploy.policy import POLICY
from fedlm.deploy.signing import key_id
from fedlm.deploy.tables import check_table, read_table, write_table
from fedlm.engine.messages import NODE_NAME
from fedlm.recipe.settings import Table
from fedlm.recipe.vocabulary import ORIGIN

MEMBERS = "members.json"
TOKENIZER = "tokenizer"  # the folder of a tokenizer in a workspace and in a kit


class WorkspaceSettings(Table):
    """The settings of `federation.toml`."""

    name: str
    host: str  # the name by which nodes reach the server
    port: Annotated[int, Field(ge=1, le=65535)]
    bind: str = "0.0.0.0"  # the address at which the server listens
    connections_per_address: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    quota_gigabytes: Annotated[float, Field(gt=0, le=1e6)] = 8.0  # that a node may leave unfetched
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of a round's nodes that must answer
    deadline: Annotated[float, Field(gt=0, le=1e9)] = 3600.0  # seconds: how long a node may take


class KitSettings(Table):
    """The settings of `node.toml`, in the kit of a node."""

    federation: str
    name: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True)
class Workspace:
    """The folder of a federation: settings, certificates, keys and the kits of its nodes."""

    path: Path

    @property
    def settings(self) -> WorkspaceSettings:
        return read_table(self.path / "federation.toml", WorkspaceSettings)

    @property
    def authority(self) -> Path:
        return self.path / "authority" / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.path / "server" / "cert.pem"

    @property
    def certificate_key(self) -> Path:
        return self.path / "server" / "cert.key"

    @property
    def control_key(self) -> Path:
        return self.path / "server" / "control.key"

    @property
    def control_secret(self) -> str:
        """The control key: 64 hexadecimal digits."""
        file = self.control_key
        secret = read_text(file, str(file), ConfigError).strip()
        require(
            re.fullmatch("[0-9a-f]{64}", secret) is not None,
            "control key",
            str(file),
            "64 hexadecimal digits",
            "Bring the file back from a copy of the federation's folder.",
        )
        return secret

    @property
    def database(self) -> Path:
        return self.path / "server" / "link.db"

    @property
    def history(self) -> Path:
        return self.path / history.NAME

    @property
    def sightings(self) -> Path:
        return self.path / "server" / "sightings.json"

    @property
    def signed(self) -> Path:
        """The times after which a signature of each node counts when the server starts again."""
        return self.path / "server" / "signed.json"

    @property
    def counters(self) -> Path:
        return self.path / "server" / "counters.json"

    @property
    def members(self) -> Path:
        """The list of members of secure sums, which they approved."""
        return self.path / MEMBERS

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the federation, if it has one: its kits carry the same."""
        return self.path / TOKENIZER / "tokenizer.json"

    def nodes(self) -> dict[str, bytes]:
        """Return the public keys of the nodes that may join, by name."""
        folder = self.path / "nodes"
        kits = sorted(folder.iterdir()) if folder.is_dir() else []
        found = {}
        for kit in kits:
            if NODE_NAME.fullmatch(kit.name):  # else it is one that is being made
                with contextlib.suppress(OSError):
                    found[kit.name] = (kit / "node.pub").read_bytes()
        return found

    def kit(self, name: str) -> Kit:
        return Kit(self.path / "nodes" / name)

    @classmethod
    def existing(cls, path: Path) -> Workspace:
        workspace = cls(Path(path))
        if not (workspace.path / "federation.toml").is_file():
            raise ConfigError(
                f"{path} is not a federation: it has no federation.toml. Make one with "
                f"fedlm federation init {path} --host NAME --nodes a,b."
            )
        return workspace


@dataclass(frozen=True)
class Kit:
    """The folder that a node was given: its settings, its key and the authority that it trusts."""

    path: Path

    @property
    def settings(self) -> KitSettings:
        return read_table(self.path / "node.toml", KitSettings)

    @property
    def authority(self) -> bytes:
        return self._bytes("ca.pem")

    @property
    def key(self) -> bytes:
        return self._bytes("node.key")

    @property
    def policy(self) -> Path:
        return self.path / "policy.toml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    @property
    def members(self) -> Path:
        """The list of members of secure sums that this node approved."""
        return self.path / MEMBERS

    @property
    def secure(self) -> Path:
        """The folder of this node's secure sums."""
        return self.path / "secure"

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"kit {self.path}: {name} is not readable: {error.strerror}."
            ) from None

    @classmethod
    def existing(cls, path: Path) -> Kit:
        kit = cls(Path(path))
        if not (kit.path / "node.toml").is_file():
            raise ConfigError(
                f"{path} is not a node's kit: it has no node.toml. Ask whoever runs the "
                "federation for an invitation, and bring it in with fedlm node accept."
            )
        return kit


def init(
    path: Path,
    name: str,
    hosts: Sequence[str],
    port: int,
    nodes: Sequence[str],
    *,
    tokenizer: Path | None = None,
    **more: object,
) -> Workspace:
    """Create a federation: its authority, its server's certificate and a kit per node.

    With `tokenizer`, the path of a `tokenizer.json`, the kits carry it.
    """
    require(not path.exists(), "HOME", str(path), "a folder that does not exist yet")
    require(len(set(nodes)) == len(nodes), "--nodes", ",".join(nodes), "different names")
    for node in nodes:
        check_name(node, "--nodes")
    settings = check_table(
        WorkspaceSettings, {"name": name, "host": hosts[0], "port": port, **more}, "init"
    )
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    top = certificates.authority(name)
    own = certificates.server(top, [*hosts, *loopback(hosts)])
    (path / "authority").mkdir(parents=True)
    (path / "server").mkdir()
    path.chmod(0o700)
    workspace = Workspace(path)
    workspace.authority.write_bytes(top.certificate)
    certificates.create_private(path / "authority" / "ca.key", top.key)
    workspace.certificate.write_bytes(own.certificate)
    certificates.create_private(workspace.certificate_key, own.key)
    certificates.create_private(workspace.control_key, secrets.token_hex(32).encode())
    history.note(workspace.history, "init", federation=name, hosts=list(hosts))
    if given is not None and tokenizer is not None:
        write_tokenizer(given, workspace.tokenizer.parent)
        origin = tokenizer.parent / ORIGIN
        if origin.is_file():
            shutil.copyfile(origin, workspace.tokenizer.parent / ORIGIN)
    for node in nodes:
        _make_kit(workspace, settings, node, top)
    write_table(path / "federation.toml", settings)  # last: it makes the folder a federation
    return workspace


def check_name(name: str, setting: str) -> None:
    """Raise `ConfigError` if a node cannot have this name."""
    require(
        NODE_NAME.fullmatch(name) is not None,
        setting,
        name,
        "names of small letters, digits, dots and hyphens",
    )


def _make_kit(
    workspace: Workspace, settings: WorkspaceSettings, name: str, issuer: certificates.Signed
) -> Kit:
    """Create the whole kit of a node, with a private key that is made here."""
    kit = workspace.kit(name)
    kit.path.mkdir(parents=True)
    private, public = certificates.node_key()
    history.note(workspace.history, "add-node", node=name, key=key_id(public), made_here=True)
    (kit.path / "node.pem").write_bytes(certificates.node(issuer, name, public))
    (kit.path / "ca.pem").write_bytes(workspace.authority.read_bytes())
    certificates.create_private(kit.path / "node.key", private)
    (kit.path / "node.pub").write_bytes(public)
    kit.policy.write_text(POLICY, encoding="utf-8")
    if workspace.tokenizer.is_file():
        shutil.copytree(workspace.tokenizer.parent, kit.path / TOKENIZER)
    reach = KitSettings(federation=settings.name, name=name, host=settings.host, port=settings.port)
    write_table(kit.path / "node.toml", reach)
    return kit


def loopback(hosts: Sequence[str]) -> list[str]:
    """Return the loopback names to certify, so that the operator can connect locally."""
    return [name for name in ("localhost", "127.0.0.1") if name not in hosts]


def address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    try:
        return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    except ValueError:
        return f"{host}:{port}"
