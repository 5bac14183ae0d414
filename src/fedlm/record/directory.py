"""The run directory: all files of a run in one place.

In:       a path and the resolved recipe as text.
Out:      the places of recipe, journal, checkpoints, weights, tokenizer, salt, report.
Promise:  a directory never mixes two recipes; nothing in it is overwritten by another run; one
          process at a time trains in it.
Not here: the content of those files (their own modules).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import shutil
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from fedlm.core.documents import JsonObject, read_toml
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError, nearest, shown
from fedlm.record.checkpoint import sweep

LOCK = ".lock"
# Which nodes hold the members of a run over a network. The file keeps its first name, so that
# earlier runs can be read and resumed.
ASSIGNMENTS = "seats.json"
# Which nodes answered each round. Who was asked tells of the draw, which a plan keeps secret; so
# does the size of the file, which then lies in a folder that only its owner can look into.
ROUND_STATS, PRIVATE_ROUND_STATS = "nodes.jsonl", "private/nodes.jsonl"
# The directories that this process has locked, and the threads that did: a lock may be taken again
# by the thread that holds it.
_HELD: dict[Path, int] = {}

SALT_BYTES = 32


@dataclass(frozen=True)
class RunDirectory:
    """The paths of the files of a run."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        """What was released about clients under a privacy plan; its owner alone reads it."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def weights_of(self, node: str) -> Path:
        """Return the path of a node's model, or of the federation's model if the name is empty."""
        return self.node(node).weights if node else self.weights

    def node(self, name: str) -> RunDirectory:
        """Return the directory of one node of a tree, which is a run of its own."""
        return RunDirectory(self.path / "nodes" / _folder(name))

    def of_node(self, name: str) -> RunDirectory:
        """Return the directory of a node that is there, or this one if the name is empty."""
        if not name:
            return self
        found = self.node(name)
        if not found.weights.is_file():
            known = sorted(
                unquote(path.parent.name) for path in self.path.glob("nodes/*/recipe.toml")
            )
            raise RecordError(
                f"--node {name}: {self.path} has no model of that node. {nearest(name, known)}"
                if known
                else f"--node {name}: {self.path} is the run of a single model, without nodes."
            )
        return found

    def client(self, name: str) -> RunDirectory:
        """Return the directory of a member's own model, which is a run of its own."""
        return RunDirectory(self.path / "clients" / _folder(name))

    def of_client(self, name: str) -> RunDirectory:
        """Return the directory of a member's own model that is there."""
        found = self.client(name)
        if not found.recipe.is_file():
            known = sorted(
                unquote(path.parent.name) for path in self.path.glob("clients/*/recipe.toml")
            )
            hint = f" {nearest(name, known)}" if known else ""
            raise RecordError(
                f"--client {name}: {self.path} has no model of that member: make it with "
                f"fedlm personalize.{hint}"
            )
        return found

    def own_weights_of(self, node: str) -> Path:
        """Return the path of the model that a leaf keeps to itself, for its owner's eyes alone."""
        return self.path / "private" / f"{_folder(node)}.safetensors"

    @property
    def frozen(self) -> Path:
        """What frozen blocks give for clients' rows, for its owner's eyes alone."""
        return self.path / "frozen"

    def forget_frozen(self) -> None:
        """Remove what frozen blocks gave: it tells of text, and a finished run needs it no more."""
        shutil.rmtree(self.frozen, ignore_errors=True)

    @property
    def best(self) -> Path:
        """The model with the lowest perplexity on the way, of runs that keep it."""
        return self.path / "best.safetensors"

    def weights_to_use(self, *, best: bool) -> Path:
        """Return the path of the last model, or the best one; refuse if it is not there."""
        if not best:
            return self.finished().weights
        if not self.best.is_file():
            raise RecordError(
                f"{self.path} keeps no best model: train with --set run.keep_best=true, or with "
                "server.patience."
            )
        return self.best

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def special_tokens(self) -> Path:
        """The names of the tokenizer's special tokens, in a file that Hugging Face reads too."""
        return self.path / "special_tokens_map.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def status(self) -> Path:
        """What the run is doing now (`status.py`)."""
        return self.path / "status.json"

    @property
    def salt(self) -> Path:
        """The random bytes that hashes of private text are made with; never to be published."""
        return self.path / "text.salt"

    def make_salt(self) -> None:
        """Draw a new salt from the system's entropy into a file that only its owner can read."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.salt.unlink(missing_ok=True)
            file = os.open(self.salt, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(file, "wb") as opened:
                opened.write(os.urandom(SALT_BYTES))
                opened.flush()
                os.fsync(file)
        except OSError as error:
            raise RecordError(f"{self.salt} could not be written: {error.strerror}.") from None

    def salted(self, text: str) -> str:
        """Return the HMAC-SHA256 of a text under the run's salt, as hex."""
        try:
            salt = self.salt.read_bytes()
        except OSError as error:
            raise RecordError(
                f"{self.salt} is not readable ({error.strerror}): without it nobody can tell "
                "whether the text of this private run changed. Only its owner may read it; bring "
                "the file back if it is lost."
            ) from None
        return hmac.new(salt, text.encode(), "sha256").hexdigest()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process and thread from training in this directory for a block of code.

        The lock goes with the process, however that ends.
        """
        self._check_free()
        if _HELD.get(self.path.resolve()) == threading.get_ident():
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock()
        except OSError as error:
            raise RecordError(f"{self.path} could not be written: {error.strerror}.") from None
        where = self.path.resolve()
        _HELD[where] = threading.get_ident()
        try:
            for folder in (self.path, self.checkpoints, *self.path.glob("nodes/*/")):
                sweep(folder)
            yield
        finally:
            _HELD.pop(where, None)
            with contextlib.suppress(OSError):
                os.unlink(self.path / LOCK)  # while it is locked: nobody else can hold this file
            os.close(file)

    def _check_free(self) -> None:
        """Refuse a place that is neither free nor a run's."""
        there = os.path.lexists(self.path)
        if there and not (self.recipe.is_file() or (self.path.is_dir() and self._is_bare())):
            raise RecordError(f"{self.path} is not a run directory: give another --out.")

    def _lock(self) -> int:
        """Lock the file for it and return its number; refuse if another process has locked it."""
        path, flags = self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            file = os.open(path, flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it before may have removed the file in the meantime.
                if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file)):
                    os.ftruncate(file, 0)
                    os.pwrite(file, str(os.getpid()).encode(), 0)
                    return file
            except OSError as error:
                holder = os.pread(file, 20, 0).decode("ascii", "replace")
                os.close(file)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise RecordError(
                    f"{self.path} is being trained by another process (pid {holder or 'unknown'}): "
                    "wait until it ends, or give another --out."
                ) from None
            os.close(file)

    def claim(
        self,
        recipe: str,
        *,
        resume: bool,
        complete: Callable[[JsonObject], JsonObject] = lambda tables: tables,
    ) -> bool:
        """Take the directory for this recipe, and return True if it holds a run to resume.

        `complete` adds settings that an earlier version, which may have written the recipe there,
        did not know.
        """
        if not self.path.exists() or (self.path.is_dir() and self._is_bare()):
            self._begin(recipe)
            return False
        self._check_free()
        there = complete(self.read_recipe())
        if there != tomllib.loads(recipe):
            raise RecordError(
                f"{self.path} holds another recipe ({difference(there, tomllib.loads(recipe))}): "
                "give another --out."
            )
        if not resume:
            raise RecordError(
                f"{self.path} holds this run already: add --resume to go on, or give another --out."
            )
        return True

    def _is_bare(self) -> bool:
        """Tell whether the directory is empty, or holds only leftovers of a killed first write."""
        return all(e.name == LOCK or e.name.endswith(".part") for e in self.path.iterdir())

    def read_recipe(self) -> JsonObject:
        """Return the tables of the saved recipe."""
        try:
            return read_toml(self.recipe, str(self.recipe), RecordError)
        except RecordError as error:
            raise RecordError(f"{error} Give another --out.") from None

    def _begin(self, recipe: str) -> None:
        write_atomically(self.recipe, recipe.encode())

    def finished(self) -> RunDirectory:
        """Return the directory itself, or refuse if the run has not finished."""
        if not self.weights.is_file():
            raise RecordError(
                f"{self.path} holds no trained model yet: finish it with "
                f"fedlm train {self.recipe} --out {self.path} --resume."
            )
        return self

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Return the directory at a path, or refuse if it holds no run."""
        found = cls(Path(path))
        if not found.recipe.is_file():
            raise RecordError(f"{path} is not a run directory: it has no recipe.toml.")
        return found


def _folder(name: str) -> str:
    """Return the folder's name of a node.

    Names come from the corpus: neither a slash nor two dots may lead to another folder.

    >>> _folder("North/South"), _folder("..")
    ('North%2FSouth', '%2E%2E')
    """
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def adapter_beside(weights: Path) -> Path:
    """Return the path of the adapters of a model, beside its weights.

    >>> adapter_beside(Path("run/model.safetensors")).name
    'model.adapter.safetensors'
    """
    return weights.with_suffix(".adapter.safetensors")


def difference(there: JsonObject, here: JsonObject) -> str:
    """Describe the first setting in which two recipes differ."""
    for table in sorted(there.keys() | here.keys()):
        a, b = there.get(table, {}), here.get(table, {})
        if a == b:
            continue
        if not isinstance(a, dict) or not isinstance(b, dict):
            return f"{table} is {shown(a)} there and {shown(b)} here"
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                return f"{table}.{name} is {shown(a.get(name))} there and {shown(b.get(name))} here"
    return "no setting differs"


def free_path(root: Path, stem: str) -> Path:
    """Return the first of `root/stem`, `root/stem-2`, `root/stem-3`, ... that does not exist."""
    number, path = 1, root / stem
    while path.exists():
        number += 1
        path = root / f"{stem}-{number}"
    return path


def newest_path(root: Path, stem: str) -> Path:
    """Return the last of `root/stem`, `root/stem-2`, ... that exists, else `root/stem`."""
    number, path = 1, root / stem
    while (root / f"{stem}-{number + 1}").exists():
        number += 1
        path = root / f"{stem}-{number}"
    return path
