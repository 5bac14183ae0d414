"""The client store on disk: written once, memory-mapped, read one client at a time.

In:       documents and a tokenizer's settings, or the path of a store.
Out:      a folder with `clients.arrow`, `tokenizer.json` and `store.json`; with `ledger.jsonl` if
          the vocabulary was counted with noise.
Promise:  the same text and settings give the same bytes, except for a vocabulary counted with
          noise; opening reads no tokens; reading a client costs its own size; a store is either
          whole or not there; it tells where its tokenizer came from. A damaged store is refused
          with a sentence: its manifest, columns and offsets when it is opened, tokens when they
          are read, every bit by `verify`.
Not here: rows (`rows.py`), batches (`cohort/packing.py`).

Columns of `clients.arrow`: client, groups, train (tokens to learn from), held (tokens kept
back: the tail of a training client, everything of a test client), test, held_bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from fedlm.core.documents import JsonObject, read_json
from fedlm.core.errors import CorpusError
from fedlm.core.types import Say, SpecialTokens
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.arrow_file import read_batches
from fedlm.corpus.gather import GatheredClients, gather_clients
from fedlm.corpus.piece_spool import ClientTokens, PieceSpool
from fedlm.corpus.piece_workers import cut_blocks, worker_count
from fedlm.corpus.pieces import cut_text
from fedlm.corpus.sources import Document
from fedlm.corpus.split import held_out_clients
from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.corpus.tokenizer_file import load_library
from fedlm.corpus.vocabulary import (
    COUNTED,
    PUBLIC,
    Counting,
    NoVocabularyError,
    Vocabulary,
    check_origin,
)

FORMAT = 3  # raised when a store written before can no longer be read
LEDGER = "ledger.jsonl"  # what preparing the store cost its clients
ATTEMPTS = "ledger-*.jsonl"  # the same of preparations before it in which no word passed
CLIENTS_A_BATCH = 4096
UNFINISHED = ".unfinished"  # ends the name of a folder in which a store is being written
# Arrow's offsets are 32 bits wide: a batch of long clients is closed long before 2**31 tokens.
TOKENS_A_BATCH = 1 << 26
BLOCK_BYTES = 1 << 22  # of text, that are cut into pieces at a time
Progress = Callable[[str, int], None]
Row = dict[str, Any]  # a value for each column of `clients.arrow`


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The settings that, together with the text, decide a store's bytes."""

    tokenizer: str = "words"  # a kind that fedlm fits, or `file`: a tokenizer made elsewhere
    vocabulary: int = 10_000
    vocabulary_epsilon: float | None = None  # None: counted without noise
    vocabulary_delta: float = 1e-7
    vocabulary_words: int = 1_000  # of each client, that are counted with noise
    lowercase: bool = True
    test_clients: float = 0.1
    validation: float = 0.1
    split_seed: int = 0
    user_field: str | None = None  # the field of the source that names the person; None: `client`
    text_field: str | None = None  # the field of the source with text; None: `text`
    groups_field: str | None = None  # the field of the source with groups; None: `groups`


