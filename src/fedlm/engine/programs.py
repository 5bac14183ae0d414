"""The folder where compiled programs are kept between starts.

In:       the user's cache folder, this machine's processor.
Out:      a folder for `jax_compilation_cache_dir`, or none.
Promise:  a compiled program is code, so it is loaded only from a folder that nobody but this user
          can write to, never from the working folder, and only on processors with the features it
          was compiled for; the folder does not grow without bound.
Not here: what is compiled (`engine/mesh.py`), and what JAX takes a program's name from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from pathlib import Path

MOST_BYTES = 2 * 10**9  # the oldest programs go first; one of a large model takes up to 50 MB


def programs_folder(name: str = "programs") -> Path | None:
    """Return this user's folder of programs for this processor, made if need be.

    `$XDG_CACHE_HOME/fedlm/NAME` or `~/.cache/fedlm/NAME`, and in it a folder per kind of
    processor. None if it cannot be made, or if somebody else owns it or may write to it.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = cache / "fedlm" / name / processor()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if not all(_mine(path) for path in (folder, folder.parent, folder.parent.parent)):
            return None
        _sweep(folder)
    except (OSError, RuntimeError):  # a read-only disk, no home: every start compiles
        return None
    return folder


def processor() -> str:
    """Return a short hash of what compiled code depends on: the processor and its features.

    JAX names a program after its source, options and versions, and not after the processor. A home
    that two kinds of machines share would give one of them instructions that it does not have.
    """
    known = {"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part"}
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        first = text.split("\n\n", 1)[0].splitlines()
        lines = [line for line in first if line.split(":")[0].strip() in known]
    told = "\n".join([platform.machine(), *(lines or [platform.platform()])])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _mine(folder: Path) -> bool:
    seen = os.lstat(folder)
    shared = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not shared


def _sweep(folder: Path) -> None:
    """Remove the programs that were made first until the rest is within the bound."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            seen = path.stat()
            found.append((seen.st_mtime, seen.st_size, path))
    size = sum(entry[1] for entry in found)
    for _, own, path in sorted(found):
        if size <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        size -= own
