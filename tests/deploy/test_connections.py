"""Strangers take neither all connections nor much memory."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from fedlm.deploy import certificates, connections
from fedlm.deploy.processes import free_port
from tests.conftest import sends_at_once

pytestmark = [
    pytest.mark.network,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with few connections per address; yields its port and a client's TLS."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.5)
    top = certificates.authority("fed")
    own = certificates.server(top, ["127.0.0.1"])
    (tmp_path / "cert.pem").write_bytes(own.certificate)
    (tmp_path / "cert.key").write_bytes(own.key)

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    listener = connections.listen("127.0.0.1", free_port(), per_address=20)
    port = listener.getsockname()[1]
    files = (str(tmp_path / "cert.pem"), str(tmp_path / "cert.key"))
    run = threading.Thread(target=connections.run, args=(app, listener, *files), daemon=True)
    run.start()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(cadata=top.certificate.decode())
    _wait_for(lambda: answer(port, tls), 20)
    yield port, tls, listener


def _wait_for(what, seconds=5.0):
    ends = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if what():
                return
        assert time.monotonic() < ends
        time.sleep(0.05)


def dial(port, source="127.0.0.1"):
    return socket.create_connection(("127.0.0.1", port), 5.0, source_address=(source, 0))


def secure(port, tls, source="127.0.0.1"):
    return tls.wrap_socket(dial(port, source), server_hostname="127.0.0.1")


def answer(port, tls, source="127.0.0.1"):
    with secure(port, tls, source) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return line.recv(100).startswith(b"HTTP/1.1 403")


def closed(line):
    """Tell whether the other side has closed a connection."""
    line.settimeout(5.0)
    try:
        while line.recv(1000):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_idle_connections_do_not_lock_others_out(server):
    port, tls, listener = server
    idle = [dial(port) for _ in range(60)]
    _wait_for(lambda: listener.connections.open["127.0.0.1"] == 20)
    assert answer(port, tls, "127.0.0.2"), "another address is let in"
    assert all(closed(line) for line in idle), "they are closed for their silence"
    _wait_for(lambda: listener.connections.open["127.0.0.1"] == 0)
    assert answer(port, tls)
    for line in idle:
        line.close()


def test_a_head_that_never_ends_is_given_up(server):
    port, tls, _ = server
    with secure(port, tls) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert closed(line)
    with secure(port, tls) as line:  # nor does a second request take its time
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(1000)
        line.sendall(b"GET")
        assert closed(line)


def test_a_body_that_nobody_wants_is_not_taken(server):
    port, tls, _ = server
    with secure(port, tls) as line:
        line.settimeout(2.0)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 48000000\r\n\r\n"
        sent = 0
        with contextlib.suppress(OSError):
            line.sendall(head)
            for _ in range(500):
                sent += line.send(b"x" * 65536)
                time.sleep(0.001)
        assert sent < 16_000_000  # what sockets hold, not what was announced


def test_small_answers_are_sent_at_once():
    """A connection to a node does not wait for its acknowledgements (Nagle)."""
    assert sends_at_once(connections.listen("127.0.0.1", free_port(), per_address=20))
