"""A connection for requests of many parts (`parcels.py`), at a node or at the operator's side.

In:       a path, parts; a way to make the headers of a request.
Out:      the parts of the answer, read one after the other.
Promise:  the server's certificate is checked as Flower's clients check it; parts are sent from the
          memory that holds them, and read into memory of the length that the table told, which is
          never more than allowed; a connection that the server closed meanwhile is made again.
Not here: what the parts are (`whole.py`), how often a failed request is repeated (`supernode.py`,
          `client.py`).

Errors are those of httpx, in which Flower's clients fail, so that both fail alike. httpx itself
reads a TLS record at a time, each through several layers of Python.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx

from fedlm.core.errors import WireError
from fedlm.deploy.flower.parcels import (
    COUNT,
    Entry,
    Part,
    entry_of,
    pieces_of,
    read_table,
    table_size,
    total,
    write_table,
)

TIMEOUT = 60.0  # seconds without a byte
LONGEST_REFUSAL = 1 << 14  # bytes
Headers = Callable[[str, str, bytes, int], dict[str, str]]
"""A function of method, path, table and length of a request to its headers."""


class Answer:
    """The parts of an answer, which are read in order."""

    def __init__(self, response: http.client.HTTPResponse, close: Callable[[], None]) -> None:
        self._response, self._close = response, close
        self.headers = response.headers
        count = self._take(COUNT.size)
        table = bytes(count) + bytes(self._take(table_size(bytes(count))))
        self.entries: list[Entry] = read_table(table)
        self._next = 0

    @property
    def left(self) -> list[Entry]:
        """The parts that have not been read."""
        return self.entries[self._next :]

    def part(self) -> bytes:
        """Read the next part."""
        if not self.left:
            raise WireError("the answer has too few parts.")
        entry = self.entries[self._next]
        self._next += 1
        made = self._take(entry.length)
        if not self.left:
            self._response.read(1)  # its end, so that the connection can be used again
        return made

    def _take(self, size: int) -> bytes:
        try:
            made = self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            self._close()
            raise httpx.ReadError(str(error) or type(error).__name__) from None
        if len(made) != size:
            self._close()
            raise httpx.ReadError("the answer ended early")
        return made


class Line:
    """A connection to a SuperLink, made when it is needed."""

    def __init__(self, host: str, port: int, authority: bytes, headers: Headers) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.decode("ascii", "ignore"))
        self._host, self._port, self._context, self._headers = host, port, context, headers
        self._made: http.client.HTTPSConnection | None = None
        self._answer: Answer | None = None

    def call(self, path: str, parts: Sequence[Part], names: Sequence[str] = ()) -> Answer:
        """Send a request and return its answer; `names` are the parts' hashes where known.

        Raises `httpx.TransportError` or `httpx.HTTPStatusError`.
        """
        names = [*names, *([""] * (len(parts) - len(names)))]
        entries = [entry_of(part, name) for part, name in zip(parts, names, strict=True)]
        table = write_table(entries)
        length = total(table, entries)
        if self._answer is not None and self._answer.left:
            self.close()  # the rest of an answer that nobody wants
        used = self._made is not None
        try:
            return self._try(path, table, length, parts)
        except httpx.TransportError:
            if not used:
                raise
        return self._try(path, table, length, parts)  # the server had closed the connection

    def get(self, path: str) -> bytes:
        """Return the body of a small answer to a request without one."""
        self.close()
        try:
            line = self._connected()
            line.request("GET", path, headers=self._headers("GET", path, b"", 0))
            response = line.getresponse()
            if response.status != 200:
                raise self._refused(path, response)
            return response.read(LONGEST_REFUSAL)
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ConnectError(str(error) or type(error).__name__) from None
        finally:
            self.close()

    def _try(self, path: str, table: bytes, length: int, parts: Sequence[Part]) -> Answer:
        try:
            line = self._connected()
            line.putrequest("POST", path, skip_accept_encoding=True)
            headers = {"content-type": "application/octet-stream", "content-length": str(length)}
            for name, value in {**headers, **self._headers("POST", path, table, length)}.items():
                line.putheader(name, value)
            line.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                line.send(table)  # a server that refuses closes before it has read
                for part in parts:
                    for piece in pieces_of(part):
                        line.send(piece)
            response = line.getresponse()
            if response.status != 200:
                raise self._refused(path, response)
            self._answer = Answer(response, self.close)
            return self._answer
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise httpx.ConnectError(str(error) or type(error).__name__) from None
        except WireError as error:
            self.close()
            raise httpx.RemoteProtocolError(str(error)) from None

    def _connected(self) -> http.client.HTTPSConnection:
        if self._made is None:
            self._made = http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT, context=self._context
            )
            self._made.connect()
        return self._made

    def _refused(self, path: str, response: http.client.HTTPResponse) -> httpx.HTTPStatusError:
        request = httpx.Request("POST", f"https://{self._host}:{self._port}{path}")
        content = response.read(LONGEST_REFUSAL)
        self.close()
        told = httpx.Response(response.status, content=content, request=request)
        return httpx.HTTPStatusError(f"{path}: {told.status_code}", request=request, response=told)

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        self._answer = None
        if self._made is not None:
            self._made.close()
            self._made = None
