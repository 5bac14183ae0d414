"""The envelope of every payload, and the one way to read a body.

In:       a codec's name and its body, or bytes from anywhere.
Out:      bytes, or the body they hold, section by section.
Promise:  anything that is not exactly a frame of this version is a `WireError`; no size is
          believed before it is checked against what really arrived.
Not here: what the body means (one file a codec).

    offset  size  field
    0       4     magic "FLM1"
    4       1     length of the codec's name, n (1 to 64)
    5       n     codec name, ASCII, with its options: "uniform-8", "topk-0.01-float32"
    5+n     8     length of the body, little-endian
    13+n    4     CRC-32 of name and body, little-endian
    17+n    ...   body

The checksum finds accidents, not attackers: who may send is the business of the transport.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from fedlm.core.errors import WireError

MAGIC = b"FLM1"
LONGEST_NAME = 64
_TAIL = struct.Struct("<QI")


def seal_frame(codec: str, *body: bytes | memoryview) -> bytes:
    """Wraps a body for the wire; its parts are put together once."""
    name = _name_bytes(codec)
    check = zlib.crc32(name)
    for part in body:
        check = zlib.crc32(part, check)
    tail = _TAIL.pack(sum(map(len, body)), check)
    return b"".join([MAGIC, bytes([len(name)]), name, tail, *body])


def overhead(codec: str) -> int:
    """How many bytes `seal` adds."""
    return len(MAGIC) + 1 + len(_name_bytes(codec)) + _TAIL.size


def open_frame(payload: bytes, codec: str) -> memoryview:
    """The body of a frame made by `codec`."""
    view = memoryview(payload)
    if len(view) < len(MAGIC) + 1 or bytes(view[:4]) != MAGIC:
        raise WireError("payload is not a fedlm frame: it does not begin with FLM1.")
    start = 5 + view[4]
    if len(view) < start + _TAIL.size:
        raise WireError(f"frame is cut off: {len(view)} bytes do not hold its header.")
    name = bytes(view[5:start])
    if name != _name_bytes(codec):
        raise WireError(f"frame was made by codec {name[:LONGEST_NAME]!r}: expected {codec!r}.")
    size, check = _TAIL.unpack_from(view, start)
    body = view[start + _TAIL.size :]
    if len(body) != size:
        raise WireError(f"frame holds {len(body)} bytes of body: its header says {size}.")
    if zlib.crc32(body, zlib.crc32(name)) != check:
        raise WireError("frame is damaged: its checksum does not match.")
    return body


def _name_bytes(codec: str) -> bytes:
    if not codec.isascii() or not 1 <= len(codec) <= LONGEST_NAME:
        raise WireError(f"codec name {codec!r}: expected 1 to {LONGEST_NAME} ASCII characters.")
    return codec.encode("ascii")


class Reader:
    """A body, read from front to back; every section is checked to be there."""

    def __init__(self, body: memoryview, wanted: int) -> None:
        if len(body) != wanted:
            raise WireError(f"frame holds {len(body)} bytes of body: this model needs {wanted}.")
        self._body, self._at = body, 0

    def take(self, count: int, dtype: str) -> np.ndarray:
        """The next `count` numbers, without a copy."""
        size = count * np.dtype(dtype).itemsize
        part = self._body[self._at : self._at + size]
        if len(part) != size:
            raise WireError(f"frame ends within a section of {size} bytes.")
        self._at += size
        return np.frombuffer(part, dtype)

    def finite(self, count: int) -> np.ndarray:
        """The next `count` float32, none of them NaN or infinite."""
        found = self.take(count, "<f4")
        if not np.isfinite(found).all():
            raise WireError("frame holds a scale that is not a finite number.")
        return found
