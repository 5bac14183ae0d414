"""Reads HDF5 files in a process of its own; run as a script, it imports nothing of fedlm.

In:       on stdin, the path of a file per line.
Out:      on stdout, an empty JSON object when it is ready; per file, a line per client with its
          name and sentences, then one that says that it ended, or why it cannot be read.
Promise:  what the HDF5 library makes of a damaged file (a signal, gigabytes of memory) ends this
          process and no other.
Not here: starting it, and waiting for its answers (`hdf5.py`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import h5py

MEMORY_BYTES = 1 << 30
MOST_DEFLATED = 1100  # bytes that one byte of a deflated file can stand for


def main() -> None:
    """Read every file that is named on stdin."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        try:
            for answer in answers(json.loads(line)):
                print(json.dumps(answer), flush=True)
        except Exception as error:
            print(json.dumps({"error": _brief(error)}), flush=True)


def answers(path: str) -> Iterator[dict[str, Any]]:
    """Yield what a file holds, client by client, and how it ends."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        yield {"error": f"not an HDF5 file ({_brief(error)})"}
        return
    with file:
        examples = file.get("examples") if _is_inside(file, "examples") else None
        if not isinstance(examples, h5py.Group):
            yield {"error": "no group 'examples', as in TFF's Stack Overflow file"}
            return
        for client in list(examples):
            try:
                client.encode()
                if not _is_inside(examples, client):
                    raise ValueError("is a link, and a link may name another file")
                yield {"client": client, "lines": sentences(examples[client])}
            except UnicodeError as error:
                yield {"error": f"client {client!r} is not valid UTF-8 ({error.reason})"}  # type: ignore[attr-defined]
                return
            except Exception as error:
                yield {"error": f"client {client!r} {_brief(error)}"}
                return
    yield {"end": True}


def sentences(group: Any) -> list[str]:
    """Return the sentences of a client."""
    there = isinstance(group, h5py.Group) and _is_inside(group, "tokens")
    tokens = group.get("tokens") if there else None
    if not isinstance(tokens, h5py.Dataset):
        raise ValueError("has no dataset 'tokens'")
    if tokens.is_virtual or tokens.external:
        raise ValueError("has 'tokens' that lie in another file")
    stored = min(tokens.id.get_storage_size(), os.path.getsize(tokens.file.filename))
    if tokens.size is None or tokens.size * tokens.dtype.itemsize > MOST_DEFLATED * stored:
        raise ValueError(f"has {tokens.shape} sentences, for which the file has no room")
    found = [tokens[()]] if tokens.shape == () else list(tokens[()].ravel())
    if not all(isinstance(each, bytes | str) for each in found):
        raise ValueError("has something else than text in 'tokens'")
    return [each.decode() if isinstance(each, bytes) else each for each in found]


def _is_inside(group: Any, name: str) -> bool:
    """Return whether a name stands for an object of this file; other links may leave it."""
    return isinstance(group.get(name, getlink=True), h5py.HardLink)


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


if __name__ == "__main__":
    main()
