"""What the frozen blocks of a model give for each client's rows, computed once and kept on disk.

In:       the frozen blocks, a client's rows, the numbers of the rows that are wanted; a folder of
          one run, or one that several runs on the same base and text share.
Out:      the features of these rows.
Promise:  features that are read are those that were computed, for this model and these rows, or
          they are computed again; the folder never exceeds its bound; only its owner reads it,
          because features tell of text.
Not here: which blocks are frozen (`models/transformer.py`), steps on features (`local/train.py`).

A file per client, named by the digest of model and rows, holds a head (magic, that digest, shape)
and one record per row: its number, a digest, its features in float32. Records are appended as rows
are first used. When the folder is full, rows beyond are computed whenever they are used: members
are drawn at random, so no other choice of what to keep would be used more often.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import EngineError
from fedlm.core.types import PAD, Params, Rows

MAGIC = b"fedlm-frozen-1\n\0"
DIGEST = 16
HEAD = struct.Struct(f"<{len(MAGIC)}s32sIII")
NUMBER = struct.Struct("<I")
FEW, MANY = 4, 16  # rows per call of a compiled program


class _Wanted(NamedTuple):
    """Rows of one member whose features are wanted."""

    file: _ClientFile
    rows: np.ndarray
    numbers: np.ndarray  # of the rows, in rising order
    features: np.ndarray
    missing: np.ndarray  # places in `numbers` whose features are not on disk

    def spread(self, order: np.ndarray) -> np.ndarray:
        """Return the features of each row of the batches, zeros where there is no row."""
        out = np.zeros((*order.shape, *self.features.shape[1:]), np.float32)
        real = order != PAD
        out[real] = self.features[np.searchsorted(self.numbers, order[real])]
        return out


class FrozenFeatures:
    """The features of rows after the blocks below the first adapter."""

    def __init__(
        self,
        frozen: Callable[[], Params],
        embed: int,
        rows_of: Rows,
        folder: Path,
        most_bytes: int,
        *,
        shared: bool = False,
    ) -> None:
        """Keep at most `most_bytes` in `folder`; `frozen` gives the blocks, of width `embed`.

        A `shared` folder is that of several runs, also at the same time.
        """
        self._frozen, self.embed, self.rows_of = frozen, embed, rows_of
        self.folder, self.most_bytes, self.shared = folder, most_bytes, shared
        self.computed = 0  # rows, since this object was made
        self._used = 0  # bytes in the folder
        self._files: dict[str, _ClientFile] = {}
        self._program = jax.jit(lambda model, rows: model.features(rows))

    @cached_property
    def frozen(self) -> Params:
        """The frozen blocks, made when they are first needed."""
        return self._frozen()

    def batches(self, wanted: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Return the features of batches, given members and the numbers of their rows.

        Rows that are not on disk are computed together. A row whose number is PAD has zeros.
        """
        found = [self._kept(self.rows_of(member), order) for member, order in wanted]
        self._fill(found)
        return [one.spread(order) for one, (_, order) in zip(found, wanted, strict=True)]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the features of rows that belong together, such as a batch of held-out rows."""
        found = self._kept(rows, np.arange(len(rows)))
        self._fill([found])
        return found.features

    def _kept(self, rows: np.ndarray, order: np.ndarray) -> _Wanted:
        """Read the wanted ones of a client's rows that are on disk."""
        file, numbers = self._open(rows), np.unique(order[order != PAD])
        features = np.empty((len(numbers), rows.shape[1] - 1, self.embed), np.float32)
        pairs = enumerate(zip(numbers, features, strict=True))
        missing = [place for place, (n, out) in pairs if not file.read(int(n), out)]
        return _Wanted(file, rows[numbers], numbers, features, np.array(missing, int))

    def _fill(self, found: list[_Wanted]) -> None:
        """Compute what is missing, and keep it."""
        lacking = [one for one in found if len(one.missing)]
        if not lacking:
            return
        made = self._compute(np.concatenate([one.rows[one.missing] for one in lacking]))
        ends = np.cumsum([len(one.missing) for one in lacking])
        for one, part in zip(lacking, np.split(made, ends[:-1]), strict=True):
            one.features[one.missing] = part
            self._append(one.file, one.numbers[one.missing], part)

    def _compute(self, rows: np.ndarray) -> np.ndarray:
        """Return the features of rows, by a program for many rows and one for few."""
        self.computed += len(rows)
        parts, at = [], 0
        while at < len(rows):
            size = MANY if len(rows) - at > FEW else FEW
            block = rows[at : at + size, :-1].astype(np.int32)
            beyond = ((0, size - len(block)), (0, 0))
            block = np.pad(block, beyond, constant_values=PAD)
            parts.append(np.asarray(self._program(self.frozen, jnp.asarray(block))))
            at += size
        return np.concatenate(parts)[: len(rows)]

    # ---- files -------------------------------------------------------------------------------

    @cached_property
    def _model_digest(self) -> bytes:
        # The structure names settings that are no weights, such as the base of rotary positions.
        structure = str(jax.tree.structure(self.frozen))
        return hashlib.sha256(f"{tree.sha256(self.frozen)}|{structure}".encode()).digest()

    def _open(self, rows: np.ndarray) -> _ClientFile:
        """Return the file of a client, which holds features of this model and these rows alone."""
        if not self._files:
            self._prepare_folder()
        made = hashlib.sha256(self._model_digest)
        made.update(f"{rows.dtype.str}|{rows.shape}|".encode())
        made.update(np.ascontiguousarray(rows).tobytes())
        name = f"{made.hexdigest()[:32]}.features"
        if name not in self._files:
            head = HEAD.pack(MAGIC, made.digest(), len(rows), rows.shape[1] - 1, self.embed)
            path = self.folder / name
            before = path.lstat().st_size if path.is_file() else 0
            self._files[name] = _ClientFile(path, head)
            self._used += self._files[name].size - before
        return self._files[name]

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, 0o700)  # refused to anybody but its owner
            self._used = self._size()
        except (OSError, ValueError) as error:  # a null byte in a path is a wrong value
            raise self._unwritable(error) from None

    def _size(self) -> int:
        return sum(file.lstat().st_size for file in self.folder.glob("*.features"))

    def _append(self, file: _ClientFile, numbers: np.ndarray, features: np.ndarray) -> None:
        """Keep features of rows, as many as there is room for."""
        if self.shared:
            self._used = self._size()  # others write there too
        room = self.most_bytes - self._used - (0 if file.size else HEAD.size)
        few = min(len(numbers), max(0, room // file.record))
        if few:
            try:
                self._used += file.append(numbers[:few], features[:few])
            except OSError as error:
                raise self._unwritable(error) from None

    def _unwritable(self, error: OSError | ValueError) -> EngineError:
        why = getattr(error, "strerror", None) or error
        return EngineError(
            f"{str(self.folder)!r}: features of frozen blocks could not be kept there: {why}. "
            "Set run.cache_frozen to fewer megabytes or to 0, or run.frozen_folder to another one."
        )


class _ClientFile:
    """The records of one client; a file that is not sound is removed and begun anew."""

    def __init__(self, path: Path, head: bytes) -> None:
        self.path, self.head = path, head
        _, _, self.count, seq, embed = HEAD.unpack(head)
        self.payload = 4 * seq * embed
        self.record = NUMBER.size + DIGEST + self.payload
        self.at: dict[int, int] = {}
        self.size = 0
        self._scan()

    def _scan(self) -> None:
        """Find the records of a file; drop a last one that was half written."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError:
            return self._begin_anew()
        with open(file, "r+b") as opened:
            fcntl.flock(file, fcntl.LOCK_EX)  # not while another run writes its last record
            if not self._read_numbers(opened):
                self._begin_anew()

    def _read_numbers(self, opened: IO[bytes]) -> bool:
        """Find the records of an open file; return whether it is sound."""
        facts = os.fstat(opened.fileno())
        sound = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
        opened.seek(0)
        if not sound or opened.read(HEAD.size) != self.head:
            return False
        whole = (facts.st_size - HEAD.size) // self.record
        for place in range(whole):
            offset = HEAD.size + place * self.record
            opened.seek(offset)
            (number,) = NUMBER.unpack(opened.read(NUMBER.size))
            if number >= self.count:
                return False
            self.at[number] = offset
        self.size = HEAD.size + whole * self.record
        opened.truncate(self.size)
        return True

    def _begin_anew(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)
        self.at, self.size = {}, 0

    def read(self, number: int, out: np.ndarray) -> bool:
        """Read the features of a row into `out`; return False if they are not there or damaged."""
        if number not in self.at:
            return False
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                opened.seek(self.at[number])
                data = opened.read(self.record)
        except OSError:
            data = b""
        body = data[NUMBER.size + DIGEST :]
        if data[: NUMBER.size + DIGEST] != self._label(number, body):
            del self.at[number]  # computed and appended again; the last record of a row counts
            return False
        out[...] = np.frombuffer(body, "<f4").reshape(out.shape)
        return True

    def append(self, numbers: Sequence[int] | np.ndarray, features: np.ndarray) -> int:
        """Add records, and return by how many bytes the file grew."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.path, flags, 0o600), "r+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            before = self.size
            # Another run may have begun the file, or added to it.
            if os.fstat(opened.fileno()).st_size != before and not self._read_numbers(opened):
                return 0
            at = opened.seek(self.size)
            if not at:
                at = opened.write(self.head)
            for number, row in zip(numbers, features, strict=True):
                body = np.ascontiguousarray(row, "<f4").tobytes()
                opened.write(self._label(int(number), body) + body)
                self.at[int(number)] = at
                at += self.record
        self.size = at
        return at - before

    def _label(self, number: int, body: bytes) -> bytes:
        """Return what stands before a row's features: its number, and a digest of all of it."""
        said = NUMBER.pack(number)
        digest = hashlib.blake2b(body, digest_size=DIGEST, key=self.head, salt=said)
        return said + digest.digest()
