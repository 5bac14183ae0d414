"""A search for people's text in a folder of files.

What it does. Every file below a folder is read as it lies, deleted pages of databases included;
every cell of an SQLite database is read once more in one piece, because long ones are scattered
over pages; whatever inflates (zlib, gzip) at any place of either is inflated and read too, up to
`MOST_DEFLATED` bytes from there. In all
of that it looks for

* text: every run of `PHRASE` bytes of a text that reaches over a blank, as UTF-8, UTF-16, JSON with
  escapes, hexadecimal and base64 at its three offsets, each also in small letters; and single words
  that are given;
* token numbers: every run of `TOKENS` numbers of a client, as integers of 8, 16, 32 and 64 bits and
  as floats of 32 and 64, either byte order, at any offset; as varints; as decimals with the usual
  separators;
* rows of numbers, such as those of an embedding: every run of `FLOATS` numbers, as float32 and
  float64 of either byte order, float16 and bfloat16, at any offset.

What it cannot find: what was encrypted, coded otherwise or mixed with something else. Numbers
computed from text, as parameters after noise was added, are no text to it.
"""

import base64
import gzip
import json
import sqlite3
import zlib

import numpy as np

PHRASE, TOKENS, FLOATS = 14, 6, 6
MOST_DEFLATED, MOST_INFLATED = 1 << 16, 1 << 22
ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda", b"\x1f\x8b\x08")
INTEGERS = [f"{order}{kind}" for order in "<>" for kind in ("u1", "u2", "u4", "u8", "f4", "f8")]
HASH = np.uint64(0x9E3779B97F4A7C15)