StoreCount = Annotated[int, Field(ge=0, lt=1 << 53)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(TypedDict):
    """The fields of `store.json`."""

    format: int
    settings: StoreSettings
    vocabulary: Annotated[int, Field(ge=1, le=1 << 31)]
    special_tokens: JsonObject
    clients: StoreCount
    train_clients: StoreCount
    test_clients: StoreCount
    train_tokens: StoreCount
    held_tokens: StoreCount
    tokenizer_sha256: Digest
    tokenizer_from: JsonObject
    clients_sha256: Digest


_MANIFEST = TypeAdapter(Manifest)


def training_texts(clients: GatheredClients, settings: StoreSettings) -> TrainingTexts:
    """Return the training text of each client that has some, read when it is wanted."""
    return TrainingTexts(clients, _test_clients(clients, settings), settings.validation)


class TrainingTexts(Iterable[str]):
    """The training text of each client that has some; every loop over them reads them again."""

    def __init__(self, clients: GatheredClients, test: np.ndarray, validation: float) -> None:
        self._clients, self._test, self._validation = clients, test.tolist(), validation

    def __iter__(self) -> Iterator[str]:
        for client, test in zip(self._clients, self._test, strict=True):
            train = "" if test else cut_text(client.text, test, self._validation)[0]
            if train:
                yield train


def _test_clients(clients: GatheredClients, settings: StoreSettings) -> np.ndarray:
    """Return for each client whether its whole text is held out."""
    test = held_out_clients(clients.names, settings.test_clients, settings.split_seed)
    return np.fromiter((name in test for name in clients.names), bool, len(clients))


def write(
    documents: Iterable[Document],
    out: Path,
    settings: StoreSettings,
    progress: Progress = lambda stage, done: None,
    vocabulary: Vocabulary | Counting | None = None,
    say: Say = lambda text: None,
    workers: int | None = None,
) -> Store:
    """Prepare a store and open it; `say` is told what a user may not expect of the text.

    Without a given vocabulary, and without a function that makes one from the training text of
    each client, a tokenizer is fitted to the training text as it is, without noise. So many
    processes cut the text; by default one per core, and this process alone for a short text.
    """
    check_new(out)
    clients = gather_clients(documents, say, _folder_of(out))
    test = _test_clients(clients, settings)
    if vocabulary is not None and not isinstance(vocabulary, Vocabulary):
        progress("vocabulary", 0)
        try:
            vocabulary = vocabulary(TrainingTexts(clients, test, settings.validation))
        except NoVocabularyError as error:
            _keep_attempt(out, error)
            raise
        _tell_size(vocabulary, settings, say)
    if settings.tokenizer == "bytes" and vocabulary is None:
        vocabulary = _counted((), settings)
    if vocabulary is not None and vocabulary.tokenizer.pieces is None:
        rows = _encoded(clients, test, settings.validation, vocabulary.tokenizer, progress)
        dtype = tok.token_dtype(vocabulary.tokenizer.vocabulary)
        return write_tokens(rows, out, vocabulary, settings, dtype)
    byte_pairs = settings.tokenizer == "bpe"
    if vocabulary is not None and vocabulary.tokenizer.pieces is not None:
        byte_pairs = vocabulary.tokenizer.pieces.byte_pairs
    tasks = clients.tasks(test, settings.validation, byte_pairs, BLOCK_BYTES)
    blocks = cut_blocks(tasks, clients.file, worker_count(clients.bytes, workers))
    with PieceSpool(blocks, _folder_of(out), lambda done: progress("text of client", done)) as text:
        progress("vocabulary", 0)
        if vocabulary is None:
            counts = text.train_counts()
            kind, size, lowercase = settings.tokenizer, settings.vocabulary, settings.lowercase
            vocabulary = Vocabulary(tok.fit_pieces(counts, kind, size, lowercase), COUNTED)
            _tell_size(vocabulary, settings, say)
        dtype = tok.token_dtype(vocabulary.tokenizer.vocabulary)
        coded = text.tokens(vocabulary.tokenizer, dtype)
        rows = _rows(clients, test, coded, progress)
        return write_tokens(rows, out, vocabulary, settings, dtype)


def _counted(texts: Iterable[str], settings: StoreSettings) -> Vocabulary:
    """Fit a tokenizer to text without noise; bytes are the same whatever the text."""
    kind = settings.tokenizer
    made = tok.fit(texts, kind, settings.vocabulary, settings.lowercase)
    return Vocabulary(made, PUBLIC if kind == "bytes" else COUNTED)


def _folder_of(out: Path) -> Path:
    """Return the folder nearest to a store's place that is there: its text waits beside it."""
    return next(folder for folder in (*out.absolute().parents, Path("/")) if os.path.isdir(folder))


def _tell_size(vocabulary: Vocabulary, settings: StoreSettings, say: Say) -> None:
    found, asked = vocabulary.tokenizer.vocabulary, settings.vocabulary
    if found < asked and settings.tokenizer != "bytes":
        say(f"The vocabulary has {found:,} entries, not {asked:,}: the text gives no more.")


def _encoded(
    clients: GatheredClients,
    test: np.ndarray,
    validation: float,
    tokenizer: TextTokenizer,
    progress: Progress,
) -> Iterator[Row]:
    """Yield clients whose text a library tokenises line by line."""
    dtype = tok.token_dtype(tokenizer.vocabulary)
    for number, (client, tests) in enumerate(zip(clients, test.tolist(), strict=True)):
        train, held = cut_text(client.text, tests, validation)
        progress("tokens", number + 1)
        yield {
            "client": client.client,
            "groups": list(client.groups),
            "train": tok.encode(tokenizer, train, dtype),
            "held": tok.encode(tokenizer, held, dtype),
            "test": tests,
            "held_bytes": len(held.encode()),
        }


def _rows(
    clients: GatheredClients,
    test: np.ndarray,
    coded: Iterable[ClientTokens],
    progress: Progress,
) -> Iterator[Row]:
    """Yield clients with the tokens of their pieces."""
    told = zip(clients.names, clients.groups, test.tolist(), coded, strict=True)
    for number, (name, groups, tests, tokens) in enumerate(told):
        progress("tokens", number + 1)
        yield {
            "client": name,
            "groups": groups,
            "train": tokens.train,
            "held": tokens.held,
            "test": tests,
            "held_bytes": tokens.held_bytes,
        }


def check_new(out: Path) -> None:
    """Refuse a place where something is, before anything is read or counted for it."""
    if out.exists():
        raise CorpusError(f"{out} exists already: give another --out or remove it.")


def write_tokens(
    rows: Iterable[Row],
    out: Path,
    vocabulary: Vocabulary,
    settings: StoreSettings,
    dtype: DTypeLike,
    *,
    learns: bool = True,
) -> Store:
    """Write tokenised clients to a store, with one batch of clients in memory at a time.

    If `learns` is false, the store may hold held-out text alone.
    """
    check_new(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        work = out.with_name(f".{out.name}-{secrets.token_hex(8)}{UNFINISHED}")
        work.mkdir()  # as open to others as the user's umask says
        lock = _lock(work)
    except OSError as error:
        raise CorpusError(f"store {out} could not be written: {error}.") from None
    try:
        totals = _write_arrow(work / "clients.arrow", rows, dtype)
        if learns and totals["train_clients"] == 0:
            raise CorpusError("no client is left to train on: lower data.test_clients.")
        tokenizer = vocabulary.tokenizer
        tokenizer.library.save(str(work / "tokenizer.json"))
        if vocabulary.write_ledger is not None:
            vocabulary.write_ledger(work)
        for attempt in _attempts_before(out):
            _copy_ledger(attempt, work / attempt.name)
        manifest = {
            "format": FORMAT,
            "settings": asdict(settings),
            "vocabulary": tokenizer.vocabulary,
            "special_tokens": asdict(tokenizer.special),
            **totals,
            "tokenizer_sha256": _file_sha256(work / "tokenizer.json"),
            "tokenizer_from": vocabulary.origin,
            "clients_sha256": _file_sha256(work / "clients.arrow"),
        }
        (work / "store.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        work.rename(out)
        shutil.rmtree(_attempts_of(out), ignore_errors=True)  # they are in the store now
    except OSError as error:
        raise CorpusError(f"store {out} could not be written: {error}.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)
    return Store(out)


def _lock(folder: Path) -> int:
    """Lock a folder as long as this process lives, so that nobody takes it for a leftover."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _sweep(out: Path) -> None:
    """Remove what killed preparations of the same store left beside it."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}-*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # a living process has locked it
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _attempts_of(out: Path) -> Path:
    """Return the folder for ledgers of preparations of a store in which no word passed."""
    return out.with_name(f"{out.name}.attempts")


def _attempts_before(out: Path) -> list[Path]:
    return sorted(_attempts_of(out).glob(ATTEMPTS))


def _keep_attempt(out: Path, failed: NoVocabularyError) -> None:
    """Write down what a preparation cost in which no word passed; the next store counts it."""
    folder = _attempts_of(out)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        failed.write_ledger(folder)
        os.rename(folder / LEDGER, folder / ATTEMPTS.replace("*", secrets.token_hex(8)))
    except OSError as error:
        raise CorpusError(f"{failed} It could not be written down in {folder}: {error}.") from None


def _copy_ledger(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    os.chmod(target, 0o600)


def _write_arrow(path: Path, rows: Iterable[Row], dtype: DTypeLike) -> dict[str, int]:
    schema = _schema(dtype)
    names = ("clients", "train_clients", "test_clients", "train_tokens", "held_tokens")
    totals = dict.fromkeys(names, 0)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        waiting: list[Row] = []
        tokens = 0
        for row in rows:
            waiting.append(row)
            tokens += len(row["train"]) + len(row["held"])
            totals["clients"] += 1
            totals["train_clients"] += len(row["train"]) > 0
            totals["test_clients"] += bool(row["test"])
            totals["train_tokens"] += len(row["train"])
            totals["held_tokens"] += len(row["held"])
            if len(waiting) == CLIENTS_A_BATCH or tokens >= TOKENS_A_BATCH:
                writer.write_batch(_record_batch(waiting, schema))
                waiting, tokens = [], 0
        if waiting:
            writer.write_batch(_record_batch(waiting, schema))
    return totals


def _schema(dtype: DTypeLike) -> pa.Schema:
    token = pa.list_(pa.from_numpy_dtype(dtype))
    return pa.schema(
        {
            "client": pa.string(),
            "groups": pa.list_(pa.string()),
            "train": token,
            "held": token,
            "test": pa.bool_(),
            "held_bytes": pa.int64(),
        }
    )


def _record_batch(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if field.name in ("train", "held"):
            flat = _numbers(np.concatenate(values), field.type.value_type)
            columns.append(_lists([len(v) for v in values], flat))
        elif field.name == "groups":
            columns.append(_lists([len(v) for v in values], _strings(list(chain(*values)))))
        elif field.name == "client":
            columns.append(_strings(values))
        elif field.name == "test":
            bits = pa.py_buffer(np.packbits(values, bitorder="little"))
            columns.append(pa.Array.from_buffers(field.type, len(values), [None, bits]))
        else:
            columns.append(_numbers(np.array(values), field.type))
    return pa.record_batch(columns, schema=schema)


# Arrays of Arrow are made of buffers: `pa.array` would import pandas, which takes a third of a
# second.


def _numbers(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    values = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _offsets_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int32)


def _lists(sizes: list[int], flat: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(_numbers(_offsets_of(sizes), pa.int32()), flat)


def _strings(values: list[str]) -> pa.Array:
    raw = [value.encode() for value in values]
    buffers = [pa.py_buffer(_offsets_of([len(r) for r in raw])), pa.py_buffer(b"".join(raw))]
    return pa.Array.from_buffers(pa.string(), len(raw), [None, *buffers])


def _special_tokens(manifest: JsonObject) -> SpecialTokens:
    """Return the special tokens of a manifest, checked because a manifest may hold anything."""
    told = manifest["special_tokens"]
    made = SpecialTokens(**{**told, "reserved": tuple(told["reserved"])})
    numbers = [made.bos, made.eos, *made.reserved, *([] if made.oov is None else [made.oov])]
    if not all(type(n) is int and 0 <= n < manifest["vocabulary"] for n in numbers):
        raise ValueError("a token is not in the vocabulary")
    return made


def _origin(manifest: JsonObject) -> JsonObject:
    return check_origin(manifest["tokenizer_from"])


def _map(path: Path) -> mmap.mmap:
    """Map a file into memory, to be read and not to be changed."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """An open store: the tokens of every client, and the tokenizer that made them.

    Clients are numbered in the order in which they were written. `fedlm.prepare` makes a store;
    `Store(path)` opens one that `fedlm prepare` has made.

    Args:
      path: the folder of the store.

    Attributes:
      path: the folder of the store.
      manifest: the fields of its `store.json`: counts of clients and tokens, hashes, settings.

    Raises:
      CorpusError: the folder is no store, or it is damaged.

    >>> import fedlm
    >>> pairs = [("ann", "the cat sat"), ("bob", "the dog ran")]
    >>> store = fedlm.prepare(pairs, test_clients=0.0, validation=0.0)
    >>> len(store), store.client(0), store.train(0).size
    (2, 'ann', 4)
    >>> fedlm.Store(store.path).vocabulary == store.vocabulary
    True
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest = self._read_manifest()
        try:
            mapped = _map(self.path / "clients.arrow")
            self._files = [mapped]
            schema, self._batches = read_batches(pa.py_buffer(mapped))
            self._check_batches(schema)
        except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CorpusError(
                f"store {path}: clients.arrow is not readable ({reason}). Prepare it again."
            ) from None
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)]).tolist()
        if self._starts[-1] != self.manifest["clients"]:
            raise CorpusError(
                f"store {path}: clients.arrow holds {self._starts[-1]} clients, store.json says "
                f"{self.manifest['clients']}. Prepare it again."
            )

    def _check_batches(self, schema: pa.Schema) -> None:
        """Raise `ValueError` or an error of Arrow unless the columns can be read safely.

        Types, sizes of buffers, offsets and UTF-8 are checked; tokens are not touched.
        """
        wanted = _schema(tok.token_dtype(self.vocabulary))
        if not schema.equals(wanted):
            raise ValueError("its columns are not those of a store")
        for batch in self._batches:
            batch.validate(full=True)
            for column in batch.columns:
                inner = column.flatten() if pa.types.is_list(column.type) else column
                if column.null_count or inner.null_count or column.offset or inner.offset:
                    raise ValueError("a value is missing")

    def _read_manifest(self) -> JsonObject:
        file = self.path / "store.json"
        if not os.path.isfile(file):
            raise CorpusError(
                f"{self.path} is not a store: it has no store.json. Use fedlm prepare."
            )
        try:
            manifest: JsonObject = read_json(file, "it", CorpusError)
        except CorpusError as error:
            raise CorpusError(f"{file} is damaged ({error}) Prepare the store again.") from None
        if not isinstance(manifest, dict):
            raise CorpusError(f"{file} is damaged (not an object). Prepare the store again.")
        written = manifest.get("format")
        if written != FORMAT:
            raise CorpusError(
                f"store {self.path} has format {written}: this fedlm reads {FORMAT}. Prepare it "
                "again, with fedlm prepare."
            )
        self._check_manifest(file, manifest)
        for key, check in (("special_tokens", _special_tokens), ("tokenizer_from", _origin)):
            try:
                check(manifest)
            except (CorpusError, KeyError, TypeError, ValueError):
                raise CorpusError(f"{file} is damaged ({key}). Prepare the store again.") from None
        return manifest

    def _check_manifest(self, file: Path, manifest: JsonObject) -> None:
        unknown = {}
        if isinstance(manifest.get("settings"), dict):
            unknown = manifest["settings"].keys() - {f.name for f in fields(StoreSettings)}
        try:
            if unknown:
                raise CorpusError(f"settings.{sorted(unknown)[0]}")
            _MANIFEST.validate_json(json.dumps(manifest), strict=True)
        except (CorpusError, ValidationError) as error:
            where = error.errors()[0]["loc"] if isinstance(error, ValidationError) else (error,)
            place = ".".join(map(str, where))
            raise CorpusError(f"{file} is damaged ({place}). Prepare the store again.") from None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the tokenizer knows, special tokens included."""
        return int(self.manifest["vocabulary"])

    @property
    def settings(self) -> StoreSettings:
        """The settings that the store was prepared with."""
        return StoreSettings(**self.manifest["settings"])

    @cached_property
    def special(self) -> SpecialTokens:
        """The tokens of this store that are not text."""
        return _special_tokens(self.manifest)

    @property
    def tokens_sha256(self) -> str:
        """The hash of the tokenizer and its special tokens, which decide the meaning of a token."""
        told = [self.manifest[name] for name in ("tokenizer_sha256", "special_tokens")]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens of this store."""
        file = self.path / "tokenizer.json"
        if not file.is_file() or _file_sha256(file) != self.manifest["tokenizer_sha256"]:
            raise CorpusError(
                f"store {self.path}: tokenizer.json is not the one that made its tokens. "
                "Prepare the store again."
            )
        return TextTokenizer(load_library(file), self.special)

    @property
    def ledgers(self) -> tuple[Path, ...]:
        """The files that say what preparing this store cost its clients; none: nothing."""
        file, origin = self.path / LEDGER, self.manifest["tokenizer_from"]
        attempts = tuple(sorted(self.path.glob(ATTEMPTS)))
        if file.is_file():
            return (file, *attempts)
        if "private" in (origin["kind"], origin.get("of", {}).get("kind")):
            raise CorpusError(
                f"store {self.path} has no {LEDGER}: what its vocabulary cost the clients is not "
                "known. Bring the file back."
            )
        return attempts

    def _column(self, number: int, column: str) -> pa.Scalar:
        batch = bisect.bisect_right(self._starts, number) - 1
        return self._batches[batch].column(column)[number - self._starts[batch]]

    def train(self, number: int) -> np.ndarray:
        """Return the training tokens of a client as a view of the file, not a copy."""
        return self._tokens(number, "train")

    def held(self, number: int) -> np.ndarray:
        """Return the held-out tokens of a client as a view of the file, not a copy."""
        return self._tokens(number, "held")

    def _tokens(self, number: int, column: str) -> np.ndarray:
        batch = bisect.bisect_right(self._starts, number) - 1
        found, place = self._batches[batch], number - self._starts[batch]
        first, stop = _offsets(found, column)[place : place + 2]
        flat = found.column(column).values.buffers()[1]
        values = np.frombuffer(flat, tok.token_dtype(self.vocabulary), stop)[first:]
        if len(values) and values.max() >= self.vocabulary:
            raise CorpusError(
                f"store {self.path}: client {self.client(number)!r} has a token that is not in the "
                "vocabulary, so clients.arrow is damaged. Prepare the store again."
            )
        return values

    def held_bytes(self, number: int) -> int:
        """Return the size in bytes of a client's held-out text."""
        return int(self._column(number, "held_bytes").as_py())

    def client(self, number: int) -> str:
        """Return the name of a client."""
        return str(self._column(number, "client").as_py())

    def groups(self, number: int) -> tuple[str, ...]:
        """Return the names of a client's groups, the widest first."""
        return tuple(self._column(number, "groups").as_py())

    @cached_property
    def training_clients(self) -> np.ndarray:
        """The numbers of the clients that have training text."""
        return self._numbers(lambda batch: np.diff(_offsets(batch, "train")) > 0)

    @cached_property
    def test_clients(self) -> np.ndarray:
        """The numbers of the clients whose whole text is held out."""
        return self._numbers(_test_flags)

    def _numbers(self, chosen: Callable[[pa.RecordBatch], np.ndarray]) -> np.ndarray:
        """Return the numbers of the clients that are chosen, in half the memory of int64."""
        numbers, count = np.empty(len(self), np.int32), 0  # memory is taken when it is written
        for first, batch in zip(self._starts, self._batches, strict=False):
            found = np.flatnonzero(chosen(batch))
            numbers[count : count + len(found)] = found + first
            count += len(found)
        for file in self._files:  # every client was looked at: pages that are wanted come back
            file.madvise(mmap.MADV_DONTNEED)
        return numbers[:count]

    def verify(self) -> None:
        """Compare the clients with the hash in the manifest, which reads the whole file.

        It takes 1.7 s per GB, which is 500 million tokens, on a core of an AMD EPYC (Zen 3) if the
        file is in memory.
        """
        if _file_sha256(self.path / "clients.arrow") != self.manifest["clients_sha256"]:
            raise CorpusError(
                f"store {self.path}: clients.arrow is not what was written; it is damaged or was "
                "changed. Prepare the store again."
            )


# Read from buffers: the first `to_numpy` of a process imports pandas, which costs a third of a
# second and 50 MB.


def _offsets(batch: pa.RecordBatch, column: str) -> np.ndarray:
    """Return where the tokens of each client begin in a batch, and where those of the last end."""
    return np.frombuffer(batch.column(column).buffers()[1], np.int32, batch.num_rows + 1)


def _test_flags(batch: pa.RecordBatch) -> np.ndarray:
    """Return for each client of a batch whether its whole text is held out."""
    bits = np.frombuffer(batch.column("test").buffers()[1], np.uint8)
    return np.unpackbits(bits, count=batch.num_rows, bitorder="little")


def same_vocabulary(store: Store) -> Vocabulary:
    """Return the vocabulary of a store for a part of its clients, with what it cost them."""
    return Vocabulary(store.tokenizer, store.manifest["tokenizer_from"], _copier(store))


def vocabulary_like(store: Store) -> Vocabulary:
    """Return the vocabulary of a store for another text.

    The clients of the other text may be clients of the store, so the cost is theirs too.
    """
    origin = store.manifest["tokenizer_from"]
    if origin["kind"] != "like":
        origin = {"kind": "like", "store": store.path.resolve().name, "of": origin}
    return Vocabulary(store.tokenizer, origin, _copier(store))


def _copier(store: Store) -> Callable[[Path], None] | None:
    """Return a function that copies a store's ledgers, identifiers included, to another folder."""
    return ledger_copier(store.path) if store.ledgers else None


def ledger_copier(source: Path) -> Callable[[Path], None]:
    """Return a function that copies the ledgers in a folder to another folder."""

    def copy(folder: Path) -> None:
        for file in (*source.glob(LEDGER), *source.glob(ATTEMPTS)):
            _copy_ledger(file, folder / file.name)

    return copy
