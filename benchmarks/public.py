"""A start from public text: some groups of a corpus are public, and a model learns from them first.

In:       a recipe whose `data.groups` are public (years of `irc-ubuntu`); a folder.
Out:      public and private text as files of their own; a run on the public part.
Promise:  vocabulary and start of what trains on the private part come from public text alone;
          what is there is not made again, and two commands at once make it once.
Not here: what is compared (`bandwidth.py`, `comparison.py`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.cells import claimed
from fedlm.core.durable import write_atomically
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe
from fedlm.record.directory import RunDirectory
from fedlm.search.sweep import train_point
from fedlm.training import Watcher


def divide(recipe: Recipe, out: Path) -> tuple[Path, Path]:
    """Write the public and the private text as files of their own, once; return both."""
    public, private = out / "public.jsonl", out / "private.jsonl"
    with claimed(out, wait=True):
        if not (public.is_file() and private.is_file()):
            groups = set(recipe.data.groups)
            parts: dict[bool, list[str]] = {True: [], False: []}
            with gzip.open(str(recipe.data.source), "rt", encoding="utf8") as text:
                for line in text:
                    parts[not groups.isdisjoint(json.loads(line)["groups"])].append(line)
            write_atomically(private, "".join(parts[False]).encode())
            write_atomically(public, "".join(parts[True]).encode())
    return public, private


def train(recipe: Recipe, path: Path, stores: Path, watch: Callable[[], Watcher]) -> None:
    """Train on public text, pooled, or go on with it; nothing happens if it has ended."""
    with claimed(path.parent, wait=True):
        if not RunDirectory(path).summary.is_file():
            train_point(build(recipe, stores, out=path, pooled=True), watch())


def begun_from(run: Path, private: Path, *, weights: bool = True) -> tuple[str, ...]:
    """Return the settings of a run on private text that begins where a public one ended.

    Without `weights` it has the vocabulary of the public run, and a fresh model.
    """
    tokenizer = f"data.tokenizer={(run / 'tokenizer.json').resolve()}"
    start = (f"model.init_from={run.resolve()}",) if weights else ()
    return (f"data.source={private.resolve()}", "data.groups=[]", tokenizer, *start)
