"""Results of long experiments, one small file per cell, kept with the code.

In:       the name of an experiment; cells: a side, a seed, and all that decides their figures.
Out:      `benchmarks/results/EXPERIMENT/CELL.json`, a cell each.
Promise:  a cell whose file is there and was made with the same settings is never trained again; a
          table is a function of the files alone, and needs neither text nor runs; several people,
          machines and processes can make cells of one experiment, each in their own time; runs
          that other settings left behind are not found again (`work_folder`).
Not here: what a cell trains (`comparison.py`, `pays.py`).

A digest covers the settings that decide figures: not where text lies, how many devices there are,
or how often a run is saved.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.probe import machine
from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError
from fedlm.recipe.settings import Recipe
from fedlm.record.journal import dumps

RESULTS = Path(__file__).parent / "results"
# Settings that change no figure; of `[run]` the seed counts, and whether the best model is kept.
INERT = {"data": ("source", "store", "stores"), "run": None}
Facts = dict[str, Any]


def recipe_digest(recipe: Recipe, **more: Any) -> str:
    """Return the digest of all settings that decide the figures of a run.

    Text counts by the name of its file, so that it may lie anywhere.
    """
    tables = json.loads(recipe.model_dump_json(exclude_none=True))
    text = {key: _names(tables["data"].pop(key, None)) for key in INERT["data"] or ()}
    run = tables["run"]
    best = {"keep_best": True} if run.get("keep_best") else {}  # whose figure is the last one
    tables["run"] = {"seed": run.get("seed"), **best}
    return facts_digest({"recipe": tables, "text": text, **more})


def _names(given: Any) -> Any:
    if isinstance(given, list):
        return [_names(each) for each in given]
    return None if given is None else Path(str(given)).name


def facts_digest(facts: Facts) -> str:
    """Return the digest of any facts that can be written as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def circumstances() -> Facts:
    """Return where and by which code a cell was made."""
    return {"machine": machine(), "jax": jax.__version__, "commit": commit()}


def commit() -> str | None:
    """Return the commit of this code, with a plus if files differ from it; None outside git."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


def plain_name(said: str) -> str:
    """Return words as the name of a file.

    >>> plain_name("WorldLM, 30% of the text")
    'worldlm-30-of-the-text'
    """
    return re.sub(r"[^a-z0-9.]+", "-", said.lower()).strip("-")


def work_folder(out: Path, name: str, digest: str) -> Path:
    """Return where the runs of a cell are: those that other settings made are elsewhere.

    A run that has ended is not trained again, so that with the name alone old figures would be
    kept under new settings.
    """
    return out / plain_name(name) / digest


@dataclass(frozen=True)
class Cells:
    """The kept results of one experiment."""

    folder: Path

    def file(self, name: str) -> Path:
        """Return where a cell is kept."""
        return self.folder / f"{plain_name(name)}.json"

    def read(self, name: str, digest: str) -> Facts | None:
        """Return a cell, None if it is not there; refuse one that other settings made."""
        file = self.file(name)
        if not file.is_file():
            return None
        told = read_json(file, str(file), RecordError)
        there = told.get("digest") if isinstance(told, dict) else None
        if there != digest:
            raise ConfigError(
                f"{file}: expected a result of digest {digest}, not {there}: it was made with "
                "other settings. Remove the file to make the cell again, or undo the change."
            )
        return dict(told)

    def write(self, name: str, digest: str, facts: Facts) -> Facts:
        """Keep a cell, with where and by which code it was made."""
        told = {"cell": name, "digest": digest, **facts, **circumstances()}
        write_atomically(self.file(name), (_lines(told) + "\n").encode())
        return dict(json.loads(dumps(told)))


def _lines(told: Facts) -> str:
    """Return a cell as JSON with a line per fact, which shows well what changed."""
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {dumps(v)}" for k, v in told.items()) + "\n}"


@contextlib.contextmanager
def claimed(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Claim a folder for a block of code; False if another process has it, or wait for that."""
    path.mkdir(parents=True, exist_ok=True)
    file = os.open(path / ".cell", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(file)
        yield False
        return
    try:
        yield True
    finally:
        os.close(file)


def deadline(hours: float | None) -> Callable[[], bool]:
    """Return whether so many hours from now are over; None is never."""
    end = None if hours is None else time.monotonic() + 3600 * hours
    return lambda: end is not None and time.monotonic() >= end
