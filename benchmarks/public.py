"""A start from public text: some groups of a corpus are public, and a model learns from them first.

In:       a recipe whose `data.groups` are public (years of `irc-ubuntu`); a folder.
Out:      public and private text as files of their own; a run on the public part.
Promise:  vocabulary and start of what trains on the private part come from public text alone;
          what is there is not made again, and two commands at once make it once.
Not here: what is compared (`bandwidth.py`, `comparison.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.cells import claimed, facts_digest
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError
from fedlm.corpus import sources
from fedlm.corpus.tokenizer_file import load_tokenizer
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe
from fedlm.record.directory import RunDirectory
from fedlm.search.sweep import FAILED, train_point
from fedlm.training import Watcher


def divide(recipe: Recipe, out: Path) -> tuple[Path, Path]:
    """Write the public and the private text as files of their own, once; return both.

    Text of other groups, or of another source, has a folder of its own.
    """
    asked = {"source": Path(str(recipe.data.source)).name, "groups": sorted(recipe.data.groups)}
    folder = out / f"text-{facts_digest(asked)}"
    public, private = folder / "public.jsonl", folder / "private.jsonl"
    with claimed(folder, wait=True):
        if not (public.is_file() and private.is_file()):
            parts: dict[bool, list[str]] = {True: [], False: []}
            for text in sources.read(str(recipe.data.source)):
                line = json.dumps(text._asdict(), ensure_ascii=False)
                parts[not set(asked["groups"]).isdisjoint(text.groups)].append(line + "\n")
            for file, lines in ((public, parts[True]), (private, parts[False])):
                if not lines:
                    raise ConfigError(f"{asked['source']}: no client for {file.name}, {asked}.")
                write_atomically(file, "".join(lines).encode())
    return public, private


def train(recipe: Recipe, path: Path, stores: Path, watch: Callable[[], Watcher]) -> None:
    """Train on public text, pooled, or go on with it; nothing happens if it has ended."""
    with claimed(path.parent, wait=True):
        if not (RunDirectory(path).summary.is_file() or (path / FAILED).is_file()):
            train_point(build(recipe, stores, out=path, pooled=True), watch())
    if (path / FAILED).is_file():
        raise ConfigError(f"{path}: training on public text diverged. Lower its learning rate.")


def begun_from(run: Path, private: Path, *, weights: bool = True) -> tuple[str, ...]:
    """Return the settings of a run on private text that begins where a public one ended.

    Without `weights` it has the vocabulary of the public run, and a fresh model.
    """
    tokenizer = (run / "tokenizer.json").resolve()
    words = load_tokenizer(tokenizer).vocabulary
    return (
        *(f"data.source={private.resolve()}", "data.groups=[]"),
        *(f"data.tokenizer={tokenizer}", f"data.vocabulary={words}"),
        *((f"model.init_from={run.resolve()}",) if weights else ()),
    )
