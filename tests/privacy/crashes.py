"""Crashes of private runs: a disk that dies at any write, lanes that change, nodes that stay away.

A kill is an exception that no code catches, raised at a durable write: before it, in the middle of
it, or after it. The parts of a run are made once and used again after each kill, as all that
survives is on disk; what is compiled need not be compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedlm.engine.catalog import ENGINES
from fedlm.privacy.ledger import Ledger, rounds_of
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.journal import Journal, dumps, read
from fedlm.training import Watcher, train
from tests.conftest import write_tiny

# What may be seen while it is written: what was there before a round, or was seen already.
PUBLIC = ("recipe", "tokenizer", "special", "journal", "model", "report", "summary", "status")


class Killed(BaseException):
    """The process is gone."""


@dataclasses.dataclass(frozen=True)
class Away:
    """An engine in which some members of each round do not answer; others after every restart."""

    inner: object
    rng: np.random.Generator

    def prepare(self, round, members):
        came = self.rng.random(len(members)) < 0.8
        return self.inner.prepare(round, members[came])

    def total(self, starts, cohort):
        return self.inner.total(starts, cohort)

    @property
    def adds_noise(self):
        return self.inner.adds_noise


def runs_of(folder: Path, *changes: str, engines=("mesh", "loop")):
    """The run of a recipe with each engine; they sum in another order."""
    recipe = folder / "tiny.toml"
    if not recipe.exists():
        write_tiny(folder)
    quick = ("server.evaluate_every=1", "run.prompts=[]", "run.baselines=false")
    with contextlib.chdir(folder):
        loaded = load(recipe, (*quick, *changes))
        made = [
            build(
                loaded.model_copy(update={"run": loaded.run.model_copy(update={"engine": name})}),
                folder / "stores",
            )
            for name in engines
            if name in ENGINES
        ]
    # One recipe for all: which engine a run has is decided here.
    return [dataclasses.replace(run, recipe=made[0].recipe) for run in made]


def placed(run, folder: Path, rng=None):
    """The run in a directory; with a generator, not all members answer."""
    record = RunDirectory(folder)
    if rng is None:
        return dataclasses.replace(run, record=record)
    away = dataclasses.replace(run.round, engine=Away(run.engine, rng))
    return dataclasses.replace(run, record=record, round=away)


def go_on(run, folder: Path, said=None, rng=None):
    """Begins or resumes the run in a directory; the summary."""
    say = (lambda text: None) if said is None else said.append
    return train(placed(run, folder, rng), resume=True, watcher=Watcher(say=say))


def released(folder: Path):
    """The rounds in the ledger, in order."""
    return rounds_of(Ledger(folder / "ledger.jsonl").entries())


def told(folder: Path):
    """The rounds in the journal, without what may differ."""
    timed = ("seconds", "epsilon", "releases")
    return [
        {name: value for name, value in entry.items() if name not in timed}
        for entry in read(folder / "journal.jsonl")
        if entry["kind"] == "round"
    ]


class Observer:
    """Reads every file that is not its owner's alone, at every moment; remembers what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.models, self.known = folder, set(), set(), {}

    def look(self) -> None:
        for path in self._open_files(self.folder):
            size = path.stat()
            if self.known.get(path) != (size.st_mtime_ns, size.st_size, size.st_ino):
                self.known[path] = (size.st_mtime_ns, size.st_size, size.st_ino)
                self._read(path)

    def _open_files(self, folder):
        if not folder.is_dir():
            return
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                mode = path.stat().st_mode
                if mode & 0o077 and path.is_dir():
                    yield from self._open_files(path)
                elif mode & 0o077:
                    yield path

    def _read(self, path) -> None:
        data = path.read_bytes()
        if path.suffix == ".part":
            assert not data or path.name.startswith(PUBLIC)
        elif path.suffix == ".safetensors":
            self.models.add((path.name, data))
        elif path.name == "status.json":  # how far a run is, and nothing of its text
            numbers = {k for k, v in json.loads(data).items() if isinstance(v, int | float)}
            assert numbers <= {"format", "pid", "round", "rounds", "started", "updated"}, numbers
        elif path.name == "journal.jsonl":
            for line in data.splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry["kind"] == "round":
                        self.seen.add((entry["round"], entry["perplexity"]))

    @property
    def rounds(self):
        """The released rounds that were seen, one per distinct release."""
        return sorted(number for number, _ in self.seen)


class Disk:
    """A disk on which every durable write is a moment: somebody looks, and a kill may come."""

    def __init__(self, observer: Observer, rng: np.random.Generator) -> None:
        self.observer, self.rng, self.left, self.on = observer, rng, 0, True

    def moment(self) -> None:
        if not self.on:
            return
        self.on = False  # what the observer does is no moment of the run
        self.observer.look()
        folder = self.observer.folder
        paid = released(folder) if (folder / "ledger.jsonl").exists() else []
        # Law 10: nothing is seen that the ledger does not hold.
        assert not self._beyond(self.observer.rounds, paid), (self.observer.seen, paid)
        self.on = True
        self.left -= 1
        if self.left == 0:
            raise Killed

    def _beyond(self, seen, paid):
        left = list(paid)
        return [r for r in seen if r not in left or left.remove(r)]

    @contextlib.contextmanager
    def watched(self, moments: int):
        """Kills what runs inside after so many moments."""
        self.left = moments
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(os, name, self._around(getattr(os, name)))
            patch.setattr(os, "write", self._torn(os.write))
            patch.setattr(Journal, "append", self._half(Journal.append))
            try:
                yield
            finally:
                self.left = 0

    def _around(self, act):
        def wrapped(*args, **kwargs):
            self.moment()
            done = act(*args, **kwargs)
            self.moment()
            return done

        return wrapped

    def _torn(self, write):
        """A write of which the disk may hold a part."""

        def wrapped(file, data):
            if self.on and self.left == 1:
                write(file, bytes(data)[: self.rng.integers(len(data) + 1)])
            self.moment()
            return write(file, data)

        return wrapped

    def _half(self, append):
        """A journal line of which the disk may hold a part."""

        def wrapped(journal, facts):
            if self.on and self.left == 1:
                line = dumps({"kind": facts.kind, **facts})
                with open(journal.path, "a", encoding="utf-8") as file:
                    file.write(line[: self.rng.integers(len(line) + 1)])
            self.moment()
            append(journal, facts)
            self.moment()

        return wrapped
