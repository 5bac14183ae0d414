"""The record batches of an Arrow file, as they lie in mapped memory.

In:       the bytes of a file that `pyarrow.ipc.new_file` wrote.
Out:      its schema and its batches, without a copy.
Promise:  reading allocates nothing that grows with what a file says of itself: compressed batches,
          which are inflated whole, are refused.
Not here: which columns a store has, and whether they fit together (`store.py`).

An Arrow file is a word of six letters, padded to eight bytes, a stream of messages, and a last
part that tells where batches lie. Batches are read from the stream, so that each message is seen
before its batch; the last part must be there, and know of as many. Whether a batch is compressed
is said by its message alone, a table of FlatBuffers: a place of four bytes points to the root
table, a table begins with its distance from a list of the places of its fields, and a field that
is not there has the place 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

MAGIC = b"ARROW1\0\0"
HEADER, COMPRESSION = 2, 3  # numbers of fields: of a message, and of a record batch


def read_batches(file: pa.Buffer) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the schema and the batches of a file; raise `ValueError` or an error of Arrow."""
    known = pa.ipc.open_file(pa.BufferReader(file)).num_record_batches
    messages = _messages(file.slice(len(MAGIC)))
    first = next(messages, None)
    if first is None or first.type != "schema":
        raise ValueError("it has no schema")
    schema = pa.ipc.read_schema(first)
    batches = [_batch(message, schema) for message in messages]
    if len(batches) != known:
        raise ValueError(f"{len(batches)} batches, of which its end knows {known}")
    return schema, batches


def _messages(stream: pa.Buffer) -> Iterator[Any]:
    reader = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _batch(message: Any, schema: pa.Schema) -> pa.RecordBatch:
    if message.type != "record batch":
        raise ValueError(f"a {message.type} among its batches")
    if _is_compressed(message.metadata):
        raise ValueError("a compressed batch, which no fedlm writes")
    return pa.ipc.read_record_batch(message, schema)


def _is_compressed(metadata: pa.Buffer) -> bool:
    data = memoryview(metadata).cast("B")
    try:
        (root,) = struct.unpack_from("<I", data, 0)
        header = _field(data, root, HEADER)
        (further,) = struct.unpack_from("<I", data, header)
        return _field(data, header + further, COMPRESSION) > 0
    except struct.error as error:
        raise ValueError(f"a message of its is damaged ({error})") from None


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the place of a table's field; 0 if it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    places, at = table - back, 4 + 2 * number
    if places < 0:
        raise struct.error("a table before its beginning")
    (size,) = struct.unpack_from("<H", data, places)
    if at >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, places + at)
    return table + offset if offset else 0
