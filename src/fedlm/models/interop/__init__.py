"""Models made elsewhere: a Hugging Face folder or a GGUF file.

In:       a path.
Out:      architecture and sizes of the model there, and the model itself.
Promise:  one line in `READERS` adds a kind of file.
Not here: how each kind is read (one file each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedlm.core.types import Params
from fedlm.models.catalog import Dimensions
from fedlm.models.interop import gguf, huggingface
from fedlm.models.interop.huggingface import Base


@dataclass(frozen=True)
class BaseReader:
    """How a kind of file is recognised and read."""

    fits: Callable[[Path], bool]
    base: Callable[[Path], Base]
    load: Callable[[Path, Dimensions], Params]


READERS = (
    BaseReader(
        lambda path: (path / huggingface.CONFIG).is_file(),
        huggingface.read_base,
        huggingface.load,
    ),
    BaseReader(lambda path: path.suffix == gguf.SUFFIX, gguf.read_base, gguf.load),
)


def reader_of(path: Path) -> BaseReader | None:
    """Return the reader of a model made elsewhere; None if there is no such model at the path."""
    return next((reader for reader in READERS if reader.fits(path)), None)
