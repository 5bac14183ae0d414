"""A tokenizer made elsewhere: a `tokenizer.json` of the `tokenizers` library.

In:       the path of the file; perhaps the names of its bos and eos tokens.
Out:      a `TextTokenizer`, or one sentence about the fault of the file.
Promise:  whatever is in the file, the library's panics included, ends in a tokenizer that encodes
          and decodes text, the same each time, or in a `CorpusError`.
Not here: encoding (`tokenizer.py`).

Special tokens are found in this order: the names that were given; `bos_token`, `eos_token` and
`unk_token` of a `tokenizer_config.json` or `special_tokens_map.json` beside the file; the usual
names among the file's own special tokens. Without a bos token, rows begin with eos.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, models

from fedlm.core.errors import CorpusError, library_errors
from fedlm.core.types import SpecialTokens
from fedlm.corpus.tokenizer import TextTokenizer

USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|im_start|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|endoftext|>"),
}
# Files that Hugging Face keeps beside a tokenizer; the first one that names a token decides.
SIBLINGS = ("tokenizer_config.json", "special_tokens_map.json")
FEWEST, MOST = 5, 1_000_000
LARGEST = 512 << 20  # bytes of a file: a million entries with their merges have far fewer
# Several scripts, a tab, and a sign beyond 16 bits.
TRIAL = "Hello, wörld 12 привет 日本\t🙂"


def load_tokenizer(path: Path, bos: str | None = None, eos: str | None = None) -> TextTokenizer:
    """Read a tokenizer file and find its special tokens; `bos` and `eos` are names of tokens."""
    library = load_library(path)
    numbers = library.get_vocab().values()
    size = max(numbers, default=-1) + 1
    if not FEWEST <= size <= MOST:
        raise CorpusError(
            f"tokenizer {path} has a vocabulary of {size} entries: expected between {FEWEST} and "
            f"{MOST:,}. Take another file."
        )
    gaps = set(range(size)) - set(numbers)
    return TextTokenizer(library, _special(path, library, {"bos": bos, "eos": eos}, gaps))


def load_library(path: Path) -> Tokenizer:
    """Read a tokenizer file as the library's object, which gives the same tokens each time."""
    try:
        text = _read(Path(path), f"tokenizer {path}").decode("utf-8")
    except OSError as error:
        raise CorpusError(f"tokenizer {path} is not readable: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CorpusError(f"tokenizer {path} is not a tokenizer.json: not valid UTF-8.") from None
    what = f"tokenizer {path} is not one that the tokenizers library can use"
    with (
        library_errors(what, "Save it again with Tokenizer.save, or take another file."),
        _silent(),
    ):
        library = _always_the_same(Tokenizer.from_str(text))
        library.decode(library.encode(TRIAL, add_special_tokens=False).ids)
    return library


def _read(path: Path, what: str) -> bytes:
    """Return the bytes of a regular file: a pipe would be waited for, a device has no end."""
    if path.exists() and not path.is_file():
        raise CorpusError(f"{what} is no regular file: expected a tokenizer.json.")
    if path.stat().st_size > LARGEST:
        raise CorpusError(f"{what} is larger than {LARGEST >> 20} MiB: it is something else.")
    return path.read_bytes()


def write_tokenizer(tokenizer: TextTokenizer, folder: Path) -> Path:
    """Write `tokenizer.json` and the names of its special tokens beside it; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer.library.save(str(file))
    (folder / SIBLINGS[1]).write_bytes(special_tokens_map(tokenizer))
    return file


def special_tokens_map(tokenizer: TextTokenizer) -> bytes:
    """Return the special tokens as Hugging Face's JSON, to be kept beside the tokenizer file."""
    special = tokenizer.special
    named = {"bos_token": special.bos, "eos_token": special.eos, "unk_token": special.oov}
    names = {
        name: None if number is None else tokenizer.library.id_to_token(number)
        for name, number in named.items()
    }
    return (json.dumps(names, indent=2, ensure_ascii=False) + "\n").encode()


def _always_the_same(library: Tokenizer) -> Tokenizer:
    """Switch off truncation, padding and dropout, so that the same text gives the same tokens."""
    library.no_padding()
    library.no_truncation()
    if getattr(library.model, "dropout", None) is not None:
        library.model.dropout = None
    return library


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence stderr, so that a panic of the library does not print its stack."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _special(
    path: Path, library: Tokenizer, given: dict[str, str | None], gaps: set[int]
) -> SpecialTokens:
    """Find the special tokens; numbers without a token are reserved as well."""
    own = {n: t.content for n, t in library.get_added_tokens_decoder().items() if t.special}
    names = {role: _first(usual, own.values()) for role, usual in USUAL.items()}
    names |= _beside(path)
    names |= {role: name for role, name in given.items() if name is not None}
    bos, eos = (_number(path, library, role, names[role]) for role in ("bos", "eos"))
    if eos is None:
        known = ", ".join(sorted(own.values())[:8]) or "none"
        raise CorpusError(
            f"tokenizer {path} does not say which token ends a line (its special tokens: {known}). "
            "Name it with fedlm prepare --eos TOKEN, and --bos TOKEN if another one begins a text."
        )
    bos = eos if bos is None else bos
    oov = _unknown(library, names.get("unk"))
    oov = None if oov in (bos, eos) else oov
    reserved = {number for number in (bos, eos, oov, *own, *gaps) if number is not None}
    return SpecialTokens(bos=bos, eos=eos, oov=oov, reserved=tuple(sorted(reserved)))


def _first(names: Iterable[str], known: Collection[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _number(path: Path, library: Tokenizer, role: str, name: str | None) -> int | None:
    """Return the number of the token with a role, or None if no token has the role."""
    if name is None:
        return None
    number: int | None = library.token_to_id(name)
    if number is None:
        raise CorpusError(
            f"tokenizer {path} has no token {name!r}, which is said to be its {role} token. Name "
            f"one of its tokens with fedlm prepare --{role} TOKEN."
        )
    return number


def _beside(path: Path) -> dict[str, str | None]:
    """Read token names from the files beside a tokenizer; None: a file says there is none."""
    found: dict[str, str | None] = {}
    for sibling in SIBLINGS:
        file = path.parent / sibling
        if not file.is_file():
            continue
        try:
            told = json.loads(_read(file, f"{file}, beside tokenizer {path},"))
        except (OSError, ValueError, RecursionError) as error:
            raise CorpusError(f"{file}, beside tokenizer {path}, is not JSON ({error}).") from None
        for role in ("bos", "eos", "unk"):
            if isinstance(told, dict) and f"{role}_token" in told:
                value = told[f"{role}_token"]
                content = value.get("content") if isinstance(value, dict) else value
                found.setdefault(role, content if isinstance(content, str) else None)
    return found


def _unknown(library: Tokenizer, name: str | None) -> int | None:
    """Return the number of the token for unknown text, or None if there is no such token."""
    if isinstance(library.model, models.Unigram):  # its number is only in the JSON
        number: int | None = json.loads(library.to_str())["model"]["unk_id"]
        return number
    name = name or getattr(library.model, "unk_token", None)
    return None if name is None else library.token_to_id(name)