def contents(folder):
    """Yields (where, bytes) of everything below a folder, in all the ways it is read."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield str(path), data
        yield from ((f"{path} inflated", part) for part in inflated(data))
        if data.startswith(b"SQLite format 3"):
            cells = b"\0".join(cells_of(path))
            yield f"{path} cells", cells
            yield from ((f"{path} cells inflated", part) for part in inflated(cells))


def cells_of(path):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as base:
        for (table,) in base.execute("select name from sqlite_master where type = 'table'"):
            for row in base.execute(f'select * from "{table}"'):
                for cell in row:
                    if isinstance(cell, (bytes, str)):
                        yield cell if isinstance(cell, bytes) else cell.encode()


def inflated(data):
    """Whatever inflates to more than a few bytes."""
    for head in ZLIB:
        at = data.find(head)
        while at >= 0:
            kind = zlib.MAX_WBITS | 16 if head[0] == 0x1F else zlib.MAX_WBITS
            try:
                part = zlib.decompressobj(kind).decompress(
                    data[at : at + MOST_DEFLATED], MOST_INFLATED
                )
            except zlib.error:
                part = b""
            if len(part) > 16:
                yield part
            at = data.find(head, at + 1)


class Runs:
    """All runs of `size` numbers of some sequences, to be found in any file."""

    def __init__(self, size):
        self.size, self.known = size, {}
        # By place in a run: the hashes of numbers that stand there, in 16 bits. Most of any file is
        # passed over by the first two.
        self.there = np.zeros((size, 1 << 16), bool)

    def add(self, values, what, keep=lambda run: True):
        values = np.ascontiguousarray(values)
        if len(values) < self.size:
            return
        words, places = mixed(values), np.arange(len(values) - self.size + 1)
        runs = np.lib.stride_tricks.sliding_window_view(values, self.size)
        kept = np.array([keep(run) for run in runs], bool)
        for place in range(self.size):
            self.there[place, words[places[kept] + place] >> np.uint64(48)] = True
        hashes = hashed(words, places, self.size)
        for value, at in zip(hashes[kept].tolist(), places[kept].tolist(), strict=True):
            self.known.setdefault(value, (runs[at].tobytes(), what))

    def find(self, values):
        """Yields (what, place) of each known run in an array."""
        if len(values) < self.size or not self.known:
            return
        words = mixed(values)
        short = (words >> np.uint64(48)).astype(np.uint16)
        at = np.flatnonzero(self.there[0, short[: len(values) - self.size + 1]])
        for place in range(1, self.size):
            at = at[self.there[place, short[at + place]]]
        for value, place in zip(hashed(words, at, self.size).tolist(), at.tolist(), strict=True):
            run, what = self.known.get(value, (b"", ""))
            if values[place : place + self.size].tobytes() == run:
                yield what, place


def mixed(values):
    """A hash of each value, which is of one of the unsigned types."""
    with np.errstate(over="ignore"):
        words = (values.astype(np.uint64) + np.uint64(1)) * HASH
        return words ^ (words >> np.uint64(29))


def hashed(words, places, size):
    """A hash of the run of `size` values at each place."""
    total = np.zeros(len(places), np.uint64)
    with np.errstate(over="ignore"):
        for place in range(size):
            total = total * np.uint64(1_000_003) + words[places + place]
    return total


def views(data, kind):
    """The array of a type that bytes may be, at each offset."""
    size = np.dtype(kind).itemsize
    for offset in range(size):
        count = (len(data) - offset) // size
        if count > 0:
            yield offset, np.frombuffer(data, kind, count, offset)


def several(distinct):
    """Runs of more values than this: such as zeros, or the numbers of pages, are in every file."""
    return lambda run: len(np.unique(run)) > distinct


def _over_a_blank(run):
    return ord(" ") in run[2:-2]


class Search:
    """What is looked for."""

    def __init__(self):
        self.bytes, self.tokens, self.words = {}, Runs(TOKENS), {}
        self.rows = {2: Runs(FLOATS), 4: Runs(FLOATS), 8: Runs(FLOATS)}

    def _as_bytes(self, data, what, size, keep=lambda run: True):
        runs = self.bytes.setdefault(size, Runs(size))
        runs.add(np.frombuffer(data, np.uint8), what, keep)

    def text(self, text, what):
        for form in {text, text.lower()}:
            raw = form.encode()
            self._as_bytes(raw, what, PHRASE, _over_a_blank)
            wide = form.encode("utf-16-le")
            self._as_bytes(wide, f"{what} in UTF-16", 2 * PHRASE, _over_a_blank)
            escaped = json.dumps(form).encode()
            self._as_bytes(escaped, f"{what} in JSON", PHRASE, _over_a_blank)
            self._as_bytes(raw.hex().encode(), f"{what} in hexadecimal", 2 * PHRASE)
            for offset in range(3):
                coded = base64.b64encode(raw[offset:]).rstrip(b"=")
                self._as_bytes(coded, f"{what} in base64", 20)

    def word(self, word):
        for form in {word, word.lower()}:
            for coded in (form.encode(), form.encode("utf-16-le"), json.dumps(form)[1:-1].encode()):
                self.words[coded] = f"the word {word!r}"

    def numbers(self, tokens, what, distinct=2):
        tokens = np.asarray(tokens, np.uint64)
        self.tokens.add(tokens, what, several(distinct))
        for joint in (",", ", ", " ", "\n"):
            said = joint.join(map(str, tokens.tolist())).encode()
            self._as_bytes(said, f"{what} as decimals", 24, several(distinct + len(joint)))
        coded = b"".join(map(varint, tokens.tolist()))
        self._as_bytes(coded, f"{what} as varints", 10, several(distinct))

    def packed(self, data, what, distinct=4):
        """Looks for numbers in the form in which a codec packs them."""
        self._as_bytes(data, f"{what}, packed", 24, several(distinct))

    def row(self, values, what):
        values = np.asarray(values, np.float32)
        as_bfloat = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        for bits in (
            values.view(np.uint32),
            values.astype(np.float64).view(np.uint64),
            values.astype(np.float16).view(np.uint16),
            as_bfloat,
        ):
            if len(np.unique(bits)) > 2:  # rows of zeros are in every file
                self.rows[bits.itemsize].add(bits, what)

    def leaks(self, folder):
        """Everything that is found, as sentences."""
        return sorted(
            {f"{what} in {where}" for where, data in contents(folder) for what in self._in(data)}
        )

    def _in(self, data):
        yield from (what for word, what in self.words.items() if word in data)
        plain = np.frombuffer(data, np.uint8)
        for runs in self.bytes.values():
            yield from (what for what, _ in runs.find(plain))
        for kind in INTEGERS:
            for _, found in views(data, kind):
                if "f" in kind:
                    with np.errstate(invalid="ignore"):
                        found = np.nan_to_num(found.astype(np.float64), nan=-1, posinf=-1)
                    whole = (found >= 0) & (found < 1 << 32) & (found == np.floor(found))
                    found = np.where(whole, found, (1 << 32) - 1)
                yield from (
                    f"{what} as {kind}" for what, _ in self.tokens.find(found.astype(np.uint64))
                )
        for order in "<>":
            for size, runs in self.rows.items():
                for _, found in views(data, f"{order}u{size}"):
                    native = found.astype(f"=u{size}")
                    yield from (f"{what} in {8 * size} bits" for what, _ in runs.find(native))


def varint(value):
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def planted(folder, data, how):
    """A file with a leak in it."""
    kept = b"something before it " + data + b" and after it"
    if how == "gzip":
        kept = b"head" + gzip.compress(kept)
    if how == "sqlite":
        with sqlite3.connect(folder / "leak.db") as base:
            base.execute("create table t (x blob)")
            base.execute("insert into t values (?)", (b"x" * 10_000 + kept,))
        base.close()
        return
    (folder / "leak").write_bytes(kept)
