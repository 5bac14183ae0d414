"""A server's connections before anybody is known: few per address, none that idles.

In:       an ASGI application, an address, certificate and key.
Out:      a server that runs until it is stopped.
Promise:  an address has at most so many connections, and all together leave files to open; all
          strangers together leave a quarter to addresses from which nodes have come; a connection
          that has not finished its TLS handshake, or has not sent a whole request head, within a
          few seconds is closed; heads are small, and a body that nobody asked for stays with its
          sender but for 64 KiB.
Not here: who may come in (`flower/superlink.py`).
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedlm.core.errors import ConfigError

HANDSHAKE_SECONDS = HEAD_SECONDS = 10.0
LARGEST_HEAD = 32 << 10  # bytes
IDLE_SECONDS = 75  # between two requests of a connection
MOST_KNOWN = 1 << 16  # addresses that are remembered
SPARE_FILES = 128  # for the database, logs and libraries


class Connections:
    """The number of open connections by address.

    >>> all_of_them = Connections(per_address=4, total=8)
    >>> all_of_them.know("10.0.0.1")
    >>> [all_of_them.enter(f"10.9.0.{n}") for n in range(8)]
    [True, True, True, True, True, True, False, False]
    >>> [all_of_them.enter("10.0.0.1") for _ in range(3)]
    [True, True, False]
    """

    def __init__(self, per_address: int, total: int) -> None:
        self.per_address, self.total = per_address, total
        self.strangers = total - total // 4  # that addresses which nobody knows may have
        self.open: Counter[str] = Counter()
        self.known: dict[str, None] = {}  # addresses, the latest last

    def know(self, address: str) -> None:
        """Remember an address from which somebody has shown a key that counts."""
        self.known.pop(address, None)
        self.known[address] = None
        if len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]

    def enter(self, address: str) -> bool:
        """Count a connection; return False if its address, or all together, have too many."""
        most = self.total if address in self.known else self.strangers
        if self.open[address] >= self.per_address or self.open.total() >= most:
            if not self.open[address]:
                del self.open[address]
            return False
        self.open[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Count a connection as closed."""
        self.open[address] -= 1
        if self.open[address] <= 0:
            del self.open[address]


class _Counted(socket.socket):
    """An accepted connection that is counted until it is closed."""

    left: tuple[Connections, str] | None = None

    def close(self) -> None:
        if self.left is not None:
            connections, address = self.left
            self.left = None
            connections.leave(address)
        super().close()


class Listener(socket.socket):
    """A listening socket that closes connections beyond the limits as it accepts them."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        taken = _Counted(self.family, self.type, self.proto, fileno=descriptor)
        if not self.connections.enter(address[0]):
            taken.close()
            raise ConnectionAbortedError(f"{address[0]} has too many connections")
        taken.left = (self.connections, address[0])
        return taken, address


def listen(host: str, port: int, per_address: int) -> Listener:
    """Return a listening socket, with as many connections as this process may have files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once; else each waits for 40 ms.
    made = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.connections = Connections(per_address, max(16, soft - SPARE_FILES))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, UnicodeError) as error:
        made.close()
        raise ConfigError(
            f"bind = {host!r}, port = {port} in federation.toml: nothing can listen there "
            f"({error}). Is another server running?"
        ) from None
    return made


class Protocol(H11Protocol):
    """HTTP/1.1 with a time limit on the head of each request."""

    _slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()  # the head is there; the guard watches the body
        elif self.conn.their_state is h11.SEND_BODY:
            self.transport.close()  # a body to a request that has been answered
        elif self._slow is None:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._slow = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _disarm(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _give_up(self) -> None:
        self._slow = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers give up a TLS handshake after a few seconds."""

    async def create_server(self, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*args, **options)


def check_certificate_and_key(certificate: str, key: str) -> None:
    """Raise `ConfigError` unless two files are a certificate and its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate and its key ({error}): "
            "fedlm federation renew makes new ones."
        ) from None


def run(app: Any, listener: Listener, certificate: str, key: str) -> None:
    """Serve an application over TLS until the process is asked to end."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        access_log=False,
        workers=1,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
    )
    server = uvicorn.Server(config)
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(server.serve(sockets=[listener]))
