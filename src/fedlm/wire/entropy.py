"""Entropy coding: the body of any codec, deflated.

In:       a codec.
Out:      a codec with the same arithmetic and smaller frames.
Promise:  the decoded update is that of the inner codec; no frame is longer than the inner one by
          more than its header says; nothing is inflated beyond the bytes that the model needs.
Not here: arithmetic (the inner codec).

    offset  size  field of the body
    0       1     0: the inner body as it is; 1: deflated (RFC 1951, no zlib header)
    1       ...   the inner body, or its deflated form

The length depends on the data, so `fixed_size` is false: `encoded_bytes` is the upper
bound of a frame, and only `len(encode(...))` is its real size. Codes of a quantised update have
no repeats worth a search, so only the Huffman half of deflate is used: as small and faster
(docs/wire.md has the figures).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from jaxtyping import PRNGKeyArray

from fedlm.core.errors import WireError
from fedlm.core.types import Codec, Params
from fedlm.wire.frame import open_frame, overhead, seal_frame

_RAW = -15  # deflate without a header; the frame has its own checksum


def deflated(inner: Codec) -> Codec:
    """Return `inner` with its body deflated if that makes the body smaller."""
    name = f"{inner.name}+zlib"

    def encode(update: Params, key: PRNGKeyArray, keep: Sequence[bool] | None = None) -> bytes:
        body = open_frame(inner.encode(update, key, keep), inner.name)
        return seal_frame(name, _smaller(body))

    def decode(payload: bytes, like: Params) -> Params:
        wanted = inner.encoded_bytes(like) - overhead(inner.name)
        body = _inflate(open_frame(payload, name), wanted)
        return inner.decode(seal_frame(inner.name, body), like)

    def most_bytes(like: Params) -> int:
        return inner.encoded_bytes(like) - overhead(inner.name) + overhead(name) + 1

    return inner._replace(
        name=name,
        encode=encode,
        decode=decode,
        encoded_bytes=most_bytes,
        fixed_size=False,
        additive=False,
    )


def _smaller(body: memoryview) -> bytes:
    press = zlib.compressobj(6, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    small = press.compress(body) + press.flush()
    return b"\x01" + small if len(small) < len(body) else b"\x00" + bytes(body)


def _inflate(body: memoryview, wanted: int) -> bytes:
    if len(body) < 1 or body[0] > 1:
        raise WireError("frame does not say whether it is deflated.")
    if body[0] == 0:
        return bytes(body[1:])
    if len(body) - 1 >= wanted:
        raise WireError(f"frame holds {len(body) - 1} deflated bytes: {wanted} is the most.")
    inflate = zlib.decompressobj(_RAW)
    try:
        made = inflate.decompress(body[1:], wanted + 1)
    except zlib.error as error:
        raise WireError(f"frame cannot be inflated: {error}.") from error
    if len(made) != wanted or not inflate.eof or inflate.unused_data:
        raise WireError(f"frame does not inflate to the {wanted} bytes that this model needs.")
    return made
