"""Where a federation keeps its files, and what it hands to each node.

In:       a folder.
Out:      settings, certificates, keys.
Promise:  what is private stays in files that only their owner can read; a node's kit holds what
          that node needs and nothing of the others; settings are read strictly.
Not here: making certificates (`certificates.py`).

    WORKSPACE/federation.toml    name, address, how long a round waits and for how many
    WORKSPACE/authority/         ca.pem, ca.key: the key is needed only to make certificates
    WORKSPACE/server/            cert.pem, cert.key, control.key, link.db (the SuperLink's),
                                 counters.json (how far nodes' ledgers had come)
    WORKSPACE/nodes/NAME/        a kit: node.toml, ca.pem, node.key, node.pub, policy.toml; at the
                                 node also ledger.jsonl, what it answered
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlm.core.errors import ConfigError, require
from fedlm.deploy import certificates
from fedlm.deploy.policy import POLICY
from fedlm.deploy.tables import check_table, read_table, write_table
from fedlm.engine.messages import NODE_NAME
from fedlm.recipe.settings import Table


class WorkspaceSettings(Table):
    """The settings of `federation.toml`."""

    name: str
    host: str  # the name by which nodes reach the server
    port: Annotated[int, Field(ge=1, le=65535)]
    bind: str = "0.0.0.0"  # the address at which the server listens
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of a round's nodes that must answer
    deadline: Annotated[float, Field(gt=0, le=1e9)] = (
        3600.0  # seconds that a round waits for a node
    )


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
    def database(self) -> Path:
        return self.path / "server" / "link.db"

    @property
    def counters(self) -> Path:
        return self.path / "server" / "counters.json"

    def nodes(self) -> dict[str, bytes]:
        """Return the public keys of the nodes that may join, by name."""
        folder = self.path / "nodes"
        kits = sorted(folder.iterdir()) if folder.is_dir() else []
        return {k.name: (k / "node.pub").read_bytes() for k in kits if (k / "node.pub").is_file()}

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
                "federation for the folder HOME/nodes/NAME."
            )
        return kit


def init(
    path: Path, name: str, hosts: Sequence[str], port: int, nodes: Sequence[str], **more: object
) -> Workspace:
    """Create a federation: its authority, its server's certificate and a kit per node."""
    require(not path.exists(), "HOME", str(path), "a folder that does not exist yet")
    require(len(set(nodes)) == len(nodes) > 0, "--nodes", ",".join(nodes), "different names")
    for node in nodes:
        require(
            NODE_NAME.fullmatch(node) is not None,
            "--nodes",
            node,
            "names of small letters, digits, dots and hyphens",
        )
    settings = check_table(
        WorkspaceSettings, {"name": name, "host": hosts[0], "port": port, **more}, "init"
    )
    top = certificates.authority(name)
    own = certificates.server(top, [*hosts, *_loopback(hosts)])
    (path / "authority").mkdir(parents=True)
    (path / "server").mkdir()
    path.chmod(0o700)
    workspace = Workspace(path)
    workspace.authority.write_bytes(top.certificate)
    certificates.write_private(path / "authority" / "ca.key", top.key)
    workspace.certificate.write_bytes(own.certificate)
    certificates.write_private(workspace.certificate_key, own.key)
    certificates.write_private(workspace.control_key, secrets.token_hex(32).encode())
    for node in nodes:
        add_node(workspace, settings, node)
    write_table(path / "federation.toml", settings)  # last: it makes the folder a federation
    return workspace


def add_node(workspace: Workspace, settings: WorkspaceSettings, name: str) -> Kit:
    """Create the kit of one more node."""
    kit = workspace.kit(name)
    require(not kit.path.exists(), "--nodes", name, "a name that is not taken")
    kit.path.mkdir(parents=True)
    private, public = certificates.node_key()
    (kit.path / "ca.pem").write_bytes(workspace.authority.read_bytes())
    certificates.write_private(kit.path / "node.key", private)
    (kit.path / "node.pub").write_bytes(public)
    kit.policy.write_text(POLICY, encoding="utf-8")
    reach = KitSettings(federation=settings.name, name=name, host=settings.host, port=settings.port)
    write_table(kit.path / "node.toml", reach)
    return kit


def _loopback(hosts: Sequence[str]) -> list[str]:
    """Return the loopback names to certify, so that the operator can connect locally."""
    return [name for name in ("localhost", "127.0.0.1") if name not in hosts]


def address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    try:
        return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    except ValueError:
        return f"{host}:{port}"
