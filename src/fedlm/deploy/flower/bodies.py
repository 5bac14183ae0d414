"""Read the body of a request: no more than was announced, part by part, and not too slowly.

In:       what an ASGI server receives for a request, and the announced length.
Out:      the body at once, or the parts of a parcel one after the other.
Promise:  memory for a part is taken only after its length is known to be small enough; a part is
          handed on only if it has the hash that the table tells; a body that does not come is given
          up.
Not here: who sent it (`superlink.py`), what is in it (`exchange.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from fedlm.core.errors import WireError
from fedlm.deploy.flower.parcels import COUNT, Entry, read_table, table_size

LARGEST_REQUEST = 48 << 20
PART_SECONDS = 30.0  # until the next part of a body is there
SLOWEST = 16 << 10  # bytes per second, over a whole body
SHORT = 1 << 16  # bytes that are hashed at once, without another thread


class Turned(Exception):
    """A request that is turned away, with a status and a reason for who sent it."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def length_of(headers: dict[bytes, bytes]) -> int:
    """Return the announced length of a body, or raise `Turned`."""
    size = headers.get(b"content-length", b"")
    if b"transfer-encoding" in headers or not (size == b"" or (size.isdigit() and len(size) < 12)):
        raise Turned(411, "the length of the body is not told")
    if int(size or 0) > LARGEST_REQUEST:
        raise Turned(413, "the body is too long")
    return int(size or 0)


async def read(receive: Any, length: int) -> bytes:
    """Read a whole body of announced length."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(PART_SECONDS + length / SLOWEST):
            while more:
                async with asyncio.timeout(PART_SECONDS):
                    part = await receive()
                if part["type"] != "http.request" or len(body) > length:
                    raise Turned(400)
                body += part.get("body", b"")
                more = part.get("more_body", False)
    except TimeoutError:
        raise Turned(408, "the body comes too slowly") from None
    return bytes(body)


class Parcel:
    """The parts of a body, read one after the other."""

    def __init__(self, receive: Any, length: int) -> None:
        self._receive, self._length, self._more = receive, length, True
        self._rest = memoryview(b"")
        self._ends = asyncio.get_running_loop().time() + PART_SECONDS + length / SLOWEST
        self.entries: list[Entry] = []
        self._next = 0

    async def open(self, signed: str | None) -> None:
        """Read the table of parts, and check it against the signed hash, if there is one."""
        try:
            if self._length < COUNT.size:
                raise WireError("the body has no table of parts.")
            count = await self._take(COUNT.size)
            table = bytes(count) + bytes(await self._take(table_size(bytes(count))))
            if signed is not None and hashlib.sha256(table).hexdigest() != signed:
                raise Turned(401, "the body is not the one that was signed")
            self.entries = read_table(table, self._length)
        except WireError as error:
            raise Turned(400, str(error)) from None

    @property
    def left(self) -> list[Entry]:
        """The parts that have not been read."""
        return self.entries[self._next :]

    async def part(self) -> bytearray:
        """Read the next part, and check its hash."""
        if not self.left:
            raise Turned(400, "the body has too few parts")
        entry = self.entries[self._next]
        self._next += 1
        made = await self._take(entry.length)
        if len(made) <= SHORT:
            found = hashlib.sha256(made)
        else:  # another thread, so that other requests go on meanwhile
            found = await asyncio.to_thread(hashlib.sha256, made)
        if found.digest() != entry.sha256:
            raise Turned(401, "a part is not the one that was signed")
        return made

    async def _take(self, size: int) -> bytearray:
        made, at = bytearray(size), 0
        with memoryview(made) as view:  # a bytearray would copy a piece before it takes it
            while at < size:
                if not self._rest:
                    self._rest = memoryview(await self._come())
                piece = self._rest[: size - at]
                view[at : at + len(piece)] = piece
                at, self._rest = at + len(piece), self._rest[len(piece) :]
        return made

    async def _come(self) -> bytes:
        """Wait for the next bytes of the body."""
        if not self._more:
            raise Turned(400, "the body is shorter than announced")
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, min(PART_SECONDS, self._ends - now))):
                came = await self._receive()
        except TimeoutError:
            raise Turned(408, "the body comes too slowly") from None
        if came["type"] != "http.request":
            raise Turned(400)
        self._more = came.get("more_body", False)
        found: bytes = came.get("body", b"")
        return found
