"""Bytes that are safe on the disk.

In:       a path or an open file, and bytes.
Out:      a file that is whole or as it was before; a line at the end of a file.
Promise:  on return all of it is on the disk; a crash or a full disk leaves no half of a file, and a
          line that it cut short is marked when the next one is appended.
Not here: what the bytes mean (checkpoints, journals, ledgers).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedlm.core.errors import RecordError

CUT = b" #cut"  # ends a line of which a crash kept the rest away


def write_atomically(path: Path, data: bytes, *, private: bool = False, sync: bool = True) -> None:
    """Write a file so that a crash leaves either the old file or the whole new one.

    A `private` file can be read by its owner alone, also while it is written, and so can a folder
    that is made for it. The new file is made under a name that nobody can foresee, so that no link
    of that name is followed. Without `sync` nothing is waited for: a power cut may lose the file.
    """
    if not path.name:
        raise RecordError(f"{path} could not be written: it is a folder.")
    partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        _make_folder(path.parent, private)
        with open(os.open(partial, flags, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if sync:
            sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only disk refuses the removal too
            partial.unlink(missing_ok=True)
        raise RecordError(f"{path} could not be written: {error.strerror}.") from None


def _make_folder(path: Path, private: bool) -> None:
    if not path.is_dir():
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file or a folder to disk: the name of a new file is not safe before its folder is."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def append_bytes(file: int, data: bytes) -> None:
    """Append all bytes to a file that is open for appending, and wait for the disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def ends_whole(file: int) -> bool:
    """Return whether an open file is empty or ends with the end of a line."""
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
