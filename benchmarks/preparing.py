"""How fast text becomes a store: `python -m benchmarks.preparing SOURCE [--tokenizer words bpe]`.

The stages of `fedlm prepare` on one core, in CPU seconds per megabyte of text, which hardly know
what else the machine does. *First* is the text as it is, in which most pieces between blanks are
new; *again* encodes the same text once more, as the rest of a larger corpus would be.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core: what a megabyte costs

from fedlm.corpus import store as stores
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.sources import read

T = TypeVar("T")
HEAD = ["tokenizer", "MB", "clients", "read", "split", "vocabulary", "encode, first"]
HEAD += ["encode, again", "write", "in all", "MB/s of a core"]


def stages(source: str, kind: str, vocabulary: int) -> list[str]:
    """Prepare a source stage by stage; return a row of the table."""
    spent: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        made = work()
        spent[name] = time.process_time() - began
        return made

    settings = stores.StoreSettings(tokenizer=kind, vocabulary=vocabulary)
    clients = timed("read", lambda: stores.gather_clients(read(source)))
    megabytes = sum(len(client.text.encode()) for client in clients) / 1e6
    test, parts = timed("split", lambda: stores._split(clients, settings))
    texts = [train for train, _ in parts if train]
    made = timed("vocabulary", lambda: stores._counted(texts, settings))
    dtype = tok.token_dtype(made.tokenizer.vocabulary)

    def encode() -> list[Any]:
        return [[tok.encode(made.tokenizer, text, dtype) for text in pair] for pair in parts]

    coded = timed("first", encode)
    timed("again", encode)
    rows = (
        {"client": c.client, "groups": list(c.groups), "train": train, "held": held,
         "test": c.client in test, "held_bytes": 0}
        for c, (train, held) in zip(clients, coded, strict=True)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "store"
        timed("write", lambda: stores.write_tokens(rows, out, made, settings, dtype))
    whole = sum(seconds for name, seconds in spent.items() if name != "again")
    each = (f"{seconds / megabytes:.3f}" for seconds in spent.values())
    cells = [kind, f"{megabytes:.1f}", f"{len(clients):,}", *each]
    return [*cells, f"{whole / megabytes:.3f}", f"{megabytes / whole:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--tokenizer", nargs="+", default=["words", "bpe"], choices=tok.KINDS)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/preparing.md"))
    asked = parser.parse_args()
    rows = [stages(asked.source, kind, asked.vocabulary) for kind in asked.tokenizer]
    table = "\n".join("| " + " | ".join(r) + " |" for r in [HEAD, ["---"] * len(HEAD), *rows])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
