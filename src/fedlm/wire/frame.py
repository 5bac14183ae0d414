"""The envelope of every payload.

In:       a codec's name and its body, or bytes from anywhere.
Out:      bytes, or the name and body they hold.
Promise:  anything that is not exactly a frame of this version is a `WireError`; no size is
          believed before it is checked against what really arrived.
Not here: what the body means (one file a codec).

    offset  size  field
    0       4     magic "FLM1"
    4       1     length of the codec's name, n
    5       n     codec name, ASCII
    5+n     8     length of the body, little-endian
    13+n    4     CRC-32 of name and body, little-endian
    17+n    ...   body
"""

from __future__ import annotations

import struct
import zlib

from fedlm.core.errors import WireError

MAGIC = b"FLM1"
_TAIL = struct.Struct("<QI")


def seal(codec: str, body: bytes) -> bytes:
    """Wraps a body for the wire."""
    name = codec.encode("ascii")
    check = zlib.crc32(body, zlib.crc32(name))
    return b"".join([MAGIC, bytes([len(name)]), name, _TAIL.pack(len(body), check), body])


def overhead(codec: str) -> int:
    """How many bytes `seal` adds."""
    return len(MAGIC) + 1 + len(codec.encode("ascii")) + _TAIL.size


def open_frame(payload: bytes, codec: str) -> memoryview:
    """The body of a frame made by `codec`."""
    view = memoryview(payload)
    if len(view) < len(MAGIC) + 1 or bytes(view[:4]) != MAGIC:
        raise WireError("payload is not a fedlm frame: it does not begin with FLM1.")
    start = 5 + view[4]
    if len(view) < start + _TAIL.size:
        raise WireError(f"frame is cut off: {len(view)} bytes do not hold its header.")
    name = bytes(view[5:start])
    if name != codec.encode("ascii"):
        raise WireError(f"frame was made by codec {name!r}: expected {codec!r}.")
    size, check = _TAIL.unpack_from(view, start)
    body = view[start + _TAIL.size :]
    if len(body) != size:
        raise WireError(f"frame holds {len(body)} bytes of body: its header says {size}.")
    if zlib.crc32(body, zlib.crc32(name)) != check:
        raise WireError("frame is damaged: its checksum does not match.")
    return body
